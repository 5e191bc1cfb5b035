"""What a study compares, and how its records become evidence in the ledger."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cebm.recipes import Trial
from cebm.sweep.results import records
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
    episodes: int | None = None
    """Demonstrations, if not those of the scale."""

    def planned(self, scale: Scale, seed: int) -> Planned:
        steps = min(self.steps, scale.steps) if scale.small else self.steps
        settings: Any = {"task": self.task, "episodes": self.episodes, "steps": steps, "followed": False}
        job = training(self.trial, scale, seed, self.label, **settings).job
        every = max(1, steps // self.evaluations)
        return Planned(replace(job, evaluate_every=every), {"steps": steps})


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
    level: float = 0.0
    """If it is set, an exact sign-flip test must reach this level too."""

    @property
    def name(self) -> str:
        same = self.other_metric or self.metric
        one, two = (self.arm, self.other) if same == self.metric else (self.metric, same)
        where = self.metric if same == self.metric else self.arm
        return f"{one} − {two} ({where})"


class Inquiry(ABC):
    """A question with a rule that records answer."""

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

    @abstractmethod
    def labels(self) -> Sequence[str]:
        """Of its arms."""

    @abstractmethod
    def comparisons(self) -> Sequence[Comparison]: ...

    @abstractmethod
    def records(self, folder: Path) -> Mapping[str, Record]:
        """The records in a folder, by key."""

    def evidence(self, records: Iterable[Record]) -> Evidence:
        """What the records tell so far. A run that diverged counts as 0 in every number."""
        found: dict[str, dict[int, Record]] = {label: {} for label in self.labels()}
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
            if each.level:
                row["p"] = sign_flip([one - two for one, two in pairs])
                if row["verdict"] is not None and row["p"] >= each.level:
                    row["verdict"] = "inconclusive"
        return row


class Swept(Inquiry):
    """A study that `cebm sweep` runs. Subclasses are final."""

    measure: ClassVar[str]
    """What `cebm sweep` measures of a finished run, as `module:function`."""
    scale: Scale = PAPER

    @abstractmethod
    def arms(self) -> Sequence[Arm]: ...

    def labels(self) -> list[str]:
        return [arm.label for arm in self.arms()]

    def order(self) -> Iterable[tuple[Arm, int]]:
        """Arms with their seeds, in the order in which they run: a whole seed before the next."""
        return [(arm, seed) for seed in range(self.seeds_needed) for arm in self.arms()]

    def plan(self, finished: Iterable[Record] = ()) -> list[Planned]:
        return [arm.planned(self.scale, seed) for arm, seed in self.order()]

    def records(self, folder: Path) -> Mapping[str, Record]:
        return records(folder)


def sign_flip(differences: Sequence[float]) -> float:
    """The two-sided p of an exact test that a mean of differences is 0: the share of all patterns of signs whose mean
    is at least as far from 0 (Fisher's randomisation test). With n differences it is at least 2/2ⁿ."""
    values = np.abs(np.asarray(differences, np.float64))
    signs = 1 - 2 * ((np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1)
    observed = abs(float(np.sum(differences)))
    return float(np.mean(np.abs(signs @ values) >= observed * (1 - 1e-12)))


def _number(record: Record, name: str) -> float | None:
    """A number of a run's result; 0 of a run that diverged."""
    if "diverged" in record["result"]:
        return 0.0
    value = record["result"].get(name)
    return None if value is None else float(value)
