"""Gymnasium environments as tasks: rows, limits, spaces, and what happens when an environment misbehaves."""

import math
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

from cebm.evaluation import evaluate
from cebm.tasks import (
    Gym,
    GymnasiumTask,
    MadeEnvironments,
    OneEnvironment,
    ParticleEnv,
    ParticleTask,
    TaskError,
    as_task,
)
from cebm.tasks.gym import MOST_STEPS


class Zero:
    """An actor that does nothing; remembers what it saw."""

    def __init__(self, act_dim: int = 1, value: float = 0.0) -> None:
        self.act_dim, self.value = act_dim, value
        self.seen: list[np.ndarray] = []
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1

    def act(self, obs: np.ndarray) -> np.ndarray:
        self.seen.append(obs.copy())
        return np.full((len(obs), self.act_dim), self.value)


class Count(gymnasium.Env[Any, Any]):
    """Counts its steps, for as many as `length` says. The reward is the count. The function `step` is called in every
    step, and may change what the environment tells."""

    made: ClassVar[list["Count"]] = []

    def __init__(self, length: float = 5, step: Callable[["Count"], Any] | None = None) -> None:
        self.length, self.hook = length, step
        self.index = len(Count.made)
        self.observation_space: Any = Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space: Any = Box(-1, 1, (1,), np.float32)
        self.seeds: list[int | None] = []
        self.actions: list[Any] = []
        self.closed = 0
        self.info: dict[str, Any] = {}
        Count.made.append(self)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        self.count = 0
        self.obs: Any = np.array([self.index, 0.0])
        return self.obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self.count += 1
        self.obs = np.array([self.index, self.count], np.float64)
        if self.hook is not None:
            self.hook(self)
        return self.obs, float(self.count), self.count >= self.length, False, self.info

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def none_made() -> None:
    Count.made = []


def rows_of(make: Any, episodes: int = 1, actor: Any = None, **options: Any) -> list[dict[str, Any]]:
    return as_task(make).roll_out(actor or Zero(), episodes, 3, **options).rows


# -------------------------------------------------------------------------------------------- rows


def test_the_returns_of_an_episode() -> None:
    assert rows_of(lambda: Count(4)) == [
        {
            "episode": 0,
            "success": None,
            "length": 4,
            "return_sum": 10.0,
            "return_max": 4.0,
            "return_last": 4.0,
            "return_mean": 2.5,
            "truncated_by_limit": False,
        }
    ]


def test_every_number_in_the_infos_has_its_last_and_its_largest_value() -> None:
    def tell(env: Count) -> None:
        env.info["coverage"] = np.float32([0.25, 0.75, 0.5][env.count - 1])  # the same dict in every step
        env.info["hit"] = np.bool_(env.count == 2)
        env.info["zero_d"] = np.array(env.count)
        env.info |= {"text": "x", "image": np.zeros((2, 2)), "nested": {"a": 1}, "nothing": None, "complex": 1j}
        if env.count == 1:
            env.info["early"] = math.nan
        else:
            env.info.pop("early", None)

    [row] = rows_of(lambda: Count(3, tell))
    found = {name: value for name, value in row.items() if name.startswith("info_")}
    early, early_max = found.pop("info_early"), found.pop("info_early_max")
    assert math.isnan(early) and math.isnan(early_max)
    assert found == {
        "info_coverage": 0.5,
        "info_coverage_max": 0.75,
        "info_hit": 0.0,
        "info_hit_max": 1.0,
        "info_zero_d": 3.0,
        "info_zero_d_max": 3.0,
    }
    assert all(type(value) is float for value in found.values())


def test_rows_have_the_same_columns_whatever_an_episode_tells() -> None:
    def tell(env: Count) -> None:
        if env.index == 1:
            env.info = {"rare": env.count, "is_success": env.count == 3, "rare_max": -1.0}

    rows = rows_of(lambda: Count(3, tell), episodes=3)
    assert rows[0].keys() == rows[1].keys() == rows[2].keys()
    assert [row["info_rare"] for row in rows] == [None, 3.0, None]
    assert [row["success"] for row in rows] == [None, True, None]
    assert rows[1]["info_rare_max"] == -1.0, "the environment's own NAME_max wins"


