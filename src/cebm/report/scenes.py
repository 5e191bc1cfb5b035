"""Pictures of a policy at work, as plain data for the page's modules: the studio's landscapes and searches at some
moments, and the episodes that the task shows."""

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8

from cebm.charts import BLACK, DASHED, DOTTED, GREEN, ORANGE, Chart, Series, number
from cebm.evaluation import evaluate
from cebm.policy import EnergyPolicy
from cebm.report.records import Run
from cebm.runner import Runner
from cebm.studio.drawn import Mark, drawn_landscape, drawn_moves, packed
from cebm.studio.landscape import Landscape, landscape
from cebm.studio.search import Moves, search
from cebm.tasks import TEST_SEED, Task

GRID, DOTS, FRAMES = 72, 80, 26
"""Points along a side of a landscape, candidates and frames that are drawn of a search, at most."""
LEVEL_GRID, LEVEL_FRAMES = 56, 9
"""The same where the candidates fall through noise levels: each frame then has a landscape of its own."""
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
    marks: Sequence[Mark] = ()
    """What to mark."""


# ---------------------------------------------------------------------------------------------- the landscape


def landscapes(policy: EnergyPolicy, moments: Sequence[Moment]) -> dict[str, Any]:
    """A panel per moment: the studio's landscape over the first coordinates, and the policy's own search on it.
    Energies are counted from each panel's lowest: what an observation adds to all actions alike says nothing about
    them."""
    found = [_looked(policy, moment) for moment in moments]
    lows = [_lowest(ground.energies, moves.energies) for ground, moves in found]
    high = _highest([(ground, low) for (ground, _), low in zip(found, lows, strict=True)])
    steps = found[0][1].steps
    if any(moves.steps != steps for _, moves in found):  # a search may end early: then its end alone
        found = [(ground, _end_of(moves)) for ground, moves in found]
        steps = [0]
    candidates = max(moves.states.shape[1] for _, moves in found)
    panels = [
        {
            "title": moment.title,
            "picture": drawn_landscape(policy, ground, moment.obs, _names(ground), moment.marks, low),
            "moves": drawn_moves(moves, ground, DOTS, low, histograms=False),
        }
        for moment, (ground, moves), low in zip(moments, found, lows, strict=True)
    ]
    levels = found[0][1].levels if len(steps) > 1 else None
    spans = None
    if levels is not None:
        spans = _fall(policy, moments, [moves for _, moves in found], panels, levels)
    return {
        "panels": panels,
        "flat": policy.act_box.dim == 1,
        "span": [0.0, high],
        "levels": levels,
        "spans": spans,
        "steps": steps,
        "moves": len(steps) > 1,
        "candidates": candidates,
        "explicit": candidates == 1 and policy.energy.explicit,
        "lowest": all(moves.energies[-1, moves.chosen] <= moves.energies[-1].min() for _, moves in found),
        "act_dim": policy.act_box.dim,
    }


def _looked(policy: EnergyPolicy, moment: Moment) -> tuple[Landscape, Moves]:
    moves = search(policy, moment.obs, frames=FRAMES)
    if moves.levels is None:
        return landscape(policy, moment.obs, points=GRID, held=moves.states[-1, moves.chosen]), moves
    if len(moves.steps) > LEVEL_FRAMES:
        moves = search(policy, moment.obs, frames=LEVEL_FRAMES)
    return _ground(policy, moment, moves, -1), moves


def _ground(policy: EnergyPolicy, moment: Moment, moves: Moves, frame: int) -> Landscape:
    """The energy at the noise level of a frame, around the action that is chosen in the end."""
    if moves.levels is None:
        raise ValueError("moves: this search has no noise levels")
    held = moves.states[-1, moves.chosen]
    return landscape(policy, moment.obs, points=LEVEL_GRID, level=moves.levels[frame], held=held)


