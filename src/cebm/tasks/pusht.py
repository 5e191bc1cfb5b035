"""Push-T (Florence et al. 2022; Chi et al. 2023): a round agent pushes a block in the shape of a T onto its goal.

The physics are those of `gym-pusht` (the extra `pusht`). Three observations come from one environment: the state, nine
keypoints of the block, and the picture. The three published metrics are columns of their own and are never mixed.
"""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
from jaxtyping import Float, Float32, Float64, UInt8

from cebm.demonstrations import DemonstrationError, Demonstrations
from cebm.settings import to_json
from cebm.tasks.base import Handle, Sketch, check_max_steps
from cebm.tasks.gym import GymnasiumTask

ENV_ID = "cebm/PushT-v0"
Observation = Literal["state", "keypoints", "pixels"]
WIDTH = 512.0
"""Pixels of the square in which agent and block move; the units of actions."""
SUCCESS = 0.95
"""The block must cover more than this share of its goal."""

# Nine points of the block in its own frame, which Chi et al. chose at random on its surface. Measured on their data:
# the mean over the 19,664 steps at which the recorded points and the recorded pose agree.
KEYPOINTS = np.array(
    [
        [9.26979, 90.04097],
        [-60.98347, -1.18673],
        [60.91276, -1.39336],
        [-0.27050, 25.54363],
        [-14.06493, 122.81585],
        [39.00274, 32.85740],
        [-39.96641, 32.72966],
        [-16.82434, 62.86318],
        [23.54146, -1.70029],
    ]
)


@dataclass(frozen=True)
class PushT(GymnasiumTask):
    """The task, with the metrics that are published for it.

    A row has `reward`, the largest min(coverage / 0.95, 1) of the episode; `success`, whether the coverage was ever
    above 0.95 (which ends the episode); and `final_coverage`, that of the last step. Publications call any of the three
    a score: they are different numbers. There is no scripted expert: people demonstrated the task (`convert`).
    """

    observation: Observation = "keypoints"
    """"state": agent x, y, block x, y and angle (5 columns); "keypoints": x and y of nine points of the block, then of
    the agent (20 columns); "pixels": a picture, row by row in red, green and blue, then x and y of the agent."""
    size: int = 96
    """Width and height of the picture, for the observation "pixels"."""
    metric: str = "reward"
    """The column that chooses a checkpoint: reward, success or final_coverage."""
    max_steps: int | None = 300
    """Step limit of an episode; a step is a tenth of a second."""

    def __post_init__(self) -> None:
        if self.observation not in get_args(Observation):
            raise ValueError(f"PushT: observation is {self.observation!r}, expected one of {get_args(Observation)}")
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 8:
            raise ValueError(f"PushT: size is {self.size!r}, expected a whole number of at least 8")
        check_max_steps(self.max_steps)

    @property
    def name(self) -> str:
        return f"Push-T, {self.observation}"

    @property
    def sizes(self) -> tuple[int, int]:
        return {"state": 5, "keypoints": 2 * len(KEYPOINTS) + 2, "pixels": 3 * self.size**2 + 2}[self.observation], 2

    @property
    def limits(self) -> tuple[Float64[np.ndarray, " act"], Float64[np.ndarray, " act"]]:
        return np.zeros(2), np.full(2, WIDTH)

    @property
    def sketch(self) -> Sketch | None:
        """Agent and block; the block keeps its angle. None of pixels, which nobody can move."""
        if self.observation == "pixels":
            return None
        last = 2 * len(KEYPOINTS)
        block, agent = ((2, 3),), (0, 1)
        if self.observation == "keypoints":
            block, agent = tuple((i, i + 1) for i in range(0, last, 2)), (last, last + 1)
        handles = (Handle("block", block), Handle("agent", (agent,), 15.0))
        return Sketch((0.0, 0.0), (WIDTH, WIDTH), handles, downwards=True, places=True)

    def make(self) -> "PushTEnv":
        return PushTEnv(self.observation, self.size)

    def measure(self, rewards: list[float], infos: list[dict[str, Any]]) -> dict[str, float]:
        coverage = [info["coverage"] for info in infos]
        return {
            "reward": min(max(coverage) / SUCCESS, 1.0),
            "success": max(coverage) > SUCCESS,
            "final_coverage": coverage[-1],
        }

    def convert(self, source: Path) -> Demonstrations:
        """The human demonstrations of Chi et al. (`pusht_cchi_v7_replay`, a Zarr directory, or an `.npz` with the
        same arrays) with this task's observation.

        The observations are made of the recorded states, as the environment makes them. Recorded keypoints differ from
        them by more than 0.01 px at one step in ten, and by up to 2 px, where the agent pushes: they are used as a
        check that the file holds this task, and not copied.
        """
        arrays = _recorded(source)
        states, keypoints = arrays["state"].astype(np.float64), arrays.get("keypoint")
        if states.ndim != 2 or states.shape[1] != 5:
            raise DemonstrationError(f"{source}: state has shape {states.shape}, expected [steps, 5]")
        if keypoints is not None:
            _check_keypoints(states, np.asarray(keypoints, np.float64), source)
        if self.observation == "keypoints":
            obs = _keypoint_rows(states)
        elif self.observation == "state":
            obs = states
        else:
            env = self.make()
            obs = np.stack([env.reset(options={"state": state})[0] for state in states])
        return Demonstrations.from_arrays(
            obs.astype(np.float32),
            arrays["action"],
            arrays["episode_ends"],
            metadata={"env": ENV_ID, "task": to_json(self)},
            source=str(source),
        )


class PushTEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """`gym-pusht` with the observations of `PushT`; registered as `cebm/PushT-v0`.

    `reset(options={"state": s})` starts at the state `s` (agent x, y, block x, y, angle) exactly: the angle is set
    before the position, because the block turns about its centre of gravity and the simulator's own `reset_to_state`
    sets them in the other order, which moves the block by up to 90 px. `reset(options={"demonstration": e})` starts
    where the human demonstration `e` of Chi et al. began; its actions then give its states to the last bit of float32.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (as in gymnasium.Env)

    def __init__(
        self, observation: Observation = "keypoints", size: int = 96, *, render_mode: str | None = "rgb_array"
    ) -> None:
        if observation not in get_args(Observation):
            raise ValueError(f"observation is {observation!r}, expected one of {get_args(Observation)}")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode is {render_mode!r}, expected None or 'rgb_array'")
        self.observation, self.render_mode = observation, render_mode
        self.simulator = _simulator()(
            observation_width=size, observation_height=size, visualization_width=256, visualization_height=256
        )
        # Keypoints stick out of the square when the block leans over its edge.
        low, high = {
            "state": (np.zeros(5), np.array([WIDTH, WIDTH, WIDTH, WIDTH, 2 * np.pi])),
            "keypoints": (np.full(2 * len(KEYPOINTS) + 2, -WIDTH), np.full(2 * len(KEYPOINTS) + 2, 2 * WIDTH)),
            "pixels": (np.zeros(3 * size**2 + 2), np.r_[np.full(3 * size**2, 255.0), WIDTH, WIDTH]),
        }[observation]
        self.observation_space = gymnasium.spaces.Box(low.astype(np.float32), high.astype(np.float32))
        self.action_space = gymnasium.spaces.Box(0.0, WIDTH, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        chosen = dict(options or {})
        unknown = set(chosen) - {"state", "demonstration"}
        if unknown or len(chosen) > 1:
            raise ValueError(f"reset options are {sorted(chosen)}, expected at most one of 'state', 'demonstration'")
        if "demonstration" in chosen:
            start = _human_start(int(chosen["demonstration"]))
            self.simulator.reset(seed=seed, options={"reset_to_state": start})
        else:
            self.simulator.reset(seed=seed)
        if "state" in chosen:
            self._place(np.asarray(chosen["state"], np.float64))
        return self._observe(), {"coverage": float(self.simulator._get_coverage())}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """The action in float64: the simulator's arithmetic would otherwise round to float32 in numpy's scalars."""
        _, reward, terminated, truncated, told = self.simulator.step(np.asarray(action, np.float64))
        info = {"coverage": float(told["coverage"]), "success": bool(told["is_success"])}
        return self._observe(), float(reward), bool(terminated), truncated, info

    def render(self) -> UInt8[np.ndarray, "height width 3"]:
        """A picture of 256 × 256 pixels, with a red cross at the last action."""
        return self.simulator.render()

    def close(self) -> None:
        self.simulator.close()

    @property
    def state(self) -> Float64[np.ndarray, "5"]:
        """Agent x, y, block x, y and angle in [0, 2π)."""
        block = self.simulator.block
        return np.array([*self.simulator.agent.position, *block.position, block.angle % (2 * np.pi)])

    def _place(self, state: np.ndarray) -> None:
        if state.shape != (5,) or not np.isfinite(state).all():
            raise ValueError(f"state is {state.tolist()}, expected agent x, y, block x, y and angle")
        simulator = self.simulator
        simulator._setup()  # without velocities
        simulator.agent.position = state[:2].tolist()
        simulator.block.angle = float(state[4])
        simulator.block.position = state[2:4].tolist()
        for body in (simulator.agent, simulator.block):
            simulator.space.reindex_shapes_for_body(body)

    def _observe(self) -> Float32[np.ndarray, " obs"]:
        state = self.state
        if self.observation == "state":
            return state.astype(np.float32)
        if self.observation == "keypoints":
            return _keypoint_rows(state[None])[0].astype(np.float32)
        picture = self.simulator._render()
        return np.concatenate([picture.ravel(), state[:2]], dtype=np.float32, casting="unsafe")


def _simulator() -> type:
    """The environment class of gym-pusht, imported without a window and without pygame's greeting."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        return import_module("gym_pusht.envs").PushTEnv
    except ImportError as error:
        raise ImportError(f"Push-T needs gym-pusht ({error}): pip install 'cebm[pusht]'") from error


