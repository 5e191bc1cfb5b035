"""Demonstrations: episodes of observations and actions, in memory and on disk.

On disk they are one `.npz` (`obs`, `action`, `episode_ends` and a JSON `header`) or, for sets that should
stay there, a directory with `header.json` and `.npy` files that are memory-mapped. Neither holds a pickle.
"""

import json
import operator
import os
import re
import secrets
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Float32, Int64
from numpy.typing import ArrayLike

FORMAT = "cebm.demonstrations"
VERSION = 1
_CHUNK = 1 << 22  # bytes or values looked at in one go
_OURS = re.compile(r"header\.json|(obs|action|episode_ends)-[0-9a-f]{8}\.npy|\..*\.tmp")  # in a directory


class DemonstrationError(ValueError):
    """The data are broken; the message names the file, and the episode and column where there are any."""


@dataclass(frozen=True, eq=False)
class Demonstrations:
    """Episodes laid end to end. `from_arrays`, `from_episodes` and `load` build them from checked data.

    Episode `e` is the rows from `episode_ends[e - 1]` (0 for the first) up to, not including,
    `episode_ends[e]`; `actions[t]` was taken on seeing `obs[t]`.
    """

    obs: Float32[np.ndarray, "steps obs"]
    actions: Float32[np.ndarray, "steps act"]
    episode_ends: Int64[np.ndarray, "episodes"]
    metadata: dict[str, Any] = field(default_factory=dict)
    """Anything JSON can hold; what `collect_particle` writes there lets `cebm eval` rebuild the task."""

    @classmethod
    def from_arrays(
        cls,
        obs: ArrayLike,
        actions: ArrayLike,
        episode_ends: ArrayLike,
        *,
        metadata: Mapping[str, Any] | None = None,
        source: str = "demonstrations",
    ) -> "Demonstrations":
        """Checks and wraps arrays [steps, obs], [steps, act] and [episodes]; `source` begins error messages.

        `episode_ends` is cumulative and exclusive, so the last one is the number of steps. Arrays that are
        float32 already are not copied.
        """
        ends = _check_ends(episode_ends, source)
        seen = _check_matrix(obs, "obs", ends, source)
        done = _check_matrix(actions, "action", ends, source)
        if len(seen) != len(done):
            raise DemonstrationError(f"{source}: obs has {len(seen)} steps, action has {len(done)}")
        if ends[-1] != len(seen):
            raise DemonstrationError(
                f"{source}: episode_ends says that the last episode, {len(ends) - 1}, "
                f"ends at step {ends[-1]}, but there are {len(seen)} steps"
            )
        _check_finite(seen, "obs", ends, source)
        _check_finite(done, "action", ends, source)
        try:
            plain = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise DemonstrationError(f"{source}: metadata does not fit JSON: {error}") from error
        return cls(seen, done, ends, plain)

    @classmethod
    def from_episodes(
        cls, episodes: Iterable[tuple[ArrayLike, ArrayLike]], *, metadata: Mapping[str, Any] | None = None
    ) -> "Demonstrations":
        """From pairs of observations [steps, obs] and actions [steps, act], one pair per episode."""
        seen: list[np.ndarray] = []
        done: list[np.ndarray] = []
        for index, (obs, actions) in enumerate(episodes):
            where = f"episode {index}"
            for name, values, others in (("obs", obs, seen), ("action", actions, done)):
                try:
                    array = np.asarray(values)
                except ValueError as error:
                    raise DemonstrationError(f"{where}: {name} is ragged: {error}") from error
                if array.ndim != 2:
                    raise DemonstrationError(f"{where}: {name} has shape {array.shape}, expected [steps, columns]")
                if others and array.shape[1] != others[0].shape[1]:
                    raise DemonstrationError(
                        f"{where}: {name} has {array.shape[1]} columns, the dataset has {others[0].shape[1]}"
                    )
                others.append(array)
            if len(seen[-1]) != len(done[-1]):
                raise DemonstrationError(f"{where}: obs has {len(seen[-1])} steps, action has {len(done[-1])}")
        if not seen:
            raise DemonstrationError("demonstrations: there are no episodes")
        ends = np.cumsum([len(array) for array in seen])
        return cls.from_arrays(np.concatenate(seen), np.concatenate(done), ends, metadata=metadata)

    @property
    def steps(self) -> int:
        return len(self.obs)

    @property
    def episodes(self) -> int:
        return len(self.episode_ends)

    @property
    def obs_dim(self) -> int:
        return self.obs.shape[1]

    @property
    def act_dim(self) -> int:
        return self.actions.shape[1]

    @property
    def episode_starts(self) -> Int64[np.ndarray, "episodes"]:
        return np.concatenate([np.zeros(1, np.int64), self.episode_ends[:-1]])

    def episode(self, index: int) -> tuple[Float32[np.ndarray, "length obs"], Float32[np.ndarray, "length act"]]:
        """Observations and actions of one episode, without a copy."""
        index = range(self.episodes)[index]
        rows = slice(int(self.episode_ends[index - 1]) if index else 0, int(self.episode_ends[index]))
        return self.obs[rows], self.actions[rows]

    def select(self, episodes: Sequence[int] | Int64[np.ndarray, "chosen"]) -> "Demonstrations":
        """The given episodes, in the given order, copied into memory."""
        if len(episodes) == 0:
            raise ValueError("select: there are no episodes to select")
        parts = [self.episode(operator.index(index)) for index in episodes]
        ends = np.cumsum([len(obs) for obs, _ in parts], dtype=np.int64)
        obs, actions = np.concatenate([a for a, _ in parts]), np.concatenate([b for _, b in parts])
        return Demonstrations(obs, actions, ends, dict(self.metadata))

    def split(self, validation_fraction: float, seed: int) -> tuple["Demonstrations", "Demonstrations"]:
        """Training and validation episodes, a random partition; both parts get at least one episode.

        Copies into memory; a set that should stay on disk is split once and both parts are saved.
        """
        if not 0 < validation_fraction < 1:
            raise ValueError(f"validation_fraction is {validation_fraction}, expected a number between 0 and 1")
        if self.episodes < 2:
            raise ValueError("split: one episode cannot be split into training and validation")
        count = min(max(round(validation_fraction * self.episodes), 1), self.episodes - 1)
        order = np.random.default_rng(seed).permutation(self.episodes)
        return self.select(np.sort(order[count:])), self.select(np.sort(order[:count]))

    def windows(self, history: int = 1, horizon: int = 1) -> "Windows":
        """One pair per step: the last `history` observations and the next `horizon` actions."""
        return Windows(self, history, horizon)

    def summary(self) -> str:
        """A few lines to print."""
        lengths = self.episode_ends - self.episode_starts
        lines = [
            f"{self.episodes:,} episodes, {self.steps:,} steps "
            f"({lengths.min()} to {lengths.max()} per episode, median {np.median(lengths):.0f})"
        ]
        for name, array in (("observations", self.obs), ("actions", self.actions)):
            low, high = array.min(), array.max()
            lines.append(f"{name:<12} {array.shape[1]:>3} columns in [{low:.4g}, {high:.4g}]")
        lines += [f"{key:<12} {json.dumps(value)}" for key, value in self.metadata.items()]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one file if `path` ends in `.npz`, otherwise a directory.

        A reader sees the old set or the new one, never a mixture: the file, or the directory's header that
        names the arrays, is written beside its place and then moved there.
        """
        target = Path(path)
        header: dict[str, Any] = {"format": FORMAT, "version": VERSION, "metadata": self.metadata}
        if target.suffix == ".npz":
            target.parent.mkdir(parents=True, exist_ok=True)
            arrays = {"obs": self.obs, "action": self.actions, "episode_ends": self.episode_ends}
            _replace(target, lambda file: np.savez(file, header=_json(header), **arrays))  # type: ignore[arg-type]
            return
        target.mkdir(parents=True, exist_ok=True)
        for other in target.iterdir():
            if not _OURS.fullmatch(other.name):
                raise ValueError(f"{target}: the directory holds other files, such as {other.name!r}")
        header["arrays"] = {
            "obs": _write_array(target, "obs", self.obs),
            "action": _write_array(target, "action", self.actions),
            "episode_ends": _write_array(target, "episode_ends", self.episode_ends),
        }
        _replace(target / "header.json", lambda file: file.write(_json(header).encode()))
        kept = {entry["file"] for entry in header["arrays"].values()}
        for array in target.glob("*-*.npy"):
            if array.name not in kept:
                array.unlink()

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        obs_key: str = "obs",
        action_key: str = "action",
        ends_key: str = "episode_ends",
    ) -> "Demonstrations":
        """Reads what `save` wrote, or an `.npz` from elsewhere with the three arrays under the given keys."""
        source = Path(path)
        read = _read_directory if source.is_dir() else _read_npz
        header, arrays = read(source, (obs_key, action_key, ends_key))
        metadata = header.get("metadata", {})
        if not isinstance(metadata, dict):
            raise DemonstrationError(f"{source}: the header's metadata is not an object")
        return cls.from_arrays(*arrays, metadata=metadata, source=str(source))


@dataclass(frozen=True, eq=False)
class Windows:
    """Training pairs, gathered when indexed: `obs, actions = windows[indices]`.

    Pair `t` is the observations `t - history + 1 … t` and the actions `t … t + horizon - 1` of the episode
    that step `t` belongs to. Before its start the first observation is repeated, after its end the last
    action.
    """

    demonstrations: Demonstrations
    history: int
    horizon: int

    def __post_init__(self) -> None:
        for name, value in (("history", self.history), ("horizon", self.horizon)):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected 1 or more")

    @property
    def obs_dim(self) -> int:
        return self.history * self.demonstrations.obs_dim

    @property
    def act_dim(self) -> int:
        return self.horizon * self.demonstrations.act_dim

    def __len__(self) -> int:
        return self.demonstrations.steps

    def __getitem__(
        self, indices: Any
    ) -> tuple[Float32[np.ndarray, "batch window"], Float32[np.ndarray, "batch chunk"]]:
        """Pairs [batch, history · obs] and [batch, horizon · act], oldest first; `windows[:]` is all of them.

        `indices`: integers, a slice, or a mask over the steps.
        """
        rows = self._rows(indices)
        data = self.demonstrations
        episode = np.searchsorted(data.episode_ends, rows, side="right")
        first, last = data.episode_starts[episode], data.episode_ends[episode] - 1
        seen = np.maximum(rows[:, None] + np.arange(1 - self.history, 1), first[:, None])
        done = np.minimum(rows[:, None] + np.arange(self.horizon), last[:, None])
        return (
            np.asarray(data.obs[seen]).reshape(len(rows), self.obs_dim),
            np.asarray(data.actions[done]).reshape(len(rows), self.act_dim),
        )

    def spread(self, count: int, seed: int) -> Int64[np.ndarray, "rows"]:
        """Random rows in rising order, at most `count`: a step each of as many episodes, or, where there are fewer
        episodes, of all steps. Steps of one episode are alike, and more of them say less than they seem to."""
        random = np.random.default_rng(seed)
        data = self.demonstrations
        if data.episodes < count:
            return np.sort(random.permutation(len(self))[:count])
        chosen = np.sort(random.permutation(data.episodes)[:count])
        return random.integers(data.episode_starts[chosen], data.episode_ends[chosen])

    def _rows(self, indices: Any) -> Int64[np.ndarray, "batch"]:
        if isinstance(indices, slice):
            return np.arange(*indices.indices(len(self)), dtype=np.int64)
        rows = np.atleast_1d(np.asarray(indices))
        if rows.size == 0:
            return np.zeros(0, np.int64)
        if rows.dtype == np.bool_ and rows.shape == (len(self),):
            return np.flatnonzero(rows).astype(np.int64)
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            raise IndexError(f"windows take integers, a slice or a mask, not {rows.dtype} of shape {rows.shape}")
        if rows.min() < -len(self) or rows.max() >= len(self):
            raise IndexError(f"indices {rows.min()} to {rows.max()} are out of range for {len(self)} windows")
        return np.where(rows < 0, rows + len(self), rows).astype(np.int64)


def _check_ends(values: ArrayLike, source: str) -> Int64[np.ndarray, "episodes"]:
    ends = np.asarray(values)
    if ends.ndim != 1 or ends.size == 0:
        raise DemonstrationError(f"{source}: episode_ends has shape {ends.shape}, expected one end per episode")
    if ends.dtype.kind not in "iu":
        raise DemonstrationError(f"{source}: episode_ends holds {ends.dtype}, expected integers")
    ends = ends.astype(np.int64)
    lengths = np.diff(ends, prepend=0)
    if (lengths <= 0).any():
        episode = int(np.flatnonzero(lengths <= 0)[0])
        before = ends[episode - 1] if episode else 0
        raise DemonstrationError(
            f"{source}: episode {episode}: episode_ends must increase, but {ends[episode]} follows {before}"
        )
    return ends


def _check_matrix(
    values: ArrayLike, name: str, ends: Int64[np.ndarray, "episodes"], source: str
) -> Float32[np.ndarray, "steps columns"]:
    try:
        array = np.asanyarray(values)
    except ValueError as error:
        raise DemonstrationError(f"{source}: {_ragged(values, name, ends)}") from error
    if array.ndim != 2 or array.size == 0:
        raise DemonstrationError(f"{source}: {name} has shape {array.shape}, expected [steps, columns]")
    if array.dtype.kind not in "fiub":
        raise DemonstrationError(f"{source}: {name} holds {array.dtype}, expected numbers")
    with np.errstate(over="ignore"):  # what does not fit becomes infinite and is reported as that
        return array.astype(np.float32, copy=False)


def _ragged(values: Any, name: str, ends: Int64[np.ndarray, "episodes"]) -> str:
    """Names the first row that differs from row 0 in shape."""
    try:
        expected = np.shape(values[0])
        row = next(row for row, value in enumerate(values) if np.shape(value) != expected)
        found = np.shape(values[row])
    except (ValueError, StopIteration):
        return f"{name} is ragged"
    episode = np.searchsorted(ends, row, side="right")
    return f"episode {episode}: {name} is ragged, row {row} has shape {found} and row 0 {expected}"


def _check_finite(
    array: Float32[np.ndarray, "steps columns"], name: str, ends: Int64[np.ndarray, "episodes"], source: str
) -> None:
    rows = max(1, _CHUNK // array.shape[1])
    for begin in range(0, len(array), rows):
        bad = ~np.isfinite(array[begin : begin + rows])
        if bad.any():
            row, column = np.argwhere(bad)[0] + [begin, 0]
            episode = np.searchsorted(ends, row, side="right")
            raise DemonstrationError(
                f"{source}: episode {episode}: {name} column {column} is {array[row, column]} at step {row}"
            )


def _json(header: Mapping[str, Any]) -> str:
    return json.dumps(header, indent=2, sort_keys=True, allow_nan=False)


def _replace(target: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a temporary file beside `target`, then moves it there."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


class _Checksum:
    """A file that keeps nothing but the CRC of what is written to it."""

    def __init__(self) -> None:
        self.crc32 = 0

    def write(self, block: bytes) -> int:
        self.crc32 = zlib.crc32(block, self.crc32)
        return len(block)

    def __str__(self) -> str:
        return f"{self.crc32:08x}"


def _write_array(directory: Path, key: str, array: np.ndarray) -> dict[str, str]:
    """The file's name holds its checksum: a new array never takes the place of one that a reader has open."""
    checksum = _Checksum()
    np.save(checksum, array, allow_pickle=False)
    name = f"{key}-{checksum}.npy"
    _replace(directory / name, lambda file: np.save(file, array, allow_pickle=False))
    return {"file": name, "crc32": str(checksum)}


