"""Hamiltonian Monte Carlo that tunes its step size, its mass and the length of its trajectories."""

from dataclasses import dataclass, replace
from math import log
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel
from cebm.randomness import draw_uniform
from cebm.samplers.contract import StepInfo, check_steps, gradient_norm, normal_like, positive
from cebm.spaces import margin_limit, traced

_DIVERGED = 1000.0
"""A trajectory whose energy rises by more than this has diverged (Stan's limit)."""
_WINDOWS = (0.1, 0.25, 0.5)
"""Shares of the adaptation after which the mass follows the variance seen since the last of them."""
_EXPORTED = 1000
"""Leapfrog steps that one file has at most: each is a piece of its program."""
_ENOUGH = 20
"""States per observation that the choice of a length needs at least."""


class Tuning(NamedTuple):
    """What the adaptation has found so far, per observation."""

    log_step: Float[Tensor, "batch 1 1"]
    """Log of the leapfrog step ε, in units of `scale`."""
    scale: Float[Tensor, "batch 1 act"]
    """Deviation of each coordinate: one over the root of its mass."""
    longest: Int[Tensor, "batch 1 1"]
    """Largest number of leapfrog steps n; trajectories have ⌈n/2⌉ to n of them."""
    seen: Float[Tensor, ""]
    """States seen per observation since the last change of the mass."""
    mean: Float[Tensor, "batch 1 act"]
    """Their mean."""
    squares: Float[Tensor, "batch 1 act"]
    """Sum of their squared distances to the mean."""
    found: "Jumps | None" = None
    """How far trajectories of each length lead, from the first change of the mass to the end of the adaptation: with
    the first mass long trajectories may be best, which later nobody wants."""

    @classmethod
    def initial(cls, start: Actions, step: float, longest: int) -> "Tuning":
        """A step ε in normalised units, masses of 1."""
        rows = start.new_zeros(start.shape[0], 1, start.shape[2])
        single = rows[:, :, :1]
        length = torch.full_like(single, longest, dtype=torch.long)
        return cls(single + log(step), torch.ones_like(rows), length, start.new_zeros(()), rows, rows)


class Jumps(NamedTuple):
    """Sums over trajectories since the last change of the mass, for each test function f of a state: the distances to
    the centre, coordinate by coordinate, and their squares."""

    centre: Float[Tensor, "batch 1 act"]
    """Where the coordinates are counted from."""
    trajectories: Float[Tensor, ""]
    """Trajectories per observation."""
    values: Float[Tensor, "batch tests"]
    """Σ f(y)."""
    squares: Float[Tensor, "batch tests"]
    """Σ f(y)²."""
    jumps: Float[Tensor, "lengths batch tests"]
    """Σ min(1, exp(H − H')) (f(y') − f(y))², y' after each number of leapfrog steps."""
    counts: Float[Tensor, "lengths batch"]
    """Trajectories that went so far."""

    @classmethod
    def none(cls, centre: Float[Tensor, "batch 1 act"], lengths: int) -> "Jumps":
        rows, tests = centre.shape[0], 2 * centre.shape[2]
        zero, none = centre.new_zeros(rows, tests), centre.new_zeros(lengths, rows)
        return cls(centre, zero.new_zeros(()), zero, zero, zero.expand(lengths, -1, -1).clone(), none)

    def grown(self, actions: Actions, jumps: list[Tensor], reach: Int[Tensor, "batch 1 1"]) -> "Jumps":
        """With a trajectory more, from `actions`, that went `reach` steps."""
        tests, steps = self.tests(actions), len(jumps)
        near = torch.arange(steps, device=reach.device).unsqueeze(1) < reach.view(1, -1)
        more, gone = torch.zeros_like(self.jumps), torch.zeros_like(self.counts)
        more[:steps] = torch.where(near.unsqueeze(-1), torch.stack(jumps), 0.0)
        gone[:steps] = near.to(gone.dtype)
        return self._replace(
            trajectories=self.trajectories + 1,
            values=self.values + tests.mean(1),
            squares=self.squares + tests.square().mean(1),
            jumps=self.jumps + more,
            counts=self.counts + gone,
        )

    def tests(self, actions: Actions) -> Float[Tensor, "batch samples tests"]:
        """f(y) for each test function."""
        away = actions - self.centre
        return torch.cat([away, away.square()], -1)

    def efficiency(self) -> Float[Tensor, "lengths batch"]:
        """Effective draws per gradient for trajectories of ⌈n/2⌉ to n steps, n from 1 on, 0 where nobody knows. With
        ρ = 1 − E[jump²]/2Var f, the correlation of f between neighbours in a chain, a draw is worth (1 − ρ)/(1 + ρ):
        the least over the test functions, per gradient."""
        count = self.trajectories.clamp_min(1)
        variance = (self.squares / count - (self.values / count).square()).clamp_min(1e-30)
        moved = self.jumps / self.counts.clamp_min(1).unsqueeze(-1) / (2 * variance)
        top = torch.arange(1, len(moved) + 1, device=moved.device)
        bottom = (top + 1) // 2
        sums = torch.cat([torch.zeros_like(moved[:1]), moved.cumsum(0)])
        moved = (sums[top] - sums[bottom - 1]) / (top - bottom + 1).view(-1, 1, 1)
        worth = (moved / (2 - moved).clamp_min(0.1)).amin(-1)
        known = self.counts >= self.trajectories.clamp_min(1) / 4
        return torch.where(known, worth / (0.5 * (top + bottom)).unsqueeze(1), 0.0)


