"""The texts of claim 11, marginal."""

from dataclasses import dataclass

from reproduction.intervals import Interval, Verdict

STATEMENT = (
    "Negatives of a Marginal Action Sampler, an energy of the action alone trained with the correct Langevin step "
    "and maximum entropy, give a policy on par with that of IBC's Langevin negatives."
)
PROTOCOL = (
    "The paper's four trials, `ibc`, `ibc-mas`, `correct-mas` and `correct-mas-maxent`, on the same demonstrations "
    "of the 2-D particle task (300 at the paper's scale, where an epoch is 29 steps), evaluated along training on "
    "validation episodes; for half as long again as the runs of other claims, as a sampler that learns beside the "
    "energy takes longer to rise (a pilot with one seed, which does not count, rose until step 2,000). Beside them "
    "`correct-mas-maxent` with 32 and 64 negatives in place of 8, on the first three seeds. Added when the first "
    "seed had been seen, on the first three too, to tell the sampler from what it stands for: `in-batch`, whose 8 "
    "negatives are demonstrated actions of other examples, exact samples of the marginal. And, added when all of "
    "these had been seen, as the samplers' curves were still rising: `correct-mas-maxent` for three times as long, "
    "on the first three seeds (`ibc` does not get better in 10,000 steps, see docs/stability.md)."
)
METRIC = (
    "Success on validation episodes, the mean over the evaluations of the second half of training, per seed; "
    "differences to `ibc` are paired by seed. A run that diverges counts as 0."
)
RULE = (
    "Decided by success(correct-mas-maxent) − success(ibc), the sampler as the paper describes it. Holds where the "
    "whole 95 % interval lies within ±10 points, does not hold where none of it does, else inconclusive; "
    "inconclusive too where the mean success of `ibc` is below 20 %. The other samplers and the other numbers of "
    "negatives are reported and decide nothing."
)


@dataclass(frozen=True)
class Facts:
    """What the texts report; `described` is the trial of the sampler as the paper describes it."""

    described: str
    exact: str
    """The trial whose negatives are exact samples of the marginal."""
    ibc: Interval
    """Success of `ibc`."""
    differences: dict[str, Interval]
    """Success of the paper's other trials minus that of `ibc`."""
    seeds: int
    """Number of seeds of the runs that were added."""
    by_count: dict[int, Interval]
    """Success of `described` by its number of negatives."""
    more: Interval
    """Success with the most negatives minus that with the fewest."""
    better_with_more: Verdict
    exact_success: Interval
    exact_over_ibc: Interval
    exact_on_par: Verdict
    learnt_over_exact: Interval
    """Success of `described` minus that of `exact`."""
    long_success: Interval
    """Success of `described` after three times as many steps."""
    long_over_ibc: Interval
    long_on_par: Verdict
    long_behind: bool
    """Whether it is still behind `ibc` then."""
    distance: dict[str, Interval]
    """Distance of the negatives to the demonstrated action: of `ibc` and of `described`."""
    entropy: dict[str, Interval]
    """H(y|x) of `ibc` and of `described`."""
    entropy_with_more: Interval
    """H(y|x) of `described` with the most negatives."""

    @property
    def fewest(self) -> int:
        return min(self.by_count)

    @property
    def most(self) -> int:
        return max(self.by_count)


def measured(facts: Facts) -> str:
    described, exact = facts.described, facts.exact
    others = ", ".join(
        f"{interval.points()} with `{trial}`" for trial, interval in facts.differences.items() if trial != described
    )
    counts = ", ".join(f"{count}: {interval.percent()}" for count, interval in facts.by_count.items())
    return (
        f"Success {facts.ibc.percent()} with `ibc`; the difference to it is {facts.differences[described].points()} "
        f"with `{described}`, {others}. `{described}` by its number of negatives, on {facts.seeds} seeds: {counts}; "
        f"{facts.more.points()} from {facts.fewest} to {facts.most}. `{exact}` has "
        f"{facts.exact_success.percent()} on these, {facts.exact_over_ibc.points()} from `ibc` to there and "
        f"{facts.learnt_over_exact.points()} from there to `{described}`. "
        f"Trained three times as long `{described}` has {facts.long_success.percent()} on these, "
        f"{facts.long_over_ibc.points()} from `ibc` to there."
    )


def comment(facts: Facts, verdict: Verdict) -> str:
    described = facts.described
    return (
        "Negatives of the marginal do not depend on the observation: they ask which of the actions that occur at "
        "all belongs to this observation. IBC's chains go downhill first, and ask about the valleys that they "
        f"find. In the second half of training the negatives of `{described}` are "
        f"{facts.distance[described].number()} away from the demonstrated action, those of `ibc` "
        f"{facts.distance['ibc'].number()}; at the end H(y|x) is {facts.entropy[described].number()} and "
        f"{facts.entropy['ibc'].number()} nats, and {facts.entropy_with_more.number()} with {facts.most} negatives. "
        + _COMMENTS[verdict]
        + _MORE[facts.better_with_more]
        + _EXACT[facts.exact_on_par].format(exact=facts.exact)
        + _LONG[facts.long_on_par]
        + (_STILL[facts.long_behind] if facts.long_on_par == "inconclusive" else "")
    )


_COMMENTS: dict[Verdict, str] = {
    "holds": "Here both questions lead to policies that succeed equally often.",
    "does not hold": "Here these questions lead to policies of different quality.",
    "inconclusive": "These runs do not tell whether that makes a difference.",
}
# By whether the policy gets better with more negatives.
_MORE: dict[Verdict, str] = {
    "holds": " With more of them some come closer to the demonstrated action, and the policy gets better.",
    "does not hold": " With more of them some come closer to the demonstrated action, and yet the policy gets worse.",
    "inconclusive": " With more of them some come closer to the demonstrated action; whether the policy gains by it, "
    "these seeds do not tell.",
}
# By whether exact samples of the marginal are on par with `ibc`.
_EXACT: dict[Verdict, str] = {
    "holds": " Exact samples of the marginal (`{exact}`) are on par with `ibc`: the sampler's error is what it lacks.",
    "does not hold": " Nor are exact samples of the marginal (`{exact}`) on par with `ibc`: the sampler's error cannot "
    "be all of the reason.",
    "inconclusive": " Whether exact samples of the marginal (`{exact}`) are on par with `ibc`, seeds so few do not "
    "tell.",
}
# By whether the sampler is on par with `ibc` after three times as many steps; `_STILL` ends the last sentence.
_LONG: dict[Verdict, str] = {
    "holds": " Trained three times as long it is on par with `ibc`: it takes longer.",
    "does not hold": " Nor is it on par with `ibc` when trained three times as long: time is not what it lacks.",
    "inconclusive": " Whether it is on par when trained three times as long, these seeds do not tell",
}
_STILL = {True: ", but it is still behind.", False: "."}
