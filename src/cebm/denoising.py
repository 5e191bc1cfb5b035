"""Objectives for energies with noise levels, and sums of objectives.

`DenoisingScore` learns the slope of the energy at every level, and `LevelContrast` its ranking of whole actions at some
levels. `Sum` adds objectives.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cebm.composition import built
from cebm.energies.base import EnergyModel, Obs
from cebm.losses import info_nce
from cebm.negatives import InBatch, Negatives, Positives, own_losses
from cebm.objectives import Objective, Terms
from cebm.randomness import draw_normal, draw_uniform
from cebm.spaces import Specification


@dataclass(frozen=True)
class DenoisingScore:
    """L = mean |(D_s(y) − y₀)/c|² with D_s(y) = y − s²∇E_s(y), y = y₀ + sε and c = sd/√(s² + d²): the energy's
    denoiser gives back the demonstrated action (denoising score matching, Vincent 2011; scaled as in Karras et al.
    2022). Levels are drawn by log(s/d) ~ N(mean, spread²). Its minimum is ∇E_s = −∇log p_s, with p_s = p ∗ N(0, s²).
    """

    draws: int = 4
    """Levels per observation, which is encoded once. They are stratified: one from each n-th of their distribution."""
    mean: float = -0.5
    """Mean of log(s/d). Karras et al. have log s ~ N(−1.2, 1.2²) for d = 0.5, which is the same."""
    spread: float = 1.2
    """Standard deviation of log(s/d)."""

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise ValueError(f"draws must be at least 1, got {self.draws}")
        if not -inf < self.mean < inf:
            raise ValueError(f"mean must be finite, got {self.mean}")
        if not 0 < self.spread < inf:
            raise ValueError(f"spread must be positive and finite, got {self.spread}")

    def terms(self, energy: EnergyModel, obs: Obs, actions: Positives, generator: torch.Generator) -> Terms:
        levels = self._levels(energy, actions, generator)
        s, d = levels.unsqueeze(-1), energy.deviation
        clean = actions.unsqueeze(1)
        noisy = clean + s * draw_normal(generator, (len(actions), self.draws, actions.shape[1]), actions)
        _, slopes = energy.at(levels).energies_and_gradients(energy.encode(obs), noisy)
        errors = (noisy - clean) / s - s * slopes
        weights = (s.square() + d**2) / d**2  # s²/c²
        loss = (weights * errors.square()).mean()
        return Terms(loss, log={"denoising_loss": loss})

    def _levels(
        self, energy: EnergyModel, actions: Positives, generator: torch.Generator
    ) -> Float[Tensor, "batch draws"]:
        """One from each of `draws` equally likely parts."""
        share = torch.arange(self.draws, dtype=actions.dtype, device=actions.device)
        share = (share + draw_uniform(generator, (len(actions), self.draws), actions)) / self.draws
        place = torch.special.ndtri(share.clamp(1e-6, 1 - 1e-6))
        return energy.deviation * torch.exp(self.mean + self.spread * place)


@dataclass(frozen=True)
class LevelContrast:
    """InfoNCE at noise levels: positives and negatives are blurred to the same level s, and L is the mean over levels
    of −log(e^{−E_s⁺} / (e^{−E_s⁺} + Σ e^{−E_s⁻})). Its minimum is E_s = −log p_s/q_s, with q_s the blurred density of
    the negatives: with negatives from p itself an energy that no longer tells them apart. It trains `contrasted`, the
    part of the energy that is there to be contrasted, or all of it."""

    source: Any = InBatch()
    """Where negatives come from."""
    count: int = 7
    """Negatives per example."""
    levels: tuple[float, ...] = (0.2,)
    """Levels s, in units of the energy's deviation d."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be at least 1, got {self.count}")
        if not self.levels or not all(0 < level < inf for level in self.levels):
            raise ValueError(f"levels must be positive numbers, got {self.levels}")
        if isinstance(self.source, type) or not (hasattr(self.source, "sample") or hasattr(self.source, "build")):
            raise ValueError(f"source must be an object with a method `sample` or `build`, got {self.source!r}")

    def terms(self, energy: EnergyModel, obs: Obs, actions: Positives, generator: torch.Generator) -> Terms:
        drawn: Negatives = self.source.sample(energy, obs, actions, self.count, generator)
        if drawn.obs.ndim > obs.ndim:
            raise ValueError(f"LevelContrast needs actions, and {type(self.source).__name__} draws pairs (x, y)")
        each = torch.cat([actions.unsqueeze(1), drawn.actions], 1)
        count = each.shape[1]
        levels = actions.new_tensor(self.levels).mul_(energy.deviation).repeat_interleave(count).unsqueeze(0)
        clean = each.repeat(1, len(self.levels), 1)
        noisy = clean + levels.unsqueeze(-1) * draw_normal(generator, clean.shape, actions)
        target = energy.contrasted
        energies = target.at(levels).energies(target.encode(obs), noisy).unflatten(1, (-1, count))
        positive, negative = energies[..., 0], energies[..., 1:]
        loss = info_nce(positive.flatten(), negative.flatten(0, 1))
        return Terms(
            loss,
            positive[:, 0],
            negative[:, 0],
            drawn,
            own_losses(self.source, actions, drawn.actions),
            {"contrast_loss": loss},
        )


