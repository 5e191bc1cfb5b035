"""Hamiltonian Monte Carlo that tunes its step size, its mass and the length of its trajectories."""

from dataclasses import dataclass, replace
from math import log
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel
from cebm.samplers.contract import StepInfo, check_steps, gradient_norm, normal_like, positive
from cebm.spaces import margin_limit

_DIVERGED = 1000.0
"""A trajectory whose energy rises by more than this has diverged (Stan's limit)."""
_COST = 1.0
"""Power of the number of gradients that the criterion of the length is divided by."""
_WINDOWS = (0.1, 0.25, 0.5)
"""Shares of the adaptation after which the mass follows the variance seen since the last of them."""


class Tuning(NamedTuple):
    """What the adaptation has found so far, per observation."""

    log_step: Float[Tensor, "batch 1 1"]
    """Log of the leapfrog step ε, in units of `scale`."""
    scale: Float[Tensor, "batch 1 act"]
    """Deviation of each coordinate: one over the root of its mass."""
    log_leapfrogs: Float[Tensor, "batch 1 1"]
    """Log of the mean number of leapfrog steps."""
    seen: Float[Tensor, ""]
    """States seen per observation since the last change of the mass."""
    mean: Float[Tensor, "batch 1 act"]
    """Their mean."""
    squares: Float[Tensor, "batch 1 act"]
    """Sum of their squared distances to the mean."""
    slope: Float[Tensor, " batch"]
    """Running mean of the criterion's derivative by the log of the length."""
    value: Float[Tensor, " batch"]
    """Running mean of the criterion."""


class HMCState(NamedTuple):
    """State of Hamiltonian chains."""

    actions: Actions
    energies: Energies
    gradients: Actions
    tuning: Tuning


class _Proposal(NamedTuple):
    """Where a trajectory ended."""

    actions: Actions
    momentum: Actions
    leapfrogs: Int[Tensor, "batch 1 1"]
    divergent: Bool[Tensor, "batch samples"]
    taken: Bool[Tensor, "batch samples"]


