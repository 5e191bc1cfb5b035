"""Langevin chains: unadjusted in two formulations, and Metropolis-adjusted."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, sqrt
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel
from cebm.randomness import draw_normal, draw_uniform
from cebm.samplers.contract import (
    Constant,
    Exponential,
    Polynomial,
    Schedule,
    StepInfo,
    check_steps,
    gradient_norm,
    positive,
    size_at,
)
from cebm.spaces import StepConvention, margin_limit, step_limit


class LangevinState(NamedTuple):
    """State of Langevin chains: the actions alone."""

    actions: Actions


@dataclass(frozen=True)
class Langevin:
    """Unadjusted Langevin, in two formulations.

    correct: y' = y − τ∇E + √(2τ) ω, ω ~ N(0, I) (eq. langevin-correct-impl). No accept step, so the variance is
    biased by O(τ). ibc: y' = y − (λ/2)∇E + λσ ω (eq. langevin-ibc): the noise is scaled by λ instead of √λ, so it
    does not sample exp(-E) but comes close to gradient descent as λ falls; σ is a standard deviation.
    Each step is clipped per coordinate, then the result to the box with its margin, in this order.
    """

    differentiable: ClassVar[bool] = True

    formulation: Literal["correct", "ibc"] = "correct"
    """How the step size scales the noise."""
    steps: int = 10
    """Number of sampler steps per chain."""
    schedule: Constant | Polynomial | Exponential | Schedule = Polynomial()
    """Step size of step k: τ for 'correct', λ for 'ibc'."""
    noise: float = 1.0
    """σ of the ibc formulation: 0.1 in the paper's training, 0.01 when acting. 'correct' admits only 1."""
    step_clip: float | None = 0.25
    """Largest move of a coordinate in one step, as a fraction of the action range. None: no limit."""
    clip_convention: StepConvention = "range"
    """Whether `step_clip` counts the range [-1, 1] (the paper) or half of it (the reference code)."""
    margin: float | None = 0.05
    """Chains stay in the box [-1, 1] grown by this fraction of the range on both ends. None: unbounded."""

    def __post_init__(self) -> None:
        if self.formulation not in ("correct", "ibc"):
            raise ValueError(f"formulation must be 'correct' or 'ibc', got {self.formulation!r}")
        check_steps(self.steps)
        if not 0 <= self.noise < inf:
            raise ValueError(f"noise must be at least 0 and finite, got {self.noise}")
        if self.formulation == "correct" and self.noise != 1.0:
            raise ValueError("noise is the σ of the ibc formulation; the correct one has none, leave it at 1")
        if self.step_clip is not None:
            step_limit(self.step_clip, self.clip_convention)
        if self.margin is not None:
            margin_limit(self.margin)

    def init(self, energy: EnergyModel, context: Context, start: Actions, generator: torch.Generator) -> LangevinState:
        return LangevinState(start)

    def step(
        self, energy: EnergyModel, context: Context, state: LangevinState, k: int, generator: torch.Generator
    ) -> tuple[LangevinState, StepInfo]:
        energies, gradients = energy.energies_and_gradients(context, state.actions)
        move = self._wanted(gradients, k, generator)
        actions = self._clip(state.actions, move)
        clipped = (actions != state.actions + move).to(actions.dtype).mean()
        return LangevinState(actions), StepInfo.of(energies, gradients, clipped)

    def move(
        self, energy: EnergyModel, context: Context, state: LangevinState, k: int, generator: torch.Generator
    ) -> LangevinState:
        """The next state alone, without what `step` says about it."""
        gradients = energy.gradients(context, state.actions)
        return LangevinState(self._clip(state.actions, self._wanted(gradients, k, generator)))

    def small_steps(self, size: float) -> "Langevin":
        """The same chain with moves of at most `size` per coordinate."""
        return replace(self, step_clip=size / 2, clip_convention="range")

    def _wanted(self, gradients: Actions, k: int, generator: torch.Generator) -> Actions:
        """The move of step k before it is clipped."""
        size = size_at(self.schedule, k, self.steps)
        scale = sqrt(2 * size) if self.formulation == "correct" else size * self.noise
        move = gradients * (-size if self.formulation == "correct" else -0.5 * size)
        return move + scale * draw_normal(generator, gradients.shape, gradients) if scale else move

    def _clip(self, actions: Actions, move: Actions) -> Actions:
        longest, limit = self._limits
        if longest is not None:
            move = move.clamp(-longest, longest)
        result = actions + move
        return result if limit is None else result.clamp(-limit, limit)

    @cached_property
    def _limits(self) -> tuple[float | None, float | None]:
        """The largest move of a coordinate, and the half-width of the box."""
        longest = None if self.step_clip is None else step_limit(self.step_clip, self.clip_convention)
        return longest, None if self.margin is None else margin_limit(self.margin)


