"""Checks of arrays before they become demonstrations. A message names the episode, the column and the step."""

from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy.typing import ArrayLike

from cebm.demonstrations.large import Rows, blocks, converted

_TOLERANCE = 1e-4  # largest rounding error of float32, as a part of the column's range
_NOISE = 64 * np.finfo(np.float64).eps  # a range this small, relative to the values, is rounding noise
Matrix = np.ndarray | Rows
_MOST_STEPS = np.iinfo(np.int64).max


class DemonstrationError(ValueError):
    """The data are broken. The message names the file, and where possible the episode and the column."""


def check_ends(values: ArrayLike, source: str) -> Int64[np.ndarray, "episodes"]:
    """Returns `values` as int64, or raises the error that names the first episode whose end is wrong."""
    try:
        ends = as_array(values)
    except ValueError as error:
        raise DemonstrationError(f"{source}: episode_ends is ragged: {error}") from error
    if ends.ndim != 1 or ends.size == 0:
        raise DemonstrationError(f"{source}: episode_ends has shape {ends.shape}, expected one end per episode")
    if ends.dtype.kind not in "iu":
        raise DemonstrationError(f"{source}: episode_ends holds {ends.dtype}, expected integers")
    if isinstance(ends, np.ma.MaskedArray):
        masked = np.flatnonzero(np.ma.getmaskarray(ends))
        if masked.size:
            raise DemonstrationError(f"{source}: episode {masked[0]}: episode_ends is masked, so the end is missing")
    ends = np.asarray(ends)
    beyond = np.flatnonzero(ends > _MOST_STEPS)
    if beyond.size:
        raise DemonstrationError(
            f"{source}: episode {beyond[0]}: episode_ends is {ends[beyond[0]]}, more than int64 can hold"
        )
    ends = ends.astype(np.int64)
    # Compare neighbours: their difference can overflow.
    wrong = np.flatnonzero(np.concatenate([ends[:1] <= 0, ends[1:] <= ends[:-1]]))
    if wrong.size:
        episode = int(wrong[0])
        before = ends[episode - 1] if episode else 0
        raise DemonstrationError(
            f"{source}: episode {episode}: episode_ends must increase, but {ends[episode]} follows {before}"
        )
    return ends


def check_matrix(values: ArrayLike, name: str, ends: Int64[np.ndarray, "episodes"], source: str) -> Matrix:
    """Returns `values` as an array [steps, columns] of numbers; refuses masked values, which are missing data."""
    try:
        array = as_array(values)
    except ValueError as error:
        raise DemonstrationError(f"{source}: {_ragged(values, name, ends)}") from error
    if array.ndim != 2 or array.size == 0:
        raise DemonstrationError(f"{source}: {name} has shape {array.shape}, expected [steps, columns]")
    if array.dtype.kind not in "fiub":
        raise DemonstrationError(f"{source}: {name} holds {array.dtype}, expected numbers")
    if isinstance(array, np.ma.MaskedArray):
        masked = np.argwhere(np.ma.getmaskarray(array))
        if len(masked):
            row, column = masked[0].tolist()
            raise DemonstrationError(
                f"{source}: {_place(row, column, name, ends)} is masked at step {row}, so the value is missing"
            )
        array = array.data
    return array


def as_array(values: Any) -> np.ndarray:
    """Converts to a plain, masked or memory-mapped array. Other subclasses become plain arrays.

    `np.matrix`, for example, does not index as plain arrays do.
    """
    if isinstance(values, Rows):
        return values  # type: ignore[return-value]  # it indexes as an array does, and reads only then
    if isinstance(values, list | tuple) and any(isinstance(row, np.ma.MaskedArray) for row in values):
        return np.ma.array(values)  # np.asarray would drop the masks of the rows
    array = np.asanyarray(values)
    return array if isinstance(array, np.ma.MaskedArray | np.memmap) else np.asarray(array)


def concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    """Concatenates arrays along their first axis and keeps their masks, which `np.concatenate` drops."""
    masked = any(isinstance(array, np.ma.MaskedArray) for array in arrays)
    return np.ma.concatenate(arrays) if masked else np.concatenate(arrays)


def _place(row: int, column: int, name: str, ends: Int64[np.ndarray, "episodes"]) -> str:
    episode = np.searchsorted(ends, row, side="right")
    return f"episode {episode}: {name} column {column}"


def _ragged(values: Any, name: str, ends: Int64[np.ndarray, "episodes"]) -> str:
    """Names the first row whose shape differs from that of row 0."""
    try:
        expected = np.shape(values[0])
        row = next(row for row, value in enumerate(values) if np.shape(value) != expected)
        found = np.shape(values[row])
    except (ValueError, StopIteration):
        return f"{name} is ragged"
    episode = np.searchsorted(ends, row, side="right")
    return f"episode {episode}: {name} is ragged, row {row} has shape {found} and row 0 {expected}"


def settle_precision(
    array: Matrix, name: str, ends: Int64[np.ndarray, "episodes"], source: str, keep_float64: bool
) -> Matrix:
    """Checks that all values are finite, and returns them in float32 where that is precise enough, else in float64.

    float32 is precise enough if rounding changes no value by more than 1e-4 of the range (max - min) of its column.
    Columns without a range, or with one that is only rounding noise of float64, do not count. Values beyond the limits
    of float32 need float64. With `keep_float64`, a float64 array stays float64 in any case. An array that has the
    right type already is not copied.
    """
    if np.can_cast(array.dtype, np.float32):  # such as float16 or int8: nothing is lost
        for begin, block in blocks(array):
            _check_finite(block, begin, name, ends, source)
        return converted(array, np.float32)
    low, high = np.full(array.shape[1], np.inf), np.full(array.shape[1], -np.inf)
    lost = np.zeros(array.shape[1])
    for begin, block in blocks(array):
        # A value beyond the limits of float32 becomes infinite there, and so does what it loses.
        with np.errstate(over="ignore", under="ignore"):
            values = block.astype(np.float64, copy=False)
            _check_finite(values, begin, name, ends, source)
            lost = np.maximum(lost, np.abs(values - values.astype(np.float32)).max(0))
        low, high = np.minimum(low, values.min(0)), np.maximum(high, values.max(0))
    with np.errstate(over="ignore"):
        extent = high - low
    if not np.isfinite(extent).all():
        column = int(np.flatnonzero(~np.isfinite(extent))[0])
        raise DemonstrationError(
            f"{source}: {name} column {column} goes from {low[column]} to {high[column]}, a range beyond float64"
        )
    noise = _NOISE * np.maximum(np.abs(low), np.abs(high)) if array.dtype.kind == "f" else 0.0
    coarse = np.isinf(lost) | ((lost > _TOLERANCE * extent) & (extent > noise))
    wide = coarse.any() or (keep_float64 and array.dtype == np.float64)
    return converted(array, np.float64 if wide else np.float32)


def _check_finite(block: np.ndarray, begin: int, name: str, ends: Int64[np.ndarray, "episodes"], source: str) -> None:
    bad = ~np.isfinite(block)
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        step = begin + row
        raise DemonstrationError(f"{source}: {_place(step, column, name, ends)} is {block[row, column]} at step {step}")
