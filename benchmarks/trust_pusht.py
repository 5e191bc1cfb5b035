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
from benchmarks.trust import ALPHA, SPLITS, auroc, episodes_worst, false_alarms
from cebm import Demonstrations, Guard
from cebm.evaluation import TEST_SEED, VALIDATION_SEED
from cebm.storage import write_atomically
from cebm.tasks import PushT
from cebm.trust.calibration import Calibration, calibration, considered, signals
from cebm.trust.guard import DENSITY

TASK = PushT()
HISTORY, HORIZON, EXECUTE = 2, 16, 8
FRAME = 20
TRAINED = 106
"""Demonstrations to learn from."""
STEPS = {"steady": 3000, "mse": 1000, "guard": 1500, "ibc": 1000}
"""Training steps; the guard is the density that it learns."""
AGENT = slice(18, 20)
"""Columns of the agent's place in an observation."""


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

    @property
    def some(self) -> np.ndarray:
        """Every eighth step, for what takes time."""
        return np.arange(0, len(self.obs), 8)


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
    obs, rng = data.obs[data.some], np.random.default_rng(3)
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

    def scores(chunks: np.ndarray) -> np.ndarray:
        distance, energy = torch.from_numpy(given_signals(guard.density, data.obs, chunks)).T
        return torch.maximum(found.unfamiliar(distance), found.unlikely(energy)).numpy()

    def by_episode(values: np.ndarray) -> np.ndarray:
        return np.array([part.max() for part in np.split(values, data.ends[:-1])])

    clean = scores(data.chunks)
    others = {name: np.asarray(policy.act(data.obs)) for name, policy in policies.items()}
    result: dict[str, Any] = {"episodes stopped, demonstrators": float((by_episode(clean) > found.threshold).mean())}
    for name, chunks in (chunk_faults(data) | others).items():
        odd = scores(chunks)
        parts = [part > found.threshold for part in np.split(odd, data.ends[:-1])]
        first = [int(part.argmax()) for part in parts if part.any()]
        result[name] = {
            "auroc of a step": auroc(clean, odd),
            "auroc of an episode": auroc(by_episode(clean), by_episode(odd)),
            "episodes stopped": len(first) / len(parts),
            "median step of the alarm": float(np.median(first)) if first else None,
        }
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
    """A policy that notes, at each of its decisions, both signals and how far the new plan is from the old one."""

    policy: cebm.EnergyPolicy
    generator: torch.Generator
    notes: list[np.ndarray] = field(default_factory=list)
    plan: np.ndarray | None = None
    history: int = HISTORY
    horizon: int = HORIZON

    def reset(self) -> None:
        """A new batch of episodes begins."""
        self.policy.reset()
        self.plan = None

    def act(self, obs: np.ndarray) -> np.ndarray:
        actions, distance, energy, _ = considered(self.policy, obs, 5, generator=self.generator)
        chunk = actions.numpy()
        left = EXECUTE * 2
        moved = np.zeros(len(obs)) if self.plan is None else (chunk[:, :left] - self.plan[:, -left:]).std(1)
        self.notes.append(np.stack([distance.numpy(), energy.numpy(), moved], 1))
        self.plan = chunk
        return chunk


def watched(policy: cebm.EnergyPolicy, episodes: int, seed: int, file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Signals [episodes, decisions, 3] of roll-outs, NaN after their end, and whether each succeeded."""
    if not file.exists():
        actor = Watched(policy, torch.Generator().manual_seed(seed))
        rows = cebm.evaluate(actor, TASK, episodes=episodes, seed=seed, latency_calls=0, execute=EXECUTE).rows
        notes = np.stack(actor.notes, 1)
        ends = np.array([-(-row["length"] // EXECUTE) for row in rows])
        notes[np.arange(notes.shape[1]) >= ends[:, None]] = np.nan
        np.savez(file, notes=notes, success=np.array([bool(row["success"]) for row in rows]))
    with np.load(file) as kept:
        return kept["notes"], kept["success"]


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
    for name, seed in (("calibration", VALIDATION_SEED), ("test", TEST_SEED)):
        watched(steady, 100, seed, chosen.policies / f"watched-{name}.npz")


if __name__ == "__main__":
    main()
