"""Tables with a row per step: CSV, Parquet, and a pandas DataFrame, which needs no pandas here."""

import csv
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cebm.demonstrations.checks import DemonstrationError
from cebm.demonstrations.episodes import Demonstrations
from cebm.demonstrations.large import Growing
from cebm.demonstrations.readers.assembling import (
    ACTION,
    DONE,
    ENDS,
    IDS,
    KINDS,
    OBS,
    Wanted,
    assembled,
    check_expansion,
    default_words,
    groups_of,
    needed,
)

_BLOCK = 1 << 16  # rows that are parsed at a time
_DELIMITERS = ",;\t"
_LONGEST_LINE = 1 << 20  # characters


def wanted_columns(wanted: Wanted, held: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Columns that are read as numbers, and those that tell episodes, which may be text."""
    numbers: list[str] = []
    for what, words, usual in (("obs", wanted.obs, OBS), ("action", wanted.action, ACTION)):
        words = words or default_words(usual, held, what, wanted)
        numbers += [key for group in groups_of(words, held, what, wanted) for key in group.keys]
    candidates = wanted.episodes or (*ENDS, *IDS, *DONE)
    bare = (
        word.partition(":")[2] if word.partition(":")[0] in KINDS and word not in held else word for word in candidates
    )
    return list(dict.fromkeys(numbers)), [word for word in bare if word in held and word not in numbers]


# -------------------------------------------------------------------------------------------- CSV


def csv_delimiter(line: str) -> str | None:
    """What separates the names in a table's first line; None where it is no such line."""
    found = max(_DELIMITERS, key=line.count)
    return found if found in line else None


def read_csv(path: Path, wanted: Wanted) -> Demonstrations:
    """A CSV file with names in its first line; separated by commas, semicolons or tabs."""
    with path.open(encoding="utf-8-sig", errors="strict", newline="") as file:
        first = file.readline(_LONGEST_LINE)
    delimiter = csv_delimiter(first) or ","
    names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter), [])]
    _check_names(names, wanted)
    held = dict.fromkeys(names)
    numbers, marks = wanted_columns(wanted, held)
    columns: dict[str, Any] = {}
    data = _numbers(path, delimiter, [names.index(name) for name in numbers], len(names), numbers, wanted)
    columns = {name: data[:, index] for index, name in enumerate(numbers)}
    for name in marks:
        columns[name] = _marks(path, delimiter, names.index(name), wanted)
    return assembled(_plain(wanted, held, columns), columns, metadata={"format": "csv"})


def _plain(wanted: Wanted, held: Mapping[str, Any], columns: Mapping[str, Any]) -> Wanted:
    """Words that stand for the same columns among those that were read: an unread name is reported by its table."""
    for word in wanted.episodes:
        bare = word.partition(":")[2] if word.partition(":")[0] in KINDS and word not in held else word
        if bare not in columns and word not in ("one", "each"):
            raise wanted.error(f"there is no column {bare!r}; it holds {', '.join(map(repr, list(held)[:24]))}")
    return wanted


