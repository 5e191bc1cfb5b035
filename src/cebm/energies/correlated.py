"""A mixture of Gaussians with whole covariance matrices, for actions whose columns depend on each other."""

from dataclasses import dataclass
from math import inf, log, pi
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel, Obs, described
from cebm.energies.density import Trunk
from cebm.energies.feedforward import Init, Linear
from cebm.randomness import draw_normal, draw_uniform
from cebm.spaces import Specification


class Correlated(NamedTuple):
    """What each observation says about the mixture."""

    log_weights: Float[Tensor, "batch k"]
    means: Float[Tensor, "batch k act"]
    factors: Float[Tensor, "batch k act act"]
    """A_k, lower triangular with a positive diagonal: the inverse of the covariance is AᵀA."""
    heights: Float[Tensor, "batch k"]
    """log w_k + log det A_k − (dim/2) log 2π."""


class CorrelatedMixtureEnergy(EnergyModel):
    """E(x, y) = −log Σ_k w_k(x) N(y; μ_k(x), Σ_k(x)), Σ_k⁻¹ = AᵀA with A = diag(1/σ)(I + N), N strictly lower
    triangular. So σ_i is the deviation of column i where the columns before it are known, and N is what they say about
    it (Williams 1996). The networks are those of `MixtureDensityEnergy`."""

    closed_form = True

    def __init__(
        self,
        obs_dim: int,
        act_dim: int,
        width: int = 256,
        hidden_layers: int = 2,
        components: int = 8,
        floor: float = 0.0,
        init: Init = "torch",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if components < 1:
            raise ValueError(f"components must be at least 1, got {components}")
        if not 0 <= floor < inf:
            raise ValueError(f"floor must be at least 0 and finite, got {floor}")
        self.components, self.floor = components, floor
        self.obs_dim, self.act_dim = obs_dim, act_dim
        self.below = act_dim * (act_dim - 1) // 2
        self.weighing = Trunk(obs_dim, components, width, hidden_layers + 1, init, generator)
        outputs = components * (2 * act_dim + self.below)
        self.placing = Trunk(obs_dim, outputs, max(1, width // 4), hidden_layers, init, generator)
        self.linear = Linear(obs_dim, components * act_dim, init, generator=generator)

    def encode(self, obs: Obs) -> Context:
        if self.obs_dim == 0:
            obs = obs.new_empty(obs.shape[0], 0)
        self.check_obs(obs)
        k, act = self.components, self.act_dim
        means, log_stds, mixed = self.placing.forward(obs).split([k * act, k * act, k * self.below], 1)
        # As in `MixtureDensityEnergy`: σ stays in [e⁻⁷, e²], and a variance grows by floor².
        log_stds = 4.5 * torch.tanh(log_stds / 4.5) - 2.5
        if self.floor:
            log_stds = 0.5 * (2 * log_stds).exp().add(self.floor**2).log()
        log_stds = log_stds.view(-1, k, act)
        row, column = torch.tril_indices(act, act, -1, device=obs.device)
        unit = torch.eye(act, dtype=obs.dtype, device=obs.device).expand(obs.shape[0], k, act, act).clone()
        unit[:, :, row, column] = mixed.view(-1, k, self.below)
        log_weights = self.weighing.forward(obs).log_softmax(1)
        return Correlated(
            log_weights,
            (means + self.linear.forward(obs)).view(-1, k, act),
            unit * (-log_stds).exp().unsqueeze(-1),
            log_weights - log_stds.sum(-1) - 0.5 * act * log(2 * pi),
        )

    def energies(self, context: Context, actions: Actions) -> Energies:
        return -self._parts(context, actions)[0].logsumexp(-1)

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        """∇E = Σ_k r_k Σ_k⁻¹(y − μ_k), with r_k the share of component k in the density at y."""
        parts, z = self._parts(context, actions)
        pull = torch.einsum("bskj,bkji->bski", z, context.factors)
        return -parts.logsumexp(-1), (parts.softmax(-1).unsqueeze(-1) * pull).sum(2)

    def best(self, context: Context) -> Float[Tensor, "batch act"]:
        """The component mean where the density is highest."""
        index = self.energies(context, context.means).argmin(1)
        return context.means.gather(1, index.view(-1, 1, 1).expand(-1, 1, self.act_dim))[:, 0]

    def propose(self, context: Context, n: int, generator: torch.Generator, shared: bool = False) -> Actions:
        """Draws of the mixture itself: μ_k + A_k⁻¹ z, the component by inversion; no solver, for the export."""
        batch, rows = context.means.shape[0], 1 if shared else context.means.shape[0]
        uniform = draw_uniform(generator, (rows, n), context.means).expand(batch, -1)
        normal = draw_normal(generator, (rows, n, self.act_dim), context.means).expand(batch, -1, -1)
        reached = context.log_weights.exp().cumsum(1).unsqueeze(1) <= uniform.unsqueeze(2)
        index = reached.sum(2).clamp_max(self.components - 1).view(batch, n, 1)
        size = self.act_dim
        chosen = context.factors.flatten(2).gather(1, index.expand(-1, -1, size**2)).unflatten(2, (size, size))
        away: list[Tensor] = []  # A (y − μ) = z, row by row
        for row in range(size):
            known = sum((chosen[..., row, column] * away[column] for column in range(row)), normal.new_zeros(()))
            away.append((normal[..., row] - known) / chosen[..., row, row])
        return context.means.gather(1, index.expand(-1, -1, size)) + torch.stack(away, -1)

    def excess(self, context: Context, actions: Actions) -> Energies:
        """E + log q is 0: the proposal is the model."""
        self.check(context, actions)
        return actions.new_zeros(actions.shape[:2])

    def _parts(
        self, context: Context, actions: Actions
    ) -> tuple[Float[Tensor, "batch samples k"], Float[Tensor, "batch samples k act"]]:
        """log w_k N(y; μ_k, Σ_k), and A_k(y − μ_k)."""
        self.check(context, actions)
        away = actions.unsqueeze(2) - context.means.unsqueeze(1)
        z = torch.einsum("bkij,bskj->bski", context.factors, away)
        return context.heights.unsqueeze(1) - 0.5 * z.square().sum(-1), z

    def check(self, context: Context, actions: Tensor) -> None:
        if not isinstance(context, Correlated) or context.means.shape[1:] != (self.components, self.act_dim):
            size = f"{self.components} components in {self.act_dim} dimensions"
            raise ValueError(f"context must be Correlated, of {size}, got {described(context)}")
        self.check_actions(context.means.shape[0], actions)


@dataclass(frozen=True)
class CorrelatedMixture:
    """Settings of `CorrelatedMixtureEnergy`, −log Σ_k w_k N(y; μ_k, Σ_k): `MixtureDensity` with whole covariances."""

    width: int = 256
    """Hidden units per layer of the weights' network."""
    hidden_layers: int = 2
    """Hidden layers of the components' network; the weights' has one more."""
    components: int = 8
    """Gaussians in the mixture."""
    init: Init = "torch"
    """'normal': weights and biases from N(0, 0.05²). 'torch': torch's default."""
    floor: float | None = None
    """Smallest deviation of a column given those before it, normalised units. None: the smoothing of the inputs."""

    explicit: ClassVar[bool] = True

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> EnergyModel:
        """The energy, its weights drawn from `generator`."""
        sizes = (spec.obs_dim, spec.act_dim, self.width, self.hidden_layers, self.components)
        floor = spec.smoothing if self.floor is None else self.floor
        return CorrelatedMixtureEnergy(*sizes, floor, self.init, generator)
