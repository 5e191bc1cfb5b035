"""The explicit baselines: a mean (MSE) and a mixture density. Both are energies with a known normaliser, so that
they train, save, score and act through the same code as the implicit ones; only the search is not needed.
"""

import copy
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from math import atanh, exp, inf, log, pi
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cebm.energies.base import Actions, Context, Energies, EnergyModel, Level, Obs, described
from cebm.energies.feedforward import Init, Linear, linears, rectified
from cebm.randomness import draw_normal, draw_uniform
from cebm.spaces import Specification, traced

_MIDDLE, _REACH = -2.5, 4.5
"""log σ of a component: where it begins, and how far it gets from there."""


class Trunk(nn.Module):
    """obs → relu → … → relu → outputs, the explicit counterpart of the paper's MLP. Without hidden layers, linear."""

    def __init__(
        self, obs_dim: int, outputs: int, width: int, hidden_layers: int, init: Init, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        least = (("outputs", outputs, 1), ("width", width, 1), ("hidden_layers", hidden_layers, 0))
        for name, value, smallest in least:
            if value < smallest:
                raise ValueError(f"{name} must be at least {smallest}, got {value}")
        sizes = chain([obs_dim], repeat(width, hidden_layers), [outputs])  # no list: a damaged file may ask for 10⁹
        # The first and the last layer keep every digit of observations and of what is learned from them.
        self.layers = nn.ModuleList(
            Linear(i, o, init, generator=generator, hidden=0 < place < hidden_layers)
            for place, (i, o) in enumerate(pairwise(sizes))
        )
        self._at_hand = tuple(linears(self.layers))  # no search in the module at every call

    def forward(self, obs: Float[Tensor, "batch obs"]) -> Float[Tensor, "batch outputs"]:
        first, *others = self._at_hand
        return rectified(first.forward(obs), others)  # `forward`: a module's call takes as long as a small layer


class RegressionEnergy(EnergyModel):
    """E(x, y) = ½‖y − f(x)‖²: minimising its mean over the data is the MSE fit of f. The context is f(x)."""

    closed_form = True

    def __init__(
        self,
        obs_dim: int,
        act_dim: int,
        width: int = 256,
        hidden_layers: int = 2,
        init: Init = "torch",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.obs_dim, self.act_dim, self.context_dim = obs_dim, act_dim, act_dim
        self.trunk = Trunk(obs_dim, act_dim, width, hidden_layers, init, generator)

    def encode(self, obs: Obs) -> Context:
        self.check_obs(obs)
        return self.trunk(obs)

    def energies(self, context: Context, actions: Actions) -> Energies:
        self.check(context, actions)
        return 0.5 * (actions - context.unsqueeze(1)).square().sum(-1)

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        return self.energies(context, actions), actions - context.unsqueeze(1)

    def best(self, context: Context) -> Float[Tensor, "batch act"]:
        return context


class Mixture(NamedTuple):
    """A mixture of Gaussians for each observation. A chain asks for heights and precisions at every step, so they are
    computed once."""

    log_weights: Float[Tensor, "batch k"]
    """log w_k."""
    means: Float[Tensor, "batch k act"]
    """μ_k."""
    log_stds: Float[Tensor, "batch k act"]
    """log σ_k."""
    heights: Float[Tensor, "batch k"]
    """log w_k − Σ log σ_k − (d/2) log 2π."""
    precisions: Float[Tensor, "batch k act"]
    """1/σ_k²."""


class MixtureDensityEnergy(EnergyModel):
    """E(x, y) = −log Σ_k w_k(x) N(y; μ_k(x), diag σ_k(x)²), σ_k² = floor² + e^{2s_k}. The context is a `Mixture`.

    Weights and components have a network each. Which mode it is should be the weights' work: they have a hidden layer
    more, and the components a quarter of the width, beside a linear path from the observation to the means, as actions
    so often are a part of what is seen. (A strong network for the means takes two modes into one component and blends
    them where they meet; a shared trunk drowns the weights.) With `obs_dim` 0 it is a marginal p(y).
    """

    closed_form = True
    smoothable = True
    proposes_itself = True

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
        spread: float | None = None,
    ) -> None:
        super().__init__()
        if components < 1:
            raise ValueError(f"components must be at least 1, got {components}")
        if not 0 <= floor < inf:
            raise ValueError(f"floor must be at least 0 and finite, got {floor}")
        _check_spread(spread)
        self.components, self.floor = components, floor
        self.level: Level | None = None
        self.obs_dim, self.act_dim = obs_dim, act_dim
        quarter = max(1, width // 4) if width > 0 else width
        self.weighing = Trunk(obs_dim, components, width, hidden_layers + 1, init, generator)
        self.placing = Trunk(obs_dim, 2 * components * act_dim, quarter, hidden_layers, init, generator)
        self.linear = Linear(obs_dim, components * act_dim, init, generator=generator)
        if spread is not None:
            last = [*linears(self.placing.layers)][-1].bias
            with torch.no_grad():
                last[components * act_dim :] += _REACH * atanh((log(spread) - _MIDDLE) / _REACH)
        self._at_hand = (self.weighing, self.placing, self.linear)  # a module searches for its parts at every call

    def encode(self, obs: Obs) -> Context:
        if self.obs_dim == 0:
            obs = obs.new_empty(obs.shape[0], 0)
        self.check_obs(obs)
        weighing, placing, linear = self._at_hand
        means, log_stds = placing.forward(obs).chunk(2, 1)
        # σ stays in [e⁻⁷, e²]: a component that collapses onto one demonstration would make the loss unbounded.
        log_stds = _REACH * torch.tanh(log_stds / _REACH) + _MIDDLE
        if self.floor:
            log_stds = 0.5 * (2 * log_stds).exp().add(self.floor**2).log()
        log_weights = weighing.forward(obs).log_softmax(1)
        shape = (-1, self.components, self.act_dim)
        means, log_stds = (means + linear.forward(obs)).view(shape), log_stds.view(shape)
        heights = log_weights - log_stds.sum(-1) - 0.5 * self.act_dim * log(2 * pi)
        return Mixture(log_weights, means, log_stds, heights, (-2 * log_stds).exp())

    def at(self, level: Level) -> "MixtureDensityEnergy":
        """The density blurred by N(0, s²): every component's variance grows by s². It shares the weights, and its
        proposal is that of the density itself."""
        other = copy.copy(self)
        other.level = level
        return other

    def energies(self, context: Context, actions: Actions) -> Energies:
        return -self._parts(context, actions)[0].logsumexp(-1)

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        """∇E = Σ_k r_k (y − μ_k)/σ_k², with r_k the share of component k in the density at y."""
        parts, pull = self._parts(context, actions)
        return -parts.logsumexp(-1), _slopes(parts, pull)

    def gradients(self, context: Context, actions: Actions) -> Actions:
        return _slopes(*self._parts(context, actions))

    def best(self, context: Context) -> Float[Tensor, "batch act"]:
        """The component mean with the most probability around it: where the density, smoothed by N(0, 0.05²), is
        highest. (Unsmoothed, that would be the mean of the narrowest component, however light, as components narrow
        down to single demonstrations.)"""
        log_weights, means, log_stds, _, _ = context
        variances = (2 * log_stds).exp() + 0.05**2
        distances = (means.unsqueeze(2) - means.unsqueeze(1)).square() / variances.unsqueeze(1)
        heights = log_weights.unsqueeze(1) - 0.5 * (distances + variances.log().unsqueeze(1)).sum(-1)
        index = heights.logsumexp(2).argmax(1)
        return means.gather(1, index.view(-1, 1, 1).expand(-1, 1, self.act_dim))[:, 0]

    def propose(self, context: Context, n: int, generator: torch.Generator, shared: bool = False) -> Actions:
        """Draws of the mixture itself."""
        batch = context.means.shape[0]
        rows = 1 if shared else batch
        uniform = draw_uniform(generator, (rows, n), context.means)
        normal = draw_normal(generator, (rows, n, self.act_dim), context.means)
        if rows != batch:
            uniform, normal = uniform.expand(batch, -1), normal.expand(batch, -1, -1)
        return self.place(context, uniform, normal)

    def excess(self, context: Context, actions: Actions) -> Energies:
        """E + log q is 0: the proposal is the model."""
        self.check(context, actions)
        return actions.new_zeros(actions.shape[:2])

    def place(
        self, context: Context, uniform: Float[Tensor, "batch n"], normal: Float[Tensor, "batch n act"]
    ) -> Float[Tensor, "batch n act"]:
        """The draws that these numbers make: the component by inversion, then its mean and deviation."""
        log_weights, means, log_stds, _, _ = context
        # How many cumulated weights a number has reached. A search is quicker, but not every format of export knows it.
        steps = log_weights.exp().cumsum(1)
        if traced():
            reached = (steps.unsqueeze(1) <= uniform.unsqueeze(2)).sum(2)
        else:
            reached = torch.searchsorted(steps, uniform.contiguous(), right=True)
        component = reached.clamp_max(self.components - 1)
        index = component.unsqueeze(-1).expand(-1, -1, self.act_dim)
        return means.gather(1, index) + log_stds.exp().gather(1, index) * normal

    def _parts(
        self, context: Context, actions: Actions
    ) -> tuple[Float[Tensor, "batch samples k"], Float[Tensor, "batch samples k act"]]:
        """log w_k N(y; μ_k, σ_k²), and (y − μ_k)/σ_k²."""
        self.check(context, actions)
        log_weights, means, log_stds, heights, precisions = context
        away = actions.unsqueeze(2) - means.unsqueeze(1)
        if self.level is None:
            pull = away * precisions.unsqueeze(1)
            return heights.unsqueeze(1) - 0.5 * (away * pull).sum(-1), pull
        blur = torch.as_tensor(self.level, dtype=actions.dtype, device=actions.device)
        blur = blur[..., None, None] if blur.ndim else blur
        variances = (2 * log_stds).exp().unsqueeze(1) + blur.square()
        pull = away / variances
        logs = (variances.log() + log(2 * pi)).sum(-1) + (away * pull).sum(-1)
        return log_weights.unsqueeze(1) - 0.5 * logs, pull

    def check(self, context: Context, actions: Tensor) -> None:
        if not isinstance(context, Mixture) or context.means.shape[1:] != (self.components, self.act_dim):
            size = f"{self.components} components in {self.act_dim} dimensions"
            raise ValueError(f"context must be a Mixture of {size}, got {described(context)}")
        self.check_actions(context.means.shape[0], actions)


def _check_spread(spread: float | None) -> None:
    low, high = exp(_MIDDLE - _REACH), exp(_MIDDLE + _REACH)
    if spread is not None and not low < spread < high:
        raise ValueError(f"spread must be between {low:.1e} and {high:.2g}, as deviations always are, got {spread}")


def _slopes(
    parts: Float[Tensor, "batch samples k"], pull: Float[Tensor, "batch samples k act"]
) -> Float[Tensor, "batch samples act"]:
    return (parts.softmax(-1).unsqueeze(-1) * pull).sum(2)


@dataclass(frozen=True)
class Regression:
    """Settings of `RegressionEnergy`, the MSE baseline: E = ½‖y − f(x)‖²."""

    width: int = 256
    """Hidden units per layer."""
    hidden_layers: int = 2
    """Hidden layers."""
    init: Init = "torch"
    """'normal': weights and biases from N(0, 0.05²). 'torch': torch's default."""

    explicit: ClassVar[bool] = True

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> EnergyModel:
        """The energy, its weights drawn from `generator`."""
        return RegressionEnergy(spec.obs_dim, spec.act_dim, self.width, self.hidden_layers, self.init, generator)


@dataclass(frozen=True)
class MixtureDensity:
    """Settings of `MixtureDensityEnergy`: E = −log Σₖ wₖ N(y; μₖ, diag σₖ²), all of them functions of x."""

    width: int = 256
    """Hidden units per layer of the weights' network."""
    hidden_layers: int = 2
    """Hidden layers of the components' network; the weights' has one more."""
    components: int = 8
    """Gaussians in the mixture."""
    init: Init = "torch"
    """'normal': weights and biases from N(0, 0.05²). 'torch': torch's default."""
    floor: float | None = None
    """Smallest deviation of a component, normalised units. None: the smoothing of the inputs."""
    spread: float | None = None
    """Deviation of the components before training, normalised units. None: 0.08, far less than the distance of two
    modes; in many dimensions one narrow component then takes all data, and the others learn late. 0.5 avoids that."""

    explicit: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_spread(self.spread)

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> EnergyModel:
        """The energy, its weights drawn from `generator`."""
        sizes = (spec.obs_dim, spec.act_dim, self.width, self.hidden_layers, self.components)
        floor = spec.smoothing if self.floor is None else self.floor
        return MixtureDensityEnergy(*sizes, floor, self.init, generator, self.spread)
