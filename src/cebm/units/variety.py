"""What training may change about the demonstrations: jitter, which moves the state of an example, and symmetries, which
turn an episode into an equivalent one.

Yours is a frozen dataclass with one method: `perturb(obs, generator)` or `transform(obs, actions)`. Where it has
`located(obs_layout, action_layout)` too, that is called first, to turn the names of columns into indices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, pi
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cebm.demonstrations import Demonstrations
from cebm.units.columns import Columns, Layout, as_columns, indices


@runtime_checkable
class Perturbation(Protocol):
    """The contract of a jitter."""

    def perturb(
        self, obs: Float[Tensor, "batch history frame"], generator: torch.Generator
    ) -> Float[Tensor, "batch history frame"]:
        """Raw observations, moved: each example by its own draw, all its frames alike. The input stays as it is."""
        ...


@runtime_checkable
class Symmetry(Protocol):
    """The contract of a symmetry."""

    def transform(
        self, obs: Float[np.ndarray, "steps obs"], actions: Float[np.ndarray, "steps act"]
    ) -> tuple[Float[np.ndarray, "steps obs"], Float[np.ndarray, "steps act"]]:
        """An episode that could have been demonstrated just as well, made of this one."""
        ...


# ---------------------------------------------------------------------------------------------- jitter


@dataclass(frozen=True)
class Gaussian:
    """Adds N(0, deviation²) to columns of the state, each on its own."""

    columns: Columns
    """Columns of an observation."""
    deviation: float | tuple[float, ...]
    """Standard deviation in raw units: one for all, or one per column."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", as_columns(self.columns, "Gaussian.columns"))
        several = self.deviation if isinstance(self.deviation, tuple | list) else (self.deviation,)
        if not several or not all(0 <= each < inf for each in several):
            raise ValueError(f"deviation must be at least 0 and finite, got {self.deviation}")
        if isinstance(self.deviation, list):
            object.__setattr__(self, "deviation", tuple(self.deviation))

    def located(self, obs: Layout, actions: Layout) -> "Gaussian":
        """With indices for columns."""
        found = obs.columns(self.columns, "Gaussian")
        if isinstance(self.deviation, tuple) and len(self.deviation) not in (1, len(found)):
            raise ValueError(f"Gaussian: {len(found)} columns have {len(self.deviation)} deviations")
        return replace(self, columns=found)

    def perturb(
        self, obs: Float[Tensor, "batch history frame"], generator: torch.Generator
    ) -> Float[Tensor, "batch history frame"]:
        """obs + N(0, deviation²), the same for all frames."""
        own = _own(self.columns)
        noise = torch.randn(len(obs), 1, len(own), generator=generator, dtype=obs.dtype, device=obs.device)
        moved = obs.clone()
        moved[..., own] += noise * noise.new_tensor(self.deviation)
        return moved


