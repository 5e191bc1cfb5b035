"""The texts of claim 10, bound."""

from dataclasses import dataclass

from reproduction.intervals import Interval, Verdict

STATEMENT = (
    "log(M + 1) − InfoNCE is a lower bound of the mutual information for independent negatives of the marginal "
    "p(y), and is none for negatives from a long chain of the conditional distribution of the energy."
)
PROTOCOL = (
    "x and y are 20 pairs of correlated standard Gaussians with I(x; y) = 4 nats. Three quadratic energies: the "
    "density ratio p(y|x)/p(y), for which the bound is tight; the conditional p(y|x); and the same 16 times "
    "flatter, as of an untrained network. Of each, the number log(M + 1) − InfoNCE over 1,000 pairs for M = 7, 63, "
    "255 and 511 negatives, which are independent samples of p(y), or the states of one long chain per pair of the "
    "correct Langevin step on exp(−E(x, ·)), after a burn-in of 100 steps."
)
METRIC = "The number minus I(x; y), in nats: a lower bound is at most 0, for every energy and every M."
RULE = (
    "Holds where the 95 % interval over seeds lies above 0 for no energy and M with negatives of the marginal, and "
    "for at least one with those of the long chain. Does not hold where it lies above 0 for some energy and M with "
    "negatives of the marginal, or below 0 for all with those of the long chain. Else inconclusive."
)


@dataclass(frozen=True)
class Largest:
    """The largest excess over the mutual information, for one kind of negatives."""

    excess: Interval
    energy: str
    count: int
    """Number of negatives M."""


@dataclass(frozen=True)
class Facts:
    """What the texts report."""

    nats: float
    """The mutual information."""
    largest: dict[str, Largest]
    """The largest excess by kind of negatives."""
    count: int
    """The largest number of negatives M."""
    own_chain: Interval
    """log(M + 1) − InfoNCE of the conditional's energy with its own chain, for that M."""


def measured(facts: Facts) -> str:
    return (
        f"Largest value minus I = {facts.nats:g} nats: "
        + "; ".join(
            f"{each.excess.number()} (energy: {each.energy}, M = {each.count}) for negatives of the {kind}"
            for kind, each in facts.largest.items()
        )
        + ". With the conditional's energy and its own chain, M = "
        f"{facts.count}, the number is {facts.own_chain.number()}."
    )


def comment(verdict: Verdict) -> str:
    return (
        "In theory there are two ways to be wrong. A chain of an energy that fits has negatives that cannot be "
        "told from the positive: in expectation the number is then at most 0 (the positive is exchangeable with "
        "independent samples of its own distribution), below I but whatever I is. A chain of an energy that is too "
        "flat goes where no action is, and the number then counts how easy that is to see, up to log(M + 1), "
        "again whatever I is." + ("" if verdict == "holds" else " These runs do not show it, or not clearly.")
    )
