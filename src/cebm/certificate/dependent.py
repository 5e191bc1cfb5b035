"""Targets whose dimensions depend on each other: a sampler may have every marginal right and still be wrong here."""

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cebm.certificate.targets import (
    BoxedExponential,
    DoubleWell,
    Gaussian,
    Points,
    Skewed,
    Target,
    by_inversion,
    normal,
)


class CorrelatedGaussian(Target):
    """E = ½ (y − μ)ᵀ Σ⁻¹ (y − μ) with a correlation of 0.9: a narrow ellipse that lies askew to the axes."""

    location: Tensor
    precision: Tensor
    root: Tensor

    def __init__(self, correlation: float = 0.9) -> None:
        std = np.array([0.1, 0.2])
        covariance = np.outer(std, std) * np.array([[1, correlation], [correlation, 1]])
        narrow = float(np.linalg.eigvalsh(covariance)[0])
        super().__init__(
            "correlated",
            (0.1, -0.1),
            tuple(std.tolist()),
            (-0.5, 0.8),
            # τ/s² from 0.6 to 0.15 along the short axis: the variance is off by a twelfth of it at most.
            step_sizes=(1.2 * narrow, 0.3 * narrow),
            chain_steps=400,
            correlation=correlation,
        )
        self.register_buffer("location", torch.tensor(self.mean))
        self.register_buffer("precision", torch.tensor(np.linalg.inv(covariance), dtype=torch.float32))
        self.register_buffer("root", torch.tensor(np.linalg.cholesky(covariance), dtype=torch.float32))

    def density(self, actions: Points) -> tuple[Float[Tensor, "*points"], Points]:
        away = actions - self.location
        pull = away @ self.precision
        return 0.5 * (away * pull).sum(-1), pull

    def draw(self, n: int, generator: torch.Generator) -> Float[Tensor, "n act"]:
        return self.location + normal(n, 2, generator=generator) @ self.root.T


class Banana(Target):
    """y₁ ~ N(0, 0.4²) and y₂ | y₁ ~ N(y₁² − 0.4², 0.2²): uncorrelated, and bent."""

    WIDE, NARROW = 0.4, 0.2

    def __init__(self) -> None:
        std = (self.WIDE, math.sqrt(self.NARROW**2 + 2 * self.WIDE**4))
        start = ([-1.0, -0.4], [0.4, 0.8])
        super().__init__("banana", (0.0, 0.0), std, start, step_sizes=(6e-3, 2e-3), chain_steps=400)

    def density(self, actions: Points) -> tuple[Float[Tensor, "*points"], Points]:
        first, second = actions.unbind(-1)
        away = (second - first.square() + self.WIDE**2) / self.NARROW**2
        energies = 0.5 * (first / self.WIDE).square() + 0.5 * away.square() * self.NARROW**2
        return energies, torch.stack([first / self.WIDE**2 - 2 * first * away, away], -1)

    def draw(self, n: int, generator: torch.Generator) -> Float[Tensor, "n act"]:
        first, second = normal(n, 2, generator=generator).unbind(1)
        first = self.WIDE * first
        return torch.stack([first, first.square() - self.WIDE**2 + self.NARROW * second], 1)


class Funnel(Target):
    """y₁ ~ N(0, 0.4²) and y₂ | y₁ ~ N(0, σ²), σ = 0.15 e^{1.25 y₁}: Neal's funnel in two dimensions, whose width at
    three deviations below the middle is a twentieth of that above."""

    WIDE, NARROW, OPENING = 0.4, 0.15, 1.25

    def __init__(self) -> None:
        std = (self.WIDE, self.NARROW * math.exp((self.OPENING * self.WIDE) ** 2))
        start = ([-0.4, -0.6], [1.0, 0.2])
        super().__init__("funnel", (0.0, 0.0), std, start, step_sizes=(3e-3, 1e-3), chain_steps=800)

    def density(self, actions: Points) -> tuple[Float[Tensor, "*points"], Points]:
        first, second = actions.unbind(-1)
        width = self.NARROW * (self.OPENING * first).exp()
        z = second / width
        energies = 0.5 * (first / self.WIDE).square() + 0.5 * z.square() + self.OPENING * first
        slope = first / self.WIDE**2 + self.OPENING * (1 - z.square())
        return energies, torch.stack([slope, z / width], -1)

    def draw(self, n: int, generator: torch.Generator) -> Float[Tensor, "n act"]:
        first, second = normal(n, 2, generator=generator).unbind(1)
        first = self.WIDE * first
        return torch.stack([first, self.NARROW * (self.OPENING * first).exp() * second], 1)


class Ring(Target):
    """E = (‖y‖ − r)²/2w² with r = 0.5 and w = 0.12: uncorrelated, with nothing in the middle. Moments by quadrature."""

    RADIUS, WIDTH = 0.5, 0.12

    def __init__(self) -> None:
        radii = np.linspace(0.0, self.RADIUS + 10 * self.WIDTH, 20001)
        density = radii * np.exp(-(((radii - self.RADIUS) / self.WIDTH) ** 2) / 2)
        std = float(np.sqrt((density * radii**2).sum() / density.sum() / 2))
        super().__init__("ring", (0.0, 0.0), (std, std), (0.0, 0.8), step_sizes=(8e-3, 2e-3), chain_steps=500)
        self._grid = radii, density

    def density(self, actions: Points) -> tuple[Float[Tensor, "*points"], Points]:
        radii = actions.norm(dim=-1).clamp_min(1e-12)
        away = (radii - self.RADIUS) / self.WIDTH**2
        return 0.5 * away.square() * self.WIDTH**2, (away / radii).unsqueeze(-1) * actions

    def draw(self, n: int, generator: torch.Generator) -> Float[Tensor, "n act"]:
        radii = by_inversion(*self._grid, n, generator)
        angles = 2 * math.pi * torch.rand(n, generator=generator, device=generator.device)
        return radii.unsqueeze(1) * torch.stack([angles.cos(), angles.sin()], 1)


def analytic_targets() -> tuple[Target, ...]:
    """The eight targets of the certificate: four whose dimensions are independent, four whose are not."""
    return (
        Gaussian(),
        Skewed(),
        DoubleWell(),
        BoxedExponential(),
        CorrelatedGaussian(),
        Banana(),
        Funnel(),
        Ring(),
    )
