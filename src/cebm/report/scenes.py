"""Pictures of a policy at work, as numbers for the page to draw: its energy over the actions with the candidates
moving on it, and its episodes beside the expert's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cebm.envs.particle import BatchedParticle, ParticleExpert, ParticleTask
from cebm.evaluation import TEST_SEED
from cebm.policy import ImplicitPolicy, Policy, Runner
from cebm.report.charts import heat_map, number, tick_labels, ticks
from cebm.training import Job, demonstrations_of

UNIT = 1000
"""Panels are squares of this many units."""
GRID, DOTS, FRAMES = 96, 80, 26


@dataclass(frozen=True)
class Moment:
    """An observation to look at."""

    title: str
    obs: Float[np.ndarray, " window"]
    """As the policy takes it, history included."""
    marks: Sequence[tuple[str, Sequence[float], float]] = ()
    """Kind, place and radius of what to mark, in action units."""


# ---------------------------------------------------------------------------------------------- the landscape


def landscape(policy: Policy, moments: Sequence[Moment]) -> dict[str, Any]:
    """A panel per moment. Energies are counted from each panel's lowest: what an observation adds to all actions
    alike says nothing about them."""
    flat = policy.act_box.dim == 1
    panels: list[dict[str, Any]] = []
    drawn = []
    for moment in moments:
        with torch.no_grad():
            obs = torch.as_tensor(moment.obs)[None].to(policy.obs_box.centre)
            context = policy.energy.encode(policy.obs_box.normalise(obs))
            frames, steps = chain(policy, context)
            energies = torch.stack([policy.energy.energies(context, frame)[0] for frame in frames])
            draws = isinstance(policy, ImplicitPolicy) and policy.choice == "draw"
            winner = 0 if draws else int(energies[-1].argmin())
            chosen = frames[-1][0, winner]
            surface, lowest = _surface(policy, context, chosen)
        shown = [winner, *[i for i in range(energies.shape[1]) if i != winner][: DOTS - 1]]
        states = torch.stack(frames)[:, 0, shown]
        drawn.append((surface, states.cpu().double().numpy(), (energies[:, shown] - lowest).cpu().double().numpy()))
        panels.append(
            {
                "title": moment.title,
                "marks": [_mark(policy, *mark) for mark in moment.marks],
                "mean": [number(max(0.0, float(each.mean() - lowest))) for each in energies],
                "chosen": [number(value) for value in _units(policy, chosen)],
            }
        )
    # One scale for all panels. The corners may tower over the rest: the top hundredth shares the brightest colour.
    high = max(float(np.quantile(surface, 0.99)) for surface, _, _ in drawn) or 1.0
    for panel, (surface, places, heights) in zip(panels, drawn, strict=True):
        across = _place(places[..., 0], policy)
        if flat:
            panel["curve"] = _curve(surface[0], high)
            up = UNIT - _height(heights, high)
        else:
            panel["image"] = heat_map(surface, 0.0, high)
            up = UNIT - _place(places[..., 1], policy)
        panel["dots"] = np.stack([across, up], -1).round().astype(int).tolist()
    box = policy.act_box
    low, top = ((box.centre + sign * box.limit * box.scale).tolist() for sign in (-1, 1))
    axes = []
    for d in range(1 if flat else 2):
        values = ticks(low[d], top[d], 4)
        axes.append([[_at(v, low[d], top[d]), text] for v, text in zip(values, tick_labels(values), strict=True)])
    levels = ticks(0, high, 5)
    if flat:
        texts = tick_labels(levels)
        axes.append(
            [[height, text] for height, text in zip(_height(np.array(levels), high).tolist(), texts, strict=True)]
        )
    return {
        "flat": flat,
        "panels": panels,
        "steps": steps,
        "axes": axes,
        "scale": [[math.sqrt(v / high), text] for v, text in zip(levels, tick_labels(levels), strict=True)],
        "moves": isinstance(policy, ImplicitPolicy),
        "candidates": energies.shape[1],
        "choice": "is drawn" if draws else "ends lowest",
        "act_dim": policy.act_box.dim,
    }


def chain(policy: Policy, context: Tensor) -> tuple[list[Float[Tensor, "1 candidates act"]], list[int]]:
    """The states of the search behind `policy.act`, as it runs by default: the start and the state after each
    step (of a long chain, some), with the numbers of these steps. An explicit policy has its one action."""
    if not isinstance(policy, ImplicitPolicy):
        low, high = policy.limits
        energy: Any = policy.energy
        best = policy.act_box.denormalise(energy.best(context)).clamp(low, high)
        return [policy.act_box.normalise(best).unsqueeze(1)], [0]
    generator = torch.Generator(policy.device).manual_seed(0)
    start = policy.begin(context, policy.candidates, True, generator)
    sampler, energy = policy.sampler, policy.energy
    state = sampler.init(energy, context, start, generator)
    states = [state.actions]
    for k in range(sampler.steps):
        state, _ = sampler.step(energy, context, state, k, generator)
        states.append(state.actions)
    shown = np.unique(np.linspace(0, sampler.steps, min(FRAMES, sampler.steps + 1)).round().astype(int)).tolist()
    return [states[k] for k in shown], shown


def _surface(policy: Policy, context: Tensor, chosen: Tensor) -> tuple[Float[np.ndarray, "rows columns"], float]:
    """Energies over the first two dimensions (or the only one), the others at the chosen action; and the lowest."""
    limit = policy.act_box.limit
    middles = (torch.arange(GRID, device=policy.device, dtype=chosen.dtype) + 0.5) / GRID * 2 - 1
    if len(chosen) == 1:
        rows, columns = torch.zeros(1, device=policy.device), torch.linspace(-1, 1, 241, device=policy.device)
    else:
        rows, columns = -middles, middles  # the first row of an image is on top
    points = chosen.repeat(len(rows) * len(columns), 1)
    points[:, 0] = limit * columns.repeat(len(rows))
    if len(chosen) > 1:
        points[:, 1] = limit * rows.repeat_interleave(len(columns))
    energies = policy.energy.energies(context, points[None])[0].cpu().double().numpy()
    lowest = min(float(energies.min()), float(policy.energy.energies(context, chosen[None, None])))
    return energies.reshape(len(rows), len(columns)) - lowest, lowest


def _curve(energies: Float[np.ndarray, " points"], high: float) -> str:
    xs = np.linspace(0, UNIT, len(energies))
    ys = UNIT - _height(energies, high)
    return "M" + "L".join(f"{x:.0f} {y:.0f}" for x, y in zip(xs, ys, strict=True))


def _height(energy: np.ndarray, high: float) -> np.ndarray:
    return 60 + 860 * np.minimum(energy / high, 1.08)


def _place(normalised: np.ndarray, policy: Policy) -> np.ndarray:
    return (normalised / policy.act_box.limit + 1) / 2 * UNIT


def _at(value: float, low: float, high: float) -> float:
    return round((value - low) / (high - low) * UNIT, 1)


def _mark(policy: Policy, kind: str, place: Sequence[float], radius: float) -> dict[str, Any]:
    box = policy.act_box
    dim = len(place)
    normalised = (torch.as_tensor(place, dtype=box.centre.dtype) - box.centre[:dim].cpu()) / box.scale[:dim].cpu()
    x, *rest = _place(normalised.double().numpy(), policy).tolist()
    r = (radius / box.scale[:2].cpu().double() / box.limit / 2 * UNIT).tolist()
    result = {"kind": kind, "x": round(x, 1), "rx": round(r[0], 1)}
    return result | {"y": round(UNIT - rest[0], 1), "ry": round(r[1], 1)} if rest else result


def _units(policy: Policy, normalised: Tensor) -> list[float]:
    low, high = policy.limits
    return policy.act_box.denormalise(normalised).clamp(low, high).tolist()


# ---------------------------------------------------------------------------------------------- the episodes


@dataclass(frozen=True)
class Flight:
    """Episodes side by side: where the particle was and where it was sent."""

    positions: Float[np.ndarray, "episodes times dim"]
    aims: Float[np.ndarray, "episodes steps dim"]
    seen: Float[np.ndarray, "episodes steps obs"]
    distances: Float[np.ndarray, "episodes times 2"]
    env: BatchedParticle


def fly(task: ParticleTask, act: Any, episodes: int) -> Flight:
    """Held-out episodes 0, 1, …; `act` maps observations to set-points."""
    env = BatchedParticle(task)
    obs = env.reset(TEST_SEED, episodes)
    positions, aims, seen = [env.position], [], []
    while not env.done:
        seen.append(obs)
        aims.append(np.clip(act(obs), 0, 1).astype(np.float64))
        obs = env.step(aims[-1])
        positions.append(env.position)
    path = np.stack(positions, 1)
    goals = np.stack([env.first_goal, env.second_goal], 1)
    distances = np.linalg.norm(path[:, :, None] - goals[:, None], axis=-1)
    return Flight(path, np.stack(aims, 1), np.stack(seen, 1), distances, env)


def episodes_of(
    policy: Policy, task: ParticleTask, candidates: int, episodes: int = 12
) -> tuple[dict[str, Any], Flight]:
    """Held-out episodes of the policy and of the expert. Long chains get fewer candidates, to end in seconds."""
    steps = policy.sampler.steps if isinstance(policy, ImplicitPolicy) else 1
    if isinstance(policy, ImplicitPolicy):
        candidates = min(candidates, policy.candidates)
    candidates = min(candidates, max(8, 400_000 // (episodes * task.steps * steps)))
    runner = Runner(policy, candidates=candidates, generator=torch.Generator(policy.device).manual_seed(TEST_SEED))
    own = fly(task, runner.act, episodes)
    expert = fly(task, ParticleExpert(task, TEST_SEED, episodes).act, episodes)
    outcome = own.env.outcome()
    first_success = int(np.argmax(outcome.success)) if outcome.success.any() else 0
    rows = []
    for i in range(episodes):
        rows.append(
            {
                "index": i,
                "success": bool(outcome.success[i]),
                "remark": _remark(task, own, i),
                "goals": [_plane(goal[i][None], task)[0] for goal in (own.env.first_goal, own.env.second_goal)],
                "policy": _plane(own.positions[i], task),
                "expert": _plane(expert.positions[i], task),
                "aims": _plane(own.aims[i], task),
                "expert_aims": _plane(expert.aims[i], task),
                "distances": own.distances[i].round(4).tolist(),
                "expert_distances": expert.distances[i].round(4).tolist(),
            }
        )
    scene = {
        "episodes": rows,
        "shown": first_success,
        "steps": task.steps,
        "dim": task.dim,
        "radius": task.goal_distance,
        "candidates": candidates if isinstance(policy, ImplicitPolicy) else 0,
        "successes": int(outcome.success.sum()),
        "expert_successes": int(expert.env.outcome().success.sum()),
    }
    return scene, own


def _plane(points: Float[np.ndarray, "times dim"], task: ParticleTask) -> list[list[float]]:
    """The first two dimensions; in one dimension, time is the first."""
    if task.dim == 1:
        points = np.stack([np.linspace(0, 1, len(points)), points[:, 0]], 1)
    return points[:, :2].round(4).tolist()


def _remark(task: ParticleTask, flight: Flight, episode: int) -> str:
    nearest = flight.distances[episode].min(0)
    outcome = flight.env.outcome()
    if outcome.success[episode]:
        return "success"
    for goal in (0, 1):
        if nearest[goal] > task.goal_distance:
            return f"missed goal {goal + 1} by {nearest[goal] - task.goal_distance:.2f}"
    return f"ended {outcome.final_distance[episode]:.2f} away"


def moments_of_flight(policy: Policy, task: ParticleTask, flight: Flight, episode: int) -> list[Moment]:
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
        past = [max(0, step - back) for back in reversed(range(policy.history))]
        marks = [
            ("goal 1", env.first_goal[episode].tolist(), task.goal_distance),
            ("goal 2", env.second_goal[episode].tolist(), task.goal_distance),
            ("agent", flight.positions[episode, step].tolist(), 0.0),
        ]
        window = np.concatenate([flight.seen[episode, t] for t in past])
        moments.append(Moment(f"Step {step}{names[step]}", window, marks))
    return moments


def moments_of_data(policy: Policy, job: Job) -> list[Moment]:
    """Four validation pairs, spread over the set, with the demonstrated action; without the data, the middle of the
    observations."""
    try:
        windows = demonstrations_of(job)[1].windows(policy.history, policy.horizon)
    except (OSError, ValueError):
        return [Moment("Middle of the observations (the data are not at hand)", policy.obs_box.centre.cpu().numpy())]
    rows = np.unique(np.linspace(0, len(windows) - 1, 6).round().astype(int)[1:-1])
    obs, actions = windows[rows]
    pairs = zip(rows.tolist(), obs, actions, strict=True)
    return [Moment(f"Validation pair {i:,}", x, [("demonstrated", y.tolist(), 0.0)]) for i, x, y in pairs]
