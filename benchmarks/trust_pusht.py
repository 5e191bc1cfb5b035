"""How far calibrated abstention, the guard and warnings of failure can be trusted on Push-T.

    python -m benchmarks.trust_pusht --data pusht.npz --policies runs/trust-pusht --out docs/trust-pusht.json

Policies learn from 106 of the 206 human demonstrations; the other 100 are held out. A part of the result is written as
soon as it is known, and is not measured again: remove it from the file to do so. `--only` measures some parts.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

import cebm
from benchmarks.trust import ALPHA, SPLITS, announced, auroc, episodes_worst, false_alarms
from cebm import Demonstrations, Guard
from cebm.evaluation import TEST_SEED, VALIDATION_SEED
from cebm.storage import write_atomically
from cebm.tasks import PushT
from cebm.trust import Calibration, FailureAlarm
from cebm.trust.calibration import calibration, considered, recent, signals
from cebm.trust.guard import DENSITY

TASK = PushT()
HISTORY, HORIZON, EXECUTE = 2, 16, 8
FRAME = 20
TRAINED = 106
"""Demonstrations to learn from."""
STEPS = {"steady": 3000, "mse": 1000, "guard": 1500, "ibc": 1000}
"""Training steps; the guard is the density that it learns."""
BY = (150, 200, 250)
"""Steps of a roll-out of 300 by which announcements are counted."""


def parted(data: Demonstrations) -> tuple[Demonstrations, Demonstrations]:
    """What is learned from, and what is held out."""
    order = np.random.default_rng(26).permutation(data.episodes)
    return data.select(np.sort(order[:TRAINED])), data.select(np.sort(order[TRAINED:]))


def trained(name: str, folder: Path, training: Demonstrations) -> cebm.EnergyPolicy:
    """The policy of that name in the folder, or a new one, which is put there with the seconds that it took."""
    if not (folder / name / "header.json").exists():
        began = process_time()
        trial = DENSITY if name == "guard" else name
        window: dict[str, Any] = {"history": HISTORY, "horizon": HORIZON, "limits": TASK.limits}
        cebm.fit(training, trial=trial, steps=STEPS[name], **window).save(folder / name)
        book = folder / "seconds.json"
        seconds = json.loads(book.read_text()) if book.exists() else {}
        book.write_text(json.dumps(seconds | {name: round(process_time() - began, 1)}))
    return cebm.load(folder / name)


# ---------------------------------------------------------------------------------------------- held-out episodes


@dataclass(frozen=True)
class HeldOut:
    """The held-out demonstrations as a policy sees them."""

    obs: np.ndarray
    chunks: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, data: Demonstrations) -> "HeldOut":
        obs, chunks = data.windows(HISTORY, HORIZON)[np.arange(data.steps)]
        return cls(np.asarray(obs), np.asarray(chunks), data.episode_ends)

    def every(self, stride: int) -> "HeldOut":
        """Of each episode the first step of every `stride`."""
        starts = np.concatenate([[0], self.ends[:-1]])
        rows = [np.arange(start, end, stride) for start, end in zip(starts, self.ends, strict=True)]
        chosen = np.concatenate(rows)
        return HeldOut(self.obs[chosen], self.chunks[chosen], np.cumsum([len(each) for each in rows]))


def own_signals(policy: cebm.EnergyPolicy, obs: np.ndarray) -> np.ndarray:
    """Distance and energy of the policy's own actions, step by step."""
    blocks = [considered(policy, obs[a : a + 1024], 5) for a in range(0, len(obs), 1024)]
    return np.concatenate([torch.stack([d, e], 1).double().numpy() for _, d, e, _ in blocks])


