"""Ways to act: from an energy and an observation to candidates, one of which is chosen. All in normalised units.

`Search` moves candidates down the energy; `Direct` takes the action that an explicit energy computes. A way of one's
own is a frozen dataclass with one method, `search`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel
from cebm.randomness import draw_uniform
from cebm.samplers import Langevin, Sampler, moved, with_steps
from cebm.spaces import Box

if TYPE_CHECKING:
    from cebm.recipes import Trial

WARM_SPREAD, WARM_STEP = 0.05, 0.02
"""A search that starts at the last action: how far around it, as a share of the box, and the size of its steps."""


@dataclass  # made at every call, where a frozen one would take as long as two small operations
class Problem:
    """What there is to act upon: an energy, encoded observations, and the caller's wishes."""

    energy: EnergyModel
    """E(x, y), frozen and in evaluation mode."""
    context: Context
    """`energy.encode` of the observations."""
    rows: int
    """Number of observations."""
    box: Box
    """The actions' units; candidates live in its normalised box."""
    low: Float[Tensor, " act"] | Float[Tensor, "rows act"]
    """Smallest available action, normalised; one per observation where actions are relative to it."""
    high: Float[Tensor, " act"] | Float[Tensor, "rows act"]
    """Largest available action, normalised."""
    generator: torch.Generator
    """The only source of randomness."""
    shared: bool = False
    """Use the same random numbers for every observation, so that an action hardly depends on its batch."""
    candidates: int | None = None
    """Candidates that the caller asks for; None: as the way to act has it."""
    steps: int | None = None
    """Steps that the caller asks for; None: as the way to act has it."""
    previous: Float[Tensor, "rows act"] | None = None
    """The last action, to stay near; None: none."""
    everything: bool = False
    """Whether the caller wants to see all candidates, not only those that may be chosen."""
    thorough: bool = False
    """Whether to do all the work that any observation may need, as a budget of time counts it, even where less would
    do."""

    def clip(self, actions: Actions) -> Actions:
        """Into the action space: an action beyond it is not available."""
        if self.low.ndim == 1:
            return actions.clamp(self.low, self.high)
        return actions.clamp(self.low.unsqueeze(1), self.high.unsqueeze(1))

    def energies(self, actions: Actions) -> Energies:
        """Energies with NaN and −∞, which overflow gives, as infinity: the minimum would take them for the best."""
        return _without_nan(self.energy.energies(self.context, actions), actions)

    def excess(self, actions: Actions) -> Energies:
        """E + log q of what `start` gave, with NaN and −∞ as infinity."""
        return _without_nan(self.energy.excess(self.context, actions), actions)

    def added(self, actions: Actions) -> Energies | None:
        """What the energy has beside its part with levels, with NaN and −∞ as infinity; None where it has nothing."""
        added = self.energy.added(self.context, actions)
        return None if added is None else _without_nan(added, actions)

    def uniform(self, n: int) -> Actions:
        """`n` candidates per observation, uniform in the box with its margin."""
        rows = 1 if self.shared else self.rows
        return self.box.sample(rows, n, generator=self.generator, dtype=self.low.dtype).expand(self.rows, -1, -1)

    def start(self, n: int) -> Actions:
        """Where a search begins: `n` draws of the energy's proposal, or of the box where it has none."""
        if self.energy.proposes:
            return self.energy.propose(self.context, n, self.generator, self.shared)
        return self.uniform(n)


@dataclass
class Found:
    """What a way to act found."""

    actions: Actions
    """Candidates within the action space."""
    energies: Energies
    """Their energies; infinite where there is none."""
    chosen: Int[Tensor, " rows"]
    """Index of the candidate that acts."""


@runtime_checkable
class Acting(Protocol):
    """The contract. A way that takes a number of candidates has it as a field `candidates`; one that can show how it
    goes has a method `states(problem)`, which yields (step, candidates), and where these fall through noise levels a
    method `levels_of(problem)`, the level of each state; one that chooses among draws has a method `one_draw()`, which
    gives the way that takes a draw instead, or None where it does so already."""

    def search(self, problem: Problem) -> Found:
        """Candidates for every observation, and the one to take."""
        ...


