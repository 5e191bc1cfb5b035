"""Targets with exactly known moments, and the named samplers with step sizes that fit them."""

import copy
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel, Level, Obs
from cebm.samplers import MALA, DerivativeFree, Langevin, Sampler
from cebm.spaces import NORMALISED_RANGE, margin_limit

Points = Float[Tensor, "*points act"]


class Target(EnergyModel):
    """Abstract: E(y) = Σ_d E_d(y_d), no observation (`encode` gives [batch, 0]), with its exact mean and standard
    deviation per dimension, and how to run a sampler on it."""

    def __init__(
        self,
        name: str,
        mean: Sequence[float],
        std: Sequence[float],
        start: tuple[float, float],
        step_sizes: tuple[float, float],
        chain_steps: int,
        margin: float | None = None,
    ) -> None:
        super().__init__()
        self.obs_dim, self.act_dim, self.context_dim = 0, len(mean), 0
        self.name, self.mean, self.std = name, tuple(mean), tuple(std)
        self.start = start
        """Chains start uniformly between these, in every dimension."""
        self.step_sizes = step_sizes
        """Step size λ of the first and the last step, for the named samplers."""
        self.chain_steps = chain_steps
        """Steps of each of the 1000 chains: enough for their start to be forgotten at these step sizes."""
        self.margin = margin
        """Margin of the box [-1, 1] that bounds the target; None for an unbounded target."""

    @abstractmethod
    def terms(self, actions: Points) -> tuple[Points, Points]:
        """E_d(y_d) and its derivative, dimension by dimension."""

    def encode(self, obs: Obs) -> Context:
        return obs.new_empty(obs.shape[0], 0)

    def energies(self, context: Context, actions: Actions) -> Energies:
        return self.energies_and_gradients(context, actions)[0]

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        self.check(context, actions)
        energies, gradients = self.terms(actions)
        return energies.sum(-1), gradients

    def starts(self, batch: int, samples: int, generator: torch.Generator) -> Actions:
        """First states of the chains, uniform between the ends of `start`."""
        low, high = self.start
        unit = torch.rand(batch, samples, self.act_dim, generator=generator, device=generator.device)
        return low + (high - low) * unit


class Gaussian(Target):
    """The appendix's target: E_d = (y − μ)²/2s², chains from [0, 1]², λ from 5e-3 to 1e-3, no clipping."""

    smoothable = True

    location: Tensor
    scale: Tensor

    def __init__(self, mean: Sequence[float] = (0.3, 0.4), std: Sequence[float] = (0.1, 0.2)) -> None:
        super().__init__("gaussian", mean, std, start=(0.0, 1.0), step_sizes=(5e-3, 1e-3), chain_steps=50)
        self.register_buffer("location", torch.tensor(self.mean))
        self.register_buffer("scale", torch.tensor(self.std))

    def at(self, level: Level) -> "Gaussian":
        """The target blurred by N(0, level²), for samplers that fall through levels."""
        other = copy.copy(self)
        other._buffers = dict(self._buffers)
        blur = torch.as_tensor(level).to(self.scale)
        other.scale = (self.scale.square() + blur.square().unsqueeze(-1)).sqrt()
        return other

    def terms(self, actions: Points) -> tuple[Points, Points]:
        z = (actions - self.location) / self.scale
        return z.square() / 2, z / self.scale


