"""A served policy: this process acts, and one of its own (`front`) talks to the clients."""

import logging
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from cebm.chunks import KNOWN
from cebm.serving.access import check_place, checked_token, server_tls
from cebm.serving.engine import Engine, Served, Work
from cebm.serving.link import Link
from cebm.serving.metrics import LOG, log
from cebm.serving.requests import Limits, described

try:
    import websockets as websockets
except ImportError as error:
    raise ImportError("a policy's server needs websockets and msgpack: pip install 'cebm[serve]'") from error

START = """
import sys
number, *paths = sys.argv[1:]
sys.path += [path for path in paths if path not in sys.path]
from cebm.serving.front import main
main(int(number))
"""
"""What the other process runs: it finds the same modules as this one."""
START_S = 60.0
"""Time for the front to start, on a machine that is busy."""
GOODBYE_S = 20.0
"""Time for it to end, beside that for the requests under way."""


class Server:
    """A policy behind a socket. It acts in a thread of this process, and a process of its own talks to the clients.
    Made by `cebm.serve`; a context manager that closes it."""

    def __init__(
        self,
        policy: Any,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        tls_certificate: str | Path | None = None,
        tls_key: str | Path | None = None,
        limits: Limits | None = None,
        name: str = "policy",
    ) -> None:
        check_place(host, token)
        self.token = None if token is None else checked_token(token)
        self.host, self.limits = host, limits or Limits()
        self._tls = server_tls(tls_certificate, tls_key) is not None  # a certificate that is none is refused here
        self._served = Served.of(policy, name)
        self._process, self._link = _front()
        certificates = {"tls_certificate": tls_certificate, "tls_key": tls_key}
        options: dict[str, Any] = {"host": host, "port": port, "token": self.token, "limits": asdict(self.limits)}
        options |= {key: None if file is None else os.path.abspath(file) for key, file in certificates.items()}
        self._link.send("serve", {**options, "level": LOG.getEffectiveLevel()})
        self._link.send("policy", _told_of(self._served))
        self.port = self._listening()
        """The port that it listens on."""
        self._engine = Engine(self._served, self.limits, self._link.send)
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cebm-server", daemon=True)
        self._thread.start()
        log(logging.INFO, "listening", url=self.url, policy=name, token=token is not None)

    @property
    def url(self) -> str:
        """Where clients connect to."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'wss' if self._tls else 'ws'}://{host}:{self.port}"

    @property
    def policy(self) -> Any:
        """The policy that acts now."""
        return self._engine.served.policy

    def reload(self, policy: Any, name: str | None = None) -> None:
        """Acts by another policy from now on; no request is lost. A ValueError, and the old one stays, where the new
        one cannot act or expects other observations or actions."""
        served = Served.of(policy, name or self._served.name)
        if served.spec != self._served.spec:
            self._link.send("event", "reload_refused")
            raise ValueError("policy: the new one has other observations or actions, which clients do not know")
        self._served = self._engine.served = served
        self._link.send("policy", _told_of(served))
        self._link.send("event", "reload")
        log(logging.INFO, "reloaded", policy=served.name)

    def close(self) -> None:
        """Finishes the requests under way, says goodbye to the clients, and ends. May be called twice."""
        self._link.send("stop")
        self._thread.join(self.limits.grace_s + GOODBYE_S)
        if self._thread.is_alive():  # it cannot even say that it is late
            self._process.kill()
            self._thread.join()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the server has ended; False where the time was over first."""
        return self._finished.wait(timeout)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _listening(self) -> int:
        """The port, once the front listens; the error where it cannot."""
        until = monotonic() + START_S
        try:
            while monotonic() < until:
                messages = self._link.received(1.0)
                if messages is None:
                    raise RuntimeError("the process that talks to the clients ended at its start")
                for kind, *values in messages:
                    if kind == "listening":
                        return int(values[0])
                    if kind == "failed":
                        raise OSError(*values)
            raise TimeoutError(f"the process that talks to the clients did not start within {START_S:g} s")
        except BaseException:
            self._end()
            raise

    # ------------------------------------------------------------------------------------ the server's thread

    def _run(self) -> None:
        looked, asked = 0.0, True
        try:
            while asked:
                pause = min(1.0, self._engine.limits.hang_s / 8)
                messages = self._link.received(pause)
                asked = messages is not None
                for kind, *values in messages or []:
                    self._heard(kind, values)
                if monotonic() - looked >= pause:
                    looked = monotonic()
                    self._engine.look()
                    self._link.send("beat", self._engine.broken, self._engine.waiting)
        except Exception as error:
            log(logging.CRITICAL, "the server ended by an error", error)
        finally:
            self._end()
            if self._process.returncode:
                log(logging.CRITICAL, "the process that talks to the clients ended", code=self._process.returncode)
            self._engine.stop()
            self._finished.set()

    def _heard(self, kind: str, values: list[Any]) -> None:
        if kind == "works":
            self._engine.submit([Work(*work) for work in values[0]])
        elif kind == "gone":
            self._engine.forget(values[0])
        elif kind == "log":
            level, event, with_ = values
            log(level, event, **with_)

    def _end(self) -> None:
        """The end of the other process, which has ended or is to."""
        self._link.close()  # it takes this as the end of ours
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()


def _front() -> tuple[subprocess.Popen, Link]:
    """The process that talks to clients, and the link to it. It is in a session of its own: a terminal's Ctrl-C is for
    this process alone, which then tells it to stop."""
    ours, its = socket.socketpair()
    with its:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, str(its.fileno()), *map(str, sys.path)],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    return process, Link(ours)


def _told_of(served: Served) -> dict[str, Any]:
    """What the front has to know of a policy."""
    return {
        "policy": served.name,
        "specification": described(served.spec),
        "candidates": served.effort.candidates,
        "steps": served.effort.steps,
        "takes": sorted(served.takes.intersection(KNOWN)),
        "proposes": callable(getattr(served.policy, "propose", None)),
    }
