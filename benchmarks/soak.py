"""Hostile traffic against a server of our own, on loopback: `make soak`, or `python -m benchmarks.soak --frames 3000`.

64 good clients ask at a steady rate, first alone, then beside the attack, which comes from a process of its own; every
answer of theirs is compared with what the policy gives to that client alone. The attack: malformed, truncated, large,
wrongly typed, unauthenticated and slow frames; clients that vanish or never read; 1,000 connections. At the end the
server is killed under a client that goes on with its history on a new one, and another one has a policy that raises and
hangs. Exit code 1: something was wrong.
"""

import argparse
import asyncio
import http.client
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

import cebm
from benchmarks.load import OBS, masked
from benchmarks.serving import untrained
from cebm.serving.client import ServerError
from cebm.serving.protocol import pack, unpack

TOKEN = "soak-" + "x" * 20
GOOD, ATTACKERS, CROWD = 64, 16, 1000
HEADERS = {"Authorization": f"Api-Key {TOKEN}"}


# ---------------------------------------------------------------------------------------------- hostile frames


def hostile(draw: random.Random) -> bytes | str:
    """One frame: made from the format's grammar with a lie in it, or a good one with bytes changed."""
    kind = draw.randrange(8)
    if kind == 0:
        return draw.randbytes(draw.randrange(200))
    if kind == 1:
        return "".join(chr(draw.randrange(32, 1000)) for _ in range(draw.randrange(50)))
    if kind == 2:
        return good_frame(draw.randrange(GOOD))[: draw.randrange(80)]
    if kind == 3:
        return msgpack.packb({"obs": lying_array(draw)})
    if kind == 4:
        return msgpack.packb(nested(draw, draw.randrange(1, 40)), strict_types=False)
    if kind == 5:
        header = draw.choice([b"\xdd", b"\xdf", b"\xc6", b"\xdb"])
        return b"\x81\xa3obs" + header + draw.randbytes(4) + draw.randbytes(20)
    if kind == 6:
        names = ["seed", "id", "candidates", "steps", "deadline_ms", "previous", "played", "history", "call", "x"]
        values: list[Any] = [-1, 2**63, 1.5, None, "a", b"b", [], {}, True, np.full(3, np.nan), np.zeros((500, 3))]
        return pack({"obs": np.zeros(OBS), "cebm": {draw.choice(names): draw.choice(values)}})
    return mutated(draw, good_frame(draw.randrange(GOOD)))


def lying_array(draw: random.Random) -> dict:
    """An array's map in which one entry is wrong."""
    lies: dict[bytes, list[Any]] = {
        b"data": [b"", "text", 5, None, bytes(3), bytes(4 * OBS + 1), [1, 2]],
        b"dtype": ["|O", "<c16", "|V8", "<U4", "<f16", "f4,f4", "object", 5, b"<f4", None, "<f4" * 100],
        b"shape": [[-1], [2**62, 4], [2**63], [OBS + 1], [1.5], ["a"], "a", None, [1] * 64, [0, 2**62], [True]],
    }
    found: dict[bytes, Any] = {b"__ndarray__": True, b"data": bytes(4 * OBS), b"dtype": "<f4", b"shape": [OBS]}
    key = draw.choice(list(lies))
    found[key] = draw.choice(lies[key])
    if draw.random() < 0.1:
        del found[key]
    return found


def nested(draw: random.Random, depth: int) -> Any:
    """Lists and maps in one another."""
    value: Any = draw.choice([0, "a", None, b"x"])
    for _ in range(depth):
        value = [value] * draw.randrange(1, 3) if draw.random() < 0.5 and depth < 12 else {"a": value}
    return value


def mutated(draw: random.Random, frame: bytes) -> bytes:
    """A frame with one to four changes."""
    changed = bytearray(frame)
    for _ in range(draw.randrange(1, 5)):
        place = draw.randrange(len(changed) or 1)
        if draw.random() < 0.5 and changed:
            changed[place % len(changed)] = draw.randrange(256)
        else:
            changed[place : place + draw.randrange(4)] = draw.randbytes(draw.randrange(4))
    return bytes(changed)


def good_frame(i: int, number: int = 1) -> bytes:
    """The request of good client `i`."""
    return pack({"obs": _observation(i), "cebm": {"seed": 1000 + i, "id": number}})


@lru_cache(GOOD)
def _observation(i: int) -> np.ndarray:
    return np.random.default_rng(i).uniform(-1, 1, OBS)


# ---------------------------------------------------------------------------------------------- clients


@dataclass
class Seen:
    """What the clients saw."""

    times: list[float] = field(default_factory=list)
    wrong: int = 0
    lost: int = 0
    frames: Counter = field(default_factory=Counter)


