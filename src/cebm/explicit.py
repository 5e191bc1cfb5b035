"""The explicit baselines: a mean (MSE) and a mixture density. Both are energies with a known normaliser, so that
they train, save, score and act through the same code as the implicit ones; only the search is not needed."""

from abc import abstractmethod
from itertools import pairwise
from math import log, pi

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from cebm.energy import Actions, Context, Energies, EnergyModel, Init, Linear, Obs, autograd_gradients


class ExplicitEnergy(EnergyModel):
    """Abstract: an energy −log p(y|x) whose best action and samples are known without a search."""

    @abstractmethod
    def best(self, context: Context) -> Float[Tensor, "batch act"]:
        """The action of lowest energy, or what the baseline takes for it."""

    @abstractmethod
    def draw(self, context: Context, n: int, generator: torch.Generator) -> Actions:
        """`n` actions from p(y|x)."""


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
        sizes = [obs_dim, *[width] * hidden_layers, outputs]
        self.layers = nn.ModuleList(Linear(i, o, init, generator=generator) for i, o in pairwise(sizes))

    def forward(self, obs: Float[Tensor, "batch obs"]) -> Float[Tensor, "batch outputs"]:
        for layer in self.layers[:-1]:
            obs = F.relu(layer(obs))
        return self.layers[-1](obs)


class RegressionEnergy(ExplicitEnergy):
    """E(x, y) = ½‖y − f(x)‖²: minimising its mean over the data is the MSE fit of f. The context is f(x)."""

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

    def draw(self, context: Context, n: int, generator: torch.Generator) -> Actions:
        """The one action it knows, `n` times: a mean has no alternatives."""
        return context.unsqueeze(1).expand(-1, n, -1).clone()


class MixtureDensityEnergy(ExplicitEnergy):
    """E(x, y) = −log Σ_k w_k(x) N(y; μ_k(x), diag σ_k(x)²). The context is (log w, μ, log σ)."""

    def __init__(
        self,
        obs_dim: int,
        act_dim: int,
        width: int = 256,
        hidden_layers: int = 2,
        components: int = 8,
        init: Init = "torch",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if components < 1:
            raise ValueError(f"components must be at least 1, got {components}")
        self.components = components
        self.obs_dim, self.act_dim = obs_dim, act_dim
        self.context_dim = components * (1 + 2 * act_dim)
        self.trunk = Trunk(obs_dim, self.context_dim, width, hidden_layers, init, generator)

    def encode(self, obs: Obs) -> Context:
        self.check_obs(obs)
        return self.trunk(obs)

    def energies(self, context: Context, actions: Actions) -> Energies:
        self.check(context, actions)
        log_weights, means, log_stds = self._mixture(context)
        scaled = (actions.unsqueeze(2) - means.unsqueeze(1)) * (-log_stds).exp().unsqueeze(1)
        normaliser = log_stds.sum(-1) + 0.5 * self.act_dim * log(2 * pi)
        parts = -0.5 * scaled.square().sum(-1) + (log_weights - normaliser).unsqueeze(1)
        return -parts.logsumexp(-1)

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        return autograd_gradients(lambda y: self.energies(context, y), actions)

    def best(self, context: Context) -> Float[Tensor, "batch act"]:
        """The component mean with the most probability around it: where the density, smoothed by N(0, 0.05²), is
        highest. (Unsmoothed, that would be the mean of the narrowest component, however light, as components narrow
        down to single demonstrations.)"""
        log_weights, means, log_stds = self._mixture(context)
        variances = (2 * log_stds).exp() + 0.05**2
        distances = (means.unsqueeze(2) - means.unsqueeze(1)).square() / variances.unsqueeze(1)
        heights = log_weights.unsqueeze(1) - 0.5 * (distances + variances.log().unsqueeze(1)).sum(-1)
        index = heights.logsumexp(2).argmax(1)
        return means[torch.arange(len(means), device=means.device), index]

    def draw(self, context: Context, n: int, generator: torch.Generator) -> Actions:
        log_weights, means, log_stds = self._mixture(context)
        component = torch.multinomial(log_weights.exp(), n, replacement=True, generator=generator)
        index = component.unsqueeze(-1).expand(-1, -1, self.act_dim)
        noise = torch.randn(index.shape, generator=generator, dtype=means.dtype, device=means.device)
        return means.gather(1, index) + log_stds.exp().gather(1, index) * noise

    def _mixture(self, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        k, act = self.components, self.act_dim
        logits, means, log_stds = context.split([k, k * act, k * act], 1)
        # σ stays in [e⁻⁷, e²]: a component that collapses onto one demonstration would make the loss unbounded.
        log_stds = 4.5 * torch.tanh(log_stds / 4.5) - 2.5
        return logits.log_softmax(1), means.view(-1, k, act), log_stds.view(-1, k, act)
