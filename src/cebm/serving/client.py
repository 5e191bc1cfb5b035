"""The client: a policy whose work a server does. It has the `act`, `propose` and `reset` of a policy of ours."""

import random
import ssl
import threading
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cebm.chunks import remaining
from cebm.named import flat_observation
from cebm.policy import Proposal
from cebm.serving.protocol import KINDS, ErrorReply, Refused, pack, unpack
from cebm.serving.requests import specified
from cebm.spaces import Part, Specification

try:
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
    from websockets.sync.client import ClientConnection
    from websockets.sync.client import connect as open_socket
except ImportError as error:
    raise ImportError("a policy's client needs websockets and msgpack: pip install 'cebm[serve]'") from error


class ServerError(RuntimeError):
    """The server refused a request. `kind` is one of `cebm.serving.KINDS`, `id` is in the server's log."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(f"{reply.kind}: {reply.message} (id {reply.id})" if reply.id else reply.message)
        self.kind, self.id = reply.kind, reply.id


class RemotePolicy:
    """A policy behind a server, made by `cebm.connect`. `evaluate` and `Runner` take it as any other policy. Threads
    may share it; their calls wait for one another.

    A lost connection is opened again, for up to `reconnect_s` seconds, and the call is repeated there: nothing of it
    is lost, as a call has all that it needs with it (`infer` also its history).
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        tls_ca: str | Path | None = None,
        deadline_ms: float | None = None,
        timeout_s: float = 30.0,
        reconnect_s: float = 30.0,
    ) -> None:
        if not url.startswith(("ws://", "wss://")):
            raise ValueError(f"url must begin with ws:// or wss://, got {url!r}")
        for name, value in (("timeout_s", timeout_s), ("reconnect_s", reconnect_s + 1)):
            if not 0 < value < inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        self.url, self.timeout_s, self.reconnect_s = url, timeout_s, reconnect_s
        self.deadline_ms = deadline_ms
        """Of every call that says nothing else."""
        self.timing: dict[str, float] = {}
        """The server's times of the last call: infer_ms, total_ms; and its batch."""
        self._headers = None if token is None else {"Authorization": f"Api-Key {token}"}
        self._tls = _client_tls(tls_ca) if url.startswith("wss://") else None
        self._lock = threading.RLock()
        self._socket: ClientConnection | None = None
        self._number = 0
        self._session: int = 0
        self._seen: list[np.ndarray] = []
        self._seen_by = 0
        self._chunk: np.ndarray | None = None
        with self._lock:
            self._connected(monotonic() + reconnect_s)

    # ------------------------------------------------------------------------------------ the policy

    @property
    def history(self) -> int:
        """Observations that one input holds, oldest first."""
        return self.specification.history

    @property
    def horizon(self) -> int:
        """Actions that one output holds, the current one first."""
        return self.specification.horizon

    @property
    def parts(self) -> tuple[Part, ...]:
        """The named parts of an observation."""
        return self.specification.parts

    @property
    def takes(self) -> frozenset[str]:
        """What the policy wants to know of the episode: `previous`, or `last` and `plan`."""
        return frozenset(self.metadata.get("takes", ("previous",)))

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of one observation and of one action."""
        return self.specification.frame, self.specification.action

    def act(
        self,
        obs: Any,
        *,
        candidates: int | None = None,
        steps: int | None = None,
        budget_ms: float | None = None,
        previous: Any = None,
        last: Any = None,
        plan: Any = None,
        generator: torch.Generator | None = None,
        deadline_ms: float | None = None,
    ) -> Any:
        """The action for one observation [obs], a batch [batch, obs] or a dictionary of named parts, as
        `EnergyPolicy.act` gives it: without a `generator` the same call gives the same action, with one it is what the
        policy gives for a new generator whose seed this one draws. An answer that takes longer than `deadline_ms` is a
        ServerError instead. `last` and `plan` are for a policy under constraints; another one does not look at them."""
        wishes = self._wishes(candidates, steps, budget_ms, previous, generator, deadline_ms)
        for name, value in (("last", last), ("plan", plan)):
            if value is not None and name in self.takes:
                wishes[name] = _observation(value)[0]
        obs = flat_observation(obs, self.parts, self.history)
        values, single = _observation(obs)
        actions = self._asked({"obs": values, "cebm": wishes})["actions"]
        flat = actions.reshape(-1) if single else actions.reshape(len(actions), -1)
        return torch.from_numpy(flat.copy()).to(obs.device) if isinstance(obs, Tensor) else flat.copy()

    def propose(
        self,
        obs: Any,
        *,
        candidates: int | None = None,
        steps: int | None = None,
        budget_ms: float | None = None,
        previous: Any = None,
        generator: torch.Generator | None = None,
        deadline_ms: float | None = None,
    ) -> Proposal:
        """As `act`, with all the alternatives and their energies."""
        wishes = self._wishes(candidates, steps, budget_ms, previous, generator, deadline_ms)
        obs = flat_observation(obs, self.parts, self.history)
        values, single = _observation(obs)
        reply = self._asked({"obs": values[None] if single else values, "cebm": {**wishes, "call": "propose"}})
        action = reply["actions"].reshape(len(reply["actions"]), -1)
        parts = (action, reply["score"], reply["candidates"], reply["energies"])
        return Proposal(*(torch.from_numpy(part.copy()) for part in parts))

    def infer(
        self,
        obs: Any,
        *,
        played: int | None = None,
        seed: int | None = None,
        deadline_ms: float | None = None,
        **effort: Any,
    ) -> np.ndarray:
        """The chunk of actions [horizon, act] for the newest observation alone, [frame]: the server remembers those
        before it. Each call draws anew, from `seed` where there is one. `played`: so many actions of the last chunk
        were played, and the search starts at the rest of it; a policy under constraints has the rest as its plan. A new
        connection is told what the last one had seen."""
        with self._lock:
            values, _ = _observation(flat_observation(obs, self.parts))
            if self._seen and self._seen[0].shape != values.shape:
                raise ValueError(
                    f"obs has shape {values.shape}, the episode under way has {self._seen[0].shape}; reset first"
                )
            wishes = self._wishes(deadline_ms=deadline_ms, **effort)
            wishes.pop("seed")
            if seed is not None:
                wishes["seed"] = seed
            actions = self._asked({"obs": values, "cebm": wishes}, values, played)["actions"]
            self._seen = [*self._seen, values][1 - self.history :] if self.history > 1 else []
            self._seen_by, self._chunk = self._session, actions.copy()
            return self._chunk.copy()

    def reset(self) -> None:
        """Forget the episodes so far: new ones begin."""
        with self._lock:
            self._seen, self._chunk = [], None
            self._asked({"cebm": {"call": "reset"}})

    def close(self) -> None:
        """Ends the connection. The next call would open one again."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = None

    def __enter__(self) -> "RemotePolicy":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------ asking

    def _wishes(
        self,
        candidates: int | None = None,
        steps: int | None = None,
        budget_ms: float | None = None,
        previous: Any = None,
        generator: torch.Generator | None = None,
        deadline_ms: float | None = None,
    ) -> dict[str, Any]:
        deadline = self.deadline_ms if deadline_ms is None else deadline_ms
        given = {"candidates": candidates, "steps": steps, "budget_ms": budget_ms, "deadline_ms": deadline}
        wishes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        wishes["seed"] = None
        if generator is not None:
            wishes["seed"] = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        if previous is not None:
            wishes["previous"] = _observation(previous)[0]
        return wishes

    def _asked(
        self, request: dict[str, Any], frame: np.ndarray | None = None, played: int | None = None
    ) -> dict[str, Any]:
        """The server's reply to a request; `frame` is the newest observation of a session."""
        with self._lock:
            until, wait = monotonic() + self.reconnect_s, 0.02
            while True:
                try:
                    socket = self._connected(until)
                    self._number += 1
                    wishes = {**request["cebm"], "id": self._number}
                    if frame is not None:
                        wishes |= self._continued(frame, played)
                    socket.send(pack({**request, "cebm": wishes}))
                    return self._reply(socket)
                except (ConnectionClosed, OSError, ServerError) as error:
                    if isinstance(error, ServerError) and error.kind != "stopping":
                        raise
                    self._dropped()
                    _raise_final(error)
                    if isinstance(error, OSError) and monotonic() > until:
                        raise
                    if monotonic() > until:
                        raise ConnectionError(f"{self.url} ended the connection: {error}") from error
                    sleep(wait * random.uniform(0.5, 1.0))
                    wait = min(2 * wait, 1.0)

    def _continued(self, frame: np.ndarray, played: int | None) -> dict[str, Any]:
        """What a session's request needs beside the observation: of a server that does not know it, all."""
        known = self._seen_by == self._session
        if known:
            return {} if played is None else {"played": played}
        wishes: dict[str, Any] = {}
        if self._seen:
            rows = [past[None] if past.ndim == 1 else past for past in self._seen]
            wishes["history"] = np.stack(rows)
        if played is not None and self._chunk is not None:
            wishes |= remaining(self._chunk if self._chunk.ndim == 3 else self._chunk[None], played, self.takes)
        return wishes

    def _reply(self, socket: ClientConnection) -> dict[str, Any]:
        until = monotonic() + self.timeout_s
        while True:
            try:
                frame = socket.recv(timeout=max(0.0, until - monotonic()))
            except TimeoutError:
                raise TimeoutError(f"{self.url} gave no answer within {self.timeout_s:g} s") from None
            if isinstance(frame, str):
                error = ErrorReply.of_text(frame)
                if error.request in (None, self._number):
                    raise ServerError(error)
            else:
                reply = _unpacked(frame, self.url)
                if reply.get("id") == self._number:
                    self.timing = reply.get("server_timing", {})
                    return reply

    def _connected(self, until: float) -> ClientConnection:
        """The connection, a new one where there is none; waits for a server that is not there yet."""
        wait = 0.02
        while self._socket is None:
            try:
                socket = open_socket(
                    self.url,
                    additional_headers=self._headers,
                    ssl=self._tls,
                    compression=None,
                    proxy=None,
                    max_size=2**28,
                    open_timeout=min(10.0, self.timeout_s),
                    close_timeout=1.0,
                ).__enter__()  # new versions open it there; `_dropped` and `close` are its end
                self._greeted(socket)
            except (OSError, InvalidHandshake, ConnectionClosed) as error:
                final = isinstance(error, InvalidStatus) and error.response.status_code != 503
                if final or isinstance(error, ssl.SSLError) or monotonic() > until:
                    raise _explained(error, self.url) from error
                sleep(wait * random.uniform(0.5, 1.0))
                wait = min(2 * wait, 1.0)
        return self._socket

    def _greeted(self, socket: ClientConnection) -> None:
        frame = socket.recv(timeout=self.timeout_s)
        metadata = _unpacked(frame if isinstance(frame, bytes) else b"", self.url)
        try:
            spec = specified(metadata.get("specification"))
        except ValueError as error:
            socket.close()
            raise ValueError(f"{self.url} is no server of cebm's: its metadata have no specification") from error
        if self._session and spec != self.specification:
            socket.close()
            raise ValueError(f"{self.url} serves a policy with other observations or actions than before")
        self.specification: Specification = spec
        """What one observation and one action are."""
        self.metadata = metadata
        """What the server said about itself."""
        self._socket, self._session = socket, self._session + 1

    def _dropped(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def _unpacked(frame: bytes, url: str) -> dict[str, Any]:
    try:
        reply = unpack(frame)
    except Refused as error:
        raise ValueError(f"{url} does not speak cebm's protocol: {error}") from error
    if not isinstance(reply, dict):
        raise ValueError(f"{url} does not speak cebm's protocol: a {type(reply).__name__} came for a map")
    return reply


def _observation(obs: Any) -> tuple[np.ndarray, bool]:
    """Numbers as the wire takes them, and whether they are one observation."""
    values = obs.detach().cpu().numpy() if isinstance(obs, Tensor) else np.array(obs)
    if values.dtype.kind not in "biuf":
        raise ValueError(f"obs must be numbers, got {type(obs).__name__}")
    if values.ndim not in (1, 2):
        raise ValueError(f"obs must be [obs] or [batch, obs], got {values.shape}")
    if values.dtype.kind == "f" and values.dtype.itemsize > 8:
        values = values.astype(np.float64)
    return values, values.ndim == 1


def _client_tls(ca: str | Path | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=None if ca is None else str(ca))


def _raise_final(error: Exception) -> None:
    """Raises what the same request would only meet again."""
    if isinstance(error, TimeoutError):
        raise error
    closed = getattr(error, "rcvd", None)
    if closed is not None and closed.code in (1008, 1009):
        kind = "frame-too-large" if closed.code == 1009 else "too-many-errors"
        raise ServerError(ErrorReply(kind, KINDS[kind], "")) from error


def _explained(error: Exception, url: str) -> Exception:
    """An error of the handshake with the server's own words."""
    if isinstance(error, InvalidStatus):
        reply = ErrorReply.of_text(
            error.response.body.decode("utf-8", "replace") if error.response.body else str(error)
        )
        return ServerError(reply)
    if isinstance(error, ConnectionRefusedError):
        return ConnectionRefusedError(f"{url} does not answer: is the server running?")
    return error
