"""The landscape: E(x, y) over one or two coordinates of the action, the others held at the chosen action."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cebm.acting import Problem
from cebm.policy import EnergyPolicy

MOST_POINTS = 512
"""Points along an axis, at most: their square is computed at once."""
BATCH = 16_384
"""Actions whose energies are computed at once, so that a large network does not need all memory."""


@dataclass(frozen=True, eq=False)
class Landscape:
    """Energies on a grid of normalised actions."""

    axes: tuple[int, ...]
    """One or two coordinates of the normalised action: across, and up."""
    places: Float[np.ndarray, " points"]
    """Normalised values along each axis, from the smallest: the middles of `points` equal cells of the box."""
    energies: Float[np.ndarray, "points points"] | Float[np.ndarray, " points"]
    """E at them, [up, across] or [across]; infinite where the energy is NaN or infinite."""
    held: Float[np.ndarray, " inside"]
    """The normalised action that the other coordinates are held at."""
    energy: float
    """E of that action."""
    action: Float[np.ndarray, " act"]
    """The same action in the user's units."""
    level: float | None = None
    """The noise level; None: the energy as it is."""

    @property
    def density(self) -> Float[np.ndarray, "points points"] | Float[np.ndarray, " points"]:
        """exp(−E)/Z on these points, per unit of normalised action: p(y|x) where the action has no other
        coordinates, and p of these coordinates given the others elsewhere."""
        lowest = float(self.energies.min(initial=inf))
        if lowest == inf:
            return np.zeros_like(self.energies)
        weights = np.exp(lowest - self.energies)
        return weights / weights.sum() / self.cell

    @property
    def cell(self) -> float:
        """Length or area that a point stands for."""
        width = 1.0 if len(self.places) == 1 else float(self.places[1] - self.places[0])
        return width ** len(self.axes)

    @property
    def whole(self) -> bool:
        """Whether the axes are all coordinates that the action has."""
        return len(self.axes) == len(self.held)


@torch.no_grad()
def landscape(
    policy: EnergyPolicy,
    obs: Any,
    axes: Sequence[int] = (0, 1),
    points: int = 96,
    level: float | None = None,
    held: Any = None,
) -> Landscape:
    """E over one or two coordinates of the normalised action, for one observation.

    `level`: a noise level, for an energy that has some. `held`: the normalised action that gives the other coordinates;
    by default the one that `policy.act(obs)` chooses.
    """
    axes = check_axes(policy, axes)
    if not 2 <= points <= MOST_POINTS:
        raise ValueError(f"points must be between 2 and {MOST_POINTS}, got {points}")
    problem = at_level(policy.problem(obs), level)
    if problem.rows != 1:
        raise ValueError(f"a landscape is of one observation, got {problem.rows}")
    base = chosen(policy, obs) if held is None else check_held(policy, held)
    places = places_of(policy, points)
    grid = base.repeat(points ** len(axes), 1)
    along = torch.as_tensor(places).to(grid)
    grid[:, axes[0]] = along.repeat(points ** (len(axes) - 1))
    if len(axes) == 2:
        grid[:, axes[1]] = along.repeat_interleave(points)
    energies = energies_of(problem, grid).reshape((points,) * len(axes))
    own = float(energies_of(problem, base[None])[0])
    action = policy.actions(base[None, None], obs)[0, 0]
    return Landscape(axes, places, energies, base.double().cpu().numpy(), own, action.double().cpu().numpy(), level)


def chosen(policy: EnergyPolicy, obs: Any) -> Float[Tensor, " inside"]:
    """The normalised action that `policy.act(obs)` takes."""
    with torch.no_grad():
        found = policy.acting.search(policy.problem(obs))
    return found.actions[0, int(found.chosen[0])].detach()


def places_of(policy: EnergyPolicy, points: int) -> Float[np.ndarray, " points"]:
    """The middles of equal cells of the box with its margin."""
    return ((np.arange(points) + 0.5) / points * 2 - 1) * policy.act_box.limit


def at_level(problem: Problem, level: float | None) -> Problem:
    """The same problem with the energy of a noise level."""
    if level is None:
        return problem
    if not problem.energy.levels:
        raise ValueError(f"level: a {type(problem.energy).__name__} has no noise levels")
    if not 0 < level < inf:
        raise ValueError(f"level must be positive and finite, got {level}")
    return replace(problem, energy=problem.energy.at(level))


def energies_of(problem: Problem, actions: Float[Tensor, "actions inside"]) -> Float[np.ndarray, " actions"]:
    """Energies of the actions for the problem's one observation, in parts that fit into memory."""
    parts = [problem.energies(part[None])[0] for part in actions.split(BATCH)]
    return torch.cat(parts).double().cpu().numpy()


def check_axes(policy: EnergyPolicy, axes: Sequence[int]) -> tuple[int, ...]:
    """One or two different coordinates that the policy's normalised action has."""
    dim = policy.act_box.dim
    found = tuple(axes)[:dim] if tuple(axes) == (0, 1) else tuple(axes)
    if not 1 <= len(found) <= 2 or len(set(found)) != len(found):
        raise ValueError(f"axes must be one or two different coordinates, got {found}")
    if any(not 0 <= axis < dim for axis in found):
        raise ValueError(f"axes must be below {dim}, the coordinates of the action, got {found}")
    return found


def check_held(policy: EnergyPolicy, held: Any) -> Float[Tensor, " inside"]:
    """The normalised action to hold the other coordinates at."""
    base = torch.as_tensor(np.asarray(held, np.float64)).to(policy.device, policy.problem(policy.units.middle).low.dtype)
    if base.shape != (policy.act_box.dim,) or not bool(base.isfinite().all()):
        raise ValueError(f"held must be {policy.act_box.dim} finite numbers, got shape {tuple(base.shape)}")
    return base
