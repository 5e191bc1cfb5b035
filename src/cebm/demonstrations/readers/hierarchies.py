"""HDF5 and Zarr: the layouts of robomimic, Minari and Diffusion Policy."""

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cebm.demonstrations.checks import DemonstrationError
from cebm.demonstrations.episodes import Demonstrations
from cebm.demonstrations.readers.assembling import (
    Episode,
    Wanted,
    assembled,
    check_expansion,
    inside,
    joined,
    listed,
    natural,
    needed,
)

_DEEPEST = 8  # groups inside groups
_MOST_NODES = 1_000_000
_LARGEST_TEXT = 16 << 20  # bytes of a JSON file

# -------------------------------------------------------------------------------------------- HDF5


def read_hdf5(path: Path, wanted: Wanted) -> Demonstrations:
    """HDF5 in robomimic's layout (data/demo_0/obs/KEY, actions), in Minari's (episode_0/observations, actions), or
    plain arrays with a row per step."""
    h5py = needed("h5py", "hdf5", f"{wanted.source}: looks like HDF5, which")
    with _hdf5(h5py, path) as file:
        data = _child(file, "data", h5py, wanted)
        if isinstance(data, h5py.Group) and any(_is_episode(name) for name in data):
            return _robomimic(file, data, h5py, wanted, path)
        if any(_is_episode(name) for name in file):
            return _minari(file, h5py, wanted, path)
        return assembled(wanted, _datasets(file, h5py, wanted, path), metadata={"format": "hdf5"})


@contextmanager
def _hdf5(h5py: Any, path: Path) -> Iterator[Any]:
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (DemonstrationError, ImportError):
        raise
    except Exception as error:  # libhdf5 raises many types on damaged bytes
        raise DemonstrationError(
            f"{path}: looks like HDF5, but cannot be read ({type(error).__name__}: {error})"
        ) from error


def _is_episode(name: str) -> bool:
    """demo_0 of robomimic, episode_0 of Minari."""
    kind, _, number = name.partition("_")
    return kind in ("demo", "episode") and number.isdecimal()


def _child(group: Any, name: str, h5py: Any, wanted: Wanted) -> Any:
    """A group or an array by its name; None where there is none. Nothing outside the file is opened."""
    link = group.get(name, getlink=True)
    if link is None:
        return None
    if isinstance(link, h5py.ExternalLink):
        raise wanted.error(f"{group.name}/{name} is a link to another file, {link.filename!r}; it is not opened")
    if isinstance(link, h5py.SoftLink):
        raise wanted.error(f"{group.name}/{name} is a soft link, which is not followed")
    found = group[name]
    if isinstance(found, h5py.Dataset) and (found.is_virtual or found.external):
        raise wanted.error(f"{found.name} keeps its values in other files, which are not opened")
    return found