def _check_names(names: Sequence[str], wanted: Wanted) -> None:
    if not names or not any(names):
        raise wanted.error("looks like a table without names: the first line must name the columns")
    if all(_is_number(name) for name in names):
        raise wanted.error(f"the first line must name the columns, but holds numbers ({', '.join(names[:3])}, …)")
    twice = [name for index, name in enumerate(names) if name in names[:index]]
    if twice:
        raise wanted.error(f"two columns are called {twice[0]!r}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _lines(path: Path, wanted: Wanted) -> Iterator[list[str]]:
    """Blocks of lines behind the first one."""
    size, read = max(1, path.stat().st_size), 0
    with path.open(encoding="utf-8-sig", newline=None) as file:
        try:
            file.readline()
            while block := list(itertools.islice(file, _BLOCK)):
                read += sum(map(len, block))
                wanted.listen(min(1.0, read / size))
                if block := [line for line in block if line.strip()]:
                    yield block
        except UnicodeDecodeError as error:
            raise wanted.error(f"not UTF-8 text: {error}") from error


def _numbers(
    path: Path, delimiter: str, places: Sequence[int], width: int, names: Sequence[str], wanted: Wanted
) -> np.ndarray:
    growing, options = Growing(np.float64), {"delimiter": delimiter, "comments": None, "quotechar": '"', "ndmin": 2}
    for block in _lines(path, wanted):
        try:
            found = np.loadtxt(block, usecols=places, **options)  # type: ignore[call-overload]
        except ValueError:
            found = _parsed(block, delimiter, places, width, names, growing.rows, wanted)
        growing.append(found)
    if not growing.rows:
        raise wanted.error("the table has no rows")
    return growing.array()


def _parsed(
    block: Sequence[str],
    delimiter: str,
    places: Sequence[int],
    width: int,
    names: Sequence[str],
    before: int,
    wanted: Wanted,
) -> np.ndarray:
    """As `np.loadtxt`, which says less about what is wrong, and reads no True and False."""
    rows = np.empty((len(block), len(places)))
    for index, cells in enumerate(csv.reader(block, delimiter=delimiter)):
        where = f"row {before + index + 1}"
        if len(cells) != width:
            raise wanted.error(f"{where} has {len(cells)} cells, the first line names {width} columns")
        for place, (column, name) in enumerate(zip(places, names, strict=True)):
            text = cells[column].strip()
            try:
                rows[index, place] = _number(text)
            except ValueError as error:
                what = f"{text!r}, expected a number" if text else "empty, so the value is missing"
                raise wanted.error(f"{where}: column {name!r} is {what}") from error
    return rows


def _number(text: str) -> float:
    """A number, or 1 and 0 for True and False."""
    known = {"true": 1.0, "false": 0.0}.get(text.lower())
    return float(text) if known is None else known


def _marks(path: Path, delimiter: str, place: int, wanted: Wanted) -> np.ndarray:
    """A column of numbers, True and False, or names."""
    parts = []
    for block in _lines(path, wanted):
        try:
            parts.append(
                np.loadtxt(block, str, usecols=place, delimiter=delimiter, comments=None, quotechar='"', ndmin=1)
            )
        except ValueError as error:
            raise wanted.error(f"the column of the episodes cannot be read: {error}") from error
    return marks_of(np.char.strip(np.concatenate(parts)))


def marks_of(texts: np.ndarray) -> np.ndarray:
    """Text as numbers or as True and False, where all of it is."""
    lowered = np.char.lower(texts)
    if np.isin(lowered, ("true", "false")).all():
        return lowered == "true"
    for kind in (np.int64, np.float64):
        try:
            return texts.astype(kind)
        except ValueError:
            continue
    return texts


# -------------------------------------------------------------------------------------------- Parquet


def read_parquet(path: Path, wanted: Wanted) -> Demonstrations:
    """A Parquet file; columns are numbers, or lists of as many numbers in every row."""
    with parquet_file(path, wanted) as file:
        held = dict.fromkeys(file.schema_arrow.names)
        numbers, marks = wanted_columns(wanted, held)
        columns = parquet_columns(file, path, numbers + marks, wanted)
    return assembled(_plain(wanted, held, columns), columns, metadata={"format": "parquet"})


def parquet_file(path: Path, wanted: Wanted) -> Any:
    """An open Parquet file, whose sizes are believable."""
    parquet = needed("pyarrow.parquet", "parquet", f"{wanted.source}: looks like Parquet, which")
    try:
        file = parquet.ParquetFile(path, memory_map=False)
        file.schema_arrow.names  # noqa: B018 - damaged names fail here, where the message says so
        _declared(file.metadata, ())
        return file
    except Exception as error:
        raise _damaged(path, error) from error


def parquet_columns(file: Any, path: Path, names: Sequence[str], wanted: Wanted) -> dict[str, np.ndarray]:
    """The columns as arrays [rows, …]; null is an error that names the row."""
    rows = file.metadata.num_rows
    if rows < 1:
        raise wanted.error("the table has no rows")
    check_expansion(wanted, f"{path.name} with {rows:,} rows", path.stat().st_size, _declared(file.metadata, names))
    grown: dict[str, list[Any]] = {name: [] for name in names}
    done = 0
    try:
        for batch in file.iter_batches(_BLOCK, columns=list(names)):
            for name in names:
                block = _values(batch.column(batch.schema.get_field_index(name)), name, done, wanted)
                _grow(grown[name], block, name, wanted)
            done += batch.num_rows
            wanted.listen(min(1.0, done / rows))
    except DemonstrationError:
        raise
    except Exception as error:  # pyarrow raises many types on damaged bytes
        raise _damaged(path, error) from error
    if done != rows:
        raise wanted.error(f"{path.name} says that it has {rows:,} rows, but holds {done:,}")
    found = {
        name: each[0].array() if isinstance(each[0], Growing) else np.concatenate(each) for name, each in grown.items()
    }
    return {name: marks_of(array) if array.dtype.kind == "U" else array for name, array in found.items()}


def _declared(about: Any, names: Sequence[str]) -> int:
    """Bytes that the file says these columns take: of all numbers in their lists, and of what is unpacked for them."""
    sizes = 0
    for index in range(about.num_row_groups):
        group = about.row_group(index)
        for place in range(group.num_columns):
            column = group.column(place)
            if str(column.path_in_schema).startswith(tuple(names)):
                sizes += max(4 * column.num_values, column.total_uncompressed_size)
    return max(sizes, 4 * about.num_rows * len(names))


def _grow(parts: list[Any], block: np.ndarray, name: str, wanted: Wanted) -> None:
    if block.dtype.kind == "U":  # names of episodes
        parts.append(block)
        return
    if not parts:
        parts.append(Growing(block.dtype))
    try:
        parts[0].append(block)
    except ValueError as error:
        raise wanted.error(f"{name!r}: {error}") from error


def _values(column: Any, name: str, before: int, wanted: Wanted) -> np.ndarray:
    """One column of a batch as an array."""
    types = needed("pyarrow", "parquet", "Parquet").types
    if column.null_count:
        row = int(np.argmax(np.asarray(column.is_null())))
        raise wanted.error(f"{name!r} is null at row {before + row}, so the value is missing")
    kind, widths = column.type, []
    if isinstance(kind, _extension()):
        column = column.storage
        kind = column.type
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        widths.append(_width(column, name, before, wanted))
        column = column.flatten()
        kind = column.type
        if column.null_count:
            raise wanted.error(f"{name!r} holds null from row {before} on, so a value is missing")
    if types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
    if types.is_string(kind) or types.is_large_string(kind):
        return np.asarray(column.to_pylist(), str)
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise wanted.error(f"{name!r} holds {kind}, expected numbers")
    return np.asarray(column.to_numpy(zero_copy_only=False)).reshape(-1, *widths)


def _width(column: Any, name: str, before: int, wanted: Wanted) -> int:
    """Numbers in each list of a column, which must be as many in all."""
    compute = needed("pyarrow.compute", "parquet", "Parquet")
    lengths = np.asarray(compute.list_value_length(column))
    if (lengths != lengths[0]).any():
        row = int(np.argmax(lengths != lengths[0]))
        raise wanted.error(f"{name!r} has {lengths[row]} numbers at row {before + row}, and {lengths[0]} before")
    return int(lengths[0])


def _extension() -> Any:
    return needed("pyarrow", "parquet", "Parquet").BaseExtensionType


def _damaged(path: Path, error: Exception) -> DemonstrationError:
    return DemonstrationError(f"{path}: looks like Parquet, but cannot be read ({type(error).__name__}: {error})")


# -------------------------------------------------------------------------------------------- in memory


def read_frame(frame: Any, wanted: Wanted) -> Demonstrations:
    """A DataFrame of pandas or polars: whatever has `columns` and gives a column by its name."""
    names = [str(name) for name in frame.columns]
    _check_names([*names, ""], wanted)
    held = dict.fromkeys(names)
    numbers, marks = wanted_columns(wanted, held)
    columns = {}
    for name, label in zip(names, frame.columns, strict=True):
        if name in numbers or name in marks:
            columns[name] = _frame_column(frame[label], name, name in marks, wanted)
    return assembled(_plain(wanted, held, columns), columns, metadata={"format": "table"})


def _frame_column(series: Any, name: str, mark: bool, wanted: Wanted) -> np.ndarray:
    values = np.asarray(series)
    if values.dtype.kind not in "fiub":
        if mark:
            return marks_of(np.asarray([str(value) for value in values]))
        try:
            values = np.asarray([np.asarray(value, np.float64) for value in values])
        except (TypeError, ValueError) as error:
            raise wanted.error(f"{name!r} holds {series.dtype}, expected numbers: {error}") from error
    return values
