"""Claim 1: the Monte Carlo integral of eq. 2 is right only for a uniform proposal."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from cebm.energies import MixtureDensityEnergy
from cebm.information import Quadrature
from cebm.negatives import GaussianMixture, ShortChains, Source, Uniform
from cebm.samplers import Langevin
from reproduction.intervals import Interval, Verdict
from reproduction.ledger import Claim, Computation, Finding, Results, Task
from reproduction.prose import integral as prose
from reproduction.trainings import Result, Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCES: dict[str, Source] = {
    "uniform": Uniform(),
    "gaussian mixture": GaussianMixture(),
    "ibc chains": ShortChains(Langevin("ibc", noise=0.1)),
}
LIMIT = 1.1
"""Half the side of the box that uniform samples come from."""


class Integral(Claim):
    number = 1
    slug = "integral"
    section = "Sec. II and III"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        return [Computation(self, seed, scale) for seed in seeds]

    def compute(self, scale: Scale, seed: int) -> Result:
        generator = torch.Generator().manual_seed(seed)
        quadrature = Quadrature((-LIMIT, -LIMIT), (LIMIT, LIMIT), 256)
        errors: dict[str, list[float]] = {name: [] for name in SOURCES}
        for _ in range(max(2, scale.samples // 10)):
            energy = MixtureDensityEnergy(4, 2, 64, components=4, floor=0.15, generator=generator)
            obs = torch.rand(16, 4, generator=generator) - 0.5
            with torch.no_grad():
                actions = energy.propose(energy.encode(obs), 1, generator)[:, 0]
                truth = quadrature.log_partition(energy, obs)
                for name, source in SOURCES.items():
                    drawn = source.sample(energy, obs, actions, 4096, generator).actions
                    estimate = (-energy(obs, drawn)).logsumexp(1) - math.log(4096) + 2 * math.log(2 * LIMIT)
                    errors[name].append(float((estimate - truth).mean()))
        return {"bias": {name: sum(values) / len(values) for name, values in errors.items()}}

    def judge(self, results: Results) -> Finding:
        biases = {name: results.values("computation", "bias", name) for name in SOURCES}
        intervals = {name: Interval.of(values) for name, values in biases.items()}
        uniform, others = intervals["uniform"], [intervals[name] for name in SOURCES if name != "uniform"]

        def beyond(interval: Interval, nats: float) -> bool:
            return interval.low > nats or interval.high < -nats

        verdict: Verdict
        if not beyond(uniform, 0.02) and all(beyond(other, 0.1) for other in others):
            verdict = "holds"
        elif beyond(uniform, 0.1) or any(other.low > -0.02 and other.high < 0.02 for other in others):
            verdict = "does not hold"
        else:
            verdict = "inconclusive"
        return Finding(
            verdict,
            prose.measured(intervals),
            {"bias": biases, "intervals": {name: interval.to_json() for name, interval in intervals.items()}},
            prose.COMMENT,
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import bars

        axes = figure.subplots()
        bars(axes, finding.numbers["bias"], "bias of log Z, nats")
        axes.axhline(0, color="black", linewidth=0.8)