@dataclass(frozen=True)
class Search:
    """Candidates (draws of the energy's proposal where it has one, else of the box) are moved by a sampler, and one is
    chosen: ŷ = argmin_y E(x, y), or ŷ ~ p(y|x)."""

    sampler: Sampler = Langevin("ibc", noise=0.01)
    """Moves the candidates."""
    candidates: int = 512
    """How many (the paper is silent: our reading)."""
    choice: Literal["minimum", "draw"] = "minimum"
    """'minimum': the lowest energy. 'draw': candidate i with probability ∝ exp(−Eᵢ)/qᵢ, by its energy and its density
    before it moved; so the modes are taken as often as demonstrated, and then moved by the sampler."""
    keep: int = 0
    """Candidates that go on after a first look at their energies; the others are not moved. 0: all."""
    closeness: float = 0.0
    """Where the last action is given: what is added to the energies is closeness/2 times the squared distance to it in
    normalised units, and candidates begin as without it. 0: they begin around the last action instead."""
    inertia: float = 0.0
    """Share of the last action in the new one, where it is given and closeness counts. A chunk that is drawn anew at
    every step is a little slower each time, until the policy stands still; the last chunk keeps its speed. For a
    `Runner` that executes 1: after more, a good part of the last chunk is its held end."""

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise ValueError(f"candidates must be at least 1, got {self.candidates}")
        if self.choice not in ("minimum", "draw"):
            raise ValueError(f"choice must be 'minimum' or 'draw', got {self.choice!r}")
        if not 0 <= self.inertia < 1 or (self.inertia and not self.closeness):
            raise ValueError(
                f"inertia must be at least 0 and below 1, and needs closeness above 0: a mean of two modes is neither; "
                f"got inertia {self.inertia} and closeness {self.closeness}"
            )
        if self.keep < 0:
            raise ValueError(f"keep must not be negative, got {self.keep}")
        if not 0 <= self.closeness < inf:
            raise ValueError(f"closeness must be at least 0 and finite, got {self.closeness}")
        if isinstance(self.sampler, type):
            raise ValueError(f"sampler must be an object, got the class: write {self.sampler.__name__}()")
        if not isinstance(self.sampler, Sampler):
            raise ValueError(f"sampler must have steps, init and step, which {type(self.sampler).__name__} has not")

    def search(self, problem: Problem) -> Found:
        sampler = self._sampler(problem)
        start, others = self._begin(problem)
        actions = problem.clip(moved(sampler, problem.energy, problem.context, start, problem.generator))
        energies = problem.energies(actions)
        away = self._away(problem, actions)
        index = (energies if away is None else energies + away).argmin(1)
        if self.choice == "draw":  # the drawn one comes first, unless it ran away
            index = index.masked_fill(energies[:, 0] < torch.inf, 0)
        if problem.previous is not None and self.inertia:  # what was found is the better one to choose among
            actions = problem.clip(actions + self.inertia * (problem.previous.unsqueeze(1) - actions))
            energies = problem.energies(actions)
        if problem.everything and others is not None:
            others = problem.clip(others)
            actions = torch.cat([actions, others], 1)
            energies = torch.cat([energies, problem.energies(others)], 1)
        return Found(actions, energies, index)

    def states(self, problem: Problem) -> Iterator[tuple[int, Actions]]:
        """The candidates before the first step and after each, as `search` moves them; a drawn one comes first."""
        sampler, (start, _) = self._sampler(problem), self._begin(problem)
        state = sampler.init(problem.energy, problem.context, start, problem.generator)
        yield 0, state.actions
        for k in range(sampler.steps):
            state, _ = sampler.step(problem.energy, problem.context, state, k, problem.generator)
            yield k + 1, state.actions

    def _sampler(self, problem: Problem) -> Sampler:
        sampler = self.sampler if problem.steps is None else with_steps(self.sampler, problem.steps)
        if self._warm(problem) and hasattr(sampler, "small_steps"):
            return sampler.small_steps(WARM_STEP)
        return sampler

    def _warm(self, problem: Problem) -> bool:
        """Whether candidates begin around the last action."""
        return problem.previous is not None and not self.closeness

    def _away(self, problem: Problem, actions: Actions) -> Energies | None:
        """What counts against candidates that are far from the last action; None: nothing."""
        if problem.previous is None or not self.closeness:
            return None
        return 0.5 * self.closeness * (actions - problem.previous.unsqueeze(1)).square().sum(-1)

    def _begin(
        self, problem: Problem
    ) -> tuple[Float[Tensor, "batch moved act"], Float[Tensor, "batch unmoved act"] | None]:
        """The candidates that are moved, a drawn one first, and those that are not."""
        count = self.candidates if problem.candidates is None else problem.candidates
        if problem.previous is None or self.closeness:
            start = problem.start(count)
        else:  # within a few percent of the last action
            near = problem.previous.unsqueeze(1) + WARM_SPREAD * problem.uniform(count)
            start = problem.box.clip(near)
        keep = min(self.keep or count, count)
        if self.choice == "draw":
            # Log of p/q of what was drawn. The largest of it plus Gumbel noise is a draw; the next ones further draws.
            looks = -(problem.energies(start) if self._warm(problem) else problem.excess(start))
        elif keep < count:  # clipped: an action beyond the limits is not available
            looks = -problem.energies(problem.clip(start))
        else:
            return start, None
        away = self._away(problem, start)
        if away is not None:
            looks = looks - away
        if self.choice == "draw":
            shape = (1 if problem.shared else start.shape[0], count)
            looks = looks - (-draw_uniform(problem.generator, shape, start).clamp_min(1e-30).log()).log()
        order = looks.topk(count if problem.everything else keep, dim=1).indices
        start = start.gather(1, order.unsqueeze(-1).expand(-1, -1, start.shape[2]))
        return (start[:, :keep], start[:, keep:]) if keep < start.shape[1] else (start, None)


@dataclass(frozen=True)
class Direct:
    """Takes the action that an explicit energy computes. Where more candidates are asked for, the others are draws of
    its density, or copies where it has none. Steps and the last action have no effect: nothing is searched."""

    def search(self, problem: Problem) -> Found:
        best = problem.energy.best(problem.context).unsqueeze(1)
        count = 1 if problem.candidates is None else problem.candidates
        if problem.energy.proposes and count > 1:
            others = problem.energy.propose(problem.context, count, problem.generator)[:, 1:]
        else:
            others = best.expand(-1, count - 1, -1)
        actions = problem.clip(torch.cat([best, others], 1))
        return Found(actions, problem.energies(actions), torch.zeros_like(best[:, 0, 0], dtype=torch.int64))

    def check_composition(self, trial: "Trial") -> None:
        if not getattr(trial.energy, "explicit", False):
            name = type(trial.energy).__name__
            raise ValueError(
                f"Direct does not go with {name}: it needs an energy whose best action is known in closed form "
                "(`explicit = True` in its settings)"
            )


def _without_nan(energies: Energies, actions: Actions) -> Energies:
    # What is added is 0, or NaN where an action is NaN or infinite.
    return torch.add(energies, actions.sum(-1), alpha=0).nan_to_num(torch.inf, torch.inf, torch.inf)