def _check_header(text: str, source: Path) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except ValueError as error:
        raise DemonstrationError(f"{source}: the header is not JSON: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DemonstrationError(f"{source}: the header is not one of {FORMAT}")
    version = header.get("version")
    if not isinstance(version, int) or version < 1:
        raise DemonstrationError(f"{source}: the header's version is {version!r}")
    if version > VERSION:
        raise DemonstrationError(f"{source}: written in format {version}, this cebm reads up to {VERSION}")
    return header


def _read_npz(source: Path, keys: Sequence[str]) -> tuple[dict[str, Any], list[np.ndarray]]:
    with source.open("rb") as file:
        try:
            return _read_members(file, source, keys)
        except DemonstrationError:
            raise
        except Exception as error:  # damaged bytes can fail anywhere in zipfile, zlib or numpy
            raise DemonstrationError(
                f"{source}: not a readable .npz, truncated or damaged ({type(error).__name__}: {error})"
            ) from error


def _read_members(file: BinaryIO, source: Path, keys: Sequence[str]) -> tuple[dict[str, Any], list[np.ndarray]]:
    with zipfile.ZipFile(file) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        _check_keys(keys, names, source)

        def read(key: str) -> np.ndarray:
            with archive.open(f"{key}.npy") as member:
                try:
                    array = np.lib.format.read_array(member, allow_pickle=False)
                except ValueError as error:
                    raise DemonstrationError(f"{source}: cannot read {key!r}: {error}") from error
                # Reading to the end is what makes zipfile compare its checksum.
                if member.read(1):
                    raise DemonstrationError(f"{source}: {key!r} is longer than its shape says")
            return array

        header = _check_header(str(read("header")), source) if "header" in names else {}
        return header, [read(key) for key in keys]


def _read_directory(source: Path, keys: Sequence[str]) -> tuple[dict[str, Any], list[np.ndarray]]:
    try:
        text = (source / "header.json").read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DemonstrationError(f"{source}: the directory has no header.json") from error
    except UnicodeDecodeError as error:
        raise DemonstrationError(f"{source / 'header.json'}: not text: {error}") from error
    header = _check_header(text, source / "header.json")
    entries = header.get("arrays")
    if not isinstance(entries, dict):
        raise DemonstrationError(f"{source / 'header.json'}: the header lists no arrays")
    _check_keys(keys, list(entries), source)
    return header, [_map_array(source, key, entries[key]) for key in keys]


def _check_keys(keys: Sequence[str], held: Sequence[str], source: Path) -> None:
    for key in keys:
        if key not in held:
            raise DemonstrationError(f"{source}: there is no {key!r}; it holds {', '.join(map(repr, held))}")


def _map_array(directory: Path, key: str, entry: Any) -> np.ndarray:
    if not isinstance(entry, dict) or not {"file", "crc32"} <= entry.keys():
        raise DemonstrationError(f"{directory / 'header.json'}: the entry of {key!r} has no file and crc32")
    name = str(entry["file"])
    path = directory / name
    if name != path.name:
        raise DemonstrationError(f"{directory / 'header.json'}: {name!r} is not a file of this directory")
    checksum = _Checksum()
    try:
        with path.open("rb") as file:
            shutil.copyfileobj(file, checksum, _CHUNK)
    except FileNotFoundError as error:
        raise DemonstrationError(f"{path}: the file is missing") from error
    if str(checksum) != entry["crc32"]:
        raise DemonstrationError(f"{path}: truncated or damaged, its checksum is not the header's")
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise DemonstrationError(f"{path}: cannot be read: {error}") from error
