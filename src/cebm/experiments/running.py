"""Runs the tasks of claims over the cores, once each, and goes on where it was stopped.

Under `out`: runs/KEY.json, one record per finished task, from which another checkout resumes; NN-SLUG.json and
NN-SLUG.png, one per claim; and beside `out` the ledger, `out`.md. Run directories live elsewhere and are not needed
once their record is written.
"""

import json
import multiprocessing
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from cebm import __version__
from cebm.experiments.ledger import Claim, Finding, Result, Results, Scale, Task, Training
from cebm.storage import write_atomically
from cebm.training import load_metrics, source_commit


class ReproductionError(RuntimeError):
    """Some task failed; the message names it. What is finished is on disk."""


def reproduce(
    claims: Sequence[Claim], scale: Scale, seeds: int | None, workers: int, out: Path, runs: Path
) -> dict[str, Finding]:
    """Runs what is missing, then judges and draws every claim; by slug."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    asked = {claim.slug: claim.tasks(scale, range(_seeds(claim, scale, seeds))) for claim in claims}
    unique = {task.key: task for tasks in asked.values() for task in tasks}
    (out / "runs").mkdir(parents=True, exist_ok=True)
    missing = [task for key, task in unique.items() if not _record(out, key).exists()]
    _run_all(missing, len(unique), workers, out, runs)
    return {claim.slug: conclude(claim, asked[claim.slug], scale, out) for claim in claims}


def _seeds(claim: Claim, scale: Scale, asked: int | None) -> int:
    if asked is not None:
        return asked
    return claim.most_seeds if scale.name == "paper" else 2


def conclude(claim: Claim, tasks: Sequence[Task], scale: Scale, out: Path) -> Finding:
    """Judges a claim by the records on disk, and writes its JSON and its figure."""
    results = Results.of(tasks, {task.key: read(out, task.key) for task in tasks})
    finding = claim.judge(results)
    seeds = sorted({task.seed for task in tasks})
    record = {
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
        "seeds": seeds,
        "settings": asdict(scale),
        "commit": source_commit(),
        "runs": sorted({task.key for task in tasks}),
        "measurements": finding.numbers,
    }
    write_atomically(out / f"{claim.number:02d}-{claim.slug}.json", (json.dumps(record, indent=1) + "\n").encode())
    draw(claim, finding, out)
    return finding


def draw(claim: Claim, finding: Finding, out: Path) -> None:
    """The claim's figure, as PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'cebm[plot]'") from error
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    claim.draw(finding, figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out / f"{claim.number:02d}-{claim.slug}.png", dpi=110, metadata={"Software": None})


def read(out: Path, key: str) -> Result:
    """The result of a finished task."""
    return json.loads(_record(out, key).read_bytes())["result"]


def _record(out: Path, key: str) -> Path:
    return out / "runs" / f"{key}.json"


def _run_all(tasks: list[Task], of: int, workers: int, out: Path, runs: Path) -> None:
    """Each task in a process of its own, one thread each, the long ones first."""
    if not tasks:
        return
    tasks = sorted(tasks, key=lambda task: -task.cost)
    failures: dict[str, str] = {}
    context = multiprocessing.get_context("spawn")
    with (
        _Display(tasks, of, runs) as display,
        ProcessPoolExecutor(workers, context, initializer=_one_thread) as pool,
    ):
        waiting: dict[Future[None], Task] = {pool.submit(run_task, task, out, runs): task for task in tasks}
        try:
            while waiting:
                done, _ = wait(waiting, timeout=2.0, return_when=FIRST_COMPLETED)
                for future in done:
                    task = waiting.pop(future)
                    error = future.exception()
                    if error is not None:
                        failures[task.key] = str(error) or type(error).__name__
                    display.finished(task)
                display.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failures:
        # One line for the terminal, the rest for whoever looks into it.
        log = out / "failures.txt"
        log.write_text("\n".join(f"{key}: {reason}\n" for key, reason in failures.items()))
        short = "; ".join(f"{key}: {reason.splitlines()[0]}" for key, reason in failures.items())
        raise ReproductionError(
            f"{len(failures)} of {len(tasks)} tasks failed, the others are kept: {short} (see {log})"
        )


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def run_task(task: Task, out: Path, runs: Path) -> None:
    """Runs a task and writes its record."""
    began = perf_counter()
    try:
        result = task.run(runs / task.key)
    except Exception as error:
        # Not every exception travels between processes whole; its text does.
        raise ReproductionError(f"{error}\n{traceback.format_exc()}") from None
    record: dict[str, Any] = {
        "key": task.key,
        "label": task.label,
        "seed": task.seed,
        "cebm": __version__,
        "commit": source_commit(),
        "seconds": round(perf_counter() - began, 1),
        "result": result,
    }
    write_atomically(_record(out, task.key), (json.dumps(record) + "\n").encode())


class _Display:
    """One bar over all tasks; trainings under way count by the steps in their metrics."""

    def __init__(self, tasks: list[Task], of: int, runs: Path) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("[bold]reproduce"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
        )
        self._tasks, self._of, self._runs = tasks, of, runs
        self._done: set[str] = set()
        self._last = -1.0
        self._id = self._bar.add_task("", total=sum(task.cost for task in tasks), text="")

    def finished(self, task: Task) -> None:
        self._done.add(task.key)
        if not self._console.is_terminal:
            text = f"{len(self._done)} of {len(self._tasks)}: {task.key}"
            self._console.print(text, highlight=False, markup=False)

    def update(self) -> None:
        completed = 0.0
        for task in self._tasks:
            if task.key in self._done:
                completed += task.cost
            elif isinstance(task, Training) and (self._runs / task.key / "metrics.jsonl").exists():
                rows = load_metrics(self._runs / task.key)
                completed += rows[-1]["step"] if rows else 0
        earlier = self._of - len(self._tasks)
        text = f"{earlier + len(self._done)} of {self._of} runs"
        self._bar.update(self._id, completed=completed, text=text)

    def __enter__(self) -> "_Display":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()
