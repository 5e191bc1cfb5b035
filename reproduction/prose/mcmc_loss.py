"""The texts of claim 6, mcmc-loss."""

from dataclasses import dataclass

from reproduction.anchoring import CHOICE_SEEDS, SEEDS, Reading
from reproduction.intervals import Interval, Verdict, percent

STATEMENT = (
    "The MCMC loss (eq. 4), whose gradient is that of the likelihood, brings no significant improvement over InfoNCE."
)
PROTOCOL = (
    "The loss has no lower bound: where chains miss the demonstrated action its valley deepens for ever, and what "
    "comes of that says nothing about the paper, which anchors the energies of its last trial by an L2 norm, as the "
    "work it builds on does (Du and Mordatch 2019). So the anchored loss decides: `mcmc-loss-anchored` adds "
    "w·mean (E⁺)². The paper names no w: of 0.01, 0.1 and 1 the one is taken that has the most success on validation "
    "episodes of two seeds (`reproduction/anchoring.py`). `ibc` differs in the loss alone; both take their "
    "negatives from IBC's chains, are trained on the same demonstrations of the 2-D particle task, for the same number "
    "of steps, and act with the same search. Beside them, deciding nothing: `mcmc-loss`, the bare loss of the "
    "equation, which decided before; the anchor on the energies of data and negatives; and `mcmc-loss-penalty`, the "
    "bare loss with IBC's gradient penalty (weight 1, margin 10), three seeds."
)
METRIC = (
    "Success of the last raw weights on held-out episodes, paired by seed. Of the bare losses: success on validation "
    "episodes, the mean over the evaluations of the second half of training."
)
RULE = (
    "With the 95 % interval of success(mcmc-loss-anchored, chosen w) − success(ibc) over five seeds: does not hold "
    "where it lies above 0, an improvement; holds where it does not and its upper end is below 10 points, the least "
    "that two policies on 200 episodes each can show; else inconclusive. Fewer seeds give no verdict."
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
    anchored: Reading
    both: Reading
    decisive: Interval | None
    """Success with the chosen anchor minus that of `ibc`; None while none is chosen."""
    seeds: int
    """Number of seeds of that difference."""
    theirs: Interval | None
    """Success of `ibc` on these seeds."""


def measured(facts: Facts) -> str:
    return (
        anchored_words(facts.anchored, facts.decisive, facts.seeds)
        + f" Success of `mcmc-loss-anchored` by its weight: {facts.anchored.by_weight()}; with the energies of the "
        f"negatives anchored too: {facts.both.by_weight()}. Without an anchor: {facts.mcmc_loss.success.percent()}, "
        f"where `ibc` has {facts.ibc.success.percent()}, {facts.difference.points()}; of the last policies "
        f"{facts.last_difference.points()}; with the gradient penalty {facts.penalised.success.percent()}."
    )


def anchored_words(reading: Reading, difference: Interval | None, seeds: int) -> str:
    """The sentence of what decides."""
    if difference is None or reading.weight is None:
        return f"Anchored: no weight is chosen yet, which takes {CHOICE_SEEDS} seeds of each, so there is no verdict."
    mine = reading.success[reading.weight]
    told = (
        f"Success {percent(mine)} with `{reading.family}` (chosen weight {reading.weight:g}), "
        f"{difference.points() if seeds > 1 else f'{100 * difference.mean:+.1f} points'} from `ibc` to there"
    )
    found = f"{told}." if seeds >= SEEDS else f"{told}: {seeds} of {SEEDS} seeds, no verdict."
    return found + (f" The same weight has {reading.by_search()}." if reading.by_search() else "")


def comment(facts: Facts, verdict: Verdict) -> str:
    mcmc_loss, ibc, penalised = facts.mcmc_loss, facts.ibc, facts.penalised
    return (
        _COMMENTS[verdict]
        + " How the verdict depends on the weight, the figures above tell: the paper is silent on it."
        + (_FAILS if facts.fails else "")
        + " At the end of training the negatives' energies lie "
        f"{mcmc_loss.gap.number()} above those of the demonstrated actions with the bare `mcmc-loss`, whose "
        f"chains have {percent(mcmc_loss.clipped)} of their moves clipped, and "
        f"{ibc.gap.number()} with `ibc` ({percent(ibc.clipped)}). With the gradient penalty "
        f"it is {penalised.gap.number()} ({percent(penalised.clipped)})."
    )


_FAILS = (
    " Without an anchor the loss fails: its chains' moves are clipped, so that they cannot follow a steep energy, and "
    "the loss pushes all negatives up alike for as long as it is trained."
)
_COMMENTS: dict[Verdict, str] = {
    "holds": (
        "The gradient is that of the likelihood only for samples of p(y|x), which IBC's chains are not. The MCMC loss "
        "pushes all negatives up alike; InfoNCE weighs them by exp(−E) and stops where the demonstrated action wins."
    ),
    "does not hold": (
        "InfoNCE weighs negatives by exp(−E) and stops where the demonstrated action wins; the anchored MCMC loss "
        "pushes all of them up alike. Negatives of chains that descend seem to need no weights."
    ),
    "inconclusive": (
        "InfoNCE weighs negatives by exp(−E) and stops where the demonstrated action wins; the MCMC loss pushes all of "
        "them up alike. How far the two differ, these seeds do not tell."
    ),
}
