"""Sources without chains: uniform, a mixture around the data, other examples, the energy's own proposal."""

from dataclasses import dataclass
from math import inf, log, pi
from typing import ClassVar

import torch

from cebm.energies.base import Actions, Energies, EnergyModel, Obs
from cebm.negatives.base import Density, Negatives, Positives, check_pairs, uniform_in_box
from cebm.spaces import margin_limit


@dataclass(frozen=True)
class Uniform:
    """Uniform in the box [-1, 1] with its margin: log q = −act·log(2.2)."""

    margin: float = 0.05
    """Room beyond [-1, 1] on both ends, as a fraction of the range."""

    def __post_init__(self) -> None:
        margin_limit(self.margin)

    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        check_pairs(obs, actions, n)
        shape = (actions.shape[0], n, actions.shape[1])
        return _with_density(self, uniform_in_box(shape, self.margin, actions, generator), obs, actions)

    def log_prob(self, positives: Positives, actions: Actions) -> Energies:
        limit = margin_limit(self.margin)
        inside = (actions.abs() <= limit).all(-1)
        density = actions.new_tensor(-actions.shape[-1] * log(2 * limit))
        return torch.where(inside, density, actions.new_tensor(-torch.inf))


@dataclass(frozen=True)
class GaussianMixture:
    """q(y) = 1/K Σ_k N(y; y⁺, σ_k² I) around the demonstrated action (Gustafsson et al. 2020)."""

    deviations: tuple[float, ...] = (0.1, 0.4, 0.8)
    """Standard deviations σ_k in normalised units."""

    def __post_init__(self) -> None:
        if not self.deviations or not all(0 < d < inf for d in self.deviations):
            raise ValueError(f"deviations must be positive numbers, got {self.deviations}")

    @torch.no_grad()
    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        check_pairs(obs, actions, n)
        batch, act = actions.shape
        component = torch.randint(len(self.deviations), (batch, n), generator=generator, device=actions.device)
        deviations = actions.new_tensor(self.deviations)[component]
        noise = torch.randn((batch, n, act), generator=generator, dtype=actions.dtype, device=actions.device)
        return _with_density(self, actions.unsqueeze(1) + deviations.unsqueeze(-1) * noise, obs, actions)

    def log_prob(self, positives: Positives, actions: Actions) -> Energies:
        variances = actions.new_tensor(self.deviations).square()
        squares = (actions - positives.unsqueeze(1)).square().sum(-1, keepdim=True)
        act = actions.shape[-1]
        parts = -0.5 * squares / variances - 0.5 * act * (2 * pi * variances).log()
        return parts.logsumexp(-1) - log(len(self.deviations))


@dataclass(frozen=True)
class InBatch:
    """The actions of `n` other examples of the batch, each used once per row: exact samples of the marginal
    p(y) = ∫ p(y|x) p(x) dx."""

    distribution: ClassVar[str] = "marginal"

    @torch.no_grad()
    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        check_pairs(obs, actions, n)
        batch = actions.shape[0]
        if n > batch - 1:
            raise ValueError(f"n must be at most {batch - 1}, the number of other examples in the batch, got {n}")
        keys = torch.rand((batch, batch - 1), generator=generator, device=actions.device)
        offset = keys.topk(n, 1).indices + 1
        index = (torch.arange(batch, device=actions.device).unsqueeze(1) + offset) % batch
        return Negatives(actions[index], obs)


@dataclass(frozen=True)
class Proposed:
    """Draws y ~ q(y|x) of the energy's own proposal, for energies that have one: of `Tilted`, E = f − log q."""

    distribution: ClassVar[str] = "proposal"

    @torch.no_grad()
    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        check_pairs(obs, actions, n)
        return Negatives(energy.propose(energy.encode(obs), n, generator), obs)


def _with_density(source: Density, samples: Actions, obs: Obs, positives: Positives) -> Negatives:
    log_q_positive = source.log_prob(positives, positives.unsqueeze(1))[:, 0]
    return Negatives(samples, obs, source.log_prob(positives, samples), log_q_positive)
