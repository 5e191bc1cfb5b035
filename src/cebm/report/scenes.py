"""Pictures of a policy at work, as numbers for the page to draw: its energy over the actions with the candidates that
its search goes through, and the episodes that its task shows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cebm.acting import Problem
from cebm.evaluation import evaluate
from cebm.policy import EnergyPolicy
from cebm.report.charts import Value, heat_map, number, picture_uri, tick_labels, ticks
from cebm.report.records import Run
from cebm.runner import Runner
from cebm.tasks import TEST_SEED, Task

UNIT = 1000
"""Panels are squares of this many units."""
GRID, DOTS, FRAMES = 96, 80, 26
"""Points along a side of a landscape, candidates and frames that are drawn of a search, at most."""
PICTURES, STRIP, PICTURE_SIDE = 30, 6, 160
"""Pictures of an animation and of a strip, and the pixels of their longer side, at most: the page holds them all."""
EPISODES = 12
"""Episodes that a task is asked to show."""
EFFORT = 666
"""Candidates times steps of the search per action in these episodes, about: they have to end in seconds."""
SCENE_KEYS = ("episodes", "shown", "steps", "dim", "radius", "successes", "expert_successes", "note", "moments")
"""What `Task.scene` gives."""


@dataclass(frozen=True)
class Moment:
    """An observation to look at."""

    title: str
    obs: Float[np.ndarray, " window"]
    """As the policy takes it, history included."""
    marks: Sequence[tuple[str, Sequence[Value], Value]] = ()
    """Kind, place and radius of what to mark, in action units."""


# ---------------------------------------------------------------------------------------------- the search


@dataclass(frozen=True)
class Frames:
    """The search behind one call of `policy.act`."""

    problem: Problem
    """What the search was given."""
    states: list[Float[Tensor, "candidates act"]]
    """Candidates, normalised; the last are those that may be chosen, within the limits."""
    steps: list[int]
    """The steps of the search after which they stood there; 0: before the first."""
    chosen: int
    """The candidate that acts."""

    @property
    def action(self) -> Float[Tensor, " act"]:
        """The chosen action, normalised."""
        return self.states[-1][self.chosen]


@torch.no_grad()
def frames_of(policy: EnergyPolicy, obs: Any) -> Frames:
    """The search that `policy.act(obs)` does for one observation, by default and without a generator: the start and the
    state after each step (of a long search, some) where the way to act can show them, otherwise its end alone."""
    problem = policy.problem(obs)
    found = policy.acting.search(problem)
    end, chosen = found.actions[0], int(found.chosen[0])
    passed: list[tuple[int, Tensor]] = []
    if hasattr(policy.acting, "states"):
        # A fresh problem has the same random numbers, so the same search.
        passed = [(step, actions[0]) for step, actions in policy.acting.states(policy.problem(obs))]
    alike = passed and all(actions.shape == end.shape for _, actions in passed)
    if not alike or not torch.equal(problem.clip(passed[-1][1][None])[0], end):  # only true states are shown
        return Frames(problem, [end], [0], chosen)
    rows = np.unique(np.linspace(0, len(passed) - 1, min(FRAMES, len(passed))).round().astype(int)).tolist()
    states = [*(passed[row][1] for row in rows[:-1]), end]
    return Frames(problem, states, [passed[row][0] for row in rows], chosen)


# ---------------------------------------------------------------------------------------------- the landscape


@dataclass(frozen=True)
class _Panel:
    """One moment, before all panels get a common scale."""

    search: Frames
    surface: Float[np.ndarray, "rows columns"]
    """Energies from the lowest on; infinite where there is none."""
    energies: Float[np.ndarray, "frames candidates"]
    """Those of the candidates, from the same lowest on."""

    @property
    def ends_lowest(self) -> bool:
        """Whether the chosen candidate has the lowest energy at the end."""
        return bool(self.energies[-1, self.search.chosen] <= self.energies[-1].min())


def landscape(policy: EnergyPolicy, moments: Sequence[Moment]) -> dict[str, Any]:
    """A panel per moment. Energies are counted from each panel's lowest: what an observation adds to all actions
    alike says nothing about them."""
    drawn = [_panel(policy, moment) for moment in moments]
    # One scale for all panels. The corners may tower over the rest: the top hundredth shares the brightest colour.
    tops = [float(np.quantile(known, 0.99)) for each in drawn if len(known := each.surface[np.isfinite(each.surface)])]
    high = max(tops, default=0.0) or 1.0
    candidates = max(len(each.search.states[-1]) for each in drawn)
    frames = min(len(each.search.steps) for each in drawn)
    if any(len(each.search.steps) != frames for each in drawn):  # a search may end early: then its end alone
        drawn = [_end_of(each) for each in drawn]
    return {
        "flat": policy.act_box.dim == 1,
        "panels": [_drawing(policy, moment, each, high) for moment, each in zip(moments, drawn, strict=True)],
        "steps": drawn[0].search.steps,
        "axes": _axes(policy, high),
        "scale": [[math.sqrt(v / high), text] for v, text in _marks(0.0, high, 5)],
        "moves": len(drawn[0].search.steps) > 1,
        "candidates": candidates,
        "explicit": candidates == 1 and policy.energy.explicit,
        "lowest": all(each.ends_lowest for each in drawn),
        "act_dim": policy.act_box.dim,
    }


def _panel(policy: EnergyPolicy, moment: Moment) -> _Panel:
    search = frames_of(policy, torch.as_tensor(moment.obs)[None])
    with torch.no_grad():
        energies = [search.problem.energies(state[None])[0].double().cpu().numpy() for state in search.states]
        surface = _surface(policy, search)
    found = np.concatenate([surface.ravel(), energies[-1][[search.chosen]]])
    known = found[np.isfinite(found)]
    lowest = float(known.min()) if len(known) else 0.0
    return _Panel(search, np.maximum(surface - lowest, 0.0), np.stack(energies) - lowest)


def _end_of(panel: _Panel) -> _Panel:
    search = panel.search
    return _Panel(Frames(search.problem, search.states[-1:], [0], search.chosen), panel.surface, panel.energies[-1:])


def _drawing(policy: EnergyPolicy, moment: Moment, panel: _Panel, high: float) -> dict[str, Any]:
    """What the page's script gets; the chosen candidate comes first."""
    search = panel.search
    others = [i for i in range(len(search.states[-1])) if i != search.chosen]
    shown = [search.chosen, *others[: DOTS - 1]]
    places = torch.stack(search.states)[:, shown].cpu().double().numpy()
    result: dict[str, Any] = {
        "title": moment.title,
        "marks": [_mark(policy, search, moment.obs, *mark) for mark in moment.marks],
        "mean": [number(max(0.0, float(each.mean()))) for each in panel.energies],
        "chosen": [number(value) for value in _units(policy, search, moment.obs).tolist()],
    }
    across = _place(places[..., 0], policy)
    if policy.act_box.dim == 1:
        result["curve"] = _curve(panel.surface[0], high)
        up = UNIT - _height(panel.energies[:, shown], high)
    else:
        result["image"] = heat_map(panel.surface, 0.0, high)
        up = UNIT - _place(places[..., 1], policy)
    # A candidate that ran away, or whose energy is no number, is drawn beyond the edge.
    dots = np.nan_to_num(np.stack([across, up], -1), nan=-UNIT, posinf=2 * UNIT, neginf=-UNIT)
    return result | {"dots": dots.clip(-UNIT, 2 * UNIT).round().astype(int).tolist()}


