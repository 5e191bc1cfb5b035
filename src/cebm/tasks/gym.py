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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Space
from jaxtyping import Float

from cebm.tasks.base import Actor, RollOut, Task, Value, check_episodes, check_max_steps
from cebm.tasks.playing import (
    MOST_STEPS,
    Elsewhere,
    Here,
    Players,
    check_spaces,
    columns_of,
    episode_seed,
    play,
)

__all__ = ["MOST_STEPS", "Gym", "GymnasiumTask", "MadeEnvironments", "OneEnvironment", "episode_seed"]


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
        with self.opened(range(1)) as [env]:
            return check_spaces(env, self.name)

    @property
    def sizes(self) -> tuple[int, int]:
        observation, action = self._spaces
        return columns_of(observation), columns_of(action)

    @property
    def limits(self) -> tuple[Float[np.ndarray, " act"], Float[np.ndarray, " act"]] | None:
        space = self._spaces[1]
        low, high = (bound.ravel().astype(np.float64) for bound in (space.low, space.high))
        return (low, high) if np.isfinite([low, high]).any() else None

    @property
    def measures(self) -> bool:
        """Whether `measure` reads the infos, which may be large and are kept only for it."""
        return type(self).measure is not GymnasiumTask.measure

    def roll_out(
        self,
        actor: Actor,
        episodes: int,
        seed: int,
        max_steps: int | None = None,
        workers: int = 1,
        film: Collection[int] = (),
    ) -> RollOut:
        """`workers`: processes that step the environments; one policy acts for all of them, and the rows are the same
        for any number. `film`: episodes whose pictures are kept."""
        check_max_steps(max_steps)
        check_max_steps(self.max_steps)
        count = check_episodes(episodes)
        if seed < 0:
            raise ValueError(f"seed is {seed}, expected 0 or more")
        if workers > 1 and self.at_once == 1:
            raise ValueError(f"{self.name}: one environment was given, which cannot be in {workers} processes")
        limit = max_steps or self.max_steps
        place = self.filmed() if film else self
        rows: list[dict[str, Value]] = []
        last: list[np.ndarray] = []
        frames: dict[int, list[np.ndarray]] = {}
        for first in range(0, count, self.at_once):
            indices = range(first, min(first + self.at_once, count))
            with place.players(indices, seed, limit, film, workers) as playing:
                play(actor, playing)
                rows += playing.rows()
                frames |= playing.frames()
                last += [*playing.obs]
        return RollOut(_aligned(rows), np.stack(last), frames)

    def filmed(self) -> "GymnasiumTask":
        """This task with environments that give pictures; those that `make` gives may do so already."""
        return self

    @contextmanager
    def players(
        self, indices: range, seed: int, limit: int | None, film: Collection[int], workers: int
    ) -> Iterator[Players]:
        """Episodes that have begun, here or in `workers` processes."""
        if workers <= 1:
            with self.opened(indices) as envs:
                yield Here(self, indices, envs, seed, limit, film)
            return
        elsewhere = Elsewhere(self, indices, seed, limit, film, workers)
        with closing(elsewhere):
            yield elsewhere

    @contextmanager
    def opened(self, indices: Sequence[int]) -> Iterator[list[gymnasium.Env]]:
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

    def _close(self, indices: Sequence[int], envs: list[gymnasium.Env]) -> list[Exception]:
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
    pictures: bool = False
    """Whether its environments can be filmed."""

    def __post_init__(self) -> None:
        if not isinstance(self.env, str) or not self.env.strip() or self.env.count(":") > 1:
            raise ValueError(f"Gym: env is {self.env!r}, expected the id of an environment, or 'package:id'")
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"Gym: metric is {self.metric!r}, expected the name of a column")
        check_max_steps(self.max_steps)

    @property
    def name(self) -> str:
        return self.env

    def filmed(self) -> "GymnasiumTask":
        return replace(self, pictures=True)

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
            return gymnasium.make(self.env, render_mode="rgb_array" if self.pictures else None)
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


def _aligned(rows: list[dict[str, Value]]) -> list[dict[str, Value]]:
    """All columns in every row: an environment need not tell everything in every episode."""
    columns: dict[str, Value] = {name: None for row in rows for name in row}
    return [columns | row for row in rows]