def _fall(
    policy: EnergyPolicy,
    moments: Sequence[Moment],
    moves: Sequence[Moves],
    panels: list[dict[str, Any]],
    levels: Sequence[float],
) -> list[list[float]]:
    """Gives each panel the energies of every frame at its own level, as `grounds`, each counted from its own lowest, as
    the candidates' energies then are; returns what the colours of each frame span."""
    counted = []
    for panel, moment, way in zip(panels, moments, moves, strict=True):
        grounds = [_ground(policy, moment, way, frame) for frame in range(len(levels))]
        lows = [_lowest(ground.energies, at) for ground, at in zip(grounds, way.energies, strict=True)]
        panel["grounds"] = [packed(ground.energies - low) for ground, low in zip(grounds, lows, strict=True)]
        own = replace(way, energies=way.energies - np.array(lows)[:, None])
        panel["moves"] = drawn_moves(own, grounds[-1], DOTS, histograms=False)
        counted.append(list(zip(grounds, lows, strict=True)))
    return [[0.0, _highest(frame)] for frame in zip(*counted, strict=True)]


def _lowest(*energies: np.ndarray) -> float:
    found = np.concatenate([each.ravel() for each in energies])
    return float(found[np.isfinite(found)].min()) if np.isfinite(found).any() else 0.0


def _highest(grounds: Sequence[tuple[Landscape, float]]) -> float:
    """One scale for all panels. The corners may tower over the rest: the top hundredth shares the brightest colour."""
    surfaces = [ground.energies[np.isfinite(ground.energies)] - low for ground, low in grounds]
    return max((float(np.quantile(each, 0.99)) for each in surfaces if len(each)), default=0.0) or 1.0


def _end_of(moves: Moves) -> Moves:
    return Moves(
        [0], moves.states[-1:], moves.energies[-1:], moves.gradients[-1:], moves.changed[:1], moves.chosen, moves.action
    )


def _names(ground: Landscape) -> list[str]:
    return [f"action {axis}" for axis in ground.axes]


# ---------------------------------------------------------------------------------------------- the episodes


def episodes_of(policy: EnergyPolicy, task: Task, most: int, execute: int | None = None) -> dict[str, Any] | None:
    """What the task shows of held-out episodes, with the number of candidates per action (0: the way to act has no such
    number); None where it shows nothing. A search of many steps gets fewer than `most` candidates."""
    generator = torch.Generator(policy.device).manual_seed(TEST_SEED)
    effort = _effort(policy, most)
    scene = task.scene(Runner(policy, generator=generator, execute=execute, **effort), EPISODES)
    if scene is None:
        return None
    missing = [key for key in SCENE_KEYS if key not in scene]
    if missing:
        raise ValueError(f"the scene of {task.name} lacks {', '.join(missing)}")
    found = {**scene, "candidates": 0, **effort}
    found["episodes"] = [{**episode, "chart": distances(scene, episode)} for episode in scene["episodes"]]
    return found


def distances(scene: dict[str, Any], episode: dict[str, Any]) -> str | None:
    """The chart of an episode's distances to its goals over time; None where it has none."""
    if "distances" not in episode:
        return None
    steps = list(range(scene["steps"] + 1))
    series = []
    for goal, colour in enumerate((ORANGE, GREEN)):
        expert, own = ([at[goal] for at in episode[name]] for name in ("expert_distances", "distances"))
        series.append(Series(f"goal {goal + 1}, expert", steps, expert, colour, DASHED))
        series.append(Series(f"goal {goal + 1}", steps, own, colour))
    radius = Series(f"reached, {scene['radius']:g}", [0, scene["steps"]], [scene["radius"]] * 2, BLACK, DOTTED)
    chart = Chart(
        "Distance to the goals", [*series, radius], x_label="control step", limits=(0.0, None), size=(370, 330)
    )
    return str(chart.__html__())


def film_of(policy: EnergyPolicy, task: Task, most: int, execute: int | None = None) -> dict[str, Any]:
    """The first held-out episode of a task without a scene, as its environment draws it: pictures for an animation, at
    most `PICTURES`, and which of them stand in a strip. A ValueError where the environment gives no pictures."""
    played = evaluate(policy, task, episodes=1, film=(0,), latency_calls=0, execute=execute, **_effort(policy, most))
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


def picture_uri(pixels: UInt8[np.ndarray, "rows columns 3"]) -> str:
    """A PNG in red, green and blue (RFC 2083), as a data URI."""
    rows, columns = pixels.shape[:2]
    flat = np.ascontiguousarray(pixels).reshape(rows, -1)
    scanlines = np.concatenate([np.zeros((rows, 1), np.uint8), flat], 1).tobytes()  # filter 0 on every line
    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(scanlines, 9)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


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
