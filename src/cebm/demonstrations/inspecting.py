"""What is in a set of demonstrations, and what in it looks wrong before anybody trains on it."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cebm.demonstrations.episodes import Demonstrations
from cebm.demonstrations.large import extremes
from cebm.parts import Part

_SAMPLE = 100_000  # steps that quantiles, shifts and repetitions are looked for in
_PAIRS = 4096  # pairs of an action's and an observation's column that are compared
_SHIFTS = range(-3, 4)
_SAME = 1e-3  # mean difference, as a part of the column's standard deviation, below which two columns are the same
_TAIL = 0.1  # the middle 99.8 % of a column that fill less than this part of its range: outliers stretch it
_FEW = 20  # distinct integers that look like categories


@dataclass(frozen=True)
class Column:
    """One column of the observations or the actions."""

    kind: str
    """'obs' or 'action'."""
    name: str
    low: float
    high: float
    mean: float
    deviation: float
    remarks: tuple[str, ...]
    """What is suspicious or worth knowing."""


@dataclass(frozen=True)
class Inspection:
    """What `cebm data inspect` says."""

    episodes: int
    steps: int
    lengths: tuple[int, float, int]
    """The shortest, the median and the longest episode."""
    columns: tuple[Column, ...]
    warnings: tuple[str, ...]
    """What concerns more than one column: duplicates, actions that lag, single steps."""
    metadata: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """What was found, as plain JSON."""
        return asdict(self)

    def __str__(self) -> str:
        short, median, long = self.lengths
        counts = f"{self.episodes:,} episodes, {self.steps:,} steps"
        lines = [f"{counts} ({short:,} to {long:,} per episode, median {median:,.0f})", ""]
        width = max(len(column.name) for column in self.columns)
        lines.append(f"{'':<7} {'column':<{width}} {'lowest':>11} {'highest':>11} {'mean':>11} {'deviation':>11}")
        for each in self.columns:
            numbers = " ".join(f"{value:>11.4g}" for value in (each.low, each.high, each.mean, each.deviation))
            lines.append(f"{each.kind:<7} {each.name:<{width}} {numbers}  {'; '.join(each.remarks)}".rstrip())
        lines += ["", *(f"! {warning}" for warning in self.warnings)] if self.warnings else []
        return "\n".join(lines)


def inspect(data: Demonstrations) -> Inspection:
    """Looks at every value once for the ranges, and at 100,000 steps of whole episodes for the rest."""
    lengths = data.episode_ends - data.episode_starts
    some = data.select(_sample(data)) if data.steps > _SAMPLE else data
    obs, actions = np.asarray(some.obs, np.float64), np.asarray(some.actions, np.float64)
    inner = np.ones(len(obs), bool)  # whether the step before is of the same episode
    inner[some.episode_starts] = False
    columns = [*_columns("obs", data.obs, obs, data.parts, inner)]
    columns += _columns("action", data.actions, actions, data.action_parts, inner)
    warnings = [*_lengths(lengths), *_repetitions(some, obs, actions, inner), *_twins(columns, obs, actions)]
    warnings += _shifts(some, columns, obs, actions)
    spread = (int(lengths.min()), float(np.median(lengths)), int(lengths.max()))
    return Inspection(data.episodes, data.steps, spread, tuple(columns), tuple(warnings), data.metadata)


def _sample(data: Demonstrations) -> list[int]:
    """Episodes, spread evenly, that have about as many steps as are looked at; at least one."""
    count = max(1, int(data.episodes * _SAMPLE / data.steps))
    return np.unique(np.linspace(0, data.episodes - 1, count).astype(int)).tolist()


def column_names(parts: Sequence[Part]) -> list[str]:
    """A name for every column: its own, or that of its part with its number."""
    names: list[str] = []
    for part in parts:
        single = part.size == 1 and not part.columns
        own = part.columns or ([part.name] if single else [f"{part.name}[{index}]" for index in range(part.size)])
        names += [f"{part.name}.{name}" if part.columns and len(parts) > 1 else name for name in own]
    return names


def _columns(kind: str, whole: Any, some: np.ndarray, parts: Sequence[Part], inner: np.ndarray) -> Iterator[Column]:
    low, high = extremes(whole)
    norms = _unit_parts(some, parts)
    for index, name in enumerate(column_names(parts)):
        values = some[:, index]
        remarks = _remarks(values, float(low[index]), float(high[index]), inner)
        if index in norms and float(low[index]) < float(high[index]):
            remarks.append("part of a unit quaternion?")
        mean, deviation = float(values.mean()), float(values.std())
        yield Column(kind, name, float(low[index]), float(high[index]), mean, deviation, tuple(remarks))


def _unit_parts(values: np.ndarray, parts: Sequence[Part]) -> set[int]:
    """Columns of parts with four numbers whose squares sum to 1."""
    found: set[int] = set()
    start = 0
    for part in parts:
        block = values[:, start : start + part.size]
        if part.size == 4 and bool((np.abs(np.square(block).sum(1) - 1) < 1e-3).all()):
            found |= set(range(start, start + 4))
        start += part.size
    return found


def _remarks(values: np.ndarray, low: float, high: float, inner: np.ndarray) -> list[str]:
    if low == high:
        return ["constant"]
    found = []
    bottom, top = np.quantile(values, (0.001, 0.999))
    distinct = np.unique(values)
    whole = bool((values == np.floor(values)).all())
    if whole and len(distinct) <= _FEW:
        found.append(f"{len(distinct)} whole numbers: categories?")
    elif top - bottom < _TAIL * (high - low):
        found.append(f"outliers: 99.8 % are in [{bottom:.4g}, {top:.4g}]")
    jumps = np.abs(np.diff(values, prepend=values[:1]))[inner]
    for turn, unit in ((2 * np.pi, "radians"), (360.0, "degrees")):
        # A wrapped angle jumps by nearly a turn and seldom by less; noise of that range jumps by less far more often.
        wrapped, less = (jumps > 0.9 * turn).sum(), ((jumps > 0.6 * turn) & (jumps <= 0.9 * turn)).sum()
        if high - low <= 1.02 * turn and wrapped > less:
            found.append(f"wraps: an angle in {unit}?")
    common = float((values == values[len(values) // 2]).mean()) if len(values) else 0.0
    if not whole and common > 0.95:
        found.append(f"{common:.0%} of the steps have the same value")
    return found


def _lengths(lengths: np.ndarray) -> Iterator[str]:
    short = int((lengths == 1).sum())
    if short and short < len(lengths):
        yield f"episodes with a single step: {short:,}"
    median = float(np.median(lengths))
    long = np.flatnonzero(lengths > 20 * median)
    if long.size:
        yield f"episode {long[0]} has {lengths[long[0]]:,} steps, 20 times the median: were ends lost?"


def _repetitions(data: Demonstrations, obs: np.ndarray, actions: np.ndarray, inner: np.ndarray) -> Iterator[str]:
    seen: dict[bytes, int] = {}
    twins = []
    for index in range(data.episodes):
        pair = data.episode(index)
        key = hashlib.sha256(b"|".join(np.ascontiguousarray(part).tobytes() for part in pair)).digest()
        if key in seen and len(pair[0]) > 1:
            twins.append((seen[key], index))
        seen.setdefault(key, index)
    if twins:
        first, second = twins[0]
        yield f"episodes that are copies of others: {len(twins):,} (such as {second}, a copy of {first})"
    if inner.any():
        held = [(np.diff(array, axis=0, prepend=array[:1]) == 0).all(1) for array in (obs, actions)]
        share = float((held[0] & held[1])[inner].mean())
        if share > 0.05:
            yield f"{share:.0%} of the steps repeat the observation and the action before them: pauses, or held frames?"


def _twins(columns: Sequence[Column], obs: np.ndarray, actions: np.ndarray) -> Iterator[str]:
    """Columns of an observation that are equal in all steps."""
    seen: dict[bytes, int] = {}
    for index in range(obs.shape[1]):
        key = hashlib.sha256(np.ascontiguousarray(obs[:, index]).tobytes()).digest()
        if key in seen and "constant" not in columns[index].remarks:
            yield f"the columns {columns[seen[key]].name} and {columns[index].name} are the same"
        seen.setdefault(key, index)


def _shifts(data: Demonstrations, columns: Sequence[Column], obs: np.ndarray, actions: np.ndarray) -> Iterator[str]:
    """Actions that are an observation some steps later or earlier."""
    width = obs.shape[1]
    if width * actions.shape[1] > _PAIRS:
        return
    step = np.arange(len(obs)) - np.repeat(data.episode_starts, data.episode_ends - data.episode_starts)
    left = np.repeat(data.episode_ends, data.episode_ends - data.episode_starts) - 1 - np.arange(len(obs))
    for act in range(actions.shape[1]):
        if columns[width + act].deviation == 0:
            continue
        best: tuple[float, int, int] | None = None
        for shift in _SHIFTS:
            rows = np.flatnonzero((step >= -shift) & (left >= shift))
            if len(rows) < 20:
                continue
            away = np.abs(obs[rows + shift] - actions[rows, act][:, None]).mean(0)
            near = int(away.argmin())
            if best is None or away[near] < best[0]:
                best = (float(away[near]), near, shift)
        if best is not None and best[0] < _SAME * columns[width + act].deviation:
            yield _shifted(columns[width + act].name, columns[best[1]].name, best[2])


def _shifted(action: str, obs: str, shift: int) -> str:
    if shift > 0:
        return f"the action {action} is the observation {obs} of {shift} step{'s' * (shift > 1)} later"
    if shift == 0:
        return f"the action {action} equals the observation {obs} of the same step: the policy only needs to copy it"
    lag = f"{-shift} step{'s' * (shift < -1)}"
    return f"the action {action} lags: it is the observation {obs} of {lag} before; are rows shifted?"
