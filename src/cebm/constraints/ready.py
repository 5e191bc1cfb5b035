"""Ready constraints: keep-out circles and boxes, half-planes, joint limits, the longest step, closeness to the plan."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite

import torch
from jaxtyping import Float
from torch import Tensor

from cebm.constraints.base import Excess, Scene

SLACK = 4e-6
"""How far beyond the edge `nearest` puts an action, as a share of the lengths at hand: float32 rounds by less."""

Columns = tuple[int, ...]
Chunks = Float[Tensor, "batch samples horizon act"]
Place = tuple[float, ...] | Callable[[Tensor], Tensor]
"""A point, or a function of the raw observations [batch, obs] that gives one for each."""


def _points(scene: Scene, columns: Columns, name: str) -> Float[Tensor, "batch samples horizon columns"]:
    if max(columns) >= scene.actions.shape[-1]:
        raise ValueError(f"{name}: there is no column {max(columns)}, an action has {scene.actions.shape[-1]}")
    return scene.actions[..., list(columns)]


def _with_points(scene: Scene, columns: Columns, points: Tensor) -> Tensor:
    actions = scene.actions.clone()
    actions[..., list(columns)] = points
    return actions


def _check_columns(columns: Columns, name: str) -> None:
    if not columns or min(columns) < 0 or len(set(columns)) != len(columns):
        raise ValueError(f"{name}: columns must be different indices of at least 0, got {columns}")


def _place(place: Place, scene: Scene, dim: int, name: str) -> Tensor:
    """One point per observation, ready to be compared with [batch, samples, horizon, dim]."""
    if not callable(place):
        return scene.actions.new_tensor(place)
    found = place(scene.obs).to(scene.actions)
    if found.shape != (len(scene.obs), dim):
        raise ValueError(f"{name}: centre must give [{len(scene.obs)}, {dim}], got {tuple(found.shape)}")
    return found[:, None, None]


@dataclass(frozen=True)
class KeepOutCircle:
    """‖y − centre‖ ≥ radius for every action y of the chunk: a circle, a ball, or an interval, by its columns."""

    centre: Place
    """The middle; a function of the raw observations where it moves."""
    radius: float
    """The actions keep at least this distance."""
    columns: Columns = (0, 1)
    """Columns of an action that are the place."""

    def __post_init__(self) -> None:
        _check_columns(self.columns, "KeepOutCircle")
        if not 0 < self.radius < inf:
            raise ValueError(f"KeepOutCircle: radius must be positive and finite, got {self.radius}")
        if not callable(self.centre) and len(self.centre) != len(self.columns):
            raise ValueError(f"KeepOutCircle: centre has {len(self.centre)} numbers, columns {len(self.columns)}")

    def excess(self, scene: Scene) -> Excess:
        return (self.radius - self._away(scene).norm(dim=-1)).amax(-1)

    def nearest(self, scene: Scene) -> Chunks:
        """Onto the circle along the line from its middle."""
        away = self._away(scene)
        distance = away.norm(dim=-1, keepdim=True)
        first = torch.zeros_like(away)
        first[..., 0] = 1.0
        direction = torch.where(distance > 1e-12, away / distance.clamp_min(1e-12), first)  # any way out of the middle
        points = _points(scene, self.columns, "KeepOutCircle")
        centre = points - away
        reach = self.radius + SLACK * (self.radius + centre.norm(dim=-1, keepdim=True))
        return _with_points(
            scene, self.columns, torch.where(distance < self.radius, centre + reach * direction, points)
        )

    def _away(self, scene: Scene) -> Tensor:
        points = _points(scene, self.columns, "KeepOutCircle")
        return points - _place(self.centre, scene, len(self.columns), "KeepOutCircle")


@dataclass(frozen=True)
class KeepOutBox:
    """No action y of the chunk has low < y < high in all of the columns: the inside of a box; its faces are allowed."""

    low: tuple[float, ...]
    """The lower corner."""
    high: tuple[float, ...]
    """The upper corner."""
    columns: Columns = (0, 1)
    """Columns of an action that are the place."""

    def __post_init__(self) -> None:
        _check_columns(self.columns, "KeepOutBox")
        if not len(self.low) == len(self.high) == len(self.columns):
            raise ValueError(f"KeepOutBox: low, high and columns differ in length: {self}")
        if not all(low < high for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError(f"KeepOutBox: low must be below high, got {self.low} and {self.high}")

    def excess(self, scene: Scene) -> Excess:
        depth = self._depths(scene)
        return torch.minimum(*depth).amin(-1).amax(-1)

    def nearest(self, scene: Scene) -> Chunks:
        """Through the nearest face."""
        points = _points(scene, self.columns, "KeepOutBox")
        both = torch.stack(self._depths(scene), -1)  # to the lower and to the upper face of each column
        inside = (both > 0).all(-1).all(-1, keepdim=True)
        face = both.flatten(-2).argmin(-1, keepdim=True)
        move = torch.zeros_like(both).flatten(-2).scatter(-1, face, 1.0).unflatten(-1, both.shape[-2:])
        low, high = points.new_tensor(self.low), points.new_tensor(self.high)
        slack = SLACK * (high - low + torch.maximum(low.abs(), high.abs()))
        out = torch.where(move[..., 0] > 0, low - slack, torch.where(move[..., 1] > 0, high + slack, points))
        return _with_points(scene, self.columns, torch.where(inside, out, points))

    def _depths(self, scene: Scene) -> tuple[Tensor, Tensor]:
        points = _points(scene, self.columns, "KeepOutBox")
        return points - points.new_tensor(self.low), points.new_tensor(self.high) - points


@dataclass(frozen=True)
class HalfPlane:
    """normal · action ≤ offset, for every action of the chunk."""

    normal: tuple[float, ...]
    """Points to the side that is not allowed."""
    offset: float
    """Where the allowed side ends."""
    columns: Columns = (0, 1)
    """Columns of an action that the normal has numbers for."""

    def __post_init__(self) -> None:
        _check_columns(self.columns, "HalfPlane")
        if len(self.normal) != len(self.columns) or not any(self.normal) or not all(map(isfinite, self.normal)):
            raise ValueError(f"HalfPlane: normal must be {len(self.columns)} finite numbers, not all 0: {self.normal}")
        if not isfinite(self.offset):
            raise ValueError(f"HalfPlane: offset must be finite, got {self.offset}")

    def excess(self, scene: Scene) -> Excess:
        return self._beyond(scene).amax(-1)

    def nearest(self, scene: Scene) -> Chunks:
        """Straight back along the normal."""
        points, beyond = _points(scene, self.columns, "HalfPlane"), self._beyond(scene).unsqueeze(-1)
        normal = points.new_tensor(self.normal)
        slack = SLACK * (abs(self.offset) + (points * normal).norm(dim=-1, keepdim=True))
        back = points - (beyond + slack) / normal.square().sum() * normal
        return _with_points(scene, self.columns, torch.where(beyond > 0, back, points))

    def _beyond(self, scene: Scene) -> Tensor:
        points = _points(scene, self.columns, "HalfPlane")
        return (points * points.new_tensor(self.normal)).sum(-1) - self.offset


@dataclass(frozen=True)
class JointLimits:
    """low ≤ y ≤ high for every action y of the chunk."""

    low: tuple[float, ...]
    """Lowest value of each column; −inf where there is none."""
    high: tuple[float, ...]
    """Highest value of each column."""
    columns: Columns | None = None
    """Columns of an action; None: all of them."""

    def __post_init__(self) -> None:
        if self.columns is not None:
            _check_columns(self.columns, "JointLimits")
        if len(self.low) != len(self.high) or not all(a <= b for a, b in zip(self.low, self.high, strict=True)):
            raise ValueError(f"JointLimits: low must not be above high, got {self.low} and {self.high}")

    def excess(self, scene: Scene) -> Excess:
        points, low, high = self._bounded(scene)
        return torch.maximum(low - points, points - high).amax((-1, -2))

    def nearest(self, scene: Scene) -> Chunks:
        """Each column at its limit."""
        points, low, high = self._bounded(scene)
        return _with_points(scene, self._own(scene), points.clamp(low, high))

    def _own(self, scene: Scene) -> Columns:
        return tuple(range(scene.actions.shape[-1])) if self.columns is None else self.columns

    def _bounded(self, scene: Scene) -> tuple[Tensor, Tensor, Tensor]:
        columns = self._own(scene)
        if len(self.low) != len(columns):
            raise ValueError(f"JointLimits: {len(self.low)} limits for {len(columns)} columns of an action")
        points = _points(scene, columns, "JointLimits")
        return points, points.new_tensor(self.low), points.new_tensor(self.high)


@dataclass(frozen=True)
class MaxStep:
    """|yₜ − yₜ₋₁| ≤ step: no column changes by more than `step` from the last action that was played to the first of
    the chunk, nor from one action of the chunk to the next; of angles the short way round. At the start of an episode,
    when nothing was played yet, the first action is free."""

    step: float | tuple[float, ...]
    """The largest change: one for all columns, or one for each."""

    def __post_init__(self) -> None:
        steps = self.step if isinstance(self.step, tuple) else (self.step,)
        if not steps or not all(0 < each < inf for each in steps):
            raise ValueError(f"MaxStep: step must be positive and finite, got {self.step}")

    def excess(self, scene: Scene) -> Excess:
        step = self._step(scene)
        worst = scene.actions.new_full(scene.actions.shape[:2], -inf)
        if scene.last is not None:
            first = scene.difference(scene.actions[:, :, 0], scene.last.unsqueeze(1))
            worst = (first.abs() - step).amax(-1)
        if scene.actions.shape[2] > 1:
            within = scene.difference(scene.actions[:, :, 1:], scene.actions[:, :, :-1])
            worst = torch.maximum(worst, (within.abs() - step).amax((-1, -2)))
        return worst

    def nearest(self, scene: Scene) -> Chunks:
        """Follows the chunk from the last action with steps that are short enough."""
        step, steps, before = self._step(scene), [], scene.last
        for index in range(scene.actions.shape[2]):
            wanted = scene.actions[:, :, index]
            if before is not None:
                before = before.unsqueeze(1) if before.ndim == 2 else before
                size = (step - SLACK * (step + before.abs())).clamp_min(0)
                change = scene.difference(wanted, before)
                wanted = torch.where(change.abs() <= size, wanted, before + change.clamp(-size, size))
            steps.append(wanted)
            before = wanted
        return torch.stack(steps, 2)

    def _step(self, scene: Scene) -> Tensor:
        step = scene.actions.new_tensor(self.step)
        if step.ndim and len(step) != scene.actions.shape[-1]:
            raise ValueError(f"MaxStep: {len(step)} steps for {scene.actions.shape[-1]} columns of an action")
        return step


@dataclass(frozen=True)
class NearPlan:
    """The chunk stays close to what the last chunk had in mind for the same steps: with a weight, an energy
    weight · meanₜ ‖yₜ − planₜ‖², which keeps chunks that follow each other in one mode. Hard: no action is
    further than `within` from the plan. At the start of an episode there is no plan, and everything is allowed."""

    within: float = 0.0
    """Distance that costs nothing."""

    def __post_init__(self) -> None:
        if not 0 <= self.within < inf:
            raise ValueError(f"NearPlan: within must be at least 0 and finite, got {self.within}")

    def excess(self, scene: Scene) -> Excess:
        return self._beyond(scene).amax(-1)

    def energy(self, scene: Scene) -> Excess:
        """The mean over the chunk of the squared distance beyond `within`."""
        return self._beyond(scene).clamp_min(0).square().mean(-1)

    def _beyond(self, scene: Scene) -> Tensor:
        if scene.plan is None:
            return scene.actions.new_zeros(scene.actions.shape[:3])
        return scene.difference(scene.actions, scene.plan.unsqueeze(1)).norm(dim=-1) - self.within
