"""What a worker does: one run, from its plan to its record."""

import importlib
import time
from pathlib import Path
from typing import Any

from cebm.evaluation import TEST_SEED, evaluate
from cebm.loading import load
from cebm.provenance import source_commit
from cebm.runs import DivergedError, Job, load_metrics, material_of, resume, train
from cebm.selection import score
from cebm.settings import from_json, import_piece_module, to_json
from cebm.storage import LockedError, read_document, write_document
from cebm.sweep.studies import Planned

_WAIT = 0.5
_LEFT_OUT = ("kind", "seconds", "steps_per_second", "seed", "action_ms_p50", "action_ms_p99")
"""Times differ from machine to machine; a record has none but its `seconds`."""


def write_plan(folder: Path, run: Planned, pieces: tuple[str, ...], measure: str | None, episodes: int) -> None:
    """All that a worker needs to know of a run."""
    (folder / "plans").mkdir(parents=True, exist_ok=True)
    plan = {
        "key": run.key,
        "job": to_json(run.job),
        "values": to_json(dict(run.values)),
        "pieces": list(pieces),
        "measure": measure,
        "episodes": episodes,
    }
    write_document(folder / "plans" / f"{run.key}.json", plan)


def work(folder: str, key: str) -> None:
    """Trains a run of a study, or goes on with it, and writes its record. A run that another process is still at is
    waited for."""
    place = Path(folder)
    record, directory = place / "records" / f"{key}.json", place / "runs" / key
    plan = read_document(place / "plans" / f"{key}.json", "plan")
    for piece in plan["pieces"]:
        import_piece_module(piece)
    job = from_json(plan["job"], Job, key)
    while not record.exists():
        try:
            result = _result(job, directory, plan["measure"], plan["episodes"])
        except LockedError:
            time.sleep(_WAIT)
            continue
        rows = load_metrics(directory)
        found = {
            "key": key,
            "label": job.name,
            "seed": job.seed,
            "values": plan["values"],
            "settings": plan["job"],
            "commit": source_commit(),
            "seconds": float(rows[-1]["seconds"]) if rows else 0.0,
            "result": result,
        }
        record.parent.mkdir(parents=True, exist_ok=True)
        write_document(record, found)


def _result(job: Job, directory: Path, measure: str | None, episodes: int) -> dict[str, Any]:
    try:
        if (directory / "run.json").exists():
            resume(directory)
        else:
            train(job, directory)
    except DivergedError as error:
        return {"diverged": str(error)}
    if measure is not None:
        module, _, name = measure.partition(":")
        return dict(getattr(importlib.import_module(module), name)(directory))
    return measured(job, directory, episodes)


def measured(job: Job, directory: Path, episodes: int) -> dict[str, Any]:
    """The numbers of a finished run: its last row of training, the validation of its best policy, and that policy on
    held-out episodes where the run has a task."""
    rows = load_metrics(directory)
    training: dict[str, Any] = next((row for row in reversed(rows) if row["kind"] == "train"), {})
    task = material_of(job).task
    metric = "validation_action_error" if task is None else task.metric
    tried = [row for row in rows if row["kind"] == "evaluation"]
    best = max(tried, key=lambda row: score(row, task))
    found = {f"training.{name}": value for name, value in training.items() if name not in _LEFT_OUT}
    found |= {f"validation.{name}": value for name, value in best.items() if name not in _LEFT_OUT}
    found["curve"] = [[row["step"], row.get(metric)] for row in tried]
    found["metric"] = metric
    if task is not None and episodes:
        summary = evaluate(load(directory), task, episodes=episodes, seed=TEST_SEED, latency_calls=0).summary()
        numbers = {name: value for name, value in summary.items() if isinstance(value, int | float | type(None))}
        found |= {f"test.{name}": value for name, value in numbers.items() if name not in _LEFT_OUT}
    return found
