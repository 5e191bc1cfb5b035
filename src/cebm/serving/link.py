"""Between the two processes of a server: messages over a pair of sockets, each with its length before it."""

import selectors
import socket
import struct
import threading
from typing import Any

from cebm.serving.protocol import decode, pack

LENGTH = struct.Struct(">I")


def framed(*message: Any) -> bytes:
    """A message as it is sent: a list of its kind and its values."""
    body = pack(message)
    return LENGTH.pack(len(body)) + body


class Messages:
    """Cuts bytes that arrive in any pieces into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def cut(self, data: bytes) -> list[list[Any]]:
        """The messages that are whole now."""
        self._rest += data
        found, place = [], 0
        while len(self._rest) >= place + LENGTH.size:
            begin = place + LENGTH.size
            end = begin + LENGTH.unpack_from(self._rest, place)[0]
            if len(self._rest) < end:
                break
            found.append(decode(bytes(self._rest[begin:end])))
            place = end
        del self._rest[:place]
        return found


class Link:
    """The end that threads use."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._messages, self._lock = end, Messages(), threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(end, selectors.EVENT_READ)

    def send(self, *message: Any) -> None:
        """Sends a message; nothing where the other process has ended, which `received` finds out."""
        data = framed(*message)
        with self._lock:
            try:
                self._end.sendall(data)
            except OSError:
                return

    def received(self, timeout: float) -> list[list[Any]] | None:
        """The messages that have arrived, after a wait of at most `timeout` seconds; None: the other process ended."""
        if not self._selector.select(timeout):
            return []
        try:
            data = self._end.recv(2**18)
        except OSError:
            data = b""
        return self._messages.cut(data) if data else None

    def close(self) -> None:
        """The other process learns that this one has ended."""
        self._selector.close()
        self._end.close()
