"""The observation: which one of an episode, what its columns are called and how far they go, and moving them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from cebm.demonstrations import Demonstrations
from cebm.parts import Part
from cebm.policy import EnergyPolicy
from cebm.studio.subject import Subject

MOST_COLUMNS = 64
"""Columns that get a slider; of pictures there are far more."""
SAMPLE = 4096
"""Observations that tell how far a column goes."""


@dataclass(frozen=True)
class Column:
    """A column of one observation."""

    name: str
    """The part's name with the column's, or with its number."""
    low: float
    """Where its slider begins."""
    high: float
    """Where its slider ends."""


def window_of(subject: Subject, episode: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The observation (with its history, flat) and the demonstrated action (with its horizon) at a step of an
    episode."""
    data = _data(subject)
    if not 0 <= episode < data.episodes:
        raise ValueError(f"episode must be between 0 and {data.episodes - 1}, got {episode}")
    start, end = int(data.episode_starts[episode]), int(data.episode_ends[episode])
    if not 0 <= step < end - start:
        raise ValueError(f"step must be between 0 and {end - start - 1} in episode {episode}, got {step}")
    obs, actions = data.windows(subject.policy.history, subject.policy.horizon)[[start + step]]
    return obs[0].astype(np.float64), actions[0].astype(np.float64)


def first_window(subject: Subject) -> Float[np.ndarray, " window"]:
    """The observation that the studio shows first: the first of the data, or the middle of all."""
    if subject.demonstrations is None:
        return subject.policy.units.middle.double().cpu().numpy()
    return window_of(subject, 0, 0)[0]


def columns_of(subject: Subject) -> list[Column]:
    """Names and ranges of the columns of one observation, at most `MOST_COLUMNS`."""
    policy, data = subject.policy, subject.demonstrations
    names = names_of(policy.parts if data is None else data.parts, policy.columns[0])[:MOST_COLUMNS]
    low, high = _ranges(policy, data)
    return [Column(name, *_wider(float(low[i]), float(high[i]))) for i, name in enumerate(names)]


def coordinates_of(subject: Subject) -> list[str]:
    """Names of the coordinates of the normalised action: the columns of each step, where every column is plain."""
    policy, data = subject.policy, subject.demonstrations
    size = policy.act_box.dim // policy.horizon
    parts = () if data is None else data.action_parts
    plain = policy.units.conversion.plain
    names = names_of(parts, size) if plain and parts else [f"action {i}" for i in range(size)]
    if not plain:
        names = [f"feature {i}" for i in range(size)]
    if policy.horizon == 1:
        return names
    return [f"step {step + 1}: {name}" for step in range(policy.horizon) for name in names]


def moved(
    policy: EnergyPolicy, obs: Float[np.ndarray, " window"], column: int, value: float
) -> Float[np.ndarray, " window"]:
    """The observation with another value in a column of its newest frame; earlier frames move by as much, so that what
    they say about speed stays."""
    frame, _ = policy.columns
    if not 0 <= column < frame:
        raise ValueError(f"column must be between 0 and {frame - 1}, got {column}")
    if not np.isfinite(value):
        raise ValueError(f"value must be finite, got {value}")
    frames = np.array(obs, np.float64).reshape(policy.history, frame)
    frames[:, column] += value - frames[-1, column]
    return frames.ravel()


def sketch_of(subject: Subject) -> dict[str, Any] | None:
    """The task's sketch as plain data; None where it has none, or where the columns are not the task's own."""
    sketch = None if subject.task is None else subject.task.sketch
    if sketch is None:
        return None
    columns = [column for handle in sketch.handles for pair in handle.columns for column in pair]
    if any(not 0 <= column < subject.policy.columns[0] for column in columns):
        raise ValueError(f"the sketch of {subject.task} has columns that the observation has not")
    return {
        "low": list(sketch.low),
        "high": list(sketch.high),
        "handles": [{"name": h.name, "columns": [list(c) for c in h.columns], "radius": h.radius} for h in sketch.handles],
        "walls": [list(wall) for wall in sketch.walls],
        "downwards": sketch.downwards,
        "places": sketch.places and subject.policy.columns[1] == 2,
    }


def names_of(parts: tuple[Part, ...], size: int) -> list[str]:
    """A name for each column."""
    names = []
    for part in parts:
        each = part.columns or tuple(str(i) for i in range(part.size))
        names += [f"{part.name} {name}" for name in each] if part.size > 1 or part.columns else [part.name]
    return names if len(names) == size else [f"column {i}" for i in range(size)]


def _data(subject: Subject) -> Demonstrations:
    if subject.demonstrations is None:
        raise ValueError(f"{subject.name} has no data to step through; name some with --data, or a task with --task")
    return subject.demonstrations


def _ranges(policy: EnergyPolicy, data: Demonstrations | None) -> tuple[np.ndarray, np.ndarray]:
    if data is not None:
        rows = np.unique(np.linspace(0, data.steps - 1, min(SAMPLE, data.steps)).round().astype(int))
        seen = np.asarray(data.obs[rows], np.float64)
        return seen.min(0), seen.max(0)
    frame = policy.columns[0]
    if policy.units.conversion.plain:
        low, high = (bound.double().cpu().numpy()[-frame:] for bound in (policy.obs_box.low, policy.obs_box.high))
        return low, high
    middle = policy.units.middle.double().cpu().numpy()[-frame:]
    return middle - 1, middle + 1


def _wider(low: float, high: float) -> tuple[float, float]:
    """A tenth of room at both ends; a column that is always the same may move by 1."""
    room = 0.1 * (high - low) or 1.0
    return low - room, high + room
