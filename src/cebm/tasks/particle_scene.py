"""Episodes of the particle task beside the expert's, as numbers for the report's page to draw (see `Task.scene`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from cebm.tasks.base import TEST_SEED, Actor
from cebm.tasks.particle import BatchedParticle, ParticleExpert, ParticleTask


@dataclass(frozen=True)
class Flight:
    """Episodes side by side: where the particle was and where it was sent."""

    positions: Float[np.ndarray, "episodes times dim"]
    aims: Float[np.ndarray, "episodes steps dim"]
    seen: Float[np.ndarray, "episodes steps obs"]
    distances: Float[np.ndarray, "episodes times 2"]
    """From the position to the first and to the second goal."""
    env: BatchedParticle
    """After the last step."""


def particle_scene(task: ParticleTask, actor: Actor, episodes: int) -> dict[str, Any]:
    """Held-out episodes of the actor and of the expert; the keys are those of `Task.scene`."""
    actor.reset()
    own = fly(task, actor.act, episodes)
    expert = fly(task, ParticleExpert(task, TEST_SEED, episodes).act, episodes)
    success = own.env.outcome().success
    shown = int(np.argmax(success)) if success.any() else 0
    return {
        "episodes": [_episode(task, own, expert, i) for i in range(episodes)],
        "shown": shown,
        "steps": task.steps,
        "dim": task.dim,
        "radius": task.goal_distance,
        "successes": int(success.sum()),
        "expert_successes": int(expert.env.outcome().success.sum()),
        "note": _meaning(task),
        "moments": _moments(task, own, shown),
    }


def fly(task: ParticleTask, act: Callable[[np.ndarray], Any], episodes: int) -> Flight:
    """Held-out episodes 0, 1, …; `act` maps observations to set-points."""
    env = BatchedParticle(task)
    obs = env.reset(TEST_SEED, episodes)
    positions, aims, seen = [env.position], [], []
    while not env.done:
        seen.append(obs)
        aims.append(np.clip(np.asarray(act(obs)), 0, 1).astype(np.float64))
        obs = env.step(aims[-1])
        positions.append(env.position)
    path = np.stack(positions, 1)
    goals = np.stack([env.first_goal, env.second_goal], 1)
    distances = np.linalg.norm(path[:, :, None] - goals[:, None], axis=-1)
    return Flight(path, np.stack(aims, 1), np.stack(seen, 1), distances, env)


def _episode(task: ParticleTask, own: Flight, expert: Flight, i: int) -> dict[str, Any]:
    return {
        "index": i,
        "success": bool(own.env.outcome().success[i]),
        "remark": _remark(task, own, i),
        "goals": [_plane(goal[i][None], task)[0] for goal in (own.env.first_goal, own.env.second_goal)],
        "policy": _plane(own.positions[i], task),
        "expert": _plane(expert.positions[i], task),
        "aims": _plane(own.aims[i], task),
        "expert_aims": _plane(expert.aims[i], task),
        "distances": own.distances[i].round(4).tolist(),
        "expert_distances": expert.distances[i].round(4).tolist(),
    }


def _plane(points: Float[np.ndarray, "times dim"], task: ParticleTask) -> list[list[float]]:
    """The first two dimensions; in one dimension, time is the first."""
    if task.dim == 1:
        points = np.stack([np.linspace(0, 1, len(points)), points[:, 0]], 1)
    return points[:, :2].round(4).tolist()


def _remark(task: ParticleTask, flight: Flight, episode: int) -> str:
    """How the episode ended."""
    nearest = flight.distances[episode].min(0)
    outcome = flight.env.outcome()
    if outcome.success[episode]:
        return "success"
    for goal in (0, 1):
        if nearest[goal] > task.goal_distance:
            return f"missed goal {goal + 1} by {nearest[goal] - task.goal_distance:.2f}"
    return f"ended {outcome.final_distance[episode]:.2f} away"


def _meaning(task: ParticleTask) -> str:
    """Sentences for the caption."""
    end = "one of them" if task.random_order else "goal 2"
    order = f"within {task.goal_distance:g} of both goals during the episode, and of {end} at its end"
    text = f"Success: {order}. The cross is the set-point that pulls the particle."
    if task.dim == 1:
        text += " Across: time. Up: the one dimension."
    elif task.dim > 2:
        text += f" Paths show the first two of {task.dim} dimensions; distances count all, so judge by them."
    return text


def _moments(task: ParticleTask, flight: Flight, episode: int) -> list[dict[str, Any]]:
    """The start, the arrival at the first goal, half-way from there, and the end; without arrival, even intervals."""
    last = task.steps - 1
    arrival = int(flight.distances[episode, :-1, 0].argmin())
    names = {0: ": start", last: ": end"}
    if 0 < arrival < last and flight.distances[episode, arrival, 0] <= task.goal_distance:
        names = {(arrival + last) // 2: ": under way to goal 2", arrival: ": nearest to goal 1", **names}
    else:
        names = {last // 3: "", 2 * last // 3: "", **names}
    env = flight.env
    moments = []
    for step in sorted(names):
        marks = [
            ("goal 1", env.first_goal[episode].tolist(), task.goal_distance),
            ("goal 2", env.second_goal[episode].tolist(), task.goal_distance),
            ("agent", flight.positions[episode, step].tolist(), 0.0),
        ]
        seen = flight.seen[episode, : step + 1].tolist()
        moments.append({"title": f"Step {step}{names[step]}", "step": step, "obs": seen, "marks": marks})
    return moments
