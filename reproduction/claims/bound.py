"""Claim 10: InfoNCE bounds the mutual information with negatives of the marginal, not with those of a long chain."""

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cebm.energy import Actions, Context, Energies, EnergyModel, Obs
from cebm.information import SaturatedBoundWarning, info_nce_bound
from cebm.negatives import LongChain
from cebm.samplers import Constant, Langevin
from reproduction.intervals import Interval, Verdict
from reproduction.ledger import Claim, Computation, Finding, Results, Task
from reproduction.trainings import Result, Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIMS = 20
NATS = 4.0
"""The mutual information I = −(d/2) log(1 − ρ²)."""
REST = math.exp(-2 * NATS / DIMS)
"""1 − ρ², the variance of y given x."""
RHO = math.sqrt(1 - REST)
COUNTS = (7, 63, 255, 511)
"""Negatives M; the first M of a longer list."""
NEGATIVES = ("marginal", "long chain")


class Quadratic(EnergyModel):
    """E(x, y) = precision/2 · |y − gain·x|²."""

    def __init__(self, precision: float, gain: float) -> None:
        super().__init__()
        self.obs_dim = self.act_dim = self.context_dim = DIMS
        self.precision, self.gain = precision, gain

    def encode(self, obs: Obs) -> Context:
        self.check_obs(obs)
        return self.gain * obs

    def energies(self, context: Context, actions: Actions) -> Energies:
        return self.energies_and_gradients(context, actions)[0]

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        self.check(context, actions)
        gap = actions - context.unsqueeze(1)
        return 0.5 * self.precision * gap.square().sum(-1), self.precision * gap

    def chain(self) -> LongChain:
        """Of the correct step, with a tenth of the energy's variance as τ: it overestimates the variance by 5 % and
        forgets its start in the burn-in; states correlate by 0.9 with the next."""
        tau = 0.1 / self.precision
        return LongChain(Langevin("correct", schedule=Constant(tau), step_clip=None, margin=None), burn_in=100, thin=1)


ENERGIES = {
    # Up to a function of x, −log p(y|x)/p(y): the bound is tight for it.
    "density ratio": Quadratic(RHO**2 / REST, 1 / RHO),
    "conditional": Quadratic(1 / REST, RHO),
    # As the energy of an untrained network is.
    "flat": Quadratic(1 / (16 * REST), RHO),
}


