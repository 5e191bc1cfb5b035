"""Seeded roll-outs of a policy in a task; one row per episode, means with their errors, a rate with its interval."""

import csv
import inspect
import io
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np
import torch

from cebm.intervals import Interval
from cebm.runner import Runner
from cebm.storage import write_atomically
from cebm.tasks import TEST_SEED, VALIDATION_SEED, Actor, Task, as_task
from cebm.tasks.base import check_episodes

__all__ = [
    "TEST_SEED",
    "VALIDATION_SEED",
    "Evaluation",
    "actor_of",
    "evaluate",
    "paired_rates",
    "wilson_interval",
]


def wilson_interval(successes: int, episodes: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a rate (Wilson 1927): (p + z²/2n ± z√(p(1−p)/n + z²/4n²)) / (1 + z²/n)."""
    if episodes < 1 or not 0 <= successes <= episodes:
        raise ValueError(f"successes must be between 0 and episodes ({episodes}), got {successes}")
    rate, z2 = successes / episodes, z * z
    centre = rate + z2 / (2 * episodes)
    spread = z * math.sqrt(rate * (1 - rate) / episodes + z2 / (4 * episodes**2))
    scale = 1 + z2 / episodes
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def paired_rates(one: Sequence[bool], other: Sequence[bool], z: float = 1.96) -> Interval:
    """p − q, two rates of success in the same episodes, with its 95 % interval (Newcombe 1998, method 10): from
    Wilson's intervals [l, u] of both and the correlation φ of the pairs,

        lower: p − q − √((p − l_p)² − 2φ (p − l_p)(u_q − q) + (u_q − q)²), upper: with both ends exchanged.

    Student's t would give a width of 0 where all pairs agree."""
    if len(one) != len(other):
        raise ValueError(f"other has {len(other)} episodes, expected {len(one)}")
    n, first, second = len(one), sum(one), sum(other)
    both = sum(a and b for a, b in zip(one, other, strict=True))
    crossed = both * (n - first - second + both) - (first - both) * (second - both)
    scale = math.sqrt(float(first) * (n - first) * second * (n - second))
    phi = 0.0 if not scale else (max(crossed - n / 2, 0.0) if crossed > 0 else crossed) / scale
    p, q = first / n, second / n
    (low, high), (below, above) = wilson_interval(first, n, z), wilson_interval(second, n, z)

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    return Interval(p - q, p - q - reach(p - low, above - q), p - q + reach(high - p, q - below))


@dataclass(frozen=True)
class Evaluation:
    """What roll-outs of a policy gave."""

    rows: list[dict[str, Any]]
    """One per episode: its index, length, success where the task tells, and the task's own metrics."""
    seed: int
    """The seed of the episodes."""
    seconds: float
    """Time for all of it."""
    action_ms_p50: float
    """Median time for one observation's action, measured alone after the roll-outs."""
    action_ms_p99: float
    """Its 99th percentile."""
    overall: dict[str, float] = field(default_factory=dict)
    """Metrics of all episodes together that no single one has (`Task.summarise`)."""
    frames: dict[int, list[np.ndarray]] = field(default_factory=dict, repr=False)
    """Pictures of the episodes that were filmed, by their index."""

    @property
    def episodes(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> list[str]:
        """The names of all columns; an episode that does not tell one has None there, or leaves it out."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    @property
    def successes(self) -> int | None:
        """None where the task says nothing about success."""
        known = [row.get("success") for row in self.rows]
        return None if any(value is None for value in known) else sum(map(bool, known))

    def score(self, metric: str) -> float:
        """The mean of a column over the episodes, or a metric of all together: what chooses a checkpoint, with
        `task.metric`."""
        if metric in self.overall:
            return self.overall[metric]
        if metric not in self.columns:
            raise ValueError(f"the episodes have no column {metric!r} to score; they have {', '.join(self.columns)}")
        values = self._values(metric)
        if values is None:
            raise ValueError(f"column {metric!r} cannot score: it is not a number in every episode")
        return float(np.mean(values))

    def interval(self, metric: str) -> Interval:
        """The mean of a column with its 95 % interval: Wilson's for success, Student's t for another column."""
        if metric == "success" and self.successes is not None:
            return Interval(self.successes / self.episodes, *wilson_interval(self.successes, self.episodes))
        self.score(metric)  # refuses what is no number
        values = self._values(metric)
        if values is None:
            raise ValueError(f"{metric!r} is one number of all episodes together and has no interval")
        return Interval.of(values.tolist())

    def minus(self, other: "Evaluation", metric: str) -> Interval:
        """This evaluation's mean of a column minus that of another one of the same episodes, with its 95 % interval,
        paired by episode: Newcombe's for success, Student's t of the differences for another column."""
        if (self.seed, self.episodes) != (other.seed, other.episodes):
            raise ValueError(
                f"other: {other.episodes} episodes of seed {other.seed}, expected the same {self.episodes} of seed "
                f"{self.seed}"
            )
        if metric == "success" and self.successes is not None and other.successes is not None:
            mine, theirs = ([bool(row["success"]) for row in each.rows] for each in (self, other))
            return paired_rates(mine, theirs)
        one, two = self._values(metric), other._values(metric)
        if one is None or two is None:
            raise ValueError(f"column {metric!r} cannot be compared: it is not a number in every episode")
        return Interval.of((one - two).tolist())

    def summary(self) -> dict[str, Any]:
        """Plain numbers: success with its 95 % interval; of every other column that is a number in every episode the
        mean and, from two episodes on, its standard error NAME_se = s / √n, with s² = Σ(x − x̄)² / (n − 1); what the
        task says of all episodes together; times."""
        result: dict[str, Any] = {"episodes": self.episodes, "seed": self.seed}
        if self.successes is not None:
            low, high = wilson_interval(self.successes, self.episodes)
            rate = self.successes / self.episodes
            result |= {"successes": self.successes, "success": rate, "success_low": low, "success_high": high}
        for name in self.columns:
            values = None if name in ("episode", "success") else self._values(name)
            if values is None:
                continue
            with np.errstate(invalid="ignore"):  # of infinite values
                result[name] = float(np.mean(values))
                if len(values) > 1:
                    result[f"{name}_se"] = float(np.std(values, ddof=1) / math.sqrt(len(values)))
        result |= self.overall
        result |= {"action_ms_p50": self.action_ms_p50, "action_ms_p99": self.action_ms_p99, "seconds": self.seconds}
        return result

    def write_csv(self, path: str | Path) -> None:
        """One row per episode. A failure, such as a full disk, leaves what was there before."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns)
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomically(Path(path), text.getvalue().encode())

    def _values(self, name: str) -> np.ndarray | None:
        """A column; None where it is not a number in every episode."""
        values = [row.get(name) for row in self.rows]
        if all(isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating) for value in values):
            return np.array(values, np.float64)
        return None


def evaluate(
    policy: Any,
    task: Task | str | gymnasium.Env | Callable[[], gymnasium.Env],
    *,
    episodes: int = 100,
    seed: int = TEST_SEED,
    latency_calls: int = 50,
    max_steps: int | None = None,
    workers: int = 1,
    film: Collection[int] = (),
    **runner: Any,
) -> Evaluation:
    """Rolls `policy` out in a task: a `Task`, the id of a registered Gymnasium environment, an environment, or a
    function that makes one.

    The policy is one of cebm's, or any object with `reset()` and `act(obs [batch, obs]) -> [batch, act]`. Episode i
    starts from a seed that only (seed, i) decides, and has at most `max_steps` steps (None: the task's own limit).
    Further arguments go to `Runner`: candidates, steps, warm_start, execute; with a `fallback`, which plays where the
    policy asks, the rows say how often it did. `latency_calls` single actions are timed afterwards. `workers`:
    processes that step the environments, while the policy acts here on the whole batch; the rows are the same for any
    number, as far as the simulator rounds alike. `film`: indices of episodes whose pictures to keep.
    """
    count = check_episodes(episodes)
    if latency_calls < 0:
        raise ValueError(f"latency_calls must be at least 0, got {latency_calls}")
    began = perf_counter()
    place = as_task(task)
    actor = actor_of(policy, seed, **runner)
    sizes = _sizes(policy)
    if sizes is not None:
        place.check_policy(*sizes)
    played = place.roll_out(actor, count, seed, max_steps, **_wishes(place, count, workers, film))
    rows, overall = played.rows, place.summarise(played.rows)
    if runner.get("fallback") is not None:
        rows, told = _with_asked(rows, actor)
        overall = overall | told
    calls = latency_calls + 1 if latency_calls else 0  # one more, which pays for warming up
    times = [_action_ms(actor, played.last_obs[i % len(played.last_obs)]) for i in range(calls)][1:]
    p50, p99 = np.percentile(times, [50, 99]) if times else (math.nan, math.nan)
    return Evaluation(rows, seed, perf_counter() - began, float(p50), float(p99), overall, played.frames)


def _with_asked(rows: list[dict[str, Any]], actor: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The rows with `asked`, the share of an episode's steps in which the policy asked, and `first_asked`, the first
    of those steps; the share of episodes with such a step, and the success in the others, where it always acted."""
    batches = [np.stack(batch) for batch in actor.asked if batch]
    if sum(batch.shape[1] for batch in batches) != len(rows):
        return rows, {}  # the task does not play every episode as a row of one batch
    episodes = [column for batch in batches for column in batch.T]
    found = []
    for row, steps in zip(rows, episodes, strict=True):
        own = steps[: row.get("length") or len(steps)]
        first = int(own.argmax()) if own.any() else None
        found.append({**row, "asked": float(own.mean()), "first_asked": first})
    acted = [row for row in found if not row["asked"]]
    told = {"asked_episodes": 1 - len(acted) / len(found)}
    if acted and all(row.get("success") is not None for row in acted):
        told["success_where_acted"] = float(np.mean([bool(row["success"]) for row in acted]))
    return found, told


def _wishes(task: Task, count: int, workers: int, film: Collection[int]) -> dict[str, Any]:
    """What a roll-out gets beyond the contract, where the task takes it."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    beyond = sorted(index for index in film if not 0 <= index < count)
    if beyond:
        raise ValueError(f"film: there is no episode {beyond[0]} of {count}")
    known = inspect.signature(task.roll_out).parameters
    if workers > 1 and "workers" not in known:
        raise ValueError(f"{task.name} steps all its episodes at once: it has no use for {workers} workers")
    if film and "film" not in known:
        raise ValueError(f"{task.name} gives no pictures of its episodes")
    return ({"workers": workers} if workers > 1 else {}) | ({"film": film} if film else {})


def actor_of(policy: Any, seed: int, **runner: Any) -> Actor:
    """What steps `policy` through episodes: a `Runner`, which gives a policy of ours its history, chunks and generator
    and calls any other as it is."""
    missing = [name for name in ("act", "reset") if not callable(getattr(policy, name, None))]
    if missing:
        raise TypeError(f"policy: a {type(policy).__name__} has no {' and no '.join(f'{name}()' for name in missing)}")
    generator = torch.Generator(getattr(policy, "device", "cpu")).manual_seed(seed)
    return Runner(policy, generator=generator, **runner)


def _sizes(policy: Any) -> tuple[int, int] | None:
    """Columns of one observation and of one action; None where the policy does not tell."""
    columns: tuple[int, int] | None = getattr(policy, "columns", None)
    return columns


def _action_ms(actor: Actor, obs: np.ndarray) -> float:
    actor.reset()
    began = perf_counter()
    actor.act(obs[None])
    return (perf_counter() - began) * 1e3
