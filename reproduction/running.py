"""Run the tasks of claims in parallel, each task once; a second call continues where the first was stopped.

Files in the folder `out`: runs/KEY.json, one record per finished task; NN-SLUG.json and NN-SLUG.png, one per claim.
The ledger is written beside the folder, as `out`.md. The records are enough to continue in another checkout: a run
directory is no longer needed once its record is written.
"""

import json
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from time import perf_counter, sleep
from typing import Any

from cebm import __version__, legacy
from cebm.runs import Job, load_metrics, source_commit
from cebm.settings import from_json, to_json
from cebm.storage import write_atomically
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.page import write_ledger
from reproduction.trainings import Scale, Training


class ReproductionError(RuntimeError):
    """A task failed; the message names it. The records of all finished tasks are on disk."""


def reproduce(
    claims: Sequence[Claim], scale: Scale, seeds: int | None, workers: int, out: Path, runs: Path
) -> dict[str, Finding]:
    """Run the tasks that have no record yet, judge and draw every claim, and write the ledger. Returns the findings by
    slug."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    asked = {claim.slug: claim.tasks(scale, range(_seeds(claim, scale, seeds))) for claim in claims}
    unique = {task.key: task for tasks in asked.values() for task in tasks}
    (out / "runs").mkdir(parents=True, exist_ok=True)
    log = out / "failures.txt"
    log.unlink(missing_ok=True)
    commit = source_commit()
    findings: dict[str, Finding] = {}
    failures: dict[str, str] = {}

    def judge() -> None:
        """Judge each claim as soon as all of its tasks are finished, and update the ledger."""
        for claim in claims:
            tasks = asked[claim.slug]
            if claim.slug in findings or claim.slug in failures or not all(_finished(out, task.key) for task in tasks):
                continue
            try:
                findings[claim.slug] = conclude(claim, tasks, scale, out, commit)
                write_ledger(out)
            except Exception as error:  # a claim that cannot be judged must not stop the others
                failures[claim.slug] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"

    for key, task in unique.items():
        if not _finished(out, key):
            continue
        record = _load(out, key)
        if "skipped" in record["result"]:  # something was missing on that machine: try again
            _record(out, key).unlink()
            continue
        other = differing(today(record.get("settings", {})), task.settings)
        if other:
            raise ReproductionError(
                f"{_record(out, key)} was made with other settings ({other}); to have it run again, delete it and "
                f"{runs / key}"
            )
    missing = [task for key, task in unique.items() if not _finished(out, key)]
    _run_all(missing, len(unique), workers, out, runs, commit, failures, judge)
    judge()
    if failures:
        # The terminal shows one line; the file has the tracebacks.
        log.write_text("\n".join(f"{key}: {reason}\n" for key, reason in failures.items()))
        short = "; ".join(f"{key}: {reason.splitlines()[0]}" for key, reason in failures.items())
        raise ReproductionError(f"{len(failures)} failed, the others are kept: {short} (see {log})")
    return findings


def _seeds(claim: Claim, scale: Scale, asked: int | None) -> int:
    if asked is not None:
        return asked
    return claim.most_seeds if scale.name == "paper" else 2


def conclude(claim: Claim, tasks: Sequence[Task], scale: Scale, out: Path, commit: str | None = None) -> Finding:
    """Judge a claim by the records on disk, and write its JSON and its figure. `commit` is that of the judging code;
    each run has its own."""
    finding, record = judge_records(claim, tasks, scale, out)
    draw(claim, finding, out)  # before the record, so that every record has a figure
    text = json.dumps(record | {"commit": commit}, indent=1) + "\n"
    write_atomically(out / f"{claim.number:02d}-{claim.slug}.json", text.encode())
    return finding


def judge_records(claim: Claim, tasks: Sequence[Task], scale: Scale, out: Path) -> tuple[Finding, dict[str, Any]]:
    """The finding of a claim by the records on disk, and its entry in the ledger."""
    records = {task.key: _load(out, task.key) for task in tasks}
    results = Results.of(tasks, {key: record["result"] for key, record in records.items()})
    finding = claim.judge(results)
    return finding, {
        "claim": claim.statement,
        "number": claim.number,
        "slug": claim.slug,
        "section": claim.section,
        "protocol": claim.protocol,
        "metric": claim.metric,
        "rule": claim.rule,
        "verdict": finding.verdict,
        "measured": finding.measured,
        "comment": finding.comment,
        "seeds": sorted({task.seed for task in tasks}),
        "settings": asdict(scale),
        "trainings": _lengths(tasks),
        "commit": None,
        "commits_of_runs": sorted({str(record["commit"]) for record in records.values()}),
        "diverged": sorted(key for key, record in records.items() if record["result"].get("diverged")),
        "runs": sorted(records),
        "measurements": finding.numbers,
    }


def _lengths(tasks: Sequence[Task]) -> dict[str, dict[str, Any]]:
    """Steps, demonstrations and seeds of the trainings, by label."""
    found: dict[str, dict[str, Any]] = {}
    for task in tasks:
        if isinstance(task, Training):
            length: dict[str, Any] = {"steps": task.job.steps, "demonstrations": task.job.episodes, "seeds": []}
            found.setdefault(task.label, length)["seeds"].append(task.seed)
    return found


def today(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a record in today's words."""
    if settings.get("type") != "Job":
        return settings
    return to_json(from_json(legacy.job(settings, "record"), Job, "record"))