# ---------------------------------------------------------------------------------------------- sums


class _Turns(nn.Module):
    """Counts the steps of a training, with the state on disk. It reads the counter's tensor only when that is loaded,
    since a look at a tensor waits for the accelerator."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self._known: int | None = 0
        self.register_load_state_dict_post_hook(lambda module, _: module.forget())

    def forget(self) -> None:
        """The tensor was loaded: it is looked at again."""
        self._known = None

    def next(self) -> int:
        """The number of this step, from 0."""
        step = int(self.steps) if self._known is None else self._known
        self._known = step + 1
        self.steps.add_(1)
        return step


@dataclass(frozen=True)
class Sum:
    """L = Σᵢ wᵢ Lᵢ, where objective i is taken in every kᵢ-th step only, and then with its whole weight.

    Of the parts' terms the first energies and negatives that there are serve the log and penalties."""

    parts: tuple[Any, ...] = (DenoisingScore(), LevelContrast())
    """The objectives."""
    weights: tuple[float, ...] = (1.0, 0.1)
    """The weight wᵢ of each."""
    every: tuple[int, ...] = (1, 4)
    """kᵢ of each: 1 takes it in every step."""

    def __post_init__(self) -> None:
        if not self.parts or not len(self.parts) == len(self.weights) == len(self.every):
            raise ValueError(
                f"weights and every need one entry per objective, got {len(self.parts)} objectives, "
                f"{len(self.weights)} weights and {len(self.every)} in every"
            )
        for part in self.parts:
            if isinstance(part, type) or not (hasattr(part, "terms") or hasattr(part, "build")):
                raise ValueError(f"parts must be objects with a method `terms`, got {part!r}")
        if not all(0 <= weight < inf for weight in self.weights):
            raise ValueError(f"weights must be at least 0 and finite, got {self.weights}")
        if not all(isinstance(k, int) and k >= 1 for k in self.every):
            raise ValueError(f"every must be integers of at least 1, got {self.every}")

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> "SumInTurns":
        """The parts built, with a counter of steps."""
        parts = tuple(built(part, spec, generator) for part in self.parts)
        return SumInTurns(parts, self.weights, self.every, _Turns())


@dataclass(frozen=True)
class SumInTurns:
    """A `Sum` that is being trained with."""

    parts: tuple[Objective, ...]
    """The objectives, built."""
    weights: tuple[float, ...]
    """The weight of each."""
    every: tuple[int, ...]
    """In which steps each is taken."""
    turns: _Turns
    """Counts the steps, and is saved with the training."""

    def terms(self, energy: EnergyModel, obs: Obs, actions: Positives, generator: torch.Generator) -> Terms:
        step = self.turns.next()
        total, found = actions.new_zeros(()), Terms(actions.new_zeros(()))
        for part, weight, every in zip(self.parts, self.weights, self.every, strict=True):
            if step % every != every - 1:
                continue
            new = part.terms(energy, obs, actions, generator)
            total = total + weight * new.loss
            first = found if found.positive is not None else new
            found = Terms(total, first.positive, first.negative, first.drawn, found.own | new.own, found.log | new.log)
        return replace(found, loss=total)
