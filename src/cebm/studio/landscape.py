"""The landscape: E(x, y) over one or two coordinates of the action, the others held at the chosen action or minimised
over; or over two directions in the space of actions, such as the principal ones of demonstrated chunks."""

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
STARTS = 16
"""Values of the other coordinates that a minimisation starts from, at most."""
DESCENT = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
"""Lengths of the steps that it then takes down the gradient, as shares of the box; one that climbs is not taken."""


@dataclass(frozen=True, eq=False)
class Landscape:
    """Energies on a grid of normalised actions."""

    axes: tuple[int, ...]
    """One or two coordinates of the normalised action: across, and up. Empty where `directions` are others."""
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
    directions: Float[np.ndarray, "shown inside"]
    """The weights that give the shown coordinates of an action: those of `axes`, or others."""
    level: float | None = None
    """The noise level; None: the energy as it is."""
    minimised: bool = False
    """Whether the other coordinates are where the energy is lowest, instead of held."""

    def shown(self, actions: Float[np.ndarray, "*some inside"]) -> Float[np.ndarray, "*some shown"]:
        """The coordinates of normalised actions in the picture."""
        return actions @ self.directions.T

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
        return width**self.energies.ndim

    @property
    def whole(self) -> bool:
        """Whether the picture has all coordinates of the action."""
        return self.energies.ndim == len(self.held)


@torch.no_grad()
def landscape(
    policy: EnergyPolicy,
    obs: Any,
    axes: Sequence[int] = (0, 1),
    points: int = 96,
    level: float | None = None,
    held: Any = None,
    minimised: bool = False,
    directions: Any = None,
) -> Landscape:
    """E over one or two coordinates of the normalised action, for one observation.

    `level`: a noise level, for an energy that has some. `held`: the normalised action that gives the other coordinates;
    by default the one that `policy.act(obs)` chooses. `minimised`: the lowest energy that was found over the other
    coordinates, from those of the search's candidates on by gradient descent; an upper bound of the minimum.
    `directions`: one or two rows of weights in place of `axes`, such as `principal(subject)` gives.
    """
    axes, weights = check_plane(policy, axes, directions)
    if not 2 <= points <= MOST_POINTS:
        raise ValueError(f"points must be between 2 and {MOST_POINTS}, got {points}")
    problem = at_level(policy.problem(obs), level)
    if problem.rows != 1:
        raise ValueError(f"a landscape is of one observation, got {problem.rows}")
    base = chosen(policy, obs) if held is None else check_held(policy, held)
    places = places_of(policy, points)
    grid = plane(base, weights, places)
    if minimised and len(weights) < len(base):
        energies = _lowest(problem, grid, weights, _starts(policy, obs, base))
    else:
        energies = energies_of(problem, grid)
    shape = (points,) * len(weights)
    own = float(energies_of(problem, base[None])[0])
    action = policy.actions(base[None, None], obs)[0, 0].double().cpu().numpy()
    inside = base.double().cpu().numpy()
    return Landscape(axes, places, energies.reshape(shape), inside, own, action, weights, level, minimised)


def plane(
    base: Float[Tensor, " inside"],
    directions: Float[np.ndarray, "shown inside"],
    places: Float[np.ndarray, " points"],
) -> Float[Tensor, "grid inside"]:
    """The actions on a picture's points, row by row from below: `base` moved along the directions, which are
    orthogonal, until each of its shown coordinates is the place."""
    start, rows, along = base.double(), torch.as_tensor(directions).to(base.device), torch.as_tensor(places)
    along = along.to(base.device)
    wanted = [along] if len(rows) == 1 else [along.repeat(len(along)), along.repeat_interleave(len(along))]
    moves = [(w - start @ row).unsqueeze(1) * (row / row.square().sum()) for w, row in zip(wanted, rows, strict=True)]
    return (start + torch.stack(moves).sum(0)).to(base.dtype)


def _starts(policy: EnergyPolicy, obs: Any, base: Float[Tensor, " inside"]) -> Float[Tensor, "starts inside"]:
    """The actions whose other coordinates a minimisation starts from: `base`, and the lowest candidates of a search."""
    problem = policy.problem(obs)
    found = policy.acting.search(problem).actions[0]
    order = problem.energies(found[None])[0].argsort()[: STARTS - 1]
    return torch.cat([base[None], found[order].to(base)])


def _lowest(
    problem: Problem,
    grid: Float[Tensor, "grid inside"],
    directions: Float[np.ndarray, "shown inside"],
    starts: Float[Tensor, "starts inside"],
) -> Float[np.ndarray, " grid"]:
    """The lowest energy found at each point of the grid over the coordinates that the picture does not show."""
    rows = torch.as_tensor(directions).to(grid)
    across = rows.T @ torch.diag(1 / rows.square().sum(1)) @ rows  # projects onto the shown directions
    best, lowest = grid, torch.full((len(grid),), inf)
    for start in starts:
        there = (start + (grid - start) @ across).clamp(problem.low, problem.high)
        energies = torch.as_tensor(energies_of(problem, there))
        best = torch.where((energies < lowest)[:, None].to(best.device), there, best)
        lowest = torch.minimum(energies, lowest)
    for length in DESCENT:
        parts = [problem.energy.energies_and_gradients(problem.context, part[None])[1][0] for part in best.split(BATCH)]
        slope = torch.cat(parts)
        slope = slope - slope @ across
        there = best - length * slope / slope.norm(dim=1, keepdim=True).clamp_min(1e-12)
        there = there.clamp(problem.low, problem.high)
        energies = torch.as_tensor(energies_of(problem, there))
        best = torch.where((energies < lowest)[:, None].to(best.device), there, best)
        lowest = torch.minimum(energies, lowest)
    return lowest.numpy()


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


def check_plane(
    policy: EnergyPolicy, axes: Sequence[int], directions: Any
) -> tuple[tuple[int, ...], Float[np.ndarray, "shown inside"]]:
    """The axes, and the weights that give the shown coordinates; no axes where directions are given."""
    dim = policy.act_box.dim
    if directions is None:
        axes = check_axes(policy, axes)
        return axes, np.eye(dim)[list(axes)]
    weights = np.asarray(directions, np.float64)
    if weights.ndim != 2 or weights.shape[1] != dim or not 1 <= len(weights) <= 2 or not np.isfinite(weights).all():
        raise ValueError(f"directions must be one or two rows of {dim} finite numbers, got shape {weights.shape}")
    lengths = np.linalg.norm(weights, axis=1)
    if not lengths.all() or (len(weights) == 2 and abs(weights[0] @ weights[1]) > 1e-6 * lengths.prod()):
        raise ValueError("directions must be orthogonal, and none of them zero")
    return (), weights


def check_held(policy: EnergyPolicy, held: Any) -> Float[Tensor, " inside"]:
    """The normalised action to hold the other coordinates at."""
    base = torch.as_tensor(np.asarray(held, np.float64)).to(
        policy.device, policy.problem(policy.units.middle).low.dtype
    )
    if base.shape != (policy.act_box.dim,) or not bool(base.isfinite().all()):
        raise ValueError(f"held must be {policy.act_box.dim} finite numbers, got shape {tuple(base.shape)}")
    return base