def differing(recorded: Any, asked: Any, name: str = "") -> str:
    """The first setting whose recorded value differs from the one asked for, or an empty text. Settings that only one
    of the two has do not count, as classes gain settings over time; nor do the names of classes, which move."""
    if isinstance(recorded, dict) and isinstance(asked, dict):
        shared = [key for key in recorded if key in asked and key != "type"]
        both = (differing(recorded[key], asked[key], key) for key in shared)
        return next((found for found in both if found), "")
    return "" if recorded == asked else f"{name}: {recorded!r}, now {asked!r}"


def draw(claim: Claim, finding: Finding, out: Path) -> None:
    """Write the claim's figure as PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'cebm[plot]'") from error
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    claim.draw(finding, figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out / f"{claim.number:02d}-{claim.slug}.png", dpi=110, metadata={"Software": None})


def _load(out: Path, key: str) -> dict[str, Any]:
    return json.loads(_record(out, key).read_bytes())


def _record(out: Path, key: str) -> Path:
    return out / "runs" / f"{key}.json"


def _finished(out: Path, key: str) -> bool:
    return _record(out, key).exists()


def _run_all(
    tasks: list[Task],
    of: int,
    workers: int,
    out: Path,
    runs: Path,
    commit: str | None,
    failures: dict[str, str],
    finished: Callable[[], None],
) -> None:
    """Run each task in a worker process with one thread, the longest task first. A task that fails is noted in
    `failures` and the others continue; `finished` is called after each task."""
    if not tasks:
        return
    ahead = deque(sorted(tasks, key=lambda task: -task.cost))
    context = multiprocessing.get_context("spawn")
    with _Display(tasks, of, runs) as display:
        while ahead:  # a worker that is killed breaks its pool: continue with a new one
            with ProcessPoolExecutor(workers, context, initializer=_prepare_worker, initargs=(os.getpid(),)) as pool:
                for ended in _outcomes(ahead, workers, lambda task: _submit(pool, task, out, runs, commit)):
                    failures.update({task.key: str(error) or type(error).__name__ for task, error in ended if error})
                    for task, _ in ended:
                        display.finished(task)
                    if ended:
                        finished()
                    display.update()


def _outcomes(
    ahead: deque[Task], workers: int, submit: Callable[[Task], Future[None]]
) -> Iterator[list[tuple[Task, BaseException | None]]]:
    """Submit tasks from `ahead` until none is left or the pool is broken. Yields the tasks that have ended, with their
    errors, at least every two seconds."""
    waiting: dict[Future[None], Task] = {}
    broken = False
    while waiting or (ahead and not broken):
        # Submit only as many tasks as there are workers: a task in the queue of a broken pool would be lost.
        while ahead and not broken and len(waiting) < workers:
            task = ahead.popleft()
            waiting[submit(task)] = task
        done, _ = wait(waiting, timeout=2.0, return_when=FIRST_COMPLETED)
        ended = [(waiting.pop(future), future.exception()) for future in done]
        broken = broken or any(isinstance(error, BrokenProcessPool) for _, error in ended)
        yield ended


def _submit(pool: Executor, task: Task, out: Path, runs: Path, commit: str | None) -> Future[None]:
    """A task submitted to a broken pool fails with the same error as the tasks that were running in it."""
    try:
        return pool.submit(run_task, task, out, runs, commit)
    except BrokenProcessPool as error:
        failed: Future[None] = Future()
        failed.set_exception(error)
        return failed


def _prepare_worker(parent: int) -> None:
    """Limit the worker to one thread, and make it stop when its parent has died: it must not write into the directories
    of the next reproduction."""
    import torch

    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)  # a training saves a checkpoint and ends
        sleep(60.0)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def run_task(task: Task, out: Path, runs: Path, commit: str | None = None) -> None:
    """Run a task and write its record."""
    began = perf_counter() - _seconds_before(runs / task.key)
    try:
        with _alone(runs / f"{task.key}.lock"):
            result = task.run(runs / task.key)
    except Exception as error:
        # Some exceptions cannot be pickled; their text always can.
        raise ReproductionError(f"{error}\n{traceback.format_exc()}") from None
    record: dict[str, Any] = {
        "key": task.key,
        "label": task.label,
        "seed": task.seed,
        "cebm": __version__,
        "commit": commit,
        "settings": task.settings,
        "seconds": round(perf_counter() - began, 1),
        "result": result,
    }
    write_atomically(_record(out, task.key), (json.dumps(record) + "\n").encode())


def _seconds_before(directory: Path) -> float:
    """Seconds that a stopped training had already taken, by its last row of metrics."""
    rows = load_metrics(directory)
    return float(rows[-1]["seconds"]) if rows else 0.0


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lock a run directory against a second process; the system releases the lock when the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # no Unix: there is no lock, and two processes at once are not noticed
        yield
        return
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ReproductionError(f"another process is at it, {path} is locked") from error
        yield


class _Display:
    """A progress bar over all tasks. A running training counts by the steps in its metrics."""

    def __init__(self, tasks: list[Task], of: int, runs: Path) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("[bold]reproduce"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
        )
        self._tasks, self._of, self._runs = tasks, of, runs
        self._done: set[str] = set()
        self._total = sum(task.cost for task in tasks)
        self._earlier, self._began = self._completed(), perf_counter()
        self._id = self._bar.add_task("", total=self._total, text="", left="")

    def finished(self, task: Task) -> None:
        self._done.add(task.key)
        if not self._console.is_terminal:
            text = f"{len(self._done)} of {len(self._tasks)}: {task.key}; {self._left(self._completed())}"
            self._console.print(text, highlight=False, markup=False)

    def _left(self, completed: float) -> str:
        """Remaining time, by the mean speed since the start; the current speed jumps, as evaluations log nothing."""
        if completed <= self._earlier:
            return ""
        pace = (perf_counter() - self._began) / (completed - self._earlier)
        minutes = round(pace * (self._total - completed) / 60)
        return f"about {minutes // 60} h {minutes % 60:02d} min left"

    def _completed(self) -> float:
        completed = 0.0
        for task in self._tasks:
            if task.key in self._done:
                completed += task.cost
            elif isinstance(task, Training) and (self._runs / task.key / "metrics.jsonl").exists():
                rows = load_metrics(self._runs / task.key)
                completed += task.cost * rows[-1]["step"] / task.job.steps if rows else 0
        return completed

    def update(self) -> None:
        if not self._console.is_terminal:
            return
        completed = self._completed()
        text = f"{self._of - len(self._tasks) + len(self._done)} of {self._of} runs"
        self._bar.update(self._id, completed=completed, text=text, left=self._left(completed))

    def __enter__(self) -> "_Display":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()
