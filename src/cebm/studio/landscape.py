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
FIRST = 6
"""Points along an axis where it starts; then each picture has twice as many, and starts from the one before."""
DESCENT = (24, 6, 2, 1)
"""Steps down the gradient in the first pictures; later ones take none."""
REACH = 8
"""Length of the first one, in halves of the distance of two points."""
GROWTH, SHRINKAGE = 1.5, 0.4
"""Factors of a step's length: after one that went down, and after one that climbed, which is not taken."""


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
    coordinates: on a few points from those of the search's candidates on by gradient descent, and on twice as many
    from those of their neighbours, until all points are there. It is an upper bound of the minimum.
    `directions`: one or two rows of weights in place of `axes`, such as `principal(subject)` gives.
    """
    axes, weights = check_plane(policy, axes, directions)
    if not 2 <= points <= MOST_POINTS:
        raise ValueError(f"points must be between 2 and {MOST_POINTS}, got {points}")
    problem = at_level(policy.problem(obs), level)
    if problem.rows != 1:
        raise ValueError(f"a landscape is of one observation, got {problem.rows}")
    freed = minimised and len(weights) < policy.act_box.dim
    found = policy.acting.search(policy.problem(obs)) if held is None or freed else None
    base = found.actions[0, int(found.chosen[0])] if found is not None and held is None else check_held(policy, held)
    places = places_of(policy, points)
    if freed and found is not None:
        order = policy.problem(obs).energies(found.actions[:1])[0].argsort()[: STARTS - 1]
        starts = torch.cat([base[None], found.actions[0, order].to(base)])
        energies = _lowest(policy, problem, weights, starts, points)
    else:
        energies = energies_of(problem, plane(base, weights, places))
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


def _lowest(
    policy: EnergyPolicy,
    problem: Problem,
    directions: Float[np.ndarray, "shown inside"],
    starts: Float[Tensor, "starts inside"],
    points: int,
) -> Float[np.ndarray, " grid"]:
    """The lowest energy found at each point over the coordinates that the picture does not show. All of `starts` are
    tried on a few points, and what is found there spreads to twice as many, until there are `points`."""
    rows = torch.as_tensor(directions).to(starts)
    across = rows.T @ torch.diag(1 / rows.square().sum(1)) @ rows  # projects onto the shown directions
    best, lowest = starts, torch.zeros(0)
    for turn, count in enumerate(_sizes(points)):
        grid = plane(starts[0], directions, places_of(policy, count))
        near = [*starts] if turn == 0 else [starts[0], *_spread(best, len(rows), count)]
        tried = torch.stack([(start + (grid - start) @ across).clamp(problem.low, problem.high) for start in near])
        energies = torch.as_tensor(energies_of(problem, tried.flatten(0, 1))).view(len(near), -1)
        lowest, index = energies.min(0)
        best = tried[index.to(grid.device), torch.arange(len(grid), device=grid.device)]
        if turn < len(DESCENT):
            size = REACH * policy.act_box.limit / count
            best, lowest = _descended(problem, best, across, DESCENT[turn], size)
    return lowest.numpy()


def _sizes(points: int) -> list[int]:
    """Points along an axis of each picture of a minimisation, the last one's last."""
    found = [points]
    while found[0] > FIRST:
        found.insert(0, -(-found[0] // 2))
    return found


def _spread(best: Float[Tensor, "old inside"], shown: int, count: int) -> list[Float[Tensor, "new inside"]]:
    """What was found on a picture, for one with `count` points along an axis: between its points and at the nearest."""
    old = round(len(best) ** (1 / shown))
    image = best.T.reshape(1, -1, *[old] * shown)
    modes = ("linear", "bilinear")[shown - 1], "nearest-exact"
    return [
        torch.nn.functional.interpolate(image, size=[count] * shown, mode=mode).reshape(best.shape[1], -1).T
        for mode in modes
    ]


def _descended(
    problem: Problem,
    best: Float[Tensor, "grid inside"],
    across: Float[Tensor, "inside inside"],
    steps: int,
    size: float,
) -> tuple[Float[Tensor, "grid inside"], Float[Tensor, " grid"]]:
    """Steps down the gradient in the coordinates that are not shown, each point with a length of its own."""
    lowest, slope = _energies_and_slopes(problem, best)
    length = torch.full((len(best), 1), size).to(best)
    for _ in range(steps):
        free = slope - slope @ across
        there = best - length * free / free.norm(dim=1, keepdim=True).clamp_min(1e-12)
        there = there.clamp(problem.low, problem.high)
        energies, slopes = _energies_and_slopes(problem, there)
        down = (energies < lowest)[:, None]
        best, slope = torch.where(down, there, best), torch.where(down, slopes, slope)
        lowest, length = torch.where(down[:, 0], energies, lowest), length * torch.where(down, GROWTH, SHRINKAGE)
    return best, lowest.double().cpu()


def _energies_and_slopes(
    problem: Problem, actions: Float[Tensor, "actions inside"]
) -> tuple[Float[Tensor, " actions"], Float[Tensor, "actions inside"]]:
    """In parts that fit into memory."""
    parts = [problem.energy.energies_and_gradients(problem.context, part[None]) for part in actions.split(BATCH)]
    energies = torch.cat([energies[0] for energies, _ in parts])
    return energies.where(energies.isfinite(), inf), torch.cat([slopes[0] for _, slopes in parts])


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