@dataclass(frozen=True)
class HMC:
    """Hamiltonian Monte Carlo: a momentum r ~ N(0, I) is drawn, H = E(y) + ‖r‖²/2 is followed by L leapfrog steps of
    size ε·s (s: the deviation of each coordinate), and the end is taken with probability min(1, exp(H − H')). L is
    uniform on 1, …, 2n, so no period of the target can be in step with it. At the walls of
    the box a coordinate and its momentum are reflected, which keeps volume and energy: nothing is clipped.

    For the first `adapt` steps, ε follows the acceptance (Robbins–Monro) and s the deviation of the states, n
    maximises the change of the squared distance to the mean, per gradient (ChEES, Hoffman et al. 2021, eq. 5, divided
    by the cost); each per observation, over its chains. Then they stay.
    """

    steps: int = 200
    """Number of trajectories per chain."""
    step_size: float = 0.1
    """Leapfrog step ε of the first trajectory, normalised units."""
    leapfrogs: float = 2.0
    """Mean number of leapfrog steps n of the first trajectories."""
    adapt: int = 100
    """Trajectories during which ε, s and n adapt. Draw samples from the states after them."""
    target: float = 0.8
    """Acceptance to adapt to."""
    longest: int = 64
    """Largest mean number of leapfrog steps."""
    margin: float | None = 0.05
    """The support: the box [-1, 1] grown by this fraction of the range on both ends. None: unbounded."""

    def __post_init__(self) -> None:
        check_steps(self.steps)
        positive("step_size", self.step_size)
        if self.adapt < 0:
            raise ValueError(f"adapt must be at least 0, got {self.adapt}")
        if not 0 < self.target < 1:
            raise ValueError(f"target must be in (0, 1), got {self.target}")
        if not 1 <= self.leapfrogs <= self.longest:
            raise ValueError(f"leapfrogs must be between 1 and longest, {self.longest}, got {self.leapfrogs}")
        if self.margin is not None:
            margin_limit(self.margin)

    def init(self, energy: EnergyModel, context: Context, start: Actions, generator: torch.Generator) -> HMCState:
        if self.margin is not None:
            start = start.clamp(-margin_limit(self.margin), margin_limit(self.margin))
        energies, gradients = energy.energies_and_gradients(context, start)
        rows, zero = start.new_zeros(start.shape[0], 1, start.shape[2]), start.new_zeros(())
        tuning = Tuning(
            start.new_full((start.shape[0], 1, 1), log(self.step_size)),
            torch.ones_like(rows),
            start.new_full((start.shape[0], 1, 1), log(self.leapfrogs)),
            zero,
            rows,
            rows,
            rows[:, 0, 0],
            rows[:, 0, 0],
        )
        return HMCState(start, energies, gradients, tuning)

    def small_steps(self, size: float) -> "HMC":
        """The same chain with leapfrog steps of at most `size`; nothing adapts."""
        return replace(self, step_size=min(self.step_size, size), leapfrogs=1.0, adapt=0)

    def step(
        self, energy: EnergyModel, context: Context, state: HMCState, k: int, generator: torch.Generator
    ) -> tuple[HMCState, StepInfo]:
        after, proposed, probability = self.trajectory(energy, context, state, generator)
        leapfrogs, divergent, taken = proposed.leapfrogs, proposed.divergent, proposed.taken
        if k < self.adapt:
            after = after._replace(tuning=self._adapted(state, after, proposed, probability, k))
        info = StepInfo(
            state.energies.mean(),
            gradient_norm(state.gradients),
            torch.zeros_like(state.energies.mean()),
            taken.to(probability.dtype).mean(),
            divergent.to(probability.dtype).mean(),
            leapfrogs.to(probability.dtype).mean(),
        )
        return after, info

    def trajectory(
        self, energy: EnergyModel, context: Context, state: HMCState, generator: torch.Generator
    ) -> "tuple[HMCState, _Proposal, Energies]":
        """One trajectory with the state's tuning: the state after it, what was proposed, and with which probability it
        was taken."""
        tuning = state.tuning
        momentum = normal_like(state.actions, generator)
        uniform = torch.rand((), generator=generator, device=state.actions.device)
        leapfrogs = 1 + (uniform * 2 * tuning.log_leapfrogs.exp()).long()
        actions, energies, gradients, ended = self._trajectory(energy, context, state, momentum, leapfrogs)
        rise = energies - state.energies + 0.5 * (ended.square().sum(-1) - momentum.square().sum(-1))
        divergent = ~(rise < _DIVERGED)
        # A trajectory that met NaN is refused.
        probability = torch.where(rise.isnan(), 0.0, (-rise).clamp(max=0).exp())
        chance = torch.rand(probability.shape, generator=generator, dtype=probability.dtype, device=probability.device)
        taken = chance < probability
        moved = taken.unsqueeze(-1)
        after = HMCState(
            torch.where(moved, actions, state.actions),
            torch.where(taken, energies, state.energies),
            torch.where(moved, gradients, state.gradients),
            tuning,
        )
        return after, _Proposal(actions, ended, leapfrogs, divergent, taken), probability

    def _trajectory(
        self, energy: EnergyModel, context: Context, state: HMCState, momentum: Actions, leapfrogs: Tensor
    ) -> tuple[Actions, Energies, Actions, Actions]:
        """Where `leapfrogs` leapfrog steps lead: actions, energies, gradients and momentum. Observations with fewer
        steps wait for the others."""
        step = state.tuning.log_step.exp() * state.tuning.scale
        actions, energies, gradients = state.actions, state.energies, state.gradients
        momentum = momentum - 0.5 * step * gradients
        for index in range(int(leapfrogs.amax())):
            going = index < leapfrogs
            moved, turned = self._drift(actions, momentum, step)
            actions, momentum = torch.where(going, moved, actions), torch.where(going, turned, momentum)
            above, slopes = energy.energies_and_gradients(context, actions)
            energies = torch.where(going[..., 0], above, energies)
            gradients = torch.where(going, slopes, gradients)
            kick = torch.where(index < leapfrogs - 1, step, 0.5 * step)
            momentum = torch.where(going, momentum - kick * gradients, momentum)
        return actions, energies, gradients, momentum

    def _drift(self, actions: Actions, momentum: Actions, step: Tensor) -> tuple[Actions, Actions]:
        """y + ε s r, reflected at the walls as often as it meets them; each reflection turns the momentum."""
        moved = actions + step * momentum
        if self.margin is None:
            return moved, momentum
        limit = margin_limit(self.margin)
        unfolded = (moved + limit).remainder(4 * limit)
        back = unfolded > 2 * limit
        folded = torch.where(back, 4 * limit - unfolded, unfolded) - limit
        # Where no wall is met the action stays as it is: folding would round it.
        inside = moved.abs() <= limit
        return torch.where(inside, moved, folded), torch.where(back & ~inside, -momentum, momentum)

    def _adapted(
        self,
        before: HMCState,
        after: HMCState,
        proposed: "_Proposal",
        probability: Energies,
        k: int,
    ) -> Tuning:
        """The tuning after trajectory k, which was taken with `probability`."""
        tuning = before.tuning
        gain = (k + 1) ** -0.6
        log_step = tuning.log_step + gain * (probability.mean(1).view(-1, 1, 1) - self.target)
        # Welford's update by a block of states, per observation.
        actions, size = after.actions, after.actions.shape[1]
        count = tuning.seen + size
        block = actions.mean(1, keepdim=True)
        shift = block - tuning.mean
        mean = tuning.mean + shift * size / count
        squares = (
            tuning.squares
            + (actions - block).square().sum(1, keepdim=True)
            + shift.square() * tuning.seen * size / count
        )
        tuning = tuning._replace(log_step=log_step, seen=count, mean=mean, squares=squares)
        tuning = self._lengthened(tuning, before.actions, proposed, probability, gain)
        if k + 1 in {max(2, round(share * self.adapt)) for share in _WINDOWS}:
            tuning = self._weighed(tuning)
        return tuning

    def _lengthened(
        self,
        tuning: Tuning,
        before: Actions,
        proposed: "_Proposal",
        probability: Energies,
        gain: float,
    ) -> Tuning:
        """One ascent step of log(criterion) − log(gradients) in the log of the length: the criterion is the mean of
        Δ²/4, Δ = ‖y' − m‖² − ‖y − m‖², and its derivative by the log of the time t is that of Δ⟨y' − m, r'⟩ t."""
        start, end = (before - tuning.mean) / tuning.scale, (proposed.actions - tuning.mean) / tuning.scale
        change = end.square().sum(-1) - start.square().sum(-1)
        time = (proposed.leapfrogs * tuning.log_step.exp())[..., 0]
        weights = torch.where(probability > 1e-3, probability, 0.0)
        total = weights.sum(1).clamp_min(1e-12)

        def average(values: Tensor) -> Tensor:
            return torch.where(weights > 0, weights * values, 0.0).sum(1) / total

        slope = average(change * (end * proposed.momentum).sum(-1) * time)
        value = average(change.square() / 4)
        slope, value = 0.9 * tuning.slope + 0.1 * slope, 0.9 * tuning.value + 0.1 * value
        ratio = (slope / value.clamp_min(1e-12)).clamp(-2, 4)
        length = tuning.log_leapfrogs + 0.5 * gain * (ratio - _COST).view(-1, 1, 1)
        return tuning._replace(
            slope=slope, value=value, log_leapfrogs=length.nan_to_num(0.0).clamp(0.0, log(self.longest))
        )

    def _weighed(self, tuning: Tuning) -> Tuning:
        """The scale becomes the deviation of the states since the last change, drawn towards the old one where they
        are few; the step keeps its mean size in normalised units."""
        few = 5.0
        variance = (tuning.squares + few * 0.1 * tuning.scale.square()) / (tuning.seen + few)
        scale = torch.where(variance > 0, variance, tuning.scale.square()).sqrt()
        ratio = (tuning.scale / scale).log().mean(-1, keepdim=True)
        empty = torch.zeros_like(tuning.squares)
        return tuning._replace(
            scale=scale,
            log_step=tuning.log_step + ratio,
            seen=torch.zeros_like(tuning.seen),
            mean=tuning.mean,
            squares=empty,
        )
