"""Named parts of an observation or an action. Without torch, so that reading data needs none."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
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
