"""Claim 3: in training, IBC's Langevin formulation beats the correct one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reproduction.intervals import Interval, decide
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.trainings import Scale, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Formulation(Claim):
    number = 3
    slug = "formulation"
    section = "Sec. III"
    statement = (
        "In training, chains of IBC's mis-scaled Langevin step give a better policy than chains of the correct step."
    )
    protocol = (
        "`ibc` and `correct` differ in the sampler of their negatives alone. Both are trained on the same "
        "demonstrations of the 2-D particle task, for the same number of steps, and act with the same search."
    )
    metric = "Success of the last policy on held-out episodes, per seed; the difference is paired by seed."
    rule = (
        "Holds where the 95 % interval of success(ibc) − success(correct) lies above 0, does not hold where it lies "
        "below, else inconclusive."
    )

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        return [training(trial, scale, seed) for seed in seeds for trial in ("ibc", "correct")]

    def judge(self, results: Results) -> Finding:
        ibc, correct = (results.values(trial, "last", "success") for trial in ("ibc", "correct"))
        near, far = (results.distances(trial) for trial in ("ibc", "correct"))
        difference = Interval.of_difference(ibc, correct)
        verdict, further = decide(difference), decide(Interval.of_difference(far, near))
        sharp = {trial: Interval.of(results.values(trial, "conditional_entropy")) for trial in ("ibc", "correct")}
        return Finding(
            verdict,
            f"Success {Interval.of(ibc).percent()} with `ibc` and {Interval.of(correct).percent()} with `correct`: "
            f"{difference.points()}.",
            {
                "success": {"ibc": ibc, "correct": correct},
                "difference": difference.to_json(),
                "curves": results.curves(("ibc", "correct")),
                "negative_distance": {"ibc": near, "correct": far},
                "conditional_entropy": {trial: interval.to_json() for trial, interval in sharp.items()},
            },
            f"In the second half of training the negatives are {Interval.of(near).number()} away from the demonstrated "
            f"action with IBC's step and {Interval.of(far).number()} with the correct one, in a box of width 2. "
            + {
                "holds": "So those of the correct step end further away"
                + (
                    ", where they may teach less about the surroundings of the demonstrated action."
                    if verdict == "holds"
                    else "; that the policy suffers from it, these runs do not show."
                ),
                "does not hold": "So those of the correct step do not end further away.",
                "inconclusive": "So those of the correct step hardly end further away.",
            }[further]
            + " Two things differ in that step: the noise, √(2τ) in place of λσ, and the drift, τ∇E in place of ½λ∇E, "
            "where τ and λ have the same schedule; which of them matters was not measured. H(y|x) at the end is "
            f"{sharp['ibc'].number()} nats with IBC's step and {sharp['correct'].number()} with the correct one.",
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import bars, curves

        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2, 1])
        curves(left, finding.numbers["curves"], "success")
        bars(right, finding.numbers["success"], "")
        left.set_title("validation episodes", fontsize=9)
        right.set_title("held out, at the end", fontsize=9)
