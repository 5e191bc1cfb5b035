"""Claim 6: the MCMC loss is no improvement over InfoNCE."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cebm.trials import find_trial
from reproduction.intervals import Interval, Verdict, percent
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.prose.shared import PLATEAU
from reproduction.trainings import Scale, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTICED = 0.1
"""The gain in success that two single runs can show: 1.96·√2 standard errors of 200 episodes at 50 %."""

PENALISED = "mcmc-loss-penalty"
"""`mcmc-loss` with the slope of its energy bounded."""
TRIALS = ("ibc", "mcmc-loss", PENALISED)


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
        "search. Added when the energies of `mcmc-loss` had been seen to diverge, to tell a loss that does not learn "
        f"from one that does not stop, and deciding nothing: `{PENALISED}`, the same with IBC's gradient penalty "
        "(weight 1, margin 10), three seeds."
    )
    metric = f"{PLATEAU} The difference is paired by seed. The last policy on held-out episodes is reported beside it."
    rule = (
        "With the 95 % interval of success(mcmc-loss) − success(ibc): does not hold where it lies above 0, an "
        "improvement; holds where it does not and its upper end is below 10 points, the least that two policies on 200 "
        "episodes each can show; else inconclusive."
    )

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        penalised = replace(find_trial("mcmc-loss"), gradient_penalty=1.0, gradient_margin=10.0)
        tasks: list[Task] = [training(trial, scale, seed) for seed in seeds for trial in ("ibc", "mcmc-loss")]
        return tasks + [training(penalised, scale, seed, PENALISED) for seed in seeds[:3]]

    def judge(self, results: Results) -> Finding:
        success = {trial: results.plateau(trial) for trial in TRIALS}
        last = {trial: results.values(trial, "last", "success") for trial in TRIALS}
        gap = {trial: results.at_the_end(trial, "energy_gap") for trial in TRIALS}
        clipped = {trial: results.at_the_end(trial, "clipped") for trial in TRIALS}
        difference = Interval.of_difference(success["mcmc-loss"], success["ibc"])
        verdict = no_better(difference)
        return Finding(
            verdict,
            f"Success {Interval.of(success['mcmc-loss']).percent()} with `mcmc-loss` and "
            f"{Interval.of(success['ibc']).percent()} with `ibc`: {difference.points()}. Of the last policies "
            f"{Interval.of_difference(last['mcmc-loss'], last['ibc']).points()}. With the gradient penalty `mcmc-loss` "
            f"has {Interval.of(success[PENALISED]).percent()}.",
            {
                "success": success,
                "last": last,
                "difference": difference.to_json(),
                "energy_gap": gap,
                "clipped": clipped,
                "curves": results.curves(TRIALS),
                "gaps": results.curves(TRIALS, "energy_gap", of="training"),
            },
            (_FAILS if difference.high < -NOTICED else "")
            + f"{_COMMENTS[verdict]} At the end of training the negatives' energies lie "
            f"{Interval.of(gap['mcmc-loss']).number()} above those of the demonstrated actions with `mcmc-loss`, whose "
            f"chains have {percent(clipped['mcmc-loss'])} of their moves clipped, and "
            f"{Interval.of(gap['ibc']).number()} with `ibc` ({percent(clipped['ibc'])}). With the gradient penalty "
            f"it is {Interval.of(gap[PENALISED]).number()} ({percent(clipped[PENALISED])}).",
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import success_and_gaps

        success_and_gaps(figure, finding.numbers)


_FAILS = "It is not merely no better, it fails; the paper reads as if it worked about as well, which we do not see. "
_COMMENTS: dict[Verdict, str] = {
    "holds": (
        "The gradient is that of the likelihood only for samples of p(y|x), which IBC's chains are not: their moves "
        "are clipped, so that they cannot follow a steep energy. The MCMC loss pushes all negatives up alike, for "
        "as long as it is trained; InfoNCE weighs them by exp(−E) and stops where the demonstrated action wins."
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
