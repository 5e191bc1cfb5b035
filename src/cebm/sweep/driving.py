"""The driver of a study: what is missing is run, on an engine, until the study names nothing new."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cebm.engines import Engine, TaskError, closing, drive
from cebm.evaluation import evaluate
from cebm.runs import load_metrics, material_of, trainer_of
from cebm.storage import locked
from cebm.sweep.display import Display, share_of_steps
from cebm.sweep.results import records
from cebm.sweep.studies import Planned, Record, digest, runs_of
from cebm.sweep.working import write_plan

EPISODES = 200
"""Held-out episodes that measure the best policy of a run."""


def sweep(
    study: Any,
    engine: Engine,
    out: str | Path,
    *,
    pieces: Sequence[str] = (),
    measure: Callable[[Path], dict[str, Any]] | str | None = None,
    episodes: int = EPISODES,
    retries: int = 2,
    progress: bool = True,
) -> list[Record]:
    """Runs a study in the folder `out` and returns the records of its runs. Runs that have a record are not repeated,
    others go on where they were stopped. `measure` (a function, or its name as `module:function`) finds the numbers of
    a finished run, from its directory; by default they are those of `cebm eval`. A TaskError names the runs that failed
    `retries` + 1 times; all others are finished.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    measured_by = measure if measure is None or isinstance(measure, str) else _name_of(measure)
    failed: dict[str, str] = {}
    with locked(folder, "study"), closing(engine):
        while True:
            known = records(folder)
            planned = runs_of(study, list(known.values()))
            missing = {key: run for key, run in planned.items() if key not in known and key not in failed}
            if not missing:
                break
            for run in missing.values():
                write_plan(folder, run, tuple(pieces), measured_by, episodes)
            tasks = {key: ("cebm.sweep.working:work", str(folder.absolute()), key) for key in missing}
            costs = {key: float(run.job.steps) for key, run in missing.items()}
            share = partial(_share_of, folder, missing)
            with Display("sweep", costs, len(planned), share, progress) as display:
                for ended in drive(tasks, engine, retries=retries, tick=display.update):
                    if ended.error:
                        failed[ended.name] = f"{ended.error} ({ended.attempts} attempts)"
                    display.finished(ended.name, ended.error)
    if failed:
        listed = "; ".join(f"{key}: {reason}" for key, reason in failed.items())
        raise TaskError(f"{len(failed)} of {len(planned)} runs failed, the others are finished: {listed}")
    return [known[key] for key in planned]


def _name_of(function: Callable[..., Any]) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "<lambda>")
    if "<" in name or not module:
        raise ValueError(f"measure must be a function of a module, so that workers can find it, got {function!r}")
    return f"{module}:{name}"


def _share_of(folder: Path, runs: Mapping[str, Planned], key: str) -> float:
    """How much of a run is done."""
    directory, run = folder / "runs" / key, runs[key]
    rows = load_metrics(directory) if (directory / "metrics.jsonl").exists() else []
    return share_of_steps(rows, run.job.steps)


# ---------------------------------------------------------------------------------------------- before it starts


@dataclass(frozen=True)
class Estimate:
    """What a study costs, by a short calibration of each of its settings on this machine, one thread."""

    runs: int
    finished: int
    core_hours: float
    disk_bytes: int

    def words(self, workers: int) -> str:
        hours = self.core_hours / workers
        return (
            f"{self.runs} runs, {self.finished} of them finished; {self.core_hours:.2g} core-hours, "
            f"{hours:.2g} hours with {workers} workers; {self.disk_bytes / 1e6:.0f} MB on disk"
        )


def estimate(study: Any, out: str | Path, episodes: int = EPISODES) -> Estimate:
    """The cost of what is missing of a study, as far as it is planned. Takes some seconds per kind of run."""
    known = records(Path(out))
    planned = runs_of(study, list(known.values()))
    missing = [run for key, run in planned.items() if key not in known]
    costs: dict[str, tuple[float, int]] = {}
    for run in missing:
        kind = digest(run.job)
        if kind not in costs:
            costs[kind] = _cost(run, episodes)
    each = [costs[digest(run.job)] for run in missing]
    return Estimate(
        len(planned), len(planned) - len(missing), sum(cost[0] for cost in each) / 3600, sum(cost[1] for cost in each)
    )


def _cost(run: Planned, episodes: int) -> tuple[float, int]:
    """Seconds and bytes of one run."""
    import torch

    job, threads = run.job, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        material = material_of(job)
        trainer = trainer_of(job, material)
        trainer.step()
        began = time.perf_counter()
        for _ in range(3):
            trainer.step()
        seconds = job.steps * (time.perf_counter() - began) / 3
        if material.task is not None:
            few = 2
            began = time.perf_counter()
            evaluate(trainer.policy(), material.task, episodes=few, latency_calls=0)
            per_episode = (time.perf_counter() - began) / few
            evaluations = math.ceil(job.steps / job.evaluate_every)
            seconds += per_episode * (evaluations * job.evaluation_episodes + episodes)
        state = sum(tensor.numel() * tensor.element_size() for tensor in trainer.state().values())
    finally:
        torch.set_num_threads(threads)
    checkpoints = job.keep_checkpoints or math.ceil(job.steps / job.checkpoint_every)
    return seconds, state * (checkpoints + 1)
