"""Claim 7: maximum conditional entropy makes the correct step usable, and no better than IBC's."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cebm.experiments.ledger import Claim, Finding, Interval, Results, Scale, Task, Verdict, all_parts, decide, training
from cebm.experiments.mcmc_loss import no_better
from cebm.experiments.noise import label, with_noise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRIALS = ("conditional-maxent", "correct", "ibc")
LITTLE = label(0.01)
"""`ibc` with less noise: what the paper calls typically small. Trained for claim 4, on fewer seeds."""
USABLE = 0.5
"""Of the success of `ibc`."""


class MaxEnt(Claim):
    number = 7
    slug = "maxent"
    section = "Sec. IV"
    statement = (
        "With the maximum-entropy regulariser on p(y|x), chains of the correct Langevin step give a usable policy, "
        "but not a better one than IBC's chains with little noise."
    )
    protocol = (
        "`conditional-maxent` trains with the maximum-entropy loss of appendix A, `correct` with InfoNCE; both have "
        "negatives of the correct step. `ibc` has InfoNCE and IBC's step with σ = 0.1; that with σ = 0.01, on the "
        "first three seeds, is reported beside it. All are trained on the same "
        "demonstrations of the 2-D particle task, for the same number of steps, and act with the same search."
    )
    metric = (
        "Success of the last policy on held-out episodes, per seed; differences are paired by seed. Usable is at least "
        "half the success of `ibc`. The best checkpoint is reported beside it."
    )
    rule = (
        "By 95 % intervals. Usable: holds where success(conditional-maxent) − ½ success(ibc) lies above 0, does not "
        "hold where it lies below, else inconclusive. Through the regulariser: the same of success(conditional-maxent) "
        "− success(correct). Not better: does not hold where success(conditional-maxent) − success(ibc) lies above 0, "
        "holds where it does not and its upper end is below 10 points, else inconclusive. The claim holds where all "
        "three do, does not hold where one does not, else it is inconclusive."
    )

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        tasks: list[Task] = [training(trial, scale, seed) for seed in seeds for trial in TRIALS]
        return tasks + [with_noise(0.01, scale, seed) for seed in seeds[:3]]

    def judge(self, results: Results) -> Finding:
        success = {trial: results.values(trial, "last", "success") for trial in TRIALS}
        best = {trial: results.values(trial, "best", "success") for trial in TRIALS}
        maxent, correct, ibc = (success[trial] for trial in TRIALS)
        little = results.values(LITTLE, "last", "success")
        over_half = Interval.of_difference(maxent, [USABLE * value for value in ibc])
        over_correct = Interval.of_difference(maxent, correct)
        over_ibc = Interval.of_difference(maxent, ibc)
        parts: dict[str, Verdict] = {
            "usable": decide(over_half),
            "through the regulariser": decide(over_correct),
            "not better": no_better(over_ibc),
        }
        found = ", ".join(f"{part}: {verdict}" for part, verdict in parts.items())
        return Finding(
            all_parts(parts.values()),
            f"Success {Interval.of(maxent).percent()} with `conditional-maxent`, {Interval.of(correct).percent()} with "
            f"`correct` and {Interval.of(ibc).percent()} with `ibc`: {over_half.points()} over half of `ibc`, "
            f"{over_correct.points()} over `correct`, {over_ibc.points()} over `ibc` ({found}). "
            f"With σ = 0.01 `ibc` has {Interval.of(little).percent()}.",
            {
                "success": success | {LITTLE: little},
                "best": best,
                "over half of ibc": over_half.to_json(),
                "over correct": over_correct.to_json(),
                "over ibc": over_ibc.to_json(),
                "parts": parts,
                "curves": results.curves(TRIALS),
            },
            _COMMENTS[parts["usable"]],
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from cebm.experiments.drawing import curves

        curves(figure.subplots(), finding.numbers["curves"], "success")


# By the first part: what the regulariser does to the policy.
_COMMENTS: dict[Verdict, str] = {
    "holds": (
        "The variance of the negatives' energies, which the loss makes small, keeps the landscape flat enough for the "
        "correct step to move in. Flat may also mean that the demonstrated action stands out less, which is what "
        "acting by the minimum needs; and with the maximum-entropy loss goes InfoNCE, so that the comparison with "
        "`correct` is not of the regulariser alone."
    ),
    "does not hold": (
        "The loss makes the variance of the negatives' energies small, and negatives of the correct step lie all over "
        "the box: the energy is kept flat just where it should tell the demonstrated action from the others."
    ),
    "inconclusive": (
        "The loss makes the variance of the negatives' energies small, and negatives of the correct step lie all over "
        "the box: a flat energy is easier to sample from and tells the demonstrated action less well from the others. "
        "Which of the two weighs more, these seeds do not tell."
    ),
}