async def good_clients(url: str, expected: np.ndarray, hertz: float, done: asyncio.Event, seen: Seen) -> None:
    """All good clients, each at its rate, until `done`; they never reconnect, so a lost connection counts."""

    async def one(i: int) -> None:
        number = 0
        async with connect(url, compression=None, proxy=None, additional_headers=HEADERS, open_timeout=60) as client:
            await client.recv()
            await asyncio.sleep(i / GOOD / hertz)
            while not done.is_set():
                began, number = time.perf_counter(), number + 1
                await client.send(good_frame(i, number))
                reply = await client.recv()
                seen.times.append((time.perf_counter() - began) * 1e3)
                found: Any = unpack(reply) if isinstance(reply, bytes) else {"id": -1, "actions": np.zeros(2)}
                right = found["id"] == number and np.abs(found["actions"].ravel() - expected[i]).max() < 1e-3
                seen.wrong += not right
                await asyncio.sleep(max(0.0, began + 1 / hertz - time.perf_counter()))

    results = await asyncio.gather(*(one(i) for i in range(GOOD)), return_exceptions=True)
    seen.lost += sum(isinstance(result, BaseException) for result in results)


async def attack(url: str, port: int, count: int, rate: float, seed: int, seen: Seen) -> None:
    """One attacker: `count` frames at `rate` per second, a new connection wherever the last one was ended."""
    draw, client, due = random.Random(seed), None, time.monotonic()
    for _ in range(count):
        due += 1 / rate
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        chance = draw.random()
        with suppress(OSError, ConnectionClosed, InvalidHandshake, TimeoutError, EOFError):
            if chance < 0.02:
                seen.frames["unauthenticated"] += 1
                await _opened(url, {"Authorization": f"Api-Key {draw.randbytes(8).hex()}"})
            elif chance < 0.04:
                seen.frames["slow"] += 1
                await _slow(port, draw)
            else:
                if client is None:
                    client = await _opened(url, HEADERS)
                if chance < 0.06:
                    seen.frames["oversized"] += 1
                    await client.send(bytes(2**20 + 1))
                elif chance < 0.08:
                    seen.frames["vanished"] += 1
                    await client.send(good_frame(draw.randrange(GOOD)))
                    client.transport.abort()
                    client = None
                    continue
                else:
                    seen.frames["malformed"] += 1
                    await client.send(hostile(draw))
                await asyncio.wait_for(client.recv(), 20)
                continue
        if client is not None and chance >= 0.04:
            client.transport.abort()
            client = None
    if client is not None:
        client.transport.abort()


async def _opened(url: str, headers: dict[str, str]) -> Any:
    client = await connect(url, compression=None, proxy=None, additional_headers=headers, open_timeout=20)
    await client.recv()
    return client


