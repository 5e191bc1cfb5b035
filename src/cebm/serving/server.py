"""The server: one port for clients (websockets), /healthz and /metrics. It checks, limits and answers; the engine
acts."""

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import numpy as np

import cebm
from cebm.asynchronous import KNOWN
from cebm.serving.access import STATUS, allowed, check_place, checked_token, server_tls
from cebm.serving.engine import Engine, Served, Work
from cebm.serving.metrics import Metrics, log
from cebm.serving.protocol import ErrorReply, Refused, pack, unpack
from cebm.serving.requests import Limits, Reader, Request, Session, described

try:
    from websockets.asyncio.server import Server as Sockets
    from websockets.asyncio.server import ServerConnection
    from websockets.asyncio.server import serve as listen
    from websockets.exceptions import ConnectionClosed
    from websockets.http11 import Request as Handshake
    from websockets.http11 import Response
except ImportError as error:
    raise ImportError("a policy's server needs websockets and msgpack: pip install 'cebm[serve]'") from error

PROTOCOL = 1
TEXT, PROMETHEUS = "text/plain; charset=utf-8", "text/plain; version=0.0.4; charset=utf-8"


class Server:
    """A policy behind a socket, in a thread of its own. Made by `cebm.serve`; a context manager that closes it."""

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
        self.host, self.limits, self.metrics = host, limits or Limits(), Metrics()
        self._tls = server_tls(tls_certificate, tls_key)
        self._served = Served.of(policy, name)
        self._engine = Engine(self._served, self.limits, self.metrics)
        self._clients: set[Client] = set()
        self._goodbyes: set[asyncio.Future] = set()
        self._transports = 0
        self._under_way = 0
        self._ready, self._finished = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._stopping = False
        self._asked_port = port
        self.port = port
        """The port that it listens on."""
        self._reader = self._new_reader()
        self._gauges()
        self._thread = threading.Thread(target=self._run, name="cebm-server", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._engine.stop()
            raise self._failure

    # ------------------------------------------------------------------------------------ for its owner

    @property
    def url(self) -> str:
        """Where clients connect to."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'ws' if self._tls is None else 'wss'}://{host}:{self.port}"

    @property
    def policy(self) -> Any:
        """The policy that acts now."""
        return self._engine.served.policy

    def reload(self, policy: Any, name: str | None = None) -> None:
        """Acts by another policy from now on; no request is lost. A ValueError, and the old one stays, where the new
        one cannot act or expects other observations or actions."""
        served = Served.of(policy, name or self._served.name)
        if served.spec != self._served.spec:
            self.metrics.event("reload_refused")
            raise ValueError("policy: the new one has other observations or actions, which clients do not know")
        self._served = self._engine.served = served
        self._reader = self._new_reader()
        self.metrics.event("reload")
        log(logging.INFO, "reloaded", policy=served.name)

    def close(self) -> None:
        """Finishes the requests under way, says goodbye to the clients, and ends. May be called twice."""
        loop = self._engine.loop
        if loop is not None and not self._finished.is_set():
            with suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the server has ended; False where the time was over first."""
        return self._finished.wait(timeout)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------ the loop's thread

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # for the thread that waits for the start
            if not self._ready.is_set():
                self._failure = error
            else:
                log(logging.CRITICAL, "the server ended by an error", error)
        finally:
            self._finished.set()
            self._ready.set()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._engine.loop = asyncio.get_running_loop()
        watchdogs = [asyncio.create_task(each) for each in (self._engine.watch(), self._sweep())]
        limits = self.limits
        sockets = await listen(
            self._client,  # type: ignore[arg-type]
            self.host,
            self._asked_port,
            process_request=self._handshake,  # type: ignore[arg-type]
            create_connection=self._connection,  # type: ignore[arg-type]
            compression=None,
            max_size=limits.frame,
            max_queue=2,
            open_timeout=limits.open_s,
            close_timeout=1.0,
            server_header=None,
            ssl=self._tls,
            backlog=limits.connections,
            logger=_QUIET,
        )
        self.port = sockets.sockets[0].getsockname()[1]
        self._ready.set()
        log(logging.INFO, "listening", url=self.url, policy=self._served.name, token=self.token is not None)
        await self._stop.wait()
        await self._shut(sockets)
        for watchdog in watchdogs:
            watchdog.cancel()
        self._engine.stop()

    async def _shut(self, sockets: Sockets) -> None:
        """No new clients and requests; those under way are finished, up to the limit of grace."""
        self._stopping = True
        log(logging.INFO, "stopping", clients=len(self._clients), under_way=self._under_way)
        sockets.close(close_connections=False)
        until = monotonic() + self.limits.grace_s
        while self._under_way and monotonic() < until:
            await asyncio.sleep(0.005)
        goodbye = [client.close(1001, "stopping") for client in self._clients]
        await asyncio.wait_for(asyncio.gather(*goodbye, return_exceptions=True), 5.0)
        for client in list(self._clients):
            client.transport.abort()
        log(logging.INFO, "stopped", answered=self.metrics.answered())

    # ------------------------------------------------------------------------------------ the door

    def _connection(self, *arguments: Any, **options: Any) -> ServerConnection:
        return Client(self, *arguments, **options)

    async def _handshake(self, client: "Client", request: Handshake) -> Response | None:
        """Answers what is no websocket, and refuses who may not connect."""
        path = request.path.partition("?")[0]
        if path == "/healthz":
            well = not self._engine.broken and not self._stopping
            return _response(client, 200 if well else 503, "OK\n" if well else "no worker\n", TEXT)
        try:
            authorization = ", ".join(request.headers.get_all("Authorization")) or None
            if path not in ("/", "/metrics"):
                raise Refused("not-found", "there are /, /healthz and /metrics")
            if request.headers.get_all("Origin"):  # any page in a browser on this machine could connect
                raise Refused("foreign-origin", "web pages may not connect")
            if not allowed(authorization, self.token):
                raise Refused("unauthorised", "the token is missing or wrong: Authorization: Api-Key TOKEN")
            if path == "/metrics":
                return _response(client, 200, self.metrics.text(), PROMETHEUS)
            if self._stopping:
                raise Refused("stopping", "the server is shutting down")
            if len(self._clients) >= self.limits.connections:
                raise Refused("too-many-connections", f"{self.limits.connections} clients are connected already")
        except Refused as refusal:
            reply = self._refusal(client, refusal)
            return _response(client, STATUS[refusal.kind], reply.text() + "\n", "application/json")
        self._clients.add(client)  # now, so that the next handshake counts it
        client.transport.set_write_buffer_limits(high=2**16)
        return None

    # ------------------------------------------------------------------------------------ one client

    async def _client(self, client: "Client") -> None:
        try:
            with suppress(ConnectionClosed):
                await self._send(client, pack(self._metadata()))
                await self._converse(client)
        except Exception as error:  # a fault of ours must not end the server
            log(logging.ERROR, "a connection failed", error, client=_name(client))
        finally:
            self._clients.discard(client)

    async def _converse(self, client: "Client") -> None:
        """One request after the other: what a client sends meanwhile waits in its own socket."""
        session = Session(self._served.spec, secrets.randbits(62))
        pace, strikes = _Pace(self.limits.rate), 0
        while True:
            client.heard = monotonic()
            frame = await client.recv()
            arrived = perf_counter()
            self._under_way += 1
            try:
                if not pace.allows():
                    raise Refused("too-fast", f"at most {self.limits.rate:g} requests per second are answered")
                reply: str | bytes = await self._answer(session, frame, arrived)
                strikes = 0
            except Refused as refusal:
                reply = self._refusal(client, refusal, getattr(refusal, "request", None)).text()
                strikes += refusal.kind in _STRIKES
            except Exception as error:
                reply = self._refusal(client, Refused("internal", "a fault of the server"), cause=error).text()
            finally:
                self._under_way -= 1  # no await between this and the sending
            await self._send(client, reply)
            if strikes >= self.limits.strikes:
                await self._leave(client, 1008, "too-many-errors")
                return

    async def _answer(self, session: Session, frame: str | bytes, arrived: float) -> bytes:
        """The reply to one frame."""
        if isinstance(frame, str):
            raise Refused("text-frame", "requests are binary frames of msgpack")
        if self._stopping:
            raise Refused("stopping", "the server is shutting down")
        request = self._reader.request(unpack(frame))
        try:
            answer: dict[str, Any] = {}
            timing: dict[str, Any] = {}
            if request.call == "reset":
                session.reset(request.seed)
            else:
                answer, timing = await self._acted(session, request, arrived)
        except Refused as refusal:
            refusal.request = request.number  # type: ignore[attr-defined]
            raise
        took = perf_counter() - arrived
        self.metrics.request(request.call, took)
        timing["total_ms"] = took * 1e3
        if request.number is not None:
            answer["id"] = request.number
        return pack({**answer, "server_timing": timing})

    async def _acted(self, session: Session, request: Request, arrived: float) -> tuple[dict, dict]:
        inputs, seed = session.inputs(request), session.seed(request)
        known = session.known(request, self._served.takes)
        future = asyncio.get_running_loop().create_future()
        work = Work(request, inputs, known, seed, arrived, future)
        self._engine.submit(work)
        left = work.left_ms / 1e3
        try:
            if left == inf:
                answer, timing = await future
            else:
                async with asyncio.timeout(left):
                    answer, timing = await future
        except TimeoutError:
            work.gone = True
            raise Refused("deadline", "the time was over before the answer was ready") from None
        except asyncio.CancelledError:
            work.gone = True
            raise
        session.answered(request, answer["actions"])
        return self._shaped(answer, request.single), dict(timing)

    def _shaped(self, answer: dict[str, np.ndarray], single: bool) -> dict[str, Any]:
        """Actions as [horizon, act] and, for a batch, with the batch before them."""
        spec = self._served.spec
        split = {"actions": (spec.horizon, spec.action)}
        shaped = {
            name: values.reshape(len(values), *split.get(name, values.shape[1:])) for name, values in answer.items()
        }
        return {name: values[0] if single else values for name, values in shaped.items()}

    @staticmethod
    async def _send(client: "Client", reply: str | bytes) -> None:
        client.sending = monotonic()
        await client.send(reply)
        client.sending = inf

    async def _sweep(self) -> None:
        """Looks at all clients once in a while, which costs less than a timer for each wait."""
        limits = self.limits
        while True:
            await asyncio.sleep(min(1.0, limits.idle_s / 4, limits.send_s / 4))
            now = monotonic()
            for client in list(self._clients):
                if now - client.sending > limits.send_s:
                    self._counted(client, "slow-reader")
                    client.transport.abort()
                elif now - client.heard > limits.idle_s:
                    client.heard = now
                    task = asyncio.create_task(self._leave(client, 1001, "idle"))
                    self._goodbyes.add(task)
                    task.add_done_callback(self._goodbyes.discard)

    async def _leave(self, client: "Client", code: int, kind: str) -> None:
        """Ends a connection with a code."""
        self._counted(client, kind)
        await client.close(code, kind)

    def _counted(self, client: "Client", kind: str) -> None:
        self.metrics.error(kind)
        log(logging.INFO, "refused", kind=kind, client=_name(client))

    def _refusal(
        self, client: "Client", refusal: Refused, request: int | None = None, cause: BaseException | None = None
    ) -> ErrorReply:
        """Counts and logs it under an id that the client learns. The cause stays here."""
        reply = ErrorReply(refusal.kind, str(refusal), secrets.token_hex(4), request)
        self.metrics.error(refusal.kind)
        cause = cause or (refusal.__cause__ if refusal.kind in _OURS else None)
        level = logging.ERROR if refusal.kind in _OURS else logging.DEBUG
        log(level, "refused", cause, kind=reply.kind, message=reply.message, id=reply.id, client=_name(client))
        return reply

    def _metadata(self) -> dict[str, Any]:
        """What a client is told first."""
        served = self._served
        return {
            "server": "cebm",
            "version": cebm.__version__,
            "protocol": PROTOCOL,
            "policy": served.name,
            "specification": described(served.spec),
            "history": served.spec.history,
            "horizon": served.spec.horizon,
            "action": served.spec.action,
            "candidates": served.effort.candidates,
            "takes": sorted(served.takes.intersection(KNOWN)),
            "proposes": callable(getattr(served.policy, "propose", None)),
            "limits": {"frame": self.limits.frame, "rows": self.limits.rows, "rate": self.limits.rate},
        }

    def _new_reader(self) -> Reader:
        effort = self._served.effort
        return Reader(self._served.spec, self.limits, effort.candidates, effort.steps)

    def _gauges(self) -> None:
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "cebm_clients": ("Connected clients.", lambda: len(self._clients)),
            "cebm_queue_rows": ("Observations that wait for the worker.", lambda: self._engine.waiting),
            "cebm_up": ("1 while a worker can act.", lambda: float(not self._engine.broken)),
        }
        self.metrics.gauges.update(gauges)


