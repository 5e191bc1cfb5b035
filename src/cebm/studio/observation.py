"""The observation: which one of an episode, what its columns are called and how far they go, and moving them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from cebm.demonstrations import Demonstrations
from cebm.parts import Part
from cebm.policy import EnergyPolicy
from cebm.runner import Runner
from cebm.studio.subject import Subject
from cebm.tasks import Sketch
from cebm.tasks.base import Value

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


def window_of(
    subject: Subject, episode: int, step: int, data: Demonstrations | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The observation (with its history, flat) and the action (with its horizon) at a step of an episode of `data`, by
    default the subject's demonstrations."""
    data = _data(subject) if data is None else data
    if not 0 <= episode < data.episodes:
        raise ValueError(f"episode must be between 0 and {data.episodes - 1}, got {episode}")
    start, end = int(data.episode_starts[episode]), int(data.episode_ends[episode])
    if not 0 <= step < end - start:
        raise ValueError(f"step must be between 0 and {end - start - 1} in episode {episode}, got {step}")
    obs, actions = data.windows(subject.policy.history, subject.policy.horizon)[[start + step]]
    return obs[0].astype(np.float64), actions[0].astype(np.float64)


def rolled(subject: Subject, seed: int) -> tuple[Demonstrations, dict[str, Value]]:
    """A fresh roll-out: what the policy sees and does in the first episode of a seed of its task, and the task's row on
    it. The policy acts as it does by default, with random numbers of this seed."""
    if subject.task is None:
        raise ValueError(f"{subject.name} has no task to act in; name one with --task")
    policy = subject.policy
    recorder = _Recorder(Runner(policy, generator=torch.Generator(policy.device).manual_seed(seed)))
    played = subject.task.roll_out(recorder, 1, seed)
    row = played.rows[0]
    # Of several side by side, an environment may go on after its end.
    steps = min(len(recorder.seen), int(row.get("length") or len(recorder.seen)))
    arrays = (np.stack(recorder.seen[:steps]), np.stack(recorder.done[:steps]), [steps])
    return Demonstrations.from_arrays(*arrays, source=f"roll-out of seed {seed}"), row


class _Recorder:
    """Hands on what an actor does in one episode, and remembers it."""

    def __init__(self, actor: Runner) -> None:
        self.actor = actor
        self.seen: list[np.ndarray] = []
        self.done: list[np.ndarray] = []

    def reset(self) -> None:
        self.actor.reset()

    def act(self, obs: np.ndarray) -> np.ndarray:
        action = self.actor.act(obs)
        self.seen.append(np.array(obs[0], np.float64))
        self.done.append(np.array(action[0], np.float64))
        return action


def first_window(subject: Subject) -> Float[np.ndarray, " window"]:
    """The observation that the studio shows first: the first of the data, or the middle of all."""
    if subject.demonstrations is None:
        return subject.policy.units.middle.double().cpu().numpy()
    return window_of(subject, 0, 0)[0]


def columns_of(subject: Subject) -> list[Column]:
    """Names and ranges of the columns of one observation, at most `MOST_COLUMNS`."""
    policy, data = subject.policy, subject.demonstrations
    parts = policy.parts if data is None else data.parts
    names = names_of(parts, policy.columns[0])[:MOST_COLUMNS]
    if subject.task is not None and subject.task.sketch is not None and not any(part.columns for part in parts):
        names = _by_handles(names, subject.task.sketch)
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
        "handles": [
            {"name": h.name, "columns": [list(c) for c in h.columns], "radius": h.radius} for h in sketch.handles
        ],
        "walls": [list(wall) for wall in sketch.walls],
        "downwards": sketch.downwards,
        "places": sketch.places and subject.policy.columns[1] == 2,
    }


def marks_of(subject: Subject, obs: Any) -> list[tuple[str, list[float], float]]:
    """What to mark on a landscape: the things of the task's sketch, where an action is a place in its plane."""
    sketch = sketch_of(subject)
    if sketch is None or not sketch["places"]:
        return []
    frame = np.asarray(obs, np.float64).ravel()[-subject.policy.columns[0] :]
    return [
        (handle["name"], [float(frame[column]) for column in handle["columns"][0]], handle["radius"])
        for handle in sketch["handles"]
    ]


def principal(subject: Subject, count: int = 2) -> Float[np.ndarray, "count inside"]:
    """The directions in which demonstrated actions, chunks for one, differ most: rows of weights whose coordinate of an
    action in the box is within the box too. A ValueError for actions of one or two coordinates, which show as they
    are."""
    policy, dim = subject.policy, subject.policy.act_box.dim
    if dim <= 2:
        raise ValueError(f"an action of {dim} coordinates needs no principal directions")
    data = _data(subject)
    windows = data.windows(policy.history, policy.horizon)
    rows = np.unique(np.linspace(0, len(windows) - 1, min(SAMPLE, len(windows))).round().astype(int))
    obs, actions = windows[rows]
    inside = policy.problem(obs, previous=actions).previous
    if inside is None:
        raise ValueError("the demonstrated actions have no normalised form")
    values = inside.double().cpu().numpy()
    found = np.linalg.svd(values - values.mean(0), full_matrices=False)[2][:count]
    # The sign is free: the largest weight is positive. The farthest corner of the box has coordinate 1.
    found *= np.sign(found[np.arange(len(found)), np.abs(found).argmax(1)])[:, None]
    return found / np.abs(found).sum(1, keepdims=True)


def names_of(parts: tuple[Part, ...], size: int) -> list[str]:
    """A name for each column."""
    names = []
    for part in parts:
        each = part.columns or tuple(str(i) for i in range(part.size))
        names += [f"{part.name} {name}" for name in each] if part.size > 1 or part.columns else [part.name]
    return names if len(names) == size else [f"column {i}" for i in range(size)]


def _by_handles(names: list[str], sketch: Sketch) -> list[str]:
    """The names with those of what can be dragged; a thing of several points numbers them."""
    found = list(names)
    for handle in sketch.handles:
        for point, pair in enumerate(handle.columns):
            number = f" {point}" if len(handle.columns) > 1 else ""
            for axis, column in zip("xy", pair, strict=True):
                if column < len(found):
                    found[column] = f"{handle.name}{number} {axis}"
    return found


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
