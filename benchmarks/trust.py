"""How far calibrated abstention, the guard and constraints can be trusted on the particle task.

    python -m benchmarks.trust --out docs/trust.json [--policies FOLDER] [--failures]

Measures false alarms on held-out episodes over ten splits, how well shifted observations are told apart, how well the
guard tells planted faults, how failures are announced, and what closeness to the plan does where one action of eight is
played. `--policies` keeps the trained policies for the next time; `--failures` measures failures alone.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

import cebm
from cebm import Guard, NearPlan, ParticleTask
from cebm.evaluation import TEST_SEED, VALIDATION_SEED, actor_of, wilson_interval
from cebm.trust import FailureAlarm
from cebm.trust.calibration import calibration, considered, signals, threshold

TASK = ParticleTask(dim=2)
ALPHA, SPLITS = 0.05, 10


def auroc(clean: np.ndarray, odd: np.ndarray) -> float:
    """Probability that an odd one scores higher than a clean one (Mann and Whitney 1947); ties count half."""
    values = np.concatenate([clean, odd])
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[index]
    return float((ranks[len(clean) :].sum() - len(odd) * (len(odd) + 1) / 2) / (len(clean) * len(odd)))


def kept(folder: Path | None, name: str, make: Callable[[], cebm.EnergyPolicy]) -> cebm.EnergyPolicy:
    """The policy of that name in the folder, or a new one, which is put there."""
    if folder is not None and (folder / name / "header.json").exists():
        return cebm.load(folder / name)
    policy = make()
    if folder is not None:
        policy.save(folder / name)
    return policy


def false_alarms(worst: np.ndarray, splits: int = SPLITS) -> dict[str, Any]:
    """Shares of episodes with an alarm that were not calibrated on, over random halves."""
    rates = []
    for seed in range(splits):
        order = np.random.default_rng([7, seed]).permutation(len(worst))
        half = len(worst) // 2
        found = calibration(worst[order[:half]], ALPHA, seed, 5, None)
        distance, energy = torch.from_numpy(worst[order[half:]]).T
        score = torch.maximum(found.unfamiliar(distance), found.unlikely(energy))
        rates.append(float((score > found.threshold).double().mean()))
    return {"alpha": ALPHA, "mean": float(np.mean(rates)), "deviation": float(np.std(rates, ddof=1)), "rates": rates}


def episodes_worst(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Of each episode the largest of each signal."""
    return np.stack([part.max(0) for part in np.split(values, ends[:-1])])


