"""Claim 16: IBC's Langevin step tends to gradient descent as the step size falls, the correct one does not."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from cebm.certificate import Target
from cebm.energy import Actions
from cebm.samplers import Constant, Langevin, run
from reproduction.claims.langevin import unbounded_targets
from reproduction.intervals import Interval, Verdict
from reproduction.ledger import Claim, Computation, Finding, Results, Task
from reproduction.trainings import Result, Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRACTIONS = (1.0, 1 / 4, 1 / 16, 1 / 64)
"""Step sizes, as fractions of the target's first λ."""
STEPS = 10
"""Of the largest step size: the paper's length of a chain. Smaller steps are as many times more."""
SLOPE = 0.25
"""Between 0, where the noise stays, and 1/2, where it vanishes as √λ."""
STEP_RULES = ("ibc", "correct")


class Descent(Claim):
    number = 16
    slug = "descent"
    section = "Appendix B"
    statement = (
        "As the step size falls, IBC's Langevin step (with σ = 1) tends to gradient descent, and the noise has a "
        "smaller share in it than in the correct step."
    )
    protocol = (
        "The certificate's three targets without a border; λ from the target's first step size (0.005; double well "
        "0.012) down to a 64th of it. 1,000 chains from the target's start run for the same time λ·steps, 10 steps "
        "at the largest λ and 640 at the smallest, by IBC's step with σ = 1, by the correct one with τ = λ/2, and "
        "without noise from the same start; no clipping."
    )
    metric = (
        "Distance to the noise-free path at its end, root mean square over chains, each dimension in standard "
        "deviations of the target; its slope is that of a line through (log λ, log distance). Share of the noise in "
        "the first step: mean square of the noise over that of noise plus that of the gradient's move."
    )
    rule = (
        "Holds where, on every target, the 95 % interval of the slope lies above 0.25 for IBC's step (√λ has 0.5) and "
        "below 0.25 for the correct one, and that of the difference of the shares at the smallest λ, correct − IBC's, "
        "lies above 0. Does not hold where, on some target, one of the three lies on the other side of its limit. Else "
        "inconclusive."
    )

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
        measured = "; ".join(
            f"{target}: slope {intervals['ibc'][target].number()} with IBC's step and "
            f"{intervals['correct'][target].number()} with the correct one, share of the noise in a step from "
            f"{100 * _mean(computed, target, 'ibc', 0):.1f} % to {100 * _mean(computed, target, 'ibc', -1):.1f} % and "
            f"from {100 * _mean(computed, target, 'correct', 0):.1f} % to "
            f"{100 * _mean(computed, target, 'correct', -1):.1f} %"
            for target in targets
        )
        return Finding(
            verdict,
            f"From the largest to the smallest step, {measured}.",
            {
                "sizes": {target: computed[0][target]["sizes"] for target in targets},
                "distance": _collect(computed, "distance"),
                "share": _collect(computed, "share"),
                "share of the path": _collect(computed, "share of the path"),
                "slopes": slopes,
            },
            "A single step of IBC's does not change its character with λ: gradient and noise are both proportional to "
            "it, so that the noise keeps its share, and it is only against the correct step, whose share of noise "
            "grows as λ falls, that it is small. What the step size changes is the sum of many steps: in a fixed time "
            "there are 1/λ of them, the gradients add up and the noise of each, λσ, averages out, to √λ σ in all."
            + ("" if verdict == "holds" else " This is theory: these runs do not show it, or not clearly."),
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
    """Mean squares, over chains and dimensions in standard deviations of the target, of what the noise changed about
    the end of a path of `steps`, and of what the noise-free path covered."""
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
    """Of log distance over log λ, by least squares."""
    return float(np.polyfit(np.log(result["sizes"]), np.log(result[formulation]["distance"]), 1)[0])


def _mean(computed: Sequence[Result], target: str, formulation: str, size: int) -> float:
    return float(np.mean([result[target][formulation]["share"][size] for result in computed]))


def _collect(computed: Sequence[Result], what: str) -> dict[str, dict[str, list[list[float]]]]:
    """By target and formulation, one list over step sizes per seed."""
    return {
        target: {formulation: [result[target][formulation][what] for result in computed] for formulation in STEP_RULES}
        for target in computed[0]
    }
