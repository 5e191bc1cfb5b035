"""The runs that settle the losses without a lower bound: claims 6, 7 and 8 with anchored energies.

The rules were written before the first run. Each arm trains as the ledger's trials do (2-D particle, 300
demonstrations, 2,000 steps) and keeps averaged weights beside its raw ones, which averaging does not change. The weight
of an anchor is chosen by `chosen`: on validation episodes, 64 candidates, averaged weights, the mean of the second half
of training over seeds 0 and 1. What is chosen is judged on held-out episodes of five seeds, by raw and averaged
weights, with the paper's search and with 512 candidates; ten seeds where an interval ends within 2 points of a limit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cebm.composition import vary
from cebm.objectives import EntropyRegulariser, PositiveL2
from cebm.recipes import Trial, find_trial
from reproduction.ledger import second_half
from reproduction.trainings import Result, Scale, Training, training

WEIGHTS = (0.01, 0.1, 1.0)
LOSSES = ("mcmc-loss", "conditional-maxent")
AVERAGE = 0.995
"""Of the averaged weights, as in `steady`."""
CHOICE_SEEDS = 2
"""Seeds whose validation episodes choose a weight."""


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


def tasks(scale: Scale, seeds: Sequence[int]) -> list[Training]:
    """All arms at each seed, the first seed first."""
    return [
        training(trial, scale, seed, label(family, weight))
        for seed in seeds
        for family, row in arms().items()
        for weight, trial in row.items()
    ]


def label(family: str, weight: float) -> str:
    """The name of an arm in tables and records."""
    return f"{family}-{weight:g}"


def chosen(family: str, results: Mapping[str, Sequence[Result]]) -> float:
    """The weight of a family with the most success on validation episodes; the smaller one of two that are equal."""
    rows = {weight: results[label(family, weight)][:CHOICE_SEEDS] for weight in arms()[family]}
    means = {weight: sum(map(second_half, runs)) / len(runs) for weight, runs in rows.items()}
    return min(means, key=lambda weight: (-means[weight], weight))
