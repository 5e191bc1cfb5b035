"""Claim 7: maximum conditional entropy makes the correct step usable, and no better than IBC's."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cebm.experiments.ledger import (
    PLATEAU,
    Claim,
    Finding,
    Interval,
    Results,
    Scale,
    Task,
    Verdict,
    all_parts,
    decide,
    training,
)
from cebm.experiments.mcmc_loss import no_better
from cebm.experiments.noise import label, with_noise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LITTLE = label(0.01)
"""`ibc` with little noise, as the paper means it: typically 0.01."""
TRIALS = ("conditional-maxent", "correct", "ibc", LITTLE)
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
        "`conditional-maxent` trains with the maximum-entropy loss of appendix A and negatives of the correct step. "
        "`ibc` has InfoNCE and IBC's step with σ = 0.1, and is trained with σ = 0.01 too, the paper's little noise. "
        "`correct`, with InfoNCE and the correct step, is reported beside them. All are trained on the same "
        "demonstrations of the 2-D particle task, for the same number of steps, and act with the same search."
    )
    metric = (
        f"{PLATEAU} Differences are paired by seed. Usable is at "
        "least half the success of `ibc`. The last policy on held-out episodes is reported beside it."
    )
    rule = (
        "By 95 % intervals. Usable: holds where success(conditional-maxent) − ½ success(ibc) lies above 0, does not "
        "hold where it lies below, else inconclusive. Not better: does not hold where success(conditional-maxent) − "
        "success(ibc with σ = 0.01) lies above 0, holds where it does not and its upper end is below 10 points, else "
        "inconclusive. The claim holds where both do, does not hold where one does not, else it is inconclusive. The "
        "difference to `correct` is reported and decides nothing, as the loss differs too."
    )

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        tasks: list[Task] = [training(trial, scale, seed) for seed in seeds for trial in TRIALS if trial != LITTLE]
        return tasks + [with_noise(0.01, scale, seed) for seed in seeds]

    def judge(self, results: Results) -> Finding:
        success = {trial: results.plateau(trial) for trial in TRIALS}
        last = {trial: results.values(trial, "last", "success") for trial in TRIALS}
        away = {trial: results.distances(trial) for trial in TRIALS}
        maxent, correct, ibc, little = (success[trial] for trial in TRIALS)
        over_half = Interval.of_difference(maxent, [USABLE * value for value in ibc])
        over_correct = Interval.of_difference(maxent, correct)
        over_little = Interval.of_difference(maxent, little)
        parts: dict[str, Verdict] = {"usable": decide(over_half), "not better": no_better(over_little)}
        found = ", ".join(f"{part}: {verdict}" for part, verdict in parts.items())
        without = decide(Interval.of_difference(correct, [USABLE * value for value in ibc]))
        return Finding(
            all_parts(parts.values()),
            f"Success {Interval.of(maxent).percent()} with `conditional-maxent`, {Interval.of(ibc).percent()} with "
            f"`ibc` and {Interval.of(little).percent()} with `ibc` and σ = 0.01: {over_half.points()} over half of "
            f"`ibc`, {over_little.points()} over `ibc` with σ = 0.01 ({found}). `correct` has "
            f"{Interval.of(correct).percent()}, {over_correct.points()} from there to `conditional-maxent`.",
            {
                "success": success,
                "last": last,
                "negative_distance": away,
                "over half of ibc": over_half.to_json(),
                "over correct": over_correct.to_json(),
                "over little noise": over_little.to_json(),
                "parts": parts,
                "curves": results.curves(TRIALS),
            },
            f"In the second half of training the negatives of `conditional-maxent` are "
            f"{Interval.of(away['conditional-maxent']).number()} away from the demonstrated action, those of `correct` "
            f"{Interval.of(away['correct']).number()} and of `ibc` {Interval.of(away['ibc']).number()}. "
            + _COMMENTS[parts["usable"]]
            + (" The correct step is usable without it too, with InfoNCE." if without == "holds" else ""),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from cebm.experiments.drawing import curves

        curves(figure.subplots(), finding.numbers["curves"], "success")


# By the first part: what the regulariser does to the policy.
_COMMENTS: dict[Verdict, str] = {
    "holds": (
        "The loss makes the variance of the negatives' energies small, which keeps the landscape flat enough for the "
        "correct step to move in, and leaves enough of it for the demonstrated action to stand out."
    ),
    "does not hold": (
        "The loss makes the variance of the negatives' energies small: the energy is kept flat where it should tell "
        "the demonstrated action from the others."
    ),
    "inconclusive": (
        "The loss makes the variance of the negatives' energies small: a flat energy is easier to sample from and "
        "tells the demonstrated action less well from the others. Which weighs more, these seeds do not tell."
    ),
}
