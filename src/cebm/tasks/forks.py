"""Forks: a point passes three rows of obstacles; 2, 3 and 4 gaps make 24 ways, all of them equally good.

A test of multimodality: a policy that takes the mean of the ways runs into an obstacle, and one that always takes the
same way has no entropy. As in D3IL (Jia et al. 2024), the entropy of the ways that are taken from one and the same
start is measured beside the success. The dynamics exist once, batched over episodes; the Gymnasium environment is a
batch of one.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int64, UInt8
from numpy.typing import ArrayLike

from cebm.demonstrations import Demonstrations
from cebm.settings import to_json
from cebm.tasks.base import TEST_SEED, Actor, Handle, RollOut, Sketch, Task, Value, check_episodes, check_max_steps

ENV_ID = "cebm/Forks-v0"
START = (0.0, 0.5)
"""Where every episode begins."""
FINISH = 0.97
"""Who gets beyond this x has passed."""
APPROACH = 0.05
"""The expert passes a row straight ahead, from this far before it to this far behind it."""


@dataclass(frozen=True)
class Forks(Task):
    """The settings of the task. The point lives in the unit square and starts at (0, ½); an action in [-1, 1]² moves it
    by `speed` times itself. A row of obstacles is a line across the square with gaps; touching an obstacle ends the
    episode, and so does x > 0.97, which is the success.

    A row has `success`, `length`, `passed` (rows of obstacles behind the point) and `way`, the gaps taken, such as
    "2-1-4", or None. Over all episodes there is `entropy`: that of the ways of the episodes that succeeded,
    -Σ p log p, over the logarithm of the number of ways (`summarise`).
    """

    gaps: tuple[int, ...] = (2, 3, 4)
    """Gaps in each row, from the start on; the rows are at equal distances."""
    gap_width: float = 0.1
    """Width of a gap; the gaps of a row are at equal distances."""
    speed: float = 0.03
    """Largest move in a step, along each axis."""
    steps: int = 100
    """Step limit of an episode."""
    odds: tuple[tuple[float, ...], ...] | None = None
    """How often the expert takes each gap, row by row: ((0.9, 0.1), (1, 1, 1), (1, 1, 1, 1)), in any unit. None: each
    gap of a row equally often, so all ways equally often."""
    noise: float = 0.1
    """Standard deviation of what a gust adds to the expert's actions before they move the point. The expert corrects
    for it in its next step, so its demonstrations show how."""

    def __post_init__(self) -> None:
        if not self.gaps or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in self.gaps):
            raise ValueError(f"Forks: gaps is {self.gaps!r}, expected a number of gaps of at least 1 for each row")
        if not 0 < self.gap_width < 1 / max(self.gaps):
            raise ValueError(f"Forks: gap_width is {self.gap_width!r}, expected between 0 and 1/{max(self.gaps)}")
        if not 0 < self.speed <= 0.1:
            raise ValueError(f"Forks: speed is {self.speed!r}, expected above 0 and at most 0.1")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"Forks: steps is {self.steps!r}, expected a whole number of at least 1")
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"Forks: noise is {self.noise!r}, expected 0 or more")
        if self.odds is not None and tuple(map(len, self.odds)) != self.gaps:
            raise ValueError(f"Forks: odds are {self.odds!r}, expected one for each of the gaps {self.gaps}")
        for row in self.odds or ():
            if not all(0 <= odd < math.inf for odd in row) or not sum(row) > 0:
                raise ValueError(f"Forks: odds are {row!r} in a row, expected numbers of 0 or more, not all 0")

    @property
    def name(self) -> str:
        return f"Forks, {self.ways} ways"

    @property
    def metric(self) -> str:
        return "success"

    @property
    def limits(self) -> tuple[Float64[np.ndarray, "2"], Float64[np.ndarray, "2"]]:
        return -np.ones(2), np.ones(2)

    @property
    def sizes(self) -> tuple[int, int]:
        return 2, 2

    @property
    def ways(self) -> int:
        """How many there are."""
        return math.prod(self.gaps)

    @property
    def rows(self) -> Float64[np.ndarray, " rows"]:
        """The x of each row of obstacles."""
        return np.arange(1, len(self.gaps) + 1) / (len(self.gaps) + 1)

    def centres(self, row: int) -> Float64[np.ndarray, " gaps"]:
        """The y of the middle of each gap of a row."""
        return (np.arange(self.gaps[row]) + 0.5) / self.gaps[row]

    def obstacles(self) -> list[tuple[float, float, float, float]]:
        """x, y and x, y of the ends of each obstacle, for pictures."""
        found = []
        for row, x in enumerate(self.rows.tolist()):
            ends = (self.centres(row)[:, None] + np.array([-0.5, 0.5]) * self.gap_width).ravel()
            edges = [0.0, *ends.tolist(), 1.0]
            found += [(x, low, x, high) for low, high in zip(edges[::2], edges[1::2], strict=True)]
        return found

    def roll_out(
        self, actor: Actor, episodes: int, seed: int, max_steps: int | None = None, film: Collection[int] = ()
    ) -> RollOut:
        check_max_steps(max_steps)
        env = BatchedForks(self)
        obs = env.reset(seed, check_episodes(episodes))
        paths = {index: [env.position[index]] for index in film}
        actor.reset()
        while not env.done and (max_steps is None or env.step_count < max_steps):
            obs = env.step(actor.act(obs))
            for index, path in paths.items():
                path.append(env.position[index])
        rows = env.outcome()
        frames = {
            index: [_picture(self, path[: step + 1]) for step in range(env.length[index] + 1)]
            for index, path in paths.items()
        }
        return RollOut(rows, obs, frames)

    def summarise(self, rows: Sequence[dict[str, Value]]) -> dict[str, float]:
        """`entropy`: of the ways that were taken, over that of all ways taken equally often; 0 where none was."""
        ways = [row["way"] for row in rows if row.get("success")]
        return {"entropy": entropy_of(list(Counter(ways).values())) / math.log(self.ways) if self.ways > 1 else 1.0}

    def demonstrations(self, episodes: int, seed: int) -> Demonstrations:
        env, expert = BatchedForks(self), ForksExpert(self, seed, check_episodes(episodes))
        obs = env.reset(seed, episodes)
        seen: list[list[np.ndarray]] = [[] for _ in range(episodes)]
        done: list[list[np.ndarray]] = [[] for _ in range(episodes)]
        while not env.done:
            actions = expert.act(obs)
            for i in np.flatnonzero(env.running):
                seen[i].append(obs[i])
                done[i].append(actions[i])
            obs = env.step(actions + expert.gust())
        rows = env.outcome()
        return Demonstrations.from_episodes(
            [(np.stack(a), np.stack(b)) for a, b in zip(seen, done, strict=True)],
            metadata={
                "env": ENV_ID,
                "task": to_json(self),
                "seed": int(seed),
                "expert_successes": sum(bool(row["success"]) for row in rows),
                "expert_entropy": round(self.summarise(rows)["entropy"], 4),
            },
        )

    @property
    def sketch(self) -> Sketch:
        """The point among the obstacles."""
        return Sketch((0.0, 0.0), (1.0, 1.0), (Handle("point", ((0, 1),)),), tuple(self.obstacles()))

    def scene(self, actor: Actor, episodes: int) -> dict[str, Any]:
        return _scene(self, actor, check_episodes(episodes))


class BatchedForks:
    """Many episodes at once, in float64; observations are the point's x and y in float32. `seed` decides nothing but
    the names of the episodes: all begin at the same place, and the environment draws no random numbers."""

    def __init__(self, task: Forks) -> None:
        self.task = task
        self.step_count = 0
        self.position = np.zeros((0, 2))

    def reset(self, seed: int, episodes: int) -> Float32[np.ndarray, "episodes 2"]:
        if seed < 0:
            raise ValueError(f"seed is {seed}, expected 0 or more")
        self.position = np.tile(START, (episodes, 1))
        self.running, self.success = np.ones(episodes, np.bool_), np.zeros(episodes, np.bool_)
        self.length = np.zeros(episodes, np.int64)
        self.taken = np.full((episodes, len(self.task.gaps)), -1)
        self.step_count = 0
        return self.position.astype(np.float32)

    @property
    def done(self) -> bool:
        """Whether all episodes are over."""
        return self.step_count >= self.task.steps or not self.running.any()

    def step(self, actions: ArrayLike) -> Float32[np.ndarray, "episodes 2"]:
        """One step of all episodes that are not over; the others stay where they ended."""
        array = np.asarray(actions, np.float64)
        if array.shape != self.position.shape or not len(array):
            raise ValueError(f"actions have shape {array.shape}, expected {self.position.shape} after a reset")
        bad = self.running & ~np.isfinite(array).all(1)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise ValueError(f"episode {row}: the action is {array[row].tolist()}")
        moving = np.where(self.running[:, None], np.clip(array, -1, 1), 0.0)
        before = self.position
        after = np.clip(before + self.task.speed * moving, 0.0, 1.0)
        crashed = np.zeros(len(after), np.bool_)
        for row, x in enumerate(self.task.rows):
            crossed = (before[:, 0] < x) != (after[:, 0] < x)
            gap, free = self._gap(row, x, before, after)
            crashed |= crossed & ~free
            self.taken[:, row] = np.where(crossed & free, np.where(after[:, 0] >= x, gap, -1), self.taken[:, row])
        self.length += self.running
        self.position = after
        self.success |= self.running & ~crashed & (after[:, 0] > FINISH)
        self.running &= ~crashed & ~self.success
        self.step_count += 1
        return self.position.astype(np.float32)

    def _gap(
        self, row: int, x: float, before: Float64[np.ndarray, "episodes 2"], after: Float64[np.ndarray, "episodes 2"]
    ) -> tuple[Int64[np.ndarray, "episodes"], Bool[np.ndarray, "episodes"]]:
        """The gap that is nearest to where the move crosses the line at x, and whether it crosses within that gap."""
        across = after[:, 0] - before[:, 0]
        share = np.divide(x - before[:, 0], across, out=np.zeros_like(across), where=across != 0)
        y = before[:, 1] + share * (after[:, 1] - before[:, 1])
        away = np.abs(y[:, None] - self.task.centres(row))
        return away.argmin(1), away.min(1) < self.task.gap_width / 2

    def outcome(self) -> list[dict[str, Value]]:
        """One row for each episode."""
        found: list[dict[str, Value]] = []
        for i, taken in enumerate(self.taken):
            passed = bool(self.success[i])
            found.append(
                {
                    "episode": i,
                    "success": passed,
                    "length": int(self.length[i]),
                    "passed": int((taken >= 0).sum()),
                    "way": "-".join(str(gap + 1) for gap in taken) if passed else None,
                }
            )
        return found


class ForksExpert:
    """Heads for a gap of the next row, which it drew when its episode began, passes it straight ahead, and goes on.
    `(seed, i)` decides what it draws for episode `i`."""

    def __init__(self, task: Forks, seed: int, episodes: int) -> None:
        self.task = task
        self._random = [np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(i,))) for i in range(episodes)]
        self.goals = np.stack([self._goals(random) for random in self._random])
        self._next = np.zeros(episodes, np.int64)

    def _goals(self, random: np.random.Generator) -> Float64[np.ndarray, "goals 2"]:
        """Places to go through: before and behind each gap, somewhere in its middle half, and the end."""
        places: list[tuple[float, float]] = []
        for row, x in enumerate(self.task.rows.tolist()):
            odds = None if self.task.odds is None else np.array(self.task.odds[row]) / sum(self.task.odds[row])
            gap = int(random.choice(self.task.gaps[row], p=odds))
            y = float(self.task.centres(row)[gap] + self.task.gap_width * random.uniform(-0.25, 0.25))
            places += [(x - APPROACH, y), (x + APPROACH, y)]
        return np.array([*places, (1.0, places[-1][1])])

    def act(self, obs: Float[np.ndarray, "episodes 2"]) -> Float32[np.ndarray, "episodes 2"]:
        """A unit vector to the next place, shorter where that is nearer than a step; call it once per step."""
        if obs.shape != (len(self.goals), 2):
            raise ValueError(f"observations have shape {obs.shape}, expected {(len(self.goals), 2)}")
        last = self.goals.shape[1] - 1
        here, rows = obs.astype(np.float64), np.arange(len(obs))
        reached = np.hypot(*(self.goals[rows, self._next] - here).T) < self.task.speed / 2
        self._next = np.minimum(self._next + reached, last)
        way = (self.goals[rows, self._next] - here) / self.task.speed
        far = np.maximum(np.hypot(*way.T), 1.0)[:, None]
        return (way / far).astype(np.float32)

    def gust(self) -> Float64[np.ndarray, "episodes 2"]:
        """What disturbs the next actions; of no effect on what is recorded as demonstrated."""
        return self.task.noise * np.stack([random.standard_normal(2) for random in self._random])


class ForksEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """One episode at a time of `Forks`; registered as `cebm/Forks-v0`. The reward is 1 for a success, otherwise 0; the
    info has `success`, `passed` and `way`."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 (as in gymnasium.Env)

    def __init__(self, task: Forks | None = None, *, render_mode: str | None = None, **settings: Any) -> None:
        """`settings` are fields of `Forks`, so that `gymnasium.make(ENV_ID, speed=0.02)` works."""
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode is {render_mode!r}, expected None or 'rgb_array'")
        self.task, self.render_mode = replace(task or Forks(), **settings), render_mode
        self._batch = BatchedForks(self.task)
        self._path: list[np.ndarray] = []
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        obs = self._batch.reset(0, 1)
        self._path = [self._batch.position[0]]
        return obs[0], self._info()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, info = self._batch.step(np.asarray(action)[None]), self._info()
        self._path.append(self._batch.position[0])
        over = not bool(self._batch.running[0])
        return obs[0], float(info["success"]), over, self._batch.done and not over, info

    def render(self) -> UInt8[np.ndarray, "height width 3"] | None:
        """The square with its obstacles, the path so far and the point."""
        if self.render_mode is None:
            gymnasium.logger.warn('render needs an environment made with render_mode="rgb_array"')
            return None
        if not self._path:
            raise gymnasium.error.ResetNeeded("call reset before render")
        return _picture(self.task, self._path)

    def _info(self) -> dict[str, Any]:
        row = self._batch.outcome()[0]
        return {name: row[name] for name in ("success", "passed", "way")}


