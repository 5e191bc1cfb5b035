"""Pictures as plain data for the page's modules: the studio asks for them, the report and a page that is taken away
hold them.

Arrays go out as {"shape": …, "f32": base64 of little-endian float32}, which holds infinity and NaN too.
"""

import base64
from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np
import torch

from cebm.policy import EnergyPolicy
from cebm.studio.landscape import Landscape
from cebm.studio.search import Moves, Standing, standing

DOTS = 500
"""Candidates that are drawn, at most; numbers are of all of them."""
Mark = tuple[str, Sequence[float], float]
"""Kind, place in the user's actions, and radius, of what to mark on a landscape."""


def packed(values: np.ndarray) -> dict[str, Any]:
    """An array as the page reads it."""
    array = np.ascontiguousarray(values, dtype="<f4")
    return {"shape": list(array.shape), "f32": base64.b64encode(array.tobytes()).decode("ascii")}


def drawn_landscape(
    policy: EnergyPolicy,
    found: Landscape,
    obs: Any,
    names: Sequence[str] = (),
    marks: Sequence[Mark] = (),
    lowest: float = 0.0,
) -> dict[str, Any]:
    """A landscape, with its axes in the units of the actions' box. Energies are counted from `lowest`."""
    box = policy.act_box
    centre, scale = (values.double().cpu().numpy() for values in (box.centre, box.scale))
    scales = [
        # A coordinate is in its own units; a direction of several has none but the normalised ones.
        [float(centre[axis] + sign * box.limit * scale[axis]) for sign in (-1, 1)]
        for axis in found.axes
    ] or [[-box.limit, box.limit]] * len(found.directions)
    return {
        "axes": list(range(len(found.directions))),
        "names": list(names),
        "scales": scales,
        "limit": box.limit,
        "places": [float(found.places[0]), float(found.places[-1])],
        "energies": packed(found.energies - lowest),
        "density": packed(found.density) if found.energies.ndim == 1 else None,
        "held": found.shown(found.held).tolist(),
        "inside": found.held.tolist(),
        "energy": found.energy - lowest if isfinite(found.energy) else None,
        "action": found.action.tolist(),
        "whole": found.whole,
        "minimised": found.minimised,
        "marks": [drawn for mark in marks if (drawn := _mark(policy, found, obs, *mark)) is not None],
    }


def drawn_moves(
    moves: Moves, ground: Landscape, most: int = DOTS, lowest: float = 0.0, histograms: bool = True
) -> dict[str, Any]:
    """Candidates on their way over a landscape; of more than `most` the first ones, and the one that is chosen."""
    count = moves.states.shape[1]
    rows = list(range(min(count, most)))
    if moves.chosen not in rows:
        rows[-1] = moves.chosen
    found = {
        "steps": moves.steps,
        "states": packed(ground.shown(moves.states[:, rows])),
        "energies": packed(moves.energies[:, rows] - lowest),
        "chosen": rows.index(moves.chosen),
        "candidates": count,
        "action": moves.action.tolist(),
        "mean": finite([_mean(each) - lowest for each in moves.energies]),
        "lowest": finite((moves.energies.min(1) - lowest).tolist()),
        "gradients": finite(moves.gradients.tolist()),
        "changed": finite(moves.changed.tolist()),
        "spread": finite(moves.spread.tolist()),
    }
    if not histograms:
        return found
    frames = [standing(moves, ground, frame) for frame in range(len(moves.steps))]
    return found | _histograms(frames) | {"words": frames[-1].words}


def finite(values: Sequence[float]) -> list[float | None]:
    """NaN and infinities, which JSON has not, as None."""
    return [value if isfinite(value) else None for value in values]


def _histograms(frames: list[Standing]) -> dict[str, Any]:
    """Per axis: the candidates' [frames, bins], and those of the density, once."""
    return {
        "edges": frames[-1].edges.tolist(),
        "shares": [packed(np.stack(each)) for each in zip(*(frame.shares for frame in frames), strict=True)],
        "exact": [packed(each) for each in frames[-1].exact],
    }


def _mark(
    policy: EnergyPolicy, found: Landscape, obs: Any, kind: str, place: Sequence[float], radius: float
) -> dict[str, Any] | None:
    """Where a place in the user's actions is in the picture; what it leaves open is as in the chosen action. None where
    the picture does not show the coordinates that the place is given in."""
    box = policy.act_box
    action = np.array(found.action, np.float64)
    here = np.asarray(place, np.float64)[: len(action)]
    action[: len(here)] = here
    seen = torch.as_tensor(np.asarray(obs, np.float64)).reshape(1, -1)
    dtype, device = box.centre.dtype, policy.device
    row = torch.as_tensor(action).to(device, dtype).unsqueeze(0)
    inside = policy.units.targets(row, seen.to(device, policy.obs_box.centre.dtype))[0].double().cpu().numpy()
    if not found.axes or (policy.units.conversion.plain and max(found.axes) >= len(here)):
        return None
    scale = box.scale.double().cpu().numpy()
    result: dict[str, Any] = {"kind": kind}
    for name, axis, at in zip("xy", found.axes, found.shown(inside).tolist(), strict=False):
        result |= {name: at, f"r{name}": radius / float(scale[axis])}
    return result


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")