def given_signals(density: cebm.EnergyPolicy, obs: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """Distance and energy of given chunks."""
    blocks = [signals(density, obs[a : a + 1024], chunks[a : a + 1024], 5) for a in range(0, len(obs), 1024)]
    return np.concatenate([torch.stack([d, e], 1).double().numpy() for d, e in blocks])


def alarms(worst: np.ndarray) -> dict[str, Any]:
    """Over ten random halves, and over a thousand, whose mean knows no luck of the halves."""
    many = false_alarms(worst, 1000)
    return false_alarms(worst, SPLITS) | {"mean of 1000 splits": many["mean"]}


def shifted(policy: cebm.EnergyPolicy, found: Calibration, data: HeldOut) -> dict[str, Any]:
    """AUROC of both signals for observations that are moved by some deviations, both frames alike."""
    obs, rng = data.every(EXECUTE).obs, np.random.default_rng(3)
    spread = np.tile(data.obs[:, -FRAME:].std(0), HISTORY).astype(np.float32)
    signs = np.tile(rng.choice([-1.0, 1.0], (len(obs), FRAME)), HISTORY).astype(np.float32)

    def scores(rows: np.ndarray) -> np.ndarray:
        distance, energy = torch.from_numpy(own_signals(policy, rows)).T
        pair = found.unfamiliar(distance), found.unlikely(energy)
        return np.stack([*(each.numpy() for each in pair), torch.maximum(*pair).numpy()])

    clean, names = scores(obs), ("observation", "action", "both")
    result: dict[str, Any] = {}
    for size in (1, 2, 4):
        odd = scores(obs + size * spread * signs)
        result[f"all columns by {size}"] = {n: auroc(c, o) for n, c, o in zip(names, clean, odd, strict=True)}
    one = []
    for column in range(FRAME):
        moved = obs.copy()
        for each in range(column, HISTORY * FRAME, FRAME):
            moved[:, each] += 4 * spread[each] * signs[:, each]
        one.append([auroc(c, o) for c, o in zip(clean, scores(moved), strict=True)])
    table = np.array(one)
    result["one column by 4, mean"] = dict(zip(names, table.mean(0).tolist(), strict=True))
    result["one column by 4, worst column"] = dict(zip(names, table.min(0).tolist(), strict=True))
    return result


# ---------------------------------------------------------------------------------------------- chunks and the guard


def stale(values: np.ndarray, ends: np.ndarray, late: int) -> np.ndarray:
    """Of every step the value `late` steps before, at the start of an episode its first."""
    starts = np.concatenate([[0], ends[:-1]])
    first = np.repeat(starts, ends - starts)
    return values[np.maximum(np.arange(len(values)) - late, first)]


def chunk_faults(data: HeldOut) -> dict[str, np.ndarray]:
    """The demonstrators' chunks after a planted fault."""
    steps = data.chunks.reshape(len(data.chunks), HORIZON, 2)
    return {
        "swapped axes": steps[..., ::-1].reshape(data.chunks.shape).copy(),
        "mirrored": (512 - steps).reshape(data.chunks.shape),
        "frame shifted by 25 px": data.chunks + np.float32(25),
        "frame shifted by 50 px": data.chunks + np.float32(50),
        "frame shifted by 100 px": data.chunks + np.float32(100),
        "observation 8 steps old": stale(data.chunks, data.ends, 8),
        "observation 16 steps old": stale(data.chunks, data.ends, 16),
        "observation frozen at the start": stale(data.chunks, data.ends, 10**6),
    }


def told_apart(guard: Guard, data: HeldOut, policies: dict[str, cebm.EnergyPolicy]) -> dict[str, Any]:
    """AUROC by step and by episode of chunks that are faulty or another policy's, against the demonstrators' own."""
    found = guard.calibration

    def scores(rows: HeldOut) -> np.ndarray:
        distance, energy = torch.from_numpy(given_signals(guard.density, rows.obs, rows.chunks)).T
        return torch.maximum(found.unfamiliar(distance), found.unlikely(energy)).numpy()

    def compared(clean: np.ndarray, odd: np.ndarray, ends: np.ndarray, stride: int) -> dict[str, Any]:
        parts = np.split(odd, ends[:-1])
        first = [stride * int((part > found.threshold).argmax()) for part in parts if (part > found.threshold).any()]
        episodes = [np.array([part.max() for part in np.split(values, ends[:-1])]) for values in (clean, odd)]
        return {
            "auroc of a step": auroc(clean, odd),
            "auroc of an episode": auroc(*episodes),
            "episodes stopped": len(first) / len(parts),
            "median step of the alarm": float(np.median(first)) if first else None,
        }

    clean = scores(data)
    result: dict[str, Any] = {"demonstrators": compared(clean, clean, data.ends, 1)}
    for name, chunks in chunk_faults(data).items():
        result[name] = compared(clean, scores(replace(data, chunks=chunks)), data.ends, 1)
    few = data.every(EXECUTE)
    clean = scores(few)
    for name, policy in policies.items():
        effort: dict[str, Any] = (
            {} if policy.energy.explicit else {"candidates": min(64, getattr(policy.acting, "candidates", 64))}
        )
        odd = scores(replace(few, chunks=np.asarray(policy.act(few.obs, **effort))))
        result[f"{name}, every eighth step"] = compared(clean, odd, few.ends, EXECUTE)
    times = []
    for row in range(300):
        began = perf_counter()
        guard(data.obs[row], data.chunks[row])
        times.append((perf_counter() - began) * 1e3)
    result["milliseconds"] = {"median": float(np.median(times[20:])), "p99": float(np.quantile(times[20:], 0.99))}
    return result


# ---------------------------------------------------------------------------------------------- roll-outs


@dataclass
class Watched:
    """A policy in roll-outs that notes every observation, and at each decision both signals and how much the new plan
    differs from the old one."""

    policy: cebm.EnergyPolicy
    generator: torch.Generator
    seen: list[np.ndarray] = field(default_factory=list)
    notes: list[np.ndarray] = field(default_factory=list)
    plan: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.runner = cebm.Runner(Deciding(self), execute=EXECUTE)

    def reset(self) -> None:
        """A new batch of episodes begins."""
        self.runner.reset()

    def act(self, obs: np.ndarray) -> np.ndarray:
        self.seen.append(np.array(obs))
        return self.runner.act(obs)


@dataclass
class Deciding:
    """The decisions of a watched policy."""

    watched: Watched
    history: int = HISTORY
    horizon: int = HORIZON

    def reset(self) -> None:
        self.watched.policy.reset()
        self.watched.plan = None

    def act(self, obs: np.ndarray) -> np.ndarray:
        watched = self.watched
        actions, distance, energy, _ = considered(watched.policy, obs, 5, generator=watched.generator)
        chunk, left = actions.numpy(), 2 * EXECUTE
        moved = np.zeros(len(obs)) if watched.plan is None else (chunk[:, :left] - watched.plan[:, -left:]).std(1)
        watched.notes.append(np.stack([distance.numpy(), energy.numpy(), moved], 1))
        watched.plan = chunk
        return chunk


@dataclass(frozen=True)
class Rollouts:
    """Roll-outs that were watched."""

    obs: np.ndarray
    """[episodes, steps, obs]."""
    notes: np.ndarray
    """[episodes, decisions, 3]: distance, energy, change of plan."""
    length: np.ndarray
    success: np.ndarray

    @classmethod
    def of(cls, policy: cebm.EnergyPolicy, episodes: int, file: Path) -> "Rollouts":
        """Those of the file, or new ones, which are put there."""
        if not file.exists():
            actor = Watched(policy, torch.Generator().manual_seed(VALIDATION_SEED))
            rows = cebm.evaluate(actor, TASK, episodes=episodes, seed=VALIDATION_SEED, latency_calls=0).rows
            length, success = (np.array([row[name] for row in rows]) for name in ("length", "success"))
            np.savez(file, obs=np.stack(actor.seen, 1), notes=np.stack(actor.notes, 1), length=length, success=success)
        with np.load(file) as kept:
            return cls(kept["obs"], kept["notes"], kept["length"], kept["success"].astype(bool))

    def demonstrations(self, episodes: np.ndarray) -> Demonstrations:
        """Some of them as demonstrations, of observations alone."""
        obs = np.concatenate([self.obs[index, : self.length[index]] for index in episodes])
        return Demonstrations.from_arrays(obs, np.zeros((len(obs), 2), np.float32), self.length[episodes].cumsum())


def warned(rollouts: Rollouts, training: Demonstrations, asks: Calibration) -> dict[str, Any]:
    """How well failures of roll-outs are announced, over ten random halves of them: the successes of one half set the
    thresholds, the other half is announced. `asks`: thresholds from demonstrations."""
    steps, running = np.arange(rollouts.obs.shape[1]), np.arange(rollouts.obs.shape[1]) < rollouts.length[:, None]
    every = np.arange(rollouts.notes.shape[1]) * EXECUTE
    decided, recent = np.minimum(steps // EXECUTE, len(every) - 1), 8

    def at_steps(values: np.ndarray) -> np.ndarray:
        """Values of decisions at all steps, before the end of each episode."""
        return np.where(running, values[:, decided], -np.inf)

    distance, energy = (torch.from_numpy(rollouts.notes[..., i]) for i in (0, 1))
    both = torch.maximum(asks.unfamiliar(distance), asks.unlikely(energy)).numpy()
    sums = np.cumsum(rollouts.notes[..., 2], 1)
    late = np.concatenate([np.zeros((len(sums), recent)), sums[:, :-recent]], 1)
    change = (sums - late) / np.minimum(np.arange(1, len(every) + 1), recent)
    flat = rollouts.obs.reshape(-1, rollouts.obs.shape[2])
    some = FailureAlarm.fit(training, rollouts.demonstrations(np.flatnonzero(rollouts.success)))
    ends = some.expected(flat, np.tile(steps, len(rollouts.obs))).numpy().reshape(running.shape)
    scores = {
        "expected end": np.where(running, ends, -np.inf),
        "change of plan over 8 decisions": at_steps(change),
        "unfamiliar or unlikely": at_steps(both),
        "the clock alone": np.where(running, steps, -np.inf).astype(float),
    }
    result: dict[str, Any] = {"episodes": len(running), "success": float(rollouts.success.mean())}
    for alpha in (0.1, 0.2, 0.3):
        for name, score in scores.items():
            result[f"{name}, alpha {alpha}"] = announced(score, rollouts.success, alpha, None, BY)
    result["unfamiliar or unlikely, thresholds from demonstrations"] = announced(
        scores["unfamiliar or unlikely"], rollouts.success, ALPHA, asks.threshold, BY
    )
    return result


# ---------------------------------------------------------------------------------------------- behind the guard


@dataclass
class Faulty:
    """A policy whose observations or chunks are spoilt. It remembers what it saw, for a stale one."""

    policy: cebm.EnergyPolicy
    moved: float = 0.0
    """Pixels by which all that it sees is moved."""
    late: int = 0
    """Decisions by which its observation is old."""
    swapped: bool = False
    """Whether x and y of its actions are exchanged."""
    history: int = HISTORY
    horizon: int = HORIZON
    columns: tuple[int, int] = (FRAME, 2)
    past: list[np.ndarray] = field(default_factory=list)

    def reset(self) -> None:
        self.policy.reset()
        self.past.clear()

    def act(self, obs: np.ndarray) -> np.ndarray:
        self.past.append(obs)
        seen = self.past[max(0, len(self.past) - 1 - self.late)]
        chunk = np.asarray(self.policy.act(seen + np.float32(self.moved)))
        return chunk.reshape(len(chunk), HORIZON, 2)[..., ::-1].reshape(chunk.shape) if self.swapped else chunk


def together(density: cebm.EnergyPolicy, rest: Demonstrations, data: HeldOut) -> dict[str, Any]:
    """Episodes stopped by four chunks together, one in eight steps: over ten halves of the held-out episodes."""
    few, found = data.every(EXECUTE), dict[str, list[float]]()
    kinds = {"demonstrators": data.chunks, **chunk_faults(data)}
    worst = {}
    for name, chunks in kinds.items():
        spoilt = replace(data, chunks=chunks).every(EXECUTE)
        energies = np.split(given_signals(density, few.obs, spoilt.chunks)[:, 1], few.ends[:-1])
        windows = [np.lib.stride_tricks.sliding_window_view(each, min(4, len(each))) for each in energies]
        worst[name] = np.array([each.mean(1).max() for each in windows])
    for seed in range(SPLITS):
        order = np.random.default_rng([9, seed]).permutation(rest.episodes)
        half = rest.episodes // 2
        limit = recent(density, rest.select(np.sort(order[:half])), ALPHA, every=EXECUTE, window=4).limit
        for name, values in worst.items():
            found.setdefault(name, []).append(float((values[order[half:]] > limit).mean()))
    return {name: float(np.mean(rates)) for name, rates in found.items()}


def behind(
    guard: Guard, summed: Guard, steady: cebm.EnergyPolicy, mse: cebm.EnergyPolicy, episodes: int = 40
) -> dict[str, Any]:
    """Roll-outs alone, behind guards that ask (the agent then stays), and behind one that repairs; gains of reward are
    paired by episode, against the same policy alone."""
    faults = {
        "steady": Faulty(steady),
        "mse": Faulty(mse),
        "steady, sees all moved by 50 px": Faulty(steady, moved=50),
        "steady, sees all moved by 100 px": Faulty(steady, moved=100),
        "steady, observation 16 steps old": Faulty(steady, late=2),
        "steady, axes swapped": Faulty(steady, swapped=True),
    }

    def stay(obs: np.ndarray) -> np.ndarray:
        return np.clip(obs[:, -2:], 0, 512)

    found: dict[str, Any] = {}
    alone, good = np.empty(0), np.empty(0, bool)
    for name, policy in faults.items():
        ways = {
            "alone": policy,
            "asks": guard.wrap(policy, repair=False),
            "asks, four chunks together too": summed.wrap(policy, repair=False),
            "repairs": guard.wrap(policy),
        }
        for way, actor in ways.items():
            effort: dict[str, Any] = {} if actor is policy else {"fallback": stay}
            played = cebm.evaluate(
                actor, TASK, episodes=episodes, seed=TEST_SEED, latency_calls=0, execute=EXECUTE, **effort
            )
            rewards = np.array([each["reward"] for each in played.rows])
            row: dict[str, Any] = {"reward": float(rewards.mean()), "success": played.score("success")}
            if actor is policy:
                alone, good = rewards, np.array([bool(each["success"]) for each in played.rows])
            else:
                first = [each["first_asked"] for each in played.rows]
                asked = np.array([each is not None for each in first])
                steps = [each for each in first if each is not None]
                row |= {
                    "gain": float((rewards - alone).mean()),
                    "gain error": float((rewards - alone).std(ddof=1) / np.sqrt(episodes)),
                    "episodes with a question": float(asked.mean()),
                    "of those that fail alone": float(asked[~good].mean()) if (~good).any() else None,
                    "of those that succeed alone": float(asked[good].mean()) if good.any() else None,
                    "median step of the first": float(np.median(steps)) if steps else None,
                }
            found[f"{name}, {way}"] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--policies", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    training, rest = parted(TASK.convert(chosen.data))
    data = HeldOut.of(rest)
    chosen.policies.mkdir(parents=True, exist_ok=True)
    result = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}

    def part(name: str, measure: Callable[[], Any]) -> None:
        if name in result or (chosen.only and name not in chosen.only):
            return
        result[name] = measure()
        write_atomically(chosen.out, (json.dumps(result, indent=1) + "\n").encode())
        print(name, json.dumps(result[name]), flush=True)

    def policy(name: str) -> cebm.EnergyPolicy:
        return trained(name, chosen.policies, training)

    steady, density = policy("steady"), policy("guard")
    own = episodes_worst(own_signals(steady, data.obs), data.ends)
    given = episodes_worst(given_signals(density, data.obs, data.chunks), data.ends)
    guard = Guard(replace(density, calibration=calibration(given, ALPHA, 0, 5, None)))
    part("false alarms, policy", lambda: alarms(own))
    part("false alarms, guard", lambda: alarms(given))
    part("auroc of shifted observations", lambda: shifted(steady, calibration(own, ALPHA, 0, 5, None), data))
    part("guard", lambda: told_apart(guard, data, {name: policy(name) for name in ("steady", "mse", "ibc")}))
    part("four chunks together", lambda: together(density, rest, data))
    part("roll-outs behind the guard", lambda: behind(guard, guard.over_chunks(rest), steady, policy("mse")))
    part(
        "failures",
        lambda: warned(
            Rollouts.of(steady, 200, chosen.policies / "rollouts.npz"), training, calibration(own, ALPHA, 0, 5, None)
        ),
    )


if __name__ == "__main__":
    main()
