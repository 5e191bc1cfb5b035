"""Tasks in Gymnasium environments: registered ones, and the user's own.

A task of one's own says how its environment is made and, where the environment's reward is not the point, what an
episode is worth:

>>> @dataclass(frozen=True)
... class PushT(GymnasiumTask):
...     size: int = 96
...     metric: str = "coverage"
...
...     def make(self) -> gymnasium.Env:
...         return gymnasium.make("gym_pusht:gym_pusht/PushT-v0", observation_width=self.size)
...
...     def measure(self, rewards: list[float], infos: list[dict[str, Any]]) -> dict[str, float]:
...         return {"coverage": max(info["coverage"] for info in infos)}
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Space
from jaxtyping import Float, Float32, Float64

from cebm.tasks.base import Actor, RollOut, Task, Value, check_episodes, check_max_steps

MOST_STEPS = 10_000
"""The limit of an episode where nobody sets one."""


class GymnasiumTask(Task):
    """Abstract: a subclass defines `make`, and may define `measure`, `metric` and `max_steps`.

    The row of an episode has `episode`, `success` (what the environment's last word on `success` or `is_success` was,
    None without one), `length`, `return_sum`, `return_max`, `return_last` and `return_mean` of its rewards,
    `truncated_by_limit` (whether the step limit ended it, and not the environment), for every number in the
    environment's infos the last value `info_NAME` and the largest `info_NAME_max`, and what `measure` gives.

    Observations are Boxes, or Dicts of them that are joined in the space's order; both are flattened. Actions are
    Boxes; what the actor gives is clipped to them and cast to their type.
    """

    metric: str = "return_sum"
    """The column that chooses a checkpoint; larger is better."""
    max_steps: int | None = None
    """Step limit of an episode; None: the limit that the environment is registered with, or else 10,000."""
    at_once: ClassVar[int] = 1000
    """Environments that are open at the same time, at most; the episodes beyond them come afterwards."""

    @abstractmethod
    def make(self) -> gymnasium.Env:
        """A new environment. It is called once per episode, and once to read the spaces."""

    def measure(self, rewards: list[float], infos: list[dict[str, Any]]) -> dict[str, float]:
        """An episode's own metrics, from the reward and the info of every step. They are added to its row, and replace
        what is there by the same name: `success`, for instance."""
        return {}

    @cached_property
    def _spaces(self) -> tuple[Space, Box]:
        """Of observations and of actions."""
        with self._open(range(1)) as [env]:
            return _check_spaces(env, self.name)

    @property
    def sizes(self) -> tuple[int, int]:
        observation, action = self._spaces
        return _columns(observation), _columns(action)

    @property
    def limits(self) -> tuple[Float[np.ndarray, " act"], Float[np.ndarray, " act"]] | None:
        space = self._spaces[1]
        low, high = (bound.ravel().astype(np.float64) for bound in (space.low, space.high))
        return (low, high) if np.isfinite([low, high]).any() else None

    def roll_out(self, actor: Actor, episodes: int, seed: int, max_steps: int | None = None) -> RollOut:
        check_max_steps(max_steps)
        check_max_steps(self.max_steps)
        count = check_episodes(episodes)
        if seed < 0:
            raise ValueError(f"seed is {seed}, expected 0 or more")
        rows: list[dict[str, Value]] = []
        last: list[np.ndarray] = []
        for first in range(0, count, self.at_once):
            indices = range(first, min(first + self.at_once, count))
            with self._open(indices) as envs:
                playing = [
                    _Episode(self, i, env, seed, max_steps or self.max_steps)
                    for i, env in zip(indices, envs, strict=True)
                ]
                _play(actor, playing)
                rows += [episode.row() for episode in playing]
                last += [episode.obs for episode in playing]
        return RollOut(_aligned(rows), np.stack(last))

    @contextmanager
    def _open(self, indices: range) -> Iterator[list[gymnasium.Env]]:
        """An environment per episode. All are closed at the end: an error of one's `close` keeps no other open, and
        hides no error that came before it."""
        envs: list[gymnasium.Env] = []
        try:
            for index in indices:
                envs.append(self._made(index))
            if len({id(env.unwrapped) for env in envs}) < len(envs):
                raise ValueError(
                    f"{self.name}: the same environment was given for several episodes, which run side by side; "
                    "make a new one at each call, or give the environment itself"
                )
            yield envs
        except BaseException as error:
            for failure in self._close(indices, envs):
                error.add_note(f"After this, {failure.__notes__[-1]}: {type(failure).__name__}: {failure}")
            raise
        failures = self._close(indices, envs)
        if failures:
            raise failures[0]

    def _made(self, index: int) -> gymnasium.Env:
        env = self.make()
        if not isinstance(env, gymnasium.Env):
            raise TypeError(f"{self.name}: episode {index}: expected a gymnasium.Env, got a {type(env).__name__}")
        return env

    def _close(self, indices: range, envs: list[gymnasium.Env]) -> list[Exception]:
        """Closes all; the errors name their episodes."""
        failures = []
        for index, env in zip(indices, envs, strict=False):  # fewer environments, where one could not be made
            try:
                env.close()
            except Exception as error:
                error.add_note(f"{self.name}: episode {index}: closing the environment failed")
                failures.append(error)
        return failures


@dataclass(frozen=True)
class Gym(GymnasiumTask):
    """A registered Gymnasium environment, by its id."""

    env: str
    """Its id, as `gymnasium.make` takes it: "Pendulum-v1", or "gym_pusht:gym_pusht/PushT-v0" to import a package that
    registers it."""
    metric: str = "return_sum"
    """The column of an episode's row that chooses a checkpoint; larger is better."""
    max_steps: int | None = None
    """Step limit of an episode; None: the one that the environment is registered with, or else 10,000."""

    def __post_init__(self) -> None:
        if not isinstance(self.env, str) or not self.env.strip() or self.env.count(":") > 1:
            raise ValueError(f"Gym: env is {self.env!r}, expected the id of an environment, or 'package:id'")
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"Gym: metric is {self.metric!r}, expected the name of a column")
        check_max_steps(self.max_steps)

    @property
    def name(self) -> str:
        return self.env

    def make(self) -> gymnasium.Env:
        package, _, name = self.env.rpartition(":")
        if package:
            try:
                import_module(package)
            except ImportError as error:
                raise ValueError(
                    f"env {self.env!r}: {package!r} cannot be imported ({error}); install the package that provides it"
                ) from error
        try:
            return gymnasium.make(self.env)
        except gymnasium.error.UnregisteredEnv as error:
            advice = f"{package!r} was imported and does not register it"
            if not package:
                likely = name.split("/")[0] if "/" in name else "package"
                advice = f"import the package that registers it, or name it before a colon, as in '{likely}:{name}'"
            raise ValueError(f"env {self.env!r} is not registered in Gymnasium: {advice}. {error}") from error
        except (gymnasium.error.Error, ImportError) as error:
            raise ValueError(f"env {self.env!r} cannot be made: {error}") from error


