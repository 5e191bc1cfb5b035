"""Claim 5: many short chains give better negatives than one long chain."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cebm.experiments.ledger import Claim, Finding, Interval, Results, Scale, Task, Verdict, decide, training
from cebm.trials import find_trial

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
        "Success of the last policy on held-out episodes, per seed; differences are paired by seed. `short-chains` "
        "against `long-chain` decides: they differ in the chains alone. `correct` and `ibc`, which change the step as "
        "well, are reported, and so is the best checkpoint."
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
        success = {trial: results.values(trial, "last", "success") for trial in TRIALS}
        best = {trial: results.values(trial, "best", "success") for trial in TRIALS}
        over = {trial: Interval.of_difference(success[trial], success["long-chain"]) for trial in TRIALS[1:]}
        verdict = decide(over["short-chains"])
        return Finding(
            verdict,
            f"Success {Interval.of(success['long-chain']).percent()} with `long-chain`; "
            + ", ".join(
                f"{Interval.of(success[trial]).percent()} with `{trial}`, {difference.points()}"
                for trial, difference in over.items()
            )
            + ".",
            {
                "success": success,
                "best": best,
                "difference": {trial: difference.to_json() for trial, difference in over.items()},
                "curves": results.curves(TRIALS),
            },
            _COMMENTS[verdict],
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from cebm.experiments.drawing import curves

        curves(figure.subplots(), finding.numbers["curves"], "success")


_COMMENTS: dict[Verdict, str] = {
    "holds": (
        "The states of one chain are neighbours: eight of them, five steps apart, cover one valley and say little more "
        "than one would. Independent chains start all over the box and find every valley that is wrong."
    ),
    "does not hold": (
        "What seems to matter is where negatives end, not whether they are independent: the long chain has the time to "
        "reach the valleys, while ten steps of the same size stay near where they began, anywhere in the box."
    ),
    "inconclusive": (
        "Two things work against each other: the states of one chain are neighbours and cover one valley, but the "
        "chain has the time to get there, while ten steps of the same size stay near where they began."
    ),
}
