"""A policy under constraints that were not there in training."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cebm.acting import Acting, Problem
from cebm.constraints.base import Constraint, EnergyFunction, Predicate, Scene, Weighted, allowed
from cebm.decisions import Decision
from cebm.parts import Part
from cebm.policy import EnergyPolicy
from cebm.randomness import draw_normal
from cebm.spaces import Specification
from cebm.units import Units

Array = TypeVar("Array", bound=Any)

INFEASIBLE = "no candidate satisfies the constraints"
ROUNDS = 8
"""How often candidates are moved to the nearest allowed place of one constraint after the other."""
REFINEMENTS, REFINED = (0.1, 0.05, 0.02, 0.01), 16
"""Sizes of random moves around the best allowed candidate, as shares of half the box, and how many of each; where the
policy's own choice is not allowed."""
LAST_RESORT = 256
"""Candidates from the whole action space where none of the policy's own can be used."""


@dataclass(frozen=True)
class Share:
    """The share of the probability that constraints leave, one for each observation."""

    value: Float[Tensor, " batch"]
    """From 0, nothing, to 1, everything."""
    error: Float[Tensor, " batch"]
    """Its standard error."""


class _Pool(NamedTuple):
    """Candidates, raw [batch, samples, horizon, act] and normalised, what they cost, and whether they are allowed."""

    raw: Tensor
    inside: Tensor
    costs: Tensor
    fine: Tensor

    def usable(self) -> Float[Tensor, "batch samples"]:
        """The costs; infinite where a candidate is not allowed."""
        return torch.where(self.fine, self.costs, torch.inf)


@dataclass(frozen=True)
class _Choice:
    """What was chosen, in raw and in normalised units, and all that was considered."""

    action: Float[Tensor, "batch act"]
    normalised: Float[Tensor, "batch inside"]
    energy: Float[Tensor, " batch"]
    feasible: Bool[Tensor, " batch"]