@dataclass(frozen=True)
class PlanarPose:
    """Moves a rigid body in the plane: p' = c + R(a)(p − c) + s for all its points p in all frames, with the angle
    a ~ N(0, turn²), the shift s ~ N(0, shift²) and the centre c of its points in the newest frame."""

    columns: Columns
    """Columns of its points: x, y, x, y and so on."""
    shift: float = 0.0
    """Standard deviation of the shift along each axis, in raw units."""
    turn: float = 0.0
    """Standard deviation of the rotation, in radians."""
    angle: Columns | None = None
    """Columns that hold its angle in radians, which turn too."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", as_columns(self.columns, "PlanarPose.columns"))
        if self.angle is not None:
            object.__setattr__(self, "angle", as_columns(self.angle, "PlanarPose.angle"))
        for name in ("shift", "turn"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")

    def located(self, obs: Layout, actions: Layout) -> "PlanarPose":
        """With indices for columns."""
        points = _pairs(obs.columns(self.columns, "PlanarPose"), "PlanarPose")
        angle = None if self.angle is None else obs.columns(self.angle, "PlanarPose")
        return replace(self, columns=points, angle=angle)

    def perturb(
        self, obs: Float[Tensor, "batch history frame"], generator: torch.Generator
    ) -> Float[Tensor, "batch history frame"]:
        """One rigid motion per example."""
        own = _own(self.columns)
        drawn = torch.randn(len(obs), 3, generator=generator, dtype=obs.dtype, device=obs.device)
        turn, shift = self.turn * drawn[:, 0], self.shift * drawn[:, None, None, 1:]
        points = obs[..., own].unflatten(-1, (-1, 2))
        centre = points[:, -1:].mean(2, keepdim=True)
        sine, cosine = turn.sin(), turn.cos()
        rotation = torch.stack([torch.stack([cosine, sine], -1), torch.stack([-sine, cosine], -1)], -2)
        turned = torch.einsum("bhpi,bij->bhpj", points - centre, rotation)
        moved = obs.clone()
        moved[..., own] = (centre + turned + shift).flatten(-2)
        if self.angle is not None:
            moved[..., _own(self.angle)] += turn[:, None, None]
        return moved


def perturbed(
    obs: Float[Tensor, "batch window"], history: int, jitter: Sequence[Any], generator: torch.Generator
) -> Float[Tensor, "batch window"]:
    """Flat raw inputs after all perturbations, in their order."""
    frames = obs.unflatten(-1, (history, -1))
    for each in jitter:
        moved = each.perturb(frames, generator)
        if moved.shape != frames.shape:
            raise ValueError(
                f"{type(each).__name__}.perturb gave {tuple(moved.shape)} for observations {tuple(frames.shape)}"
            )
        frames = moved
    return frames.flatten(-2)


# ---------------------------------------------------------------------------------------------- symmetries


@dataclass(frozen=True)
class Mirror:
    """value → 2·centre − value in some columns; then columns that trade places, as the left arm's and the right's."""

    obs: Columns = ()
    """Columns of an observation that are mirrored."""
    actions: Columns = ()
    """Columns of an action that are mirrored."""
    centre: float = 0.0
    """The value that stays."""
    swap_obs: tuple[tuple[Columns, Columns], ...] = ()
    """Pairs of columns (or of equally many) of an observation that trade places."""
    swap_actions: tuple[tuple[Columns, Columns], ...] = ()
    """Pairs of columns of an action that trade places."""

    def __post_init__(self) -> None:
        for name in ("obs", "actions"):
            object.__setattr__(self, name, as_columns(getattr(self, name), f"Mirror.{name}"))
        for name in ("swap_obs", "swap_actions"):
            pairs = getattr(self, name)
            if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
                raise ValueError(f"{name} must be pairs of columns, got {pairs!r}")
            plain = tuple(tuple(as_columns(part, f"Mirror.{name}") for part in pair) for pair in pairs)
            object.__setattr__(self, name, plain)

    def located(self, obs: Layout, actions: Layout) -> "Mirror":
        """With indices for columns."""
        swaps = []
        for layout, pairs in ((obs, self.swap_obs), (actions, self.swap_actions)):
            found = [(layout.columns(one, "Mirror"), layout.columns(other, "Mirror")) for one, other in pairs]
            flat = [index for pair in found for side in pair for index in side]
            if any(len(one) != len(other) for one, other in found) or len(set(flat)) != len(flat):
                raise ValueError(f"Mirror: {pairs} must pair each column of {layout.what} with one other")
            swaps.append(tuple(found))
        return replace(
            self,
            obs=obs.columns(self.obs, "Mirror"),
            actions=actions.columns(self.actions, "Mirror"),
            swap_obs=swaps[0],
            swap_actions=swaps[1],
        )

    def transform(
        self, obs: Float[np.ndarray, "steps obs"], actions: Float[np.ndarray, "steps act"]
    ) -> tuple[Float[np.ndarray, "steps obs"], Float[np.ndarray, "steps act"]]:
        """The episode with its columns mirrored."""
        return (
            self._mirrored(obs, self.obs, self.swap_obs),
            self._mirrored(actions, self.actions, self.swap_actions),
        )

    def _mirrored(self, values: np.ndarray, columns: Columns, swaps: Any) -> np.ndarray:
        own, result = _own(columns), values.copy()
        result[:, own] = 2 * self.centre - result[:, own]
        order = np.arange(values.shape[1])
        for one, other in swaps:
            order[_own(one)], order[_own(other)] = _own(other), _own(one)
        return result[:, order]


@dataclass(frozen=True)
class PlanarMirror:
    """Reflects points of the plane in a line: p' = c + S(p − c) with S = [[cos 2a, sin 2a], [sin 2a, −cos 2a]].

    A body that the reflection maps to itself has keypoints that do not stay in their columns: the left corner becomes
    the right one. `body` says where they sit on it, and each column gets the keypoint that belongs there.
    """

    points: Columns = ()
    """Columns of an observation: x, y, x, y and so on; points that stay in their columns."""
    actions: Columns = ()
    """Columns of an action: x, y and so on."""
    through: tuple[float, float] = (0.0, 0.0)
    """A point c of the line."""
    line: float = pi / 2
    """The line's angle a to the x axis, in radians; π/2: upright, left and right trade places."""
    keypoints: Columns = ()
    """Columns of the keypoints of a symmetric body: x, y, x, y and so on."""
    body: tuple[tuple[float, float], ...] = ()
    """Where each keypoint sits on the body, in its own frame, whose second axis is the body's line of symmetry."""
    angle: Columns = ()
    """Columns of the body's angle in radians: that of its first axis."""

    def __post_init__(self) -> None:
        for name in ("points", "actions", "keypoints", "angle"):
            object.__setattr__(self, name, as_columns(getattr(self, name), f"PlanarMirror.{name}"))
        object.__setattr__(self, "through", tuple(float(each) for each in self.through))
        object.__setattr__(self, "body", tuple(tuple(float(each) for each in place) for place in self.body))
        if len(self.through) != 2 or any(len(place) != 2 for place in self.body):
            raise ValueError(f"through and each part of body must be x and y, got {self.through} and {self.body}")

    def located(self, obs: Layout, actions: Layout) -> "PlanarMirror":
        """With indices for columns."""
        found = {name: obs.columns(getattr(self, name), "PlanarMirror") for name in ("points", "keypoints", "angle")}
        own = actions.columns(self.actions, "PlanarMirror")
        for columns in (found["points"], found["keypoints"], own):
            _pairs(columns, "PlanarMirror")
        if len(found["keypoints"]) != 2 * len(self.body):
            raise ValueError(
                f"PlanarMirror: {len(found['keypoints'])} columns of keypoints need {len(found['keypoints']) // 2} "
                f"places on the body, got {len(self.body)}"
            )
        self._exchange()
        return replace(self, actions=own, points=found["points"], keypoints=found["keypoints"], angle=found["angle"])

    def transform(
        self, obs: Float[np.ndarray, "steps obs"], actions: Float[np.ndarray, "steps act"]
    ) -> tuple[Float[np.ndarray, "steps obs"], Float[np.ndarray, "steps act"]]:
        """The episode, reflected in the plane."""
        seen, done = obs.copy(), actions.copy()
        points, keypoints, own = (_own(each) for each in (self.points, self.keypoints, self.actions))
        seen[:, points] = self._reflected(obs[:, points])
        done[:, own] = self._reflected(actions[:, own])
        if keypoints:
            moved = self._reflected(obs[:, keypoints]).reshape(len(obs), -1, 2)
            seen[:, keypoints] = np.einsum("kp,spi->ski", self._exchange(), moved).reshape(len(obs), -1)
        angle = _own(self.angle)
        # The image of the second axis is the new second axis, so the first one is turned by half a turn more.
        seen[:, angle] = (2 * self.line - obs[:, angle]) % (2 * pi) - pi
        return seen, done

    def _reflected(self, points: np.ndarray) -> np.ndarray:
        sine, cosine = np.sin(2 * self.line), np.cos(2 * self.line)
        matrix, centre = np.array([[cosine, sine], [sine, -cosine]]), np.array(self.through)
        return ((points.reshape(len(points), -1, 2) - centre) @ matrix + centre).reshape(points.shape)

    def _exchange(self) -> np.ndarray:
        """Weights that make the mirror image (−x, y) of each place on the body of all places, with sum 1."""
        if not self.body:
            return np.zeros((0, 0))
        places = np.array(self.body)
        basis = np.concatenate([places, np.ones((len(places), 1))], 1)
        wanted = basis * np.array([-1.0, 1.0, 1.0])
        weights = wanted @ np.linalg.pinv(basis)
        if np.abs(weights @ basis - wanted).max() > 1e-6 * (1 + np.abs(places).max()):
            raise ValueError("PlanarMirror: the places on the body lie on one line, which tells no mirror image")
        return weights


