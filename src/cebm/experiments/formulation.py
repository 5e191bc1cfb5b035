"""Claim 3: in training, IBC's Langevin formulation beats the correct one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cebm.experiments.ledger import Claim, Finding, Interval, Results, Scale, Task, decide, training

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
        difference = Interval.of_difference(ibc, correct)
        return Finding(
            decide(difference),
            f"Success {Interval.of(ibc).percent()} with `ibc` and {Interval.of(correct).percent()} with `correct`: "
            f"{difference.points()}.",
            {
                "success": {"ibc": ibc, "correct": correct},
                "difference": difference.to_json(),
                "curves": results.curves(("ibc", "correct")),
            },
            "The correct step has √(2τ) of noise, which at these step sizes moves a negative across a good part of the "
            "box; IBC's noise is λσ, so its chains are close to gradient descent and end in the valleys. Negatives "
            "that are spread out are easy to tell from the demonstrated action, and teach less about its surroundings; "
            "negatives in the valleys teach most there, and may dig.",
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from cebm.experiments.drawing import curves

        curves(figure.subplots(), finding.numbers["curves"], "success")