@dataclass(frozen=True)
class MadeEnvironments(GymnasiumTask):
    """The environments that a function makes."""

    function: Callable[[], gymnasium.Env]
    """Called once per episode, and once to read the spaces; a class of environments is such a function."""

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def make(self) -> gymnasium.Env:
        return self.function()


@dataclass(frozen=True)
class OneEnvironment(GymnasiumTask):
    """An environment of the caller: its episodes run one after the other, and it is not closed."""

    env: gymnasium.Env
    """The environment."""
    at_once: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return type(self.env.unwrapped).__name__

    def make(self) -> gymnasium.Env:
        return _Lent(self.env)


class _Lent(gymnasium.Wrapper):
    """The caller closes it."""

    def close(self) -> None:
        pass


class _Episode:
    """An episode under way: steps its environment, checks what comes back, and keeps the numbers for its row."""

    def __init__(self, task: GymnasiumTask, index: int, env: gymnasium.Env, seed: int, limit: int | None) -> None:
        self.task, self.index, self.env = task, index, env
        self.observation_space, self.action_space = _check_spaces(env, f"{task.name}: episode {index}")
        registered = None if env.spec is None else env.spec.max_episode_steps
        self.limit = limit or registered or MOST_STEPS
        # Infos may be large: they are kept only for a `measure` that reads them.
        self.measured = type(task).measure is not GymnasiumTask.measure
        self.rewards: list[float] = []
        self.infos: list[dict[str, Any]] = []
        self.last: dict[str, float] = {}
        self.largest: dict[str, float] = {}
        self.success: bool | None = None
        self.running, self.cut = True, False
        with self._named():
            obs, _ = env.reset(seed=episode_seed(seed, index))
        self.obs = self._flat(obs)
        self._check_finite(self.obs)

    def step(self, action: Float[np.ndarray, " act"]) -> None:
        space = self.action_space
        action = np.clip(action, space.low.ravel(), space.high.ravel())
        if np.issubdtype(space.dtype, np.integer):
            action = np.rint(action)
        with self._named():
            obs, reward, terminated, truncated, info = self.env.step(action.reshape(space.shape).astype(space.dtype))
            self._note(info)
            self.rewards.append(float(reward))
        over = bool(terminated or truncated)
        self.cut = not over and len(self.rewards) >= self.limit
        self.running = not (over or self.cut)
        flat = self._flat(obs)
        if self.running:
            self._check_finite(flat)
        # The batch stays aligned: an episode that has ended keeps its last observation, the last finite one.
        if np.isfinite(flat).all():
            self.obs = flat

    def row(self) -> dict[str, Value]:
        rewards = np.array(self.rewards)
        row: dict[str, Value] = {
            "episode": self.index,
            "success": self.success,
            "length": len(rewards),
            "return_sum": float(sum(self.rewards)),
            "return_max": float(rewards.max()),
            "return_last": self.rewards[-1],
            "return_mean": sum(self.rewards) / len(rewards),
            "truncated_by_limit": self.cut,
        }
        row |= {f"info_{name}": value for name, value in self.last.items()}
        for name, value in self.largest.items():
            row.setdefault(f"info_{name}_max", value)  # an info that is itself called NAME_max goes first
        if not self.measured:
            return row
        own = self.task.measure(self.rewards, self.infos)
        for name, value in own.items():
            number = _number(value)
            if number is None:
                raise ValueError(
                    f"{self.task.name}: episode {self.index}: measure gave {name} = {value!r}, expected a number"
                )
            row[name] = bool(number) if name == "success" else number
        return row

    def _note(self, info: dict[str, Any]) -> None:
        if self.measured:
            self.infos.append(dict(info))  # a copy: environments may write the next info into the same dict
        told = info.get("success", info.get("is_success"))
        if told is not None:
            self.success = bool(told)
        for name, value in info.items():
            number = _number(value)
            if number is not None:
                self.last[name] = number
                self.largest[name] = float(np.fmax(number, self.largest.get(name, number)))  # NaN is not the largest

    def _flat(self, obs: Any) -> Float32[np.ndarray, " obs"]:
        flat = np.concatenate([np.zeros(0), *_parts(obs, self.observation_space, self.here(), ())])
        with np.errstate(over="ignore"):  # what overflows is infinite, and that is reported
            return flat.astype(np.float32)

    def _check_finite(self, obs: Float32[np.ndarray, " obs"]) -> None:
        bad = np.flatnonzero(~np.isfinite(obs))
        if bad.size:
            raise ValueError(f"{self.here()}: observation column {bad[0]} is {obs[bad[0]]}")

    def here(self) -> str:
        return f"{self.task.name}: episode {self.index}, step {len(self.rewards)}"

    @contextmanager
    def _named(self) -> Iterator[None]:
        """An error of the environment is raised as it is, with a note on the episode and the step."""
        try:
            yield
        except Exception as error:
            error.add_note(f"{self.here()}: the environment failed")
            raise