def _keypoint_rows(states: Float[np.ndarray, "steps 5"]) -> Float64[np.ndarray, "steps 20"]:
    """x₀, y₀, …, x₈, y₈ of the block's keypoints `R(angle) p + position`, then x, y of the agent."""
    cosine, sine = np.cos(states[:, 4, None]), np.sin(states[:, 4, None])
    x = cosine * KEYPOINTS[:, 0] - sine * KEYPOINTS[:, 1] + states[:, 2, None]
    y = sine * KEYPOINTS[:, 0] + cosine * KEYPOINTS[:, 1] + states[:, 3, None]
    return np.concatenate([np.stack([x, y], 2).reshape(len(states), -1), states[:, :2]], 1)


def _check_keypoints(states: Float64[np.ndarray, "steps 5"], keypoints: np.ndarray, source: Path) -> None:
    expected = _keypoint_rows(states)[:, : 2 * len(KEYPOINTS)]
    if keypoints.size != expected.size:
        raise DemonstrationError(f"{source}: keypoint has shape {keypoints.shape}, expected [steps, 9, 2]")
    error = np.abs(keypoints.reshape(expected.shape) - expected).max(1)
    if not np.median(error) < 0.01:
        raise DemonstrationError(
            f"{source}: the recorded keypoints are {np.median(error):.3g} px (median) from those that the recorded "
            "states give; this is no recording of Push-T as Chi et al. published it"
        )


def _human_start(episode: int) -> list[float]:
    """What demonstration `episode` of Chi et al. was started from: their environment seeded numpy's old generator with
    the episode's number, and set position before angle, as `reset_to_state` still does."""
    if not 0 <= episode < 2**32:
        raise ValueError(f"demonstration is {episode}, expected a number of 0 or more")
    random = np.random.RandomState(episode)
    places = [random.randint(low, high) for low, high in ((50, 450), (50, 450), (100, 400), (100, 400))]
    return [*map(float, places), random.randn() * 2 * np.pi - np.pi]


def _recorded(source: Path) -> dict[str, np.ndarray]:
    """The arrays of the human set: state, action, episode_ends and, where it is there, keypoint."""
    names = {"state": ("data/state", "state", "obs"), "action": ("data/action", "action")}
    names |= {"episode_ends": ("meta/episode_ends", "episode_ends"), "keypoint": ("data/keypoint", "keypoint")}
    if not source.exists():
        raise FileNotFoundError(f"{source}: there is no such file or directory")
    with ExitStack() as stack:
        held: Any
        if source.is_dir():
            held = _zarr().open_group(str(source), mode="r")
        else:
            try:
                held = stack.enter_context(np.load(source, allow_pickle=False))
            except (ValueError, OSError, EOFError) as error:
                raise DemonstrationError(f"{source}: neither a Zarr directory nor a readable .npz: {error}") from error
        found = {}
        for name, places in names.items():
            place = next((place for place in places if place in held), None)
            if place is None and name != "keypoint":
                raise DemonstrationError(f"{source}: there is no array {' or '.join(places)}")
            if place is not None:
                found[name] = np.asarray(held[place])
    return found


def _zarr() -> Any:
    try:
        return import_module("zarr")
    except ImportError as error:
        raise ImportError(f"a Zarr directory needs zarr ({error}): pip install 'cebm[zarr]'") from error
