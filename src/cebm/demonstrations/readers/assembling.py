"""From the arrays of a file to demonstrations: which arrays are meant, where episodes end, all in one array."""

import fnmatch
import importlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cebm.demonstrations.checks import DemonstrationError
from cebm.demonstrations.episodes import Demonstrations
from cebm.demonstrations.large import CHUNK, Growing, chosen
from cebm.parts import Part

OBS = ("obs", "observation", "observations", "state", "states", "obs_*", "obs.*", "observation_*", "observation.*")
ACTION = ("action", "actions", "act", "acts", "action_*", "action.*", "act_*")
DONE = ("done", "dones", "terminal", "terminals", "terminated", "truncated", "timeout", "timeouts", "is_last", "last")
IDS = (
    *("episode", "episode_index", "episode_id", "episode_idx", "episodes", "ep", "traj", "traj_id", "trajectory"),
    *("trajectory_id", "demo", "demo_id"),
)
ENDS = ("episode_ends", "meta/episode_ends", "ends", "episode_lengths", "lengths")
KINDS = ("ends", "lengths", "ids", "done")
_LARGE = 256 << 20  # bytes; what expands from a file to more than this may do so _LARGEST_RATIO-fold
_LARGEST_RATIO = 200
_MOST_NAMES = 24  # names that a message lists


@dataclass(frozen=True)
class Wanted:
    """What the user asked for; an empty tuple leaves the choice to the reader."""

    source: str
    """The file, which begins every message."""
    obs: tuple[str, ...] = ()
    """Arrays or columns of an observation: names, patterns, or NAME=PATTERN for a part with a name."""
    action: tuple[str, ...] = ()
    """Those of an action."""
    episodes: tuple[str, ...] = ()
    """What tells where episodes end."""
    listen: Callable[[float], None] = field(default=lambda share: None)
    """Gets the share that is read, from 0 to 1."""

    def error(self, message: str) -> DemonstrationError:
        return DemonstrationError(f"{self.source}: {message}")


@dataclass(frozen=True)
class Group:
    """Arrays that one word of the user stands for."""

    name: str | None
    """The name of the part that they make together; None: each is a part of its own."""
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """Which arrays make an observation or an action, and what its parts are called."""

    keys: tuple[str, ...]
    parts: tuple[Part, ...]


def needed(module: str, extra: str, what: str) -> Any:
    """Imports an optional package; an ImportError names the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{what} needs {package}: pip install 'cebm[{extra}]' ({error})", name=package) from error


def check_expansion(wanted: Wanted, what: str, stored: int, expanded: int) -> None:
    """Refuses sizes that are far larger than the file, before memory is allocated for them."""
    if expanded > _LARGE and expanded > _LARGEST_RATIO * stored:
        raise wanted.error(
            f"{what} says that it has {expanded:,} bytes, the file holds {stored:,} for it; "
            f"what has more than {_LARGE:,} bytes may expand {_LARGEST_RATIO}-fold"
        )


def inside(root: Path, path: Path, wanted: Wanted) -> Path:
    """The path, where it stays inside the folder of the dataset, links included."""
    if not path.resolve().is_relative_to(root.resolve()):
        raise wanted.error(f"{path.name!r} leads out of the folder of the dataset, to {path.resolve()}; it is not read")
    return path


def natural(text: str) -> list[tuple[int, int, str]]:
    """The order in which demo_2 comes before demo_10."""
    words = re.split(r"(\d{1,18})", text)
    return [(0, int(word), "") if word.isdecimal() else (1, 0, word) for word in words]


# -------------------------------------------------------------------------------------------- which arrays


def listed(held: Mapping[str, Any] | Collection[str]) -> str:
    """What a file holds, with shapes where they are known without reading."""
    names = []
    for name in list(held)[:_MOST_NAMES]:
        shape = getattr(held[name], "shape", None) if isinstance(held, dict) else None
        names.append(f"{name!r}" + ("" if shape is None else f" {tuple(shape)}"))
    more = len(held) - _MOST_NAMES
    return ", ".join(names) + (f" and {more} more" if more > 0 else "") if names else "nothing"


def groups_of(words: Sequence[str], held: Mapping[str, Any], what: str, wanted: Wanted) -> list[Group]:
    """The arrays that the user's words stand for, in their order; each may be named once."""
    groups: list[Group] = []
    for word in words:
        name, keys = None, _matching(word, held)
        if not keys and "=" in word:
            name, _, pattern = word.partition("=")
            keys = _matching(pattern, held)
        if not keys:
            raise wanted.error(f"there is no {word!r} for {what}; it holds {listed(held)}")
        groups.append(Group(name or None, keys))
    keys = tuple(key for group in groups for key in group.keys)
    twice = [key for index, key in enumerate(keys) if key in keys[:index]]
    if twice:
        raise wanted.error(f"{twice[0]!r} is named twice for {what}")
    return groups


