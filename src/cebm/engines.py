"""Where many tasks run: processes of this machine, submitit (SLURM) or Ray.

A task is the name of a function and words for it, `("cebm.sweep:work", "runs/study", "ibc-0")`. Nothing is pickled by
us, and whatever a task finds out it writes to files. So a task that is lost (a killed worker, a node that went down)
is simply run again, and goes on from what it has written.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, runtime_checkable

from cebm.threads import wait_shortly

GRACE = 20.0
"""Seconds that the result of a job may take to arrive, after SLURM has forgotten the job."""
Words = tuple[str, ...]
"""The function as `module:name`, then its arguments."""


class TaskError(RuntimeError):
    """Tasks failed, again and again; the message names them. All others are finished."""


@runtime_checkable
class Engine(Protocol):
    """Runs tasks elsewhere, at most `workers` at a time."""

    workers: int

    def submit(self, task: Words) -> Any:
        """Starts a task and returns a handle."""
        ...

    def outcome(self, handle: Any) -> str | None:
        """None while it runs, "" when it has ended well, else what went wrong."""
        ...

    def close(self) -> None:
        """Ends what still runs, so that it can go on later."""
        ...


def call(task: Sequence[str]) -> None:
    """Runs a task in this process."""
    module, _, name = task[0].partition(":")
    getattr(importlib.import_module(module), name)(*task[1:])


# ---------------------------------------------------------------------------------------------- this machine


@dataclass
class Local:
    """Processes of this machine, one per task, with one thread each unless `threads` says otherwise."""

    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    threads: int = 1
    logs: Path | None = None
    """Folder for what the tasks print; None: they print to the driver's standard error."""

    _running: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        _check_workers(self.workers)

    def submit(self, task: Words) -> tuple[subprocess.Popen[bytes], Path | None]:
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads), "CEBM_PARENT": str(os.getpid())}
        wait_shortly(environment)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        log = None
        if self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True)
            log = self.logs / f"{task[-1].replace(os.sep, '-')}.log"
        command = [sys.executable, "-m", "cebm.engines", *task]
        if log is None:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        else:
            with open(log, "ab") as file:
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
                )
        self._running.append(process)
        return process, log

    def outcome(self, handle: tuple[subprocess.Popen[bytes], Path | None]) -> str | None:
        process, log = handle
        code = process.poll()
        if code is None:
            return None
        if process in self._running:
            self._running.remove(process)
        if code == 0:
            return ""
        if code < 0:
            return f"it was killed ({signal.Signals(-code).name})"
        last = _last_line(log) if log is not None else ""
        return last or f"it ended with exit code {code}"

    def close(self) -> None:
        for process in self._running:
            process.terminate()  # a run saves a checkpoint and ends
        deadline = time.monotonic() + 60
        for process in self._running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""


def _watch_parent() -> None:
    """Ends this process when the one that started it is gone: two drivers must not work in one folder."""
    parent = int(os.environ.get("CEBM_PARENT", "0"))
    if not parent:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)  # a run saves a checkpoint and ends
        time.sleep(60)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


# ---------------------------------------------------------------------------------------------- others


@dataclass
class Submitit:
    """Jobs of submitit: on SLURM where there is one, else processes of this machine; `cluster="debug"` runs them in
    this very process. `options` are those of `executor.update_parameters`, such as `slurm_partition`."""

    logs: Path
    """Folder for submitit's own files; on SLURM all nodes must see it."""
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    threads: int = 1
    cluster: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    _executor: Any = field(default=None, init=False)
    _running: list[Any] = field(default_factory=list, init=False)
    _missed: dict[str, float] = field(default_factory=dict, init=False)
    _looked: float = field(default=-1e9, init=False)

    def __post_init__(self) -> None:
        _check_workers(self.workers)
        try:
            import submitit
        except ImportError as error:
            raise ImportError("the engine submitit needs an extra: pip install 'cebm[submitit]'") from error
        self._executor = submitit.AutoExecutor(folder=str(self.logs), cluster=self.cluster)
        usual = {"timeout_min": 60 * 24, "cpus_per_task": self.threads}
        self._executor.update_parameters(**(usual | dict(self.options)))

    def submit(self, task: Words) -> Any:
        job = self._executor.submit(_elsewhere, task, self.threads, [entry for entry in sys.path if entry])
        self._running.append(job)
        return job

    def outcome(self, handle: Any) -> str | None:
        if handle.done():
            error = handle.exception()
            found = "" if error is None else _last_of(error)
        elif self._lost(handle.job_id):
            found = "the job left SLURM's queue without a result"
        else:
            return None
        if handle in self._running:
            self._running.remove(handle)
        return found

    def _lost(self, job: str) -> bool:
        """Whether SLURM's queue has been without a job for `GRACE` seconds, in which its result could still arrive.
        submitit asks `sacct` alone, which knows nothing where a cluster keeps no accounts."""
        if self._executor.cluster != "slurm":
            return False
        now = time.monotonic()
        if now - self._looked > 5:
            self._looked, queued = now, _queued()
            for each in self._running:
                if queued is None or each.job_id in queued:
                    self._missed.pop(each.job_id, None)
                else:
                    self._missed.setdefault(each.job_id, now)
        return now - self._missed.get(job, now) > GRACE

    def close(self) -> None:
        for job in self._running:
            job.cancel()
        self._running.clear()


