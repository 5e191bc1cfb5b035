"""Two cheap baselines, without which no win of a generative policy convinces: the nearest demonstration, and a
regression that is refined once. Both are energies E(x, y) = ½‖y − ŷ(x)‖² around the action that they compute.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel, EnergySettings, Obs
from cebm.energies.density import Trunk
from cebm.energies.feedforward import Init
from cebm.spaces import Specification, traced

_DISTANCES_AT_ONCE = 2**24
"""Distances between observations that are held together; 64 MB in float32."""


class NearestEnergy(EnergyModel):
    """ŷ(x) is the action that was demonstrated at the observation nearest to x, normalised, in the Euclidean norm. The
    demonstrations are stored in the energy; nothing is trained. The context is ŷ(x)."""

    closed_form = True
    stored_obs: Tensor
    stored_actions: Tensor

    def __init__(self, obs_dim: int, act_dim: int, pairs: int) -> None:
        super().__init__()
        if pairs < 1:
            raise ValueError(f"pairs must be at least 1, got {pairs}")
        self.obs_dim, self.act_dim, self.context_dim = obs_dim, act_dim, act_dim
        self.register_buffer("stored_obs", torch.zeros(pairs, obs_dim))
        self.register_buffer("stored_actions", torch.zeros(pairs, act_dim))

    @torch.no_grad()
    def remember(self, obs: Float[Tensor, "pairs obs"], actions: Float[Tensor, "pairs act"]) -> None:
        """Stores these pairs in place of those before."""
        if obs.shape != self.stored_obs.shape or actions.shape != self.stored_actions.shape:
            raise ValueError(
                f"pairs have shapes {tuple(obs.shape)} and {tuple(actions.shape)}, there is room for "
                f"{tuple(self.stored_obs.shape)} and {tuple(self.stored_actions.shape)}"
            )
        self.stored_obs.copy_(obs)
        self.stored_actions.copy_(actions)

    def encode(self, obs: Obs) -> Context:
        self.check_obs(obs)
        if traced():  # the same distances by plain arithmetic, which every format of export knows
            away = (obs.unsqueeze(1) - self.stored_obs).square().sum(-1)
            return self.stored_actions[away.argmin(1)]
        at_once = max(1, _DISTANCES_AT_ONCE // len(self.stored_obs))
        # Exact distances: by way of a matrix product, small ones would drown in rounding.
        nearest = [
            torch.cdist(part, self.stored_obs, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
            for part in obs.split(at_once)
        ]
        return self.stored_actions[torch.cat(nearest)]

    def energies(self, context: Context, actions: Actions) -> Energies:
        return _around(self, context, actions)

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        return self.energies(context, actions), actions - context.unsqueeze(1)

    def best(self, context: Context) -> Float[Tensor, "batch act"]:
        return context


@dataclass(frozen=True)
class Nearest:
    """Settings of `NearestEnergy`: E = ½‖y − ŷ(x)‖², with ŷ the chunk of the nearest demonstration. One step of
    training is enough."""

    pairs: int = 1
    """Demonstrated pairs that are stored. Training sets it: to as many as there are."""

    explicit: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise ValueError(f"pairs must be at least 1, got {self.pairs}")

    def sized(self, pairs: int) -> EnergySettings:
        """For as many pairs."""
        return replace(self, pairs=pairs)

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> EnergyModel:
        """The energy, which has stored nothing yet."""
        return NearestEnergy(spec.obs_dim, spec.act_dim, self.pairs)


class TwoStepEnergy(EnergyModel):
    """ŷ(x) = f(x, t ŷ₀, t) with ŷ₀ = f(x, 0, 0): a regression and one refinement of it by the same network. The context
    is ŷ(x). In training the refinement starts from t y + (1 − t) z with noise z (`objectives.TwoSquares`); when it acts
    z has its mean, 0, so that the same observation gives the same action."""

    closed_form = True

    def __init__(
        self,
        obs_dim: int,
        act_dim: int,
        width: int = 256,
        hidden_layers: int = 2,
        level: float = 0.9,
        init: Init = "torch",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not 0 < level < 1:
            raise ValueError(f"level must be between 0 and 1, got {level}")
        self.obs_dim, self.act_dim, self.context_dim, self.level = obs_dim, act_dim, act_dim, level
        self.trunk = Trunk(obs_dim + act_dim + 1, act_dim, width, hidden_layers, init, generator)

    def predict(
        self, obs: Float[Tensor, "batch obs"], start: Float[Tensor, "batch act"], level: float
    ) -> Float[Tensor, "batch act"]:
        """f(x, start, level): one pass of the network."""
        return self.trunk(torch.cat([obs, start, start.new_full((start.shape[0], 1), level)], 1))

    def encode(self, obs: Obs) -> Context:
        self.check_obs(obs)
        first = self.predict(obs, obs.new_zeros(obs.shape[0], self.act_dim), 0.0)
        return self.predict(obs, self.level * first, self.level)

    def energies(self, context: Context, actions: Actions) -> Energies:
        return _around(self, context, actions)

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        return self.energies(context, actions), actions - context.unsqueeze(1)

    def best(self, context: Context) -> Float[Tensor, "batch act"]:
        return context


@dataclass(frozen=True)
class TwoStep:
    """Settings of `TwoStepEnergy`: E = ½‖y − ŷ(x)‖², with ŷ a regression and its refinement."""

    width: int = 256
    """Hidden units per layer."""
    hidden_layers: int = 2
    """Hidden layers."""
    level: float = 0.9
    """t: the share of the action in what the refinement starts from; the rest is noise in training."""
    init: Init = "torch"
    """'normal': weights and biases from N(0, 0.05²). 'torch': torch's default."""

    explicit: ClassVar[bool] = True
    refines: ClassVar[bool] = True

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> EnergyModel:
        """The energy, its weights drawn from `generator`."""
        sizes = (spec.obs_dim, spec.act_dim, self.width, self.hidden_layers)
        return TwoStepEnergy(*sizes, self.level, self.init, generator)


def _around(energy: EnergyModel, context: Context, actions: Actions) -> Energies:
    """½‖y − ŷ‖², least at the regression ŷ."""
    energy.check(context, actions)
    return 0.5 * (actions - context.unsqueeze(1)).square().sum(-1)