def episode_seed(seed: int, episode: int) -> int:
    """Not seed + episode: neighbouring seeds would share nearly all of their episodes."""
    return int(np.random.SeedSequence(seed, spawn_key=(episode,)).generate_state(1)[0])


def _play(actor: Actor, episodes: Sequence[_Episode]) -> None:
    """Episodes advance together so that the actor acts on a batch; those that ended are stepped no more."""
    first = episodes[0]
    for episode in episodes:
        if (len(episode.obs), episode.action_space.shape) != (len(first.obs), first.action_space.shape):
            raise ValueError(
                f"{episode.task.name}: the spaces of episode {episode.index} have other sizes than those of "
                f"episode {first.index}"
            )
    act_dim = _columns(first.action_space)
    actor.reset()
    while any(episode.running for episode in episodes):
        # The whole batch acts, so that history and chunks stay aligned.
        actions = _check_actions(actor.act(np.stack([episode.obs for episode in episodes])), episodes, act_dim)
        for episode, action in zip(episodes, actions, strict=True):
            if episode.running:
                episode.step(action)


def _check_actions(actions: Any, episodes: Sequence[_Episode], act_dim: int) -> Float64[np.ndarray, "episodes act"]:
    array = np.asarray(actions, np.float64)
    if array.shape != (len(episodes), act_dim):
        raise ValueError(
            f"{episodes[0].task.name}: actions have shape {array.shape}, expected {(len(episodes), act_dim)}"
        )
    for episode, action in zip(episodes, array, strict=True):
        if episode.running and not np.isfinite(action).all():
            column = int(np.flatnonzero(~np.isfinite(action))[0])
            raise ValueError(f"{episode.here()}: action column {column} is {action[column]}")
    return array