async def _slow(port: int, draw: random.Random) -> None:
    """Begins a handshake, garbage, or a request behind a good handshake, byte by byte, and leaves."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    slowly = draw.choice([b"GET / HTTP/1.1\r\nHost: ", b"\x00\xff\x82\xfe", b"POST ", masked(good_frame(0))[:20]])
    if slowly[0] == 0x82:
        writer.write(_greeting())
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    for byte in slowly:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.001)
    writer.transport.abort()


def _greeting() -> bytes:
    """A client's half of the handshake."""
    words = ["GET / HTTP/1.1", "Host: x", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
    words += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", f"Authorization: Api-Key {TOKEN}", "", ""]
    return "\r\n".join(words).encode()


async def deaf(port: int, count: int, seconds: float) -> None:
    """Clients that ask for large answers and never read."""
    payload = pack({"obs": np.zeros((4, OBS)), "cebm": {"call": "propose", "candidates": 1000}})
    frame = masked(payload)
    opened = []
    for _ in range(count):
        narrow = socket.create_connection(("127.0.0.1", port))
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        _, writer = await asyncio.open_connection(sock=narrow, limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(_greeting() + frame * 100)
        opened.append(writer)
    await asyncio.sleep(seconds)
    for writer in opened:
        writer.transport.abort()


async def crowd(port: int, seconds: float) -> int:
    """1,000 connections that say nothing; gives how many the server let in at the end."""
    found = []
    for _ in range(CROWD):
        with suppress(OSError):
            found.append(await asyncio.open_connection("127.0.0.1", port))
    await asyncio.sleep(seconds)
    inside = sum(not reader.at_eof() for reader, _ in found)
    for _, writer in found:
        writer.transport.abort()
    return inside


# ---------------------------------------------------------------------------------------------- the server


class Victim:
    """A server in a process of its own, as `cebm serve` starts it."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        words = [sys.executable, "-m", "cebm", "serve", str(folder / "policy"), "--port", str(port), "--threads", "1"]
        self.log = (folder / "log").open("a+")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*words, "--token-file", str(folder / "token")],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )
        if self.process.stdout is None:
            raise RuntimeError("the server has no output")
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            raise RuntimeError("the server did not start: " + (folder / "log").read_text()[-500:])
        self.port = int(self.url.rpartition(":")[2])

    @property
    def megabytes(self) -> float:
        """Memory that it and its front hold."""
        own = self.process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        statuses = [Path(f"/proc/{number}/status").read_text() for number in (own, *children)]
        return sum(int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) for status in statuses) / 1024


def page(port: int, path: str) -> str:
    """A page of the server's HTTP side."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers=HEADERS)
    return connection.getresponse().read().decode()


def refusals(port: int) -> dict[str, int]:
    """What the server refused so far, by kind."""
    found = re.findall(r'cebm_errors_total\{kind="([a-z-]+)"\} (\d+)', page(port, "/metrics"))
    return {kind: int(count) for kind, count in found}


def p99(times: Sequence[float]) -> float:
    """In milliseconds."""
    return float(np.percentile(times, 99))


async def attackers(victim: Victim, frames: int, rate: float, seed: int, seen: Seen) -> None:
    """The attack, from a process of its own."""
    words = ["--attack", victim.url, "--frames", str(frames), "--rate", str(rate), "--seed", str(seed)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.soak", *words, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    seen.frames.update(json.loads(output))


async def all_attackers(url: str, frames: int, rate: float, seed: int) -> Counter:
    """Several attackers at once; how many frames of which kind they sent."""
    seen, port, each = Seen(), int(url.rpartition(":")[2]), frames // ATTACKERS
    seeds = (1000 * seed + i for i in range(ATTACKERS))
    await asyncio.gather(*(attack(url, port, each, rate / ATTACKERS, mine, seen) for mine in seeds))
    return seen.frames


async def besieged(victim: Victim, expected: np.ndarray, frames: int, rate: float, hertz: float) -> dict[str, Any]:
    """Good clients alone, then beside the attack, then alone again."""
    quiet, under, crowded = Seen(), Seen(), Seen()
    length = max(2.0, min(20.0, frames / rate / 4))

    async def phase(seen: Seen, *others: Any) -> list[Any]:
        done = asyncio.Event()
        good = asyncio.create_task(good_clients(victim.url, expected, hertz, done, seen))
        await asyncio.sleep(GOOD / 200)
        found = await asyncio.gather(*others)
        done.set()
        await good
        return list(found)

    await phase(Seen(), asyncio.sleep(1.0))  # warms up
    await phase(quiet, asyncio.sleep(length))
    # A tenth of the attack first: buffers that are made once are no leak.
    await phase(under, attackers(victim, frames // 10, rate, 1, under))
    before = victim.megabytes
    await phase(under, attackers(victim, frames - frames // 10, rate, 2, under))
    after = victim.megabytes
    inside, _ = await phase(crowded, crowd(victim.port, 8.0), deaf(victim.port, 4, 8.0))
    return {
        "frames": dict(under.frames),
        "good_requests": len(quiet.times) + len(under.times) + len(crowded.times),
        "wrong": quiet.wrong + under.wrong + crowded.wrong,
        "lost": quiet.lost + under.lost + crowded.lost,
        "p99_alone_ms": p99(quiet.times),
        "p99_attacked_ms": p99(under.times),
        "p99_crowded_ms": p99(crowded.times),
        "megabytes": [before, after],
        "let_in_of_crowd": inside,
    }


def killed(folder: Path, victim: Victim, policy: cebm.EnergyPolicy) -> bool:
    """SIGKILL between two requests; the client goes on with its history on a new server at the same port."""
    frames = np.random.default_rng(5).uniform(-1, 1, (4, OBS))
    with cebm.connect(victim.url, token=TOKEN, reconnect_s=60.0) as remote:
        for k in range(2):
            remote.infer(frames[k], seed=k)
        victim.process.kill()
        victim.process.wait()
        again = Victim(folder, victim.port)
        try:
            right = True
            for k in (2, 3):
                window = np.concatenate([frames[k - 1], frames[k]])
                wanted = policy.act(window, generator=torch.Generator().manual_seed(k))
                right &= bool(np.abs(remote.infer(frames[k], seed=k).ravel() - wanted).max() < 1e-3)
            again.process.send_signal(signal.SIGTERM)
            return right and again.process.wait(30) == 0
        finally:
            again.process.kill()


class Moody:
    """A policy that raises where the first column is 7, and hangs where it is 8 until it is `free`."""

    def __init__(self, inner: cebm.EnergyPolicy) -> None:
        self.inner, self.specification, self.acting = inner, inner.specification, inner.acting
        self.free = threading.Event()

    def act(self, obs: np.ndarray, **wishes: Any) -> Any:
        """As the policy within, where it is in the mood."""
        if (obs[:, 0] == 7).any():
            raise RuntimeError("a mood")
        if (obs[:, 0] == 8).any():
            self.free.wait(60.0)
        return self.inner.act(obs, **wishes)


def moody(policy: cebm.EnergyPolicy) -> dict[str, Any]:
    """What clients get whose observation the policy raises at or hangs at, and whether the others get right answers
    then: 3 rounds of 8 clients at once."""
    sick, seen = Moody(policy), Counter[str]()
    logging.getLogger("cebm.serving").addHandler(logging.NullHandler())  # these failures are meant
    limits = cebm.Limits(hang_s=1.0, hung=8)
    with cebm.serve(sick, limits=limits) as server, ThreadPoolExecutor(8) as pool:
        clients = [cebm.connect(server.url) for _ in range(8)]

        def ask(i: int) -> str:
            obs = np.full(2 * OBS, i / 10)
            obs[0] = {0: 7, 1: 8}.get(i, 0.0)
            try:
                found = clients[i].act(obs)
            except ServerError as error:
                return error.kind
            return "right" if np.abs(found - policy.act(obs)).max() < 1e-3 else "wrong"

        for _ in range(3):
            seen.update(pool.map(ask, (0, *range(2, 8))))
            seen.update(pool.map(ask, (1,)))
        sick.free.set()
        for client in clients:
            client.close()
    return dict(seen)


def soak(frames: int, rate: float, hertz: float) -> dict[str, Any]:
    """The whole siege; `faults` is the list of what went wrong."""
    torch.set_num_threads(1)
    policy = untrained("steady", history=2)
    obs = np.stack([unpack(good_frame(i))["obs"] for i in range(GOOD)])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        policy.save(folder / "policy")
        (folder / "token").write_text(TOKEN)
        victim = Victim(folder)
        try:
            # Good clients send whole inputs' first frame only: their session repeats it, then it is the frame before.
            expected = np.stack(
                [policy.act(np.tile(obs[i], 2), generator=torch.Generator().manual_seed(1000 + i)) for i in range(GOOD)]
            )
            found = asyncio.run(besieged(victim, expected, frames, rate, hertz))
            found["alive"] = victim.process.poll() is None and page(victim.port, "/healthz") == "OK\n"
            found["errors"] = refusals(victim.port)
            found["goes_on_after_sigkill"] = killed(folder, victim, policy)
            found["moody"] = moody(policy)
        finally:
            victim.process.kill()
        log = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
        found["tracebacks"] = [line for line in log if "traceback" in line][:3]
    found["faults"] = faults(found)
    return found


def faults(found: dict[str, Any]) -> list[str]:
    """What must not be."""
    before, after = found["megabytes"]
    checks = {
        "the server died": not found["alive"],
        "wrong answers": found["wrong"] > 0,
        "good clients lost their connection": found["lost"] > 0,
        "faults of the server": found["errors"].get("internal", 0) > 0 or bool(found["tracebacks"]),
        "memory grew by more than 5 %": after > 1.05 * before,
        "p99 of good clients over 3 times that without attack": found["p99_attacked_ms"] > 3 * found["p99_alone_ms"],
        "the crowd was let in": found["let_in_of_crowd"] > 2 * 128,
        "no history after SIGKILL": not found["goes_on_after_sigkill"],
        "a policy that raises or hangs": found["moody"] != {"right": 18, "policy-failed": 3, "policy-hung": 3},
    }
    return [name for name, wrong in checks.items() if wrong]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--frames", type=int, default=100_000, help="hostile frames")
    parser.add_argument("--rate", type=float, default=500.0, help="hostile frames per second")
    parser.add_argument("--hertz", type=float, default=5.0, help="requests per second of each good client")
    parser.add_argument("--attack", metavar="URL", help="be the attackers of a server")
    parser.add_argument("--seed", type=int, default=1, help="of the attack")
    parsed = parser.parse_args(arguments)
    if parsed.attack:
        print(json.dumps(asyncio.run(all_attackers(parsed.attack, parsed.frames, parsed.rate, parsed.seed))))
        return
    found = soak(parsed.frames, parsed.rate, parsed.hertz)
    print(json.dumps(found, indent=1))
    sys.exit(1 if found["faults"] else 0)


if __name__ == "__main__":
    main()