class Client(ServerConnection):
    """A connection, which is dropped at once where far too many are open, before it costs memory or a handshake."""

    def __init__(self, owner: Server, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._owner = owner
        self.heard = monotonic()
        """When the server began to wait for the last request."""
        self.sending = inf
        """When the server began to send a reply that was not taken yet; never: infinity."""

    def connection_made(self, transport: Any) -> None:
        owner = self._owner
        owner._transports += 1
        super().connection_made(transport)
        if owner._transports > 2 * owner.limits.connections:
            owner.metrics.error("too-many-connections")
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner._transports -= 1
        self._owner._clients.discard(self)
        if self.protocol.close_sent is not None and self.protocol.close_sent.code == 1009:
            self._owner.metrics.error("frame-too-large")
        super().connection_lost(exc)


class _Pace:
    """A bucket of tokens: `rate` requests per second on average, one second's worth at once."""

    def __init__(self, rate: float) -> None:
        self.rate, self.tokens, self.last = rate, max(1.0, rate), monotonic()

    def allows(self) -> bool:
        """Takes a token, if there is one."""
        now = monotonic()
        self.tokens = min(max(1.0, self.rate), self.tokens + (now - self.last) * self.rate)
        self.last = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


_OURS = ("policy-failed", "policy-hung", "no-worker", "internal")
_STRIKES = {
    *("text-frame", "not-msgpack", "too-deep", "too-many-values", "bad-array", "bad-dtype", "bad-request"),
    *("bad-observation", "not-finite", "too-much-effort", "too-fast"),
}
_QUIET = logging.getLogger("cebm.serving.sockets")
_QUIET.setLevel(logging.CRITICAL)  # failed handshakes would be a traceback each


def _name(client: "Client") -> str:
    address = client.remote_address
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "?"


def _response(client: "Client", status: int, text: str, content: str) -> Response:
    response = client.respond(status, text)
    del response.headers["Content-Type"]
    response.headers["Content-Type"] = content
    return response
