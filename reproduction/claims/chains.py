"""Claim 5: many short chains give better negatives than one long chain."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cebm.trials import find_trial
from reproduction.intervals import Interval, Verdict, decide
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.prose.shared import PLATEAU
from reproduction.trainings import Scale, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRIALS = ("long-chain", "short-chains", "correct", "ibc")


class Chains(Claim):
    number = 5
    slug = "chains"
    section = "Sec. III and V"
    statement = (
        "Negatives that are the last states of many short, independent chains give a better policy than the states of "
        "one long chain after its burn-in."
    )
    protocol = (
        "`long-chain` keeps 8 states of one chain per observation, every fifth after a burn-in of 50, with the correct "
        "step and a constant τ of 0.01: 86 gradients an observation. `short-chains` takes the last states of 8 chains "
        "of 10 such steps: 80 gradients. Beside them `correct`, the same with τ falling from 1 to 0.001, and `ibc`, "
        "with IBC's step. All are trained on the same demonstrations of the 2-D particle task, for the "
        "same number of steps, and act with the same search."
    )
    metric = (
        f"{PLATEAU} Differences are paired by seed. `short-chains` "
        "against `long-chain` decides: they differ in the chains alone. `correct` and `ibc`, which change the step as "
        "well, are reported, and so is the last policy on held-out episodes."
    )
    rule = (
        "Holds where the 95 % interval of success(short-chains) − success(long-chain) lies above 0, does not hold "
        "where it lies below, else inconclusive. The differences of `correct` and `ibc` to `long-chain` do not decide."
    )

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        short = replace(find_trial("long-chain"), negatives="chains")
        tasks: list[Task] = [training(short, scale, seed, "short-chains") for seed in seeds]
        return tasks + [training(trial, scale, seed) for seed in seeds for trial in TRIALS if trial != "short-chains"]

    def judge(self, results: Results) -> Finding:
        success = {trial: results.plateau(trial) for trial in TRIALS}
        last = {trial: results.values(trial, "last", "success") for trial in TRIALS}
        away = {trial: results.distances(trial) for trial in TRIALS}
        nearer = Interval.of_difference(away["long-chain"], away["short-chains"])
        over = {trial: Interval.of_difference(success[trial], success["long-chain"]) for trial in TRIALS[1:]}
        verdict = decide(over["short-chains"])
        at_the_end = Interval.of_difference(last["short-chains"], last["long-chain"])
        return Finding(
            verdict,
            f"Success {Interval.of(success['long-chain']).percent()} with `long-chain`; "
            + ", ".join(
                f"{Interval.of(success[trial]).percent()} with `{trial}`, {difference.points()}"
                for trial, difference in over.items()
            )
            + f". Of the last policies, held out, {at_the_end.points()} from `long-chain` to `short-chains`.",
            {
                "success": success,
                "last": last,
                "negative_distance": away,
                "difference": {trial: difference.to_json() for trial, difference in over.items()},
                "curves": results.curves(TRIALS),
            },
            f"In the second half of training the negatives of the long chain are "
            f"{Interval.of(away['long-chain']).number()} away from the demonstrated action, those of the short ones "
            f"{Interval.of(away['short-chains']).number()}. "
            + _COMMENTS[verdict]
            + (_AT_THE_END[decide(at_the_end)] if decide(at_the_end) != verdict else "")
            + _NEARER[decide(nearer)]
            + (_AS_COMPARED if verdict != "holds" and decide(over["ibc"]) == "holds" else ""),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import curves

        curves(figure.subplots(), finding.numbers["curves"], "success")


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