def _matching(word: str, held: Collection[str]) -> tuple[str, ...]:
    if word in held:
        return (word,)
    if not re.search(r"[*?\[]", word):
        return ()
    return tuple(sorted((key for key in held if fnmatch.fnmatchcase(key, word)), key=natural))


def default_words(candidates: Sequence[str], held: Mapping[str, Any], what: str, wanted: Wanted) -> tuple[str, ...]:
    """The first usual name that is there; an error where there is none."""
    for candidate in candidates:
        if _matching(candidate, held):
            return (candidate,)
    raise wanted.error(
        f"none of the usual names of {what} is there: name it ({what}=…, or --data-{what} on the command line); "
        f"it holds {listed(held)}"
    )


def layout_of(
    groups: Sequence[Group], shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, Any], what: str
) -> Layout:
    """Arrays of several numbers per step are parts; single numbers are together the columns of one part."""
    keys = tuple(key for group in groups for key in group.keys)
    if all(group.name is None for group in groups) and all(shapes[key] == () for key in keys):
        return Layout(keys, (Part(what, (len(keys),), keys),))
    parts: list[Part] = []
    for group in groups:
        if group.name is None:
            parts += [_part(key, shapes[key], names.get(key, ())) for key in group.keys]
            continue
        sizes = sum(math.prod(shapes[key]) for key in group.keys)
        single = all(shapes[key] == () for key in group.keys)
        only = names.get(group.keys[0], ()) if len(group.keys) == 1 else ()
        parts.append(_part(group.name, (sizes,), group.keys if single else only))
    return Layout(keys, tuple(parts))


def _part(name: str, shape: tuple[int, ...], columns: Any) -> Part:
    """With the names of the columns where they are names; a file may say anything."""
    try:
        return Part(name, shape, tuple(columns) if all(isinstance(word, str) for word in columns) else ())
    except ValueError:
        return Part(name, shape)


def check_kind(array: Any, name: str, wanted: Wanted) -> None:
    """Refuses arrays that hold no numbers."""
    dtype = np.dtype(array.dtype)
    if dtype.kind not in "fiub":
        what = {"U": "text", "S": "text", "O": "objects", "T": "text", "M": "dates", "c": "complex numbers"}
        raise wanted.error(f"{name!r} holds {what.get(dtype.kind, dtype)}, expected numbers")


# -------------------------------------------------------------------------------------------- one array per set


def assembled(
    wanted: Wanted,
    held: Mapping[str, Any],
    *,
    names: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    ends: np.ndarray | None = None,
) -> Demonstrations:
    """Demonstrations from arrays with a row per step, in memory or read in slices; `ends` where they are known."""
    groups = [
        groups_of(words or default_words(usual, held, what, wanted), held, what, wanted)
        for what, words, usual in (("obs", wanted.obs, OBS), ("action", wanted.action, ACTION))
    ]
    layouts = []
    for what, found in zip(("obs", "action"), groups, strict=True):
        _check_lengths(found, held, what, wanted)
        shapes = {key: tuple(held[key].shape[1:]) for group in found for key in group.keys}
        layouts.append(layout_of(found, shapes, names or {}, what))
    counts = (len(held[layouts[0].keys[0]]), len(held[layouts[1].keys[0]]))
    used = {*layouts[0].keys, *layouts[1].keys}
    found_ends = episode_ends(wanted, held, counts, used) if ends is None else np.asarray(ends, np.int64)
    arrays = [_gathered(wanted, [held[key] for key in layout.keys], half) for half, layout in enumerate(layouts)]
    obs, actions, found_ends = _aligned(arrays[0], arrays[1], found_ends, wanted)
    return finished(wanted, obs, actions, found_ends, layouts, metadata)


def finished(
    wanted: Wanted, obs: Any, actions: Any, ends: Any, layouts: Sequence[Layout], metadata: Mapping[str, Any] | None
) -> Demonstrations:
    """The checked set, whose metadata say what was read."""
    read = {"obs": list(layouts[0].keys), "action": list(layouts[1].keys), **(metadata or {})}
    named: dict[str, Any] = {"parts": layouts[0].parts, "action_parts": layouts[1].parts}
    found = Demonstrations.from_arrays(obs, actions, ends, metadata={"read": read}, source=wanted.source, **named)
    wanted.listen(1.0)
    return found


