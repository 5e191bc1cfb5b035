"""The contract of a constraint on actions: how far beyond what is allowed is each candidate?

A constraint is given to a trained policy (`policy.with_constraint`), and knows raw actions: those in the user's units,
all steps of a chunk. As a hard one it rejects, with a weight it is an energy that is added to the policy's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cebm.units import Units

Excess = Float[Tensor, "batch samples"]


@dataclass(frozen=True)
class Scene:
    """Candidates and what there is to know about their situation, all in the user's units."""

    actions: Float[Tensor, "batch samples horizon act"]
    """Candidates: chunks of `horizon` actions, the current one first."""
    obs: Float[Tensor, "batch obs"]
    """Observations, of a policy with a history the oldest first."""
    units: Units
    """Knows which columns are angles, whose differences go the short way round."""
    last: Float[Tensor, "batch act"] | None = None
    """The last action that was played; None at the start of an episode."""
    plan: Float[Tensor, "batch horizon act"] | None = None
    """What the last chunk had in mind for the steps of this one; None at the start of an episode."""

    def difference(self, one: Tensor, other: Tensor) -> Tensor:
        """one − other of actions [..., act], of angles the short way round."""
        return self.units.conversion.action.difference(*torch.broadcast_tensors(one, other))

    def of(self, actions: Float[Tensor, "batch samples horizon act"]) -> "Scene":
        """The same situation with other candidates."""
        return replace(self, actions=actions)


@runtime_checkable
class Constraint(Protocol):
    """The contract. A constraint that can move an action to the nearest allowed one has a method `nearest(scene)` that
    gives actions [batch, samples, horizon, act], and one with an energy of its own has `energy(scene)`."""

    def excess(self, scene: Scene) -> Excess:
        """How far a chunk is beyond what is allowed: at most 0 where it is allowed. NaN counts as not allowed."""
        ...


@dataclass(frozen=True)
class Predicate:
    """A function of the scene says which candidates [batch, samples] are allowed."""

    function: Callable[[Scene], Bool[Tensor, "batch samples"]]
    """True where a candidate is allowed."""

    def excess(self, scene: Scene) -> Excess:
        allowed = self.function(scene)
        wanted = tuple(scene.actions.shape[:2])
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool or tuple(allowed.shape) != wanted:
            raise ValueError(f"a constraint's function must return booleans {wanted}, one per candidate")
        return (~allowed).to(scene.actions.dtype)


@dataclass(frozen=True)
class EnergyFunction:
    """A function of the scene gives energies [batch, samples], to be added with a weight."""

    function: Callable[[Scene], Float[Tensor, "batch samples"]]
    """Low is preferred."""

    def excess(self, scene: Scene) -> Excess:
        return self.energy(scene)

    def energy(self, scene: Scene) -> Excess:
        """What the function gives, its shape checked."""
        energies = self.function(scene)
        wanted = tuple(scene.actions.shape[:2])
        if not isinstance(energies, Tensor) or tuple(energies.shape) != wanted:
            raise ValueError(f"an energy of actions must return numbers {wanted}, one per candidate")
        return energies.to(scene.actions.dtype)


@dataclass(frozen=True)
class Weighted:
    """A constraint as an energy: weight · its own energy, or weight · max(0, excess)²."""

    constraint: Constraint
    """What is weighed."""
    weight: float
    """Nats per squared unit of the excess, or per unit of the constraint's own energy."""

    def __post_init__(self) -> None:
        if not 0 <= self.weight < inf:
            raise ValueError(f"weight must be at least 0 and finite, got {self.weight}")

    def energy(self, scene: Scene) -> Excess:
        """The energy to add; NaN, which says nothing, counts as infinite."""
        own = getattr(self.constraint, "energy", None)
        energies = self.constraint.excess(scene).clamp_min(0).square() if own is None else own(scene)
        return (self.weight * energies).nan_to_num(inf, inf, -inf)


def allowed(constraints: tuple[Constraint, ...], scene: Scene) -> Bool[Tensor, "batch samples"]:
    """Candidates that satisfy every one of the constraints, and are finite."""
    good = scene.actions.isfinite().all(-1).all(-1)
    for constraint in constraints:
        excess = constraint.excess(scene)
        if excess.shape != good.shape:
            name, wanted = type(constraint).__name__, tuple(good.shape)
            raise ValueError(f"{name}.excess must return {wanted}, got {tuple(excess.shape)}")
        good = good & (excess <= 0)
    return good
