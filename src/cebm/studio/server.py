"""The studio's HTTP, and nothing else: files of the page, and questions as JSON, on loopback.

The standard library's server is enough: the page asks short questions, one at a time, and nothing has to be pushed; so
the studio needs no package. Every address begins with a random token. The Host and the Origin are checked, so that
another page in the same browser can neither ask nor, by a name that it points at loopback, read (DNS rebinding).
"""

import hmac
import json
import secrets
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from cebm.settings import check_json
from cebm.studio.desk import Desk

HOST = "127.0.0.1"
MOST_BYTES = 4 * 2**20
"""Of a question: an observation with pictures is the largest."""
MOST_CONNECTIONS = 32
MOST_WAITING = 12
"""Questions that wait for an answer; more are refused."""
IDLE_SECONDS = 30.0
"""After which a connection that says nothing is closed."""
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Refused(Exception):
    """A request that gets no answer; the status and the words say why."""

    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status, self.words = status, words


class StudioServer:
    """Serves a desk's answers and the page from threads of this process; use it in a `with` block."""

    def __init__(self, desk: Desk, port: int = 0) -> None:
        if not 0 <= port < 2**16:
            raise ValueError(f"port must be between 0 and 65535, got {port}")
        self.desk, self.token = desk, secrets.token_urlsafe(24)
        self.page = _page_files()
        # One thread computes, so that torch keeps one pool; what takes seconds has another.
        self._quick, self._slow = (ThreadPoolExecutor(1, f"studio-{name}") for name in ("quick", "slow"))
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)
        self._http = _Listener(self, (HOST, port), _Handler)
        self.port = int(self._http.server_address[1])
        self._thread = threading.Thread(target=self._http.serve_forever, name="studio", daemon=True)

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        return f"http://{HOST}:{self.port}/{self.token}/"

    @property
    def hosts(self) -> tuple[str, str]:
        """What a request may say that it asks."""
        return f"{HOST}:{self.port}", f"localhost:{self.port}"

    def __enter__(self) -> "StudioServer":
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._http.shutdown()
        self._http.server_close()
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=True, cancel_futures=True)

    def answer(self, question: str, body: bytes) -> tuple[HTTPStatus, dict[str, Any]]:
        """Status and answer to a question; a mistake of the asker, and a file that is gone, is a 400."""
        with self._place():
            try:
                message = _read_json(body)
                pool = self._slow if question in self.desk.slow else self._quick
                return HTTPStatus.OK, pool.submit(self.desk.answer, question, message).result()
            except (ValueError, OSError, RuntimeError, MemoryError, ImportError, TypeError) as error:
                return HTTPStatus.BAD_REQUEST, {"error": " ".join(str(error).split())[:1000] or type(error).__name__}
            except CancelledError:
                return HTTPStatus.SERVICE_UNAVAILABLE, {"error": "the studio has ended"}
            except Exception as error:  # a mistake of ours, or of the user's own pieces
                traceback.print_exc(file=sys.stderr)
                return HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"[:1000]}

    @contextmanager
    def _place(self) -> Iterator[None]:
        if not self._waiting.acquire(blocking=False):
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many questions at a time")
        try:
            yield
        finally:
            self._waiting.release()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, studio: StudioServer, *arguments: Any) -> None:
        self.studio = studio
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections break: nobody needs to read about it."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | socket.timeout | TimeoutError):
            traceback.print_exc(file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    server_version, sys_version = "cebm-studio", ""
    disable_nagle_algorithm = True
    server: _Listener

    def do_GET(self) -> None:
        self._guarded(self._file)

    def do_POST(self) -> None:
        self._guarded(self._question)

    def _guarded(self, act: Any) -> None:
        try:
            act(self._checked_path())
        except Refused as refusal:
            self.close_connection = True  # its body, if any, was not read
            self._send(refusal.status, "application/json", json.dumps({"error": refusal.words}).encode())

    def _checked_path(self) -> str:
        """The path behind the token, or a refusal."""
        host, origin = self.headers.get_all("Host", []), self.headers.get("Origin")
        if len(host) != 1 or host[0] not in self.server.studio.hosts:
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, "the studio is asked by another name than its own")
        if origin is not None and origin not in [f"http://{name}" for name in self.server.studio.hosts]:
            raise Refused(HTTPStatus.FORBIDDEN, "another page may not ask the studio")
        _, given, *rest = [*self.path.split("/", 2), ""]
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.server.studio.token.encode()):
            raise Refused(HTTPStatus.NOT_FOUND, "the address lacks its token; use the one that the studio printed")
        return rest[0]

    def _file(self, path: str) -> None:
        found = self.server.studio.page.get(path.partition("?")[0] or "index.html")
        if found is None:
            raise Refused(HTTPStatus.NOT_FOUND, "there is no such file")
        self._send(HTTPStatus.OK, *found)

    def _question(self, path: str) -> None:
        if not path.startswith("api/"):
            raise Refused(HTTPStatus.NOT_FOUND, "there is no such question")
        if self.headers.get_content_type() != "application/json":
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "a question is application/json")
        if "Transfer-Encoding" in self.headers:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "a question says its length")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 12):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "a question says its length")
        if int(length) > MOST_BYTES:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a question has at most {MOST_BYTES:,} bytes")
        body = self.rfile.read(int(length))
        status, answer = self.server.studio.answer(path.removeprefix("api/"), body)
        self._send(status, "application/json", json.dumps(answer).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **HEADERS}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: a line per mouse move helps nobody, and it would hold the token."""


def _page_files() -> dict[str, tuple[str, bytes]]:
    """Type and content of the page's files by name. Only these are served: no path of a request reaches the disk."""
    found = {}
    for entry in files("cebm.studio").joinpath("page").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in TYPES:
            found[entry.name] = (TYPES[suffix], entry.read_bytes())
    return found


def _read_json(body: bytes) -> Any:
    try:
        message = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("the question is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"the question is no JSON: {error}") from error
    check_json(message, "the question")
    return message


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")