@dataclass(frozen=True)
class Coverage(GymnasiumTask):
    """What a user writes."""

    length: int = 4
    metric: str = "coverage"

    def make(self) -> gymnasium.Env:
        return Count(self.length, lambda env: env.info.update(covered=1 / env.count))

    def measure(self, rewards: list[float], infos: list[dict[str, Any]]) -> dict[str, float]:
        coverage = sum(info["covered"] for info in infos) + rewards[-1]
        return {"coverage": coverage, "success": coverage > 6}


def test_a_users_task_with_its_own_metric() -> None:
    task = Coverage()
    assert (task.name, task.metric, task.sizes) == ("Coverage", "coverage", (2, 1)) and task == Coverage(4)
    result = evaluate(Zero(), task, episodes=2, latency_calls=0)
    assert result.rows[1]["coverage"] == pytest.approx(1 + 1 / 2 + 1 / 3 + 1 / 4 + 4)
    assert result.score(task.metric) == result.summary()["coverage"] == result.rows[0]["coverage"]
    assert result.successes == 2 and result.rows[0]["success"] is True
    assert evaluate(Zero(), replace(task, length=2), episodes=1, latency_calls=0).successes == 0
    with pytest.raises(TaskError, match="Coverage has no expert"):
        task.demonstrations(1, 0)


def test_a_measure_that_is_no_number_is_named() -> None:
    class Wrong(GymnasiumTask):
        def make(self) -> gymnasium.Env:
            return Count()

        def measure(self, rewards: list[float], infos: list[dict[str, Any]]) -> Any:
            return {"verdict": "fine"}

    with pytest.raises(ValueError, match="Wrong: episode 0: measure gave verdict = 'fine', expected a number"):
        rows_of(Wrong())


# -------------------------------------------------------------------------------------------- the step limit


def test_an_environment_that_never_ends_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_STEPS == 10_000
    monkeypatch.setattr("cebm.tasks.playing.MOST_STEPS", 300)  # for the sake of time
    rows = rows_of(lambda: Count(math.inf), episodes=2)
    assert [(row["length"], row["truncated_by_limit"]) for row in rows] == [(300, True)] * 2


def test_the_step_limit_is_the_arguments_then_the_tasks_then_the_environments() -> None:
    class Endless(GymnasiumTask):
        def make(self) -> gymnasium.Env:
            env = Count(math.inf)
            env.spec = gymnasium.envs.registration.EnvSpec("Count-v0", "nowhere:Count", max_episode_steps=30)
            return env

    class Limited(Endless):
        max_steps = 20

    for task, argument, expected in (
        (Endless(), None, 30),
        (Limited(), None, 20),
        (Limited(), 7, 7),
        (Endless(), 50, 50),
    ):
        [row] = rows_of(task, max_steps=argument)
        assert (row["length"], row["truncated_by_limit"]) == (expected, True)
    [row] = rows_of(lambda: Count(7), max_steps=7)
    assert row["truncated_by_limit"] is False, "the environment ended it in the same step"


def test_the_limit_of_a_registered_environment_is_its_own() -> None:
    [row] = rows_of("Pendulum-v1")
    assert (row["length"], row["truncated_by_limit"]) == (200, False)
    [row] = rows_of(Gym("Pendulum-v1", max_steps=9))
    assert (row["length"], row["truncated_by_limit"]) == (9, True)


# -------------------------------------------------------------------------------------------- errors


def test_nan_after_the_end_does_not_disturb_the_others() -> None:
    """Episode 0 ends in step 2 with an observation that is none; the batch goes on with its last finite one."""

    def spoil(env: Count) -> None:
        if env.index == 0 and env.count == 2:
            env.obs = np.array([math.nan, 1.0])

    actor = Zero()
    task = MadeEnvironments(lambda: Count(2 if not Count.made else 5, spoil))
    played = task.roll_out(actor, 2, 3)
    assert [row["length"] for row in played.rows] == [2, 5]
    assert np.isfinite(actor.seen).all() and all(obs.shape == (2, 2) for obs in actor.seen)
    assert played.last_obs.tolist() == [[0, 1], [1, 5]]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_nan_in_a_running_episode_is_named(value: float) -> None:
    def spoil(env: Count) -> None:
        if env.index == 1 and env.count == 2:
            env.obs = np.array([0.0, value])

    words = "spoiled: episode 1, step 2: observation column 1 is (nan|inf)"
    with pytest.raises(ValueError, match=words):
        rows_of(named("spoiled", lambda: Count(5, spoil)), episodes=3)
    assert [env.closed for env in Count.made] == [1, 1, 1]


