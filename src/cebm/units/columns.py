"""Columns by index, slice or name, and pieces in the words of the command line."""

import ast
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from cebm.parts import Part
from cebm.settings import StorageError, from_json, resolve, tag_of

Columns = int | str | slice | tuple[int | str, ...]
"""Columns in their order: an index (negative from the end), a name, a slice (as text "2:20"), or several of these."""


def as_columns(value: Any, what: str) -> int | str | tuple[int | str, ...]:
    """Columns as a setting that fits JSON: slices become text, lists become tuples."""
    if isinstance(value, slice):
        return ":".join(
            "" if part is None else str(part)
            for part in (value.start, value.stop, value.step)[: 2 + (value.step is not None)]
        )
    if isinstance(value, list | tuple | range):
        parts = [as_columns(part, what) for part in value]
        return tuple(each for part in parts for each in (part if isinstance(part, tuple) else (part,)))
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError(f"{what} must be columns by index, slice or name, got {value!r}")


def indices(columns: Columns) -> tuple[int, ...]:
    """The indices of columns that a layout has located."""
    parts = columns if isinstance(columns, tuple) else (columns,)
    if not all(isinstance(part, int) for part in parts):
        raise ValueError(f"{columns!r} must be located first: only a layout knows which columns these are")
    return tuple(part for part in parts if isinstance(part, int))


@dataclass(frozen=True)
class Layout:
    """The columns of one observation or of one action, and their names."""

    what: str
    """'obs' or 'action', for messages."""
    size: int
    """How many there are."""
    names: Mapping[str, tuple[int, ...]]
    """Columns by the name of a part, of a column, and of a column in its part ('part.column')."""

    @classmethod
    def of(cls, what: str, size: int, parts: Sequence[Part] = ()) -> "Layout":
        """The layout of named parts one after the other. A column's name alone counts where only one part has it."""
        names: dict[str, tuple[int, ...]] = {}
        single: dict[str, list[int]] = {}
        start = 0
        for part in parts:
            names[part.name] = tuple(range(start, start + part.size))
            for index, column in enumerate(part.columns):
                names[f"{part.name}.{column}"] = (start + index,)
                single.setdefault(column, []).append(start + index)
            start += part.size
        for name, found in single.items():
            if len(found) == 1:
                names.setdefault(name, (found[0],))
        return cls(what, size, names)

    def columns(self, columns: Columns, whose: str) -> tuple[int, ...]:
        """The indices; a ValueError names the piece (`whose`) and the column that is not there or comes twice."""
        columns = as_columns(columns, whose)
        parts = columns if isinstance(columns, tuple) else (columns,)
        found = [index for part in parts for index in self._indices(part, whose)]
        twice = [index for place, index in enumerate(found) if index in found[:place]]
        if twice:
            raise ValueError(f"{whose}: {self.name(twice[0])} comes twice")
        return tuple(found)

    def name(self, column: int) -> str:
        """'obs column 3', with its name where it has one."""
        return f"{self.what} column {column}{self._called(column)}"

    def listed(self, columns: Sequence[int]) -> str:
        """'obs columns 3, 4 and 5', the first six of them."""
        if len(columns) == 1:
            return self.name(columns[0])
        shown = [f"{index}{self._called(index)}" for index in columns[:6]]
        more = f" and {len(columns) - 6} more" if len(columns) > 6 else ""
        return f"{self.what} columns {', '.join(shown)}{more}"

    def _called(self, column: int) -> str:
        """' (part.column)', where a column has a name that says more than where it is."""
        names = [name for name, own in self.names.items() if own == (column,) and name != self.what]
        return f" ({names[0]})" if names else ""

    def _indices(self, part: int | str, whose: str) -> list[int]:
        if isinstance(part, int):
            return [self._index(part, whose)]
        if part in self.names:
            return list(self.names[part])
        if "," in part:
            return [index for each in part.split(",") for index in self._indices(each.strip(), whose)]
        inside = re.fullmatch(r"(.+)\[(.+)\]", part)
        if inside and inside[1] in self.names:
            own = self.names[inside[1]]
            within = Layout(f"{self.what} part {inside[1]!r}", len(own), {})
            return [own[index] for index in within._indices(inside[2], whose)]
        if re.fullmatch(r"-?\d+", part):
            return [self._index(int(part), whose)]
        if re.fullmatch(r"(-?\d+)?(:(-?\d+)?){1,2}", part):
            chosen = slice(*(int(each) if each else None for each in part.split(":")))
            if chosen.step != 0 and (found := list(range(*chosen.indices(self.size)))):
                return found
            raise ValueError(f"{whose}: {part!r} holds no columns of {self.size} in {self.what}")
        known = f"; there are {', '.join(self.names)}" if self.names else "; its columns have no names"
        raise ValueError(f"{whose}: {self.what} has no column {part!r}{known}")

    def _index(self, index: int, whose: str) -> int:
        if not -self.size <= index < self.size:
            raise ValueError(f"{whose}: {self.what} has {self.size} columns, there is no column {index}")
        return index % self.size


def from_words(text: str, what: str) -> Any:
    """A piece as it is written in Python, with plain values: `Angle(4)`, `Relative((0, 1), "0:2", 64)`, `mine.Turn()`.

    A name without a module is one of `cebm.units`; a module of your own must be imported already (`--with`).
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{what}: {text!r} is no piece such as Angle(4)") from error
    if not isinstance(call, ast.Call):
        raise ValueError(f"{what}: {text!r} is no piece such as Angle(4): a name with its settings in brackets")
    name = ast.unparse(call.func)
    module, _, kind = name.rpartition(".")
    if module:
        try:
            found: Any = resolve(f"{module}:{kind}", what)
        except StorageError as error:
            raise ValueError(str(error)) from error
    else:
        found = getattr(sys.modules["cebm.units"], name, None)
    if not (isinstance(found, type) and is_dataclass(found)):
        raise ValueError(
            f"{what}: there is no piece {name!r}; of your own write MODULE.NAME(…) and import it by --with"
        )
    names = [field.name for field in fields(found) if field.init]
    try:
        given = dict(zip(names, map(ast.literal_eval, call.args), strict=False))
        given |= {each.arg or "**": ast.literal_eval(each.value) for each in call.keywords}
        if len(call.args) > len(names):
            raise ValueError(f"{len(call.args)} values for {len(names)} settings")
        # As from a file: every value is checked against its setting.
        return from_json({"type": tag_of(found), **given}, object, what)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {text!r}: {error}; its settings: {', '.join(names)}") from error


def as_pieces(value: Any, what: str, method: str) -> tuple[Any, ...]:
    """Pieces as a tuple: one of them, several, or their words. A ValueError names what has no such `method`."""
    parts = tuple(value) if isinstance(value, list | tuple) else (value,)
    pieces = tuple(from_words(part, what) if isinstance(part, str) else part for part in parts)
    for piece in pieces:
        if isinstance(piece, type) or not hasattr(piece, method):
            shown = piece.__name__ if isinstance(piece, type) else repr(piece)
            raise ValueError(f"{what} must be objects with a method `{method}`, got {shown}")
    return pieces
