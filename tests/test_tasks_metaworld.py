"""Meta-World: visible goals, seeded objects, experts, and mixed demonstrations."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cebm.demonstrations import Demonstrations
from cebm.evaluation import evaluate
from cebm.tasks import TaskError, shipped, task_of
from cebm.tasks import metaworld as module
from cebm.tasks.metaworld import ASIDE, MetaWorld, MetaWorldEnv, MetaWorldExpert

needs_metaworld = pytest.mark.skipif(
    importlib.util.find_spec("metaworld") is None, reason="Meta-World needs the extra metaworld"
)


class Experts:
    """One expert per episode."""

    def __init__(self, task: MetaWorld) -> None:
        self.task = task

    def reset(self) -> None:
        self.experts: list[MetaWorldExpert] = []

    def act(self, obs: np.ndarray) -> np.ndarray:
        self.experts = self.experts or [MetaWorldExpert(self.task, each, i) for i, each in enumerate(obs)]
        return np.stack([expert.act(each) for expert, each in zip(self.experts, obs, strict=True)])


@needs_metaworld
def test_the_seed_decides_where_things_stand_and_the_goal_is_visible() -> None:
    one, other = MetaWorldEnv("push-v3"), MetaWorldEnv("push-v3")
    first, same = one.reset(seed=4)[0], other.reset(seed=4)[0]
    np.testing.assert_array_equal(first, same)
    assert np.abs(first[-3:]).max() > 0.1, "the goal is in the last three columns"
    again = one.reset(seed=5)[0]
    assert np.abs(again - first).max() > 1e-3
    for _ in range(3):
        one.step(np.ones(4, np.float32))
    np.testing.assert_array_equal(one.reset(seed=4)[0], first)


@needs_metaworld
def test_a_model_is_read_once_and_every_simulator_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset writes the goal into the model: one that were shared would move the goal of the other's episode."""
    mujoco = importlib.import_module("mujoco")
    read: list[str] = []

    class Counting:
        @staticmethod
        def from_xml_path(path: str) -> Any:
            read.append(path)
            return mujoco.MjModel.from_xml_path(path)

    package = module._package
    counting = SimpleNamespace(MjModel=Counting, MjData=mujoco.MjData)
    monkeypatch.setattr(module, "_package", lambda name: counting if name == "mujoco" else package(name))
    module._model.cache_clear()
    one, other = MetaWorldEnv("reach-v3"), MetaWorldEnv("reach-v3")
    assert len(read) == 1
    one.reset(seed=1)
    places = one.simulator.model.site_pos.copy()
    other.reset(seed=2)
    np.testing.assert_array_equal(one.simulator.model.site_pos, places)
    assert np.abs(other.simulator.model.site_pos - places).max() > 1e-3


@needs_metaworld
def test_a_machine_without_opengl_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    env = MetaWorldEnv("reach-v3")

    def render() -> Any:
        raise AttributeError("'NoneType' object has no attribute 'glGetError'")

    monkeypatch.setattr(env.simulator, "render", render)
    with pytest.raises(RuntimeError, match=r"no OpenGL .* set MUJOCO_GL=egl or MUJOCO_GL=osmesa"):
        env.render()


@needs_metaworld
def test_the_rows_are_the_same_for_any_number_of_workers() -> None:
    def rows(workers: int) -> list[dict[str, Any]]:
        task = MetaWorld("reach-v3", max_steps=60)
        return evaluate(Experts(task), task, episodes=3, latency_calls=0, workers=workers).rows

    assert rows(1) == rows(2)


@needs_metaworld
@pytest.mark.parametrize("style", ["scripted", "mixed"])
def test_the_expert_succeeds_in_its_style(style: Any) -> None:
    result = evaluate(Experts(MetaWorld("push-v3", style)), MetaWorld("push-v3"), episodes=3, latency_calls=0)
    assert result.successes is not None and result.successes >= 2  # published: 98 % of all tasks' episodes
    assert all(row["length"] < 200 for row in result.rows if row["success"])


@needs_metaworld
def test_mixed_demonstrations_go_left_and_right(tmp_path: Path) -> None:
    task = MetaWorld("reach-v3", "mixed")
    data = task.demonstrations(6, 0)
    sides = data.metadata["sides"]
    assert data.episodes == 6 and set(sides) == {-1, 1}
    for i, side in enumerate(sides):
        obs, actions = data.episode(i)
        aside = side * (obs[:, 0] - obs[0, 0]).astype(np.float64)
        assert aside.max() > ASIDE - 0.03 and side * actions[0, 0] > 0.9
    assert abs(np.mean([data.episode(sides.index(side))[1][0, 0] for side in (-1, 1)])) < 0.1, "the mean stands still"
    data.save(tmp_path / "mixed.npz")
    assert task_of(Demonstrations.load(tmp_path / "mixed.npz").metadata) == task
    assert task.demonstrations(2, 0).obs.tolist() == data.select([0, 1]).obs.tolist()


@needs_metaworld
def test_an_unknown_task_is_named() -> None:
    with pytest.raises(ValueError, match="no task 'fly-v3'; it has assembly-v3"):
        MetaWorld("fly-v3").make()


@needs_metaworld
def test_an_expert_that_never_succeeds_is_given_up() -> None:
    with pytest.raises(TaskError, match="succeeded in 0 of 10 episodes only"):
        MetaWorld("push-v3", max_steps=2).demonstrations(1, 0)


def test_names_and_settings(unchecked_shapes: None) -> None:
    assert shipped("metaworld:push-v3") == MetaWorld("push-v3")
    assert shipped("metaworld:push-v3:mixed") == MetaWorld("push-v3", "mixed")
    assert MetaWorld("push-v3", "left").name == "Meta-World push-v3, left"
    for text, words in (("metaworld", "env"), ("metaworld:push-v3:up", "style")):
        with pytest.raises(ValueError, match=words):
            shipped(text)
    for limit in (0, 501, None):
        with pytest.raises(ValueError, match="max_steps"):
            MetaWorld("push-v3", max_steps=limit)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "metaworld.env_dict", None)
    with pytest.raises(ImportError, match=r"cebm\[metaworld\]"):
        module.MetaWorldEnv("push-v3")
