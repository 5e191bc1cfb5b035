"""Episodes of observations and actions in memory, and the training pairs cut from them."""

import hashlib
import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int64
from numpy.typing import ArrayLike

from cebm.demonstrations.checks import (
    DemonstrationError,
    as_array,
    check_ends,
    check_matrix,
    concatenate,
    settle_precision,
)
from cebm.demonstrations.files import read, write
from cebm.demonstrations.large import Rows, blocks, chosen, extremes
from cebm.parts import Part, check_parts, parts_from_json


@dataclass(frozen=True, eq=False)
class Demonstrations:
    """Episodes stored one after the other. `from_arrays`, `from_episodes` and `load` check the data.

    Episode `e` has the rows from `episode_ends[e - 1]` (0 for the first episode) up to, but not including,
    `episode_ends[e]`. The action `actions[t]` was taken when `obs[t]` was observed. Each array is float32, or float64
    where float32 is too coarse.
    """

    obs: Float[np.ndarray, "steps obs"] | Float[Rows, "steps obs"]
    actions: Float[np.ndarray, "steps act"] | Float[Rows, "steps act"]
    episode_ends: Int64[np.ndarray, "episodes"]
    metadata: dict[str, Any] = field(default_factory=dict)
    """Any JSON object. `collect_particle` stores the task here, so that `cebm eval` can rebuild it."""
    parts: tuple[Part, ...] = ()
    """Named parts of an observation, in the order of its columns; by default one that is named 'obs'."""
    action_parts: tuple[Part, ...] = ()
    """Named parts of an action; by default one that is named 'action'."""

    def __post_init__(self) -> None:
        for name, what, array in (("parts", "obs", self.obs), ("action_parts", "action", self.actions)):
            object.__setattr__(self, name, check_parts(getattr(self, name), array.shape[1], what))

    @classmethod
    def from_arrays(
        cls,
        obs: ArrayLike,
        actions: ArrayLike,
        episode_ends: ArrayLike,
        *,
        metadata: Mapping[str, Any] | None = None,
        source: str = "demonstrations",
        parts: Sequence[Part] = (),
        action_parts: Sequence[Part] = (),
    ) -> "Demonstrations":
        """Checks and wraps arrays [steps, obs], [steps, act] and [episodes]; `source` begins error messages.

        `episode_ends` is cumulative and exclusive, so the last one is the number of steps. Arrays that are
        float32 already are not copied. Other arrays are rounded to float32, or to float64 where float32 would lose
        more than 1e-4 of the range of some column. `parts` and `action_parts` name the columns.
        """
        named = (tuple(parts), tuple(action_parts))
        return cls._checked(obs, actions, episode_ends, metadata, source, named, keep_float64=False)

    @classmethod
    def _checked(
        cls,
        obs: ArrayLike,
        actions: ArrayLike,
        episode_ends: ArrayLike,
        metadata: Mapping[str, Any] | None,
        source: str,
        parts: tuple[tuple[Part, ...], tuple[Part, ...]],
        keep_float64: bool,
    ) -> "Demonstrations":
        ends = check_ends(episode_ends, source)
        seen = check_matrix(obs, "obs", ends, source)
        done = check_matrix(actions, "action", ends, source)
        if len(seen) != len(done):
            raise DemonstrationError(f"{source}: obs has {len(seen)} steps, action has {len(done)}")
        if ends[-1] != len(seen):
            raise DemonstrationError(
                f"{source}: episode_ends says that the last episode, {len(ends) - 1}, "
                f"ends at step {ends[-1]}, but there are {len(seen)} steps"
            )
        seen = settle_precision(seen, "obs", ends, source, keep_float64)
        done = settle_precision(done, "action", ends, source, keep_float64)
        try:
            plain = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise DemonstrationError(f"{source}: metadata does not fit JSON: {error}") from error
        try:
            return cls(seen, done, ends, plain, *parts)
        except ValueError as error:
            raise DemonstrationError(f"{source}: {error}") from error

    @classmethod
    def from_episodes(
        cls,
        episodes: Iterable[tuple[ArrayLike, ArrayLike]],
        *,
        metadata: Mapping[str, Any] | None = None,
        parts: Sequence[Part] = (),
        action_parts: Sequence[Part] = (),
    ) -> "Demonstrations":
        """Builds a set from pairs of observations [steps, obs] and actions [steps, act], one pair per episode."""
        seen: list[np.ndarray] = []
        done: list[np.ndarray] = []
        for index, (obs, actions) in enumerate(episodes):
            where = f"episode {index}"
            for name, values, others in (("obs", obs, seen), ("action", actions, done)):
                try:
                    array = as_array(values)
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
        named: dict[str, Any] = {"metadata": metadata, "parts": parts, "action_parts": action_parts}
        return cls.from_arrays(concatenate(seen), concatenate(done), ends, **named)

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

    def episode(self, index: int) -> tuple[Float[np.ndarray, "length obs"], Float[np.ndarray, "length act"]]:
        """Returns views of the observations and actions of one episode."""
        index = range(self.episodes)[index]
        rows = slice(int(self.episode_ends[index - 1]) if index else 0, int(self.episode_ends[index]))
        return self.obs[rows], self.actions[rows]

    def select(self, episodes: Sequence[int] | Int64[np.ndarray, "chosen"]) -> "Demonstrations":
        """The given episodes in the given order: copied where the set is in memory, a view where it is on disk."""
        if len(episodes) == 0:
            raise ValueError("select: there are no episodes to select")
        each = range(self.episodes)
        rows = np.array([each[operator.index(index)] for index in episodes])
        starts, ends = self.episode_starts[rows], self.episode_ends[rows]
        obs, actions = chosen(self.obs, starts, ends), chosen(self.actions, starts, ends)
        named = (self.parts, self.action_parts)
        return Demonstrations(obs, actions, np.cumsum(ends - starts), dict(self.metadata), *named)

    def split(self, validation_fraction: float, seed: int) -> tuple["Demonstrations", "Demonstrations"]:
        """Splits the episodes at random into a training and a validation set; each gets at least one episode.

        As with `select`, the parts of a set that is on disk stay there.
        """
        if not 0 < validation_fraction < 1:
            raise ValueError(f"validation_fraction is {validation_fraction}, expected a number between 0 and 1")
        if self.episodes < 2:
            raise ValueError("split: one episode cannot be split into training and validation")
        count = min(max(round(validation_fraction * self.episodes), 1), self.episodes - 1)
        order = np.random.default_rng(seed).permutation(self.episodes)
        return self.select(np.sort(order[count:])), self.select(np.sort(order[:count]))

    def windows(self, history: int = 1, horizon: int = 1) -> "Windows":
        """Returns one training pair per step: the last `history` observations and the next `horizon` actions."""
        return Windows(self, history, horizon)

    def fingerprint(self) -> str:
        """Returns 16 hexadecimal digits of the SHA-256 of obs, actions and episode_ends, with shapes and types.

        The metadata do not count. A run that stores the fingerprint can notice that its data changed.
        """
        digest = hashlib.sha256()
        for name, array in (("obs", self.obs), ("actions", self.actions), ("episode_ends", self.episode_ends)):
            stored = array.dtype.newbyteorder("<")  # the same on every machine
            digest.update(f"{name} {stored.str} {array.shape}\n".encode())
            for _, block in blocks(array):
                digest.update(np.ascontiguousarray(block, stored).data)
        return digest.hexdigest()[:16]

    def summary(self) -> str:
        """Returns a few lines to print: counts, lengths, ranges and metadata."""
        lengths = self.episode_ends - self.episode_starts
        lines = [
            f"{self.episodes:,} episodes, {self.steps:,} steps "
            f"({lengths.min()} to {lengths.max()} per episode, median {np.median(lengths):.0f})"
        ]
        for name, array in (("observations", self.obs), ("actions", self.actions)):
            low, high = (each(values) for each, values in zip((np.min, np.max), extremes(array), strict=True))
            lines.append(f"{name:<12} {array.shape[1]:>3} columns in [{low:.4g}, {high:.4g}]")
        lines += [f"{key:<12} {json.dumps(value)}" for key, value in self.metadata.items()]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one file if `path` ends in `.npz`, and a directory if it has no suffix or is a directory already.

        Any other suffix is a ValueError. Saving is atomic: a reader finds the old set or the new one, never a
        mixture, because the last step moves a complete file (the `.npz`, or the header that names the arrays) into
        place.
        """
        arrays = {"obs": self.obs, "action": self.actions, "episode_ends": self.episode_ends}
        write(Path(path), arrays, self.metadata, {"parts": self.parts, "action_parts": self.action_parts})

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        obs_key: str = "obs",
        action_key: str = "action",
        ends_key: str = "episode_ends",
    ) -> "Demonstrations":
        """Reads a set that `save` wrote, or an `.npz` of another program with three arrays under the given keys."""
        source = Path(path)
        header, arrays = read(source, (obs_key, action_key, ends_key))
        metadata = header.get("metadata", {})
        if not isinstance(metadata, dict):
            raise DemonstrationError(f"{source}: the header's metadata is not a JSON object")
        # From format 2 on, `save` has chosen the precision. A part of a set keeps that of the whole.
        chosen = header.get("version", 1) >= 2
        obs, actions, ends = arrays
        ours = (obs_key, action_key) == ("obs", "action")  # the header's parts are those of these two
        try:
            named = [parts_from_json(header.get(key, []) if ours else [], key) for key in ("parts", "action_parts")]
        except ValueError as error:
            raise DemonstrationError(f"{source}: {error}") from error
        return cls._checked(obs, actions, ends, metadata, str(source), (named[0], named[1]), keep_float64=chosen)


@dataclass(frozen=True, eq=False)
class Windows:
    """Training pairs, which are gathered when they are indexed: `obs, actions = windows[indices]`.

    Pair `t` has the observations `t - history + 1 … t` and the actions `t … t + horizon - 1` of the episode
    that step `t` belongs to. Before the start of the episode its first observation is repeated; after its end, its
    last action. The pairs have the types of the arrays, float32 or float64.
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

    def __getitem__(self, indices: Any) -> tuple[Float[np.ndarray, "batch window"], Float[np.ndarray, "batch chunk"]]:
        """Returns pairs [batch, history · obs] and [batch, horizon · act], oldest first; `windows[:]` returns all.

        `indices` are integers, a slice, or a mask over the steps.
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

    def within(self, beyond: int) -> Int64[np.ndarray, "rows"]:
        """Returns the pairs of which at most `beyond` actions lie beyond the end of their episode, and so repeat its
        last one."""
        data = self.demonstrations
        steps = np.arange(len(self))
        ends = np.repeat(data.episode_ends, data.episode_ends - data.episode_starts)
        return steps[steps + self.horizon <= ends + beyond]

    def padding(self, indices: Any) -> Bool[np.ndarray, "batch horizon"]:
        """Returns which actions of these pairs lie beyond the end of their episode, and so repeat its last one."""
        rows, data = self._rows(indices), self.demonstrations
        ends = data.episode_ends[np.searchsorted(data.episode_ends, rows, side="right")]
        return rows[:, None] + np.arange(self.horizon) >= ends[:, None]

    def spread(self, count: int, seed: int) -> Int64[np.ndarray, "rows"]:
        """Returns at most `count` random rows in rising order, for estimates that need independent steps.

        With `count` episodes or more, each row is of another episode, because steps of one episode are alike. With
        fewer episodes, the rows are drawn from all steps.
        """
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
