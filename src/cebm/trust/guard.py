"""A guard for anybody's policy: do the demonstrations support this chunk of actions, here?

It learns a density p(chunk | observation) of its own from the demonstrations, and never looks into the policy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cebm.acting import Direct
from cebm.constraints import Constraint, Scene, allowed
from cebm.decisions import Decision
from cebm.demonstrations import Demonstrations
from cebm.energies import MixtureDensity
from cebm.learning import fit
from cebm.loading import load
from cebm.objectives import Likelihood
from cebm.optimisers import Adam, Cosine
from cebm.policy import EnergyPolicy
from cebm.recipes import Inputs, Trial
from cebm.trust.calibration import Calibration, calibrate, recent, signals

DENSITY = Trial(
    energy=MixtureDensity(width=128),
    objective=Likelihood(),
    optimiser=Adam(3e-3, Cosine(), average=0.995),
    acting=Direct(),
    inputs=Inputs("standardise", smoothing=0.05),
)
"""What a guard learns: a mixture density is normalised, so that one threshold serves all observations, and fast."""
DRAWS = 64
"""Supported chunks that a repair looks at."""
BLENDS = 9
"""Places between the chunk and each of those, where a nearer one may be supported too."""


@dataclass(frozen=True)
class Verdict:
    """What a guard says about chunks, one for each observation."""

    supported: Bool[Tensor, " batch"]
    """Whether the demonstrations support this chunk here, and it satisfies the constraints."""
    reasons: tuple[str, ...]
    """Why not; empty where it is supported."""
    score: Float[Tensor, " batch"]
    """The larger of both signals: how unfamiliar the observation is, how unlikely the chunk."""
    threshold: float
    """Beyond it a chunk is not supported."""


@dataclass(frozen=True, eq=False)
class Guard:
    """Says whether demonstrations support a chunk of actions. `Guard.fit` makes one."""

    density: EnergyPolicy
    """p(chunk | observation), learned from the demonstrations, with thresholds."""
    hard: tuple[Constraint, ...] = ()
    """What a chunk must satisfy besides."""

    @classmethod
    def fit(
        cls,
        demonstrations: Demonstrations,
        alpha: float = 0.05,
        *,
        history: int = 1,
        horizon: int = 1,
        steps: int = 1500,
        held_out: float = 0.4,
        constraints: Sequence[Constraint] = (),
        trial: Trial = DENSITY,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> "Guard":
        """A guard from demonstrations: a share `held_out` of the episodes sets the thresholds, so that an episode like
        them raises a false alarm anywhere with a probability of at most `alpha`. `history` and `horizon` are those of
        the policy to guard: observations that it sees, actions of a chunk."""
        training, others = demonstrations.split(held_out, seed)
        density = fit(training, trial=trial, steps=steps, seed=seed, device=device, history=history, horizon=horizon)
        settings = calibrate(density, others, alpha, seed=seed, given=True)
        return cls(replace(density, calibration=settings), tuple(constraints))

    @property
    def calibration(self) -> Calibration:
        """The thresholds of its signals."""
        if self.density.calibration is None:
            raise ValueError("the guard has no thresholds: Guard.fit makes one that has")
        return self.density.calibration

    def __call__(self, obs: Any, chunk: Any) -> Verdict:
        """Whether the chunks [batch, horizon · act] are supported at the observations [batch, history · obs]; one of
        each [obs], [horizon · act] will do. Of a history the oldest comes first, of a chunk the current action."""
        settings = self.calibration
        distance, energy = signals(self.density, obs, chunk, settings.neighbours)
        reasons = settings.reasons(distance, energy)
        if self.hard:
            fine = allowed(self.hard, self._scene(obs, chunk))[:, 0].tolist()
            broken = "the chunk breaks a constraint"
            pairs = zip(reasons, fine, strict=True)
            reasons = tuple(
                reason if good else f"{reason} and {broken}" if reason else broken for reason, good in pairs
            )
        score = torch.maximum(settings.unfamiliar(distance), settings.unlikely(energy))
        supported = torch.tensor([not reason for reason in reasons], device=score.device)
        return Verdict(supported, reasons, score, settings.threshold)

    def repair(self, obs: Any, chunk: Any, generator: torch.Generator | None = None) -> Decision:
        """The nearest supported chunk: of the chunk itself, of `DRAWS` draws of the density, and of blends between; it
        satisfies the constraints. Where the observation is unfamiliar, or none is found, the reason. Near counts in
        normalised units."""
        density, settings = self.density, self.calibration
        rows = density.observed(obs)
        done = density.raw_actions(chunk, len(rows))
        verdict = self(rows, done)
        if bool(verdict.supported.all()):
            return Decision.of(done, verdict.reasons)
        with torch.no_grad():
            problem = density.problem(rows, generator=generator)
            inside = density.units.targets(done, rows).to(problem.low.dtype).unsqueeze(1)
            drawn = torch.cat([problem.energy.best(problem.context).unsqueeze(1), problem.start(DRAWS)], 1)
            share = torch.linspace(0, 1, BLENDS + 2, device=inside.device, dtype=inside.dtype)[1:]
            start = inside.nan_to_num(0.0, 0.0, 0.0)  # a chunk that is not finite has no nearest one
            blends = (start.unsqueeze(2) + share.view(-1, 1) * (drawn - start).unsqueeze(2)).flatten(1, 2)
            normalised = problem.clip(blends)
            raw = density.actions(normalised, rows)
            scene = Scene(self._steps(raw), rows, density.units)
            if self.hard:
                for _ in range(4):
                    for constraint in self.hard:
                        if hasattr(constraint, "nearest"):
                            scene = scene.of(constraint.nearest(scene))
                raw = scene.actions.flatten(2)
            samples = raw.shape[1]
            targets = density.units.targets(raw.flatten(0, 1), rows.repeat_interleave(samples, 0))
            normalised = targets.to(problem.low.dtype).unflatten(0, (-1, samples))
            distance, _ = signals(density, rows, done, settings.neighbours)
            unlikely = settings.unlikely(problem.energies(normalised))
            good = allowed(self.hard, scene) & (unlikely <= settings.threshold)
            away = (normalised - start).square().sum(-1)
            index = torch.where(good, away, torch.inf).argmin(1)
            found = raw.gather(1, index.view(-1, 1, 1).expand(-1, 1, raw.shape[2]))[:, 0]
            unfamiliar = ~(settings.unfamiliar(distance) <= settings.threshold)
        reasons = [
            "" if fine else why if strange else "" if some else "no supported chunk satisfies the constraints"
            for fine, why, strange, some in zip(
                verdict.supported.tolist(), verdict.reasons, unfamiliar.tolist(), good.any(1).tolist(), strict=True
            )
        ]
        return Decision.of(torch.where(verdict.supported.unsqueeze(1), done, found), tuple(reasons))

    def over_chunks(self, held_out: Demonstrations, alpha: float = 0.05, *, every: int = 8, window: int = 4) -> "Guard":
        """This guard, with a threshold for the last `window` chunks together, of which one is asked for in `every`
        steps: a policy that it wraps asks too where their mean energy is above that of a share 1 − alpha of the
        episodes `held_out` anywhere. The share of false alarms adds to that of single chunks."""
        found = recent(self.density, held_out, alpha, every=every, window=window)
        return replace(self, density=replace(self.density, calibration=replace(self.calibration, recent=found)))

    def wrap(self, policy: Any, repair: bool = True) -> "GuardedPolicy":
        """A policy whose chunks are supported: repaired where they are not, or an Abstention. `repair=False`: it asks
        instead of repairing."""
        if not callable(getattr(policy, "act", None)):
            raise ValueError(f"policy: a {type(policy).__name__} has no act()")
        return GuardedPolicy(self, policy, repair)

    def save(self, directory: str | Path) -> None:
        """Writes density and thresholds; constraints, which may be functions, are given again to `load`."""
        self.density.save(directory)

    @classmethod
    def load(cls, directory: str | Path, constraints: Sequence[Constraint] = ()) -> "Guard":
        """Reads a guard that `save` wrote."""
        guard = cls(load(directory), tuple(constraints))
        _ = guard.calibration  # refuses a policy without thresholds
        return guard

    def _scene(self, obs: Any, chunk: Any) -> Scene:
        rows = self.density.observed(obs)
        return Scene(self._steps(self.density.raw_actions(chunk, len(rows)).unsqueeze(1)), rows, self.density.units)

    def _steps(self, flat: Tensor) -> Tensor:
        return flat.unflatten(-1, (self.density.horizon, -1))


@dataclass(frozen=True, eq=False)
class GuardedPolicy:
    """Anybody's policy behind a guard. Where a chunk is not supported, it is repaired, or the policy asks. It is a
    policy itself; a Runner plays it, with a fallback where it asks."""

    guard: Guard
    """Says what is supported."""
    policy: Any
    """Any object with `act(obs [batch, obs]) -> [batch, horizon · act]`."""
    repair: bool = True
    """Give the nearest supported chunk where there is one."""
    past: list[Tensor] = field(default_factory=list, repr=False)
    """Energies [batch] of the last chunks of the episodes under way."""

    @property
    def history(self) -> int:
        """Observations that one input holds, oldest first."""
        return self.guard.density.history

    @property
    def horizon(self) -> int:
        """Actions that one output holds, the current one first."""
        return self.guard.density.horizon

    @property
    def columns(self) -> tuple[int, int]:
        """Raw columns of one observation and of one action."""
        return self.guard.density.columns

    @property
    def device(self) -> torch.device:
        return self.guard.density.device

    def reset(self) -> None:
        """A new episode begins, for the guarded policy too."""
        self.past.clear()
        forget: Callable[[], Any] | None = getattr(self.policy, "reset", None)
        if forget is not None:
            forget()

    def act(self, obs: Any) -> Any:
        """A supported chunk; an Abstention names the observation for which there is none."""
        action = self.decide(obs).required()
        action = action[0] if np.ndim(obs) == 1 else action
        return action if isinstance(obs, Tensor) else action.cpu().numpy()

    def decide(self, obs: Any) -> Decision:
        """A supported chunk for each observation, or the reason to ask."""
        chunk = self.policy.act(obs)
        if self.repair:
            found = self.guard.repair(obs, chunk)
        else:
            actions = self.guard.density.raw_actions(chunk, 1 if np.ndim(obs) == 1 else len(obs))
            found = Decision.of(actions, self.guard(obs, chunk).reasons)
        together = self._together(obs, chunk)
        return found if not any(together) else Decision.of(found.action, _first(found.reasons, together))

    def _together(self, obs: Any, chunk: Any) -> tuple[str, ...]:
        """Why the last chunks together are a reason to ask, for each observation."""
        settings = self.guard.calibration.recent
        if settings is None:
            return ()
        energies = signals(self.guard.density, obs, chunk, 1)[1]
        if self.past and len(self.past[0]) != len(energies):
            raise ValueError(
                f"obs has {len(energies)} rows, the episodes under way are {len(self.past[0])}: reset first"
            )
        self.past.append(energies)
        del self.past[: -settings.window]
        if len(self.past) < settings.window:
            return ()
        mean = torch.stack(self.past).mean(0)
        return tuple(
            "" if fine else "the last chunks together are unlikely" for fine in (mean <= settings.limit).tolist()
        )


def _first(reasons: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    return tuple(reason or other for reason, other in zip(reasons, others, strict=True))
