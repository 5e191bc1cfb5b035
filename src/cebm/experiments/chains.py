"""Claim 5: many short chains give better negatives than one long chain."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cebm.experiments.ledger import Claim, Finding, Interval, Results, Scale, Task, Verdict, decide, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRIALS = ("long-chain", "correct", "ibc")


def success_curves(results: Results, labels: Iterable[str]) -> dict[str, list[list[tuple[float, float]]]]:
    """Success along training, by label and seed, as `drawing.curves` takes it."""
    return {
        label: [[(float(row["step"]), row["success"]) for row in run["curve"]] for run in results.by_label[label]]
        for label in labels
    }


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
        "step and a constant τ of 0.01. `correct` takes the last states of 8 chains of 10 correct steps, and `ibc` "
        "those of 8 chains of IBC's step. All are trained on the same demonstrations of the 2-D particle task, for the "
        "same number of steps, and act with the same search."
    )
    metric = (
        "Success of the last policy on held-out episodes, per seed; differences are paired by seed. `correct` against "
        "`long-chain` decides: they share the step's formula, and differ in the chains and the step sizes that go with "
        "them. `ibc`, which changes the formula as well, is reported beside it, and so is the best checkpoint."
    )
    rule = (
        "Holds where the 95 % interval of success(correct) − success(long-chain) lies above 0, does not hold where it "
        "lies below, else inconclusive. The difference between `ibc` and `long-chain` does not decide."
    )

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        return [training(trial, scale, seed) for seed in seeds for trial in TRIALS]

    def judge(self, results: Results) -> Finding:
        success = {trial: results.values(trial, "last", "success") for trial in TRIALS}
        best = {trial: results.values(trial, "best", "success") for trial in TRIALS}
        deciding = Interval.of_difference(success["correct"], success["long-chain"])
        beside = Interval.of_difference(success["ibc"], success["long-chain"])
        verdict = decide(deciding)
        return Finding(
            verdict,
            f"Success {Interval.of(success['correct']).percent()} with `correct` and "
            f"{Interval.of(success['long-chain']).percent()} with `long-chain`: {deciding.points()}. `ibc` has "
            f"{Interval.of(success['ibc']).percent()}, {beside.points()} over `long-chain`.",
            {
                "success": success,
                "best": best,
                "difference": deciding.to_json(),
                "difference of ibc": beside.to_json(),
                "curves": success_curves(results, TRIALS),
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
        "What seems to matter is where negatives end, not whether they are independent: the long chain takes small "
        "steps and has the time to reach the valleys, while ten correct steps that begin with τ = 1 spread their "
        "negatives over the box."
    ),
    "inconclusive": (
        "Two things work against each other: the states of one chain are neighbours and cover one valley, but the "
        "chain has small steps and the time to get there, while ten correct steps that begin with τ = 1 spread their "
        "negatives over the box."
    ),
}
