"""Named parts of an observation or an action, and what an energy is built for. Without torch, so that reading data and
the process that talks to a server's clients need none."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any


@dataclass(frozen=True)
class Part:
    """A named part of an observation or an action: joint positions, an image, a goal."""

    name: str
    """Name of the part in the data and in messages."""
    shape: tuple[int, ...]
    """Shape in one observation: (7,) for seven joints, (96, 96, 3) for an image."""
    columns: tuple[str, ...] = ()
    """Names of its columns, as many as the part has; empty where they have none."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a part of an observation needs a name")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"part {self.name!r}: sizes must not be negative, got {self.shape}")
        if self.columns and len(self.columns) != self.size:
            raise ValueError(f"part {self.name!r} has {self.size} columns, but names for {len(self.columns)}")
        seen: set[str] = set()
        for column in self.columns:
            if not column or column in seen:
                raise ValueError(
                    f"part {self.name!r}: columns must have different names, {column!r} is empty or there twice"
                )
            seen.add(column)

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Specification:
    """What an energy is built for: the parts of an observation, the columns of an action, the number of observations in
    one input (history) and the number of actions in one output (horizon). Observations reach the energy flat, [batch,
    obs_dim]: the oldest frame first, in each frame the parts in their order (`columns` gives those of a part)."""

    parts: tuple[Part, ...]
    """Parts of one observation; a flat one is a single part named 'obs'."""
    action: int
    """Columns of one action."""
    history: int = 1
    """Observations that one input holds, the current one last."""
    horizon: int = 1
    """Actions that one output holds, the current one first."""
    smoothing: float = 0.0
    """Standard deviation of the noise that training adds to the actions, normalised units."""

    def __post_init__(self) -> None:
        for name, least in (("action", 1), ("history", 1), ("horizon", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        names = [part.name for part in self.parts]
        if len(set(names)) != len(names):
            raise ValueError(f"parts of an observation must have different names, got {names}")
        if not 0 <= self.smoothing < inf:
            raise ValueError(f"smoothing must be at least 0 and finite, got {self.smoothing}")

    @classmethod
    def flat(cls, obs: int, action: int, history: int = 1, horizon: int = 1, smoothing: float = 0.0) -> "Specification":
        """For observations of `obs` plain columns."""
        return cls((Part("obs", (obs,)),), action, history, horizon, smoothing)

    @property
    def frame(self) -> int:
        """Columns of one observation."""
        return sum(part.size for part in self.parts)

    @property
    def obs_dim(self) -> int:
        """Columns of one input: those of `history` observations."""
        return self.history * self.frame

    @property
    def act_dim(self) -> int:
        """Columns of one output: those of `horizon` actions."""
        return self.horizon * self.action

    def columns(self, name: str, frame: int = -1) -> slice:
        """Columns of the part `name` in the flat input; by default in the newest frame."""
        start = range(self.history)[frame] * self.frame
        for part in self.parts:
            if part.name == name:
                return slice(start, start + part.size)
            start += part.size
        raise ValueError(f"there is no part {name!r}; there are {', '.join(part.name for part in self.parts)}")


def check_parts(parts: Sequence[Part], width: int, what: str) -> tuple[Part, ...]:
    """The parts as a tuple, by default one named `what`; a ValueError where they do not make `width` columns."""
    found = tuple(parts) or (Part(what, (width,)),)
    names = [part.name for part in found]
    if len(set(names)) != len(names):
        raise ValueError(f"{what}: parts must have different names, got {names}")
    total = sum(part.size for part in found)
    if total != width:
        sizes = ", ".join(f"{part.name!r} {part.size}" for part in found[:20])
        raise ValueError(f"{what} has {width} columns, its parts have {total} ({sizes})")
    return found


def parts_to_json(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The parts as plain JSON, for the header of a file."""
    return [{"name": part.name, "shape": list(part.shape), "columns": list(part.columns)} for part in parts]


def parts_from_json(values: Any, what: str) -> tuple[Part, ...]:
    """The inverse of `parts_to_json`; a ValueError names the entry that makes no sense."""
    if not isinstance(values, list):
        raise ValueError(f"the parts of {what} are no list")
    found = []
    for index, entry in enumerate(values):
        given: list[Any] = [entry.get(key) if isinstance(entry, dict) else None for key in _KEYS]
        name, shape, columns = given
        plain = isinstance(name, str) and _list_of(shape, int) and _list_of(columns, str)
        if not plain:
            raise ValueError(f"part {index} of {what} needs a name, a shape and columns, got {str(entry)[:80]}")
        found.append(Part(name, tuple(shape), tuple(columns)))
    return tuple(found)


_KEYS = ("name", "shape", "columns")


def _list_of(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)