class Skewed(Target):
    """E_d = 5 log(1 + e^z) − a z with z = y/s, smooth: slope −a/s to the far left and (5 − a)/s to the right.

    z is the logit of a Beta(a, b) variable with b = 5 − a, so E[z] = ψ(a) − ψ(b) and Var[z] = ψ'(a) + ψ'(b). The
    skewness is 0.86 in the first dimension (a = 4) and −0.86 in the second (a = 1).
    """

    left: Tensor
    scale: Tensor

    def __init__(self) -> None:
        a, s = torch.tensor([[4.0, 1.0], [0.1, 0.15]], dtype=torch.float64)
        mean = s * (torch.digamma(a) - torch.digamma(5 - a))
        std = s * (torch.polygamma(1, a) + torch.polygamma(1, 5 - a)).sqrt()
        super().__init__("skewed", mean.tolist(), std.tolist(), (-1.0, 1.0), step_sizes=(5e-3, 1e-3), chain_steps=250)
        self.register_buffer("left", a.float())
        self.register_buffer("scale", s.float())

    def terms(self, actions: Points) -> tuple[Points, Points]:
        z = actions / self.scale
        energies = 5 * torch.logaddexp(z, torch.zeros_like(z)) - self.left * z
        return energies, (5 * torch.sigmoid(z) - self.left) / self.scale


class DoubleWell(Target):
    """E_d = (z² − 1)² + t z with z = y/w: wells near ±w behind a barrier of about 1, one deeper than the other by
    about 2|t|, so that a sampler that does not cross between them shows a wrong mean. Moments by quadrature.

    Chains start within reach of the wells: in the quartic tails, where MALA's proposals overshoot, it gets stuck.
    """

    tilt: Tensor
    width: Tensor

    def __init__(self) -> None:
        t, w = np.array([[0.25], [-0.25]]), np.array([[0.5], [0.4]])
        # The trapezoidal rule converges exponentially for a smooth function that vanishes at both ends.
        z = np.linspace(-4.0, 4.0, 4001)
        density = np.exp(-((z**2 - 1) ** 2) - t * z)
        density /= density.sum(1, keepdims=True)
        mean = w * (density * z).sum(1, keepdims=True)
        std = np.sqrt((density * (w * z - mean) ** 2).sum(1))
        super().__init__(
            "double-well", mean[:, 0].tolist(), std.tolist(), (-0.6, 0.6), step_sizes=(12e-3, 3e-3), chain_steps=500
        )
        self.register_buffer("tilt", torch.tensor(t[:, 0], dtype=torch.float32))
        self.register_buffer("width", torch.tensor(w[:, 0], dtype=torch.float32))

    def terms(self, actions: Points) -> tuple[Points, Points]:
        z = actions / self.width
        well = z.square() - 1
        return well.square() + self.tilt * z, (4 * z * well + self.tilt) / self.width


class BoxedExponential(Target):
    """E_d = β y inside the margin box [-1.1, 1.1] and infinite outside; the density is highest on the border.

    Clipping to the box leaves atoms of probability on the border, where the density has none; MALA refuses to
    leave the box and has none. The steps are coarse, as those of a policy are: atoms vanish as √τ.
    """

    slope: Tensor

    def __init__(self) -> None:
        margin, limit, beta = 0.05, margin_limit(0.05), np.array([3.0, -1.5])
        coth = 1 / np.tanh(beta * limit)
        mean = 1 / beta - limit * coth
        std = np.sqrt(1 / beta**2 + limit**2 * (1 - coth**2))
        super().__init__("box", mean.tolist(), std.tolist(), (-limit, limit), (5e-2, 1e-2), 250, margin)
        self.limit = limit
        self.register_buffer("slope", torch.tensor(beta, dtype=torch.float32))

    def terms(self, actions: Points) -> tuple[Points, Points]:
        energies = (self.slope * actions).masked_fill(actions.abs() > self.limit, math.inf)
        return energies, self.slope.expand_as(actions)


def analytic_targets() -> tuple[Target, ...]:
    """The four targets of the certificate."""
    return Gaussian(), Skewed(), DoubleWell(), BoxedExponential()


# ---------------------------------------------------------------------------------------------- named samplers


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
        case "derivative-free":
            return DerivativeFree(steps, margin=target.margin)
        case "derivative-free-autoregressive":
            return DerivativeFree(steps, margin=target.margin, autoregressive=True)
    raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, got {name!r}")
