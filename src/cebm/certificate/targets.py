"""Targets with exactly known moments that can be drawn from; those whose dimensions are independent."""

import copy
import math
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel, Level, Obs
from cebm.spaces import margin_limit

Points = Float[Tensor, "*points act"]


class Target(EnergyModel):
    """Abstract: an energy without observation (`encode` gives [batch, 0]) whose mean, standard deviations and
    correlations are known exactly and that can be drawn from, with how to run a sampler on it."""

    def __init__(
        self,
        name: str,
        mean: Sequence[float],
        std: Sequence[float],
        start: tuple[float | Sequence[float], float | Sequence[float]],
        step_sizes: tuple[float, float],
        chain_steps: int,
        margin: float | None = None,
        correlation: float = 0.0,
    ) -> None:
        super().__init__()
        self.obs_dim, self.act_dim, self.context_dim = 0, len(mean), 0
        self.name, self.mean, self.std = name, tuple(mean), tuple(std)
        self.correlation = correlation
        """Correlation of any two dimensions."""
        self.start = start
        """Chains start uniformly between these: one number for every dimension, or one each."""
        self.step_sizes = step_sizes
        """Step size λ of the first and the last step, for the named samplers."""
        self.chain_steps = chain_steps
        """Steps of each of the 1000 chains: enough for their start to be forgotten at these step sizes."""
        self.margin = margin
        """Margin of the box [-1, 1] that bounds the target; None for an unbounded target."""

    @abstractmethod
    def density(self, actions: Points) -> tuple[Float[Tensor, "*points"], Points]:
        """E and its gradient at any points."""

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator) -> Float[Tensor, "n act"]:
        """Exact draws, independent of each other."""

    def encode(self, obs: Obs) -> Context:
        return obs.new_empty(obs.shape[0], 0)

    def energies(self, context: Context, actions: Actions) -> Energies:
        return self.energies_and_gradients(context, actions)[0]

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        self.check(context, actions)
        return self.density(actions)

    def starts(self, batch: int, samples: int, generator: torch.Generator) -> Actions:
        """First states of the chains, uniform between the ends of `start`."""
        low, high = (torch.tensor(end, device=generator.device) for end in self.start)
        unit = torch.rand(batch, samples, self.act_dim, generator=generator, device=generator.device)
        return low + (high - low) * unit


class Separable(Target):
    """Abstract: E(y) = Σ_d E_d(y_d)."""

    @abstractmethod
    def terms(self, actions: Points) -> tuple[Points, Points]:
        """E_d(y_d) and its derivative, dimension by dimension."""

    def density(self, actions: Points) -> tuple[Float[Tensor, "*points"], Points]:
        energies, gradients = self.terms(actions)
        return energies.sum(-1), gradients


def by_inversion(grid: np.ndarray, density: np.ndarray, n: int, generator: torch.Generator) -> Float[Tensor, "n"]:
    """Draws of a density that is given on a fine grid, by inverting its distribution function."""
    cumulative = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(grid))])
    uniform = torch.rand(n, generator=generator, dtype=torch.float64, device=generator.device)
    values = np.interp(uniform.numpy(force=True) * cumulative[-1], cumulative, grid)
    return torch.from_numpy(values).to(generator.device, torch.float32)


def normal(*shape: int, generator: torch.Generator) -> Float[Tensor, "..."]:
    """Standard normal numbers on the generator's device."""
    return torch.randn(*shape, generator=generator, device=generator.device)


_APPENDIX = (0.3, 0.4), (0.1, 0.2)


class Gaussian(Separable):
    """The appendix's target: E_d = (y − μ)²/2s², chains from [0, 1]², λ from 5e-3 to 1e-3, no clipping. With another
    mean and deviation, chains start within three deviations, and the steps follow the smallest of these."""

    smoothable = True

    location: Tensor
    scale: Tensor

    def __init__(self, mean: Sequence[float] = _APPENDIX[0], std: Sequence[float] = _APPENDIX[1]) -> None:
        size, ratio = (min(std) / 0.1) ** 2, (max(std) / min(std)) ** 2 / 4
        appendix = (tuple(mean), tuple(std)) == _APPENDIX
        ends = [[m + side * 3 * s for m, s in zip(mean, std, strict=True)] for side in (-1, 1)]
        super().__init__(
            "gaussian",
            mean,
            std,
            start=(0.0, 1.0) if appendix else (ends[0], ends[1]),
            step_sizes=(5e-3 * size, 1e-3 * size),
            chain_steps=max(50, math.ceil(50 * ratio)),
        )
        self.register_buffer("location", torch.tensor(self.mean))
        self.register_buffer("scale", torch.tensor(self.std))

    def at(self, level: Level) -> "Gaussian":
        """The target blurred by N(0, level²), for samplers that fall through levels, and to certify one at a level: of
        one level it knows the moments, and where chains start."""
        other = copy.copy(self)
        other._buffers = dict(self._buffers)
        blur = torch.as_tensor(level).to(self.scale)
        other.scale = (self.scale.square() + blur.square().unsqueeze(-1)).sqrt()
        if isinstance(level, float | int):
            whole = Gaussian(self.mean, tuple(math.hypot(s, level) for s in self.std))
            other.std, other.start = whole.std, whole.start
            other.step_sizes, other.chain_steps = whole.step_sizes, whole.chain_steps
        return other

    def terms(self, actions: Points) -> tuple[Points, Points]:
        z = (actions - self.location) / self.scale
        return z.square() / 2, z / self.scale

    def draw(self, n: int, generator: torch.Generator) -> Float[Tensor, "n act"]:
        return self.location + self.scale * normal(n, self.act_dim, generator=generator)


class Skewed(Separable):
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

    def draw(self, n: int, generator: torch.Generator) -> Float[Tensor, "n act"]:
        """Beta(a, 5 − a) is the share of a in five exponential variables."""
        uniform = torch.rand(n, self.act_dim, 5, generator=generator, device=generator.device)
        exponential = -uniform.clamp_min(1e-12).log()
        first = torch.arange(5, device=generator.device) < self.left.unsqueeze(1)
        return self.scale * ((exponential * first).sum(-1).log() - (exponential * ~first).sum(-1).log())


class DoubleWell(Separable):
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
        self._grid = z * w, density.copy()
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

    def draw(self, n: int, generator: torch.Generator) -> Float[Tensor, "n act"]:
        grids, densities = self._grid
        columns = [by_inversion(grid, p, n, generator) for grid, p in zip(grids, densities, strict=True)]
        return torch.stack(columns, 1)


class BoxedExponential(Separable):
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

    def draw(self, n: int, generator: torch.Generator) -> Float[Tensor, "n act"]:
        uniform = torch.rand(n, self.act_dim, generator=generator, device=generator.device)
        low, high = (self.slope * self.limit).exp(), (-self.slope * self.limit).exp()
        return -(low + uniform * (high - low)).log() / self.slope
