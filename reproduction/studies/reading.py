"""What a study compares, and how its records become evidence in the ledger."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cebm.recipes import Trial
from cebm.sweep.studies import Planned, Record
from cebm.tasks import ParticleTask
from reproduction.intervals import Interval, Verdict
from reproduction.trainings import PAPER, Scale, training

Evidence = dict[str, Any]
"""What a study has found so far, as JSON."""
Rule = Callable[[Interval], Verdict]


@dataclass(frozen=True)
class Arm:
    """One kind of run of a study."""

    label: str
    trial: Trial
    steps: int
    task: ParticleTask = ParticleTask()
    evaluations: int = 1
    """Points of the learning curve, the end included."""

    def planned(self, scale: Scale, seed: int) -> Planned:
        job = training(self.trial, scale, seed, self.label, task=self.task, steps=self.steps, followed=False).job
        every = max(1, self.steps // self.evaluations)
        return Planned(replace(job, evaluate_every=every), {"steps": self.steps})


@dataclass(frozen=True)
class Comparison:
    """One number of one arm minus that of another (or of itself), paired by seed."""

    arm: str
    other: str
    metric: str
    rule: Rule
    other_metric: str = ""
    """The other's number, where it is not the same."""
    decides: bool = False

    @property
    def name(self) -> str:
        same = self.other_metric or self.metric
        one, two = (self.arm, self.other) if same == self.metric else (self.metric, same)
        where = self.metric if same == self.metric else self.arm
        return f"{one} − {two} ({where})"


class Inquiry(ABC):
    """A study with its rule. Subclasses are final."""

    slug: ClassVar[str]
    title: ClassVar[str]
    claims: ClassVar[tuple[int, ...]]
    """The numbers of the claims that it is about."""
    rule: ClassVar[str]
    """Protocol and rule, in words, fixed before the runs."""
    seeds_needed: ClassVar[int] = 5
    """With fewer seeds there is no verdict."""
    shown: ClassVar[tuple[str, ...]]
    """The numbers of the table, by their names in a record's result."""

    scale: Scale = PAPER

    @abstractmethod
    def arms(self) -> Sequence[Arm]: ...

    @abstractmethod
    def comparisons(self) -> Sequence[Comparison]: ...

    def order(self) -> Iterable[tuple[Arm, int]]:
        """Arms with their seeds, in the order in which they run: a whole seed before the next."""
        return [(arm, seed) for seed in range(self.seeds_needed) for arm in self.arms()]

    def plan(self, finished: Iterable[Record] = ()) -> list[Planned]:
        """For `cebm sweep`."""
        return [arm.planned(self.scale, seed) for arm, seed in self.order()]

    def evidence(self, records: Iterable[Record]) -> Evidence:
        """What the records tell so far. A run that diverged counts as 0 in every number."""
        found: dict[str, dict[int, Record]] = {arm.label: {} for arm in self.arms()}
        for record in records:
            if record["label"] in found:
                found[record["label"]][record["seed"]] = record
        if not any(found.values()):
            raise ValueError(f"{self.slug}: there is no record of this study")
        comparisons = [self._compared(each, found[each.arm], found[each.other]) for each in self.comparisons()]
        kept = ("key", "label", "seed", "commit", "seconds", "settings", "result")
        return {
            "slug": self.slug,
            "title": self.title,
            "claims": list(self.claims),
            "rule": self.rule,
            "seeds_needed": self.seeds_needed,
            "shown": list(self.shown),
            "arms": {label: self._summary(by_seed) for label, by_seed in found.items() if by_seed},
            "comparisons": comparisons,
            "runs": [
                {name: row[name] for name in kept if name in row} for rows in found.values() for row in rows.values()
            ],
        }

    def _summary(self, by_seed: Mapping[int, Record]) -> dict[str, Any]:
        seeds = sorted(by_seed)
        numbers: dict[str, list[float]] = {}
        for name in self.shown:
            values = [value for seed in seeds if (value := _number(by_seed[seed], name)) is not None]
            if values:
                numbers[name] = values
        return {"seeds": seeds, "numbers": numbers}

    def _compared(self, each: Comparison, mine: Mapping[int, Record], theirs: Mapping[int, Record]) -> dict[str, Any]:
        pairs = [
            (one, two)
            for seed in sorted(mine.keys() & theirs.keys())
            if (one := _number(mine[seed], each.metric)) is not None
            and (two := _number(theirs[seed], each.other_metric or each.metric)) is not None
        ]
        row: dict[str, Any] = {"what": each.name, "decides": each.decides, "seeds": len(pairs)}
        if pairs:
            difference = Interval.of_difference(*zip(*pairs, strict=True))
            row["difference"] = difference.to_json()
            row["verdict"] = each.rule(difference) if len(pairs) >= self.seeds_needed else None
        return row


def _number(record: Record, name: str) -> float | None:
    """A number of a run's result; 0 of a run that diverged."""
    if "diverged" in record["result"]:
        return 0.0
    value = record["result"].get(name)
    return None if value is None else float(value)


# ---------------------------------------------------------------------------------------------- as text


def markdown(evidence: Evidence) -> str:
    """The section of the ledger."""
    about = ", ".join(map(str, evidence["claims"]))
    lines = [f"### {evidence['title']}", "", f"Claim{'s' if len(evidence['claims']) > 1 else ''} {about}. "]
    lines[-1] += evidence["rule"]
    lines += ["", *_table(evidence), ""]
    lines += [f"- {_sentence(row, evidence['seeds_needed'])}" for row in evidence["comparisons"]]
    return "\n".join(lines)


def _table(evidence: Evidence) -> list[str]:
    shown = evidence["shown"]
    lines = [f"| | seeds | {' | '.join(shown)} |", "| --- | --- |" + " --- |" * len(shown)]
    for label, arm in evidence["arms"].items():
        cells = [_cell(arm["numbers"].get(name)) for name in shown]
        lines.append(f"| `{label}` | {len(arm['seeds'])} | {' | '.join(cells)} |")
    return lines


def _cell(values: Sequence[float] | None) -> str:
    if not values:
        return "–"
    found = Interval.of(values)
    if len(values) == 1:
        return f"{found.mean:.3f}"
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"


def _sentence(row: Mapping[str, Any], needed: int) -> str:
    if not row["seeds"]:
        return f"{row['what']}: no seed yet."
    mean, low, high = row["difference"]
    told = f"{row['what']}: {mean:+.3f}" + ("" if low is None else f" ({low:+.3f} to {high:+.3f})")
    if row["verdict"] is None:
        return f"{told}: {row['seeds']} of {needed} seeds, no verdict."
    return f"{told}, {row['seeds']} seeds: **{row['verdict']}**" + (" (decides)." if row["decides"] else ".")
