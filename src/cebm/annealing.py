"""Candidates that fall through the noise levels of an energy: a sampler, and a way to act that chooses among them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cebm.acting import Found, Problem
from cebm.energies.base import Actions, Context, Energies, EnergyModel, mapped
from cebm.randomness import draw_normal, draw_uniform
from cebm.samplers import StepInfo, with_steps
from cebm.spaces import margin_limit, traced


class AnnealedState(NamedTuple):
    """State of falling candidates: the actions, blurred to the level of the next step."""

    actions: Actions


@dataclass(frozen=True)
class Annealed:
    """From level to level by the probability flow dy/ds = s∇E_s(y): y' = y + (s' − s) s∇E_s(y), and in the last step,
    to s' = 0, onto the denoised mean y − s²∇E_s(y). Levels are (s₁^{1/ρ} + k/(n−1)·(sₙ^{1/ρ} − s₁^{1/ρ}))^ρ (Karras et
    al. 2022). It samples p where E_s = −log(p ∗ N(0, s²)), up to the error of its steps; for an energy without levels
    it has no meaning. It begins with the start blurred to the first level."""

    steps: int = 5
    """Number of levels, with one step each."""
    first: float = 5.0
    """The first level, in units of the energy's deviation d."""
    last: float = 0.04
    """The last level, in units of d."""
    power: float = 3.0
    """ρ: larger puts more of the levels near the last."""
    corrections: int = 0
    """Langevin steps y' = y − τ∇E_s + √(2τ) ω at each level before the step to the next."""
    correction_size: float = 0.1
    """τ of a correction, in units of s²d²/(s² + d²), the variance that a clean action has under a blurred one."""
    margin: float | None = None
    """The result stays in the box [-1, 1] grown by this fraction of the range on both ends. None: unbounded, since
    relative actions may be larger than 1; a policy clips to what is available."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if not 0 < self.last <= self.first < inf:
            raise ValueError(f"0 < last <= first must hold, got last {self.last} and first {self.first}")
        for name in ("power", "correction_size"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if self.corrections < 0:
            raise ValueError(f"corrections must be at least 0, got {self.corrections}")
        if self.margin is not None:
            margin_limit(self.margin)

    def level(self, k: int) -> float:
        """Level k in units of d; 0 after the last."""
        if k >= self.steps:
            return 0.0
        high, low = self.first ** (1 / self.power), self.last ** (1 / self.power)
        return float((high + k / max(1, self.steps - 1) * (low - high)) ** self.power)

    def init(self, energy: EnergyModel, context: Context, start: Actions, generator: torch.Generator) -> AnnealedState:
        return self.blurred(energy, start, draw_normal(generator, start.shape, start))

    def blurred(self, energy: EnergyModel, start: Actions, noise: Actions) -> AnnealedState:
        """The state that begins at `start` with this noise, of unit size."""
        return AnnealedState(start + self.level(0) * energy.deviation * noise)

    def step(
        self, energy: EnergyModel, context: Context, state: AnnealedState, k: int, generator: torch.Generator
    ) -> tuple[AnnealedState, StepInfo]:
        d, actions = energy.deviation, state.actions
        level, following = self.level(k) * d, self.level(k + 1) * d
        here = energy.at(level)
        for _ in range(self.corrections):
            size = self.correction_size * level**2 * d**2 / (level**2 + d**2)
            slopes = here.energies_and_gradients(context, actions)[1]
            actions = actions - size * slopes + sqrt(2 * size) * draw_normal(generator, actions.shape, actions)
        energies, slopes = here.energies_and_gradients(context, actions)
        actions = actions + (following - level) * level * slopes
        clipped = None
        if k == self.steps - 1 and self.margin is not None:
            wanted, limit = actions, margin_limit(self.margin)
            actions = actions.clamp(-limit, limit)
            clipped = (actions != wanted).to(actions.dtype).mean()
        return AnnealedState(actions), StepInfo.of(energies, slopes, clipped)

    def small_steps(self, size: float) -> "Annealed":
        """The same from a lower first level, so that a candidate ends within about `size` of its start."""
        return replace(self, first=max(self.last, min(self.first, 2 * size)))


@dataclass(frozen=True)
class AnnealedSearch:
    """Candidates fall from noise through the energy's levels, and one of them acts, by its energy E_s at s = `level`.

    One candidate leads: the first, which is a draw. (Where penalties are added to the energy, it is drawn by them.)"""

    sampler: Annealed = Annealed()
    """How candidates fall."""
    candidates: int = 32
    """How many."""
    choice: Literal["near", "minimum", "softmax", "first"] = "near"
    """'near': the lowest energy near the candidate that leads, which so decides the mode. 'minimum': the lowest of all,
    which may take a wrong mode again and again, as denoising teaches slopes and hardly the weights of modes that lie
    apart. 'softmax': candidate i with probability ∝ exp(−Eᵢ/temperature). 'first': the one that leads."""
    reach: float = 0.7
    """What is near: up to this distance per coordinate (root mean square), in units of d."""
    temperature: float = 1.0
    """Of the softmax."""
    level: float = 0.2
    """Level at which candidates are compared, in units of the energy's deviation d."""
    look: int = 0
    """Candidates that fall first; the others follow only for observations where these do not agree. 0: all at once."""
    agreement: float = 0.2
    """Candidates agree where their mean distance from their mean, per coordinate and in units of d, is below this."""
    closeness: float = 0.0
    """Where the last action is given: what is added to the energies is closeness/2 times the squared distance to it,
    in units of d²; and if this is above 0, the candidate nearest to the last action leads."""

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise ValueError(f"candidates must be at least 1, got {self.candidates}")
        if self.choice not in ("near", "minimum", "softmax", "first"):
            raise ValueError(f"choice must be 'near', 'minimum', 'softmax' or 'first', got {self.choice!r}")
        for name in ("temperature", "level", "reach"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        for name in ("look", "agreement", "closeness"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
        if self.look == 1:
            raise ValueError("look must be 0 or at least 2, got 1: one candidate always agrees with itself")

    def search(self, problem: Problem) -> Found:
        sampler, count = self._sampler(problem), self._count(problem)
        noise = self._noise(problem, count)
        looks = not problem.everything and 0 < self.look < count
        if looks and not traced():
            actions, energies = self._looked(sampler, problem, noise)
        else:
            actions = problem.clip(self._fallen(sampler, problem, problem.context, noise))
            energies = self._energies(problem, problem.context, actions)
            if looks:  # exported, all of them fall: those that `_looked` would not let fall do not count
                agree = self._agree(actions[:, : self.look], problem.energy.deviation).unsqueeze(1)
                others = torch.arange(count, device=energies.device) >= self.look
                energies = torch.where(agree & others, inf, energies)
        return Found(actions, energies, self._chosen(problem, actions, energies))

    def one_draw(self) -> "AnnealedSearch | None":
        """The draw that leads, without a choice by energy; None where it is taken already."""
        return None if self.choice == "first" else replace(self, choice="first", candidates=1, look=0)

    def states(self, problem: Problem) -> Iterator[tuple[int, Actions]]:
        """The candidates before the first level and after each, blurred as they are there."""
        sampler, noise = self._sampler(problem), self._noise(problem, self._count(problem))
        for k, state in enumerate(self._falling(sampler, problem, problem.context, noise)):
            yield k, state.actions

    def levels_of(self, problem: Problem) -> list[float]:
        """The noise level of each of `states`; of the last, which is clean, that at which candidates are compared."""
        sampler, d = self._sampler(problem), problem.energy.deviation
        return [*(sampler.level(k) * d for k in range(sampler.steps)), self.level * d]

    def _looked(
        self, sampler: Annealed, problem: Problem, noise: Actions
    ) -> tuple[Float[Tensor, "batch found act"], Float[Tensor, "batch found"]]:
        """The first candidates for all observations, and the others where those do not agree; elsewhere the others
        are copies of the first one, with infinite energy."""
        actions = problem.clip(self._fallen(sampler, problem, problem.context, noise[:, : self.look]))
        energies = self._energies(problem, problem.context, actions)
        agree = self._agree(actions, problem.energy.deviation)
        open_rows = (~agree if not problem.thorough else torch.ones_like(agree)).nonzero()[:, 0]
        if not len(open_rows):
            return actions, energies
        rest = _of_rows(problem, open_rows)
        more = rest.clip(self._fallen(sampler, rest, rest.context, noise[open_rows, self.look :]))
        others = actions[:, :1].repeat(1, more.shape[1], 1)
        costs = energies.new_full(others.shape[:2], inf)
        others[open_rows], costs[open_rows] = more, self._energies(rest, rest.context, more)
        return torch.cat([actions, others], 1), torch.cat([energies, costs], 1)

    def _agree(self, actions: Actions, deviation: float) -> Bool[Tensor, " rows"]:
        away = (actions - actions.mean(1, keepdim=True)).square().mean((1, 2)).sqrt()
        return away <= self.agreement * deviation

    def _sampler(self, problem: Problem) -> Annealed:
        return self.sampler if problem.steps is None else with_steps(self.sampler, problem.steps)

    def _count(self, problem: Problem) -> int:
        return self.candidates if problem.candidates is None else problem.candidates

    def _noise(self, problem: Problem, count: int) -> Actions:
        """The noise that candidates begin with; of unit size times that of an action blurred to the first level."""
        shape = (1 if problem.shared else problem.rows, count, problem.energy.act_dim)
        return draw_normal(problem.generator, shape, problem.low).expand(problem.rows, -1, -1)

    def _falling(
        self, sampler: Annealed, problem: Problem, context: Context, noise: Actions
    ) -> Iterator[AnnealedState]:
        # p_s is about N(0, s² + d²) at the first level, and a start of 0 with noise is N(0, s²).
        wider = sqrt(1 + 1 / sampler.level(0) ** 2)
        state = sampler.blurred(problem.energy, torch.zeros_like(noise), wider * noise)
        yield state
        for k in range(sampler.steps):
            state, _ = sampler.step(problem.energy, context, state, k, problem.generator)
            yield state

    def _fallen(self, sampler: Annealed, problem: Problem, context: Context, noise: Actions) -> Actions:
        """The candidates as they land."""
        *_, last = self._falling(sampler, problem, context, noise)
        return last.actions

    def _energies(self, problem: Problem, context: Context, actions: Actions) -> Energies:
        compared = replace(problem, energy=problem.energy.at(self.level * problem.energy.deviation), context=context)
        return compared.energies(actions)

    def _chosen(self, problem: Problem, actions: Actions, energies: Energies) -> Int[Tensor, " rows"]:
        costs, away = energies, None
        if problem.previous is not None and self.closeness:
            away = (actions - problem.previous.unsqueeze(1)).square().sum(-1)
            costs = costs + 0.5 * self.closeness / problem.energy.deviation**2 * away
        if self.choice == "minimum":
            return costs.argmin(1)
        if self.choice == "softmax":
            return _drawn(problem, costs / self.temperature)
        lead = self._leading(problem, actions, energies, away)
        if self.choice == "first":
            return lead
        leading = actions.gather(1, lead.view(-1, 1, 1).expand(-1, 1, actions.shape[2]))
        apart = (actions - leading).square().mean(-1).sqrt()
        return torch.where(apart <= self.reach * problem.energy.deviation, costs, inf).argmin(1)

    def _leading(
        self, problem: Problem, actions: Actions, energies: Energies, away: Energies | None
    ) -> Int[Tensor, " rows"]:
        """The candidate that decides the mode, of those that did not run away: the nearest to the last action, where
        that counts; else a draw of p exp(−added), which is the first one where nothing is added."""
        finite = energies < inf
        if away is not None:
            return torch.where(finite, away, inf).argmin(1)
        added = problem.added(actions)
        if added is not None:
            return _drawn(problem, torch.where(finite, added, inf))
        order = torch.arange(energies.shape[1], device=energies.device)
        return torch.where(finite, order, energies.shape[1]).argmin(1)


def _drawn(problem: Problem, costs: Energies) -> Int[Tensor, " rows"]:
    """One of each row, with probability ∝ exp(−cost): the largest of −cost plus Gumbel noise is such a draw."""
    shape = (1 if problem.shared else costs.shape[0], costs.shape[1])
    uniform = draw_uniform(problem.generator, shape, costs)
    return (-costs - (-uniform.clamp_min(1e-30).log()).log()).argmax(1)


def _of_rows(problem: Problem, rows: Int[Tensor, " some"]) -> Problem:
    """What there is to act upon for some of the observations."""
    low, high = (limit if limit.ndim == 1 else limit[rows] for limit in (problem.low, problem.high))
    context = mapped(lambda part: part[rows], problem.context)
    return replace(problem, context=context, rows=len(rows), low=low, high=high)
