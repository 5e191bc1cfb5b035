"""Meta-World (Yu et al. 2019; the extra `metaworld`): a robot arm in 50 tasks, each with a scripted expert.

Beside the expert's own way there are two styles, so that demonstrations can be mixed: the hand first goes aside, to the
left or to the right, and then does what the expert does. The mean of both stands still.
"""

import warnings
from copy import copy
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, Literal, get_args

import gymnasium
import numpy as np
from jaxtyping import Float, Float32, Float64

from cebm.demonstrations import Demonstrations
from cebm.settings import to_json
from cebm.tasks.base import TaskError, check_episodes, check_max_steps
from cebm.tasks.gym import GymnasiumTask, episode_seed

Style = Literal["scripted", "left", "right", "mixed"]
ASIDE, NEAR = 0.12, 0.02
"""Metres: how far aside the two styles go first, and how near they must get."""
PATIENCE = 40
"""Steps after which they go on anyway: the arm may not reach as far."""
MOST_TRIES = 10
"""Episodes to try per demonstration before giving up: an expert fails now and then, in some tasks often."""
LONGEST = 500
"""Steps after which the simulator refuses to go on."""


@dataclass(frozen=True)
class MetaWorld(GymnasiumTask):
    """One of the 50 tasks, with 39 observations (the goal included) and 4 actions in [-1, 1]: three of the hand's
    motion, one of the gripper's effort. Goal and object stand elsewhere in every episode. `success`, Meta-World's own
    measure, ends the episode."""

    env: str
    """The task, such as push-v3."""
    style: Style = "scripted"
    """How the expert demonstrates: "scripted", as published; "left" or "right": the hand first goes aside; "mixed":
    left or right by the toss of a coin in each episode."""
    metric: str = "success"
    """The column that chooses a checkpoint."""
    max_steps: int | None = LONGEST
    """Step limit of an episode, at most 500."""
    at_once: ClassVar[int] = 50

    def __post_init__(self) -> None:
        if not isinstance(self.env, str) or not self.env:
            raise ValueError(f"MetaWorld: env is {self.env!r}, expected the name of a task, such as push-v3")
        if self.style not in get_args(Style):
            raise ValueError(f"MetaWorld: style is {self.style!r}, expected one of {', '.join(get_args(Style))}")
        check_max_steps(self.max_steps)
        if self.max_steps is None or self.max_steps > LONGEST:
            raise ValueError(f"MetaWorld: max_steps is {self.max_steps}, expected at most {LONGEST}")

    @property
    def name(self) -> str:
        return f"Meta-World {self.env}" + ("" if self.style == "scripted" else f", {self.style}")

    @property
    def sizes(self) -> tuple[int, int]:
        return 39, 4

    @property
    def limits(self) -> tuple[Float64[np.ndarray, " act"], Float64[np.ndarray, " act"]]:
        return -np.ones(4), np.ones(4)

    def make(self) -> "MetaWorldEnv":
        return MetaWorldEnv(self.env)

    def demonstrations(self, episodes: int, seed: int) -> Demonstrations:
        """Those of the first `episodes` episodes of `seed` in which the expert succeeds; how many it failed in between
        is in the header."""
        count = check_episodes(episodes)
        shown: list[tuple[np.ndarray, np.ndarray]] = []
        tries, sides = 0, []
        env = self.make()
        try:
            while len(shown) < count:
                if tries >= MOST_TRIES * count:
                    raise TaskError(f"{self.name}: the expert succeeded in {len(shown)} of {tries} episodes only")
                found = self._demonstration(env, episode_seed(seed, tries))
                tries += 1
                if found is not None:
                    sides.append(found[2])
                    shown.append(found[:2])
        finally:
            env.close()
        return Demonstrations.from_episodes(
            shown,
            metadata={
                "env": f"metaworld:{self.env}",
                "task": to_json(self),
                "seed": int(seed),
                "expert_failures": tries - count,
                "sides": sides,
            },
        )

    def _demonstration(self, env: "MetaWorldEnv", seed: int) -> tuple[np.ndarray, np.ndarray, int] | None:
        """Observations, actions and the side of the episode of `seed`; None where the expert fails."""
        obs, _ = env.reset(seed=seed)
        expert = MetaWorldExpert(self, obs, seed)
        seen, done = [], []
        for _ in range(self.max_steps or LONGEST):
            seen.append(obs)
            done.append(expert.act(obs))
            obs, _, _, _, info = env.step(done[-1])
            if info["success"]:
                return np.stack(seen), np.stack(done), expert.side
        return None