def _datasets(group: Any, h5py: Any, wanted: Wanted, path: Path, prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """The arrays below a group by their paths, with sizes that the file can hold."""
    found: dict[str, Any] = {}
    for name in sorted(group, key=natural):
        child = _child(group, name, h5py, wanted)
        if isinstance(child, h5py.Dataset):
            _check_dataset(child, wanted, path)
            found[prefix + name] = child
        elif isinstance(child, h5py.Group) and depth < _DEEPEST:
            found |= _datasets(child, h5py, wanted, path, f"{prefix}{name}/", depth + 1)
        if len(found) > _MOST_NODES:
            raise wanted.error(f"{group.name} holds more than {_MOST_NODES:,} arrays")
    return found


def _check_dataset(dataset: Any, wanted: Wanted, path: Path) -> None:
    if dataset.shape is None:
        return
    chunk = math.prod(dataset.chunks or (0,)) * dataset.dtype.itemsize
    size = max(math.prod(dataset.shape) * dataset.dtype.itemsize, chunk)
    check_expansion(wanted, dataset.name, min(path.stat().st_size, dataset.id.get_storage_size()), size)


def _robomimic(file: Any, data: Any, h5py: Any, wanted: Wanted, path: Path) -> Demonstrations:
    chosen, names = wanted.episodes, sorted(filter(_is_episode, data), key=natural)
    if chosen:
        names = _masked(file, chosen, names, h5py, wanted)
    episodes = [_episode(data, name, ("obs",), h5py, wanted, path) for name in names]
    words = _flat_words(episodes[0].obs) if episodes else ()
    return joined(
        wanted, episodes, metadata={"format": "robomimic", "filter": list(chosen)}, defaults=(words, ("actions",))
    )


def _masked(file: Any, words: Sequence[str], names: Sequence[str], h5py: Any, wanted: Wanted) -> list[str]:
    """The episodes of a filter key, such as mask/train."""
    found: list[str] = []
    for word in words:
        group = _child(file, "mask", h5py, wanted)
        key = word.removeprefix("mask/")
        mask = None if group is None else _child(group, key, h5py, wanted)
        if not isinstance(mask, h5py.Dataset):
            held = [] if group is None else [f"mask/{name}" for name in group]
            raise wanted.error(f"there is no filter {word!r} of episodes; it holds {listed(held)}")
        _check_dataset(mask, wanted, Path(file.filename))
        found += [name.decode() if isinstance(name, bytes) else str(name) for name in mask[:]]
    missing = [name for name in found if name not in set(names)]
    if missing:
        raise wanted.error(f"the filter names {missing[0]!r}, which is no episode")
    return sorted(set(found), key=natural)


def _episode(data: Any, name: str, kinds: Sequence[str], h5py: Any, wanted: Wanted, path: Path) -> Episode:
    """An episode whose observations are a group of arrays or one array."""
    group = _child(data, name, h5py, wanted)
    where = f"{data.name.rstrip('/')}/{name}".lstrip("/")
    if not isinstance(group, h5py.Group):
        raise wanted.error(f"{where} is an array, expected a group")
    found = {}
    for kind in (*kinds, "actions"):
        child = _child(group, kind, h5py, wanted)
        if child is None:
            raise wanted.error(f"{where}: there is no {kind!r}; it holds {listed(list(group))}")
        if isinstance(child, h5py.Group):
            found[kind] = _datasets(child, h5py, wanted, path)
        else:
            _check_dataset(child, wanted, path)
            found[kind] = {"obs" if kind == "observations" else kind: child}
    return Episode(where, found[kinds[0]], found["actions"])


def _flat_words(held: Mapping[str, Any]) -> tuple[str, ...]:
    """Arrays of numbers without those of images, which only a name brings."""
    return tuple(key for key, array in held.items() if array.ndim <= 2 and array.dtype.kind in "fiub")


def _minari(file: Any, h5py: Any, wanted: Wanted, path: Path) -> Demonstrations:
    if wanted.episodes:
        raise wanted.error("a Minari dataset knows its episodes: leave episodes away")
    names = sorted(filter(_is_episode, file), key=natural)
    episodes = [_episode(file, name, ("observations",), h5py, wanted, path) for name in names]
    defaults = (_flat_words(episodes[0].obs), _flat_words(episodes[0].actions))
    return joined(wanted, episodes, metadata={"format": "minari"}, defaults=defaults)


def read_minari(path: Path, wanted: Wanted) -> Demonstrations:
    """The folder of a Minari dataset, with data/main_data.hdf5, or its folder `data`."""
    file = next((path / name for name in ("data/main_data.hdf5", "main_data.hdf5") if (path / name).exists()), None)
    if file is None:
        raise wanted.error(
            "looks like a Minari dataset whose data are not in HDF5 (data/main_data.hdf5); "
            "create it with data_format='hdf5'"
        )
    needed("h5py", "minari", f"{wanted.source}: looks like a Minari dataset, which")
    return read_hdf5(inside(path, file, wanted), wanted)


# -------------------------------------------------------------------------------------------- Zarr

_V2_CODECS = {"blosc", "zstd", "lz4", "zlib", "gzip", "bz2", "lzma", "shuffle", "delta", "crc32", "crc32c"}
_V3_CODECS = {"bytes", "blosc", "zstd", "gzip", "crc32c", "transpose", "sharding_indexed", "endian"}


def read_zarr(path: Path, wanted: Wanted) -> Demonstrations:
    """A Zarr store, version 2 or 3, in the layout of Diffusion Policy (data/KEY, meta/episode_ends) or any other."""
    zarr = needed("zarr", "zarr", f"{wanted.source}: looks like Zarr, which")
    held: dict[str, Any] = {}
    try:
        for name, reason in _zarr_arrays(path, wanted):
            key = name.removeprefix("data/")
            held[key] = _Unread(reason, wanted) if reason else _ZarrArray(zarr, path / name, wanted)
        return assembled(wanted, held, metadata={"format": "zarr"})
    except (DemonstrationError, ImportError):
        raise
    except Exception as error:  # codecs raise many types on damaged bytes
        raise DemonstrationError(
            f"{path}: looks like Zarr, but cannot be read ({type(error).__name__}: {error})"
        ) from error


class _Unread:
    """An array that cannot be read; it says so where it is asked for, and the others can be read."""

    def __init__(self, reason: str, wanted: Wanted) -> None:
        self._reason, self._wanted = reason, wanted

    @property
    def dtype(self) -> np.dtype:
        raise self._wanted.error(self._reason)

    def __getitem__(self, rows: Any) -> np.ndarray:
        raise self._wanted.error(self._reason)


class _ZarrArray:
    """An array of a store; a message about a damaged chunk names the array."""

    def __init__(self, zarr: Any, path: Path, wanted: Wanted) -> None:
        self._array, self._path, self._wanted, self._warned = zarr.open_array(str(path), mode="r"), path, wanted, False
        self.shape, self.dtype = tuple(self._array.shape), np.dtype(self._array.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        self._count()
        try:
            return np.asarray(self._array[rows])
        except Exception as error:  # codecs raise many types on damaged bytes
            raise DemonstrationError(f"{self._path}: a chunk is damaged ({type(error).__name__}: {error})") from error

    def _count(self) -> None:
        """Zarr stores no chunk that holds nothing but the fill value, so one that was lost looks like zeros."""
        if self._warned:
            return
        self._warned = True
        unit = self._array.shards or self._array.chunks
        expected = math.prod(-(-size // max(1, each)) for size, each in zip(self.shape, unit, strict=True))
        stored = len(_chunk_files(self._path))
        if stored < expected:
            warnings.warn(
                f"{self._wanted.source}: {self._path.name}: {expected - stored} of {expected} chunks are not stored "
                f"and are read as {self._array.fill_value}; is the copy complete?",
                stacklevel=2,
            )


def _chunk_files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and not file.name.startswith((".z", "zarr.json"))]


def _zarr_arrays(path: Path, wanted: Wanted) -> Iterator[tuple[str, str | None]]:
    """Names of the arrays, and why one cannot be read: values that are no numbers, unknown codecs, or sizes that the
    folder does not hold."""
    count = 0
    for file in sorted(path.rglob("*"), key=lambda file: natural(file.as_posix())):
        inside(path, file, wanted)
        if file.name in (".zarray", "zarr.json") and file.is_file():
            about = _json(file, wanted)
            if file.name == ".zarray" or about.get("node_type") == "array":
                count += 1
                yield file.parent.relative_to(path).as_posix(), _why_not(file.parent, about, wanted)
    if not count:
        raise wanted.error("looks like Zarr, but holds no array")


def _json(file: Path, wanted: Wanted) -> dict[str, Any]:
    try:
        if file.stat().st_size > _LARGEST_TEXT:
            raise wanted.error(f"{file.name} has more than {_LARGEST_TEXT:,} bytes")
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, DemonstrationError):
            raise
        raise wanted.error(f"{file.parent.name}/{file.name} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise wanted.error(f"{file.parent.name}/{file.name} is no JSON object")
    return found


def _why_not(folder: Path, about: Mapping[str, Any], wanted: Wanted) -> str | None:
    """Why an array is not read, by its metadata; None where it is."""
    name = folder.name
    shape = about.get("shape")
    if about.get("zarr_format") == 2:
        chunks, kind = about.get("chunks"), about.get("dtype")
        codecs = [about.get("compressor"), *(about.get("filters") or [])]
        known, key = _V2_CODECS, "id"
    else:
        chunks, kind = _nested(about, "chunk_grid", "configuration", "chunk_shape"), about.get("data_type")
        codecs, known, key = list(about.get("codecs") or []), _V3_CODECS, "name"
    if not isinstance(shape, list) or not isinstance(chunks, list) or len(shape) != len(chunks):
        return f"{name}: shape {shape!r} and chunks {chunks!r} make no sense"
    if any(type(size) is not int or size < 0 for size in (*shape, *chunks)):
        return f"{name}: shape {shape!r} and chunks {chunks!r} make no sense"
    for codec in codecs:
        label = codec.get(key) if isinstance(codec, dict) else codec
        if codec is not None and label not in known:
            return f"{name!r} is stored with the codec {label!r}, which is not read here"
    try:
        item = np.dtype(kind if isinstance(kind, str) else "O")
    except TypeError:
        item = np.dtype("O")
    if item.kind not in "fiub":
        return f"{name!r} holds {kind}, expected numbers"
    stored = sum(file.stat().st_size for file in _chunk_files(folder))
    try:
        check_expansion(wanted, name, stored, max(math.prod(shape), math.prod(chunks)) * item.itemsize)
    except DemonstrationError as error:
        return str(error).removeprefix(f"{wanted.source}: ")
    return None


def _nested(values: Any, *keys: str) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values