def named(name: str, make: Callable[[], Any]) -> Callable[[], Any]:
    make.__name__ = name
    return make


def test_a_crash_is_raised_with_its_place_and_all_are_closed() -> None:
    def crash(env: Count) -> None:
        if env.index == 2 and env.count == 4:
            raise ZeroDivisionError("the physics blew up")

    with pytest.raises(ZeroDivisionError, match="the physics blew up") as caught:
        rows_of(named("crash", lambda: Count(9, crash)), episodes=4)
    assert caught.value.__notes__ == ["crash: episode 2, step 3: the environment failed"]
    assert [env.closed for env in Count.made] == [1] * 4


class Sticky(Count):
    """Cannot be closed."""

    def close(self) -> None:
        super().close()
        raise OSError(f"window {self.index} is gone")


def test_an_error_of_close_neither_hides_a_crash_nor_keeps_others_open() -> None:
    def crash(env: Count) -> None:
        raise ZeroDivisionError("the physics blew up")

    with pytest.raises(ZeroDivisionError) as caught:
        rows_of(named("sticky", lambda: Sticky(9, crash)), episodes=3)
    assert [env.closed for env in Count.made] == [1] * 3
    assert [note for note in caught.value.__notes__ if "OSError: window 1 is gone" in note and "episode 1" in note]
    Count.made = []
    with pytest.raises(OSError, match="window 0 is gone") as closing:
        rows_of(named("sticky", lambda: Sticky(2)), episodes=3)
    assert [env.closed for env in Count.made] == [1] * 3
    assert closing.value.__notes__ == ["sticky: episode 0: closing the environment failed"]


def test_an_environment_that_cannot_be_made_or_reset() -> None:
    def make() -> Count:
        if len(Count.made) == 2:
            raise RuntimeError("no licence")
        return Count()

    with pytest.raises(RuntimeError, match="no licence"):
        rows_of(make, episodes=3)
    assert [env.closed for env in Count.made] == [1, 1]

    class Unready(Count):
        def reset(self, **options: Any) -> Any:
            raise RuntimeError("not ready")

    with pytest.raises(RuntimeError, match="not ready") as caught:
        rows_of(Unready)
    assert caught.value.__notes__ == ["Unready: episode 0, step 0: the environment failed"]
    assert Count.made[-1].closed == 1


def test_what_a_function_makes_is_checked(unchecked_shapes: None) -> None:
    with pytest.raises(TypeError, match=r"ParticleTask: episode 0: expected a gymnasium\.Env, got a ParticleTask"):
        rows_of(ParticleTask)
    env = Count()
    with pytest.raises(ValueError, match="the same environment was given for several episodes"):
        rows_of(lambda: env, episodes=2)


def test_actions_of_a_wrong_shape_or_value_are_named() -> None:
    with pytest.raises(ValueError, match=r"Count: actions have shape \(2, 3\), expected \(2, 1\)"):
        rows_of(Count, 2, Zero(3))
    with pytest.raises(ValueError, match="Count: episode 0, step 0: action column 0 is nan"):
        rows_of(Count, 2, Zero(1, math.nan))


@pytest.mark.parametrize("episodes", [0, 1_000_001])
def test_numbers_of_episodes_and_seeds_are_checked(episodes: int) -> None:
    with pytest.raises(ValueError, match="episodes must be at"):
        rows_of(Count, episodes)
    with pytest.raises(ValueError, match="seed is -1, expected 0 or more"):
        as_task(Count).roll_out(Zero(), 1, -1)
    assert not Count.made


# -------------------------------------------------------------------------------------------- one environment


def test_an_environment_itself_runs_episodes_in_turn_and_stays_open() -> None:
    env, actor = Count(3), Zero()
    task = as_task(env)
    assert isinstance(task, OneEnvironment) and task.name == "Count" and task.sizes == (2, 1)
    played = task.roll_out(actor, 4, 3)
    assert [row["episode"] for row in played.rows] == [0, 1, 2, 3] and played.last_obs.shape == (4, 2)
    assert env.closed == 0 and len(Count.made) == 1
    assert actor.resets == 4 and all(obs.shape == (1, 2) for obs in actor.seen)
    assert len(set(env.seeds)) == 4
    together = rows_of(lambda: Count(3), episodes=4)
    assert together == played.rows and [made.seeds[0] for made in Count.made[1:]] == env.seeds
    with pytest.raises(ZeroDivisionError):
        env.hook = lambda env: 1 // 0
        task.roll_out(actor, 1, 3)
    assert env.closed == 0