def _surface(policy: EnergyPolicy, search: Frames) -> Float[np.ndarray, "rows columns"]:
    """Energies over the first two dimensions (or the only one), the others at the chosen action."""
    limit, chosen = policy.act_box.limit, search.action
    middles = (torch.arange(GRID, device=policy.device, dtype=chosen.dtype) + 0.5) / GRID * 2 - 1
    if len(chosen) == 1:
        rows, columns = torch.zeros(1, device=policy.device), torch.linspace(-1, 1, 241, device=policy.device)
    else:
        rows, columns = -middles, middles  # the first row of an image is on top
    points = chosen.repeat(len(rows) * len(columns), 1)
    points[:, 0] = limit * columns.repeat(len(rows))
    if len(chosen) > 1:
        points[:, 1] = limit * rows.repeat_interleave(len(columns))
    energies = search.problem.energies(points[None])[0].cpu().double().numpy()
    return energies.reshape(len(rows), len(columns))


def _axes(policy: EnergyPolicy, high: float) -> list[list[tuple[Value, str]]]:
    """Places and labels of the ticks, across and up."""
    box = policy.act_box
    low, top = ((box.centre + sign * box.limit * box.scale).tolist() for sign in (-1, 1))
    axes = [[(_at(v, low[d], top[d]), text) for v, text in _marks(low[d], top[d], 4)] for d in range(min(2, box.dim))]
    if box.dim == 1:
        axes.append([(60 + 860 * v / high, text) for v, text in _marks(0.0, high, 5)])
    return axes


