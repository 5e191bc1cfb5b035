"""The particle task with four discs that no demonstration knew: the set-point must never lie in one of them.

A goal whose middle lies in a disc can still be reached from its edge, within the 0.05 that count as success. Compared
are a policy without constraints, `mdn` with the first of 64 draws that is allowed (and where none is, the set-point
stays where it was), and the energy under the constraints. Run me: I take about five minutes; `main` takes less.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

import cebm
from cebm import KeepOutCircle, ParticleTask, Runner

DISCS = [KeepOutCircle((x, y), 0.08) for x in (0.3, 0.7) for y in (0.3, 0.7)]
MIDDLES = np.array([disc.centre for disc in DISCS])


def stay(obs: np.ndarray) -> np.ndarray:
    """The set-point for an episode in which the policy asks: where the particle is, or just outside of a disc."""
    place = obs[:, :2].clip(0, 1).astype(np.float64)
    for middle in MIDDLES:
        away = place - middle
        distance = np.linalg.norm(away, axis=1, keepdims=True)
        place = np.where(distance < 0.0801, middle + 0.0801 * away / distance, place)
    return place


class FirstAllowed:
    """Plain rejection: the first of a policy's draws that lies in no disc; without one, the set-point stays."""

    def __init__(self, policy: Any, draws: int = 64) -> None:
        self.policy, self.draws = policy, draws

    def reset(self) -> None:
        """Nothing is remembered."""

    def act(self, obs: np.ndarray) -> np.ndarray:
        found = self.policy.propose(obs, candidates=self.draws).candidates.numpy()
        free = (np.linalg.norm(found[:, :, None] - MIDDLES, axis=-1) >= 0.08).all(-1)
        first = found[np.arange(len(obs)), free.argmax(1)]
        return np.where(free.any(1, keepdims=True), first, stay(obs))


class Watched:
    """Counts the set-points that lie in a disc."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.collisions = actor, 0

    def reset(self) -> None:
        """A new episode; the count goes on."""
        self.actor.reset()

    def act(self, obs: np.ndarray) -> np.ndarray:
        actions = self.actor.act(obs)
        inside = np.linalg.norm(actions[:, None] - MIDDLES, axis=-1) < 0.08
        self.collisions += int(inside.any(1).sum())
        return actions


def reachable(task: ParticleTask, episodes: int, seed: int) -> float:
    """Share of episodes in which both goals can be reached from outside of the discs at all."""
    env = cebm.BatchedParticle(task)
    env.reset(seed, episodes)
    fine = np.ones(episodes, bool)
    for goal in (env.first_goal, env.second_goal):
        fine &= (np.linalg.norm(goal[:, None] - MIDDLES, axis=-1) >= 0.08 - task.goal_distance).all(1)
    return float(fine.mean())


def actors(task: ParticleTask, steps: int, trials: Sequence[str] = ("steady", "mdn")) -> dict[str, Any]:
    """Who acts, by name: policies as they are, with rejection of their draws, and constrained."""
    shown = task.demonstrations(500, 0)
    found: dict[str, Any] = {}
    for name in trials:
        policy = cebm.fit(shown.obs, shown.actions, shown.episode_ends, trial=name, steps=steps, limits=task.limits)
        constrained = policy
        for disc in DISCS:
            constrained = constrained.with_constraint(disc)
        found |= {
            f"{name}, no constraint": Runner(policy),
            f"{name}, first allowed draw": FirstAllowed(policy),
            f"{name}, constrained": Runner(constrained, fallback=stay),
        }
    return found


def main(steps: int = 1500, episodes: int = 200, seed: int = 11) -> dict[str, tuple[float, int]]:
    """Success and collisions of each way to act."""
    task = ParticleTask(dim=2)
    print(
        f"episodes whose goals can be reached from outside of the discs: {reachable(task, episodes, seed):.1%}",
        flush=True,
    )
    found = {}
    for name, actor in actors(task, steps).items():
        watched = Watched(actor)
        rows = task.roll_out(watched, episodes, seed).rows
        found[name] = float(np.mean([bool(row["success"]) for row in rows])), watched.collisions
        print(f"{name:28} success {found[name][0]:6.1%}  set-points in a disc {found[name][1]}", flush=True)
    return found


if __name__ == "__main__":
    main()
