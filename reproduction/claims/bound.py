"""Claim 10: InfoNCE bounds the mutual information with negatives of the marginal, not with those of a long chain."""

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel, Obs
from cebm.information import SaturatedBoundWarning, info_nce_bound
from cebm.negatives import LongChain
from cebm.samplers import Constant, Langevin
from reproduction.intervals import Interval, Verdict
from reproduction.ledger import Claim, Computation, Finding, Results, Task
from reproduction.prose import bound as prose
from reproduction.trainings import Result, Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIMS = 20
NATS = 4.0
"""The mutual information I = −(d/2) log(1 − ρ²) of the pairs."""
REST = math.exp(-2 * NATS / DIMS)
"""1 − ρ², the variance of y given x."""
RHO = math.sqrt(1 - REST)
COUNTS = (7, 63, 255, 511)
"""Numbers of negatives M. Each takes the first M negatives of one list."""
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
        """A chain of the correct step with τ a tenth of the energy's variance. It overestimates the variance by 5 % and
        forgets its start in the burn-in; neighbouring states have a correlation of 0.9."""
        tau = 0.1 / self.precision
        return LongChain(Langevin("correct", schedule=Constant(tau), step_clip=None, margin=None), burn_in=100, thin=1)


ENERGIES = {
    # −log p(y|x)/p(y) up to a function of x: the bound is tight for this energy.
    "density ratio": Quadratic(RHO**2 / REST, 1 / RHO),
    "conditional": Quadratic(1 / REST, RHO),
    # Flat, like the energy of an untrained network.
    "flat": Quadratic(1 / (16 * REST), RHO),
}


class Bound(Claim):
    number = 10
    slug = "bound"
    section = "Sec. V"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE

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
        facts = prose.Facts(
            nats=NATS,
            largest={kind: _largest(excess[kind]) for kind in NEGATIVES},
            count=COUNTS[-1],
            own_chain=Interval.of(values["long chain"]["conditional"][-1]),
        )
        return Finding(
            verdict,
            prose.measured(facts),
            {
                "nats": NATS,
                "counts": list(COUNTS),
                "values": values,
                "excess": {
                    kind: {f"{name}, M = {count}": interval.to_json() for (name, count), interval in by_case.items()}
                    for kind, by_case in excess.items()
                },
            },
            prose.comment(verdict),
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
    """log(M + 1) − InfoNCE. The warning about values near the ceiling is silenced, as they are expected here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaturatedBoundWarning)
        return info_nce_bound(positive, negative).nats


def _largest(excess: dict[tuple[str, int], Interval]) -> prose.Largest:
    (name, count), interval = max(excess.items(), key=lambda item: item[1].mean)
    return prose.Largest(interval, name, count)