class HMCState(NamedTuple):
    """State of Hamiltonian chains."""

    actions: Actions
    energies: Energies
    gradients: Actions
    tuning: Tuning


class _Proposal(NamedTuple):
    """Where a trajectory ended."""

    actions: Actions
    energies: Energies
    gradients: Actions
    momentum: Actions
    found: Jumps | None
    """The sums of before and of this trajectory, where the adaptation wants to know them."""


class Trajectory(NamedTuple):
    """One trajectory of every chain: the state after it, and what happened on the way."""

    state: HMCState
    probability: Energies
    """With which the end was taken."""
    taken: Bool[Tensor, "batch samples"]
    divergent: Bool[Tensor, "batch samples"]
    leapfrogs: Int[Tensor, "batch 1 1"]


@dataclass(frozen=True)
class HMC:
    """Hamiltonian Monte Carlo: a momentum r ~ N(0, I) is drawn, H = E(y) + ‖r‖²/2 is followed by L leapfrog steps of
    size ε·s (s: the deviation of each coordinate), and the end is taken with probability min(1, exp(H − H')). L is
    uniform on ⌈n/2⌉, …, n, so no period of the target can be in step with it. At the walls of
    the box a coordinate and its momentum are reflected, which keeps volume and energy: nothing is clipped.

    For the first `adapt` steps, ε follows the acceptance (Robbins–Monro) and s the deviation of the states; n is the
    length whose draws are worth most per gradient, by the squared jumps of coordinates and of their squares
    (`Jumps.efficiency`), which one trajectory shows for all lengths up to its own. Each is found per observation, over
    its chains. Then they stay. (ChEES, Hoffman et al. 2021, counts squared distances to the mean alone, and does not
    see a walk around a ring.)
    """

    steps: int = 200
    """Number of trajectories per chain."""
    step_size: float = 0.1
    """Leapfrog step ε of the first trajectory, normalised units."""
    leapfrogs: int = 3
    """Largest number of leapfrog steps n of the first trajectories."""
    adapt: int = 100
    """Trajectories during which ε, s and n adapt. Draw samples from the states after them."""
    target: float = 0.8
    """Acceptance to adapt to."""
    longest: int = 64
    """Largest n that the adaptation chooses."""
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
        if traced() and (count := sum(map(self._most, range(self.steps)))) > _EXPORTED:
            raise ValueError(
                f"a file holds each leapfrog step that {self.steps} trajectories may have, here {count:,} of them, and "
                f"{_EXPORTED:,} are the limit: adapt=0 keeps each at leapfrogs={self.leapfrogs}, or take fewer steps"
            )
        if self.margin is not None:
            start = start.clamp(-margin_limit(self.margin), margin_limit(self.margin))
        energies, gradients = energy.energies_and_gradients(context, start)
        tuning = Tuning.initial(start, self.step_size, self.leapfrogs)
        return HMCState(start, energies, gradients, tuning)

    def small_steps(self, size: float) -> "HMC":
        """The same chain with leapfrog steps of at most `size`; nothing adapts."""
        return replace(self, step_size=min(self.step_size, size), leapfrogs=1, adapt=0)

    def step(
        self, energy: EnergyModel, context: Context, state: HMCState, k: int, generator: torch.Generator
    ) -> tuple[HMCState, StepInfo]:
        passed = self.trajectory(energy, context, state, generator, self._most(k))
        after = passed.state
        if k < self.adapt:
            after = after._replace(tuning=self._adapted(after, passed.probability, k))
        info = StepInfo(
            state.energies.mean(),
            gradient_norm(state.gradients),
            torch.zeros_like(state.energies.mean()),
            passed.taken.to(state.energies.dtype).mean(),
            passed.divergent.to(state.energies.dtype).mean(),
            passed.leapfrogs.to(state.energies.dtype).mean(),
        )
        return after, info

    def trajectory(
        self,
        energy: EnergyModel,
        context: Context,
        state: HMCState,
        generator: torch.Generator,
        most: int | None = None,
    ) -> Trajectory:
        """One trajectory with the state's tuning, which only learns about jumps here. What is exported has `most`
        leapfrog steps, of which only those count that the tuning asks for."""
        longest = state.tuning.longest
        momentum = normal_like(state.actions, generator)
        uniform = draw_uniform(generator, (1,), momentum.new_empty(0, dtype=torch.float32))
        shortest = (longest + 1) // 2
        leapfrogs = torch.minimum(longest, shortest + (uniform * (longest - shortest + 1)).long())
        ended = self._followed(energy, context, state, momentum, leapfrogs, most)
        rise = _risen(state, momentum, ended.energies, ended.momentum)
        probability = _probability(rise)
        taken = draw_uniform(generator, probability.shape, probability) < probability
        moved = taken.unsqueeze(-1)
        after = HMCState(
            torch.where(moved, ended.actions, state.actions),
            torch.where(taken, ended.energies, state.energies),
            torch.where(moved, ended.gradients, state.gradients),
            state.tuning._replace(found=ended.found),
        )
        return Trajectory(after, probability, taken, ~(rise < _DIVERGED), leapfrogs)

    def _followed(
        self,
        energy: EnergyModel,
        context: Context,
        state: HMCState,
        momentum: Actions,
        leapfrogs: Tensor,
        most: int | None,
    ) -> _Proposal:
        """Where `leapfrogs` leapfrog steps lead; observations with fewer steps wait for the others. While jumps are
        looked for, trajectories go on to twice the largest number of steps."""
        found, first = state.tuning.found, momentum
        reach = leapfrogs if found is None else (2 * state.tuning.longest).clamp(4, self.longest)
        step = state.tuning.log_step.exp() * state.tuning.scale
        actions, energies, gradients = state.actions, state.energies, state.gradients
        ended = _Proposal(actions, energies, gradients, momentum, found)
        jumps = []
        for index in range(most if traced() and most is not None else int(torch.maximum(reach, leapfrogs).amax())):
            momentum = momentum - 0.5 * step * gradients
            actions, momentum = self._drift(actions, momentum, step)
            energies, gradients = energy.energies_and_gradients(context, actions)
            momentum = momentum - 0.5 * step * gradients
            going = index < leapfrogs
            ended = ended._replace(
                actions=torch.where(going, actions, ended.actions),
                energies=torch.where(going[..., 0], energies, ended.energies),
                gradients=torch.where(going, gradients, ended.gradients),
                momentum=torch.where(going, momentum, ended.momentum),
            )
            if found is not None:
                weights = _probability(_risen(state, first, energies, momentum)).unsqueeze(-1)
                square = (found.tests(actions) - found.tests(state.actions)).square()
                jumps.append(torch.where(weights > 0, weights * square, 0.0).mean(1))
        return ended if found is None else ended._replace(found=found.grown(state.actions, jumps, reach))

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

    def _adapted(self, after: HMCState, probability: Energies, k: int) -> Tuning:
        """The tuning after trajectory k, whose end was taken with `probability`."""
        tuning = after.tuning
        # From the last change of the mass on: a step that fitted the old one may be off by a factor of ten.
        gain = (k + 1) ** -0.6 if tuning.found is None else tuning.found.trajectories.double() ** -0.6
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
        if tuning.found is not None:
            best = 1 + tuning.found.efficiency().argmax(0).view(-1, 1, 1)
            tuning = tuning._replace(longest=torch.where(count >= _ENOUGH, best, tuning.longest))
        if k + 1 in self._windows:
            tuning = self._weighed(tuning)
        return tuning._replace(found=None) if k + 1 == self.adapt else tuning

    @property
    def _windows(self) -> set[int]:
        """After so many trajectories the mass changes."""
        return {max(2, round(share * self.adapt)) for share in _WINDOWS}

    def _most(self, k: int) -> int:
        """Leapfrog steps that trajectory k has at most: before the first change of the mass no length is chosen."""
        first = min(self._windows)
        return self.longest if first <= min(k, self.adapt) else self.leapfrogs

    def _weighed(self, tuning: Tuning) -> Tuning:
        """The scale becomes the deviation of the states since the last change, drawn towards the old one where they
        are few; the step keeps its mean size in normalised units."""
        few = 5.0
        variance = (tuning.squares + few * 0.1 * tuning.scale.square()) / (tuning.seen + few)
        scale = torch.where(variance > 0, variance, tuning.scale.square()).sqrt()
        ratio = (tuning.scale / scale).log().mean(-1, keepdim=True)
        return tuning._replace(
            scale=scale,
            log_step=tuning.log_step + ratio,
            seen=torch.zeros_like(tuning.seen),
            squares=torch.zeros_like(tuning.squares),
            found=Jumps.none(tuning.mean, self.longest),
        )


def _risen(state: HMCState, momentum: Actions, energies: Energies, ended: Actions) -> Energies:
    """H' − H, by which the trajectory missed its energy."""
    return energies - state.energies + 0.5 * (ended.square().sum(-1) - momentum.square().sum(-1))


def _probability(rise: Energies) -> Energies:
    """min(1, exp(H − H')). A trajectory that met NaN is refused."""
    return torch.where(rise.isnan(), 0.0, (-rise).clamp(max=0).exp())
