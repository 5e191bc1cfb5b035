"""The process that talks to clients: one port for websockets, /healthz and /metrics. It checks, limits and answers; the
policy acts in the process that started this one, so that neither waits for the other's Python interpreter.

It has no torch and no policy. `server.Server` starts it, with a link at an open file.
"""

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from math import inf
from time import monotonic, perf_counter
from typing import Any

import numpy as np
from websockets.asyncio.server import Server as Sockets
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as listen
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request as Handshake
from websockets.http11 import Response

import cebm
from cebm.serving.access import STATUS, allowed, server_tls
from cebm.serving.link import Messages, framed
from cebm.serving.metrics import Metrics
from cebm.serving.protocol import ErrorReply, Refused, new_id, pack, unpack
from cebm.serving.requests import Limits, Reader, Request, Session, specified

PROTOCOL = 1
TEXT, PROMETHEUS = "text/plain; charset=utf-8", "text/plain; version=0.0.4; charset=utf-8"


class Front:
    """All clients, and the link to the policy's process. Everything here belongs to one event loop."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.metrics = Metrics()
        self._clients: set[Client] = set()
        self._goodbyes: set[asyncio.Future] = set()
        self.transports = 0
        self._under_way = 0
        self._stopping = False
        self._stop = asyncio.Event()
        self._options: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] | None = None
        """Gets its value when the last message has left, where this process ends by itself."""
        self._pending: dict[int, asyncio.Future] = {}
        self._numbers = count()
        self._works: list[tuple] = []
        self.metrics.gauges.update(self.gauges())
        self._heard, self._broken, self._waiting = monotonic(), False, 0

    async def run(self) -> None:
        """Listens until it is told to stop."""
        loop = asyncio.get_running_loop()
        self._link, _ = await loop.create_connection(lambda: _Back(self), sock=self._end)
        try:
            sockets = await self._listening(await self._options)
        except OSError as error:
            self._tell("failed", error.errno or 0, str(error.strerror or error))
        else:
            self._tell("listening", sockets.sockets[0].getsockname()[1])
            sweeper = asyncio.create_task(self._sweep())
            await self._stop.wait()
            await self._shut(sockets)
            sweeper.cancel()
        self.ended = loop.create_future()
        self._link.close()
        await self.ended

    async def _listening(self, options: dict[str, Any]) -> Sockets:
        return await listen(
            self._client,  # type: ignore[arg-type]
            options["host"],
            options["port"],
            process_request=self._handshake,  # type: ignore[arg-type]
            create_connection=self._connection,  # type: ignore[arg-type]
            compression=None,
            max_size=self.limits.frame,
            max_queue=2,
            open_timeout=self.limits.open_s,
            close_timeout=1.0,
            server_header=None,
            ssl=server_tls(options["tls_certificate"], options["tls_key"]),
            backlog=self.limits.connections,
            logger=_QUIET,
        )

    # ------------------------------------------------------------------------------------ the policy's process

    def told(self, kind: str, *values: Any) -> None:
        """A message of the policy's process."""
        self._heard = monotonic()
        if kind == "answers":
            self._answers(*values)
        elif kind == "beat":
            self._broken, self._waiting = values
        elif kind == "serve":
            options = values[0]
            self.limits, self.token, self._level = Limits(**options["limits"]), options["token"], options["level"]
            self._options.set_result(options)
        elif kind == "policy":
            self._served = values[0]
            self._spec = specified(self._served["specification"])
            self._reader = Reader(self._spec, self.limits, self._served["candidates"], self._served["steps"])
        elif kind == "event":
            self.metrics.event(values[0])
        elif kind == "stop":
            self._stop.set()

    def _tell(self, *message: Any) -> None:
        self._link.write(framed(*message))

    def _answers(self, rows: list[tuple[int, dict, list]], timed: dict[str, Any]) -> None:
        if timed:
            self.metrics.batch(timed["batch"], timed["infer_ms"] / 1e3)
        for number, answer, error in rows:
            future = self._pending.pop(number, None)
            if future is None or future.done():
                continue
            if error is None:
                future.set_result((answer, timed))
            else:
                future.set_exception(_refused(*error))

    def _asked(self, work: tuple) -> asyncio.Future:
        """Hands a request over, with all others of this turn of the loop in one message."""
        if not self._works:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._works.append(work)
        future = self._pending[work[0]] = asyncio.get_running_loop().create_future()
        return future

    def _hand_over(self) -> None:
        works, self._works = self._works, []
        self._tell("works", works)

    @property
    def _silent(self) -> bool:
        """Whether the policy's process says nothing any more: the policy holds its Python interpreter."""
        return monotonic() - self._heard > self.limits.hang_s

    def log(self, level: int, event: str, error: BaseException | None = None, **with_: object) -> None:
        """A line for the log, which the other process writes."""
        if level >= self._level:
            if error is not None:
                with_["traceback"] = "".join(traceback.format_exception(error))
            self._tell("log", level, event, with_)

    async def _shut(self, sockets: Sockets) -> None:
        """No new clients and requests; those under way are finished, up to the limit of grace."""
        self._stopping = True
        self.log(logging.INFO, "stopping", clients=len(self._clients), under_way=self._under_way)
        sockets.close(close_connections=False)
        until = monotonic() + self.limits.grace_s
        while self._under_way and monotonic() < until:
            await asyncio.sleep(0.005)
        goodbye = [client.close(1001, "stopping") for client in self._clients]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*goodbye, return_exceptions=True), 5.0)
        for client in list(self._clients):
            client.transport.abort()
        self.log(logging.INFO, "stopped", answered=self.metrics.answered())

    # ------------------------------------------------------------------------------------ the door

    def _connection(self, *arguments: Any, **options: Any) -> ServerConnection:
        return Client(self, *arguments, **options)

    async def _handshake(self, client: "Client", request: Handshake) -> Response | None:
        """Answers what is no websocket, and refuses who may not connect."""
        path = request.path.partition("?")[0]
        if path == "/healthz":
            well = not self._broken and not self._silent and not self._stopping
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
            self.log(logging.ERROR, "a connection failed", error, client=_name(client))
        finally:
            self._clients.discard(client)

    async def _converse(self, client: "Client") -> None:
        """One request after the other: what a client sends meanwhile waits in its own socket."""
        session = Session(self._spec, secrets.randbits(62))
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
        if self._silent:
            raise Refused("no-worker", "the policy's process does not answer")
        inputs, seed = session.inputs(request), session.seed(request)
        known = session.known(request, self._served["takes"])
        number = next(self._numbers)
        work = (number, request.call, inputs, known, seed, arrived, request.weight)
        effort = (request.candidates, request.steps, request.budget_ms, request.deadline_ms)
        future = self._asked((*work, *effort))
        try:
            if request.deadline_ms is None:
                answer, timing = await future
            else:
                async with asyncio.timeout(request.deadline_ms / 1e3 - (perf_counter() - arrived)):
                    answer, timing = await future
        except TimeoutError:
            self._forget(number)
            raise Refused("deadline", "the time was over before the answer was ready") from None
        except asyncio.CancelledError:
            self._forget(number)
            raise
        session.answered(request, answer["actions"])
        return self._shaped(answer, request.single), dict(timing)

    def _forget(self, number: int) -> None:
        """Nobody waits for the answer any more."""
        self._pending.pop(number, None)
        self._tell("gone", number)

    def _shaped(self, answer: dict[str, np.ndarray], single: bool) -> dict[str, Any]:
        """Actions as [horizon, act] and, for a batch, with the batch before them."""
        spec = self._spec
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
            if self._silent:
                self._give_up()
            for client in list(self._clients):
                if now - client.sending > limits.send_s:
                    self._counted(client, "slow-reader")
                    client.transport.abort()
                elif now - client.heard > limits.idle_s:
                    client.heard = now
                    task = asyncio.create_task(self._leave(client, 1001, "idle"))
                    self._goodbyes.add(task)
                    task.add_done_callback(self._goodbyes.discard)

    def forget_client(self, client: "Client") -> None:
        """A connection is over."""
        self._clients.discard(client)

    def _give_up(self) -> None:
        """Answers for a policy's process that does not."""
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(Refused("policy-hung", "the policy's process does not answer"))

    async def _leave(self, client: "Client", code: int, kind: str) -> None:
        """Ends a connection with a code."""
        self._counted(client, kind)
        await client.close(code, kind)

    def _counted(self, client: "Client", kind: str) -> None:
        self.metrics.error(kind)
        self.log(logging.INFO, "refused", kind=kind, client=_name(client))

    def _refusal(
        self, client: "Client", refusal: Refused, request: int | None = None, cause: BaseException | None = None
    ) -> ErrorReply:
        """Counts and logs it under an id that the client learns. The cause stays here."""
        reply = ErrorReply(refusal.kind, str(refusal), refusal.id or new_id(), request)
        self.metrics.error(refusal.kind)
        if not refusal.id:
            level = logging.ERROR if refusal.kind in _OURS else logging.DEBUG
            self.log(level, "refused", cause, kind=reply.kind, message=reply.message, id=reply.id, client=_name(client))
        return reply

    def _metadata(self) -> dict[str, Any]:
        """What a client is told first."""
        limits = {"frame": self.limits.frame, "rows": self.limits.rows, "rate": self.limits.rate}
        said = {name: value for name, value in self._served.items() if name != "steps"}
        sizes = {name: getattr(self._spec, name) for name in ("history", "horizon", "action")}
        return {"server": "cebm", "version": cebm.__version__, "protocol": PROTOCOL, **said, **sizes, "limits": limits}

    def gauges(self) -> dict[str, tuple[str, Callable[[], float]]]:
        """Numbers of this moment for /metrics."""
        return {
            "cebm_clients": ("Connected clients.", lambda: len(self._clients)),
            "cebm_queue_rows": ("Observations that waited for the worker a moment ago.", lambda: self._waiting),
            "cebm_up": ("1 while a worker can act.", lambda: float(not self._broken and not self._silent)),
        }