def _check_spaces(env: gymnasium.Env, where: str) -> tuple[Space, Box]:
    observation, action = env.observation_space, env.action_space
    if not isinstance(action, Box):
        raise ValueError(f"{where}: env has a {type(action).__name__} action space, a policy needs a Box")
    for path, part in _leaves(observation, ()):
        if not isinstance(part, Box):
            place = f" at {'/'.join(path)!r} in its observation space" if path else " observation space"
            raise ValueError(
                f"{where}: env has a {type(part).__name__}{place}, a policy needs a Box or a Dict of Boxes"
            )
    return observation, action


def _leaves(space: Space, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Space]]:
    """The spaces within Dicts, in their order."""
    if not isinstance(space, Dict):
        yield path, space
        return
    for key, part in space.spaces.items():
        yield from _leaves(part, (*path, str(key)))


def _columns(space: Space) -> int:
    return sum(int(np.prod(part.shape or ())) for _, part in _leaves(space, ()))


def _parts(obs: Any, space: Space, where: str, path: tuple[str, ...]) -> Iterator[np.ndarray]:
    """The flat pieces of an observation, in the space's order."""
    named = f"observation {'/'.join(path)!r}" if path else "the observation"
    if isinstance(space, Dict):
        for key, part in space.spaces.items():
            if not hasattr(obs, "keys") or key not in obs:
                raise ValueError(f"{where}: {named} has no {key!r}, which its space has")
            yield from _parts(obs[key], part, where, (*path, str(key)))
        return
    flat = np.ravel(np.asarray(obs, np.float64))
    if len(flat) != int(np.prod(space.shape or ())):
        raise ValueError(f"{where}: {named} has shape {np.shape(obs)}, its space has {space.shape}")
    yield flat


def _number(value: Any) -> float | None:
    """A real scalar as a float; None for anything else."""
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        return float(value)
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "biuf":
        return float(value)
    return None


def _aligned(rows: list[dict[str, Value]]) -> list[dict[str, Value]]:
    """All columns in every row: an environment need not tell everything in every episode."""
    columns: dict[str, Value] = {name: None for row in rows for name in row}
    return [columns | row for row in rows]