def test_few_environments_are_open_at_a_time() -> None:
    class Small(GymnasiumTask):
        at_once = 3

        def make(self) -> gymnasium.Env:
            assert sum(not env.closed for env in Count.made) < 3
            return Count(2 + len(Count.made) % 2)

    actor = Zero()
    rows = rows_of(Small(), episodes=7, actor=actor)
    assert [row["episode"] for row in rows] == list(range(7)) and [row["length"] for row in rows] == [2, 3] * 3 + [2]
    assert actor.resets == 3 and {len(obs) for obs in actor.seen} == {3, 1}
    assert len({env.seeds[0] for env in Count.made}) == 7


def test_a_wrapped_environment_keeps_its_limit() -> None:
    env = gymnasium.make("Pendulum-v1")
    assert [row["length"] for row in rows_of(env, episodes=2)] == [200, 200]
    env.reset()
    env.close()


# -------------------------------------------------------------------------------------------- spaces


class Shaped(Count):
    """Spaces of one's choice; observations are drawn from theirs."""

    def __init__(self, observation: Any = None, action: Any = None) -> None:
        super().__init__(3)
        self.observation_space = observation or self.observation_space
        self.action_space = action or self.action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.obs = self.observation_space.sample()
        return self.obs, *super().step(action)[1:]


def test_dict_observations_are_joined_in_the_spaces_order() -> None:
    unit = Box(0, 1, (2,), np.float32)
    inner = Dict({"deep": Box(-5, -4, (1,), np.float64)})
    space = Dict([("zebra", Box(2, 3, (1, 2), np.float64)), ("apple", unit), ("nest", inner)])
    env, actor = Shaped(space), Zero()
    assert as_task(env).sizes == (5, 1)
    rows_of(env, actor=actor)
    for obs in actor.seen:
        assert obs.shape == (1, 5) and obs.dtype == np.float32
        assert (obs[0, :2] >= 2).all() and (obs[0, 2:4] >= 0).all() and (obs[0, 2:4] <= 1).all() and obs[0, 4] <= -4


@pytest.mark.parametrize(
    "observation, action, words",
    [
        (Discrete(3), None, "env has a Discrete observation space, a policy needs a Box or a Dict of Boxes"),
        (
            Dict({"a": Box(0, 1), "mode": MultiBinary(2)}),
            None,
            "env has a MultiBinary at 'mode' in its observation space",
        ),
        (Dict({"a": Dict({"b": Discrete(2)})}), None, "env has a Discrete at 'a/b' in its observation space"),
        (None, Discrete(3), "env has a Discrete action space, a policy needs a Box"),
    ],
)
def test_other_spaces_are_refused_by_name(observation: Any, action: Any, words: str) -> None:
    for make in (lambda: Shaped(observation, action), Shaped(observation, action)):
        with pytest.raises(ValueError, match=words):
            rows_of(make)
        with pytest.raises(ValueError, match=words):
            as_task(make).check_policy(1, 1)


def test_observations_that_are_not_of_their_space_are_named() -> None:
    env = Shaped(Dict({"a": Box(0, 1, (2,))}))
    env.observation_space.sample = lambda: {"b": np.zeros(2)}
    with pytest.raises(ValueError, match="Shaped: episode 0, step 0: the observation has no 'a', which its space has"):
        rows_of(env)
    env.observation_space.sample = lambda: {"a": np.zeros(3)}
    with pytest.raises(ValueError, match=r"observation 'a' has shape \(3,\), its space has \(2,\)"):
        rows_of(env)


def test_episodes_of_other_sizes_are_named() -> None:
    make = lambda: Shaped(Box(0, 1, (2 + len(Count.made),)))  # noqa: E731
    with pytest.raises(ValueError, match="the spaces of episode 1 have other sizes than those of episode 0"):
        rows_of(make, episodes=2)


