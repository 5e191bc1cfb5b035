"""Energies E(x, y) of an action y under an observation x: low is likely, p(y|x) ∝ exp(-E(x, y)).

`encode(obs)` does the observation's work once; `energies` and `energies_and_gradients` then take many actions
per observation, which is what a chain needs. Here are the contract, any module or function as an energy, and sums of
energies; the library's own networks are in `networks`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

Obs = Float[Tensor, "batch *obs"]
Context = Float[Tensor, "batch features"]
Actions = Float[Tensor, "batch samples act"]
Energies = Float[Tensor, "batch samples"]


class EnergyModel(nn.Module, ABC):
    """The contract. Energies compose: `energy + other`, `0.5 * energy`, `energy + penalty_function`."""

    obs_dim: int
    act_dim: int
    context_dim: int

    @abstractmethod
    def encode(self, obs: Obs) -> Context:
        """The part of E(x, y) that depends on the observation alone, computed once per chain."""

    @abstractmethod
    def energies(self, context: Context, actions: Actions) -> Energies:
        """E(x, y) for every sampled action of every observation."""

    @abstractmethod
    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        """E(x, y) and ∇_y E(x, y), without dropout. Differentiable again while autograd is enabled."""

    def forward(self, obs: Obs, actions: Actions) -> Energies:
        return self.energies(self.encode(obs), actions)

    def check(self, context: Tensor, actions: Tensor) -> None:
        """ValueError naming the argument whose shape does not fit this energy."""
        if context.ndim != 2 or context.shape[1] != self.context_dim:
            raise ValueError(f"context must be [batch, {self.context_dim}], got {tuple(context.shape)}")
        if actions.ndim != 3 or actions.shape[2] != self.act_dim or actions.shape[0] != context.shape[0]:
            raise ValueError(
                f"actions must be [{context.shape[0]}, samples, {self.act_dim}], got {tuple(actions.shape)}"
            )
        if actions.shape[0] == 0 or actions.shape[1] == 0:
            raise ValueError(f"actions must not be empty, got {tuple(actions.shape)}")

    def check_obs(self, obs: Tensor) -> None:
        """ValueError where a flat observation does not fit this energy."""
        if obs.ndim != 2 or obs.shape[1] != self.obs_dim:
            raise ValueError(f"obs must be [batch, {self.obs_dim}], got {tuple(obs.shape)}")

    def __add__(self, other: "EnergyModel | PenaltyFunction") -> "WeightedSum":
        if not isinstance(other, EnergyModel):
            other = Penalty(other, self.obs_dim, self.act_dim)
        return WeightedSum([self, other], [1.0, 1.0])

    def __mul__(self, weight: float | int) -> "WeightedSum":
        return WeightedSum([self], [float(weight)])

    __rmul__ = __mul__


PenaltyFunction = Callable[[Tensor, Tensor], Tensor]


class ModuleEnergy(EnergyModel):
    """Adaptor for any module that maps rows (features, action) to an energy, low is likely; gradients by autograd.

    `encoder` turns observations (of any shape, images too) into `feature_dim` features, once per chain;
    without one, the observation itself is the feature vector.
    """

    def __init__(
        self,
        module: nn.Module,
        obs_dim: int,
        act_dim: int,
        encoder: nn.Module | None = None,
        feature_dim: int | None = None,
    ) -> None:
        super().__init__()
        if encoder is not None and feature_dim is None:
            raise ValueError("feature_dim must be given with an encoder")
        self.module, self.encoder = module, encoder
        self.obs_dim, self.act_dim = obs_dim, act_dim
        self.context_dim = obs_dim if feature_dim is None else feature_dim

    def encode(self, obs: Obs) -> Context:
        if self.encoder is None:
            self.check_obs(obs)
            return obs
        return self.encoder(obs)

    def energies(self, context: Context, actions: Actions) -> Energies:
        self.check(context, actions)
        rows = context.unsqueeze(1).expand(-1, actions.shape[1], -1)
        energies = self.module(rows.flatten(0, 1), actions.flatten(0, 1))
        if energies.numel() != actions.shape[0] * actions.shape[1]:
            rows_given = actions.shape[0] * actions.shape[1]
            raise ValueError(f"module must return one energy per row ({rows_given}), got {tuple(energies.shape)}")
        return energies.reshape(actions.shape[:2])

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        context = outside_inference(context)
        with evaluating(self.module):
            return autograd_gradients(lambda y: self.energies(context, y), actions)


class Penalty(EnergyModel):
    """A function of (obs [batch, obs], actions [batch, samples, act]) as an energy: an obstacle, a limit."""

    def __init__(self, function: PenaltyFunction, obs_dim: int, act_dim: int) -> None:
        super().__init__()
        self.function = function
        self.obs_dim, self.act_dim, self.context_dim = obs_dim, act_dim, obs_dim

    def encode(self, obs: Obs) -> Context:
        self.check_obs(obs)
        return obs

    def energies(self, context: Context, actions: Actions) -> Energies:
        self.check(context, actions)
        energies = self.function(context, actions)
        if energies.shape != actions.shape[:2]:
            raise ValueError(f"penalty must return {tuple(actions.shape[:2])} energies, got {tuple(energies.shape)}")
        return energies

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        context = outside_inference(context)
        return autograd_gradients(lambda y: self.energies(context, y), actions)


class WeightedSum(EnergyModel):
    """Σᵢ wᵢ Eᵢ(x, y); a product of experts in densities. Terms without an observation fit any."""

    weights: list[float]

    def __init__(self, terms: list[EnergyModel], weights: list[float]) -> None:
        super().__init__()
        flat: list[tuple[EnergyModel, float]] = []
        for term, weight in zip(terms, weights, strict=True):
            if isinstance(term, WeightedSum):
                flat += [(inner, weight * w) for inner, w in zip(term.parts(), term.weights, strict=True)]
            else:
                flat.append((term, weight))
        self.terms = nn.ModuleList(term for term, _ in flat)
        self.weights = [weight for _, weight in flat]
        if len({term.act_dim for term, _ in flat}) != 1:
            raise ValueError(f"energies of different act_dim do not add: {[term.act_dim for term, _ in flat]}")
        if len({term.obs_dim for term, _ in flat} - {0}) > 1:
            raise ValueError(f"energies of different obs_dim do not add: {[term.obs_dim for term, _ in flat]}")
        self.obs_dim = max(term.obs_dim for term, _ in flat)
        self.act_dim = flat[0][0].act_dim
        self.context_dim = sum(term.context_dim for term, _ in flat)

    def parts(self) -> Iterator[EnergyModel]:
        for term in self.terms:
            assert isinstance(term, EnergyModel)
            yield term

    def encode(self, obs: Obs) -> Context:
        return torch.cat([term.encode(obs) for term in self.parts()], 1)

    def energies(self, context: Context, actions: Actions) -> Energies:
        self.check(context, actions)
        return sum(
            (w * term.energies(part, actions) for w, term, part in self._split(context)),
            actions.new_zeros(actions.shape[:2]),
        )

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        self.check(context, actions)
        energies, gradients = actions.new_zeros(actions.shape[:2]), torch.zeros_like(actions)
        for weight, term, part in self._split(context):
            energy, gradient = term.energies_and_gradients(part, actions)
            energies, gradients = energies + weight * energy, gradients + weight * gradient
        return energies, gradients

    def _split(self, context: Context) -> Iterator[tuple[float, EnergyModel, Tensor]]:
        parts = context.split([term.context_dim for term in self.parts()], 1)
        return zip(self.weights, self.parts(), parts, strict=True)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout) for a while; every submodule gets its own mode back."""
    training = [submodule for submodule in module.modules() if submodule.training]
    try:
        for submodule in training:
            submodule.training = False
        yield
    finally:
        for submodule in training:
            submodule.training = True


def autograd_gradients(function: Callable[[Tensor], Tensor], actions: Actions) -> tuple[Energies, Actions]:
    """E and ∇E of any differentiable `function` of the actions, in inference mode too."""
    keep = torch.is_grad_enabled()
    actions = outside_inference(actions)
    with torch.inference_mode(False), torch.enable_grad():
        leaf = actions if keep and actions.requires_grad else actions.detach().requires_grad_()
        energies = function(leaf)
        if not energies.requires_grad:  # a constant
            return energies, torch.zeros_like(actions)
        result: tuple[Any, ...] = torch.autograd.grad(energies.sum(), leaf, create_graph=keep, materialize_grads=True)
    return (energies if keep else energies.detach()), result[0]


def outside_inference(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one made in inference mode: those cannot enter a graph."""
    with torch.inference_mode(False):
        return tensor.clone() if tensor.is_inference() else tensor
