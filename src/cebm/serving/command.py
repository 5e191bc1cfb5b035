"""`cebm serve`: a policy from disk, signals, and logs on stderr."""

import logging
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cebm.loading import load
from cebm.serving import serve
from cebm.serving.access import read_token
from cebm.serving.metrics import LOG, JsonLines, log
from cebm.serving.requests import Limits
from cebm.settings import import_piece_module

if TYPE_CHECKING:
    from cebm.cli import Serve
    from cebm.serving.server import Server


def serve_policy(arguments: "Serve") -> None:
    """Serves until SIGTERM or SIGINT. The first line of the output is the address."""
    if not 0 <= arguments.port < 2**16:
        raise ValueError(f"port must be between 0 and 65535, got {arguments.port}")
    if arguments.watch < 0:
        raise ValueError(f"watch must be at least 0, got {arguments.watch}")
    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ValueError(f"threads must be at least 1, got {arguments.threads}")
        torch.set_num_threads(arguments.threads)
    for reference in arguments.with_:
        import_piece_module(reference)
    limits = Limits(connections=arguments.connections, rate=arguments.rate, hang_s=arguments.hang)
    token = None if arguments.token_file is None else read_token(arguments.token_file)
    _log_to_stderr(arguments.verbose)
    wake = threading.Event()
    asked: set[int] = set()

    def ask(number: int, frame: Any) -> None:
        asked.add(number)
        wake.set()

    kept = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        seen = _state(arguments.policy)
        with serve(
            load(arguments.policy, arguments.device),
            host=arguments.host,
            port=arguments.port,
            token=token,
            tls_certificate=arguments.tls_certificate,
            tls_key=arguments.tls_key,
            limits=limits,
            name=arguments.policy.name,
        ) as server:
            print(server.url, flush=True)
            while not server.wait(0.0) and not {signal.SIGTERM, signal.SIGINT} & asked:
                wake.wait(arguments.watch or 1.0)
                wake.clear()
                now = _state(arguments.policy) if arguments.watch else seen
                if signal.SIGHUP in asked or now != seen:
                    asked.discard(signal.SIGHUP)
                    seen = _state(arguments.policy)
                    _reload(server, arguments)
            if server.wait(0.0):
                raise ChildProcessError("the server ended by itself: its log says why")
    finally:
        for number, before in kept.items():
            signal.signal(number, before)


def _reload(server: "Server", arguments: "Serve") -> None:
    """The policy on disk, if it can be read and served; else the old one goes on, and the log says why."""
    try:
        server.reload(load(arguments.policy, arguments.device))
    except (ValueError, OSError) as error:  # a StorageError is a ValueError
        log(logging.ERROR, "the policy was not reloaded", reason=str(error))


def _state(directory: Path) -> list[tuple[str, int, int]]:
    """What tells a policy on disk from the one before: its files' times and sizes."""
    where = directory / "best" if (directory / "run.json").exists() else directory
    found = []
    with suppress(OSError):  # files come and go while a run writes its next best policy
        for path in sorted(where.resolve().rglob("*")):
            state = path.stat()
            found.append((str(path), state.st_mtime_ns, state.st_size))
    return found


def _log_to_stderr(verbose: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    LOG.handlers, LOG.propagate = [handler], False
    LOG.setLevel(logging.DEBUG if verbose else logging.INFO)
