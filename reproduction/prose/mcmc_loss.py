"""The texts of claim 6, mcmc-loss."""

from dataclasses import dataclass

from reproduction.intervals import Interval, Verdict, percent
from reproduction.prose.shared import PLATEAU

STATEMENT = (
    "The MCMC loss (eq. 4), whose gradient is that of the likelihood, brings no significant improvement over InfoNCE."
)
PROTOCOL = (
    "`mcmc-loss` and `ibc` differ in the loss alone; both take their negatives from IBC's chains. Both are trained "
    "on the same demonstrations of the 2-D particle task, for the same number of steps, and act with the same "
    "search. Added when the energies of `mcmc-loss` had been seen to diverge, to tell a loss that does not learn "
    "from one that does not stop, and deciding nothing: `mcmc-loss-penalty`, the same with IBC's gradient penalty "
    "(weight 1, margin 10), three seeds."
)
METRIC = f"{PLATEAU} The difference is paired by seed. The last policy on held-out episodes is reported beside it."
RULE = (
    "With the 95 % interval of success(mcmc-loss) − success(ibc): does not hold where it lies above 0, an "
    "improvement; holds where it does not and its upper end is below 10 points, the least that two policies on 200 "
    "episodes each can show; else inconclusive."
)


@dataclass(frozen=True)
class Run:
    """What the texts report of one trial."""

    success: Interval
    gap: Interval
    """Energies of the negatives minus those of the demonstrated actions, at the end of training."""
    clipped: list[float]
    """Shares of the chains' moves that are clipped, one per seed."""


@dataclass(frozen=True)
class Facts:
    """What the texts report."""

    mcmc_loss: Run
    ibc: Run
    penalised: Run
    difference: Interval
    """Success of `mcmc-loss` minus that of `ibc`."""
    last_difference: Interval
    """The same of the last policies on held-out episodes."""
    fails: bool
    """Whether `mcmc-loss` is worse by more than what counts."""


def measured(facts: Facts) -> str:
    return (
        f"Success {facts.mcmc_loss.success.percent()} with `mcmc-loss` and {facts.ibc.success.percent()} with `ibc`: "
        f"{facts.difference.points()}. Of the last policies {facts.last_difference.points()}. With the gradient "
        f"penalty `mcmc-loss` has {facts.penalised.success.percent()}."
    )


def comment(facts: Facts, verdict: Verdict) -> str:
    mcmc_loss, ibc, penalised = facts.mcmc_loss, facts.ibc, facts.penalised
    return (
        (_FAILS if facts.fails else "") + f"{_COMMENTS[verdict]} At the end of training the negatives' energies lie "
        f"{mcmc_loss.gap.number()} above those of the demonstrated actions with `mcmc-loss`, whose "
        f"chains have {percent(mcmc_loss.clipped)} of their moves clipped, and "
        f"{ibc.gap.number()} with `ibc` ({percent(ibc.clipped)}). With the gradient penalty "
        f"it is {penalised.gap.number()} ({percent(penalised.clipped)})."
    )


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