class Bound(Claim):
    number = 10
    slug = "bound"
    section = "Sec. V"
    statement = (
        "log(M + 1) − InfoNCE is a lower bound of the mutual information for independent negatives of the marginal "
        "p(y), and is none for negatives from a long chain of the conditional distribution of the energy."
    )
    protocol = (
        "x and y are 20 pairs of correlated standard Gaussians with I(x; y) = 4 nats. Three quadratic energies: the "
        "density ratio p(y|x)/p(y), for which the bound is tight; the conditional p(y|x); and the same 16 times "
        "flatter, as of an untrained network. Of each, the number log(M + 1) − InfoNCE over 1,000 pairs for M = 7, 63, "
        "255 and 511 negatives, which are independent samples of p(y), or the states of one long chain per pair of the "
        "correct Langevin step on exp(−E(x, ·)), after a burn-in of 100 steps."
    )
    metric = "The number minus I(x; y), in nats: a lower bound is at most 0, for every energy and every M."
    rule = (
        "Holds where the 95 % interval over seeds lies above 0 for no energy and M with negatives of the marginal, and "
        "for at least one with those of the long chain. Does not hold where it lies above 0 for some energy and M with "
        "negatives of the marginal, or below 0 for all with those of the long chain. Else inconclusive."
    )

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        return [Computation(self, seed, scale) for seed in seeds]

    def compute(self, scale: Scale, seed: int) -> Result:
        generator = torch.Generator().manual_seed(seed)
        pairs = 5 * scale.samples
        result: Result = {kind: {} for kind in NEGATIVES}
        for name, energy in ENERGIES.items():
            x = torch.randn(pairs, DIMS, generator=generator)
            y = RHO * x + math.sqrt(REST) * torch.randn(pairs, DIMS, generator=generator)
            drawn = {
                "marginal": torch.randn(pairs, max(COUNTS), DIMS, generator=generator),
                "long chain": energy.chain().sample(energy, x, y, max(COUNTS), generator).actions,
            }
            with torch.no_grad():
                positive = energy(x, y.unsqueeze(1))[:, 0]
                for kind, actions in drawn.items():
                    negative = energy(x, actions)
                    result[kind][name] = [nats(positive, negative[:, :count]) for count in COUNTS]
        return result

    def judge(self, results: Results) -> Finding:
        values = {
            kind: {
                name: [results.values("computation", kind, name, i) for i in range(len(COUNTS))] for name in ENERGIES
            }
            for kind in NEGATIVES
        }
        excess = {
            kind: {
                (name, count): Interval.of([value - NATS for value in seeds])
                for name, by_count in values[kind].items()
                for count, seeds in zip(COUNTS, by_count, strict=True)
            }
            for kind in NEGATIVES
        }
        marginal, chain = (excess[kind].values() for kind in NEGATIVES)
        verdict: Verdict
        if any(interval.low > 0 for interval in marginal) or all(interval.high < 0 for interval in chain):
            verdict = "does not hold"
        elif any(interval.low > 0 for interval in chain):
            verdict = "holds"
        else:
            verdict = "inconclusive"
        return Finding(
            verdict,
            f"Largest value minus I = {NATS:g} nats: "
            + "; ".join(f"{_largest(excess[kind])} for negatives of the {kind}" for kind in NEGATIVES)
            + ". With the conditional's energy and its own chain, M = "
            f"{COUNTS[-1]}, the number is {Interval.of(values['long chain']['conditional'][-1]).number()}.",
            {
                "nats": NATS,
                "counts": list(COUNTS),
                "values": values,
                "excess": {
                    kind: {f"{name}, M = {count}": interval.to_json() for (name, count), interval in by_case.items()}
                    for kind, by_case in excess.items()
                },
            },
            "In theory there are two ways to be wrong. A chain of an energy that fits has negatives that cannot be "
            "told from the positive: in expectation the number is then at most 0 (the positive is exchangeable with "
            "independent samples of its own distribution), below I but whatever I is. A chain of an energy that is too "
            "flat goes where no action is, and the number then counts how easy that is to see, up to log(M + 1), "
            "again whatever I is." + ("" if verdict == "holds" else " These runs do not show it, or not clearly."),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import COLOURS, mean_and_band

        counts = finding.numbers["counts"]
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (kind, by_energy) in zip(panels, finding.numbers["values"].items(), strict=True):
            for colour, (name, by_count) in zip(COLOURS, by_energy.items(), strict=False):
                mean_and_band(axes, counts, by_count, colour, f"energy: {name}", ".-")
            axes.plot(counts, np.log1p(counts), color="0.5", linestyle=":", label="log(M + 1)")
            axes.axhline(finding.numbers["nats"], color="black", linewidth=0.8)
            axes.annotate(
                "I(x; y)", (counts[0], finding.numbers["nats"]), (0, 3), textcoords="offset points", fontsize=8
            )
            axes.set_xscale("log")
            axes.set_xlabel("negatives M")
            axes.set_title(f"negatives: {kind}", fontsize=9)
        panels[0].set_ylabel("log(M + 1) − InfoNCE, nats")
        panels[1].legend(frameon=False, fontsize=7)


def nats(positive: Tensor, negative: Tensor) -> float:
    """log(M + 1) − InfoNCE. That a value is near its ceiling is no surprise here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaturatedBoundWarning)
        return info_nce_bound(positive, negative).nats


def _largest(excess: dict[tuple[str, int], Interval]) -> str:
    (name, count), interval = max(excess.items(), key=lambda item: item[1].mean)
    return f"{interval.number()} (energy: {name}, M = {count})"