def _marks(low: float, high: float, most: int) -> list[tuple[Value, str]]:
    values = ticks(low, high, most)
    return list(zip(values, tick_labels(values), strict=True))


def _curve(energies: Float[np.ndarray, " points"], high: float) -> str:
    xs = np.linspace(0, UNIT, len(energies))
    ys = UNIT - _height(energies, high)
    return "M" + "L".join(f"{x:.0f} {y:.0f}" for x, y in zip(xs, ys, strict=True))


def _height(energy: np.ndarray, high: float) -> np.ndarray:
    return 60 + 860 * np.minimum(energy / high, 1.08)


def _place(normalised: np.ndarray, policy: EnergyPolicy) -> np.ndarray:
    return (normalised / policy.act_box.limit + 1) / 2 * UNIT


def _at(value: Value, low: float, high: float) -> float:
    return round((value - low) / (high - low) * UNIT, 1)


def _mark(
    policy: EnergyPolicy, search: Frames, obs: Any, kind: str, place: Sequence[Value], radius: Value
) -> dict[str, Any]:
    """Where a place in raw actions is in the picture; what it leaves open is as in the chosen action."""
    box, row = policy.act_box, _units(policy, search, obs)
    here = list(place)[: len(row)]
    row[: len(here)] = row.new_tensor(here)
    seen = torch.as_tensor(np.asarray(obs)).to(policy.device, policy.obs_box.centre.dtype)
    normalised = policy.units.targets(row.unsqueeze(0), seen.unsqueeze(0))[0].cpu()
    x, *rest = _place(normalised[: len(here)].double().numpy(), policy).tolist()
    r = (radius / box.scale[:2].cpu().double() / box.limit / 2 * UNIT).tolist()
    result = {"kind": kind, "x": round(x, 1), "rx": round(r[0], 1)}
    return result | {"y": round(UNIT - rest[0], 1), "ry": round(r[1], 1)} if rest else result


def _units(policy: EnergyPolicy, search: Frames, obs: Any) -> Float[Tensor, " act"]:
    """The chosen action in the user's units."""
    return policy.actions(search.action[None, None], obs)[0, 0].clone()


# ---------------------------------------------------------------------------------------------- the episodes


def episodes_of(policy: EnergyPolicy, task: Task, most: int) -> dict[str, Any] | None:
    """What the task shows of held-out episodes, with the number of candidates per action (0: the way to act has no such
    number); None where it shows nothing. A search of many steps gets fewer than `most` candidates."""
    generator = torch.Generator(policy.device).manual_seed(TEST_SEED)
    effort = _effort(policy, most)
    scene = task.scene(Runner(policy, generator=generator, **effort), EPISODES)
    if scene is None:
        return None
    missing = [key for key in SCENE_KEYS if key not in scene]
    if missing:
        raise ValueError(f"the scene of {task.name} lacks {', '.join(missing)}")
    return {**scene, "candidates": 0, **effort}