def _queued() -> set[str] | None:
    """The jobs in SLURM's queue; None where it does not answer."""
    try:
        told = subprocess.run(["squeue", "--noheader", "--format=%A"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return set(told.stdout.split()) if told.returncode == 0 else None


@dataclass
class Ray:
    """Tasks of Ray, on a cluster by its address or on this machine."""

    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    threads: int = 1
    address: str | None = None

    _ray: Any = field(default=None, init=False)
    _remote: Any = field(default=None, init=False)
    _running: list[Any] = field(default_factory=list, init=False)
    _began: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        _check_workers(self.workers)
        try:
            import ray
        except ImportError as error:
            raise ImportError("the engine ray needs an extra: pip install 'cebm[ray]'") from error
        self._ray = ray
        if not ray.is_initialized():
            here: dict[str, Any] = {}
            if self.address is None:
                here = {"num_cpus": self.workers * self.threads, "include_dashboard": False}
            ray.init(address=self.address, log_to_driver=False, **here)
            self._began = True
        # Lost tasks are run again by the driver, which counts them.
        self._remote = ray.remote(num_cpus=self.threads, max_retries=0)(_elsewhere)

    def submit(self, task: Words) -> Any:
        reference = self._remote.remote(task, self.threads, [entry for entry in sys.path if entry])
        self._running.append(reference)
        return reference

    def outcome(self, handle: Any) -> str | None:
        ready, _ = self._ray.wait([handle], timeout=0)
        if not ready:
            return None
        if handle in self._running:
            self._running.remove(handle)
        try:
            self._ray.get(handle)
        except Exception as error:  # of the task, or of the worker that is gone
            return _last_of(error)
        return ""

    def close(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference)
        self._running.clear()
        if self._began:
            self._ray.shutdown()


def _elsewhere(task: Words, threads: int, places: Sequence[str]) -> None:
    """Runs a task in a process that an engine has started."""
    sys.path.extend(place for place in places if place not in sys.path)
    import torch

    torch.set_num_threads(threads)
    call(task)


def _last_of(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _check_workers(workers: int) -> None:
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")


# ---------------------------------------------------------------------------------------------- driving


@dataclass(frozen=True)
class Ended:
    """A task that is over."""

    name: str
    error: str
    """Empty if it ended well."""
    attempts: int


def drive(
    tasks: Mapping[str, Words],
    engine: Engine,
    *,
    retries: int = 2,
    every: float = 0.2,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[Ended]:
    """Runs tasks, in their order, and yields each that is over. One that fails or is lost goes to the end of the queue,
    and so to another worker, up to `retries` times more. `tick` is called in between, to show progress."""
    waiting, attempts = deque(tasks), dict.fromkeys(tasks, 0)
    running: dict[str, Any] = {}
    while waiting or running:
        while waiting and len(running) < engine.workers:
            name = waiting.popleft()
            attempts[name] += 1
            running[name] = engine.submit(tasks[name])
        ended = [(name, found) for name, handle in running.items() if (found := engine.outcome(handle)) is not None]
        for name, error in ended:
            del running[name]
            if error and attempts[name] <= retries:
                waiting.append(name)
            else:
                yield Ended(name, error, attempts[name])
        tick()
        if not ended:
            time.sleep(every)


@contextmanager
def closing(engine: Engine) -> Iterator[Engine]:
    """Ends what still runs on the engine, whatever happens in the block; SIGTERM counts as an interruption."""
    try:
        before = signal.signal(signal.SIGTERM, _terminated)
    except ValueError:  # not in the main thread, where signals do not arrive
        before = None
    try:
        yield engine
    finally:
        engine.close()
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _terminated(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """What a process of `Local` runs. Torch takes its number of threads from OMP_NUM_THREADS."""
    _watch_parent()
    try:
        call(sys.argv[1:])
    except Exception as error:
        import traceback

        traceback.print_exc()
        text = " ".join(str(error).split())
        sys.exit(f"{type(error).__name__}: {text}")


if __name__ == "__main__":
    main()
