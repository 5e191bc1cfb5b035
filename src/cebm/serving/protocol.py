"""What goes over the wire: openpi's format, and the reasons for which a frame is refused.

A frame is one msgpack map. An array in it is a map with byte keys, `{b"__ndarray__": True, b"data": bytes, b"dtype":
"<f4", b"shape": [..]}`. Nothing is unpickled, and a frame is walked through once before anything is made of it: its
nesting, its number of values and every length are known to be small when msgpack starts to allocate.
"""

import json
import secrets
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

import msgpack
import numpy as np

KINDS: dict[str, str] = {
    "text-frame": "The frame is text; requests are binary.",
    "not-msgpack": "The frame is no msgpack: truncated, with bytes left over, or with a type that is not allowed.",
    "too-deep": "Maps and arrays are nested more than 6 deep.",
    "too-many-values": "The frame holds more than 4,096 values beside the contents of arrays.",
    "bad-array": "An array lacks its data, dtype or shape, or the shape does not fit the data.",
    "bad-dtype": "An array's dtype is not one of booleans, integers and floats of at most 8 bytes.",
    "bad-request": "The request is not a map, or has an unknown key or a value of the wrong type.",
    "bad-observation": "A part of the observation is missing or unknown, or has the wrong shape.",
    "not-finite": "The observation, the history or the last action has NaN or infinite values.",
    "too-much-effort": "More rows, candidates or steps are asked for than the server allows.",
    "deadline": "The time that the request gave was over before an answer could be ready.",
    "busy": "The queue is full. Try again.",
    "too-fast": "The client sends more requests per second than the server allows.",
    "policy-refused": "The policy refuses the observation or the effort; the message is the policy's own.",
    "abstained": "The policy has no action that it may give here, as its constraints leave none; the message says why.",
    "policy-failed": "The policy raised an error, or gave no finite actions. The server's log has the details.",
    "policy-hung": "The policy took too long, and its worker was replaced.",
    "no-worker": "Too many workers hang, and the server cannot act until one of them returns.",
    "stopping": "The server is shutting down.",
    "internal": "A fault of the server. Its log has the details, under the same id.",
    "unauthorised": "The token is missing or wrong (HTTP 401).",
    "foreign-origin": "The request comes from a web page (it has an Origin header; HTTP 403).",
    "too-many-connections": "As many clients are connected as the server allows (HTTP 503).",
    "not-found": "There is no such address; there are /, /healthz and /metrics (HTTP 404).",
    "frame-too-large": "The frame is over the limit; the connection is closed with code 1009.",
    "too-many-errors": "Too many bad requests in a row; the connection is closed with code 1008.",
    "idle": "Nothing was asked for too long; the connection is closed with code 1001.",
    "slow-reader": "The client does not read its replies; the connection is dropped.",
}
"""Every reason for which a request or a connection is refused."""

MOST_DEPTH, MOST_VALUES, MOST_AXES = 6, 4096, 8
DTYPES = {
    f"{order}{kind}{size}": np.dtype(f"{order}{kind}{size}")
    for kind, sizes in (("b", "1"), ("i", "1248"), ("u", "1248"), ("f", "248"))
    for size in sizes
    for order in "<>|="
}
"""All dtypes that an array may have, by the text that names them: numpy never parses what a client wrote."""


class Refused(ValueError):
    """A request that is not served. `kind` is one of `KINDS`."""

    def __init__(self, kind: str, message: str) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        super().__init__(one_line(message))
        self.kind = kind
        self.id = ""
        """Under which the log has it already."""


def new_id() -> str:
    """Names one error, for its client and for the log."""
    return secrets.token_hex(4)


def one_line(text: object, most: int = 300) -> str:
    """The text without line breaks and control characters, at most `most` characters of it."""
    words = " ".join("".join(c if c.isprintable() else " " for c in str(text)[: 4 * most]).split())
    return words if len(words) <= most else words[: most - 1] + "…"


def quoted(value: Any) -> str:
    """A client's own word for a message, short and in ASCII."""
    return one_line(ascii(value[:40] if isinstance(value, str | bytes) else type(value).__name__), 60)


# ---------------------------------------------------------------------------------------------- before decoding

_OWN_BYTES = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8}
_OWN_BYTES |= {0xCC + i: 1 << i for i in range(4)} | {0xD0 + i: 1 << i for i in range(4)}
_OWN_BYTES |= dict.fromkeys((*range(128), *range(224, 256)), 0)
_OWN_BYTES |= {0xA0 + i: i for i in range(0x20)}
_SKIPPED = [None if code not in _OWN_BYTES else 1 + _OWN_BYTES[code] for code in range(256)]
"""Bytes of a value without inner ones whose length its first byte tells."""
_LENGTH_BYTES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_COUNT_BYTES = {0xDC: (">H", 1), 0xDD: (">I", 1), 0xDE: (">H", 2), 0xDF: (">I", 2)}


