"""The named samplers, with step sizes that fit the targets."""

import math
from dataclasses import dataclass, replace

from cebm.certificate.targets import Target
from cebm.samplers import HMC, MALA, DerivativeFree, Langevin, Sampler, Tempering
from cebm.spaces import NORMALISED_RANGE


@dataclass(frozen=True)
class LateFall:
    """init − (init − final)·(k/(n−1))²: the schedule of the appendix's experiment. It falls late, where
    `Polynomial` falls early."""

    init: float
    """Size of the first step."""
    final: float
    """Size of the last step."""

    def __call__(self, k: int, n: int) -> float:
        return self.init - (self.init - self.final) * (k / max(n - 1, 1)) ** 2


SAMPLERS = (
    "langevin-ibc",
    "langevin-correct",
    "langevin-correct-clipped",
    "mala",
    "hmc",
    "tempering",
    "derivative-free",
    "derivative-free-autoregressive",
)


def named_sampler(name: str, target: Target, steps: int) -> Sampler:
    """One of `SAMPLERS` with the step sizes of `target`: λ for ibc (σ = 1), τ = λ/2 for the others, and clipped to
    the box only where the target has one. '-clipped' limits each step to 0.45 of the last step's noise."""
    init, final = target.step_sizes
    correct = Langevin("correct", steps, LateFall(init / 2, final / 2), step_clip=None, margin=target.margin)
    match name:
        case "langevin-ibc":
            return replace(correct, formulation="ibc", schedule=LateFall(init, final))
        case "langevin-correct":
            return correct
        case "langevin-correct-clipped":
            return replace(correct, step_clip=0.45 * math.sqrt(final) / NORMALISED_RANGE)
        case "mala":
            return MALA(steps, step_size=init / 2, adapt=steps // 2, margin=target.margin)
        case "hmc":
            return HMC(steps, step_size=math.sqrt(init), adapt=steps // 2, margin=target.margin)
        case "tempering":
            mala = MALA(steps, step_size=init / 2, adapt=steps // 2, margin=target.margin)
            return Tempering(mala, steps, levels=3, hottest=4.0)
        case "derivative-free":
            return DerivativeFree(steps, margin=target.margin)
        case "derivative-free-autoregressive":
            return DerivativeFree(steps, margin=target.margin, autoregressive=True)
    raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, got {name!r}")