@dataclass(frozen=True, eq=False)
class ConstrainedPolicy:
    """An energy policy whose actions satisfy every hard constraint, or that abstains; soft ones add to its energy.

    Candidates of the policy's own search come first. Those that break a hard constraint are also moved to the nearest
    allowed place, where the constraints know it (`nearest`), and the energy judges them there. The returned action is
    tested once more, as it is given to the caller. Where the policy's own choice is allowed and no soft constraint
    speaks, that is the action: constraints that do not bind change nothing.
    """

    policy: EnergyPolicy
    """The policy without constraints."""
    hard: tuple[Constraint, ...] = ()
    """Never violated."""
    soft: tuple[Weighted, ...] = ()
    """Added to the energy."""

    def with_constraint(
        self, constraint: Constraint | Callable[[Scene], Tensor], weight: float | None = None
    ) -> "ConstrainedPolicy":
        """The same with one constraint more: a hard one, or with a `weight` an energy. A function of a `Scene` gives
        booleans [batch, samples] as a hard constraint, energies as a soft one."""
        if not isinstance(constraint, Constraint):
            if not callable(constraint):
                raise ValueError(f"constraint must have a method `excess`, which {type(constraint).__name__} has not")
            constraint = Predicate(constraint) if weight is None else EnergyFunction(constraint)
        if weight is None:
            return replace(self, hard=(*self.hard, constraint))
        return replace(self, soft=(*self.soft, Weighted(constraint, weight)))

    @property
    def specification(self) -> Specification:
        """What the energy was built for."""
        return self.policy.specification

    @property
    def acting(self) -> Acting:
        """How the policy without constraints finds its candidates."""
        return self.policy.acting

    @property
    def units(self) -> Units:
        """From raw observations and actions to the energy's inputs and outputs, and back."""
        return self.policy.units

    @property
    def history(self) -> int:
        """Observations that one input holds, oldest first."""
        return self.policy.history

    @property
    def horizon(self) -> int:
        """Actions that one output holds, the current one first."""
        return self.policy.horizon

    @property
    def parts(self) -> tuple[Part, ...]:
        """The named parts of a raw observation."""
        return self.policy.parts

    @property
    def columns(self) -> tuple[int, int]:
        """Raw columns of one observation and of one action."""
        return self.policy.columns

    @property
    def device(self) -> torch.device:
        return self.policy.device

    @property
    def limits(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest action; they hold beside the constraints."""
        return self.policy.limits

    def reset(self) -> None:
        """Nothing to forget: the caller gives `last` and `plan`, as a Runner does."""

    def export(self, path: str | Path, *options: Any, **more: Any) -> None:
        """An ExportError that says why a policy under constraints has no file."""
        from cebm.export import export

        export(self, path, *options, **more)  # type: ignore[arg-type]

    def check(self, obs: Any) -> None:
        """ValueError where `act` would refuse these observations."""
        self.policy.check(obs)

    def act(
        self,
        obs: Array,
        *,
        candidates: int | None = None,
        steps: int | None = None,
        last: Any = None,
        plan: Any = None,
        generator: torch.Generator | None = None,
    ) -> Array:
        """The action for one observation or a batch; an Abstention names the observation for which there is none.

        `last` is the action that was played last [batch, act of one step], `plan` what the last chunk had in mind for
        the steps of this one [batch, horizon · act]: a Runner gives both.
        """
        chosen = self._choose(self.policy.observed(obs), candidates, steps, last, plan, generator)
        reasons = tuple("" if fine else INFEASIBLE for fine in chosen.feasible.tolist())
        action = Decision.of(chosen.action, reasons).required()
        if np.ndim(obs) == 1 or (isinstance(obs, dict) and len(action) == 1):
            action = action[0]
        return action.to(obs.device) if isinstance(obs, Tensor) else action.cpu().numpy()  # type: ignore[return-value]

    def decide(
        self,
        obs: Any,
        *,
        candidates: int | None = None,
        steps: int | None = None,
        last: Any = None,
        plan: Any = None,
        generator: torch.Generator | None = None,
    ) -> Decision:
        """As `act`; where there is no action, the reason. A policy that was calibrated also asks where the observation
        is unfamiliar, or where the best action that the constraints leave is unlikely."""
        rows = self.policy.observed(obs)
        chosen = self._choose(rows, candidates, steps, last, plan, generator)
        reasons = tuple("" if fine else INFEASIBLE for fine in chosen.feasible.tolist())
        if self.policy.calibration is not None:
            other = self.policy.doubts(rows, chosen.energy)
            reasons = tuple(one or two for one, two in zip(reasons, other, strict=True))
        return Decision.of(chosen.action, reasons)

    def share(
        self,
        obs: Any,
        *,
        draws: int = 1024,
        last: Any = None,
        plan: Any = None,
        generator: torch.Generator | None = None,
    ) -> Share:
        """How much of p(y|x) the constraints leave: ∫ p(y|x) 1[allowed] exp(−soft) dy, by `draws` of the energy's
        proposal (of the box, where it has none), weighted by w ∝ exp(−E)/q. The standard error is √Σ w²(f − share)²
        with Σw = 1, that of the delta method; far from the proposal both are too small, as of any importance sampling.
        """
        if draws < 2:
            raise ValueError(f"draws must be at least 2, got {draws}")
        rows = self.policy.observed(obs)
        with torch.no_grad():
            problem = self.policy.problem(rows, generator=generator)
            drawn = problem.start(draws)
            weights = (-problem.excess(drawn)).softmax(1)
            scene = self._scene(self.policy.actions(problem.clip(drawn), rows), rows, last, plan)
            left = allowed(self.hard, scene) * (-self._penalties(scene).clamp_min(0)).exp()
            left = left.to(weights.dtype)
            share = (weights * left).sum(1)
            return Share(share, (weights * (left - share.unsqueeze(1))).square().sum(1).sqrt())

    def _choose(
        self,
        rows: Float[Tensor, "batch obs"],
        candidates: int | None,
        steps: int | None,
        last: Any,
        plan: Any,
        generator: torch.Generator | None,
    ) -> _Choice:
        base = self.policy
        with torch.no_grad():
            problem = base.problem(rows, candidates=candidates, steps=steps, generator=generator, everything=True)
            found = base.acting.search(problem)
            scene = self._scene(base.actions(found.actions, rows), rows, last, plan)
            good, penalties = allowed(self.hard, scene), self._penalties(scene)
            speaks = penalties.amin(1) < penalties.amax(1)
            taken = found.chosen.unsqueeze(1)
            # An infinite energy is no candidate, whatever the constraints say.
            keeps = ~speaks & (good & (found.energies < torch.inf)).gather(1, taken)[:, 0]
            pool = [_Pool(scene.actions, found.actions, found.energies + penalties, good)]
            if not bool(good.all()):
                pool.append(self._repaired(problem, scene, rows))
            if not bool(torch.cat([each.usable() for each in pool], 1).amin(1).max() < torch.inf):
                drawn = problem.clip(problem.uniform(LAST_RESORT))
                anywhere = scene.of(self._steps(base.actions(drawn, rows)))
                pool.append(self._with_energies(problem, anywhere, rows))
                pool.append(self._repaired(problem, anywhere, rows))
            pooled = _Pool(*(torch.cat(parts, 1) for parts in zip(*pool, strict=True)))
            if not bool((keeps | speaks).all()):
                pooled = self._refined(problem, scene, rows, pooled)
            costs = pooled.usable()
            index = torch.where(keeps, found.chosen, costs.argmin(1))
            action, normalised = (_at(each, index) for each in (pooled.raw.flatten(2), pooled.inside))
            feasible = costs.gather(1, index.unsqueeze(1))[:, 0] < torch.inf
            energy = problem.energies(normalised.unsqueeze(1))[:, 0]
            return _Choice(action, normalised, energy, feasible)

    def _refined(self, problem: Problem, scene: Scene, rows: Tensor, pool: _Pool) -> _Pool:
        """The pool with smaller and smaller moves around the best allowed candidate, which also serve constraints that
        know no nearest place. The best one stays in the pool, so that it never gets worse."""
        for size in REFINEMENTS:
            best = _at(pool.inside, pool.usable().argmin(1)).unsqueeze(1)
            shape = (1 if problem.shared else problem.rows, REFINED, best.shape[2])
            drawn = problem.clip(best + size * draw_normal(problem.generator, shape, best))
            near = scene.of(self._steps(self.policy.actions(drawn, rows)))
            pool = _Pool(*(torch.cat(pair, 1) for pair in zip(pool, self._repaired(problem, near, rows), strict=True)))
        return pool

    def _repaired(self, problem: Problem, scene: Scene, rows: Tensor) -> _Pool:
        """The candidates at the nearest allowed places; what was allowed stays."""
        movers = [constraint.nearest for constraint in self.hard if hasattr(constraint, "nearest")]
        low, high = (self._steps(limit.expand(1, 1, -1)) for limit in self.policy.limits)
        for _ in range(ROUNDS if movers else 0):
            for nearest in movers:
                scene = scene.of(nearest(scene).clamp(low, high))
            if bool(allowed(self.hard, scene).all()):
                break
        return self._with_energies(problem, scene, rows)

    def _with_energies(self, problem: Problem, scene: Scene, rows: Tensor) -> _Pool:
        """Raw candidates, the same normalised, what they cost, and whether they are allowed."""
        flat = scene.actions.flatten(2)
        samples = flat.shape[1]
        targets = self.policy.units.targets(flat.flatten(0, 1), rows.repeat_interleave(samples, 0))
        inside = targets.to(problem.low.dtype).unflatten(0, (-1, samples))
        costs = problem.energies(inside) + self._penalties(scene)
        return _Pool(scene.actions, inside, costs, allowed(self.hard, scene))

    def _penalties(self, scene: Scene) -> Float[Tensor, "batch samples"]:
        total = scene.actions.new_zeros(scene.actions.shape[:2])
        for each in self.soft:
            total = total + each.energy(scene)
        return total

    def _scene(self, actions: Tensor, rows: Tensor, last: Any, plan: Any) -> Scene:
        width = self.columns[1]
        before = self._given(last, "last", rows, width)
        planned = self._given(plan, "plan", rows, width * self.horizon)
        planned = None if planned is None else self._steps(planned)
        return Scene(self._steps(actions), rows, self.policy.units, before, planned)

    def _given(self, values: Any, name: str, rows: Tensor, columns: int) -> Tensor | None:
        if values is None:
            return None
        given = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values, np.float64))
        given = given.to(self.device, self.policy.act_box.centre.dtype)
        given = given.unsqueeze(0) if given.ndim == 1 else given
        if given.shape != (len(rows), columns):
            raise ValueError(f"{name} must be [{len(rows)}, {columns}], got {tuple(given.shape)}")
        return given

    def _steps(self, flat: Tensor) -> Tensor:
        """Chunks as [..., horizon, act]."""
        return flat.unflatten(-1, (self.horizon, -1))


def _at(values: Float[Tensor, "batch samples act"], index: Int[Tensor, " batch"]) -> Float[Tensor, "batch act"]:
    return values.gather(1, index.view(-1, 1, 1).expand(-1, 1, values.shape[2]))[:, 0]