@pytest.mark.parametrize(
    "space, value, expected",
    [
        (Box(-0.5, 0.1, (2, 1), np.float32), 3.0, np.float32(0.1)),
        (Box(-np.inf, np.inf, (2, 1), np.float64), 3.3, 3.3),
        (Box(0, 9, (2, 1), np.int32), 2.9999, 3),
        (Box(0, 9, (2, 1), np.uint8), -4.0, 0),
    ],
)
def test_actions_are_clipped_and_cast_to_the_space(space: Box, value: float, expected: Any) -> None:
    env = Shaped(action=space)
    rows_of(env, actor=Zero(2, value))
    for action in env.actions:
        assert action.shape == (2, 1) and action.dtype == space.dtype and (action == expected).all()
        assert space.contains(action)


def test_limits_are_those_of_the_action_space() -> None:
    assert as_task(Shaped(action=Box(-np.inf, np.inf, (2,)))).limits is None
    low, high = as_task(
        Shaped(action=Box(np.array([0.0, -np.inf]), np.array([1.0, 2.0]), dtype=np.float64))
    ).limits or ((), ())
    assert list(low) == [0, -math.inf] and list(high) == [1, 2]
    task = Gym("Pendulum-v1")
    assert task.limits is not None and [float(limit[0]) for limit in task.limits] == [-2, 2]
    Count.made = []
    made = MadeEnvironments(Count)
    assert made.sizes == (2, 1) and made.limits is not None and made.sizes == (2, 1)
    assert len(Count.made) == 1 and Count.made[0].closed == 1, "made once to read the spaces"


# -------------------------------------------------------------------------------------------- registered ids


def test_a_registered_id_with_and_without_its_package() -> None:
    for name in ("cebm/Particle-v0", "cebm.tasks:cebm/Particle-v0"):
        task = Gym(name)
        assert task.name == name and task.sizes == (8, 2) and task.metric == "return_sum"
        assert rows_of(task, actor=Zero(2))[0]["length"] == 50
    assert [row["length"] for row in rows_of(lambda: ParticleEnv(steps=7), actor=Zero(2))] == [7]


@pytest.mark.parametrize(
    "env, words",
    [
        ("gym_nowhere:gym_nowhere/PushT-v0", "'gym_nowhere' cannot be imported .*install the package that provides it"),
        (
            "gym_nowhere/PushT-v0",
            "is not registered in Gymnasium: import the package .*'gym_nowhere:gym_nowhere/PushT-v0'",
        ),
        ("Nowhere-v0", "'Nowhere-v0' is not registered in Gymnasium: import the package .*'package:Nowhere-v0'"),
        ("Pendulum-v77", "'Pendulum-v77' is not registered"),
        ("cebm.tasks:cebm/Nothing-v0", "'cebm.tasks' was imported and does not register it"),
        ("not an id!", "'not an id!' cannot be made: Malformed environment ID"),
    ],
)
def test_unknown_ids_are_named_with_what_to_do(env: str, words: str) -> None:
    for use in (lambda: rows_of(env), lambda: Gym(env).sizes):
        with pytest.raises(ValueError, match=words):
            use()


def test_a_package_that_lacks_another_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gym_half_installed.py").write_text("import a_physics_engine\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=r"'gym_half_installed' cannot be imported \(No module named 'a_physics_engine'\)"
    ):
        Gym("gym_half_installed:Half-v0").make()
    assert "gym_half_installed" not in sys.modules


