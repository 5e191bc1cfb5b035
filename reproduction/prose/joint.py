"""The texts of claim 8, joint."""

from dataclasses import dataclass

from reproduction.intervals import Interval, Verdict

STATEMENT = (
    "An energy of the joint p(x, y), trained with a replay buffer, fits its training data within a few epochs and "
    "generalises poorly."
)
PROTOCOL = (
    "`joint-replay` and `ibc`, trained on the same demonstrations of the 2-D particle task, for the same number of "
    "steps, act with the same search; a second run of `joint-replay` ends after five epochs. Action errors are "
    "taken at 256 pairs each of the training demonstrations and of validation episodes. The MCMC loss of "
    "`joint-replay` is anchored by the squared energies of the data, of weight 1, as claim 6's is, since "
    "without them it has no minimum; this reading decides. Beside it, with three seeds, and deciding nothing: "
    "`joint-replay-free`, the bare loss without the squared energies, of which the paper does not speak there."
)
METRIC = (
    "Action error: the mean distance of the policy's action to the expert's in the unit square (that of always "
    "acting at its centre is 0.38). The gap is validation error minus training error at the end of training. "
    "Success is that of the last policy on held-out episodes. All per seed; differences are paired by seed."
)
RULE = (
    "By 95 % intervals. Fits: holds where the training error after five epochs lies below 0.1, does not hold where "
    "it lies above. Overfits: holds where gap(joint-replay) − gap(ibc) lies above 0, does not hold where it lies "
    "below. Generalises poorly: the same of success(ibc) − success(joint-replay). A part is else inconclusive. The "
    "claim holds where all three parts do, does not hold where one does not, else it is inconclusive."
)


@dataclass(frozen=True)
class Run:
    """What the texts report of one trial."""

    success: Interval
    training_error: Interval
    validation_error: Interval
    """Action errors at the end."""

    def errors(self) -> str:
        return f"{self.training_error.number()} in training and {self.validation_error.number()} in validation"


@dataclass(frozen=True)
class Facts:
    """What the texts report."""

    joint: Run
    ibc: Run
    free: Run
    """`joint-replay-free`."""
    early: Interval
    """Training error of `joint-replay` after five epochs."""
    gap: Interval
    """Gap between validation and training error: that of `joint-replay` minus that of `ibc`."""
    along: Interval
    """Success over the second half of training: that of `ibc` minus that of `joint-replay`."""
    better_along: Verdict
    """Whether `ibc` has more of it."""
    kept: Interval
    """Success of `joint-replay` minus that of `joint-replay-free`."""
    kept_more: Verdict
    """Whether `joint-replay` has more of it."""
    seeds: int
    """Number of seeds of `joint-replay-free`."""
    parts: dict[str, Verdict]
    energy_gaps: tuple[Interval, Interval] | None
    """Energies of the negatives minus those of the demonstrations, without and with the squared energies in the loss;
    None unless the training error is larger without them."""


def measured(facts: Facts) -> str:
    found = ", ".join(f"{part}: {verdict}" for part, verdict in facts.parts.items())
    return (
        f"Training error of `joint-replay` after five epochs {facts.early.number()}; at the end its errors "
        f"are {facts.joint.errors()}, those of `ibc` {facts.ibc.errors()}, and its gap is larger by "
        f"{facts.gap.number()}. Success {facts.joint.success.percent()} and {facts.ibc.success.percent()} ({found}); "
        f"over the second half of training `ibc` has {facts.along.points()} more of it, on validation episodes. "
        f"`joint-replay-free` has errors of {facts.free.errors()}, and a success of {facts.free.success.percent()}, "
        f"{facts.kept.points()} from there to `joint-replay` on the same {facts.seeds} seeds."
    )


def comment(facts: Facts) -> str:
    poorly = facts.parts["generalises poorly"]
    return (
        _COMMENTS[facts.parts["fits"]]
        + (_WORSE[facts.parts["overfits"]] if poorly == "holds" else _ENDINGS[poorly])
        + (_ALONG[facts.better_along] if poorly == "inconclusive" else "")
        + _FREE[facts.kept_more]
        + (_run_away(*facts.energy_gaps) if facts.energy_gaps else "")
    )


def _run_away(free: Interval, joint: Interval) -> str:
    """Why `joint-replay-free` does not even fit its training data."""
    return (
        " It then fits its training data worse, too. At the end its negatives' energies lie "
        f"{free.number()} above those of the demonstrations, and {joint.number()} with the squared energies: like the "
        "MCMC loss of claim 6, the loss has no minimum without them."
    )


# By the first part, whether there is anything to overfit with; and by the last.
_COMMENTS: dict[Verdict, str] = {
    "holds": "Every pair that was not demonstrated is a negative of a joint energy, unseen observations with it.",
    "does not hold": (
        "Most of the joint energy's capacity goes into telling which observations occur, and its chains move in ten "
        "dimensions in place of two: five epochs are too few to fit the actions."
    ),
    "inconclusive": (
        "Most of the joint energy's capacity goes into telling which observations occur, which acting does not need; "
        "how well it fits the actions early on differs from seed to seed."
    ),
}
_ENDINGS: dict[Verdict, str] = {
    "does not hold": " Still it acts no worse than `ibc` at unseen observations.",
    "inconclusive": " Whether it acts worse than `ibc` at the end, these seeds do not tell.",
}
# Where the end does not tell: by the second half of training, which scatters less and does not decide.
_ALONG: dict[Verdict, str] = {
    "holds": " Over the second half of training it does, which does not decide.",
    "does not hold": " Over the second half of training it acts better, which does not decide.",
    "inconclusive": "",
}
# Where it acts worse: by the middle part, whether that is overfitting.
_WORSE: dict[Verdict, str] = {
    "holds": " What an action costs at an unseen observation is hardly trained, and it acts worse than `ibc` there.",
    "does not hold": " It acts worse than `ibc`, and not by overfitting: its gap is the smaller one.",
    "inconclusive": " It acts worse than `ibc`; whether by overfitting, the gap does not tell.",
}
# What the squared energies do.
_FREE: dict[Verdict, str] = {
    "holds": " Without the squared energies in its loss it acts worse.",
    "does not hold": " Without the squared energies in its loss it acts better.",
    "inconclusive": " Whether it acts worse without the squared energies in its loss, these seeds do not tell.",
}