def _check_lengths(groups: Sequence[Group], held: Mapping[str, Any], what: str, wanted: Wanted) -> None:
    keys = [key for group in groups for key in group.keys]
    for key in keys:
        check_kind(held[key], key, wanted)
        if not held[key].shape or not math.prod(held[key].shape):
            raise wanted.error(f"{key!r} has shape {tuple(held[key].shape)}, expected a row per step")
        if len(held[key]) != len(held[keys[0]]):
            lengths = f"{keys[0]!r} has {len(held[keys[0]])} steps, {key!r} has {len(held[key])}"
            raise wanted.error(f"{what} is made of arrays of different lengths: {lengths}")


def _gathered(wanted: Wanted, arrays: Sequence[Any], half: int) -> Any:
    """The arrays side by side, [steps, columns]; an array of numpy's that stands alone is not copied."""
    if len(arrays) == 1 and isinstance(arrays[0], np.ndarray):
        return arrays[0].reshape(len(arrays[0]), -1)
    growing = Growing(np.result_type(*[array.dtype for array in arrays]))
    steps, width = len(arrays[0]), sum(math.prod(array.shape[1:]) for array in arrays)
    rows = max(1, CHUNK // width)
    for begin in range(0, steps, rows):
        growing.append(side_by_side([np.asarray(array[begin : begin + rows]) for array in arrays]))
        wanted.listen((half + min(1.0, (begin + rows) / steps)) / 2)
    return growing.array()


def side_by_side(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays with a row per step as one, [steps, columns]."""
    return np.concatenate([array.reshape(len(array), -1) for array in arrays], 1)


def _aligned(obs: Any, actions: Any, ends: np.ndarray, wanted: Wanted) -> tuple[Any, Any, np.ndarray]:
    """Takes off the last observation of each episode, where observations are one longer than actions."""
    count, total = len(ends), int(ends[-1])
    if len(obs) == len(actions):
        if total != len(obs):
            raise wanted.error(f"the last episode, {count - 1}, ends at step {total}, but there are {len(obs)} steps")
        return obs, actions, ends
    if len(obs) != len(actions) + count or total not in (len(obs), len(actions)):
        raise wanted.error(
            f"obs has {len(obs)} steps, action has {len(actions)} in {count} episodes; "
            "expected as many, or one observation more in each episode"
        )
    if total == len(obs):
        ends = ends - np.arange(1, count + 1)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    short = np.flatnonzero(ends <= starts)
    if short.size:
        raise wanted.error(f"episode {short[0]} has one observation and no action")
    seen = starts + np.arange(count)
    return chosen(obs, seen, seen + ends - starts), actions, ends


# -------------------------------------------------------------------------------------------- where episodes end


def episode_ends(
    wanted: Wanted, held: Mapping[str, Any], counts: tuple[int, int], used: Collection[str] = ()
) -> np.ndarray:
    """Cumulative, exclusive ends from whatever tells them: ends, lengths, an id per step, or flags of the last step."""
    words = wanted.episodes or _usual_episodes(wanted, held, used)
    if words in (("one",), ("each",)) and words[0] not in held:
        return np.array([counts[1]]) if words == ("one",) else np.arange(1, counts[1] + 1)
    kinds, columns = [], []
    for word in words:
        kind, colon, rest = word.partition(":")
        stated = bool(colon) and kind in KINDS and word not in held
        name = rest if stated else word
        if name not in held:
            raise wanted.error(f"there is no {name!r} that tells where episodes end; it holds {listed(held)}")
        values = np.asarray(held[name][:])
        values = values.reshape(len(values), -1)[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
        if values.ndim != 1 or not len(values):
            raise wanted.error(f"{name!r} has shape {values.shape}, expected one number per step or per episode")
        kinds.append(kind if stated else _kind_of(name, values, counts, wanted))
        columns.append(values)
    if len(words) == 1:
        return _ENDS[kinds[0]](name, columns[0], counts, wanted)
    if set(kinds) != {"done"} or len({len(column) for column in columns}) > 1:
        raise wanted.error(f"episodes takes one name, or several of flags of the last step, got {', '.join(words)}")
    flags = np.any([_flags(name, column, wanted) for name, column in zip(words, columns, strict=True)], 0)
    return _from_done(" or ".join(words), flags, counts, wanted)


def _usual_episodes(wanted: Wanted, held: Mapping[str, Any], used: Collection[str]) -> tuple[str, ...]:
    for name in (*ENDS, *IDS):
        if name in held and name not in used:
            return (name,)
    flags = tuple(name for name in DONE if name in held and name not in used)
    if flags:
        return flags
    raise wanted.error(
        "nothing says where episodes end: name it (episodes=…, or --data-episodes on the command line: ends, lengths, "
        f"an id per step, or flags of the last step), or say episodes=one or episodes=each; it holds {listed(held)}"
    )


def _kind_of(name: str, values: np.ndarray, counts: tuple[int, int], wanted: Wanted) -> str:
    """What an array says, by its name and its values; an error where it could mean two things."""
    last = name.rpartition("/")[2].lower()
    per_step = len(values) in counts
    if values.dtype.kind in "USOT":
        return "ids"
    if values.dtype == np.bool_ or (per_step and last in DONE):
        return "done"
    if per_step and last in IDS:
        return "ids"
    whole = values.dtype.kind in "iu" or bool((values == np.floor(values)).all())
    if whole and int(values[-1]) in counts and bool((np.diff(values) > 0).all()):
        return "ends"
    if whole and int(values.sum()) in counts and bool((values > 0).all()) and not per_step:
        return "lengths"
    if not per_step:
        raise wanted.error(
            f"{name!r} has {len(values)} values for {counts[1]} steps: these are no ends (the last is {values[-1]}), "
            f"no lengths (the sum is {values.sum()}) and no value per step"
        )
    if set(np.unique(values[: 1 << 20])) <= {0, 1}:
        raise wanted.error(f"{name!r} is 0 or 1: say whether it flags last steps (done:{name}) or counts (ids:{name})")
    return "ids"


def _from_ends(name: str, values: np.ndarray, counts: tuple[int, int], wanted: Wanted) -> np.ndarray:
    ends = _integers(name, values, wanted)
    wrong = np.flatnonzero(np.diff(ends, prepend=0) <= 0)
    if wrong.size or int(ends[-1]) not in counts:
        place = int(wrong[0]) if wrong.size else len(ends) - 1
        raise wanted.error(f"{name!r}: episode {place} ends at {ends[place]}; ends must rise up to {counts[1]} steps")
    return ends


def _from_lengths(name: str, values: np.ndarray, counts: tuple[int, int], wanted: Wanted) -> np.ndarray:
    lengths = _integers(name, values, wanted)
    if lengths.min() <= 0 or int(lengths.sum()) not in counts:
        raise wanted.error(f"{name!r}: lengths must be positive and sum to {counts[1]} steps, got {lengths.sum()}")
    return np.cumsum(lengths)


def _from_ids(name: str, values: np.ndarray, counts: tuple[int, int], wanted: Wanted) -> np.ndarray:
    _check_per_step(name, values, counts, wanted)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise wanted.error(f"{name!r} is {values[~np.isfinite(values)][0]} at step {np.argmin(np.isfinite(values))}")
    ends = np.append(np.flatnonzero(values[1:] != values[:-1]) + 1, len(values))
    first = values[np.concatenate([[0], ends[:-1]])]
    kinds, where = np.unique(first, return_index=True)
    if len(kinds) != len(first):
        again = np.setdiff1d(np.arange(len(first)), where)[0]
        raise wanted.error(
            f"{name!r}: episode {first[again]} comes back at step {ends[again - 1]}, after another one; "
            "the steps of an episode must follow each other"
        )
    return ends.astype(np.int64)


def _from_done(name: str, values: np.ndarray, counts: tuple[int, int], wanted: Wanted) -> np.ndarray:
    """The end is behind a step that is flagged; what follows the last flag is an episode that was cut short."""
    _check_per_step(name, values, counts, wanted)
    ends = np.flatnonzero(_flags(name, values, wanted)) + 1
    if not ends.size:
        raise wanted.error(f"{name!r} flags no step, so it tells no end; say episodes=one for a single episode")
    return (ends if ends[-1] == len(values) else np.append(ends, len(values))).astype(np.int64)


def _flags(name: str, values: np.ndarray, wanted: Wanted) -> np.ndarray:
    strange = ~np.isin(values, (0, 1)) if values.dtype.kind in "fiub" else np.ones(len(values), bool)
    if strange.any():
        raise wanted.error(f"{name!r} must be 0 or 1, but is {values[strange][0]!r} at step {np.argmax(strange)}")
    return values.astype(bool)


def _integers(name: str, values: np.ndarray, wanted: Wanted) -> np.ndarray:
    if values.dtype.kind not in "iuf" or not bool((values == np.floor(values)).all()) or abs(values).max() >= 2**62:
        raise wanted.error(f"{name!r} holds {values.dtype} that are no integers, so it tells no ends")
    return values.astype(np.int64)


def _check_per_step(name: str, values: np.ndarray, counts: tuple[int, int], wanted: Wanted) -> None:
    if len(values) not in counts:
        raise wanted.error(f"{name!r} has {len(values)} values, expected one for each of {counts[1]} steps")


_ENDS = {"ends": _from_ends, "lengths": _from_lengths, "ids": _from_ids, "done": _from_done}


# -------------------------------------------------------------------------------------------- episode by episode


@dataclass(frozen=True)
class Episode:
    """One episode of a file that keeps them apart; its arrays are read when they are sliced."""

    where: str
    """What messages call it."""
    obs: Mapping[str, Any]
    actions: Mapping[str, Any]


def joined(
    wanted: Wanted,
    episodes: Sequence[Episode],
    *,
    names: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    defaults: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Demonstrations:
    """Demonstrations from episodes; all must have the arrays of the first. An observation that is one longer than the
    actions loses its last row, which nobody acted on."""
    if not episodes:
        raise wanted.error("there are no episodes")
    usual = defaults or (OBS, ACTION)
    layouts = []
    for what, words, candidates in (("obs", wanted.obs, usual[0]), ("action", wanted.action, usual[1])):
        held = _side(episodes[0], what)
        words = words or (tuple(candidates) if defaults else default_words(candidates, held, what, wanted))
        groups = groups_of(words, held, what, wanted)
        keys = [key for group in groups for key in group.keys]
        for episode in episodes:
            _check_episode(episode, what, keys, held, wanted)
        layouts.append(layout_of(groups, {key: tuple(held[key].shape[1:]) for key in keys}, names or {}, what))
    growing = [
        Growing(np.result_type(*{_side(episode, what)[key].dtype for episode in episodes for key in layout.keys}))
        for what, layout in zip(("obs", "action"), layouts, strict=True)
    ]
    ends: list[int] = []
    for index, episode in enumerate(episodes):
        steps = _steps(episode, layouts, wanted)
        for grown, layout, what in zip(growing, layouts, ("obs", "action"), strict=True):
            held = _side(episode, what)
            for part in _slices(steps, [held[key] for key in layout.keys]):
                grown.append(part)
        ends.append(steps + (ends[-1] if ends else 0))
        wanted.listen((index + 1) / len(episodes))
    return finished(wanted, growing[0].array(), growing[1].array(), np.array(ends), layouts, metadata)


def _side(episode: Episode, what: str) -> Mapping[str, Any]:
    return episode.obs if what == "obs" else episode.actions


def _slices(steps: int, arrays: Sequence[Any]) -> Iterable[np.ndarray]:
    """Blocks of rows of the arrays side by side."""
    rows = max(1, CHUNK // max(1, sum(math.prod(array.shape[1:]) for array in arrays)))
    for begin in range(0, steps, rows):
        end = min(begin + rows, steps)
        yield side_by_side([np.asarray(array[begin:end]) for array in arrays])


def _check_episode(episode: Episode, what: str, keys: Sequence[str], first: Mapping[str, Any], wanted: Wanted) -> None:
    held = _side(episode, what)
    for key in keys:
        if key not in held:
            raise wanted.error(f"{episode.where}: there is no {key!r}; it holds {listed(held)}")
        check_kind(held[key], f"{episode.where}/{key}", wanted)
        shape, expected = tuple(held[key].shape), tuple(first[key].shape)
        if not shape or shape[1:] != expected[1:]:
            raise wanted.error(f"{episode.where}: {key!r} has shape {shape}, the first episode {expected}")


def _steps(episode: Episode, layouts: Sequence[Layout], wanted: Wanted) -> int:
    """Steps of an episode, which are its actions."""
    acted = {key: len(episode.actions[key]) for key in layouts[1].keys}
    seen = {key: len(episode.obs[key]) for key in layouts[0].keys}
    steps = next(iter(acted.values()))
    odd = [key for key, length in acted.items() if length != steps]
    odd += [
        key for key, length in seen.items() if length not in (steps, steps + 1) or length != next(iter(seen.values()))
    ]
    if odd or not steps:
        lengths = ", ".join(f"{key!r} {length}" for key, length in {**acted, **seen}.items())
        raise wanted.error(f"{episode.where}: lengths do not fit each other ({lengths}); obs may have one row more")
    return steps
