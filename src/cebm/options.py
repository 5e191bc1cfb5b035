"""The settings of a composition as options of the command line.

The fields of a piece are annotated with contracts, which have no settings: the pieces that are there decide. So
`options_of` makes a dataclass of plain values that tyro reads, and `with_options` puts the values back.
"""

import ast
import dataclasses
import enum
import functools
import inspect
import textwrap
import typing
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union

import tyro

Piece = TypeVar("Piece")

_PLAIN = (bool, int, float, str)


def options_of(piece: Any, skip: Collection[str] = ()) -> Any:
    """An object with one field per plain setting of `piece`, at its present value, and a nested object per piece in
    it. A field that no command line can write (a function, a tensor) is left out. None: nothing can be set."""
    made = []
    for name, value, hint, about in _settings(piece):
        if name in skip:
            continue
        default, kind = value, None
        if _holds_pieces(value):
            default = options_of(value)
            kind = None if default is None else type(default)
            about = about if isinstance(value, tuple | list) else f"{type(value).__name__}. {about}".rstrip()
        else:
            kind = _option_type(hint, value)
            default = tuple(value) if isinstance(value, list) else value
        if kind is None:
            continue
        # A part of a tuple is called by its number, which is no name in Python.
        named = tyro.conf.arg(name=name, help=about) if name.isdigit() else tyro.conf.arg(help=about)
        field = dataclasses.field(default_factory=functools.partial(_same, default))
        made.append((_key(name), Annotated[kind, named], field))
    if not made:
        return None
    return dataclasses.make_dataclass(type(piece).__name__, made, frozen=True, namespace={"__doc__": ""})()


def with_options(piece: Piece, options: Any, path: str = "") -> Piece:
    """The piece with the values of its options; the piece itself where nothing changed. A ValueError of a piece that
    refuses a value begins with the piece's path."""
    changed = {}
    for field in () if options is None else dataclasses.fields(options):
        name = field.name.removeprefix("part_") if isinstance(piece, tuple | list) else field.name
        old: Any = piece[int(name)] if isinstance(piece, tuple | list) else getattr(piece, name)
        new = getattr(options, field.name)
        if dataclasses.is_dataclass(new):
            new = with_options(old, new, f"{path}.{name}" if path else name)
        elif isinstance(new, tuple) and isinstance(old, list):
            new = list(new)
        if new is not old and (new != old or dataclasses.is_dataclass(new)):
            changed[name] = new
    if not changed:
        return piece
    if isinstance(piece, tuple | list):
        return type(piece)(changed.get(str(i), part) for i, part in enumerate(piece))
    try:
        return dataclasses.replace(piece, **changed)  # type: ignore[type-var]
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path else str(error)) from error


def _settings(piece: Any) -> list[tuple[str, Any, Any, str]]:
    """Name, value, annotation and documentation of what a piece is made of."""
    if isinstance(piece, tuple | list):
        return [(str(i), part, Any, "") for i, part in enumerate(piece)]
    kind = type(piece)
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except (NameError, TypeError):  # imported for the type checker alone: the values tell
        hints = {}
    docs = field_docs(kind)  # type: ignore[arg-type]  # mypy takes a class for unhashable
    names = [field.name for field in dataclasses.fields(piece) if field.init]
    return [(name, getattr(piece, name), hints.get(name, Any), docs.get(name, "")) for name in names]


def _holds_pieces(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(_holds_pieces(part) for part in value)
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _key(name: str) -> str:
    return f"part_{name}" if name.isdigit() else name


def _same(value: Any) -> Any:
    return value


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a class, in one line; of the classes it inherits from too."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        for statement, after in pairwise(_body_of(base)):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                docs[statement.target.id] = " ".join(str(after.value.value).split())
    return docs


def _body_of(kind: type) -> list[ast.stmt]:
    """The statements of a class; none where it was made at run time, or without its source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
        return list(getattr(tree.body[0], "body", []))
    except (OSError, TypeError, SyntaxError):
        pass
    # A package may call the classes of its files its own, as cebm.samplers does: then their methods know the file.
    for member in vars(kind).values():
        code = getattr(inspect.unwrap(member) if callable(member) else None, "__code__", None)
        if code is not None and Path(code.co_filename).is_file():
            for node in ast.parse(Path(code.co_filename).read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                    return node.body
    return []


# -------------------------------------------------------------------------------------------- types


def _option_type(hint: Any, value: Any) -> Any:
    """What the annotation says, narrowed to plain types; the type of the value where it says nothing or something
    else. None: no option."""
    narrowed = _narrowed(hint)
    if narrowed not in (None, NoneType) and _fits(value, narrowed):
        return narrowed
    return _type_of(value)


def _narrowed(hint: Any) -> Any:
    """The part of an annotation that a command line can fill; None where there is none."""
    hint = _unwrapped(hint)
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint in (*_PLAIN, NoneType) or origin is Literal:
        return hint
    if origin in (Union, UnionType):
        members = [member for member in map(_narrowed, inside) if member is not None]
        return Union[tuple(members)] if members else None  # noqa: UP007
    if origin is tuple or (isinstance(origin, type) and issubclass(origin, Sequence)):
        parts = [_narrowed(part) for part in inside if part is not Ellipsis]
        if not parts or any(part is None or typing.get_origin(part) is tuple for part in parts):
            return None
        every = origin is not tuple or Ellipsis in inside
        return _tuple(parts[0], ...) if every else _tuple(*parts)
    return None


def _unwrapped(hint: Any) -> Any:
    """The annotation behind Annotated, Final, a NewType or an alias."""
    while True:
        if typing.get_origin(hint) in (Annotated, typing.Final):
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":  # `type X = …`, from Python 3.12
            hint = hint.__value__
        else:
            return hint


def _fits(value: Any, hint: Any) -> bool:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, member) for member in inside)
    if origin is Literal:
        return value in inside
    if origin is tuple:
        if not isinstance(value, tuple | list):
            return False
        parts = [inside[0]] * len(value) if Ellipsis in inside else inside
        return len(parts) == len(value) and all(map(_fits, value, parts))
    return _type_of(value) is hint or (hint is float and _type_of(value) is int) or (hint is NoneType and value is None)


def _tuple(*parts: Any) -> Any:
    return tuple.__class_getitem__(parts)


def _type_of(value: Any) -> Any:
    """The plain type of a value, or a tuple of one; None where it has none."""
    if isinstance(value, enum.Enum):
        return None
    if isinstance(value, tuple | list):
        kinds = {_type_of(part) for part in value}
        kind = float if kinds == {int, float} else next(iter(kinds), None)
        return _tuple(kind, ...) if kind in _PLAIN and (len(kinds) == 1 or kind is float) else None
    return next((kind for kind in _PLAIN if isinstance(value, kind)), None)
