"""Losses without a lower bound, with anchored energies: the arms that settle claims 6, 7 and 8.

The rules were written before the first run of any arm. Each arm trains as the ledger's trials do (2-D particle, 300
demonstrations, 2,000 steps) and keeps averaged weights beside its raw ones, which averaging does not change. Every
weight of a family runs with the first two seeds. The weight is then chosen by `chosen`: on validation episodes, 64
candidates, averaged weights, the mean of the second half of training over these seeds; the chosen one alone runs with
the other seeds. It is judged on held-out episodes of five seeds; ten where an interval ends within 2 points of a limit.

Written when five arms had run with seed 0: the raw weights with 64 candidates decide, as the ledger's `ibc`, to which
they are compared, averages nothing and acts so. Averaged weights and 512 candidates are reported beside them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cebm.composition import vary
from cebm.objectives import EntropyRegulariser, PositiveL2
from cebm.recipes import Trial, find_trial
from reproduction.intervals import Interval
from reproduction.ledger import Results, second_half
from reproduction.trainings import Result, Scale, Training, training

WEIGHTS = (0.01, 0.1, 1.0)
LOSSES = ("mcmc-loss", "conditional-maxent")
AVERAGE = 0.995
"""Of the averaged weights, as in `steady`."""
CHOICE_SEEDS = 2
"""Seeds whose validation episodes choose a weight."""
SEEDS = 5
"""Seeds of the weight that was chosen; fewer decide nothing."""


def arms() -> dict[str, dict[float, Trial]]:
    """Families of trials that differ in a weight, by name; the weight 0 is the bare loss."""
    found: dict[str, dict[float, Trial]] = {}
    for name in LOSSES:
        trial = find_trial(name)
        found[f"{name}-anchored"] = {weight: vary(trial, anchor=weight) for weight in WEIGHTS}
        found[f"{name}-both"] = {weight: vary(trial, anchor=weight, anchor_negatives=weight) for weight in WEIGHTS}
    plain = find_trial("correct")
    found["info-nce-maxent"] = {weight: replace(plain, penalties=(EntropyRegulariser(weight),)) for weight in WEIGHTS}
    last = find_trial("correct-mas-maxent")
    conditional = replace(last, penalties=(PositiveL2(1.0),))
    found["correct-mas-maxent-conditional-l2"] = {1.0: vary(conditional, **{"objective.source.positive_l2": 0.0})}
    found["correct-mas-maxent-both-l2"] = {1.0: conditional}
    return {family: {weight: averaged(trial) for weight, trial in row.items()} for family, row in found.items()}


def averaged(trial: Trial) -> Trial:
    """The trial with averaged weights beside its raw ones."""
    return vary(trial, **{"optimiser.average": AVERAGE})


def planned(family: str, scale: Scale, seeds: Sequence[int], known: Mapping[str, Result]) -> list[Training]:
    """The runs of a family that follow from the results so far, by key: every weight with the seeds that choose one,
    then the chosen one with the others."""
    first = [task for seed in seeds[:CHOICE_SEEDS] for task in at_seed(family, scale, seed)]
    if len(seeds) <= CHOICE_SEEDS or any(task.key not in known for task in first):
        return first
    name = label(family, chosen(family, Results.of(first, dict(known)).by_label))
    later = [task for seed in seeds[CHOICE_SEEDS:] for task in at_seed(family, scale, seed)]
    return first + [task for task in later if task.label == name]


def at_seed(family: str, scale: Scale, seed: int) -> list[Training]:
    """Every weight of a family with one seed."""
    return [training(trial, scale, seed, label(family, weight)) for weight, trial in arms()[family].items()]


def tasks(scale: Scale, seeds: Sequence[int]) -> list[Training]:
    """All arms at each seed, the first seed first."""
    return tasks_of(tuple(arms()), scale, seeds)


def tasks_of(families: Sequence[str], scale: Scale, seeds: Sequence[int]) -> list[Training]:
    """Every weight of some families at each seed."""
    return [task for seed in seeds for family in families for task in at_seed(family, scale, seed)]


def label(family: str, weight: float) -> str:
    """The name of an arm in tables and records."""
    return f"{family}-{weight:g}"


def chosen(family: str, results: Mapping[str, Sequence[Result]]) -> float:
    """The weight of a family with the most success on validation episodes; the smaller one of two that are equal."""
    rows = {weight: results[label(family, weight)][:CHOICE_SEEDS] for weight in arms()[family]}
    means = {weight: sum(map(second_half, runs)) / len(runs) for weight, runs in rows.items()}
    return min(means, key=lambda weight: (-means[weight], weight))


@dataclass(frozen=True)
class Reading:
    """A family of arms as far as its runs go."""

    family: str
    weight: float | None
    """The weight that was chosen; None while some weight lacks a seed of the choice."""
    success: dict[float, list[float]]
    """Success of the last raw weights on held-out episodes, by the weight of the anchor, one per seed."""
    others: dict[str, list[float]]
    """The same of the chosen weight by averaged weights and with 512 candidates, for the seeds that have it."""

    @classmethod
    def of(cls, family: str, results: Results) -> "Reading":
        rows = {weight: label(family, weight) for weight in arms()[family]}
        found = {weight: name for weight, name in rows.items() if name in results.by_label}
        enough = len(found) == len(rows) and all(len(results.by_label[name]) >= CHOICE_SEEDS for name in rows.values())
        weight = chosen(family, results.by_label) if enough else None
        success = {each: results.values(name, "raw", "success") for each, name in found.items()}
        others: dict[str, list[float]] = {}
        if weight is not None:
            name = rows[weight]
            for told, path in _OTHERS.items():
                values, _ = results.paired(name, path, name, path)
                others |= {told: values} if values else {}
        return cls(family, weight, success, others)

    def against(self, other: str, results: Results, weight: float | None = None) -> tuple[list[float], list[float]]:
        """Held-out success of a weight, by default the chosen one, and of another trial, for the seeds of both."""
        used = self.weight if weight is None else weight
        if used is None:
            return [], []
        return results.paired(label(self.family, used), ("raw", "success"), other, ("last", "success"))

    def by_weight(self) -> str:
        """The success of every weight that has been run, in words."""
        parts = [f"{weight:g}: {_percent(values)}" for weight, values in self.success.items()]
        return ", ".join(parts) if parts else "not run yet"

    def by_search(self) -> str:
        """The success of the chosen weight by other weights and searches, in words; empty if there is none."""
        return ", ".join(f"{_percent(values)} by {told}" for told, values in self.others.items())

    def to_json(self) -> dict[str, Any]:
        return {
            "weight": self.weight,
            "success": {f"{weight:g}": values for weight, values in self.success.items()},
            "by averaged weights and 512 candidates": self.others,
        }


_OTHERS: dict[str, tuple[str, ...]] = {
    "averaged weights": ("last", "success"),
    "512 candidates": ("all candidates", "raw", "success"),
    "averaged weights and 512 candidates": ("all candidates", "averaged", "success"),
}


def _percent(values: Sequence[float]) -> str:
    """Shares in words, with their number of seeds unless it is that of a verdict."""
    if len(values) == 1:
        return f"{100 * values[0]:.1f} % (one seed)"
    return Interval.of(values).percent() + ("" if len(values) >= SEEDS else f" ({len(values)} seeds)")
