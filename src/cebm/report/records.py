"""What runs say about themselves: their files read, seeds of one setting put together, a verdict in words."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cebm.envs.particle import ParticleTask
from cebm.report.charts import COLOURS, DASHED, DOTTED, Series, number
from cebm.storage import StorageError, to_json
from cebm.training import Job, load_job, load_metrics, task_of

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run directory, read."""

    path: Path
    job: Job
    made_with: dict[str, Any]
    """Versions, commit, threads."""
    metrics: list[Row]
    evaluation: Row | None
    """What `cebm eval` left in evaluation.json."""
    task: ParticleTask | None
    """The task that measures success, where one is known."""

    @classmethod
    def read(cls, path: Path) -> "Run":
        """A StorageError names the file that is missing or damaged."""
        job = load_job(path)
        record = json.loads((path / "run.json").read_bytes())
        commit = {"commit": (record.get("commit") or "unknown")[:12], "threads": record.get("threads", "unknown")}
        evaluation = None
        if (path / "evaluation.json").exists():
            try:
                evaluation = json.loads((path / "evaluation.json").read_bytes())
            except ValueError as error:
                raise StorageError(f"{path / 'evaluation.json'}: damaged, not JSON ({error})") from error
        return cls(path, job, {**record.get("versions", {}), **commit}, load_metrics(path), evaluation, _task(job))

    @property
    def rows(self) -> list[Row]:
        """The evaluations along the way."""
        return [row for row in self.metrics if row["kind"] == "evaluation"]

    @property
    def best(self) -> Row | None:
        """The evaluation that chose best/: by success, then by action error, the earliest of equals."""
        return max(self.rows, key=lambda row: (row.get("success", 0.0), -row["validation_action_error"]), default=None)

    @property
    def last_step(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    def cautions(self) -> list[str]:
        """What a reader must know before believing the numbers: clauses that begin in lower case."""
        found = []
        if self.last_step < self.job.steps:
            found.append(f"the run stands at step {self.last_step:,} of {self.job.steps:,}")
        if diverges := _divergence(self.metrics):
            found.append(diverges)
        rates = [row for row in self.rows if "success" in row]
        if rates and self.best is not None:
            last, peak = rates[-1], self.best
            # The peak is the largest of many draws, so only a fall that the last interval rules out counts.
            if peak["success"] - last["success"] >= 0.1 and last["success_high"] < peak["success"]:
                found.append(
                    f"success fell from {percent(peak['success'])} % at step {peak['step']:,} "
                    f"to {percent(last['success'])} % at step {last['step']:,}"
                )
        return found


def _task(job: Job) -> ParticleTask | None:
    try:
        return task_of(job)
    except (OSError, ValueError):  # the data were moved or are gone: the report does without
        return None


def _divergence(metrics: list[Row]) -> str:
    """Energies that left all bounds, or that are large and still growing. InfoNCE ignores a shift that is common to
    all actions of an observation, so a drift alone is no fault; thousands of nats are."""
    sizes = [
        (row["step"], max(abs(row[name]) for name in ("positive_energy", "negative_energy") if name in row))
        for row in metrics
        if row["kind"] == "train" and "positive_energy" in row
    ]
    for step, size in sizes:
        if not math.isfinite(size):
            return f"energies diverge: no longer finite at step {step:,}"
    if len(sizes) < 4:
        return ""
    half, end = sizes[len(sizes) // 2][1], sizes[-1][1]
    if end > 1000 or (end > 100 and end > 4 * half):
        return f"energies diverge: their mean size is {number(end)} at the end, {number(half)} half-way"
    return ""


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone; the first one stands for them in pictures."""

    label: str
    colour: str
    dash: str
    runs: list[Run]

    @property
    def first(self) -> Run:
        return self.runs[0]

    def series(self, kind: str, name: str, label: str = "", colour: str = "", dash: str = "") -> Series:
        """A metric over training. Of several seeds: the mean and, as a band, the lowest and the highest, at steps
        that all of them logged."""
        tables = []
        for run in self.runs:
            tables.append({r["step"]: r for r in run.metrics if r["kind"] == kind and r.get(name) is not None})
        steps = sorted(set.intersection(*(set(table) for table in tables)))
        values = np.array([[table[step][name] for step in steps] for table in tables], np.float64)
        low: Sequence[float] = ()
        high: Sequence[float] = ()
        if len(tables) > 1:
            low, high = values.min(0).tolist(), values.max(0).tolist()
        elif name == "success":
            low, high = ([tables[0][step][f"success_{end}"] for step in steps] for end in ("low", "high"))
        mean = values.mean(0).tolist() if steps else []
        return Series(label or self.label, steps, mean, colour or self.colour, dash or self.dash, low, high)

    def has(self, kind: str, name: str) -> bool:
        return any(row["kind"] == kind and row.get(name) is not None for run in self.runs for row in run.metrics)

    @property
    def subject(self) -> str:
        """What was run, without its result."""
        job, task = self.first.job, self.first.task
        parts = [job.name + (f" on the {task.dim}-D particle task" if task is not None else "")]
        if job.data is not None:
            parts.append(f"demonstrations from {Path(job.data).name}")
        else:
            parts.append(f"{job.episodes:,} demonstrations")
        if len(self.runs) > 1:
            parts.append(f"{len(self.runs)} seeds")
        return ", ".join(parts)

    @property
    def standing(self) -> tuple[str, float]:
        """What the numbers are of, and the score to compare settings by (more is better)."""
        if all(run.evaluation is not None and "success" in run.evaluation for run in self.runs):
            return "held-out", float(np.mean([(run.evaluation or {})["success"] for run in self.runs]))
        best = [run.best for run in self.runs if run.best is not None]
        if len(best) < len(self.runs):
            return "none", -math.inf
        if all("success" in row for row in best):
            return "validation", float(np.mean([row["success"] for row in best]))
        return "error", -float(np.mean([row["validation_action_error"] for row in best]))

    @property
    def _scores(self) -> list[Row]:
        """The rows that hold the success of each run."""
        return [(run.evaluation if self.standing[0] == "held-out" else run.best) or {} for run in self.runs]

    @property
    def spread(self) -> tuple[float, float]:
        """Around the success rate: of seeds, the lowest and the highest; of one run, its 95 % interval."""
        if len(self.runs) > 1:
            rates = [row["success"] for row in self._scores]
            return min(rates), max(rates)
        return self._scores[0]["success_low"], self._scores[0]["success_high"]

    @property
    def result(self) -> str:
        """How it came out, as a clause."""
        kind, score = self.standing
        seeds = len(self.runs) > 1
        if kind == "none":
            return f"no evaluation yet after {self.first.last_step:,} training steps"
        if kind == "error":
            distance = number(-score)
            where = "" if seeds or self.first.best is None else f" (best checkpoint, step {self.first.best['step']:,})"
            return f"on validation pairs the action is {distance} away from the demonstrated one on average{where}"
        episodes = self._scores[0]["episodes"] if kind == "held-out" else self.first.job.evaluation_episodes
        low, high = map(percent, self.spread)
        spread = f"(seeds {low}–{high} %)" if seeds else f"(95 % interval {low}–{high} %)"
        average = "on average " if seeds else ""
        episodes_text = f"{episodes:,} held-out episodes"
        if kind == "validation":
            episodes_text = f"the {episodes:,} validation episodes that chose the checkpoint"
        return f"{average}{percent(score)} % of {episodes_text} succeed {spread}"

    @property
    def sentence(self) -> str:
        return f"{self.subject}: {self.result}"

    def cautions(self) -> list[str]:
        """One sentence each, naming the seed where there are several."""
        result = []
        for run in self.runs:
            where = f"{self.label}, seed {run.job.seed}" if len(self.runs) > 1 else self.label
            result += [f"{where}: {clause}" for clause in run.cautions()]
        return result


def percent(rate: float) -> str:
    """Whole percent, finer where rounding would claim all or nothing."""
    text = f"{100 * rate:.0f}"
    return f"{100 * rate:.1f}" if text in ("0", "100") and rate not in (0, 1) else text


def grouped(runs: list[Run]) -> list[Group]:
    """Runs of the same settings, seed and device apart, in the order given."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        settings = flat(to_json(run.job)) | {"seed": None, "device": None}
        found.setdefault(json.dumps(settings, sort_keys=True), []).append(run)
    members = list(found.values())
    names = [runs[0].job.name for runs in members]
    all_settings = [flat(to_json(runs[0].job)) for runs in members]
    labels = []
    for name, settings in zip(names, all_settings, strict=True):
        rivals = [other for n, other in zip(names, all_settings, strict=True) if n == name]
        unlike = [k for k, v in settings.items() if any(o.get(k) != v for o in rivals) and k not in ("seed", "device")]
        tail = ", ".join(f"{key.rsplit('.', 1)[-1]} {shown(settings[key])}" for key in unlike[:3])
        labels.append(f"{name} ({tail})" if tail else name)
    count = len(COLOURS)
    dashes = ("", DASHED, DOTTED)
    return [
        Group(label, COLOURS[i % count], dashes[i // count % 3], runs)
        for i, (label, runs) in enumerate(zip(labels, members, strict=True))
    ]


def verdict(groups: list[Group]) -> str:
    """One sentence. Settings are ranked only where they were measured alike, and with a word on doubt."""
    if len(groups) == 1:
        return f"{groups[0].sentence}."
    order = ["none", "error", "validation", "held-out"]
    ranked = sorted(groups, key=lambda group: (order.index(group.standing[0]), group.standing[1]), reverse=True)
    best, second = ranked[:2]
    count = len(groups)
    if len({group.standing[0] for group in groups}) > 1:
        return f"{count} settings, not all of them evaluated alike; {best.sentence}."
    if best.standing[0] == "none":
        return f"{count} settings, none of them evaluated yet."
    if best.standing[0] == "error":
        return f"Lowest action error of {count} settings: {best.sentence}."
    clear = "" if best.spread[0] > second.spread[1] else ", though not clearly"
    return f"Highest of {count} settings{clear}: {best.sentence}."


# ---------------------------------------------------------------------------------------------- settings


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted names; a schedule stays whole."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict) and key != "schedule":
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result


def shown(value: Any) -> str:
    """A setting for people."""
    if isinstance(value, dict):
        inner = ", ".join(f"{key} {shown(part)}" for key, part in value.items() if key != "type")
        return f"{value.get('type', '')} ({inner})"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


# The first prefix that fits decides; `ORDER` is that of the page.
BLOCKS = (
    ("trial.network.", "Network"),
    ("trial.sampler.", "Sampler in training"),
    ("trial.acting.", "Sampler when acting"),
    ("trial.", "Learning"),
    ("task.", "Task"),
    ("made with.", "Made with"),
    ("", "Run"),
)
ORDER = ("Run", "Task", "Network", "Learning", "Sampler in training", "Sampler when acting", "Made with")


def settings(groups: list[Group], differing: bool) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Blocks of (field, values) for the tables at the end: what differs between groups with a value for each, or
    what all have in common."""
    columns = []
    for group in groups:
        run = group.first
        data = flat(to_json(run.job)) | {f"made with.{key}": value for key, value in run.made_with.items()}
        if run.job.data is not None:
            data["data"] = Path(run.job.data).name
        data["seed"] = ", ".join(str(each.job.seed) for each in group.runs)
        columns.append({key: value for key, value in data.items() if key not in ("type", "trial.type", "task.type")})
    blocks: dict[str, list[tuple[str, list[str]]]] = {title: [] for title in ORDER}
    for key in dict.fromkeys(key for column in columns for key in column):
        prefix, title = next((prefix, title) for prefix, title in BLOCKS if key.startswith(prefix))
        values = [shown(column[key]) if key in column else "–" for column in columns]
        name = key.removeprefix(prefix).replace("_", " ")
        if (len(set(values)) > 1) == differing and key != "trial.network.type":
            blocks[title].append((name, values if differing else values[:1]))
    return [(title, rows) for title, rows in blocks.items() if rows]
