"""What latency costs on Push-T: `python -m benchmarks.latency RUN [--out docs/tasks/push-t-latency.json]`.

A trained policy plays the same held-out episodes with answers that come 0, 100 and 300 ms late, that is 0, 1 and 3 of
the task's ticks of 100 ms. "waiting": the loop stands still until the answer is there. "apart" and "joined": the chunk
plays on meanwhile (`AsynchronousRunner`); joined, the policy is told what will be left of it. Each way plays 8 actions
of a chunk where nothing is late. Ticks are counted, so that the machine's own speed has no part in it.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cebm.acting import Search
from cebm.asynchronous import AsynchronousRunner, Played
from cebm.composition import vary
from cebm.evaluation import TEST_SEED
from cebm.loading import load
from cebm.policy import EnergyPolicy
from cebm.runner import Runner
from cebm.storage import write_atomically
from cebm.tasks import PushT

TICK_MS, EXECUTE = 100, 8
LATENCIES = (0, 100, 300)


class Waiting:
    """A loop that stands still, at its last action, for so many ticks before each chunk but the first."""

    def __init__(self, policy: Any, ticks: int) -> None:
        self.runner, self.ticks = Runner(policy, execute=EXECUTE), ticks
        self.seams: list[float] = []
        self.within: list[float] = []
        self.reset()

    def reset(self) -> None:
        self.runner.reset()
        self.last: np.ndarray | None = None
        self.count = self.left = 0

    def act(self, obs: np.ndarray) -> np.ndarray:
        if self.last is not None and self.count == EXECUTE:
            if not self.left:
                self.asked, self.left = obs.copy(), self.ticks + 1
            self.left -= 1
            if self.left:
                self.within.append(0.0)
                return self.last
            self.count = 0
        fresh = self.count == 0 and self.last is not None
        action = self.runner.act(self.asked if fresh else obs)
        if self.last is not None:
            change = float(np.abs(action - self.last).max(1).mean())
            (self.seams if fresh else self.within).append(change)
        self.count, self.last = self.count + 1, action
        return action


def measured(policy: EnergyPolicy, way: str, late: int, episodes: int) -> dict[str, Any]:
    """One way with one latency."""
    task = PushT()
    log: Waiting | Played
    if way == "waiting":
        log = Waiting(policy, late // TICK_MS)
        result = task.roll_out(log, episodes, TEST_SEED)
    else:
        # Answers to observations of `late` ago begin there: so 8 actions of each chunk are played in every case.
        settings: dict[str, Any] = {"ask_after": EXECUTE - late // TICK_MS, "late_by": late // TICK_MS}
        with AsynchronousRunner(policy, joined=way != "apart", **settings) as runner:
            result, log = task.roll_out(runner, episodes, TEST_SEED), runner.played
    rewards = np.array([row["reward"] for row in result.rows], float).tolist()
    return {
        "way": way,
        "late_ms": late,
        "reward": float(np.mean(rewards)),
        "error": float(np.std(rewards, ddof=1) / len(rewards) ** 0.5),
        "success": float(np.mean([bool(row["success"]) for row in result.rows])),
        "seam": float(np.mean(log.seams)),
        "within": float(np.mean(log.within)),
        "rewards": [round(reward, 4) for reward in rewards],
    }


def ways_of(policy: EnergyPolicy, closeness: float) -> dict[str, EnergyPolicy]:
    """All ways; one more, with a term of closeness, where the policy's search has it."""
    ways = {"waiting": policy, "apart": policy, "joined": policy}
    if closeness and hasattr(policy.acting, "closeness"):
        ways[f"joined, closeness {closeness:g}"] = replace(policy, acting=vary(policy.acting, closeness=closeness))
    if not isinstance(policy.acting, Search):
        del ways["joined"]  # nothing is searched, or only a term of closeness looks at the last chunk
    return ways


def measure(ways: dict[str, EnergyPolicy], latencies: Sequence[int], episodes: int) -> list[dict[str, Any]]:
    """These ways with all latencies."""
    found = []
    for late in latencies:
        for way, acting in ways.items():
            if not late and way == "waiting":  # it is "apart" then
                continue
            found.append(measured(acting, way, late, episodes))
            row = found[-1]
            print(
                f"{late:3} ms  {way:24} reward {row['reward']:.3f} ± {row['error']:.3f}  success {row['success']:.2f}  "
                f"seam {row['seam']:.1f} px  within {row['within']:.1f} px",
                flush=True,
            )
    return found


def main() -> None:
    """Prints a line per way and latency; --out keeps them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency", description=__doc__)
    parser.add_argument("run", type=Path, help="a run or policy on Push-T's keypoints")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--latencies", type=int, nargs="+", default=LATENCIES, help="milliseconds")
    parser.add_argument("--closeness", type=float, default=10.0, help="weight of the term of closeness")
    parser.add_argument("--ways", nargs="+", help="only these; other rows of an older --out stay")
    arguments = parser.parse_args()
    ways = ways_of(load(arguments.run), arguments.closeness)
    asked = arguments.ways or list(ways)
    rows = measure({way: ways[way] for way in asked}, arguments.latencies, arguments.episodes)
    if arguments.out is not None:
        if arguments.ways and arguments.out.exists():
            older = json.loads(arguments.out.read_text())["rows"]
            rows = [row for row in older if row["way"] not in asked] + rows
        rows.sort(key=lambda row: row["late_ms"])
        about = {"episodes": arguments.episodes, "run": arguments.run.name, "rows": rows}
        write_atomically(arguments.out, (json.dumps(about) + "\n").encode())


if __name__ == "__main__":
    main()
