"""Run the tasks of claims on an engine, each task once; a second call continues where the first was stopped.

Files in the folder `out`: runs/KEY.json, one record per finished task; NN-SLUG.json and NN-SLUG.png, one per claim.
The ledger is written beside the folder, as `out`.md. The records are enough to continue in another checkout: the folder
`runs`, with the run directories, plans and logs, is no longer needed once the records are written.
"""

import importlib
import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from cebm import __version__, legacy
from cebm.engines import Engine, closing, drive
from cebm.provenance import source_commit
from cebm.runs import Job, load_metrics
from cebm.settings import from_json, to_json
from cebm.storage import read_document, write_atomically, write_document
from cebm.sweep.display import Display, share_of_steps
from reproduction.ledger import Claim, Computation, Finding, Results, Task
from reproduction.page import write_ledger
from reproduction.trainings import Result, Scale, Training


class ReproductionError(RuntimeError):
    """A task failed; the message names it. The records of all finished tasks are on disk."""


def reproduce(
    claims: Sequence[Claim],
    scale: Scale,
    seeds: int | None,
    engine: Engine,
    out: Path,
    runs: Path,
    retries: int = 2,
) -> dict[str, Finding]:
    """Run the tasks that have no record yet and those that follow from their results, judge and draw every claim, and
    write the ledger. Returns the findings by slug. A task that fails or is lost is tried again `retries` times."""
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    counts = {claim.slug: _seeds(claim, scale, seeds) for claim in claims}
    asked = {claim.slug: claim.tasks(scale, range(counts[claim.slug])) for claim in claims}
    unique = {task.key: task for tasks in asked.values() for task in tasks}
    (out / "runs").mkdir(parents=True, exist_ok=True)
    log = out / "failures.txt"
    log.unlink(missing_ok=True)
    commit = source_commit()
    findings: dict[str, Finding] = {}
    failures: dict[str, str] = {}

    def following(claim: Claim) -> dict[str, Task]:
        """What a claim asks for by its results so far, and has no record yet."""
        tasks = claim.further(scale, range(counts[claim.slug]), results_in(out))
        return {task.key: task for task in tasks if not _finished(out, task.key)}

    def judge() -> None:
        """Judge each claim as soon as all of its tasks are finished, and update the ledger."""
        for claim in claims:
            tasks = asked[claim.slug]
            if claim.slug in findings or claim.slug in failures or not all(_finished(out, task.key) for task in tasks):
                continue
            if any(key not in failures for key in following(claim)):
                continue
            try:
                findings[claim.slug] = conclude(claim, tasks, scale, out, commit)
                write_ledger(out)
            except Exception as error:  # a claim that cannot be judged must not stop the others
                failures[claim.slug] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"

    _check_records(unique, out, runs)
    missing = [task for key, task in unique.items() if not _finished(out, key)]
    failures |= run_all(missing, len(unique), engine, out, runs, commit, judge, retries)
    judge()
    while more := {key: task for claim in claims for key, task in following(claim).items() if key not in failures}:
        failures |= run_all(list(more.values()), len(more), engine, out, runs, commit, judge, retries)
        judge()
    if failures:
        # The terminal shows one line; the file has the tracebacks.
        log.write_text("\n".join(f"{key}: {reason}\n" for key, reason in failures.items()))
        short = "; ".join(f"{key}: {reason.splitlines()[0]}" for key, reason in failures.items())
        raise ReproductionError(f"{len(failures)} failed, the others are kept: {short} (see {log})")
    return findings


def _check_records(tasks: Mapping[str, Task], out: Path, runs: Path) -> None:
    """Refuse records of other settings; remove those of tasks that were skipped, as something was missing on that
    machine: they are tried again."""
    for key, task in tasks.items():
        if not _finished(out, key):
            continue
        record = _load(out, key)
        if "skipped" in record["result"]:
            _record(out, key).unlink()
            continue
        other = differing(today(record.get("settings", {})), task.settings)
        if other:
            raise ReproductionError(
                f"{_record(out, key)} was made with other settings ({other}); to have it run again, delete it and "
                f"{runs / key}"
            )


