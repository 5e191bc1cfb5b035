"""The two processes of a server, and what remains of it where one of them hangs or dies."""

import hmac
import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import cebm
from cebm import Box, EnergyPolicy, Specification

pytest.importorskip("websockets", reason="the extra `serve` is not installed")
pytest.importorskip("msgpack", reason="the extra `serve` is not installed")

from cebm.serving import access
from cebm.serving.client import ServerError
from cebm.serving.link import Link, Messages, framed
from waiting import PATIENCE, eventually

HOLDS = """
import ctypes, sys, threading
import numpy as np, torch
import cebm
torch.set_num_threads(1)
spec = cebm.Specification.flat(3, 2)
energy = cebm.MLP(16).build(spec, torch.Generator().manual_seed(0))
boxes = [cebm.Box.from_bounds([-2.0] * dim, [1.0] * dim) for dim in (3, 2)]
inner = cebm.EnergyPolicy(energy, *boxes, spec=spec)

class Holds:
    specification = spec

    def act(self, obs, generator=None):
        if obs[0, 0] == -1.5:
            ctypes.PyDLL(None).usleep(10_000_000)  # keeps Python's global lock
        return inner.act(obs, generator=generator)

server = cebm.serve(Holds(), limits=cebm.Limits(hang_s=2.0))
print(server.url, flush=True)
server.wait()
"""


def healthz(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("GET", "/healthz")
    return connection.getresponse().status


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def other() -> Iterator[subprocess.Popen]:
    """A server in a process of its own, whose policy holds Python's global lock where it is asked to."""
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_messages_arrive_whole_in_whatever_pieces() -> None:
    sent = [("works", [(1, "act", np.arange(6.0).reshape(2, 3), {}, None)]), ("beat", False, 3), ("stop",)]
    data, messages, found = b"".join(framed(*message) for message in sent), Messages(), []
    for place in range(0, len(data), 7):
        found += messages.cut(data[place : place + 7])
    assert [message[0] for message in found] == ["works", "beat", "stop"] and found[1] == ["beat", False, 3]
    assert np.array_equal(found[0][1][0][2], np.arange(6.0).reshape(2, 3))


def test_a_link_whose_other_end_is_gone_says_so() -> None:
    ours, its = socket.socketpair()
    link = Link(ours)
    its.sendall(framed("beat", True, 1)[:-1])
    assert link.received(0.0) == []
    its.close()
    link.send("stop")
    assert link.received(PATIENCE) is None


def test_the_front_needs_no_torch() -> None:
    """It starts in a moment and is small, and no hostile frame comes near the policy's weights."""
    words = [sys.executable, "-c", "import cebm.serving.front, sys; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(words, timeout=PATIENCE).returncode == 0


def test_a_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer about a token is `compare_digest`'s, whatever the client sent."""
    asked: list[tuple[bytes, bytes]] = []

    def noted(given: bytes, wanted: bytes) -> bool:
        asked.append((given, wanted))
        return hmac.compare_digest(given, wanted)

    monkeypatch.setattr(access, "hmac", SimpleNamespace(compare_digest=noted))
    token = "a-token-of-some-length"
    for header in (None, "", "Api-Key", f"Bearer {token}", f"Api-Key {token[:-1]}", f"Api-Key {token}x", "Api-Key Ä"):
        assert not access.allowed(header, token)
    assert access.allowed(f"Api-Key {token}", token) and access.allowed(None, None)
    assert len(asked) == 8 and {wanted for _, wanted in asked} == {f"Api-Key {token}".encode()}


def test_a_server_whose_front_dies_ends() -> None:
    spec = Specification.flat(3, 2)
    energy = cebm.MLP(16).build(spec, torch.Generator().manual_seed(0))
    boxes = [Box.from_bounds([-2.0] * dim, [1.0] * dim) for dim in (3, 2)]
    with cebm.serve(EnergyPolicy(energy, boxes[0], boxes[1], spec=spec)) as server:
        os.kill(server._process.pid, signal.SIGKILL)
        assert server.wait(PATIENCE) and not listens(server.port)


@pytest.mark.slow
def test_a_policy_that_holds_the_interpreter_is_answered_for(other: subprocess.Popen) -> None:
    """The front answers for it, and goes on when the policy returns. When the policy's process is killed, nothing of
    the server remains."""
    assert other.stdout is not None
    url = other.stdout.readline().strip()
    port = int(url.rpartition(":")[2])
    with cebm.connect(url, reconnect_s=0.0) as remote:
        assert remote.act(np.zeros(3)).shape == (2,) and healthz(port) == 200
        with pytest.raises(ServerError) as hung:
            remote.act(np.full(3, -1.5))
        assert hung.value.kind == "policy-hung" and healthz(port) == 503
        with pytest.raises(ServerError) as refused:
            remote.act(np.zeros(3))
        assert refused.value.kind == "no-worker"
        eventually(lambda: healthz(port) == 200)
        assert remote.act(np.zeros(3)).shape == (2,)
    other.kill()
    eventually(lambda: not listens(port))
