"""The texts of claim 12, validation."""

from dataclasses import dataclass

from reproduction.intervals import Interval, percent

STATEMENT = (
    "Our implementation of Implicit Behavior Cloning overfits one episode and, set as the reference "
    "implementation, logs metrics that follow the same course."
)
PROTOCOL = (
    "Trainings of `ibc`, the paper's settings: one episode in 2-D, and 2,000 episodes in 2-D and in 16-D, all for "
    "half of the usual steps. And, against curves logged from the reference implementation with one seed (1 "
    "episode in 2-D, 300 steps; 2,000 in 2-D, 1,000 steps; 2,000 in 16-D, 600 steps): `ibc` with that code's "
    "settings, which are standardised observations, σ = 1, step size 0.1 → 1e-5, steps clipped at 10 % of half the "
    "chain's box, and no margin around actions that fill the space. (A first comparison, of three seeds, clipped "
    "at 10 % of half the data's range, which is less for one episode, whose box has a margin: its distances were "
    "19, 27 and 20 % off, and 16, 25 and 18 % when the margin was counted in, as the reference's code does.) With "
    "2,000 episodes two things still differ: batches are permutations of the data and not draws with replacement, "
    "and the learning rate falls once per epoch (195 steps), by what it falls there in as many steps. Reported "
    "beside these, and deciding nothing: success after 2,358 steps with batches of 128, where the reference code "
    "succeeded in 42 of 50 episodes (how that acted is not recorded); and, added when three seeds had been seen, "
    "three more single episodes per seed with everything else kept, as the reference's episode is not recorded "
    "either, and a training of `ibc` on one episode in 16-D."
)
METRIC = (
    "For loss, energy of chain starts and of chain ends minus that of the data, and mean squared distance of "
    "negatives from the data: the mean of |ours − reference| over the logged steps, as a share of the reference "
    "curve's range, per seed. For the one episode: action error of the last policy on it, in the task's units; 1 "
    "if the run diverges."
)
RULE = (
    "Holds where the 95 % intervals of all twelve shares lie below 20 % and that of the action error below 0.05, "
    "a goal's radius; does not hold where one of them lies above; else inconclusive, as without the reference "
    "curves."
)


COMMENT = (
    "Loss, differences of energies and distances have to agree between two implementations of one method; the level of "
    "the energies need not, as the loss does not see it, and one seed of the reference is one draw of its own spread. "
    "A wrong sign, a wrong scale of the noise or of the step, or a step clipped by another convention shows in the "
    "energies along the chain and in the distances before it shows in success."
)


@dataclass(frozen=True)
class Trained:
    """What the texts report of the trainings with the paper's settings."""

    error: Interval
    """Action error on the one episode in 2-D."""
    error_16: Interval
    """The same in 16-D."""
    success: dict[str, Interval]
    """With many episodes, in `2-D` and `16-D`."""


@dataclass(frozen=True)
class Compared:
    """What the texts report of the comparison with the reference."""

    shares: dict[str, dict[str, Interval]]
    """Differences as shares of the reference's range, by case and by the metric's name in words."""
    small_batches: Interval
    """Success with the reference's settings and batches of 128."""
    end: float
    """Distance at the end of the reference's run on one episode."""
    ends: list[float]
    """The same of our runs, one per episode."""
    inside: float
    """Share of rows in which the reference's distance lies between the lowest and the highest of ours."""
    beyond: list[str]
    """Names of the metrics that are not within their limits."""
    distance_alone: bool
    """Whether that is the distance on one episode, and nothing else."""
    ordinary: bool
    """Whether `inside` is as high as it is for a run like ours."""


def skipped(trained: Trained, reason: str) -> str:
    """The measured sentence without the comparison."""
    return f"{_trained(trained)}. No comparison with the reference: {reason}."


def measured(trained: Trained, compared: Compared) -> str:
    differences = "; ".join(
        f"{name}: " + ", ".join(f"{metric} {interval.percent()}" for metric, interval in group.items())
        for name, group in compared.shares.items()
    )
    end, ends = compared.end, compared.ends
    return (
        f"{_trained(trained)}; {compared.small_batches.percent()} with the reference's settings and batches of 128 "
        f"(there 42 of 50). Difference to the reference curves, as a share of their range: {differences}. With one "
        f"episode the distance ends at {end:.2f} for the reference, and between {min(ends):.2f} and {max(ends):.2f} "
        f"for {len(ends)} episodes of ours, {sum(value < end for value in ends)} of them lower; its course is within "
        f"theirs in {percent([compared.inside])} of the rows."
    )


def comment(compared: Compared) -> str:
    """With what keeps the claim from holding, and how we read it."""
    if not compared.beyond:
        return COMMENT
    reading = ""
    if compared.distance_alone:
        reading = (
            f" With a single episode the distance depends on the episode, and that of the reference is "
            f"{percent([compared.inside])} of the time in the range of ours"
            + (": the two differ by no more than seeds and episodes do." if compared.ordinary else ".")
        )
    return f"{COMMENT} Not within its limit: {', '.join(compared.beyond)}.{reading}"


def _trained(trained: Trained) -> str:
    return (
        f"Action error on the one episode {trained.error.number()} in 2-D and {trained.error_16.number()} in 16-D. "
        f"Success with many episodes {trained.success['2-D'].percent()} in 2-D and "
        f"{trained.success['16-D'].percent()} in 16-D"
    )