def judge_anew(claims: Sequence[Claim], scale: Scale, seeds: int | None, out: Path) -> dict[str, Finding]:
    """Judge claims by the records that there are, and write the ledger; nothing is run."""
    commit, findings = source_commit(), {}
    for claim in claims:
        tasks = claim.tasks(scale, range(_seeds(claim, scale, seeds)))
        lacking = [task.key for task in tasks if not _finished(out, task.key)]
        if lacking:
            raise ReproductionError(f"claim {claim.slug} has no record of {lacking[0]} ({len(lacking)} are missing)")
        findings[claim.slug] = conclude(claim, tasks, scale, out, commit)
    write_ledger(out)
    return findings


def results_in(out: Path) -> dict[str, Result]:
    """The results of all records in a folder of results, by key."""
    return {path.stem: json.loads(path.read_bytes())["result"] for path in sorted((out / "runs").glob("*.json"))}


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
    """The finding of a claim by the records on disk, and its entry in the ledger. What follows from its tasks and what
    stands beside them counts as far as it has been run."""
    seeds = sorted({task.seed for task in tasks})
    others = {task.key: task for task in (*claim.further(scale, seeds, results_in(out)), *claim.beside(scale, seeds))}
    known = {task.key for task in tasks}
    tasks = [*tasks, *(task for key, task in others.items() if key not in known and _finished(out, key))]
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
        "seeds": seeds,
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


def run_all(
    tasks: Sequence[Task],
    of: int,
    engine: Engine,
    out: Path,
    runs: Path,
    commit: str | None,
    finished: Callable[[], None] = lambda: None,
    retries: int = 2,
) -> dict[str, str]:
    """Run the tasks on the engine, the longest first. Returns why some of them failed, by key; the others are finished.
    `finished` is called after each task."""
    failures: dict[str, str] = {}
    if not tasks:
        return failures
    ordered = {task.key: task for task in sorted(tasks, key=lambda task: -task.cost)}
    for task in ordered.values():
        write_plan(task, runs)
    words = (str(out.absolute()), str(runs.absolute()))
    calls = {key: ("reproduction.running:work", *words, commit or "", key) for key in ordered}
    costs = {key: task.cost for key, task in ordered.items()}
    with closing(engine), Display("reproduce", costs, of, partial(_share, ordered, runs)) as display:
        for ended in drive(calls, engine, retries=retries, tick=display.update):
            if ended.error:
                failures[ended.name] = f"{ended.error} (see {runs / 'logs'})"
            display.finished(ended.name, ended.error)
            finished()
    return failures


def _share(tasks: Mapping[str, Task], runs: Path, key: str) -> float:
    """How much of a task is done: a training counts by the steps in its metrics."""
    task = tasks[key]
    if not isinstance(task, Training) or not (runs / key / "metrics.jsonl").exists():
        return 0.0
    return share_of_steps(load_metrics(runs / key), task.job.steps)


# ---------------------------------------------------------------------------------------------- workers


def write_plan(task: Task, runs: Path) -> None:
    """All that a worker needs to know of a task, as JSON."""
    if isinstance(task, Training):
        plan: dict[str, Any] = {"job": to_json(task.job)}
    else:
        plan = {"claim": to_json(task.claim), "seed": task.seed, "scale": to_json(task.scale), "cost": task.cost}
    (runs / "plans").mkdir(parents=True, exist_ok=True)
    write_document(runs / "plans" / f"{task.key}.json", plan | {"label": task.label})


def read_plan(path: Path) -> Task:
    """The inverse of `write_plan`."""
    plan = read_document(path, "plan")
    if "job" in plan:
        return Training(plan["label"], from_json(plan["job"], Job, str(path)))
    importlib.import_module(plan["claim"]["type"].partition(":")[0])
    claim, scale = from_json(plan["claim"], Claim, str(path)), from_json(plan["scale"], Scale, str(path))
    return Computation(claim, plan["seed"], scale, plan["label"], plan["cost"])


def work(out: str, runs: str, commit: str, key: str) -> None:
    """What a worker does: one task, from its plan to its record."""
    run_task(read_plan(Path(runs) / "plans" / f"{key}.json"), Path(out), Path(runs), commit or None)


def run_task(task: Task, out: Path, runs: Path, commit: str | None = None) -> None:
    """Run a task and write its record."""
    began = perf_counter() - _seconds_before(runs / task.key)
    with _alone(runs / f"{task.key}.lock"):
        result = task.run(runs / task.key)
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