def scan(frame: bytes) -> None:
    """Walks through a frame by its headers and makes nothing. Refuses what is truncated, nested too deep, of too many
    values, or of extension types."""
    place, seen, left, end = 0, 0, 1, len(frame)
    outer: list[int] = []  # values that are missing of the maps and lists around this one
    while left or outer:
        if not left:
            left = outer.pop()
            continue
        left -= 1
        seen += 1
        if seen > MOST_VALUES:
            raise Refused("too-many-values", f"the frame has more than {MOST_VALUES} values")
        try:
            skipped, inside = _SKIPPED[frame[place]], 0
            if skipped is None:
                place, inside = _header(frame, place)
            else:
                place += skipped
        except (IndexError, struct.error) as error:
            raise Refused("not-msgpack", f"the frame ends within a value, at byte {end}") from error
        if place > end or inside > end - place:
            raise Refused("not-msgpack", f"the frame ends within a value, at byte {end}")
        if inside:
            if len(outer) >= MOST_DEPTH:
                raise Refused("too-deep", f"the frame is nested more than {MOST_DEPTH} deep")
            outer.append(left)
            left = inside
    if place != end:
        raise Refused("not-msgpack", f"{len(frame) - place} bytes are left over behind the frame's value")


def _header(frame: bytes, place: int) -> tuple[int, int]:
    """Where the value at `place` ends, or its first inner one begins; and how many inner ones it has. For those that
    tell no length by their first byte alone."""
    code = frame[place]
    place += 1
    if 0x80 <= code <= 0x8F:
        return place, 2 * (code & 0x0F)
    if 0x90 <= code <= 0x9F:
        return place, code & 0x0F
    if code in _LENGTH_BYTES:
        form = _LENGTH_BYTES[code]
        return place + struct.calcsize(form) + struct.unpack_from(form, frame, place)[0], 0
    if code in _COUNT_BYTES:
        form, times = _COUNT_BYTES[code]
        return place + struct.calcsize(form), times * struct.unpack_from(form, frame, place)[0]
    raise Refused("not-msgpack", f"byte {place - 1} begins a value of a type that is not allowed (0x{code:02x})")


# ---------------------------------------------------------------------------------------------- the codec


def pack(values: Any) -> bytes:
    """A frame. Arrays and numpy's numbers are written as openpi writes them."""
    return msgpack.packb(values, default=_packed)


def unpack(frame: bytes) -> Any:
    """What `pack` packed; a `Refused` for anything that is not quite right. Arrays are read-only."""
    scan(frame)
    return decode(frame)


def decode(frame: bytes) -> Any:
    """The same without the walk before it, for a frame of our own."""
    try:
        return msgpack.unpackb(frame, raw=False, strict_map_key=False, object_hook=_unpacked)
    except Refused:
        raise
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # bad UTF-8, a list as a key
        raise Refused("not-msgpack", f"the frame is no msgpack: {type(error).__name__}") from error


def _packed(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        dtype = value.dtype.str
        if dtype not in DTYPES:
            raise TypeError(f"an array of dtype {value.dtype} does not go over the wire")
        if isinstance(value, np.ndarray):
            return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": dtype, b"shape": value.shape}
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": dtype}
    raise TypeError(f"a {type(value).__name__} does not go over the wire")


def _unpacked(found: dict) -> Any:
    if b"__ndarray__" in found:
        return _array(found)
    if b"__npgeneric__" in found:
        dtype, value = _dtype(found), found.get(b"data")
        if not isinstance(value, bool | int | float):
            raise Refused("bad-array", "a number of numpy's has no number in it")
        try:
            return dtype.type(value)
        except (OverflowError, ValueError) as error:
            raise Refused("bad-array", f"a number does not fit its dtype {dtype.str}") from error
    return found


def _array(found: dict) -> np.ndarray:
    dtype, shape, data = _dtype(found), found.get(b"shape"), found.get(b"data")
    if not isinstance(data, bytes):
        raise Refused("bad-array", "an array has no bytes as its data")
    if not isinstance(shape, list) or len(shape) > MOST_AXES:
        raise Refused("bad-array", f"an array's shape is no list of at most {MOST_AXES} sizes")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise Refused("bad-array", "an array's shape has something in it that is no size")
    if prod(shape) * dtype.itemsize != len(data):
        raise Refused("bad-array", f"an array of {len(data)} bytes does not have the shape it says")
    if any(size >= 2**62 for size in shape):  # beside a 0
        raise Refused("bad-array", "an array's shape has a size that no array has")
    try:
        return np.frombuffer(data, dtype).reshape(shape) if data else np.zeros(shape, dtype)
    except ValueError as error:
        raise Refused("bad-array", "an array has a shape that numpy refuses") from error


def _dtype(found: dict) -> np.dtype:
    name = found.get(b"dtype")
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise Refused("bad-dtype", f"an array has the dtype {quoted(name)}; allowed are booleans, integers and floats")
    return dtype


# ---------------------------------------------------------------------------------------------- replies


@dataclass(frozen=True)
class ErrorReply:
    """A text frame of the server's: one line of JSON."""

    kind: str
    """One of `KINDS`."""
    message: str
    """What was wrong, in one line."""
    id: str
    """Names this error; the server's log has it, too."""
    request: int | None = None
    """The request's own number, where it had one."""

    def text(self) -> str:
        """The frame to send."""
        line = {"error": self.kind, "message": self.message, "id": self.id}
        return json.dumps(line if self.request is None else {**line, "request": self.request})

    @classmethod
    def of_text(cls, text: str) -> "ErrorReply":
        """The error in a text frame, also in one of another server of openpi's format."""
        try:
            line = json.loads(text)
            return cls(str(line["error"]), str(line["message"]), str(line["id"]), line.get("request"))
        except (ValueError, LookupError, TypeError, AttributeError):
            return cls("internal", one_line(text), "")
