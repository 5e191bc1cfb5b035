"""Two policies at the same observation: log densities on the same actions, their difference, and what both choose."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cebm.policy import EnergyPolicy
from cebm.studio.landscape import Landscape, chosen, energies_of, landscape, plane


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
    other: Float[np.ndarray, " shown"]
    """Where the second policy's choice is in the picture."""


@torch.no_grad()
def compare(
    first: EnergyPolicy,
    second: EnergyPolicy,
    obs: Any,
    axes: Sequence[int] = (0, 1),
    points: int = 96,
    directions: Any = None,
) -> Comparison:
    """Both policies at one observation. They must have the same columns, history and horizon; their units may differ:
    an action of the first policy's grid is turned into the second one's units."""
    check_alike(first, second)
    one = landscape(first, obs, axes, points, directions=directions)
    problem, own = second.problem(obs), chosen(second, obs)
    # The same slice in data units, held at the first policy's choice.
    grid = plane(torch.as_tensor(one.held, device=first.device), one.directions, one.places)
    energies = energies_of(problem, _in_units_of(second, first, grid, obs)).reshape(one.energies.shape)
    action = second.actions(own[None, None], obs)[0, 0].double().cpu().numpy()
    energy = float(energies_of(problem, own[None])[0])
    two = replace(one, energies=energies, held=own.double().cpu().numpy(), energy=energy, action=action)
    p, q = one.density, two.density
    floor = np.maximum(p / p.max(initial=1e-300), q / q.max(initial=1e-300)) > 1e-6
    logs = np.log(np.maximum(p, 1e-300)) - np.log(np.maximum(q, 1e-300))
    distance = float(0.5 * np.abs(p - q).sum() * one.cell)
    theirs = _in_units_of(first, second, own[None], obs)[0].double().cpu().numpy()
    return Comparison(one, two, np.where(floor, logs, 0.0), distance, one.shown(theirs))


def log_densities(policies: Sequence[EnergyPolicy], obs: Any, action: Any) -> list[tuple[float, float] | None]:
    """log p(y|x) of one action under each policy (`policy.log_prob`, per unit of the data) with its standard error.
    None where a policy has no density in the units of the data."""
    found: list[tuple[float, float] | None] = []
    for policy in policies:
        plain = policy.units.conversion.plain or policy.units.conversion.relative
        if not plain:
            found.append(None)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error tells how far to trust it
            value = policy.log_prob(np.asarray(obs)[None], np.asarray(action)[None])
        found.append((float(value.value[0]), float(value.standard_error[0])))
    return found


def _in_units_of(
    target: EnergyPolicy, source: EnergyPolicy, actions: Float[Tensor, "some inside"], obs: Any
) -> Float[Tensor, "some inside"]:
    """Normalised actions of one policy in the normalised units of another."""
    seen = torch.as_tensor(np.asarray(obs, np.float64)).reshape(1, -1)
    raw = source.units.actions(actions[None].to(source.act_box.centre), seen.to(source.obs_box.centre))[0]
    rows = seen.to(target.obs_box.centre).expand(len(raw), -1)
    return target.units.targets(raw.to(target.act_box.centre), rows)


def check_alike(first: EnergyPolicy, second: EnergyPolicy) -> None:
    """A ValueError where two policies do not take the same observations or do not give the same actions."""
    for name in ("columns", "history", "horizon"):
        mine, other = getattr(first, name), getattr(second, name)
        if mine != other:
            raise ValueError(f"two policies with different {name} cannot be compared: {mine} and {other}")
