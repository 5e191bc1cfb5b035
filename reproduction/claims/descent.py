"""Claim 16: IBC's Langevin step tends to gradient descent as the step size falls, the correct one does not."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from cebm.certificate import Target
from cebm.energies.base import Actions
from cebm.samplers import Constant, Langevin, run
from reproduction.claims.langevin import unbounded_targets
from reproduction.intervals import Interval, Verdict
from reproduction.ledger import Claim, Computation, Finding, Results, Task
from reproduction.prose import descent as prose
from reproduction.trainings import Result, Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRACTIONS = (1.0, 1 / 4, 1 / 16, 1 / 64)
"""Step sizes, as fractions of the target's first λ."""
STEPS = 10
"""Number of steps at the largest step size, which is the paper's chain length. Smaller step sizes take more steps, so
that the total time is the same."""
SLOPE = 0.25
"""Limit of the slope that decides, midway between 0 (the noise stays) and 1/2 (the noise vanishes as √λ)."""
STEP_RULES = ("ibc", "correct")


class Descent(Claim):
    number = 16
    slug = "descent"
    section = "Appendix B"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        return [Computation(self, seed, scale) for seed in seeds]

    def compute(self, scale: Scale, seed: int) -> Result:
        generator = torch.Generator().manual_seed(seed)
        result: Result = {}
        for target in unbounded_targets():
            sizes = [fraction * target.step_sizes[0] for fraction in FRACTIONS]
            start = target.starts(1, 5 * scale.samples, generator)
            result[target.name] = {"sizes": sizes}
            for formulation in STEP_RULES:
                paths = [
                    noise_and_descent(target, formulation, size, round(STEPS / fraction), start, generator)
                    for size, fraction in zip(sizes, FRACTIONS, strict=True)
                ]
                steps = [noise_and_descent(target, formulation, size, 1, start, generator) for size in sizes]
                result[target.name][formulation] = {
                    "distance": [noise**0.5 for noise, _ in paths],
                    "share of the path": [noise / (noise + descent) for noise, descent in paths],
                    "share": [noise / (noise + descent) for noise, descent in steps],
                }
        return result

    def judge(self, results: Results) -> Finding:
        computed = results.by_label["computation"]
        targets = list(computed[0])
        slopes = {
            formulation: {target: [_slope(result[target], formulation) for result in computed] for target in targets}
            for formulation in STEP_RULES
        }
        shares = {
            formulation: {target: results.values("computation", target, formulation, "share", -1) for target in targets}
            for formulation in STEP_RULES
        }
        intervals = {
            formulation: {target: Interval.of(values) for target, values in slopes[formulation].items()}
            for formulation in STEP_RULES
        }
        ibc, correct = list(intervals["ibc"].values()), list(intervals["correct"].values())
        differences = [Interval.of_difference(shares["correct"][target], shares["ibc"][target]) for target in targets]
        verdict: Verdict
        if (
            all(interval.low > SLOPE for interval in ibc)
            and all(interval.high < SLOPE for interval in correct)
            and all(interval.low > 0 for interval in differences)
        ):
            verdict = "holds"
        elif (
            any(interval.high < SLOPE for interval in ibc)
            or any(interval.low > SLOPE for interval in correct)
            or any(interval.high < 0 for interval in differences)
        ):
            verdict = "does not hold"
        else:
            verdict = "inconclusive"
        steps = {
            formulation: {
                target: prose.Step(
                    slope=intervals[formulation][target],
                    first_share=_mean(computed, target, formulation, 0),
                    last_share=_mean(computed, target, formulation, -1),
                )
                for target in targets
            }
            for formulation in STEP_RULES
        }
        return Finding(
            verdict,
            prose.measured({target: (steps["ibc"][target], steps["correct"][target]) for target in targets}),
            {
                "sizes": {target: computed[0][target]["sizes"] for target in targets},
                "distance": _collect(computed, "distance"),
                "share": _collect(computed, "share"),
                "share of the path": _collect(computed, "share of the path"),
                "slopes": slopes,
            },
            prose.comment(verdict),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import COLOURS, mean_and_band

        left, right = figure.subplots(1, 2)
        for colour, (target, sizes) in zip(COLOURS, finding.numbers["sizes"].items(), strict=False):
            for formulation, style in zip(STEP_RULES, (".-", ".--"), strict=True):
                for axes, what in ((left, "distance"), (right, "share")):
                    values = np.array(finding.numbers[what][target][formulation]).T.tolist()
                    mean_and_band(axes, sizes, values, colour, f"{target}, {formulation}", style)
        for axes, what in ((left, "distance to the noise-free path"), (right, "share of the noise in a step")):
            axes.set_xscale("log")
            axes.set_xlabel("step size λ")
            axes.set_ylabel(what)
        left.set_yscale("log")
        left.legend(frameon=False, fontsize=7, handlelength=3)


def noise_and_descent(
    target: Target, formulation: str, size: float, steps: int, start: Actions, generator: torch.Generator
) -> tuple[float, float]:
    """Two mean squares over chains and dimensions, in standard deviations of the target: the distance between the ends
    of the noisy and the noise-free path after `steps` steps, and the distance that the noise-free path covers."""
    context = target.encode(start[:, 0])
    free = Langevin("ibc", steps, Constant(size), noise=0.0, step_clip=None, margin=None)
    if formulation == "ibc":
        noisy = Langevin("ibc", steps, Constant(size), noise=1.0, step_clip=None, margin=None)
    else:
        noisy = Langevin("correct", steps, Constant(size / 2), step_clip=None, margin=None)
    without = run(free, target, context, start, generator).actions
    with_noise = run(noisy, target, context, start, generator).actions
    std = start.new_tensor(target.std)
    noise, descent = (
        (difference / std).square().mean().item() for difference in (with_noise - without, without - start)
    )
    return noise, descent


def _slope(result: Result, formulation: str) -> float:
    """The least-squares slope of log distance over log λ."""
    return float(np.polyfit(np.log(result["sizes"]), np.log(result[formulation]["distance"]), 1)[0])


def _mean(computed: Sequence[Result], target: str, formulation: str, size: int) -> float:
    """Mean over seeds of the noise's share in a step, at the step size with this index."""
    return float(np.mean([result[target][formulation]["share"][size] for result in computed]))


def _collect(computed: Sequence[Result], what: str) -> dict[str, dict[str, list[list[float]]]]:
    """Values by target and formulation: for each seed a list over step sizes."""
    return {
        target: {formulation: [result[target][formulation][what] for result in computed] for formulation in STEP_RULES}
        for target in computed[0]
    }