def test_settings_of_gym_are_checked(unchecked_shapes: None) -> None:
    for wrong, words in (
        ({"env": ""}, "env is ''"),
        ({"env": "a:b:c"}, "env is 'a:b:c'"),
        ({"env": 3}, "env is 3"),
        ({"env": "Pendulum-v1", "metric": ""}, "metric is ''"),
        ({"env": "Pendulum-v1", "max_steps": 0}, "max_steps must be a whole number of at least 1"),
        ({"env": "Pendulum-v1", "max_steps": 2.5}, "max_steps must be a whole number of at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            Gym(**wrong)  # type: ignore[arg-type]
    assert Gym("Pendulum-v1") == Gym("Pendulum-v1", "return_sum", None)


# ------------------------------------------------------------------------------------------- several processes, films


class Noisy:
    """An actor whose actions depend on what it sees, and on random numbers that it draws for the whole batch."""

    def reset(self) -> None:
        self.random = np.random.default_rng(0)

    def act(self, obs: np.ndarray) -> np.ndarray:
        return np.tanh(obs[:, :1] + self.random.normal(size=(len(obs), 1)))


class Wander(gymnasium.Env[Any, Any]):
    """Ends after a number of steps that the seed decides; `breaks` makes it fail at a step."""

    observation_space: Any = Box(-np.inf, np.inf, (2,), np.float32)
    action_space: Any = Box(-1, 1, (1,), np.float32)

    def __init__(self, breaks: int = 0, pictures: bool = True) -> None:
        self.breaks, self.pictures = breaks, pictures

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.time, self.length = self.np_random.normal(), 0, int(self.np_random.integers(3, 9))
        return np.array([self.place, 0], np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.place, self.time = self.place + float(action[0]), self.time + 1
        if self.time == self.breaks:
            raise RuntimeError("the motor is hot")
        over = self.time >= self.length
        return np.array([self.place, self.time], np.float32), -abs(self.place), over, False, {"success": self.place > 0}

    def render(self) -> Any:
        return np.full((4, 6, 3), self.time, np.uint8) if self.pictures else None


@pytest.mark.parametrize("workers", [2, 3, 20])
def test_several_processes_give_the_same_rows(workers: int) -> None:
    alone = as_task(Wander).roll_out(Noisy(), 10, 7, film=(1, 8))
    shared = as_task(Wander).roll_out(Noisy(), 10, 7, workers=workers, film=(1, 8))
    assert shared.rows == alone.rows and len({row["length"] for row in alone.rows}) > 1
    np.testing.assert_array_equal(shared.last_obs, alone.last_obs)
    assert shared.frames.keys() == alone.frames.keys() == {1, 8}
    for index, frames in alone.frames.items():
        assert [int(frame[0, 0, 0]) for frame in frames] == list(range(int(alone.rows[index]["length"] or 0) + 1))
        np.testing.assert_array_equal(shared.frames[index], frames)
    assert multiprocessing.active_children() == []


def test_an_error_in_another_process_arrives_with_its_place() -> None:
    with pytest.raises(
        TaskError, match=r"RuntimeError: the motor is hot; partial: episode \d, step 1: the environment"
    ):
        as_task(partial(Wander, 2)).roll_out(Noisy(), 4, 7, workers=2)
    assert multiprocessing.active_children() == []


def test_a_process_that_dies_is_named() -> None:
    class Dying(Wander):
        def step(self, action: np.ndarray) -> Any:
            os._exit(3)

    with pytest.raises(TaskError, match=r"the process with the episodes \[0, 2\] ended without a word"):
        as_task(Dying).roll_out(Noisy(), 4, 7, workers=2)
    assert multiprocessing.active_children() == []


def test_what_cannot_be_shared_or_filmed_is_named() -> None:
    with pytest.raises(ValueError, match="one environment was given"):
        as_task(Wander()).roll_out(Noisy(), 2, 7, workers=2)
    with pytest.raises(ValueError, match="cannot be filmed"):
        as_task(partial(Wander, 0, False)).roll_out(Noisy(), 2, 7, film=(1,))
    for wrong, words in (({"workers": 0}, "workers must be"), ({"film": (2,)}, "no episode 2 of 2")):
        with pytest.raises(ValueError, match=words):
            evaluate(Noisy(), Wander, episodes=2, **wrong)
    with pytest.raises(ValueError, match="no use for 2 workers"):
        evaluate(Noisy(), ParticleTask(), episodes=2, workers=2)


def test_graphics_that_fail_are_a_film_that_cannot_be_made() -> None:
    """Whatever they raise, even an error that cannot say what it is: the report of a run must not stop at it."""

    class Speechless(Exception):
        def __str__(self) -> str:
            raise AttributeError("no words")

    class Blind(Wander):
        def render(self) -> Any:
            raise Speechless

    with pytest.raises(ValueError, match=r"episode 1.*cannot be filmed: render failed: .*Speechless"):
        as_task(partial(Blind, 0, False)).roll_out(Noisy(), 2, 7, film=(1,))


def test_a_registered_environment_is_filmed() -> None:
    pytest.importorskip("pygame", reason="Pendulum draws with pygame")
    frames = Gym("Pendulum-v1", max_steps=3).roll_out(Noisy(), 1, 7, film=(0,)).frames[0]
    assert len(frames) == 4 and frames[0].ndim == 3