def film_of(policy: EnergyPolicy, task: Task, most: int) -> dict[str, Any]:
    """The first held-out episode of a task without a scene, as its environment draws it: pictures for an animation, at
    most `PICTURES`, and which of them stand in a strip. A ValueError where the environment gives no pictures."""
    played = evaluate(policy, task, episodes=1, film=(0,), latency_calls=0, **_effort(policy, most))
    frames = played.frames[0]
    steps = np.unique(np.linspace(0, len(frames) - 1, min(PICTURES, len(frames))).round().astype(int)).tolist()
    shrink = max(1, math.ceil(max(frames[0].shape[:2]) / PICTURE_SIDE))
    small = [_smaller(frames[step], shrink) for step in steps]
    strip = np.unique(np.linspace(0, len(steps) - 1, min(STRIP, len(steps))).round().astype(int)).tolist()
    row = played.rows[0]
    result = "" if row.get("success") is None else (", a success" if row["success"] else ", no success")
    metric = f"{task.metric.replace('_', ' ')} {number(played.score(task.metric))}"
    caption = (
        "The first held-out episode of the best checkpoint, as its environment draws it: "
        f"{row['length']} steps{result}, {metric}."
    )
    return {"frames": [picture_uri(each) for each in small], "at": steps, "strip": strip, "caption": caption}


def _smaller(frame: np.ndarray, times: int) -> np.ndarray:
    """The mean of squares of `times` × `times` pixels; what is left at the edges is cut off."""
    height, width = (side // times for side in frame.shape[:2])
    blocks = frame[: height * times, : width * times].reshape(height, times, width, times, 3)
    return blocks.mean((1, 3)).round().astype(np.uint8)


def _effort(policy: EnergyPolicy, most: int) -> dict[str, Any]:
    """Candidates for a roll-out that has to end soon; none where the way to act has no such number."""
    own = getattr(policy.acting, "candidates", None)
    return {} if own is None else {"candidates": min(own, most, max(8, EFFORT // _search_steps(policy)))}


def _search_steps(policy: EnergyPolicy) -> int:
    """Steps of one search; 1 where the way to act does not show them."""
    if not hasattr(policy.acting, "states"):
        return 1
    with torch.no_grad():
        problem = policy.problem(policy.units.middle, candidates=1)
        return max(1, sum(1 for _ in policy.acting.states(problem)) - 1)


def moments_of_scene(policy: EnergyPolicy, scene: dict[str, Any]) -> list[Moment]:
    """The moments that a task chose; before an episode's first observation, that one is repeated."""
    moments = []
    for moment in scene["moments"]:
        seen = np.asarray(moment["obs"], np.float64)
        window = np.concatenate([seen[:1].repeat(policy.history, 0), seen])[-policy.history :]
        moments.append(Moment(moment["title"], window.ravel(), [tuple(mark) for mark in moment["marks"]]))
    return moments


def moments_of_data(policy: EnergyPolicy, run: Run) -> list[Moment]:
    """Four validation pairs, spread over the set, with the demonstrated action; without the data, the middle of the
    observations."""
    if run.material is None:
        return [Moment("Middle of the observations (the data are not at hand)", policy.units.middle.cpu().numpy())]
    windows = run.material.validation.windows(policy.history, policy.horizon)
    rows = np.unique(np.linspace(0, len(windows) - 1, 6).round().astype(int)[1:-1])
    obs, actions = windows[rows]
    pairs = zip(rows.tolist(), obs, actions, strict=True)
    return [Moment(f"Validation pair {i:,}", x, [("demonstrated", y.tolist(), 0.0)]) for i, x, y in pairs]
