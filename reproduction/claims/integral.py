"""Claim 1: the Monte Carlo integral of eq. 2 is right only for a uniform proposal."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from cebm.explicit import MixtureDensityEnergy
from cebm.information import Quadrature
from cebm.negatives import GaussianMixture, ShortChains, Source, Uniform
from cebm.samplers import Langevin
from reproduction.intervals import Interval
from reproduction.ledger import Claim, Computation, Finding, Results, Task
from reproduction.trainings import Result, Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCES: dict[str, Source] = {
    "uniform": Uniform(),
    "gaussian mixture": GaussianMixture(),
    "ibc chains": ShortChains(Langevin("ibc", noise=0.1)),
}
LIMIT = 1.1
"""Of the box that uniform samples come from."""


class Integral(Claim):
    number = 1
    slug = "integral"
    section = "Sec. II and III"
    statement = (
        "Taking the mean of exp(−E) over samples for the integral Z, as eq. 2 does, is right only for samples of a "
        "uniform proposal."
    )
    protocol = (
        "Random energies of two actions: mixtures of four Gaussians with deviations from 0.15 up. For each, the log of "
        "the mean of exp(−E) over 4,096 samples plus the log-volume of the box, against log Z of the box by "
        "quadrature, for uniform samples, for a Gaussian mixture around an action of the density, and for IBC's "
        "Langevin chains."
    )
    metric = "Bias of log Z in nats: the mean error over energies."
    rule = (
        "Holds where the 95 % interval of the bias over seeds reaches into ±0.02 nats for uniform samples, and lies "
        "beyond ±0.1 nats for the other two; does not hold where that of uniform samples lies beyond ±0.1 nats or that "
        "of another source within ±0.02; else inconclusive."
    )

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
                actions = energy.draw(energy.encode(obs), 1, generator)[:, 0]
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

        if not beyond(uniform, 0.02) and all(beyond(other, 0.1) for other in others):
            verdict = "holds"
        elif beyond(uniform, 0.1) or any(other.low > -0.02 and other.high < 0.02 for other in others):
            verdict = "does not hold"
        else:
            verdict = "inconclusive"
        measured = ", ".join(f"{interval.number()} nats for {name}" for name, interval in intervals.items())
        return Finding(
            verdict,  # type: ignore[arg-type]
            f"Bias of log Z: {measured}.",
            {"bias": biases, "intervals": {name: interval.to_json() for name, interval in intervals.items()}},
            "The mean of exp(−E) over samples of q estimates ∫ q exp(−E), which is Z over the volume only where q is "
            "uniform. Chains and mixtures around the demonstration go where exp(−E) is large: their mean is too large.",
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import bars

        axes = figure.subplots()
        bars(axes, finding.numbers["bias"], "bias of log Z, nats")
        axes.axhline(0, color="black", linewidth=0.8)
