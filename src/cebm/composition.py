"""Compositions: frozen dataclasses of settings ("pieces") that hold other pieces, to any depth.

`built` turns settings into objects that can run, `walk` visits every piece, `vary` changes a setting by its name.
"""

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from cebm.spaces import Specification

Piece = TypeVar("Piece")


def built(piece: Any, spec: Specification, generator: torch.Generator | None = None) -> Any:
    """The object that can run: `piece.build(spec, generator)` where the piece has that method, otherwise the piece
    with each of its fields built. So an objective that owns a source with weights needs no `build` of its own."""
    if hasattr(piece, "build"):
        return piece.build(spec, generator)
    if isinstance(piece, tuple | list):
        parts = [built(part, spec, generator) for part in piece]
        return piece if all(new is old for new, old in zip(parts, piece, strict=True)) else type(piece)(parts)
    if not is_dataclass(piece) or isinstance(piece, type):
        return piece
    changed = {}
    for name, value in _values(piece):
        new = built(value, spec, generator)
        if new is not value:
            changed[name] = new
    return replace(piece, **changed) if changed else piece


def modules_in(piece: Any, path: str = "") -> dict[str, nn.Module]:
    """The modules in the fields of a built piece, by their path: `{"source": …}` for an objective whose source has
    weights. A piece that is a module itself has the path "itself"."""
    if isinstance(piece, nn.Module):
        return {path or "itself": piece}
    found: dict[str, nn.Module] = {}
    for name, value in _parts(piece):
        found |= modules_in(value, f"{path}-{name}" if path else name)
    return found


def walk(piece: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every dataclass in a composition with its dotted path, from the outside in."""
    if is_dataclass(piece) and not isinstance(piece, type):
        yield path, piece
    for name, value in _parts(piece):
        yield from walk(value, f"{path}.{name}" if path else name)


def settings_of(piece: Any) -> dict[str, Any]:
    """Every setting of a composition by its dotted path, without those that hold pieces."""
    return {
        f"{path}.{name}" if path else name: value
        for path, part in walk(piece)
        for name, value in _values(part)
        if not _parts(value) and not is_dataclass(value)
    }


def vary(piece: Piece, **settings: Any) -> Piece:
    """The composition with some settings changed: by dotted path (`**{"acting.candidates": 8}`), or by name alone
    where only one piece has it (`history=2`). A name that several pieces have, or none, is a ValueError.

    Pieces check their settings once all are changed, so `energy` and `objective` may change together in any order.
    """
    fresh: list[Any] = []
    for name, value in settings.items():
        piece = _replaced(piece, _find(piece, name).split("."), value, fresh)
    return _checked(piece, fresh)


def _find(piece: Any, name: str) -> str:
    """The dotted path that `name` means."""
    pieces = dict(walk(piece))
    paths = [f"{path}.{key}" if path else key for path, part in pieces.items() for key, _ in _values(part)]
    if name and (name in paths or name in pieces):
        return name
    found = [path for path in paths if path.endswith(f".{name}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{name!r} is ambiguous: say which of {', '.join(found)}")
    raise ValueError(f"there is no setting {name!r}; there are {', '.join(settings_of(piece))}")


def _replaced(piece: Any, path: list[str], value: Any, fresh: list[Any]) -> Any:
    """A copy with one setting changed and nothing checked yet; `fresh` collects the copies that were made."""
    if not path:
        return value
    first, *rest = path
    if isinstance(piece, tuple | list):
        parts = list(piece)
        parts[int(first)] = _replaced(parts[int(first)], rest, value, fresh)
        changed = type(piece)(parts)
    else:
        changed = copy.copy(piece)
        object.__setattr__(changed, first, _replaced(getattr(piece, first), rest, value, fresh))
    fresh.append(changed)
    return changed


def _checked(piece: Any, fresh: list[Any]) -> Any:
    """The piece with its unchecked copies made anew by their constructors, from the inside out."""
    if not any(piece is each for each in fresh):
        return piece
    if isinstance(piece, tuple | list):
        return type(piece)(_checked(part, fresh) for part in piece)
    return replace(piece, **{name: _checked(value, fresh) for name, value in _values(piece)})


def _values(piece: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass that its constructor takes."""
    return [(each.name, getattr(piece, each.name)) for each in fields(piece) if each.init]


def _parts(piece: Any) -> list[tuple[str, Any]]:
    """The fields of a piece, or those items of a tuple or list that are pieces or modules."""
    if isinstance(piece, tuple | list):
        return [(str(index), part) for index, part in enumerate(piece) if is_dataclass(part) or _is_module(part)]
    return _values(piece) if is_dataclass(piece) and not isinstance(piece, type) else []


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)
