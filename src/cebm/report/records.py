"""What runs say about themselves: their files read, seeds of one setting put together, a verdict in words."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cebm.charts import COLOURS, DASHED, DOTTED, Series, number
from cebm.report.tables import settings_of, short_name, shown
from cebm.runs import EXPERT_EPISODES, Job, Material, load_job, load_metrics, material_of, read_record
from cebm.selection import score
from cebm.settings import StorageError
from cebm.storage import read_document
from cebm.tasks import Task

Row = dict[str, Any]
SUCCESS = "success"
"""The column that says whether an episode succeeded: a rate, shown in percent wherever a task tells it."""


# ---------------------------------------------------------------------------------------------- numbers in rows


def value_of(row: Row | None, name: str) -> float | None:
    """A number of a row; None where it is missing or NaN."""
    value = None if row is None else row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return None
    return float(value)


def interval_of(row: Row | None, name: str) -> tuple[float, float] | None:
    """The 95 % interval of a metric: of a rate as logged, of a mean ± 1.96 standard errors (`NAME_se`); None where the
    row does not tell."""
    low, high = (value_of(row, f"{name}_{end}") for end in ("low", "high"))
    if low is not None and high is not None:
        return low, high
    mean, error = value_of(row, name), value_of(row, f"{name}_se")
    if mean is None or error is None:
        return None
    return mean - 1.96 * error, mean + 1.96 * error


def percent(rate: float) -> str:
    """Whole percent, finer where rounding would claim all or nothing."""
    text = f"{100 * rate:.0f}"
    return f"{100 * rate:.1f}" if text in ("0", "100") and rate not in (0, 1) else text


def in_words(metric: str) -> str:
    """The name of a metric for people."""
    return metric.replace("_", " ")


def amount(metric: str, value: float) -> str:
    """A value of a metric for people."""
    return f"{percent(value)} %" if metric == SUCCESS else number(value)


def span(metric: str, ends: tuple[float, float]) -> str:
    """From the lowest to the highest value of a metric."""
    if metric == SUCCESS:
        return f"{percent(ends[0])}–{percent(ends[1])} %"
    return f"{number(ends[0])} to {number(ends[1])}"


def gain(metric: str, value: float, ends: tuple[float, float]) -> str:
    """A difference of two values of a metric with its 95 % interval, for people."""
    shares = [f"{100 * each:+.1f}" for each in (value, *ends)]
    others = [f"{'+' if each > 0 else ''}{number(each)}" for each in (value, *ends)]
    middle, low, high = (text.replace("-", "−") for text in (shares if metric == SUCCESS else others))
    unit = " points" if metric == SUCCESS else ""
    return f"{middle}{unit} (95 % interval {low} to {high}, paired by episode)"


# ---------------------------------------------------------------------------------------------- one run


@dataclass(frozen=True)
class Run:
    """One run directory, read."""

    path: Path
    job: Job
    made_with: dict[str, Any]
    """Versions, commit, threads."""
    metrics: list[Row]
    evaluation: Row | None = None
    """What `cebm eval` left in evaluation.json."""
    fingerprint: str | None = None
    """That of the data it learned from; None where it was not recorded."""

    @classmethod
    def read(cls, path: Path) -> "Run":
        """A StorageError names the file that is missing or damaged."""
        job, record = load_job(path), read_record(path)
        versions, commit = record.get("versions"), record.get("commit")
        made_with = {
            **(versions if isinstance(versions, dict) else {}),
            "commit": _short(str(commit or "unknown")),
            "threads": record.get("threads", "unknown"),
        }
        metrics = load_metrics(path)
        for row in metrics:
            if row["kind"] == "evaluation" and value_of(row, "validation_action_error") is None:
                where = f"{path / 'metrics.jsonl'}: the evaluation of step {row['step']}"
                raise StorageError(f"{where} has no number under 'validation_action_error'")
        evaluation = None
        if (path / "evaluation.json").exists():
            evaluation = read_document(path / "evaluation.json", "evaluation", old=True)
            if value_of(evaluation, "episodes") is None:
                raise StorageError(f"{path / 'evaluation.json'}: has no number under 'episodes'")
        return cls(path, job, made_with, metrics, evaluation, record.get("data"))

    @property
    def without_energy(self) -> Row | None:
        """What the same evaluation found with the energy ignored."""
        found = None if self.evaluation is None else self.evaluation.get("without_energy")
        return found if isinstance(found, dict) and value_of(found, "episodes") is not None else None

    @property
    def metric_evaluated(self) -> str:
        """The column that `cebm eval` compared by."""
        return str((self.evaluation or {}).get("metric", SUCCESS))

    @property
    def energy_difference(self) -> tuple[float, float, float] | None:
        """What the energy adds to that column, paired by episode: the mean and the ends of its 95 % interval."""
        found = (self.without_energy or {}).get("difference")
        if not isinstance(found, list) or len(found) != 3 or not all(map(_is_number, found)):
            return None
        middle, low, high = map(float, found)
        return middle, low, high

    @cached_property
    def material(self) -> Material | None:
        """What the run learned from; None where the data moved away or changed: the report does without."""
        try:
            found = material_of(self.job)
            changed = self.fingerprint is not None and found.fingerprint() != self.fingerprint
        except (OSError, ValueError):
            return None
        return None if changed else found

    @property
    def task(self) -> Task | None:
        """The task that measures the policy: that of the run, or the one that its data name."""
        if self.job.task is not None or self.material is None:
            return self.job.task
        return self.material.task

    @property
    def rows(self) -> list[Row]:
        """The evaluations along the way."""
        return [row for row in self.metrics if row["kind"] == "evaluation"]

    @property
    def measures(self) -> list[str]:
        """The metrics that tell how good the policy is, the most telling first: success, then the task's own."""
        own = [] if self.task is None else [self.task.metric]
        return list(dict.fromkeys([SUCCESS, *own]))

    @property
    def best(self) -> Row | None:
        """The evaluation that chose best/; the earliest of equals."""
        return max(self.rows, key=lambda row: score(row, self.task), default=None)

    @property
    def last_step(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def seconds(self) -> float:
        """How long training took."""
        return value_of(self.metrics[-1], "seconds") or 0.0 if self.metrics else 0.0

    def cautions(self) -> list[str]:
        """What a reader must know before believing the numbers: clauses that begin in lower case."""
        found = []
        if self.last_step < self.job.steps:
            found.append(f"the run stands at step {self.last_step:,} of {self.job.steps:,}")
        found += [clause for clause in (_divergence(self.metrics), self._fall()) if clause]
        return found

    def _fall(self) -> str:
        """Whether the last evaluation is clearly below the best one."""
        peak, last = self.best, self.rows[-1] if self.rows else None
        for name in self.measures:
            before, after = value_of(peak, name), value_of(last, name)
            ends, peak_ends = interval_of(last, name), interval_of(peak, name)
            if before is None or after is None or ends is None or peak_ends is None or peak is None or last is None:
                continue
            # The peak is the largest of many draws, so only a fall that the last interval rules out counts. A rate
            # has a natural scale; for other metrics the two intervals must not meet.
            fell = before - after >= 0.1 and ends[1] < before if name == SUCCESS else ends[1] < peak_ends[0]
            if fell:
                return (
                    f"{in_words(name)} fell from {amount(name, before)} at step {peak['step']:,} "
                    f"to {amount(name, after)} at step {last['step']:,}"
                )
        return ""


def _short(commit: str) -> str:
    """Enough of a commit to find it, and whether the code was as committed."""
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def _divergence(metrics: list[Row]) -> str:
    """Energies that left all bounds, or that are large and still growing. InfoNCE ignores a shift that is common to
    all actions of an observation, so a drift alone is no fault; thousands of nats are."""
    sizes = []
    for row in metrics:
        if row["kind"] == "train" and "positive_energy" in row:
            known = [row[name] for name in ("positive_energy", "negative_energy") if _is_number(row.get(name))]
            sizes.append((row["step"], max(map(abs, known), default=0.0)))
            if not all(map(math.isfinite, known)):
                return f"energies diverge: no longer finite at step {row['step']:,}"
    if len(sizes) < 4:
        return ""
    half, end = sizes[len(sizes) // 2][1], sizes[-1][1]
    if end > 1000 or (end > 100 and end > 4 * half):
        return f"energies diverge: their mean size is {number(end)} at the end, {number(half)} half-way"
    return ""


# ---------------------------------------------------------------------------------------------- seeds of one setting


@dataclass(frozen=True)
class Standing:
    """How good a setting is, and how that was measured."""

    kind: str
    """'held-out': roll-outs that chose nothing. 'validation': roll-outs that chose the checkpoint. 'error': the action
    error on validation pairs. 'none': nothing was evaluated."""
    metric: str = ""
    """What was measured; of roll-outs, their column."""
    score: float = -math.inf
    """More is better."""
    rows: list[Row] = field(default_factory=list)
    """Where it was read, one per run."""

    @property
    def spread(self) -> tuple[float, float] | None:
        """Around the score: of seeds, the lowest and the highest; of one run, its 95 % interval, where it is known."""
        if len(self.rows) > 1:
            values = [float(row[self.metric]) for row in self.rows]
            return min(values), max(values)
        return interval_of(self.rows[0], self.metric) if self.rows else None


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

    @property
    def count(self) -> int | None:
        """Negatives per example, where the objective has such a number."""
        return getattr(self.first.job.trial.objective, "count", None)

    @property
    def proposes(self) -> bool:
        """Whether the energy learned a proposal beside it."""
        return self.has("train", "proposal_loss")

    def series(self, kind: str, name: str, label: str = "", colour: str = "", dash: str = "") -> Series:
        """A metric over training. Of several seeds: the mean and, as a band, the lowest and the highest, at steps
        that all of them logged; of one, the 95 % interval where the rows have it."""
        tables = []
        for run in self.runs:
            tables.append({r["step"]: r for r in run.metrics if r["kind"] == kind and _is_number(r.get(name))})
        steps = sorted(set.intersection(*(set(table) for table in tables)))
        values = np.array([[table[step][name] for step in steps] for table in tables], np.float64)
        low: Sequence[float] = ()
        high: Sequence[float] = ()
        intervals = [interval_of(tables[0][step], name) or (math.nan, math.nan) for step in steps]
        if len(tables) > 1:
            low, high = values.min(0).tolist(), values.max(0).tolist()
        elif any(math.isfinite(end) for end, _ in intervals):
            low, high = ([ends[i] for ends in intervals] for i in (0, 1))
        mean = values.mean(0).tolist() if steps else []
        return Series(label or self.label, steps, mean, colour or self.colour, dash or self.dash, low, high)

    def has(self, kind: str, name: str) -> bool:
        return any(row["kind"] == kind and _is_number(row.get(name)) for run in self.runs for row in run.metrics)

    @property
    def subject(self) -> str:
        """What was run, without its result."""
        job, task = self.first.job, self.first.task
        where = "" if task is None else f" on the {task.name}" if " " in task.name else f" on {task.name}"
        parts = [job.name + where]
        if job.data is not None:
            parts.append(f"demonstrations from {Path(job.data).name}")
        else:
            parts.append(f"{job.episodes or EXPERT_EPISODES:,} demonstrations")
        if len(self.runs) > 1:
            parts.append(f"{len(self.runs)} seeds")
        return ", ".join(parts)

    @cached_property
    def standing(self) -> Standing:
        """The score to compare settings by."""
        best = [run.best for run in self.runs]
        tested = [run.evaluation for run in self.runs]
        for kind, rows in (("held-out", tested), ("validation", best)):
            for name in self.first.measures:
                known = [row for row in rows if row is not None and value_of(row, name) is not None]
                if len(known) == len(rows):
                    return Standing(kind, name, float(np.mean([row[name] for row in known])), known)
        done = [row for row in best if row is not None]
        if len(done) < len(best):
            return Standing("none")
        name = "validation_action_error"
        return Standing("error", name, -float(np.mean([row[name] for row in done])), done)

    @property
    def result(self) -> str:
        """How it came out, as a clause."""
        standing, seeds = self.standing, len(self.runs) > 1
        if standing.kind == "none":
            return f"no evaluation yet after {self.first.last_step:,} training steps"
        if standing.kind == "error":
            distance = number(-standing.score)
            where = "" if seeds or self.first.best is None else f" (best checkpoint, step {self.first.best['step']:,})"
            return f"on validation pairs the action is {distance} away from the demonstrated one on average{where}"
        if standing.kind == "held-out":
            episodes = f"{int(standing.rows[0]['episodes']):,} held-out episodes"
        else:
            episodes = f"the {self.first.job.evaluation_episodes:,} validation episodes that chose the checkpoint"
        spread = ""
        if standing.spread is not None:
            spread = f" ({'seeds' if seeds else '95 % interval'} {span(standing.metric, standing.spread)})"
        average = "on average " if seeds else ""
        value = amount(standing.metric, standing.score)
        if standing.metric == SUCCESS:
            return f"{average}{value} of {episodes} succeed{spread}"
        return f"{average}the mean {in_words(standing.metric)} is {value} over {episodes}{spread}"

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

    def at_a_guess(self) -> float | None:
        """log(count + 1), the InfoNCE of a guess, where training ended there: above it, or below it by no more than
        three standard errors of the last quarter of the log, or by a hundredth. None: not so, or not known."""
        if self.count is None:
            return None
        guess = math.log(self.count + 1)
        logged = [[v for row in run.metrics if (v := value_of(row, "info_nce")) is not None] for run in self.runs]
        for values in logged:
            last = np.array(values[-max(5, len(values) // 4) :])
            if len(values) < 5 or not np.isfinite(last).all():
                return None
            noise = 3 * float(last.std(ddof=1)) / math.sqrt(len(last))
            if float(last.mean()) < guess - max(noise, 0.01 * guess):
                return None
        return guess


def _is_number(value: Any) -> bool:
    """NaN and infinity too: they interrupt a curve."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def grouped(runs: list[Run]) -> list[Group]:
    """Runs of the same settings, seed and device apart, in the order given."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        alike = settings_of(run.job) | {"data": run.job.data, "seed": None, "device": None}
        found.setdefault(json.dumps(alike, sort_keys=True), []).append(run)
    members = list(found.values())
    names = [runs[0].job.name for runs in members]
    all_settings = [settings_of(runs[0].job) for runs in members]
    labels: list[str] = []
    for name, settings in zip(names, all_settings, strict=True):
        rivals = [other for n, other in zip(names, all_settings, strict=True) if n == name]
        unlike = [k for k, v in settings.items() if any(o.get(k) != v for o in rivals) and k not in ("seed", "device")]
        tail = ", ".join(f"{short_name(key)} {shown(settings[key])}" for key in unlike[:3])
        label = f"{name} ({tail})" if tail else name
        same = sum(other == label or other.startswith(f"{label} #") for other in labels)
        labels.append(f"{label} #{same + 1}" if same else label)
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
    ranked = sorted(groups, key=lambda each: (order.index(each.standing.kind), each.standing.score), reverse=True)
    best, second = ranked[:2]
    count = len(groups)
    if len({(group.standing.kind, group.standing.metric) for group in groups}) > 1:
        return f"{count} settings, not all of them evaluated alike; {best.sentence}."
    if best.standing.kind == "none":
        return f"{count} settings, none of them evaluated yet."
    if best.standing.kind == "error":
        return f"Lowest action error of {count} settings: {best.sentence}."
    mine, other = best.standing.spread, second.standing.spread
    clear = mine is not None and other is not None and mine[0] > other[1]
    return f"Highest of {count} settings{'' if clear else ', though not clearly'}: {best.sentence}."
