"""Claim 9: Gaussian-mixture proposals and uniform negatives do not scale with the action's dimension."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cebm.recipes import Trial, find_trial, vary
from cebm.tasks import ParticleTask
from reproduction.intervals import Interval, Verdict, all_parts, minus
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.prose import dimensions as prose
from reproduction.trainings import Scale, Training, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRIALS = ("ibc", "gmm-nll", "uniform")
DIMENSIONS = (1, 2, 4, 8, 16)
FEW = 2
"""The number of dimensions that the largest one is compared with."""
SHORT = 0.1
"""The smallest shortfall of skill that counts as falling behind."""
WORKS = 0.5
"""`ibc` needs at least this skill to be a reference for the others."""


def label(trial: str, dim: int) -> str:
    return f"{trial}-{dim}d"


def in_dimensions(
    trial: str | Trial, dim: int, scale: Scale, seed: int, label: str, episodes: int | None = None
) -> Training:
    """A training in `dim` dimensions with the paper's 2,000 demonstrations, evaluated at its end. It has half as many
    steps as those of other claims, as no recipe improves after that (see the protocol)."""
    episodes = episodes or scale.many
    task = ParticleTask(dim=dim)
    return training(trial, scale, seed, label, task=task, episodes=episodes, steps=scale.half, followed=False)


def skill(error: float, dim: int) -> float:
    """1 − error / √(dim/12). The expert has skill 1. √(dim/12) is the root mean square distance of a goal, which is
    uniform in the box, from the centre of the box."""
    return 1 - error / math.sqrt(dim / 12)


def fails_to_scale(shortfall: Interval, growth: Interval, works: bool) -> Verdict:
    """Whether a trial falls short of `ibc` in many dimensions, and by more than in few. Inconclusive unless `ibc`
    itself works in many dimensions."""
    if not works:
        return "inconclusive"
    if shortfall.low > SHORT and growth.low > 0:
        return "holds"
    return "does not hold" if shortfall.high < SHORT else "inconclusive"


class Dimensions(Claim):
    number = 9
    slug = "dimensions"
    section = "Sec. III"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE
    most_seeds = 3

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        recipes: dict[str, str | Trial] = {trial: trial for trial in TRIALS}
        recipes["uniform"] = vary(find_trial("uniform"), count=find_trial("gmm-nll").objective.count)
        return [
            in_dimensions(recipes[trial], dim, scale, seed, label(trial, dim))
            for seed in seeds
            for trial in TRIALS
            for dim in DIMENSIONS
        ]

    def judge(self, results: Results) -> Finding:
        def of(trial: str, dim: int, *path: str | int) -> list[float]:
            return results.values(label(trial, dim), *path)

        skills = {
            trial: {
                dim: [skill(error, dim) for error in of(trial, dim, "curve", -1, "validation_action_error")]
                for dim in DIMENSIONS
            }
            for trial in TRIALS
        }
        success = {trial: {dim: of(trial, dim, "last", "success") for dim in DIMENSIONS} for trial in TRIALS}
        few, many = FEW, DIMENSIONS[-1]
        short = {
            trial: {dim: minus(skills["ibc"][dim], skills[trial][dim]) for dim in DIMENSIONS} for trial in TRIALS[1:]
        }
        shortfalls = {trial: Interval.of(short[trial][many]) for trial in short}
        growths = {trial: Interval.of_difference(short[trial][many], short[trial][few]) for trial in short}
        works = Interval.of(skills["ibc"][many]).mean >= WORKS
        parts = {trial: fails_to_scale(shortfalls[trial], growths[trial], works) for trial in short}
        gaps = {trial: Interval.of(results.at_the_end(label(trial, many), "energy_gap")) for trial in TRIALS}
        bounds = {trial: Interval.of(of(trial, many, "curve", -1, "mi_bound")) for trial in TRIALS}
        facts = prose.Facts(
            few=few,
            many=many,
            runs={
                trial: prose.Run(
                    few_skill=Interval.of(skills[trial][few]).mean,
                    many_skill=Interval.of(skills[trial][many]).mean,
                    success=Interval.of(success[trial][many]),
                    gap=gaps[trial],
                    bound=bounds[trial],
                )
                for trial in TRIALS
            },
            comparisons={
                trial: prose.Comparison(
                    shortfall=shortfalls[trial],
                    growth=growths[trial],
                    part=part,
                    behind=shortfalls[trial].low > SHORT,
                    wrong=bounds[trial].high < 0,
                )
                for trial, part in parts.items()
            },
            works=works,
            ibc_successes=(success["ibc"][few], success["ibc"][many]),
            skill_alone=2 * sum(success["ibc"][many]) < sum(success["ibc"][few]),
        )
        return Finding(
            all_parts(parts.values()),
            prose.measured(facts),
            {
                "dimensions": list(DIMENSIONS),
                "skill": {trial: list(skills[trial].values()) for trial in TRIALS},
                "success": {trial: list(success[trial].values()) for trial in TRIALS},
                "shortfall": {trial: interval.to_json() for trial, interval in shortfalls.items()},
                "growth": {trial: interval.to_json() for trial, interval in growths.items()},
                "energy_gap": {trial: interval.to_json() for trial, interval in gaps.items()},
                "mi_bound": {trial: interval.to_json() for trial, interval in bounds.items()},
                "parts": parts,
            },
            prose.comment(facts),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import COLOURS, mean_and_band

        dimensions = finding.numbers["dimensions"]
        for axes, what in zip(figure.subplots(1, 2), ("skill", "success"), strict=True):
            for colour, (trial, values) in zip(COLOURS, finding.numbers[what].items(), strict=False):
                mean_and_band(axes, dimensions, values, colour, trial)
                axes.plot(dimensions, values, ".", color=colour, markersize=4)
            axes.set_xscale("log", base=2)
            axes.set_xticks(dimensions, [str(dim) for dim in dimensions])
            axes.set_xlabel("dimensions of the action")
            axes.set_ylabel(what)
            axes.legend(frameon=False, fontsize=8)