def entropy_of(counts: Sequence[int]) -> float:
    """-Σ p log p of shares p in nats; 0 without any count."""
    total = sum(counts)
    return sum(count / total * math.log(total / count) for count in counts if count) if total else 0.0


# ---------------------------------------------------------------------------------------------- pictures

_PIXELS, _EDGE = 256, 8


def _picture(task: Forks, path: Sequence[Float64[np.ndarray, "2"]]) -> UInt8[np.ndarray, "height width 3"]:
    image = np.full((_PIXELS, _PIXELS, 3), 255, np.uint8)
    side = _PIXELS - 2 * _EDGE

    def dot(point: Float64[np.ndarray, "2"], radius: int, colour: tuple[int, int, int]) -> None:
        column, row = round(_EDGE + side * float(point[0])), round(_EDGE + side * (1 - float(point[1])))
        window = image[row - radius : row + radius + 1, column - radius : column + radius + 1]
        rows, columns = np.ogrid[-radius : radius + 1, -radius : radius + 1]
        window[rows**2 + columns**2 <= radius**2] = colour

    for x, low, _, high in task.obstacles():
        column = round(_EDGE + side * x)
        rows = slice(round(_EDGE + side * (1 - high)), round(_EDGE + side * (1 - low)))
        image[rows, column - 2 : column + 2] = (110, 110, 110)
    for point in path:
        dot(point, 1, (150, 190, 220))
    dot(path[-1], 4, (0, 114, 178))
    return image


