"""The texts of claim 7, maxent."""

from dataclasses import dataclass
from typing import Literal

from reproduction.anchoring import CHOICE_SEEDS, SEEDS, Reading
from reproduction.intervals import Interval, Verdict, percent

STATEMENT = (
    "With the maximum-entropy regulariser on p(y|x), chains of the correct Langevin step give a usable policy, "
    "but not a better one than IBC's chains with little noise."
)
PROTOCOL = (
    "The maximum-entropy loss of appendix A contains the MCMC loss and has no lower bound either, so it is read with "
    "anchored energies, as claim 6 is: `conditional-maxent-anchored` adds w·mean (E⁺)², and its w of 0.01, 0.1 or 1 is "
    "chosen on validation episodes of two seeds, as the paper names none. Its negatives are those of the correct step. "
    "`ibc` has InfoNCE and IBC's step with σ = 0.1, and is trained with σ = 0.01 too, the paper's little noise. "
    "`correct`, with InfoNCE and the correct step, is reported beside them. All are trained on the same "
    "demonstrations of the 2-D particle task, for the same number of steps, and act with the same search. Beside them, "
    "deciding nothing: `conditional-maxent`, the bare loss, which decided before; the anchor on the energies of data "
    "and negatives; `info-nce-maxent`, `correct` with the regulariser alone added to InfoNCE, another reading of the "
    "section, by the regulariser's weight; and `conditional-maxent-penalty`, the bare loss with IBC's gradient penalty "
    "(weight 1, margin 10)."
)
METRIC = (
    "Success of the last raw weights on held-out episodes; differences are paired by seed. Usable is at least half the "
    "success of `ibc`. Of the bare loss, `correct` and what was added to them: success on validation episodes, the "
    "mean over the evaluations of the second half of training."
)
RULE = (
    "By 95 % intervals over five seeds. Usable: holds where success(conditional-maxent-anchored, chosen w) − ½ "
    "success(ibc) lies above 0, does not hold where it lies below, else inconclusive. Not better: does not hold where "
    "success(conditional-maxent-anchored, chosen w) − success(ibc with σ = 0.01) lies above 0, holds where it does not "
    "and its upper end is below 10 points, else inconclusive. The claim holds where both do, does not hold where one "
    "does not, else it is inconclusive. Fewer seeds give no verdict."
)


@dataclass(frozen=True)
class Run:
    """What the texts report of one trial."""

    name: str
    success: Interval
    distance: Interval
    """Distance of the negatives to the demonstrated action."""
    gap: Interval
    """Energies of the negatives minus those of the demonstrated actions, at the end of training."""
    entropy: Interval
    """H(y|x), in nats."""
    norm: Interval
    """Norm of the energy's gradient at the negatives."""
    landscape: Literal["wrong", "flatter", "similar"]
    """The energy beside that of `correct`: sharp in the wrong place, flatter, or neither."""


@dataclass(frozen=True)
class Facts:
    """What the texts report."""

    maxent: Run
    correct: Run
    ibc: Run
    little: Run
    """`ibc` with σ = 0.01."""
    penalised: Run
    contrastive: Run
    over_half: Interval
    """Success of `conditional-maxent` minus half of that of `ibc`."""
    over_correct: Interval
    over_little: Interval
    parts: dict[str, Verdict]
    """Of the anchored loss, which decide."""
    bare_parts: dict[str, Verdict]
    anchored: Reading
    readings: list[Reading]
    anchored_over_half: Interval | None
    """Success with the chosen anchor minus half of that of `ibc`; None while none is chosen."""
    anchored_over_little: Interval | None
    """Success with the chosen anchor minus that of `ibc` with σ = 0.01."""
    anchored_seeds: int
    runs_away: bool
    """Whether the gap of `conditional-maxent` is larger than that of `correct`."""
    usable_without: bool
    """Whether `correct` is usable too."""


