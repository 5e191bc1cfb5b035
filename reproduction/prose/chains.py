"""The texts of claim 5, chains."""

from dataclasses import dataclass

from reproduction.intervals import Interval, Verdict
from reproduction.prose.shared import PLATEAU

STATEMENT = (
    "Negatives that are the last states of many short, independent chains give a better policy than the states of "
    "one long chain after its burn-in."
)
PROTOCOL = (
    "`long-chain` keeps 8 states of one chain per observation, every fifth after a burn-in of 50, with the correct "
    "step and a constant τ of 0.01: 86 gradients an observation. `short-chains` takes the last states of 8 chains "
    "of 10 such steps: 80 gradients. Beside them `correct`, the same with τ falling from 1 to 0.001, and `ibc`, "
    "with IBC's step. All are trained on the same demonstrations of the 2-D particle task, for the "
    "same number of steps, and act with the same search."
)
METRIC = (
    f"{PLATEAU} Differences are paired by seed. `short-chains` "
    "against `long-chain` decides: they differ in the chains alone. `correct` and `ibc`, which change the step as "
    "well, are reported, and so is the last policy on held-out episodes."
)
RULE = (
    "Holds where the 95 % interval of success(short-chains) − success(long-chain) lies above 0, does not hold "
    "where it lies below, else inconclusive. The differences of `correct` and `ibc` to `long-chain` do not decide."
)


@dataclass(frozen=True)
class Facts:
    """What the texts report, by trial."""

    success: dict[str, Interval]
    over: dict[str, Interval]
    """Success minus that of `long-chain`."""
    at_the_end: Interval
    """Success of the last policies on held-out episodes: `short-chains` minus `long-chain`."""
    end: Verdict
    """Whether the last policies of `short-chains` are better."""
    distance: dict[str, Interval]
    """Distance of the negatives to the demonstrated action."""
    nearer: Verdict
    """Whether the negatives of `short-chains` come nearer than those of `long-chain`."""
    ibc_better: Verdict
    """Whether `ibc` is better than `long-chain`."""


def measured(facts: Facts) -> str:
    return (
        f"Success {facts.success['long-chain'].percent()} with `long-chain`; "
        + ", ".join(
            f"{facts.success[trial].percent()} with `{trial}`, {difference.points()}"
            for trial, difference in facts.over.items()
        )
        + f". Of the last policies, held out, {facts.at_the_end.points()} from `long-chain` to `short-chains`."
    )


def comment(facts: Facts, verdict: Verdict) -> str:
    return (
        f"In the second half of training the negatives of the long chain are "
        f"{facts.distance['long-chain'].number()} away from the demonstrated action, those of the short ones "
        f"{facts.distance['short-chains'].number()}. "
        + _COMMENTS[verdict]
        + (_AT_THE_END[facts.end] if facts.end != verdict else "")
        + _NEARER[facts.nearer]
        + (_AS_COMPARED if verdict != "holds" and facts.ibc_better == "holds" else "")
    )


_COMMENTS: dict[Verdict, str] = {
    "holds": (
        "The states of one chain are neighbours: eight of them, five steps apart, say little more than one would. "
        "Independent chains start all over the box and find more of what is wrong."
    ),
    "does not hold": "That the states of one chain are neighbours does no harm here.",
    "inconclusive": (
        "The states of one chain are neighbours, those of many are independent; what this does to the policy, these "
        "seeds do not tell."
    ),
}
# Where the last policies say something else than the second half of training.
_AT_THE_END: dict[Verdict, str] = {
    "holds": " At the end, on held-out episodes, the short chains' policies are the better ones, which does not "
    "decide.",
    "does not hold": " At the end, on held-out episodes, the long chain's policies are the better ones, which does not "
    "decide.",
    "inconclusive": " At the end, on held-out episodes, the two do not differ by more than these seeds can tell.",
}
_AS_COMPARED = (
    " IBC's own short chains do give a better policy than the long one, which is how the paper compares them; but "
    "their step differs too, and it is not the number of chains that these runs show to matter."
)
# By which of the two comes nearer.
_NEARER: dict[Verdict, str] = {
    "holds": " The short chains also come nearer to the demonstrated action.",
    "does not hold": " The long chain comes nearer to the demonstrated action.",
    "inconclusive": "",
}
