"""Claim 6: the MCMC loss is no improvement over InfoNCE."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cebm.experiments.ledger import PLATEAU, Claim, Finding, Interval, Results, Scale, Task, Verdict, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTICED = 0.1
"""The gain in success that two single runs can show: 1.96·√2 standard errors of 200 episodes at 50 %."""


def no_better(difference: Interval) -> Verdict:
    """The rule for "no improvement", of a difference in success: does not hold where the interval lies above 0; holds
    where it does not and lies below `NOTICED`; is inconclusive where neither is excluded."""
    if difference.low > 0:
        return "does not hold"
    return "holds" if difference.high < NOTICED else "inconclusive"


class McmcLoss(Claim):
    number = 6
    slug = "mcmc-loss"
    section = "Sec. III"
    statement = (
        "The MCMC loss (eq. 4), whose gradient is that of the likelihood, brings no significant improvement over "
        "InfoNCE."
    )
    protocol = (
        "`mcmc-loss` and `ibc` differ in the loss alone; both take their negatives from IBC's chains. Both are trained "
        "on the same demonstrations of the 2-D particle task, for the same number of steps, and act with the same "
        "search."
    )
    metric = f"{PLATEAU} The difference is paired by seed. The last policy on held-out episodes is reported beside it."
    rule = (
        "With the 95 % interval of success(mcmc-loss) − success(ibc): does not hold where it lies above 0, an "
        "improvement; holds where it does not and its upper end is below 10 points, the least that two policies on 200 "
        "episodes each can show; else inconclusive."
    )

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        return [training(trial, scale, seed) for seed in seeds for trial in ("ibc", "mcmc-loss")]

    def judge(self, results: Results) -> Finding:
        trials = ("ibc", "mcmc-loss")
        success = {trial: results.plateau(trial) for trial in trials}
        last = {trial: results.values(trial, "last", "success") for trial in trials}
        difference = Interval.of_difference(success["mcmc-loss"], success["ibc"])
        verdict = no_better(difference)
        return Finding(
            verdict,
            f"Success {Interval.of(success['mcmc-loss']).percent()} with `mcmc-loss` and "
            f"{Interval.of(success['ibc']).percent()} with `ibc`: {difference.points()}. Of the last policies "
            f"{Interval.of_difference(last['mcmc-loss'], last['ibc']).points()}.",
            {
                "success": success,
                "last": last,
                "difference": difference.to_json(),
                "curves": results.curves(trials),
            },
            _COMMENTS[verdict],
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from cebm.experiments.drawing import curves

        curves(figure.subplots(), finding.numbers["curves"], "success")


_COMMENTS: dict[Verdict, str] = {
    "holds": (
        "The gradient is that of the likelihood only for samples of p(y|x), which IBC's chains are not. It pushes all "
        "negatives up alike and never stops, while InfoNCE weighs them by exp(−E) and stops where the demonstrated "
        "action wins."
    ),
    "does not hold": (
        "InfoNCE weighs negatives by exp(−E) and stops where the demonstrated action wins; the MCMC loss pushes all of "
        "them up alike, for as long as it is trained. Negatives of chains that descend seem to need no weights."
    ),
    "inconclusive": (
        "InfoNCE weighs negatives by exp(−E) and stops where the demonstrated action wins; the MCMC loss pushes all of "
        "them up alike and has no minimum. How far the two differ, these seeds do not tell."
    ),
}