class Client(ServerConnection):
    """A connection, which is dropped at once where far too many are open, before it costs memory or a handshake."""

    def __init__(self, owner: Front, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._owner = owner
        self.heard = monotonic()
        """When the server began to wait for the last request."""
        self.sending = inf
        """When the server began to send a reply that was not taken yet; never: infinity."""

    def connection_made(self, transport: Any) -> None:
        owner = self._owner
        owner.transports += 1
        super().connection_made(transport)
        if owner.transports > 2 * owner.limits.connections:
            owner.metrics.error("too-many-connections")
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.transports -= 1
        self._owner.forget_client(self)
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


def _refused(kind: str, message: str, id: str) -> Refused:
    refusal = Refused(kind, message)
    refusal.id = id
    return refusal


class _Back(asyncio.Protocol):
    """The end of the link in the event loop. Where the policy's process is gone, this one ends at once, as it does."""

    def __init__(self, front: Front) -> None:
        self._front, self._messages = front, Messages()

    def data_received(self, data: bytes) -> None:
        for message in self._messages.cut(data):
            self._front.told(*message)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._front.ended is None:
            os._exit(1)
        self._front.ended.set_result(None)


async def _run(end: socket.socket) -> None:
    await Front(end).run()


def main(number: int) -> None:
    """Serves over the link at this open file until the other process says so or ends; signals are that one's."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.freeze()  # what the imports made stays, and a search through it would keep clients waiting
    asyncio.run(_run(socket.socket(fileno=number)))
