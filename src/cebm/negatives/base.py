"""The contract of a source of negatives, and what all sources share."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from cebm.composition import walk
from cebm.energies.base import Actions, Energies, EnergyModel, Obs
from cebm.samplers import Sampler, StepInfo
from cebm.spaces import check_finite, margin_limit

Positives = Float[Tensor, "batch act"]


@dataclass(frozen=True)
class Negatives:
    """Negative actions for a batch, constants to autograd unless their source keeps the graph of its chains, and the
    density they were drawn from where it is known."""

    actions: Actions
    """The negative actions ỹ."""
    obs: Obs
    """Their observations: the batch's own, or one per sample where pairs (x̃, ỹ) are drawn (replay of a joint)."""
    log_q: Energies | None = None
    """log q(ỹ), None where it is not tractable."""
    log_q_positive: Float[Tensor, " batch"] | None = None
    """log q of the demonstrated action."""
    info: StepInfo | None = None
    """Energies, gradients and acceptance along the chain, where one was run."""


@runtime_checkable
class Source(Protocol):
    """The contract of a source of negatives: one method. A source may have three more attributes.

    `distribution` says what the negatives are drawn from: 'proposal' (that of the energy) or 'marginal' (p(y)). A
    `Tilted` energy asks for it. With `log_prob` the source is a `Density`. A source with weights of its own gives
    their losses as `own_losses(actions, negatives)`, by the name to log them under.
    """

    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        """`n` negatives for each of the batch's pairs (obs, actions)."""
        ...


@runtime_checkable
class Density(Protocol):
    """A source whose density is known."""

    def log_prob(self, positives: Positives, actions: Actions) -> Energies:
        """log q(actions), for the q that belongs to each positive."""
        ...


def has_density(source: Any) -> bool:
    """Whether a source knows the log density of its negatives."""
    return bool(getattr(source, "known_density", isinstance(source, Density)))


def own_losses(source: Any, actions: Positives, negatives: Actions) -> dict[str, Tensor]:
    """The losses of a source's own weights; an empty dict for a source without weights."""
    function = getattr(source, "own_losses", None)
    return {} if function is None else function(actions, negatives)


def check_sampler(source: Any) -> None:
    sampler = source.sampler
    if isinstance(sampler, type) or not isinstance(sampler, Sampler):
        given = f"the class {sampler.__name__}" if isinstance(sampler, type) else repr(sampler)
        raise ValueError(f"{type(source).__name__}: sampler must be an object with steps, init and step, got {given}")


def check_start(source: Any) -> None:
    """Chains do not train what they start from, so a source that learns cannot be a start."""
    for _, piece in walk(source.start):
        if getattr(piece, "learns", False):
            name, start = type(source).__name__, type(piece).__name__
            raise ValueError(f"{name} does not train its start: {start}, which learns, must be the source itself")


def uniform_in_box(shape: tuple[int, ...], margin: float, like: Tensor, generator: torch.Generator) -> Tensor:
    unit = torch.rand(shape, generator=generator, dtype=like.dtype, device=like.device)
    return (2 * unit - 1) * margin_limit(margin)


def check_pairs(obs: Tensor, actions: Tensor, n: int) -> None:
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    check_positives(actions)
    if obs.shape[0] != actions.shape[0]:
        raise ValueError(f"obs must have {actions.shape[0]} rows like actions, got {tuple(obs.shape)}")
    check_finite(obs, "obs")


def check_positives(actions: Tensor) -> None:
    if actions.ndim != 2 or not actions.shape[0]:
        raise ValueError(f"actions must be a non-empty [batch, act] tensor, got {tuple(actions.shape)}")
    check_finite(actions, "actions")
