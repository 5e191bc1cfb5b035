"""The texts of claim 9, dimensions."""

from dataclasses import dataclass

from reproduction.intervals import Interval, Verdict, percent

STATEMENT = (
    "Neither uniform negatives nor a Gaussian mixture as the proposal of an importance-sampled likelihood scale to "
    "actions of many dimensions, where IBC's chains do."
)
PROTOCOL = (
    "`uniform`, `gmm-nll` and `ibc` on the particle task in 1, 2, 4, 8 and 16 dimensions with 2,000 "
    "demonstrations, the paper's number for 16, so that the negatives and not the data run short. `uniform` and "
    "`gmm-nll` have 64 samples an example, which cost as much as the 8 chains of `ibc`, and all act with the same "
    "search; `dfo` is left out, as its derivative-free search, and not its negatives, may be what fails. 2 and 16 "
    "dimensions decide, as one dimension is a task of its own; the others are for the figure. Half as many steps "
    "as in other claims: in a pilot of 2,000 steps in 16 dimensions, with a seed that does not count, the skill of "
    "`ibc` was 0.90 at 500, 0.84 at 1,000 and 0.78 at the end, and that of `gmm-nll` 0.72 at 250, 0.60 at 1,000 "
    "and 0.50 at the end; that of `uniform` stood at 0.53 from 750 to 1,250, where it was stopped."
)
METRIC = (
    "Skill: 1 − e/√(dim/12), with e the last policy's mean distance to the expert's action on 256 validation "
    "pairs; 1 is the expert, always acting at the centre is 0.06 in 2 dimensions and 0.01 in 16. It still tells "
    "policies apart where none succeeds. The shortfall of a trial is the skill of `ibc` minus its own, paired by "
    "seed. Success is reported beside it."
)
RULE = (
    "By 95 % intervals. A trial fails to scale where its shortfall in 16 dimensions lies above 0.1, and that "
    "shortfall minus the one in 2 dimensions lies above 0. It scales where its shortfall in 16 dimensions lies "
    "below 0.1. Holds where both `uniform` and `gmm-nll` fail to scale, does not hold where one of them scales, "
    "else inconclusive; inconclusive too where `ibc` does not scale itself, with a mean skill below 0.5 in 16 "
    "dimensions."
)


@dataclass(frozen=True)
class Run:
    """What the texts report of one trial."""

    few_skill: float
    """Mean skill in few dimensions."""
    many_skill: float
    """Mean skill in many dimensions."""
    success: Interval
    """Success in many dimensions; gap and bound are in many dimensions too."""
    gap: Interval
    """Energies of the negatives minus those of the demonstrated actions, at the end of training."""
    bound: Interval
    """On the information of held-out pairs, in nats."""

    def skills(self) -> str:
        return f"from {self.few_skill:.2f} to {self.many_skill:.2f}"


@dataclass(frozen=True)
class Comparison:
    """What the texts report of a trial beside `ibc`."""

    shortfall: Interval
    growth: Interval
    part: Verdict
    behind: bool
    """Whether the shortfall is larger than what counts."""
    wrong: bool
    """Whether the bound on the information of held-out pairs lies below 0."""


@dataclass(frozen=True)
class Facts:
    """What the texts report."""

    few: int
    many: int
    """Numbers of dimensions."""
    runs: dict[str, Run]
    """Facts by trial, `ibc` first."""
    comparisons: dict[str, Comparison]
    """Facts by trial, without `ibc`."""
    works: bool
    """Whether `ibc` learns the task in many dimensions."""
    ibc_successes: tuple[list[float], list[float]]
    """Success of `ibc` in few and in many dimensions, one per seed."""
    skill_alone: bool
    """Whether `ibc` has less than half of that success in many dimensions."""


def measured(facts: Facts) -> str:
    found = "; ".join(
        f"{facts.runs[trial].skills()} for `{trial}`, a shortfall of {each.shortfall.number()} that has grown by "
        f"{each.growth.number()}"
        for trial, each in facts.comparisons.items()
    )
    return (
        f"From {facts.few} to {facts.many} dimensions the skill goes {facts.runs['ibc'].skills()} for `ibc`; {found}. "
        f"Success in {facts.many}: "
        + ", ".join(f"{run.success.percent()} for `{trial}`" for trial, run in facts.runs.items())
        + "."
    )


def comment(facts: Facts) -> str:
    energies = ", ".join(f"`{trial}` {run.gap.number()} and {run.bound.number()}" for trial, run in facts.runs.items())
    return (
        "In 16 dimensions a uniform sample is typically 3.4 away from the demonstrated action, and a sample of the "
        "mixture's narrowest component 0.1·√16 = 0.4, in a box of width 2; chains go where the search goes by "
        "themselves. By how much the negatives' energies lie above those of the demonstrated actions at the end of "
        f"training in {facts.many} dimensions, and the bound on the information of held-out pairs, in nats: "
        f"{energies}. "
        + (
            " ".join(f"`{trial}` {_compared(each)}" for trial, each in facts.comparisons.items())
            if facts.works
            else "But `ibc` does not learn the task in 16 dimensions, and is no reference."
        )
        + (_succeeds(facts) if facts.skill_alone else "")
    )


def _compared(found: Comparison) -> str:
    if found.part == "holds":
        return "falls behind" + (": its energy is confident and wrong on held-out pairs." if found.wrong else ".")
    if found.part == "does not hold":
        return "keeps up."
    if found.behind:
        return "falls behind; whether by more than in few dimensions, these seeds do not tell."
    return "falls behind by no more than these seeds can tell."


def _succeeds(facts: Facts) -> str:
    """That a high skill is not yet success."""
    few, many = facts.ibc_successes
    return (
        f" `ibc` scales in skill alone: it succeeds in {percent(few)} of the episodes in {facts.few} dimensions and in "
        f"{percent(many)} in {facts.many}, where all of them have to be right at once."
    )