def extended(data: Demonstrations, symmetries: Sequence[Any]) -> Demonstrations:
    """The demonstrations and their images: each symmetry doubles what there is, so two give four times as many."""
    for each in symmetries:
        obs, actions = [data.obs], [data.actions]
        for index in range(data.episodes):
            seen, done = data.episode(index)
            new = each.transform(seen.copy(), done.copy())
            for name, values, like in (("obs", new[0], seen), ("actions", new[1], done)):
                if np.shape(values) != like.shape or not np.isfinite(values).all():
                    raise ValueError(
                        f"{type(each).__name__}.transform: {name} of episode {index} have shape {np.shape(values)}, "
                        f"expected {like.shape} and finite numbers"
                    )
            obs.append(np.asarray(new[0], data.obs.dtype))
            actions.append(np.asarray(new[1], data.actions.dtype))
        ends = np.concatenate([data.episode_ends, data.steps + data.episode_ends])
        data = replace(data, obs=np.concatenate(obs), actions=np.concatenate(actions), episode_ends=ends)
    return data


def _pairs(columns: tuple[int, ...], whose: str) -> tuple[int, ...]:
    if len(columns) % 2:
        raise ValueError(f"{whose}: points have two columns each, got {len(columns)} columns")
    return columns


def _own(columns: Columns) -> list[int]:
    """As numpy and torch take them: a tuple would be one index per axis."""
    return list(indices(columns))
