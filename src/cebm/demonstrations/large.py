"""Arrays that stay on disk: chosen episodes of a memory-mapped one, and new ones that grow too large for memory."""

import math
import tempfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

CHUNK = 1 << 20
"""Values per block when an array is read block by block."""
LARGE = 128 << 20
"""Bytes from which on a growing array is kept in a temporary file instead of in memory."""


class Rows:
    """Some episodes of an array [steps, columns] on disk, one after the other. Nothing is read before it is indexed."""

    def __init__(self, base: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Each episode has the rows from its start up to, but not including, its end."""
        self.base, self.starts = base, np.asarray(starts, np.int64)
        self.ends = np.cumsum(np.asarray(ends, np.int64) - self.starts)
        self._shift = self.starts - np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    @property
    def shape(self) -> tuple[int, ...]:
        return (int(self.ends[-1]), *self.base.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return self.base.dtype

    @property
    def ndim(self) -> int:
        return self.base.ndim

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def places(self, rows: np.ndarray) -> np.ndarray:
        """The rows of the whole array that these rows of the chosen episodes are."""
        return np.asarray(rows + self._shift[np.searchsorted(self.ends, rows, side="right")])

    def __getitem__(self, index: Any) -> Any:
        rows, rest = (index[0], index[1:]) if isinstance(index, tuple) else (index, ())
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        rows = np.asarray(rows)
        if rows.dtype == np.bool_:
            rows = np.flatnonzero(rows)
        outside = rows[(rows < -len(self)) | (rows >= len(self))]
        if outside.size:
            raise IndexError(f"row {outside.flat[0]} is out of range for {len(self)} rows")
        found = np.asarray(self.base[self.places(np.where(rows < 0, rows + len(self), rows).astype(np.int64))])
        return found[(slice(None),) * rows.ndim + rest] if rest else found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self[:]
        return found if dtype is None else found.astype(dtype, copy=False)


class Growing:
    """An array [rows, …] that grows by blocks: in memory, and beyond `LARGE` bytes in a temporary file without a name,
    which is gone when the array is. The folder of temporary files is that of the system (TMPDIR)."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.rows = 0
        self._blocks: list[np.ndarray] = []
        self._shape: tuple[int, ...] | None = None
        self._file: IO[bytes] | None = None

    def append(self, block: np.ndarray) -> None:
        """Adds rows, which must have the shape of those before."""
        block = np.ascontiguousarray(block, self.dtype)
        if self._shape is None:
            self._shape = block.shape[1:]
        if block.shape[1:] != self._shape:
            raise ValueError(f"a row has shape {block.shape[1:]}, those before have {self._shape}")
        self.rows += len(block)
        if self._file is not None:
            self._file.write(block.data)
            return
        self._blocks.append(block)
        if self.rows * math.prod(self._shape) * self.dtype.itemsize > LARGE:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
            for part in self._blocks:
                self._file.write(part.data)
            self._blocks = []

    def array(self) -> np.ndarray:
        """What has been added, memory-mapped where it is on disk."""
        if self._shape is None:
            raise ValueError("there are no rows")
        if self._file is None:
            return np.concatenate(self._blocks)
        self._file.flush()
        return np.memmap(self._file, self.dtype, "r", shape=(self.rows, *self._shape))


def on_disk(array: Any) -> bool:
    """Whether an array is read from a file when it is indexed."""
    return isinstance(array, np.memmap | Rows)


def chosen(array: Any, starts: np.ndarray, ends: np.ndarray) -> Any:
    """The rows of these episodes, in this order: copied where the array is in memory, a view where it is on disk."""
    if isinstance(array, Rows):
        places = array.places(starts)
        return Rows(array.base, places, places + (ends - starts))
    if isinstance(array, np.memmap):
        return Rows(array, starts, ends)
    return np.concatenate([array[start:end] for start, end in zip(starts, ends, strict=True)])


def blocks(array: Any) -> Iterator[tuple[int, np.ndarray]]:
    """Yields blocks of rows, each with the index of its first row, so that no check copies a large array."""
    rows = max(1, CHUNK // max(1, math.prod(array.shape[1:])))
    for begin in range(0, len(array), rows):
        yield begin, np.asarray(array[begin : begin + rows])


def converted(array: Any, dtype: Any) -> Any:
    """The array itself if it has this type, so that one on disk stays there; else a new one, on disk if it is large."""
    if array.dtype == dtype:
        return array
    if not on_disk(array):
        return np.asarray(array).astype(dtype)
    growing = Growing(dtype)
    for _, block in blocks(array):
        growing.append(block)
    return growing.array()


def save_npy(file: Any, array: Any) -> None:
    """As `np.save`, the same bytes, but episodes that are on disk are copied block by block."""
    if not isinstance(array, Rows):
        np.save(file, array, allow_pickle=False)
        return
    empty = np.lib.format.header_data_from_array_1_0(np.empty((0, *array.shape[1:]), array.dtype))
    np.lib.format.write_array_header_1_0(file, {**empty, "shape": array.shape})
    for _, block in blocks(array):
        file.write(np.ascontiguousarray(block).data)


def extremes(array: Any) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest value of each column, read block by block."""
    low = high = np.asarray(array[:1])[0]
    for _, block in blocks(array):
        low, high = np.minimum(low, block.min(0)), np.maximum(high, block.max(0))
    return low, high


def fitted_rows(array: Any) -> np.ndarray:
    """The rows that units are fitted to: all of an array in memory. Of a large one on
    disk the extremes of each column and 65,536 rows that are spread evenly, because a fit copies what it gets."""
    if not on_disk(array) or array.size <= CHUNK:
        return np.asarray(array)
    some = np.unique(np.linspace(0, len(array) - 1, min(len(array), 1 << 16)).astype(np.int64))
    return np.concatenate([np.stack(extremes(array)), np.asarray(array[some])])