class MetaWorldExpert:
    """The scripted expert in a style, for one episode that begins with `obs`; `seed` tosses the coin of "mixed"."""

    def __init__(self, task: MetaWorld, obs: Float[np.ndarray, "39"], seed: int) -> None:
        self._scripted = _known(task.env, _package("metaworld.policies").ENV_POLICY_MAP)()
        coin = int(np.random.default_rng([seed, 1]).integers(2))
        self.side = {"scripted": 0, "left": -1, "right": 1, "mixed": 2 * coin - 1}[task.style]
        """-1 for left, 1 for right, 0 for neither."""
        self._aside = np.asarray(obs[:3], np.float64) + np.array([ASIDE * self.side, 0.0, 0.0])
        self._waited = 0 if self.side else PATIENCE

    def act(self, obs: Float[np.ndarray, "39"]) -> Float32[np.ndarray, "4"]:
        """The action of the next step; call it once per step."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an action beyond [-1, 1] is clipped
            action = np.clip(np.asarray(self._scripted.get_action(np.asarray(obs, np.float64)), np.float64), -1, 1)
        way = self._aside - obs[:3]
        if self._waited < PATIENCE and np.linalg.norm(way) > NEAR:
            self._waited += 1
            action[:3] = np.clip(10.0 * way, -1, 1)  # the gain of the scripted experts
        else:
            self._waited = PATIENCE
        return action.astype(np.float32)


class MetaWorldEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """A task of Meta-World whose goal is visible and whose objects stand where the seed puts them."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 80}  # noqa: RUF012 (as in gymnasium.Env)

    def __init__(self, env: str, *, render_mode: str | None = "rgb_array") -> None:
        self.render_mode = render_mode
        made = _known(env, _package("metaworld.env_dict").ALL_V3_ENVIRONMENTS)
        # The simulator has no public way to draw anew at each reset with the goal in sight; these are the flags that
        # its own goal-observable environments set. Its observation space, to which it clips, was made without a goal.
        self.simulator: Any = _compiled_once(made)(render_mode=render_mode, width=256, height=256)
        self.simulator._partially_observable = False
        self.simulator.__dict__.pop("sawyer_observation_space", None)
        self.simulator._freeze_rand_vec = False
        self.simulator.seeded_rand_vec = True
        self.simulator._set_task_called = True
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (39,), np.float64)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.simulator.seed(seed)
        obs, _ = self.simulator.reset()
        return np.asarray(obs, np.float64), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, reward, _, truncated, told = self.simulator.step(np.asarray(action, np.float32))
        success = bool(told["success"])
        return np.asarray(obs, np.float64), float(reward), success, bool(truncated), {"success": success}

    def render(self) -> Any:
        """A picture of 256 × 256 pixels; it needs OpenGL, without a screen MUJOCO_GL=egl or osmesa."""
        try:
            return self.simulator.render()
        except Exception as error:  # each of MuJoCo's three ways to OpenGL fails in a way of its own
            raise RuntimeError(
                "MuJoCo found no OpenGL to draw with; without a screen set MUJOCO_GL=egl or MUJOCO_GL=osmesa, and "
                "install that library"
            ) from error

    def close(self) -> None:
        self.simulator.close()


@cache
def _compiled_once(simulator: type) -> type:
    """The simulator's class with its model read from its files once per process, which takes longer than an episode;
    every simulator gets a copy, since a reset writes into it."""

    def initialise(self: Any) -> tuple[Any, Any]:
        model = copy(_model(self.fullpath, self.width, self.height))
        return model, _package("mujoco").MjData(model)

    return type(simulator.__name__, (simulator,), {"_initialize_simulation": initialise})


@cache
def _model(path: str, width: int, height: int) -> Any:
    model = _package("mujoco").MjModel.from_xml_path(path)
    off_screen = model.vis.global_
    off_screen.offwidth, off_screen.offheight = max(off_screen.offwidth, width), max(off_screen.offheight, height)
    return model


def _known(name: str, held: Any) -> Any:
    if name not in held:
        raise ValueError(f"Meta-World has no task {name!r}; it has {', '.join(sorted(held))}")
    return held[name]


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"Meta-World is not installed ({error}): pip install 'cebm[metaworld]'") from error
