"""The runs that settle the losses without a lower bound: claims 6, 7 and 8 with anchored energies.

    python -m reproduction.anchored --workers 1                     # all families, five seeds
    python -m reproduction.anchored --families mcmc-loss-anchored --seeds 0 1

The rules were written before the first run of any arm. Each arm trains as the ledger's trials do (2-D particle, 300
demonstrations, 2,000 steps) and keeps averaged weights beside its raw ones, which averaging does not change. Every
weight of a family runs with the first two seeds. The weight is then chosen by `chosen`: on validation episodes, 64
candidates, averaged weights, the mean of the second half of training over these seeds; the chosen one alone runs with
the other seeds. It is judged on held-out episodes of five seeds; ten where an interval ends within 2 points of a limit.

Written when five arms had run with seed 0: the raw weights with 64 candidates decide, as the ledger's `ibc`, to which
they are compared, averages nothing and acts so. Averaged weights and 512 candidates are reported beside them.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cebm.composition import vary
from cebm.engines import Local
from cebm.objectives import EntropyRegulariser, PositiveL2
from cebm.recipes import Trial, find_trial
from cebm.runs import source_commit
from reproduction.ledger import Results, second_half
from reproduction.running import run_all
from reproduction.trainings import PAPER, SCALES, Result, Scale, Training, training

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
    return [task for seed in seeds for family in arms() for task in at_seed(family, scale, seed)]


def label(family: str, weight: float) -> str:
    """The name of an arm in tables and records."""
    return f"{family}-{weight:g}"


def chosen(family: str, results: Mapping[str, Sequence[Result]]) -> float:
    """The weight of a family with the most success on validation episodes; the smaller one of two that are equal."""
    rows = {weight: results[label(family, weight)][:CHOICE_SEEDS] for weight in arms()[family]}
    means = {weight: sum(map(second_half, runs)) / len(runs) for weight, runs in rows.items()}
    return min(means, key=lambda weight: (-means[weight], weight))


def run(
    families: Sequence[str], scale: Scale, seeds: Sequence[int], workers: int, out: Path, runs: Path
) -> dict[str, str]:
    """Run what has no record in `out` yet, one seed after the other. Returns why some runs failed, by key."""
    (out / "runs").mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}
    while True:
        known = results_in(out)
        asked = {task.key: task for family in families for task in planned(family, scale, seeds, known)}
        missing = [task for key, task in asked.items() if key not in known and key not in failures]
        if not missing:
            return failures
        seed = min(task.seed for task in missing)
        now = [task for task in missing if task.seed == seed]
        failures |= run_all(now, len(asked), Local(workers, 1, runs / "logs"), out, runs, source_commit())


def results_in(out: Path) -> dict[str, Result]:
    """The results of all records in a folder of results, by key."""
    records = (json.loads(path.read_bytes()) for path in sorted((out / "runs").glob("*.json")))
    return {record["key"]: record["result"] for record in records}


def main() -> None:
    """Runs the arms at the seeds asked for; a second call continues where the first was stopped."""
    parser = argparse.ArgumentParser(description="The runs of claims 6, 7 and 8 with anchored energies.")
    parser.add_argument("--families", nargs="+", choices=list(arms()), default=list(arms()))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(SEEDS)))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--scale", choices=SCALES, default=PAPER.name)
    parser.add_argument("--out", type=Path, default=Path("reproduction/results"))
    parser.add_argument("--runs", type=Path, default=Path("runs/anchored"))
    words = parser.parse_args()
    failures = run(words.families, SCALES[words.scale], words.seeds, words.workers, words.out, words.runs)
    if failures:
        sys.exit("\n".join(f"{key}: {reason.splitlines()[0]}" for key, reason in failures.items()))


if __name__ == "__main__":
    main()
