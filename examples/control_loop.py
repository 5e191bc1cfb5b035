"""A control loop at 50 Hz with a policy behind a server: the next chunk is asked for while this one plays. Where an
answer is late, the loop plays its chunk on, and then holds the last action. Run me: I take two minutes.

Measured is the jump of the action at a seam, where one chunk follows another, beside the mean change of the action
within a chunk; and how often the particle visits both goals. "joined" starts each search at the rest of the chunk that
plays, which keeps it close to the plan.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import cebm
from cebm import AsynchronousRunner, ParticleTask

PERIOD = 0.02


class Late:
    """A policy whose answers come that many seconds later, as over a slow network."""

    def __init__(self, policy: Any, seconds: float) -> None:
        self.policy, self.seconds = policy, seconds
        self.history, self.horizon, self.takes = policy.history, policy.horizon, policy.takes

    def act(self, obs: np.ndarray, *, previous: Any = None, generator: Any = None) -> np.ndarray:
        time.sleep(self.seconds)
        return self.policy.act(obs, previous=previous, generator=generator)

    def reset(self) -> None:
        self.policy.reset()


class Paced:
    """Acts once per period, whatever else takes its time, and remembers its actions."""

    def __init__(self, runner: AsynchronousRunner) -> None:
        self.runner, self.due = runner, 0.0
        self.actions: list[np.ndarray] = []

    def reset(self) -> None:
        self.runner.reset()
        self.due = time.monotonic()

    def act(self, obs: np.ndarray) -> np.ndarray:
        time.sleep(max(0.0, self.due - time.monotonic()))
        self.due += PERIOD
        action = self.runner.act(obs)
        self.actions.append(action[0])
        return action


def loop(policy: Any, task: ParticleTask, episodes: int, seed: int, latency: float, joined: bool = False) -> Any:
    """Plays episodes at 50 Hz, one after the other: all actions, what the runner did, and the share of successes."""
    with AsynchronousRunner(Late(policy, latency), ask_after=4, joined=joined) as runner:
        paced = Paced(runner)
        rows = [task.roll_out(paced, 1, seed + i).rows[0] for i in range(episodes)]
        return np.array(paced.actions), runner.played, float(np.mean([bool(row["success"]) for row in rows]))


def chunked(task: ParticleTask, steps: int) -> cebm.EnergyPolicy:
    """A policy with chunks of 8 actions."""
    shown = task.demonstrations(500, 0)
    return cebm.fit(shown.obs, shown.actions, shown.episode_ends, steps=steps, horizon=8)


def main(latencies: Sequence[float] = (0.0, 0.1, 0.3), episodes: int = 10, steps: int = 1500) -> list[str]:
    """Trains a policy with chunks of 8, serves it, and plays it with each latency; the lines that it prints."""
    task = ParticleTask(dim=2)
    lines = []
    with cebm.serve(chunked(task, steps)) as server, cebm.connect(server.url, timeout_s=5.0) as policy:
        for latency in latencies:
            for joined in (False, True):
                _, played, success = loop(policy, task, episodes, 7, latency, joined)
                lines.append(
                    f"latency {1e3 * latency:3.0f} ms  {'joined' if joined else 'apart '}  jump at a seam "
                    f"{np.mean(played.seams):.3f}  change within {np.mean(played.within):.3f}  held "
                    f"{played.held}/{played.ticks} ticks  success {success:.0%}"
                )
                print(lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    main()
