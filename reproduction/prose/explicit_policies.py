"""The texts of claim 14, explicit."""

from dataclasses import dataclass

from reproduction.intervals import Interval, Verdict

STATEMENT = (
    "An implicit policy deals with multimodal demonstrations, on which an explicit policy that regresses the "
    "action fails."
)
PROTOCOL = (
    "`mse` (regression), `mdn` (a mixture density, explicit and multimodal) and `ibc` on the same demonstrations "
    "of the 2-D particle task, for the same number of steps, all with one observation. Twice without the velocity: "
    "with an expert that visits the goals in their order, and with one that flips a coin for the order. With the "
    "coin the demonstrated action is one goal or the other, wherever the agent is, and their mean lies between; in "
    "order it can still be either where the ways to the two goals cross, as the velocity tells them apart. So, "
    "added when half of these runs had been seen and deciding nothing, a third time: the plain task, in order and "
    "with the velocity."
)
METRIC = (
    "The share of held-out episodes in which the last policy reaches a goal at all, per seed. The mean of two "
    "goals is neither, though an agent may pass one on its way there; success asks for both goals, which takes a "
    "memory of the first one or the velocity, and is reported. The lead is share(ibc) − share(mse) with the random "
    "order, the loss share(mse) with the fixed order minus that with the random one; both paired by seed."
)
RULE = (
    "Holds where the 95 % intervals of both, the lead of `ibc` and the loss of `mse`, lie above 0; does not hold "
    "where one of them lies below 0; else inconclusive. `mdn` is reported and decides nothing."
)


@dataclass(frozen=True)
class Facts:
    """What the texts report; shares are by task and trial."""

    reached: dict[str, dict[str, Interval]]
    """Share of episodes in which a goal is reached."""
    success: dict[str, dict[str, Interval]]
    lead: Interval
    loss: Interval
    mixture_copes: bool
    """Whether both `mdn` and `ibc` have a lead over `mse` with the random order."""


def measured(facts: Facts) -> str:
    reached, success = facts.reached, facts.success
    return (
        f"A goal is reached with the fixed order in {_told(reached['fixed'])}; with the random order in "
        f"{_told(reached['random'])}: a lead of {facts.lead.points()} for `ibc` over `mse`, which loses "
        f"{facts.loss.points()} from one order to the other. Success with the fixed order {_told(success['fixed'])}; "
        f"with the random order {_told(success['random'])}; on the plain task {_told(success['plain'])}."
    )


def _told(group: dict[str, Interval]) -> str:
    return ", ".join(f"{interval.percent()} with `{trial}`" for trial, interval in group.items())


def comment(facts: Facts, verdict: Verdict) -> str:
    return (
        "A regression fits the mean of the demonstrated actions, which with two orders is a place between the "
        "goals. An energy can have a minimum at each goal, of which acting picks one. "
        + _COMMENTS[verdict]
        + (
            " A mixture density copes as well, and needs neither a search nor negatives: being explicit is not "
            "what makes a policy fail, being a mean is."
            if facts.mixture_copes
            else ""
        )
    )


_COMMENTS: dict[Verdict, str] = {
    "holds": "That is what is seen here.",
    "does not hold": "That is not what decides here.",
    "inconclusive": "Whether that decides here, these seeds do not tell.",
}
