"""The texts of claim 13, through-chain."""

from dataclasses import dataclass

from reproduction.intervals import Interval, Verdict
from reproduction.prose.shared import PLATEAU

STATEMENT = (
    "To be correct, training should back-propagate through the entire chain of its negatives: in our reading, a "
    "policy trained that way is better than one that holds the negatives constant."
)
PROTOCOL = (
    "`ibc` as it is, its negatives held constant, and `ibc` with `through_chain`: the graph of all 10 steps of its "
    "chains is kept, so that InfoNCE is differentiated through them too. Same demonstrations of the 2-D particle "
    "task, same initial weights, batches, starts and noise, same number of steps, same search when acting. Times "
    "are those of 20 steps of each kind in turns, on one thread; what the chain adds to the gradient is measured "
    "on one batch, at the initial weights and after 100 steps through the chain."
)
METRIC = f"{PLATEAU} The difference is paired by seed. For the cost, the ratio of the median times of a training step."
RULE = (
    "Holds where the 95 % interval of success(ibc-through-chain) − success(ibc) lies above 0, does not "
    "hold where it lies below, else inconclusive. The cost is reported and decides nothing."
)


@dataclass(frozen=True)
class Run:
    """What the texts report of one trial."""

    success: Interval
    info_nce: Interval
    """At the end of training."""
    norm: Interval
    """Norm of the energy's gradient at the negatives, at the end of training."""


@dataclass(frozen=True)
class Facts:
    """What the texts report."""

    through: Run
    constant: Run
    """Negatives held constant."""
    difference: Interval
    """Difference of their success."""
    ratio: Interval
    """Ratio of the times of a training step."""
    later: int
    """Steps after which the extra gradient was measured."""
    extra: dict[str, float]
    """Mean share of the gradient that the chain adds: of the weights of the `observation`, and of the `rest`."""
    guessing: float
    """InfoNCE of a guess."""
    flat: bool
    """Whether the norm is smaller through the chain."""
    lower: bool
    """Whether InfoNCE ends lower with negatives held constant."""


def measured(facts: Facts) -> str:
    through, constant = facts.through, facts.constant
    return (
        f"Success {through.success.percent()} through the chain and {constant.success.percent()} with "
        f"negatives held constant: {facts.difference.points()}. A step takes {facts.ratio.number()} times as long. "
        f"After {facts.later} steps the chain changes the gradient of the weights that do not see the observation by "
        f"{100 * facts.extra['rest']:.1f} % of its norm, and that of those that do by "
        f"{100 * facts.extra['observation']:.1f} %. At the end InfoNCE is {through.info_nce.number()} "
        f"through the chain and {constant.info_nce.number()} without, where guessing gives "
        f"{facts.guessing:.3g}."
    )


def comment(facts: Facts, verdict: Verdict) -> str:
    through, constant = facts.through, facts.constant
    return (
        _CAUSE
        + _ENDINGS[verdict]
        + f" At the end of training the energy's gradient at the negatives has the norm {through.norm.number()}, "
        f"and {constant.norm.number()} with negatives held constant"
        + (": the energy is kept flat." if facts.flat else ".")
        + (_LOWER if facts.lower else "")
    )


_CAUSE = (
    "The paper says what would be correct and not that a policy gains by it; the verdict is about our reading. "
    "For the MCMC loss and exact samples of p(y|x), ∇ log Z = −E[∇E] over samples that are held constant, as "
    "the paper's own appendix derives: there nothing is missing without the chain. InfoNCE falls when the "
    "negatives' energies rise, so the gradient through the chain rewards energies on which the chain finds no "
    "low ones; and as a ReLU network is linear in pieces, none of it reaches the weights of the observation. "
)
_ENDINGS: dict[Verdict, str] = {
    "holds": "It brings more than this would make one expect.",
    "does not hold": "To be the gradient of the loss as written does not make it a better one.",
    "inconclusive": "Whether this helps or harms a policy, these seeds do not tell apart.",
}
_LOWER = (
    " And yet the same loss ends lower with negatives held constant. That may be because steep energies outrun chains "
    "whose moves are clipped, which is where the loss's own gradient does not lead from a flat start."
)
