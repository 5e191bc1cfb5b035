"""Load for a server: `python -m benchmarks.load URL --clients 64 --seconds 4`. Prints one JSON object.

Each client has one request at a time. The frames are made beforehand and the replies are hardly looked at, so that the
generator takes little of the cores that it shares with the server; it has no torch and no websockets.
"""

import argparse
import asyncio
import base64
import json
import os
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from cebm.serving.protocol import pack, unpack

OBS, ACT = 10, 2


class Asking(asyncio.Protocol):
    """One client: from its handshake until `until`, which its owner sets when all of them have a connection."""

    def __init__(self, place: str, frame: bytes, owner: "Load") -> None:
        self._place, self._frame, self._owner = place, frame, owner
        self._rest, self._open, self._began = b"", False, 0.0
        self.times: list[float] = []
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets its value when the server has greeted this client."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets its value when the last reply is there."""

    def connection_made(self, transport: Any) -> None:
        """Asks for the websocket."""
        self._transport = transport
        key = base64.b64encode(os.urandom(16)).decode()
        words = ["GET / HTTP/1.1", f"Host: {self._place}", "Upgrade: websocket", "Connection: Upgrade"]
        words += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
        transport.write("\r\n".join(words).encode())

    def ask(self) -> None:
        """Sends the request."""
        self._began = perf_counter()
        self._transport.write(self._frame)

    def data_received(self, data: bytes) -> None:
        """A reply, or parts of one."""
        self._rest += data
        if not self._open:
            head, found, rest = self._rest.partition(b"\r\n\r\n")
            if not found:
                return
            if b" 101 " not in head:
                raise RuntimeError(head.decode("latin-1"))
            self._open, self._rest = True, rest
        while len(self._rest) >= 4:
            size, begin = self._rest[1], 2
            if size == 126:
                size, begin = int.from_bytes(self._rest[2:4], "big"), 4
            if size == 127 or len(self._rest) < begin + size:
                return
            code, body = self._rest[0], self._rest[begin : begin + size]
            self._rest = self._rest[begin + size :]
            if code == 0x82:
                self._replied(body)
            elif code != 0x89:  # a ping
                raise RuntimeError(f"a frame of type {code:#x}: {body!r}")

    def _replied(self, body: bytes) -> None:
        if not self.ready.done():
            self.ready.set_result(None)
            return
        now = perf_counter()
        self.times.append((now - self._began) * 1e3)
        if now < self._owner.until:
            self.ask()
        elif unpack(body)["actions"].shape != (1, ACT):
            raise RuntimeError("a wrong answer")
        else:
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """The server, or a fault of ours, ended the connection."""
        for future in (self.ready, self.done):
            if not future.done():
                future.set_exception(error or ConnectionError("the server ended a connection"))


class Load:
    """All clients of one run."""

    def __init__(self) -> None:
        self.until = 0.0
        """No client asks again after this."""

    async def run(self, url: str, clients: int, seconds: float, seeded: bool) -> dict[str, Any]:
        """What the clients saw."""
        place = urlsplit(url)
        host, port = place.hostname or "127.0.0.1", place.port or 80
        loop = asyncio.get_running_loop()
        asking = []
        for i in range(clients):
            made = partial(Asking, place.netloc, masked(request(i, seeded)), self)
            asking.append((await loop.create_connection(made, host, port))[1])
        await asyncio.gather(*(each.ready for each in asking))
        began = perf_counter()
        self.until = began + seconds
        for each in asking:
            each.ask()
        await asyncio.gather(*(each.done for each in asking))
        took = perf_counter() - began
        counts = [len(each.times) for each in asking]
        p50, p99 = np.percentile(np.concatenate([each.times for each in asking]), [50, 99])
        shares = max(counts) / min(counts)
        return {"served": sum(counts) / took, "p50_ms": float(p50), "p99_ms": float(p99), "shares": shares}


def request(i: int, seeded: bool) -> bytes:
    """Client `i`'s request; `seeded`: its actions are drawn anew each time."""
    obs = np.random.default_rng(i).uniform(-1, 1, OBS).astype(np.float32)
    return pack({"obs": obs} if seeded else {"obs": obs, "cebm": {"seed": None}})


def masked(payload: bytes) -> bytes:
    """A websocket's frame of a client, masked with zeros."""
    size = bytes([0x80 + len(payload)]) if len(payload) < 126 else b"\xfe" + len(payload).to_bytes(2, "big")
    return b"\x82" + size + bytes(4) + payload


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--same", action="store_true", help="requests whose actions are not drawn anew")
    parsed = parser.parse_args(arguments)
    print(json.dumps(asyncio.run(Load().run(parsed.url, parsed.clients, parsed.seconds, not parsed.same))))


if __name__ == "__main__":
    main()
