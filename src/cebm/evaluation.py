"""Seeded roll-outs of a policy in a task; one row per episode, means with their errors, a rate with its interval."""

import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np
import torch

from cebm.policy import Runner
from cebm.storage import write_atomically
from cebm.tasks import TEST_SEED, VALIDATION_SEED, Actor, Task, as_task
from cebm.tasks.base import check_episodes

__all__ = ["TEST_SEED", "VALIDATION_SEED", "Evaluation", "actor_of", "evaluate", "wilson_interval"]


def wilson_interval(successes: int, episodes: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a rate (Wilson 1927): (p + z²/2n ± z√(p(1−p)/n + z²/4n²)) / (1 + z²/n)."""
    if episodes < 1 or not 0 <= successes <= episodes:
        raise ValueError(f"successes must be between 0 and episodes ({episodes}), got {successes}")
    rate, z2 = successes / episodes, z * z
    centre = rate + z2 / (2 * episodes)
    spread = z * math.sqrt(rate * (1 - rate) / episodes + z2 / (4 * episodes**2))
    scale = 1 + z2 / episodes
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


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
        """The mean of a column over the episodes: what chooses a checkpoint, with `task.metric`."""
        if metric not in self.columns:
            raise ValueError(f"the episodes have no column {metric!r} to score; they have {', '.join(self.columns)}")
        values = self._values(metric)
        if values is None:
            raise ValueError(f"column {metric!r} cannot score: it is not a number in every episode")
        return float(np.mean(values))

    def summary(self) -> dict[str, Any]:
        """Plain numbers: success with its 95 % interval; of every other column that is a number in every episode the
        mean and, from two episodes on, its standard error NAME_se = s / √n, with s² = Σ(x − x̄)² / (n − 1); times."""
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
    **runner: Any,
) -> Evaluation:
    """Rolls `policy` out in a task: a `Task`, the id of a registered Gymnasium environment, an environment, or a
    function that makes one.

    The policy is one of cebm's, or any object with `reset()` and `act(obs [batch, obs]) -> [batch, act]`. Episode i
    starts from a seed that only (seed, i) decides, and has at most `max_steps` steps (None: the task's own limit).
    Further arguments go to `Runner`: candidates, steps, warm_start, execute. `latency_calls` single actions are timed
    afterwards.
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
    played = place.roll_out(actor, count, seed, max_steps)
    calls = latency_calls + 1 if latency_calls else 0  # one more, which pays for warming up
    times = [_action_ms(actor, played.last_obs[i % len(played.last_obs)]) for i in range(calls)][1:]
    p50, p99 = np.percentile(times, [50, 99]) if times else (math.nan, math.nan)
    return Evaluation(played.rows, seed, perf_counter() - began, float(p50), float(p99))


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
