"""The texts of claim 15, thesis."""

from dataclasses import dataclass

from reproduction.intervals import Interval

STATEMENT = (
    "Conditional energies generalise better the more mutual information between observation and action they have."
)
PROTOCOL = (
    "All trainings of the other claims on the plain 2-D particle task with the paper's number of demonstrations, "
    "whatever they vary; explicit networks are left out, whose entropy is a convention, and runs that diverged, "
    "whose last energy is none. Of each run the last "
    "policy counts: the InfoNCE bound on the mutual information of validation pairs, the other pairs' actions "
    "being the negatives whatever the run was trained with, and H(y|x) of its energy on validation observations "
    "by quadrature; against its success on validation episodes, its action error on validation pairs, and the gap: "
    "that error minus the one on training pairs. Of a recipe that was trained for several lengths the longest "
    "counts. Added when the result had been seen, and deciding nothing: the same over the runs whose bound is "
    "above 0, as an energy with less tells the demonstrated action worse than guessing does."
)
METRIC = (
    "Spearman's rank correlation over runs, with a 95 % interval from 2,000 bootstrap samples over recipes, the "
    "seeds of a recipe staying together."
)
RULE = (
    "Holds where the interval of the bound's correlation with success lies above 0, does not hold where it lies "
    "below 0; else inconclusive, as with fewer than five recipes. The other correlations are reported and decide "
    "nothing: a policy that fits nothing has no gap. (When the runs of `ibc` and `correct` and the first of claim "
    "11 were known, and no others, this rule replaced one that also asked for a correlation with the gap below 0.)"
)


Correlations = dict[tuple[str, str], Interval]
"""Correlations by measure (`bound`, `entropy`) and outcome (`success`, `error`, `gap`)."""


@dataclass(frozen=True)
class Facts:
    """What the texts report."""

    recipes: int
    runs: int
    correlations: Correlations
    """Over all runs."""
    telling: int
    """Number of runs with a bound above 0."""
    correlations_telling: Correlations
    """Over these runs."""
    sharp_succeed: bool
    """Whether a low H(y|x) goes with success, over all runs."""
    sharp_succeed_telling: bool
    """The same over the runs with a bound above 0."""
    smaller_gap: bool
    """Whether a smaller gap goes with the bound."""
    diverged: int
    """Number of runs that diverged, and do not count."""
    near: int
    """Number of runs whose bound is near its ceiling."""
    nearness: float
    """The distance to the ceiling that counts as near, in nats."""
    coarse: int
    """Number of runs most of whose valleys are too narrow for the quadrature."""


def measured(facts: Facts) -> str:
    found, telling = facts.correlations, facts.correlations_telling
    return (
        f"Rank correlation over {facts.runs} runs of {facts.recipes} recipes: the bound {_told(found, 'bound')}; "
        f"H(y|x) {_told(found, 'entropy')}. Over the {facts.telling} runs with a bound above 0: the bound "
        f"{_told(telling, 'bound')}; H(y|x) {_told(telling, 'entropy')}."
        + (f" Runs that diverged: {facts.diverged}." if facts.diverged else "")
    )


def _told(table: Correlations, measure: str) -> str:
    words = (("success", "success"), ("error", "the validation error"), ("gap", "the gap"))
    return ", ".join(f"with {word} {table[measure, outcome].number()}" for outcome, word in words)


def comment(facts: Facts) -> str:
    return (
        "The bound is high where an energy tells the demonstrated action from those of other observations, and is "
        "confident only when right. H(y|x) measures sharpness alone, right or wrong: an energy that is sharp in "
        "the wrong place has low entropy and, held out, a low bound. "
        f"{_sharpness(facts)}{_OTHER if not facts.smaller_gap else ''} A "
        "correlation over recipes says what goes together, not what causes what, and the recipes are those that "
        "the other claims happen to compare. "
        f"The bound is within {facts.nearness} nats of its ceiling in {facts.near} of {facts.runs} runs, where it "
        f"shows differences of information as small ones; in {facts.coarse} most valleys are too narrow for the "
        "quadrature, so that their H(y|x) is about that of one cell."
    )


def _sharpness(facts: Facts) -> str:
    """Whether a low H(y|x) goes with success."""
    if facts.sharp_succeed:
        return "A low H(y|x), to the paper the way to information, goes with success."
    seen = "That a low H(y|x), to the paper the way to information, goes with success is not seen over all runs"
    if facts.sharp_succeed_telling:
        return (
            f"{seen}; it is over those with a bound above 0, which know something: there sharp energies succeed more "
            "often, and the others are sharp and wrong."
        )
    return f"{seen}, nor over those with a bound above 0."


_OTHER = " Generalisation is success here: a smaller gap between validation and training does not go with the bound."
