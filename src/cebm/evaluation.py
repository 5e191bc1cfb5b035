"""Seeded roll-outs of a policy, all episodes side by side; one row per episode, a rate with its interval."""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from cebm.envs.particle import BatchedParticle, ParticleTask
from cebm.policy import Policy, Runner

# Episodes that choose a checkpoint and episodes that test it; demonstrations use small seeds.
VALIDATION_SEED = 1_000_001
TEST_SEED = 2_000_002


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
    """What roll-outs gave."""

    rows: list[dict[str, Any]]
    """One per episode: its index, return, length, success where the environment tells, and its distances."""
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
    def successes(self) -> int | None:
        """None where the environment says nothing about success."""
        known = [row["success"] for row in self.rows]
        return None if any(value is None for value in known) else sum(known)

    def summary(self) -> dict[str, Any]:
        """Plain numbers: success with its 95 % interval, the mean of every numeric column, times."""
        result: dict[str, Any] = {"episodes": self.episodes, "seed": self.seed}
        if self.successes is not None:
            low, high = wilson_interval(self.successes, self.episodes)
            rate = self.successes / self.episodes
            result |= {"successes": self.successes, "success": rate, "success_low": low, "success_high": high}
        for name in self.rows[0]:
            if name not in ("episode", "success") and all(row[name] is not None for row in self.rows):
                result[name] = float(np.mean([row[name] for row in self.rows]))
        result |= {"action_ms_p50": self.action_ms_p50, "action_ms_p99": self.action_ms_p99, "seconds": self.seconds}
        return result

    def write_csv(self, path: str | Path) -> None:
        """One row per episode."""
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]))
            writer.writeheader()
            writer.writerows(self.rows)


def evaluate(
    policy: Policy,
    env: ParticleTask | str | Callable[[], Any],
    *,
    episodes: int = 100,
    seed: int = TEST_SEED,
    latency_calls: int = 50,
    **runner: Any,
) -> Evaluation:
    """Rolls `policy` out in a particle task, a registered Gymnasium environment or a function that makes one.

    Episode i starts from a seed that only (seed, i) decides. Further arguments go to `Runner`: candidates, steps,
    warm_start, execute. `latency_calls` single actions are timed afterwards.
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}")
    began = perf_counter()
    generator = torch.Generator(policy.device).manual_seed(seed)
    stepper = Runner(policy, generator=generator, **runner)
    roll = _particle_rows if isinstance(env, ParticleTask) else _gymnasium_rows
    rows, last_obs = roll(stepper, env, episodes, seed)  # type: ignore[arg-type]
    calls = latency_calls + 1 if latency_calls else 0  # one more, which pays for warming up
    times = [_action_ms(stepper, last_obs[i % len(last_obs)]) for i in range(calls)][1:]
    p50, p99 = np.percentile(times, [50, 99]) if times else (math.nan, math.nan)
    return Evaluation(rows, seed, perf_counter() - began, float(p50), float(p99))


def _action_ms(stepper: Runner, obs: np.ndarray) -> float:
    stepper.reset()
    began = perf_counter()
    stepper.act(obs[None])
    return (perf_counter() - began) * 1e3


def _particle_rows(
    stepper: Runner, task: ParticleTask, episodes: int, seed: int
) -> tuple[list[dict[str, Any]], np.ndarray]:
    env = BatchedParticle(task)
    obs = env.reset(seed, episodes)
    while not env.done:
        obs = env.step(stepper.act(obs))
    outcome = env.outcome()
    rows = [
        {
            "episode": i,
            "success": bool(outcome.success[i]),
            "length": task.steps,
            "min_distance_first": float(outcome.min_distance_first[i]),
            "min_distance_second": float(outcome.min_distance_second[i]),
            "final_distance": float(outcome.final_distance[i]),
        }
        for i in range(episodes)
    ]
    return rows, obs


def _gymnasium_rows(
    stepper: Runner, env: str | Callable[[], Any], episodes: int, seed: int
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Episodes advance together so that the policy acts on a batch; those that ended are stepped no more."""
    import gymnasium

    envs: list[Any] = [gymnasium.make(env) if isinstance(env, str) else env() for _ in range(episodes)]
    try:
        for each in envs:
            _check_spaces(each, stepper.policy)
        seen = [each.reset(seed=_episode_seed(seed, i))[0] for i, each in enumerate(envs)]
        rows: list[dict[str, Any]] = [
            {"episode": i, "success": None, "length": 0, "return": 0.0} for i in range(episodes)
        ]
        running = set(range(episodes))
        while running:
            # The whole batch acts, so that history and chunks stay aligned.
            actions = stepper.act(np.stack([np.ravel(obs) for obs in seen]).astype(np.float32))
            for i in sorted(running):
                space = envs[i].action_space
                action = np.clip(actions[i], space.low.ravel(), space.high.ravel())
                seen[i], reward, terminated, truncated, info = envs[i].step(
                    action.reshape(space.shape).astype(space.dtype)
                )
                rows[i]["length"] += 1
                rows[i]["return"] += float(reward)
                success = info.get("success", info.get("is_success"))
                if success is not None:
                    rows[i]["success"] = bool(success)
                if terminated or truncated:
                    running.discard(i)
        return rows, np.stack([np.ravel(obs) for obs in seen]).astype(np.float32)
    finally:
        for each in envs:
            each.close()


def _episode_seed(seed: int, episode: int) -> int:
    """Not seed + episode: neighbouring seeds would share nearly all of their episodes."""
    return int(np.random.SeedSequence(seed, spawn_key=(episode,)).generate_state(1)[0])


def _check_spaces(env: Any, policy: Policy) -> None:
    import gymnasium

    for name, space in (("observation", env.observation_space), ("action", env.action_space)):
        if not isinstance(space, gymnasium.spaces.Box):
            raise ValueError(f"env has a {type(space).__name__} {name} space, a policy needs a Box")
    obs, act = int(np.prod(env.observation_space.shape)), int(np.prod(env.action_space.shape))
    wanted = (policy.obs_box.dim // policy.history, policy.act_box.dim // policy.horizon)
    if (obs, act) != wanted:
        raise ValueError(
            f"env has {obs} observation and {act} action dimensions, the policy {wanted[0]} and {wanted[1]}"
        )
