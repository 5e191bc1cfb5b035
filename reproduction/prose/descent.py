"""The texts of claim 16, descent."""

from dataclasses import dataclass

from reproduction.intervals import Interval, Verdict

STATEMENT = (
    "As the step size falls, IBC's Langevin step (with σ = 1) tends to gradient descent, and the noise has a "
    "smaller share in it than in the correct step."
)
PROTOCOL = (
    "The certificate's three targets without a border; λ from the target's first step size (0.005; double well "
    "0.012) down to a 64th of it. 1,000 chains from the target's start run for the same time λ·steps, 10 steps "
    "at the largest λ and 640 at the smallest, by IBC's step with σ = 1, by the correct one with τ = λ/2, and "
    "without noise from the same start; no clipping."
)
METRIC = (
    "Distance to the noise-free path at its end, root mean square over chains, each dimension in standard "
    "deviations of the target; its slope is that of a line through (log λ, log distance). Share of the noise in "
    "the first step: mean square of the noise over that of noise plus that of the gradient's move."
)
RULE = (
    "Holds where, on every target, the 95 % interval of the slope lies above 0.25 for IBC's step (√λ has 0.5) and "
    "below 0.25 for the correct one, and that of the difference of the shares at the smallest λ, correct − IBC's, "
    "lies above 0. Does not hold where, on some target, one of the three lies on the other side of its limit. Else "
    "inconclusive."
)


@dataclass(frozen=True)
class Step:
    """What the texts report of a step rule on a target."""

    slope: Interval
    first_share: float
    """Mean share of the noise in a step with the largest step size."""
    last_share: float
    """The same with the smallest step size."""

    def shares(self) -> str:
        return f"{100 * self.first_share:.1f} % to {100 * self.last_share:.1f} %"


def measured(targets: dict[str, tuple[Step, Step]]) -> str:
    """IBC's step and the correct one, by target."""
    told = "; ".join(
        f"{target}: slope {ibc.slope.number()} with IBC's step and "
        f"{correct.slope.number()} with the correct one, share of the noise in a step from "
        f"{ibc.shares()} and from {correct.shares()}"
        for target, (ibc, correct) in targets.items()
    )
    return f"From the largest to the smallest step, {told}."


def comment(verdict: Verdict) -> str:
    return (
        "A single step of IBC's does not change its character with λ: gradient and noise are both proportional to "
        "it, so that the noise keeps its share, and it is only against the correct step, whose share of noise "
        "grows as λ falls, that it is small. What the step size changes is the sum of many steps: in a fixed time "
        "there are 1/λ of them, the gradients add up and the noise of each, λσ, averages out, to √λ σ in all."
        + ("" if verdict == "holds" else " This is theory: these runs do not show it, or not clearly.")
    )
