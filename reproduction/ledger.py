"""What a claim is, and how the results of its tasks reach it.

A claim names its tasks, judges their results by a rule that is written down before anything runs, and draws them.
Tasks are shared: the same recipe, data and seed is trained once, however many claims ask for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from cebm.settings import to_json
from reproduction.intervals import Verdict
from reproduction.trainings import Result, Scale, Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Computation:
    """A task that trains nothing: it calls the claim's `compute`."""

    claim: "Claim"
    seed: int
    scale: Scale
    label: str = "computation"
    cost: float = 5.0

    @property
    def key(self) -> str:
        return f"{self.claim.slug}-{self.scale.name}-{self.seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """The claim's protocol and the scale, for the record."""
        return {"protocol": self.claim.protocol, "scale": to_json(self.scale)}

    def run(self, directory: Path) -> Result:
        return self.claim.compute(self.scale, self.seed)


Task = Training | Computation


@dataclass(frozen=True)
class Finding:
    """A claim's verdict, and the texts and numbers behind it."""

    verdict: Verdict
    measured: str
    """One sentence with the numbers and their 95 % intervals."""
    numbers: dict[str, Any]
    """The same numbers as JSON, and all that the figure needs."""
    comment: str
    """Our explanation, in one paragraph."""


@dataclass(frozen=True)
class Claim(ABC):
    """One statement of the paper, and the experiment that tests it. Subclasses are final; their texts are in
    `reproduction.prose`. A frozen dataclass, so that a worker can be told of it in JSON."""

    number: ClassVar[int]
    slug: ClassVar[str]
    """Its name on the command line and in file names."""
    section: ClassVar[str]
    """The section of the paper that makes it."""
    statement: ClassVar[str]
    """The claim in one sentence, in our words."""
    protocol: ClassVar[str]
    metric: ClassVar[str]
    rule: ClassVar[str]
    """The rule of the verdict, fixed before the runs that it compares."""
    most_seeds: ClassVar[int] = 5
    """Number of seeds at the paper's scale; smaller for claims with long runs."""

    @abstractmethod
    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        """All tasks that the claim needs."""

    def further(self, scale: Scale, seeds: Sequence[int], known: Mapping[str, Result]) -> Sequence[Task]:
        """Tasks that follow from results, such as more seeds of what validation chose; `known` has all results so far,
        by key. It is asked again when they are finished. A judgement by records alone reads those that there are."""
        return ()

    def beside(self, scale: Scale, seeds: Sequence[int]) -> Sequence[Task]:
        """Tasks of studies, which the claim reads where they have been run and never asks for."""
        return ()

    @abstractmethod
    def judge(self, results: "Results") -> Finding:
        """The verdict, by the rule."""

    @abstractmethod
    def draw(self, finding: Finding, figure: "Figure") -> None:
        """Draw the figure, from the finding's numbers alone."""

    def compute(self, scale: Scale, seed: int) -> Result:
        """The result of a `Computation` of this claim."""
        raise TypeError(f"claim {self.slug} computes nothing of its own")


@dataclass(frozen=True)
class Results:
    """The results of a claim's tasks, by label, in the order of their seeds."""

    by_label: dict[str, list[Result]]
    seeds: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, tasks: Iterable[Task], records: dict[str, Result]) -> "Results":
        found: dict[str, list[tuple[int, Result]]] = {}
        for task in tasks:
            if task.key in records:
                found.setdefault(task.label, []).append((task.seed, records[task.key]))
        ordered = {label: sorted(pairs, key=lambda pair: pair[0]) for label, pairs in found.items()}
        return cls(
            {label: [result for _, result in pairs] for label, pairs in ordered.items()},
            {label: [seed for seed, _ in pairs] for label, pairs in ordered.items()},
        )

    def values(self, label: str, *path: str | int) -> list[float]:
        """One number per seed: results[label][seed][path[0]][path[1]]…"""
        values = []
        for result in self.by_label[label]:
            value: Any = result
            for part in path:
                value = value[part]
            values.append(float(value))
        return values

    def paired(
        self, one: str, one_path: Sequence[str | int], other: str, other_path: Sequence[str | int]
    ) -> tuple[list[float], list[float]]:
        """A number of one label and one of another, for the seeds that have both."""
        found = []
        for label, path in ((one, one_path), (other, other_path)):
            runs = zip(self.seeds.get(label, ()), self.by_label.get(label, ()), strict=True)
            found.append({seed: value for seed, run in runs if (value := _number(run, path)) is not None})
        shared = sorted(found[0].keys() & found[1].keys())
        return [found[0][seed] for seed in shared], [found[1][seed] for seed in shared]

    def curves(
        self, labels: Iterable[str], what: str = "success", of: Literal["curve", "training"] = "curve"
    ) -> dict[str, list[list[tuple[float, float]]]]:
        """Points (step, value) by label and seed, in the form that `drawing.curves` takes: from the evaluations during
        training, or from the training log."""
        return {
            label: [[(float(row["step"]), row[what]) for row in run[of]] for run in self.by_label[label]]
            for label in labels
        }

    def at_the_end(self, label: str, what: str) -> list[float]:
        """The last value in the training log, one per seed, without runs that diverged before their first log row."""
        return [float(run["training"][-1][what]) for run in self.by_label[label] if run["training"]]

    def plateau(self, label: str) -> list[float]:
        """`second_half` of each run, one per seed."""
        return [second_half(run) for run in self.by_label[label]]

    def distances(self, label: str, after: float = 0.5, until: float = 1.0) -> list[float]:
        """Mean distance of the negatives to the demonstrated actions, one per seed: over the second half of training by
        default, or from the share `after` to the share `until`. Over the whole log of a run that ended before that."""
        found = []
        for run in self.by_label[label]:
            begin, end = after * run["steps"], until * run["steps"]
            rows = [row for row in run["training"] if begin < row["step"] <= end] or run["training"]
            found.append(float(np.mean([row["negative_distance"] for row in rows])))
        return found


def _number(run: Result, path: Sequence[str | int]) -> float | None:
    """run[path[0]][path[1]]…; None where a record, made before this was measured, has no such number."""
    value: Any = run
    for part in path:
        if isinstance(value, dict) and part not in value:
            return None
        value = value[part]
    return float(value)


def second_half(run: Result) -> float:
    """Mean success over the evaluations in the second half of training, as a single evaluation is noisy; 0 for a run
    that diverged."""
    if "diverged" in run:
        return 0.0
    successes = [row["success"] for row in run["curve"] if 2 * row["step"] >= run["steps"]]
    return sum(successes) / len(successes)
