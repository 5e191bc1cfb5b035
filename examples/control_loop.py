"""A control loop at 50 Hz with a policy behind a server: the next chunk is asked for while this one plays. Where an
answer is late, the loop plays its chunk on, and then holds the last action. Run me: I take two minutes.

Measured is the jump of the action at a seam, where one chunk follows another, beside the mean change of the action
within a chunk; and how often the particle visits both goals. "joined" starts each search at the rest of the chunk that
plays, which keeps it close to the plan.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import cebm
from cebm import ParticleTask

PERIOD = 0.02


@dataclass
class Log:
    """What a loop did."""

    seams: list[float] = field(default_factory=list)
    """Change of the action at each seam."""
    within: list[float] = field(default_factory=list)
    """Change of the action elsewhere."""
    actions: list[np.ndarray] = field(default_factory=list)
    """The action of each tick."""
    fresh: list[int] = field(default_factory=list)
    """Ticks at which a new chunk began."""
    held: int = 0
    """Ticks at which the chunk was at its end and the answer was not there."""
    ticks: int = 0
    """All ticks."""


class AsynchronousChunks:
    """Plays chunks of a policy and asks for the next one ahead of time, in a thread. `latency` is added to each answer.

    The answer for the observation of tick t comes at tick t + d; its first d actions are for ticks that are over, and
    are left out. With `joined` the search starts at what this loop will not have played of its own chunk by then.
    """

    def __init__(self, policy: Any, latency: float = 0.0, ahead: int = 4, joined: bool = False) -> None:
        self.policy, self.latency, self.ahead, self.joined = policy, latency, ahead, joined
        self.pool, self.log = ThreadPoolExecutor(1), Log()
        self.reset()

    def reset(self) -> None:
        """A new episode begins."""
        self.chunk: np.ndarray = np.empty((0, 0))
        self.played = 0
        self.asked: Future | None = None
        self.asked_at = self.tick = 0
        self.last: np.ndarray | None = None
        self.policy.reset()

    def act(self, obs: np.ndarray) -> np.ndarray:
        """The action for now. Waits only for the first answer of an episode, when there is nothing to play."""
        fresh = False
        if self.asked is not None and (self.asked.done() or not len(self.chunk)):
            fresh = self._take()
        if self.asked is None and len(self.chunk) - self.played <= self.ahead:
            self._ask(obs)
            if not len(self.chunk):
                fresh = self._take()
        held = self.played >= len(self.chunk)
        action = self.chunk[min(self.played, len(self.chunk) - 1)]
        if self.last is not None:
            change = float(np.abs(action - self.last).max())
            (self.log.seams if fresh else self.log.within).append(change)
        if fresh:
            self.log.fresh.append(self.log.ticks)
        self.log.actions.append(action)
        self.log.held += held
        self.log.ticks += 1
        self.played, self.tick, self.last = self.played + 1, self.tick + 1, action
        return action

    def _ask(self, obs: np.ndarray) -> None:
        seen, self.asked_at = np.array(obs), self.tick
        played = min(self.played, len(self.chunk)) if self.joined else 0

        def answer() -> np.ndarray:
            time.sleep(self.latency)
            return self.policy.infer(seen, played=played or None)

        self.asked = self.pool.submit(answer)

    def _take(self) -> bool:
        """Takes the answer that came; False where it is an error or too old, and the loop plays on."""
        future, self.asked = self.asked, None
        if future is None or (future.exception() is not None and len(self.chunk)):
            return False
        chunk, over = future.result(), self.tick - self.asked_at
        if over >= len(chunk):  # every action of it is for a tick that is over: its last one is the newest that we have
            over = len(chunk) - 1
        first = not len(self.chunk)
        self.chunk, self.played = chunk, over
        return not first


def loop(policy: Any, task: ParticleTask, episodes: int, seed: int, **chunks: Any) -> tuple[Log, float]:
    """Plays episodes at 50 Hz; what happened, and the share of successes."""
    actor = AsynchronousChunks(policy, **chunks)

    class Paced:
        """The task's steps at 50 Hz, for one episode at a time."""

        def __init__(self) -> None:
            self.due = 0.0

        def reset(self) -> None:
            actor.reset()
            self.due = time.monotonic()

        def act(self, obs: np.ndarray) -> np.ndarray:
            time.sleep(max(0.0, self.due - time.monotonic()))
            self.due += PERIOD
            return actor.act(obs[0])[None]

    rows = [task.roll_out(Paced(), 1, seed + i).rows[0] for i in range(episodes)]
    actor.pool.shutdown()
    return actor.log, float(np.mean([bool(row["success"]) for row in rows]))


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
                log, success = loop(policy, task, episodes, 7, latency=latency, joined=joined)
                lines.append(
                    f"latency {1e3 * latency:3.0f} ms  {'joined' if joined else 'apart '}  jump at a seam "
                    f"{np.mean(log.seams):.3f}  change within {np.mean(log.within):.3f}  held "
                    f"{log.held}/{log.ticks} ticks  success {success:.0%}"
                )
                print(lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    main()
