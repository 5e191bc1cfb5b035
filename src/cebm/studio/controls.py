"""The settings of a way to act as controls: every plain setting with its path, its value and what it may be."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cebm.acting import Acting
from cebm.options import field_docs, options_of, with_options


@dataclass(frozen=True)
class Control:
    """One setting of a way to act."""

    path: str
    """Where it is: "sampler.schedule.init"."""
    value: Any
    """What it is now."""
    kind: Literal["bool", "int", "float", "str", "choice"]
    """What it may be."""
    choices: tuple[Any, ...] = ()
    """The values to choose from; of kind 'choice'."""
    optional: bool = False
    """Whether it may be None."""
    about: str = ""
    """What it means."""


def controls_of(acting: Acting) -> list[Control]:
    """All plain settings of a way to act and of the pieces in it; lists of numbers are left out."""
    return list(_controls(acting, options_of(acting), ""))


def with_values(acting: Acting, values: Mapping[str, Any]) -> Acting:
    """The same way to act with other values at some paths. A ValueError names a path that is not there, or says what
    the piece itself has against a value."""
    known = {control.path: control for control in controls_of(acting)}
    for path, value in values.items():
        if path not in known:
            raise ValueError(f"there is no setting {path!r}; there are {', '.join(known)}")
        _check(known[path], value)
    options = options_of(acting)
    for path, value in values.items():
        options = _put(options, path.split("."), value, known[path])
    return with_options(acting, options)


def _controls(piece: Any, options: Any, path: str) -> Iterator[Control]:
    if options is None:
        return
    docs = {} if isinstance(piece, tuple | list) else field_docs(type(piece))
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        inner = piece[int(field.name[5:])] if isinstance(piece, tuple | list) else getattr(piece, field.name)
        place = f"{path}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _controls(inner, value, f"{place}.")
            continue
        found = _kind(field.type)
        if found is not None:
            kind, choices, optional = found
            yield Control(place, value, kind, choices, optional, docs.get(field.name, ""))


def _kind(hint: Any) -> tuple[Any, tuple[Any, ...], bool] | None:
    """Kind, choices, and whether None is allowed; None for what is no single value."""
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    inside = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return "choice", inside, False
    if type(None) in inside:
        rest = [_kind(each) for each in inside if each is not type(None)]
        return None if len(rest) != 1 or rest[0] is None else (rest[0][0], rest[0][1], True)
    return (hint.__name__, (), False) if hint in (bool, int, float, str) else None


def _check(control: Control, value: Any) -> None:
    if value is None and control.optional:
        return
    if control.kind == "choice":
        fits = value in control.choices
    elif control.kind == "float":
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = type(value).__name__ == control.kind
    if not fits:
        wanted = f"one of {', '.join(map(str, control.choices))}" if control.choices else f"a value of {control.kind}"
        raise ValueError(f"{control.path} must be {wanted}, got {value!r}")


def _put(options: Any, path: list[str], value: Any, control: Control) -> Any:
    name, *rest = path
    if rest:
        value = _put(getattr(options, name), rest, value, control)
    elif control.kind == "float" and value is not None:
        value = float(value)
    return dataclasses.replace(options, **{name: value})