class MALAState(NamedTuple):
    """State of Metropolis chains, with what the next accept step needs."""

    actions: Actions
    energies: Energies
    gradients: Actions
    log_step: Float[Tensor, "batch 1 1"]


@dataclass(frozen=True)
class MALA:
    """Metropolis-adjusted Langevin: proposes y' = y − τ∇E(y) + √(2τ) ω and takes it with probability
    min(1, exp(E(y) − E(y')) q(y|y')/q(y'|y)), q(y'|y) = N(y'; y − τ∇E(y), 2τ). Samples exp(-E) exactly in the
    long run; restricted to the box where there is a margin (proposals outside are refused, not clipped).

    For the first `adapt` steps log τ follows the acceptance (Robbins–Monro), per observation; then it stays.
    """

    steps: int = 100
    """Number of sampler steps per chain."""
    step_size: float = 0.01
    """Step size τ of the first step."""
    adapt: int = 50
    """Steps during which τ adapts. Draw samples from the states after them."""
    target: float = 0.574
    """Acceptance to adapt to; 0.574 is optimal for many independent dimensions (Roberts & Rosenthal 1998)."""
    margin: float | None = 0.05
    """The support: the box [-1, 1] grown by this fraction of the range on both ends. None: unbounded."""

    def __post_init__(self) -> None:
        check_steps(self.steps)
        positive("step_size", self.step_size)
        if self.adapt < 0:
            raise ValueError(f"adapt must be at least 0, got {self.adapt}")
        if not 0 < self.target < 1:
            raise ValueError(f"target must be in (0, 1), got {self.target}")
        if self.margin is not None:
            margin_limit(self.margin)

    def init(self, energy: EnergyModel, context: Context, start: Actions, generator: torch.Generator) -> MALAState:
        if self.margin is not None:
            start = start.clamp(-margin_limit(self.margin), margin_limit(self.margin))
        energies, gradients = energy.energies_and_gradients(context, start)
        log_step = start.new_full((start.shape[0], 1, 1), self.step_size).log()
        return MALAState(start, energies, gradients, log_step)

    def small_steps(self, size: float) -> "MALA":
        """The same chain with noise of at most `size` per step; τ does not adapt."""
        return replace(self, step_size=min(self.step_size, size**2 / 2), adapt=0)

    def step(
        self, energy: EnergyModel, context: Context, state: MALAState, k: int, generator: torch.Generator
    ) -> tuple[MALAState, StepInfo]:
        step = state.log_step.exp()
        noise = draw_normal(generator, state.actions.shape, state.actions)
        proposal = state.actions - step * state.gradients + (2 * step).sqrt() * noise
        energies, gradients = energy.energies_and_gradients(context, proposal)
        # log q(y'|y) = −‖ω‖²/2 up to the constant that both directions share.
        backwards = (state.actions - proposal + step * gradients) / (2 * step).sqrt()
        log_ratio = state.energies - energies + 0.5 * (noise.square().sum(-1) - backwards.square().sum(-1))
        outside = torch.zeros_like(energies, dtype=torch.bool)
        if self.margin is not None:
            outside = (proposal.abs() > margin_limit(self.margin)).any(-1)
        # A proposal whose energy is NaN is refused too.
        probability = torch.where(outside | log_ratio.isnan(), 0.0, log_ratio.clamp(max=0).exp())
        taken = draw_uniform(generator, probability.shape, probability) < probability
        log_step = state.log_step
        if k < self.adapt:
            # Robbins–Monro: the gains add up to infinity, so any τ is reached; their squares do not, so it settles.
            gain = (k + 1) ** -0.6
            log_step = log_step + gain * (probability.mean(1).view(-1, 1, 1) - self.target)
        info = StepInfo(
            state.energies.mean(),
            gradient_norm(state.gradients),
            outside.to(energies.dtype).mean(),
            taken.to(energies.dtype).mean(),
        )
        moved = taken.unsqueeze(-1)
        return (
            MALAState(
                torch.where(moved, proposal, state.actions),
                torch.where(taken, energies, state.energies),
                torch.where(moved, gradients, state.gradients),
                log_step,
            ),
            info,
        )
