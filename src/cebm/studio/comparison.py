"""Two policies at the same observation: log densities on the same actions, their difference, and what both choose."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from cebm.policy import EnergyPolicy
from cebm.studio.landscape import Landscape, check_axes, chosen, energies_of, landscape, places_of


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two landscapes on the same actions, in the coordinates of the first policy."""

    first: Landscape
    """That of the first policy."""
    second: Landscape
    """That of the second at the same actions; `held` and `action` are its own choice."""
    difference: Float[np.ndarray, "points points"] | Float[np.ndarray, " points"]
    """log p₁ − log p₂, both normalised over these points; 0 where neither puts more than 1e-6 of its peak."""
    distance: float
    """Total variation distance of the two densities on these points: 0 alike, 1 apart."""


@torch.no_grad()
def compare(
    first: EnergyPolicy, second: EnergyPolicy, obs: Any, axes: Sequence[int] = (0, 1), points: int = 96
) -> Comparison:
    """Both policies at one observation. They must have the same columns, history and horizon; their units may differ:
    an action of the first policy's grid is turned into the second one's units."""
    check_alike(first, second)
    axes = check_axes(first, axes)
    one = landscape(first, obs, axes, points)
    problem, own = second.problem(obs), chosen(second, obs)
    # The same slice in data units, held at the first policy's choice.
    grid = torch.as_tensor(one.held, device=first.device).repeat(points ** len(axes), 1)
    along = torch.as_tensor(places_of(first, points)).to(grid)
    grid[:, axes[0]] = along.repeat(points ** (len(axes) - 1))
    if len(axes) == 2:
        grid[:, axes[1]] = along.repeat_interleave(points)
    seen = torch.as_tensor(np.asarray(obs, np.float64)).reshape(1, -1)
    raw = first.units.actions(grid[None].to(first.act_box.centre), seen.to(first.obs_box.centre))[0]
    rows = seen.to(second.obs_box.centre).expand(len(raw), -1)
    inside = second.units.targets(raw.to(second.act_box.centre), rows).to(problem.low)
    energies = energies_of(problem, inside).reshape(one.energies.shape)
    action = second.actions(own[None, None], obs)[0, 0].double().cpu().numpy()
    energy = float(energies_of(problem, own[None])[0])
    two = Landscape(axes, one.places, energies, own.double().cpu().numpy(), energy, action)
    p, q = one.density, two.density
    floor = np.maximum(p / p.max(initial=1e-300), q / q.max(initial=1e-300)) > 1e-6
    logs = np.log(np.maximum(p, 1e-300)) - np.log(np.maximum(q, 1e-300))
    return Comparison(one, two, np.where(floor, logs, 0.0), float(0.5 * np.abs(p - q).sum() * one.cell))


def check_alike(first: EnergyPolicy, second: EnergyPolicy) -> None:
    """A ValueError where two policies do not take the same observations or do not give the same actions."""
    for name in ("columns", "history", "horizon"):
        mine, other = getattr(first, name), getattr(second, name)
        if mine != other:
            raise ValueError(f"two policies with different {name} cannot be compared: {mine} and {other}")