def _flights(
    task: Forks, act: Callable[[np.ndarray], Any], episodes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Value]]]:
    """The paths, the actions and the observations of held-out episodes, and the episodes' rows."""
    env = BatchedForks(task)
    obs = env.reset(TEST_SEED, episodes)
    paths, aims, seen = [env.position], [], []
    while env.step_count < task.steps:  # all paths have the same length: those that ended stay where they are
        seen.append(obs)
        actions = np.clip(np.asarray(act(obs), np.float64), -1, 1)
        aims.append(np.clip(env.position + task.speed * actions, 0, 1))
        obs = env.step(actions)
        paths.append(env.position)
    return np.stack(paths, 1), np.stack(aims, 1), np.stack(seen, 1), env.outcome()


def _scene(task: Forks, actor: Actor, episodes: int) -> dict[str, Any]:
    """Held-out episodes of the actor and of the expert; the keys are those of `Task.scene`."""
    actor.reset()
    paths, aims, seen, rows = _flights(task, actor.act, episodes)
    expert = ForksExpert(task, TEST_SEED, episodes)
    expert_paths, expert_aims, _, expert_rows = _flights(task, expert.act, episodes)
    shown = next((i for i, row in enumerate(rows) if row["success"]), 0)
    length = max(1, int(rows[shown]["length"] or 0))
    steps = sorted({0, length // 3, 2 * length // 3, length - 1})
    shares = task.summarise(rows)["entropy"], task.summarise(expert_rows)["entropy"]
    return {
        "episodes": [
            {
                "index": i,
                "success": bool(row["success"]),
                "remark": f"way {row['way']}" if row["success"] else f"ended after {row['passed']} rows",
                "goals": [],
                "policy": paths[i].round(4).tolist(),
                "expert": expert_paths[i].round(4).tolist(),
                "aims": aims[i].round(4).tolist(),
                "expert_aims": expert_aims[i].round(4).tolist(),
            }
            for i, row in enumerate(rows)
        ],
        "shown": shown,
        "steps": task.steps,
        "dim": 2,
        "radius": 0.0,
        "walls": task.obstacles(),
        "successes": sum(bool(row["success"]) for row in rows),
        "expert_successes": sum(bool(row["success"]) for row in expert_rows),
        "note": (
            f"Success: through all rows without touching an obstacle. Entropy of the ways in these few episodes: "
            f"{shares[0]:.2f}, the expert's {shares[1]:.2f} (1: all {task.ways} ways equally often)."
        ),
        "moments": [
            {"title": f"Step {step}", "step": step, "obs": seen[shown, : step + 1].tolist(), "marks": []}
            for step in steps
        ],
    }
