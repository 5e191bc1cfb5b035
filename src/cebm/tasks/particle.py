"""The N-D particle task of Implicit Behavior Cloning (Florence et al. 2022): two goals, one after the other.

The dynamics, the success rule and the expert exist once, batched over episodes; the Gymnasium environment is
a batch of one. Episode `i` of a seed is a pure function of `(seed, i)`, whatever else is in its batch.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import gymnasium
import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int64, UInt8
from numpy.typing import ArrayLike

from cebm.demonstrations import Demonstrations
from cebm.tasks.base import Actor, Handle, RollOut, Sketch, Task, Value, check_episodes, check_max_steps

ENV_ID = "cebm/Particle-v0"
_CLUSTER_SPREAD = 0.05
"""Standard deviation of goals around their place."""
_CLUSTER_MARGIN = 0.15
"""Distance of the places from the walls."""


@dataclass(frozen=True)
class ParticleTask(Task):
    """The settings of the task; the environment, the expert and the demonstrations' header all read them.

    A control step holds the set-point `a` for `inner_steps` explicit Euler steps of
    `u = position_gain (a - x) - velocity_gain v`, `x' = x + dt v`, `v' = v + dt u`.
    """

    dim: int = 2
    """Dimensions of the space, 1 or more."""
    steps: int = 50
    """Control steps in an episode."""
    inner_steps: int = 10
    """Steps of the dynamics in a control step."""
    dt: float = 0.005
    """Seconds in a step of the dynamics."""
    position_gain: float = 10.0
    """Pull towards the set-point."""
    velocity_gain: float = 5.0
    """Damping."""
    goal_distance: float = 0.05
    """A goal counts as reached within this distance."""
    hide_velocity: bool = False
    """Leave the velocity out of the observation."""
    random_order: bool = False
    """The expert visits the goals in a random order; an episode may then end at either goal."""
    switch_distance: float = 0.01
    """The expert leaves its first goal once it came this near."""
    wait: int = 0
    """Control steps for which the expert stays at its first goal (allow for them in `steps`)."""
    goal_clusters: int = 0
    """Goals lie around this many places, which are the same in all episodes; 0: anywhere. The expert acts at goals, so
    that the marginal p(y) of its actions is then far from uniform."""

    def __post_init__(self) -> None:
        # Plain numbers, whatever came in: the settings are written as JSON.
        for name, least in {"dim": 1, "steps": 1, "inner_steps": 1, "wait": 0, "goal_clusters": 0}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise ValueError(f"ParticleTask: {name} is {value!r}, expected an integer of {least} or more")
            object.__setattr__(self, name, int(value))
        for name in ("dt", "position_gain", "velocity_gain", "goal_distance", "switch_distance"):
            value = getattr(self, name)
            number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and value > 0):
                raise ValueError(f"ParticleTask: {name} is {value!r}, expected a positive number")
            object.__setattr__(self, name, float(value))
        for name in ("hide_velocity", "random_order"):
            value = getattr(self, name)
            if not isinstance(value, bool | np.bool_):
                raise ValueError(f"ParticleTask: {name} is {value!r}, expected True or False")
            object.__setattr__(self, name, bool(value))
        if np.abs(np.linalg.eigvals(self._transition())).max() >= 1:
            raise ValueError(
                f"ParticleTask: the particle is unstable with position_gain {self.position_gain}, "
                f"velocity_gain {self.velocity_gain} and dt {self.dt}"
            )

    @property
    def name(self) -> str:
        return f"{self.dim}-D particle task"

    @property
    def metric(self) -> str:
        return "success"

    @property
    def limits(self) -> tuple[Float64[np.ndarray, " act"], Float64[np.ndarray, " act"]]:
        return np.zeros(self.act_dim), np.ones(self.act_dim)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.obs_dim, self.act_dim

    def roll_out(
        self, actor: Actor, episodes: int, seed: int, max_steps: int | None = None, film: Collection[int] = ()
    ) -> RollOut:
        """An episode that `max_steps` cuts short is no success."""
        check_max_steps(max_steps)
        count = check_episodes(episodes)
        env = BatchedParticle(self)
        obs = env.reset(seed, count)
        actor.reset()
        paths = {index: [env.position[index]] for index in film}
        frames = {index: [self._frame(env, index, path, None)] for index, path in paths.items()}
        while not env.done and (max_steps is None or env.step_count < max_steps):
            actions = actor.act(obs)
            obs = env.step(actions)
            for index, path in paths.items():
                path.append(env.position[index])
                frames[index].append(self._frame(env, index, path, np.clip(actions[index], 0, 1)))
        outcome = env.outcome()
        rows: list[dict[str, Value]] = [
            {
                "episode": i,
                "success": bool(outcome.success[i]),
                "length": env.step_count,
                "min_distance_first": float(outcome.min_distance_first[i]),
                "min_distance_second": float(outcome.min_distance_second[i]),
                "final_distance": float(outcome.final_distance[i]),
            }
            for i in range(count)
        ]
        return RollOut(rows, obs, frames)

    def _frame(
        self, env: "BatchedParticle", index: int, path: list[np.ndarray], action: np.ndarray | None
    ) -> UInt8[np.ndarray, "height width 3"]:
        return _draw(self, env.first_goal[index], env.second_goal[index], path, action)

    def demonstrations(self, episodes: int, seed: int) -> Demonstrations:
        return collect_particle(self, check_episodes(episodes), seed)

    def scene(self, actor: Actor, episodes: int) -> dict[str, Any]:
        from cebm.tasks.particle_scene import particle_scene

        return particle_scene(self, actor, check_episodes(episodes))

    @property
    def sketch(self) -> Sketch | None:
        """Agent and goals in the first two dimensions; none in one dimension, which has no plane."""
        if self.dim < 2:
            return None
        goals = self.dim * (1 if self.hide_velocity else 2)
        first, second = ((start, start + 1) for start in (goals, goals + self.dim))
        handles = (
            Handle("goal 1", (first,), self.goal_distance),
            Handle("goal 2", (second,), self.goal_distance),
            Handle("agent", ((0, 1),)),
        )
        return Sketch((0.0, 0.0), (1.0, 1.0), handles, places=True)

    @property
    def obs_dim(self) -> int:
        return (3 if self.hide_velocity else 4) * self.dim

    @property
    def act_dim(self) -> int:
        return self.dim

    def _transition(self) -> Float64[np.ndarray, "2 2"]:
        """The matrix of one step of the dynamics of `(x - a, v)` in one dimension."""
        return np.array(
            [[1.0, self.dt], [-self.position_gain * self.dt, 1.0 - self.velocity_gain * self.dt]], np.float64
        )

    def reach(self) -> tuple[float, float]:
        """The largest `|x - ½|` and `|v|` in a dimension that any set-points in [0, 1] lead to.

        With `A` the matrix of a control step, `s_t = A^t s_0 + Σ_k A^k (I - A) (a, 0)` about the centre ½, so
        the bound is half the 1-norm of the impulse response, plus half the response to the start.
        """
        control = np.linalg.matrix_power(self._transition(), self.inner_steps)
        response = np.array([1.0, 0.0])
        driven = np.zeros(2)
        bound = np.abs(response)
        for _ in range(self.steps):
            after = control @ response
            driven += np.abs(response - after)
            response = after
            bound = np.maximum(bound, driven + np.abs(response))
        return float(bound[0]) / 2, float(bound[1]) / 2


@dataclass(frozen=True)
class ParticleOutcome:
    """How episodes stand; one value per episode. Distances are taken at control steps, the start included."""

    success: Bool[np.ndarray, "episodes"]
    """Reached both goals and ended at the second (with `random_order`: at either). False until the end."""
    min_distance_first: Float64[np.ndarray, "episodes"]
    min_distance_second: Float64[np.ndarray, "episodes"]
    final_distance: Float64[np.ndarray, "episodes"]
    """To the second goal (with `random_order`: to the nearer goal), now."""


class BatchedParticle:
    """Many episodes at once, in float64; observations are float32, as demonstrations and policies have them.

    >>> env = BatchedParticle(ParticleTask(dim=2))
    >>> obs = env.reset(seed=0, episodes=100)
    >>> while not env.done:
    ...     obs = env.step(policy.act(obs))
    >>> env.outcome().success.mean()
    """

    def __init__(self, task: ParticleTask) -> None:
        self.task = task
        self.step_count = 0
        self.episodes = np.zeros(0, np.int64)

    @property
    def done(self) -> bool:
        """All episodes have the same length."""
        return self.step_count >= self.task.steps

    def reset(self, seed: int, episodes: int | Sequence[int] | np.ndarray) -> Float32[np.ndarray, "episodes obs"]:
        """Starts the first `episodes` episodes of `seed`, or those with the given indices."""
        self.episodes = _episode_indices(seed, episodes)
        starts = np.stack([_stream(seed, index).random((3, self.task.dim)) for index in self.episodes.tolist()])
        self.position, self.first_goal, self.second_goal = np.moveaxis(starts, 1, 0).copy()
        if self.task.goal_clusters:
            goals = np.stack([_clustered(self.task, seed, index) for index in self.episodes.tolist()])
            self.first_goal, self.second_goal = np.moveaxis(goals, 1, 0).copy()
        self.velocity = np.zeros_like(self.position)
        self.step_count = 0
        self._min_first = _distance(self.position, self.first_goal)
        self._min_second = _distance(self.position, self.second_goal)
        return self._observe()

    def step(self, actions: ArrayLike) -> Float32[np.ndarray, "episodes obs"]:
        """One control step towards the set-points `actions` [episodes, dim], clipped to [0, 1]."""
        if self.episodes.size == 0:
            raise RuntimeError("BatchedParticle: call reset before step")
        if self.done:
            raise RuntimeError(f"BatchedParticle: the episodes are over after {self.task.steps} steps; call reset")
        task = self.task
        target = np.clip(self._check(actions), 0.0, 1.0)
        position, velocity = self.position, self.velocity
        for _ in range(task.inner_steps):
            control = task.position_gain * (target - position) - task.velocity_gain * velocity
            position = position + task.dt * velocity
            velocity = velocity + task.dt * control
        self.position, self.velocity = position, velocity
        self.step_count += 1
        self._min_first = np.minimum(self._min_first, _distance(position, self.first_goal))
        self._min_second = np.minimum(self._min_second, _distance(position, self.second_goal))
        return self._observe()

    def outcome(self) -> ParticleOutcome:
        final = _distance(self.position, self.second_goal)
        if self.task.random_order:
            final = np.minimum(final, _distance(self.position, self.first_goal))
        near = self.task.goal_distance
        success = (self._min_first <= near) & (self._min_second <= near) & (final <= near) & self.done
        return ParticleOutcome(success, self._min_first.copy(), self._min_second.copy(), final)

    def _observe(self) -> Float32[np.ndarray, "episodes obs"]:
        seen = [self.position, self.velocity, self.first_goal, self.second_goal]
        if self.task.hide_velocity:
            del seen[1]
        return np.concatenate(seen, axis=1, dtype=np.float32, casting="same_kind")

    def _check(self, actions: ArrayLike) -> Float64[np.ndarray, "episodes dim"]:
        array = np.asarray(actions, np.float64)
        if array.shape != self.position.shape:
            raise ValueError(f"actions have shape {array.shape}, expected {self.position.shape}")
        if not np.isfinite(array).all():
            row, column = np.argwhere(~np.isfinite(array))[0]
            raise ValueError(f"episode {self.episodes[row]}: action column {column} is {array[row, column]}")
        return array


class ParticleExpert:
    """Set-point at one goal until within `switch_distance` of it, `wait` steps more, then at the other.

    The switch is latched, so the expert remembers one flag and one counter per episode; what a memoryless
    policy has instead is the velocity, which tells the way out from the way back. With `random_order` the
    goal to visit first is a coin flip of the episode, drawn from `(seed, index)`.
    """

    def __init__(self, task: ParticleTask, seed: int, episodes: int | Sequence[int] | np.ndarray) -> None:
        self.task = task
        indices = _episode_indices(seed, episodes)
        self.second_first = np.zeros(len(indices), np.bool_)
        if task.random_order:
            # A stream of its own: the starts are the same with and without the option.
            self.second_first[:] = [_stream(seed, index, 1).random() < 0.5 for index in indices.tolist()]
        self._reached = np.zeros(len(indices), np.bool_)
        self._waited = np.zeros(len(indices), np.int64)

    def act(self, obs: Float[np.ndarray, "episodes obs"]) -> Float32[np.ndarray, "episodes act"]:
        """The set-points for the next control step; call it once per step."""
        expected = (len(self._reached), self.task.obs_dim)
        if obs.shape != expected:
            raise ValueError(f"observations have shape {obs.shape}, expected {expected}")
        dim = self.task.dim
        position, first, second = obs[:, :dim], obs[:, -2 * dim : -dim], obs[:, -dim:]
        flipped = self.second_first[:, None]
        goal, other = np.where(flipped, second, first), np.where(flipped, first, second)
        self._reached |= _distance(position.astype(np.float64), goal) <= self.task.switch_distance
        leaves = self._reached & (self._waited >= self.task.wait)
        self._waited += self._reached
        return np.where(leaves[:, None], other, goal).astype(np.float32)


def collect_particle(task: ParticleTask, episodes: int, seed: int) -> Demonstrations:
    """Demonstrations of the expert in the first `episodes` episodes of `seed`.

    The header holds what rebuilds the task (`cebm.tasks.task_of` reads it), and in how many episodes the expert
    succeeded.
    """
    env, expert = BatchedParticle(task), ParticleExpert(task, seed, episodes)
    seen = np.empty((episodes, task.steps, task.obs_dim), np.float32)
    done = np.empty((episodes, task.steps, task.act_dim), np.float32)
    obs = env.reset(seed, episodes)
    for step in range(task.steps):
        seen[:, step] = obs
        done[:, step] = expert.act(obs)
        obs = env.step(done[:, step])
    return Demonstrations.from_arrays(
        seen.reshape(-1, task.obs_dim),
        done.reshape(-1, task.act_dim),
        np.arange(1, episodes + 1) * task.steps,
        metadata={
            "env": ENV_ID,
            "task": asdict(task),
            "seed": int(seed),
            "expert_successes": int(env.outcome().success.sum()),
        },
    )


class ParticleEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """One episode at a time of `ParticleTask`; registered as `cebm/Particle-v0`.

    `reset(seed=s)` starts episode 0 of seed `s` and each further `reset()` the next one, the same episodes as
    `BatchedParticle.reset(s, n)` has; `reset(options={"episode": i})` jumps. The reward is 1 at the end of a
    successful episode, otherwise 0. Every episode is truncated after `task.steps` steps.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 (as in gymnasium.Env)

    def __init__(self, task: ParticleTask | None = None, *, render_mode: str | None = None, **settings: Any) -> None:
        """`settings` are fields of `ParticleTask`, so that `gymnasium.make(ENV_ID, dim=16)` works."""
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode is {render_mode!r}, expected None or 'rgb_array'")
        self.task = replace(task or ParticleTask(), **settings)
        self.render_mode = render_mode
        self._batch = BatchedParticle(self.task)
        self._seed: int | None = None
        self._episode = -1
        self._path: list[np.ndarray] = []
        self._action: np.ndarray | None = None
        dim = self.task.dim
        far, fast = self.task.reach()
        # Room for the rounding to float32.
        low, high = np.zeros((4, dim)), np.ones((4, dim))
        low[0], high[0] = 0.5 - far - 1e-6, 0.5 + far + 1e-6
        low[1], high[1] = -fast - 1e-6, fast + 1e-6
        rows = [0, 2, 3] if self.task.hide_velocity else [0, 1, 2, 3]
        self.observation_space = gymnasium.spaces.Box(
            low[rows].ravel().astype(np.float32), high[rows].ravel().astype(np.float32), dtype=np.float32
        )
        self.action_space = gymnasium.spaces.Box(0.0, 1.0, (dim,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        unknown = set(options or {}) - {"episode"}
        if unknown:
            raise ValueError(f"unknown reset options {sorted(unknown)}, expected 'episode'")
        if seed is not None:
            self._seed, self._episode = seed, -1
        elif self._seed is None:
            self._seed = int(self.np_random.integers(2**31))
        self._episode = int((options or {}).get("episode", self._episode + 1))
        obs = self._batch.reset(self._seed, [self._episode])
        self._path = [self._batch.position[0]]
        self._action = None
        return obs[0], self._info()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs = self._batch.step(np.asarray(action)[None])
        self._path.append(self._batch.position[0])
        self._action = np.clip(np.asarray(action, np.float64), 0.0, 1.0)
        info = self._info()
        return obs[0], float(info["success"]), False, self._batch.done, info

    def render(self) -> UInt8[np.ndarray, "height width 3"] | None:
        """The first two dimensions, [0, 1] with a margin: goals with their radius, path, set-point, agent."""
        if self.render_mode is None:
            gymnasium.logger.warn('render needs an environment made with render_mode="rgb_array"')
            return None
        if not self._path:
            raise gymnasium.error.ResetNeeded("call reset before render")
        return _draw(self.task, self._batch.first_goal[0], self._batch.second_goal[0], self._path, self._action)

    def _info(self) -> dict[str, Any]:
        outcome = self._batch.outcome()
        return {
            "success": bool(outcome.success[0]),
            "min_distance_first": float(outcome.min_distance_first[0]),
            "min_distance_second": float(outcome.min_distance_second[0]),
            "final_distance": float(outcome.final_distance[0]),
            "seed": self._seed,
            "episode": self._episode,
        }


def _distance(
    a: Float[np.ndarray, "episodes dim"], b: Float[np.ndarray, "episodes dim"]
) -> Float64[np.ndarray, "episodes"]:
    return np.sqrt(np.square(a - b).sum(axis=1))


def _episode_indices(seed: int, episodes: int | Sequence[int] | np.ndarray) -> Int64[np.ndarray, "episodes"]:
    if seed < 0:
        raise ValueError(f"seed is {seed}, expected 0 or more")
    indices = np.arange(episodes) if isinstance(episodes, int | np.integer) else np.asarray(episodes)
    if indices.ndim != 1 or indices.size == 0 or indices.dtype.kind not in "iu" or indices.min() < 0:
        raise ValueError(f"episodes is {episodes!r}, expected a positive number or indices of 0 or more")
    return indices.astype(np.int64)


def cluster_places(task: ParticleTask) -> Float64[np.ndarray, "clusters dim"]:
    """Where the goals of a task with clusters lie: places that its settings alone decide."""
    places = _stream(task.goal_clusters, task.dim, 3).random((task.goal_clusters, task.dim))
    return _CLUSTER_MARGIN + (1 - 2 * _CLUSTER_MARGIN) * places


def _clustered(task: ParticleTask, seed: int, index: int) -> Float64[np.ndarray, "2 dim"]:
    """The two goals of an episode: each near a place of its own choice, in the unit cube. From a stream of their own:
    the agent's start is that of the task without clusters."""
    stream = _stream(seed, index, 2)
    places = cluster_places(task)[stream.integers(task.goal_clusters, size=2)]
    return np.clip(places + _CLUSTER_SPREAD * stream.standard_normal(places.shape), 0.0, 1.0)


def _stream(seed: int, *key: int) -> np.random.Generator:
    """Independent for each key, as `SeedSequence.spawn` makes them."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


# Okabe and Ito's palette, which colour-blind readers tell apart.
_FIRST, _SECOND, _AGENT = (230, 159, 0), (0, 114, 178), (40, 40, 40)
_PAPER, _FRAME, _TRACK = 255, 232, (150, 150, 150)
_PIXELS, _EDGE = 256, 20  # the picture and the margin around the unit square
_UNIT = _PIXELS - 2 * _EDGE


def _draw(
    task: ParticleTask,
    first_goal: Float64[np.ndarray, "dim"],
    second_goal: Float64[np.ndarray, "dim"],
    path: list[Float64[np.ndarray, "dim"]],
    action: Float[np.ndarray, "dim"] | None,
) -> UInt8[np.ndarray, "height width 3"]:
    """A frame. The first goal is one ring, the second two, so that the order shows without colour."""
    image = np.full((_PIXELS, _PIXELS, 3), float(_FRAME))
    image[_EDGE:-_EDGE, _EDGE:-_EDGE] = _PAPER
    radius = task.goal_distance * _UNIT
    for goal, colour in ((first_goal, _FIRST), (second_goal, _SECOND)):
        _paint(image, goal, 0.0, radius, colour, opacity=0.25)
        _paint(image, goal, radius - 2, radius, colour)
    _paint(image, second_goal, radius + 3, radius + 5, _SECOND)
    for point in path:
        _paint(image, point, 0.0, 1.4, _TRACK)
    if action is not None:
        _paint(image, action, 5.5, 7.0, _AGENT)
    _paint(image, path[-1], 0.0, 3.6, _AGENT)
    return image.round().astype(np.uint8)


def _paint(
    image: Float64[np.ndarray, "height width 3"],
    point: Float64[np.ndarray, "dim"],
    inner: float,
    outer: float,
    colour: tuple[int, int, int],
    opacity: float = 1.0,
) -> None:
    """Blends in a disc or ring about a point of the unit square; radii in pixels, edges one pixel wide."""
    column = _EDGE + _UNIT * point[0]
    row = _EDGE + _UNIT * (1 - point[1] if len(point) > 1 else 0.5)
    top, left = (max(0, math.floor(centre - outer - 1)) for centre in (row, column))
    bottom, right = (max(0, math.ceil(centre + outer + 1)) for centre in (row, column))
    window = image[top:bottom, left:right]
    rows, columns = np.ogrid[: window.shape[0], : window.shape[1]]
    distance = np.hypot(rows + (top + 0.5 - row), columns + (left + 0.5 - column))
    cover = np.clip(outer - distance + 0.5, 0.0, 1.0)
    if inner > 0:
        cover *= np.clip(distance - inner + 0.5, 0.0, 1.0)
    alpha = opacity * cover[..., None]
    window[:] = (1 - alpha) * window + alpha * np.array(colour)