def shifts(policy: cebm.EnergyPolicy, obs: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    """AUROC of both signals and of their maximum, for observations that are moved by some deviations."""
    thresholds = policy.calibration
    if thresholds is None:
        raise ValueError("calibrate the policy first")

    def scores(rows: np.ndarray) -> np.ndarray:
        _, distance, energy, _ = considered(policy, rows, 5)
        pair = thresholds.unfamiliar(distance), thresholds.unlikely(energy)
        return np.stack([*(each.numpy() for each in pair), torch.maximum(*pair).numpy()])

    clean, spread = scores(obs), obs.std(0)
    names = ("observation", "action", "both")
    signs = rng.choice([-1.0, 1.0], obs.shape)
    found: dict[str, Any] = {}
    for size in (1, 2, 4):
        odd = scores(obs + size * spread * signs)
        found[f"all columns by {size}"] = {n: auroc(c, o) for n, c, o in zip(names, clean, odd, strict=True)}
    one = []
    for column in range(obs.shape[1]):
        moved = obs.copy()
        moved[:, column] += 4 * spread[column] * signs[:, column]
        one.append([auroc(c, o) for c, o in zip(clean, scores(moved), strict=True)])
    table = np.array(one)
    found["one column by 4, mean"] = dict(zip(names, table.mean(0).tolist(), strict=True))
    found["one column by 4, worst column"] = dict(zip(names, table.min(0).tolist(), strict=True))
    return found


def faults(obs: np.ndarray, actions: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """The demonstrators' actions after a planted fault, for episodes of equal length."""
    played = actions.reshape(-1, length, 2)
    late = np.concatenate([np.repeat(played[:, :1], 10, 1), played[:, :-10]], 1)
    return {
        "swapped axes": actions[:, ::-1].copy(),
        "frame shifted by 0.1": actions + np.float32(0.1),
        "observation 10 steps old": late.reshape(-1, 2),
        "observation frozen at the start": np.repeat(played[:, :1], length, 1).reshape(-1, 2),
        "mirrored": 1 - actions,
        "goals' order swapped": np.where(
            np.linalg.norm(actions - obs[:, 4:6], axis=1, keepdims=True) < 1e-3, obs[:, 6:8], obs[:, 4:6]
        ),
    }


def guarded(guard: Guard, obs: np.ndarray, actions: np.ndarray, length: int) -> dict[str, Any]:
    """AUROC by step and by episode of each fault, episodes that are stopped, and the time of a call."""
    clean = guard(obs, actions)
    steps, episodes = clean.score.numpy(), clean.score.numpy().reshape(-1, length)
    alarm = (episodes > clean.threshold).any(1)
    found: dict[str, Any] = {"false alarms of episodes": float(alarm.mean())}
    for name, odd in faults(obs, actions, length).items():
        score = guard(obs, odd).score.numpy()
        by_episode = score.reshape(-1, length)
        stopped = by_episode > clean.threshold
        found[name] = {
            "auroc of a step": auroc(steps, score),
            "auroc of an episode": auroc(episodes.max(1), by_episode.max(1)),
            "episodes stopped": float(stopped.any(1).mean()),
            "median step of the alarm": float(np.median(stopped.argmax(1)[stopped.any(1)])) if stopped.any() else None,
        }
    times = []
    for row in range(200):
        began = perf_counter()
        guard(obs[row], actions[row])
        times.append((perf_counter() - began) * 1e3)
    found["milliseconds"] = {"median": float(np.median(times[20:])), "p99": float(np.quantile(times[20:], 0.99))}
    return found


class Recorded:
    """Plays as another actor does, and keeps the actions."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.actions = actor, list[np.ndarray]()

    def reset(self) -> None:
        """A new batch of episodes begins."""
        self.actor.reset()

    def act(self, obs: np.ndarray) -> np.ndarray:
        self.actions.append(np.asarray(self.actor.act(obs)))
        return self.actions[-1]


def plans(policy: cebm.EnergyPolicy, task: ParticleTask, episodes: int) -> dict[str, Any]:
    """Success where one action of a chunk of eight is played, and how often the set-point jumps by more than 0.2 in an
    episode: the expert's jumps once, where the goals are that far apart."""
    found = {}
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "as it is": (policy, {}),
        "warm start": (policy, {"warm_start": True}),
        **{f"NearPlan, weight {w}": (policy.with_constraint(NearPlan(), w), {}) for w in (1.0, 10.0, 100.0)},
    }
    for name, (actor, settings) in ways.items():
        recorded = Recorded(actor_of(actor, TEST_SEED, execute=1, **settings))
        rows = task.roll_out(recorded, episodes, TEST_SEED).rows
        successes = sum(bool(row["success"]) for row in rows)
        jumps = np.linalg.norm(np.diff(np.stack(recorded.actions), axis=0), axis=-1) > 0.2
        low, high = wilson_interval(successes, episodes)
        found[name] = {
            "success": successes / episodes,
            "success_low": low,
            "success_high": high,
            "jumps": float(jumps.sum(0).mean()),
        }
    return found


def announced(
    score: np.ndarray, success: np.ndarray, alpha: float, limit: float | None, by: Sequence[int]
) -> dict[str, float]:
    """Means over ten halves: shares of failures and of successes that are announced to fail, balanced accuracies, also
    of what is announced before the steps `by`, and the median step at which failures are announced. `limit`: a
    threshold that is given."""
    found: list[list[float]] = []
    for seed in range(SPLITS):
        order = np.random.default_rng([8, seed]).permutation(len(score))
        first, other = order[: len(order) // 2], order[len(order) // 2 :]
        level = threshold(score[first[success[first]]].max(1), alpha) if limit is None else limit
        alarms: np.ndarray = np.greater(score[other], level)
        told, failed = np.asarray(alarms.any(1)), ~success[other]
        hit, wrong = told[failed].mean(), told[~failed].mean()
        step = np.median(alarms.argmax(1)[told & failed]) if (told & failed).any() else np.nan
        early = [np.asarray(alarms[:, :end].any(1)) for end in by]
        balanced = [(each[failed].mean() + 1 - each[~failed].mean()) / 2 for each in early]
        found.append([hit, wrong, (hit + 1 - wrong) / 2, step, *balanced])
    names = ["failures announced", "successes announced", "balanced accuracy", "median step"]
    names += [f"balanced accuracy by step {end}" for end in by]
    return dict(zip(names, np.nanmean(found, 0).round(4).tolist(), strict=True))


class Watched:
    """Plays as a policy does, and keeps observations and both signals of every step."""

    def __init__(self, policy: cebm.EnergyPolicy, seed: int) -> None:
        self.policy, self.generator = policy, torch.Generator().manual_seed(seed)
        self.seen, self.notes = list[np.ndarray](), list[np.ndarray]()

    def reset(self) -> None:
        """A new batch of episodes begins."""

    def act(self, obs: np.ndarray) -> np.ndarray:
        actions, distance, energy, _ = considered(self.policy, obs, 5, generator=self.generator)
        self.seen.append(obs.copy())
        self.notes.append(torch.stack([distance, energy], 1).double().numpy())
        return actions.numpy()


def failures(policy: cebm.EnergyPolicy, shown: cebm.Demonstrations, episodes: int = 400) -> dict[str, Any]:
    """How well failures of a calibrated policy are announced, by the expected end and by the reasons to ask."""
    thresholds, watched = policy.calibration, Watched(policy, VALIDATION_SEED)
    if thresholds is None:
        raise ValueError("calibrate the policy first")
    rows = TASK.roll_out(watched, episodes, VALIDATION_SEED).rows
    success = np.array([bool(row["success"]) for row in rows])
    seen, notes = np.stack(watched.seen, 1), torch.from_numpy(np.stack(watched.notes, 1))
    good = seen[success]
    ends = np.arange(1, len(good) + 1) * TASK.steps
    some = np.zeros((len(good) * TASK.steps, TASK.act_dim), np.float32)
    alarm = FailureAlarm.fit(shown, cebm.Demonstrations.from_arrays(good.reshape(len(some), -1), some, ends))
    steps = np.tile(np.arange(TASK.steps), episodes)
    scores = {
        "expected end": alarm.expected(seen.reshape(len(steps), -1), steps).numpy().reshape(episodes, -1),
        "unfamiliar or unlikely": torch.maximum(
            thresholds.unfamiliar(notes[..., 0]), thresholds.unlikely(notes[..., 1])
        ).numpy(),
    }
    found: dict[str, Any] = {"episodes": episodes, "success": float(success.mean()), "steps": TASK.steps}
    for name, score in scores.items():
        for alpha in (0.1, 0.2):
            found[f"{name}, alpha {alpha}"] = announced(score, success, alpha, None, (25, 40))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policies", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--chunk-steps", type=int, default=1500, help="training steps of policies with chunks")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--failing-steps", type=int, default=500, help="training steps of the policy that often fails")
    parser.add_argument("--failures", action="store_true", help="measure the announcement of failures alone")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    shown, held = TASK.demonstrations(500, 0), TASK.demonstrations(800, 1)
    arrays = (shown.obs, shown.actions, shown.episode_ends)
    common: dict[str, Any] = {"steps": chosen.steps, "limits": TASK.limits}
    half = held.select(np.arange(400))

    def failing() -> dict[str, Any]:
        short = {**common, "steps": chosen.failing_steps}
        often = kept(chosen.policies, "failing", lambda: cebm.fit(*arrays, **short))
        return {"training steps": chosen.failing_steps} | failures(often.calibrate(half, ALPHA), shown)

    if chosen.failures:
        result = json.loads(chosen.out.read_text()) | {"failures": failing()}
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result["failures"], indent=1))
        return
    policy = kept(chosen.policies, "steady", lambda: cebm.fit(*arrays, **common))
    longer = common | {"steps": chosen.chunk_steps, "horizon": 8}
    chunks = kept(chosen.policies, "chunks", lambda: cebm.fit(*arrays, **longer))
    forked = ParticleTask(dim=2, random_order=True)
    either = kept(chosen.policies, "forked", lambda: cebm.fit(forked.demonstrations(500, 0), **longer))
    guard = Guard(kept(chosen.policies, "guard", lambda: Guard.fit(shown, ALPHA, steps=chosen.steps).density))
    calibrated = policy.calibrate(half, ALPHA)
    _, distance, energy, _ = considered(policy, held.obs, 5)
    own = episodes_worst(torch.stack([distance, energy], 1).double().numpy(), held.episode_ends)
    pair = signals(guard.density, held.obs, held.actions, 5)
    given = episodes_worst(torch.stack(pair, 1).double().numpy(), held.episode_ends)
    rest = held.select(np.arange(400, 440))
    result = {
        "training steps": chosen.steps,
        "training steps with chunks": chosen.chunk_steps,
        "false alarms, policy": false_alarms(own),
        "false alarms, guard": false_alarms(given),
        "auroc of shifted observations": shifts(calibrated, np.asarray(rest.obs), np.random.default_rng(3)),
        "guard": guarded(guard, np.asarray(rest.obs), np.asarray(rest.actions), TASK.steps),
        "one action of eight is played": plans(chunks, TASK, chosen.episodes),
        "one action of eight is played, goals in any order": plans(either, forked, chosen.episodes),
        "failures": failing(),
        "roll-outs that may ask": {},
    }
    for name, actor in (("demonstrated goals", calibrated), ("tie 1", replace_tie(calibrated, 1.0))):
        evaluation = cebm.evaluate(
            actor, TASK, episodes=chosen.episodes, latency_calls=0, fallback=lambda obs: obs[:, :2].clip(0, 1)
        )
        summary = evaluation.summary()
        keys = ("success", "asked", "asked_episodes", "success_where_acted")
        result["roll-outs that may ask"][name] = {key: summary[key] for key in keys if key in summary}
    chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def replace_tie(policy: cebm.EnergyPolicy, tie: float) -> cebm.EnergyPolicy:
    """The same thresholds, and tied modes are a reason to ask."""
    if policy.calibration is None:
        raise ValueError("calibrate the policy first")
    return replace(policy, calibration=replace(policy.calibration, tie=tie))


if __name__ == "__main__":
    main()
