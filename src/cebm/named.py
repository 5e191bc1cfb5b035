"""Observations by the names of their parts: from a dictionary to the flat rows that an energy takes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cebm.parts import Part


def flat_observation(values: Any, parts: Sequence[Part], history: int = 1) -> Any:
    """The observation [columns], or the batch [batch, columns], that a dictionary of named parts means; anything that
    is no dictionary passes. A tensor where a part is one, else an array of numpy.

    A part may be given by its name, or column by column where its columns have names. With a history beyond 1 each
    part has an axis for it, the oldest first, before its own shape: [history, …] or [batch, history, …]. A ValueError
    names the part that is missing, unknown or misshapen.
    """
    if isinstance(values, Tensor | np.ndarray) or not isinstance(values, Mapping):
        return values
    frames = (history,) if history > 1 else ()
    found = list(_given(values, parts))
    arrays = [_numbers(part.name, value) for part, value in found]
    batches = [_batches(part, array, frames) for (part, _), array in zip(found, arrays, strict=True)]
    common = set.intersection(*map(set, batches))
    if not common:
        shapes = ", ".join(f"{part.name} {tuple(array.shape)}" for (part, _), array in zip(found, arrays, strict=True))
        raise ValueError(f"obs: the parts do not agree whether and how many observations there are ({shapes})")
    # A shape that is exactly a part's own comes first among what it can mean.
    batch = min(common, key=lambda each: (sum(meant.index(each) for meant in batches), len(each)))
    lead = batch + (frames or (1,))
    if any(isinstance(array, Tensor) for array in arrays):
        first = next(array for array in arrays if isinstance(array, Tensor))
        tensors = [torch.as_tensor(array, device=first.device) for array in arrays]
        kind = torch.result_type(first, first)
        for tensor in tensors:
            kind = torch.promote_types(kind, tensor.dtype)
        return torch.cat([tensor.to(kind).reshape(*lead, -1) for tensor in tensors], -1).reshape(*batch, -1)
    rows = [array.reshape(*lead, part.size) for (part, _), array in zip(found, arrays, strict=True)]
    return np.concatenate(rows, -1).reshape(*batch, -1)


def _given(values: Mapping[Any, Any], parts: Sequence[Part]) -> Iterator[tuple[Part, Any]]:
    """What is given for each part, or for each of its columns, in the order of the flat columns."""
    known: set[str] = set()
    missing: list[str] = []
    found: list[tuple[Part, Any]] = []
    for part in parts:
        columns = [column for column in part.columns if column in values and part.name not in values]
        if part.name in values:
            known.add(part.name)
            found.append((part, values[part.name]))
        elif columns:
            known |= set(part.columns)
            missing += [f"{part.name}.{column}" for column in part.columns if column not in values]
            found += [(Part(column, ()), values[column]) for column in columns]
        elif part.size:
            missing.append(part.name)
    if missing:
        raise ValueError(f"obs: {', '.join(missing)} is missing; the parts are {_described(parts)}")
    unknown = [str(name) for name in values if name not in known]
    if unknown:
        raise ValueError(f"obs: there is no part {', '.join(map(repr, unknown))}; the parts are {_described(parts)}")
    if not found:
        raise ValueError(f"obs: the dictionary is empty; the parts are {_described(parts)}")
    yield from found


def _described(parts: Sequence[Part]) -> str:
    words = []
    for part in parts[:24]:
        columns = f" ({', '.join(part.columns[:12])}{' …' if len(part.columns) > 12 else ''})" if part.columns else ""
        words.append(f"{part.name!r} {list(part.shape)}{columns}")
    return ", ".join(words)


def _numbers(name: str, value: Any) -> Any:
    """A tensor, or an array of numbers."""
    if isinstance(value, Tensor):
        return value
    try:
        array = np.array(value)  # a copy: environments may write the next observation into the same array
    except ValueError as error:
        raise ValueError(f"obs: part {name!r} is ragged: {error}") from error
    if array.dtype.kind == "O":
        if value is None:
            raise ValueError(f"obs: part {name!r} must be numbers, got None")
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"obs: part {name!r} must be numbers: {error}") from error
    if array.dtype.kind not in "fiub":
        raise ValueError(f"obs: part {name!r} must be numbers, got {array.dtype}")
    return array


def _batches(part: Part, array: Any, frames: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The batches, none or one axis, that an array of this shape can mean. One number may lack an axis of its own."""
    shape = tuple(array.shape)
    allowed = [part.shape, *([()] if part.size == 1 and part.shape else []), *([(1,)] if part.shape == () else [])]
    found = []
    for own in allowed:
        tail = frames + own
        lead = shape[: len(shape) - len(tail)]
        if shape[len(lead) :] == tail and len(shape) >= len(tail) and len(lead) <= 1:
            found.append(lead)
    if not found:
        axes = ["history", *map(str, part.shape)] if frames else list(map(str, part.shape))
        expected = f"[{', '.join(axes)}] or [{', '.join(['batch', *axes])}]"
        about = f", where history is {frames[0]}" if frames else ""
        raise ValueError(f"obs: part {part.name!r} has shape {shape}, expected {expected}{about}")
    return found
