"""The texts of claim 3, formulation."""

from dataclasses import dataclass

from reproduction.intervals import Interval, Verdict

STATEMENT = (
    "In training, chains of IBC's mis-scaled Langevin step give a better policy than chains of the correct step."
)
PROTOCOL = (
    "`ibc` and `correct` differ in the sampler of their negatives alone. Both are trained on the same "
    "demonstrations of the 2-D particle task, for the same number of steps, and act with the same search."
)
METRIC = "Success of the last policy on held-out episodes, per seed; the difference is paired by seed."
RULE = (
    "Holds where the 95 % interval of success(ibc) − success(correct) lies above 0, does not hold where it lies "
    "below, else inconclusive."
)


@dataclass(frozen=True)
class Facts:
    """What the texts report of `ibc` and `correct`."""

    success: dict[str, Interval]
    difference: Interval
    """Difference of their success."""
    distance: dict[str, Interval]
    """Distance of the negatives to the demonstrated action."""
    further: Verdict
    """Whether the negatives of `correct` end further away."""
    entropy: dict[str, Interval]
    """H(y|x) at the end of training."""


def measured(facts: Facts) -> str:
    return (
        f"Success {facts.success['ibc'].percent()} with `ibc` and {facts.success['correct'].percent()} with `correct`: "
        f"{facts.difference.points()}."
    )


def comment(facts: Facts, verdict: Verdict) -> str:
    return (
        f"In the second half of training the negatives are {facts.distance['ibc'].number()} away from the demonstrated "
        f"action with IBC's step and {facts.distance['correct'].number()} with the correct one, in a box of width 2. "
        + {
            "holds": "So those of the correct step end further away"
            + (
                ", where they may teach less about the surroundings of the demonstrated action."
                if verdict == "holds"
                else "; that the policy suffers from it, these runs do not show."
            ),
            "does not hold": "So those of the correct step do not end further away.",
            "inconclusive": "So those of the correct step hardly end further away.",
        }[facts.further]
        + " Two things differ in that step: the noise, √(2τ) in place of λσ, and the drift, τ∇E in place of ½λ∇E, "
        "where τ and λ have the same schedule; which of them matters was not measured. H(y|x) at the end is "
        f"{facts.entropy['ibc'].number()} nats with IBC's step and {facts.entropy['correct'].number()} with the "
        "correct one."
    )