def measured(facts: Facts) -> str:
    found = ", ".join(f"{part}: {verdict}" for part, verdict in facts.bare_parts.items())
    others = "; ".join(f"`{reading.family}`: {reading.by_weight()}" for reading in facts.readings)
    return (
        f"{_decisive(facts)} By weight `{facts.anchored.family}`: {facts.anchored.by_weight()}; {others}. Without an "
        f"anchor: {facts.maxent.success.percent()} with `conditional-maxent`, {facts.ibc.success.percent()} with "
        f"`ibc` and {facts.little.success.percent()} with `ibc` and σ = 0.01: {facts.over_half.points()} over half of "
        f"`ibc`, {facts.over_little.points()} over `ibc` with σ = 0.01 ({found}). `correct` has "
        f"{facts.correct.success.percent()}, {facts.over_correct.points()} from there to `conditional-maxent`. With "
        f"the gradient penalty `conditional-maxent` has {facts.penalised.success.percent()}; "
        f"`{facts.contrastive.name}` has {facts.contrastive.success.percent()}."
    )


def _decisive(facts: Facts) -> str:
    """The sentence of what decides."""
    reading, seeds = facts.anchored, facts.anchored_seeds
    half, little = facts.anchored_over_half, facts.anchored_over_little
    if reading.weight is None or half is None or little is None:
        return f"Anchored: no weight is chosen yet, which takes {CHOICE_SEEDS} seeds of each, so there is no verdict."
    told = (
        f"Success {percent(reading.success[reading.weight])} with `{reading.family}` (chosen weight "
        f"{reading.weight:g}): {half.points()} over half of `ibc`, {little.points()} over `ibc` with σ = 0.01"
    )
    if seeds < SEEDS:
        return f"{told}: {seeds} of {SEEDS} seeds, no verdict."
    told += " (" + ", ".join(f"{part}: {verdict}" for part, verdict in facts.parts.items()) + ")."
    return told + (f" The same weight has {reading.by_search()}." if reading.by_search() else "")


def comment(facts: Facts) -> str:
    maxent, correct, penalised, contrastive = facts.maxent, facts.correct, facts.penalised, facts.contrastive
    return (
        f"{_COMMENTS[facts.parts['usable']]} Of the bare losses: in the second half of training the negatives of "
        f"`conditional-maxent` are {maxent.distance.number()} away from the demonstrated action, those of `correct` "
        f"{correct.distance.number()}, and at the end their energies lie {maxent.gap.number()} "
        f"above its own, those of `correct` {correct.gap.number()}; with the gradient penalty it is "
        f"{penalised.gap.number()}, with `{contrastive.name}` {contrastive.gap.number()}."
        + "".join(
            f" With `{run.name}` H(y|x) is {run.entropy.number()} nats and the gradient at the negatives has the "
            f"norm {run.norm.number()}{_LANDSCAPES[run.landscape]}"
            for run in (correct, maxent, penalised, contrastive)
        )
        + (_RUNS_AWAY if facts.runs_away else "")
        + (" The correct step is usable without the regulariser too, with InfoNCE." if facts.usable_without else "")
    )


_LANDSCAPES = {
    "wrong": ": sharp in the wrong place, as held-out pairs tell (a bound on their information below 0).",
    "flatter": ": flatter, so that a search has less to follow.",
    "similar": ".",
}
_RUNS_AWAY = (
    " Like the MCMC loss of claim 6, which it contains, this loss has no minimum where the chains miss the "
    "demonstrated action: the variance is that of the negatives' energies, and does not see how deep its valley grows."
)
# By the first part: what the regulariser does to the policy.
_COMMENTS: dict[Verdict, str] = {
    "holds": (
        "The loss asks for a small variance of the negatives' energies, and leaves enough of the landscape for the "
        "demonstrated action to stand out."
    ),
    "does not hold": (
        "The loss asks for a small variance of the negatives' energies, and the policy is not usable, anchored or not. "
        "The weight of the regulariser is that of the appendix, 1; as it falls, `info-nce-maxent` becomes `correct`."
    ),
    "inconclusive": (
        "The loss asks for a small variance of the negatives' energies; what that does to the policy, these seeds do "
        "not tell."
    ),
}
