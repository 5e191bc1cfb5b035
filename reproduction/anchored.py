"""The runs that settle the losses without a lower bound: claims 6, 7 and 8 with anchored energies.

    python -m reproduction.anchored --seeds 0 1 --workers 1

The rules were written before the first run. Each arm trains as the ledger's trials do (2-D particle, 300
demonstrations, 2,000 steps) and keeps averaged weights beside its raw ones, which averaging does not change. The weight
of an anchor is chosen by `chosen`: on validation episodes, 64 candidates, averaged weights, the mean of the second half
of training over seeds 0 and 1. What is chosen is judged on held-out episodes of five seeds, by raw and averaged
weights, with the paper's search and with 512 candidates; ten seeds where an interval ends within 2 points of a limit.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cebm.composition import vary
from cebm.engines import Local
from cebm.objectives import EntropyRegulariser, PositiveL2
from cebm.recipes import Trial, find_trial
from cebm.runs import source_commit
from reproduction.ledger import second_half
from reproduction.running import run_all
from reproduction.trainings import PAPER, SCALES, Result, Scale, Training, training

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


def run(scale: Scale, seeds: Sequence[int], workers: int, out: Path, runs: Path) -> dict[str, str]:
    """Run the arms that have no record in `out` yet, all arms of a seed before the next seed. Returns why some failed,
    by key."""
    (out / "runs").mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}
    for seed in seeds:
        asked = tasks(scale, [seed])
        missing = [task for task in asked if not (out / "runs" / f"{task.key}.json").exists()]
        engine = Local(workers, 1, runs / "logs")
        failures |= run_all(missing, len(asked), engine, out, runs, source_commit())
    return failures


def main() -> None:
    """Runs the arms at the seeds asked for; a second call continues where the first was stopped."""
    parser = argparse.ArgumentParser(description="The runs of claims 6, 7 and 8 with anchored energies.")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(CHOICE_SEEDS)))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--scale", choices=SCALES, default=PAPER.name)
    parser.add_argument("--out", type=Path, default=Path("reproduction/results"))
    parser.add_argument("--runs", type=Path, default=Path("runs/anchored"))
    words = parser.parse_args()
    failures = run(SCALES[words.scale], words.seeds, words.workers, words.out, words.runs)
    if failures:
        sys.exit("\n".join(f"{key}: {reason.splitlines()[0]}" for key, reason in failures.items()))


if __name__ == "__main__":
    main()
