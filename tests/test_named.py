"""Observations by the names of their parts, against flat ones that are laid out by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cebm
from cebm.energies import MLP
from cebm.named import flat_observation
from cebm.policy import EnergyPolicy
from cebm.runner import Runner
from cebm.spaces import Box, Part, Specification
from cebm.units import Angle

PARTS = (Part("joints", (2,), ("shoulder", "elbow")), Part("goal", ()), Part("image", (1, 2)))


def spec(history: int = 1) -> Specification:
    return Specification(PARTS, 2, history, 2)


def policy(history: int = 1) -> EnergyPolicy:
    given = spec(history)
    box = Box.from_bounds([-2.0] * given.obs_dim, [2.0] * given.obs_dim)
    actions = Box.from_bounds([-1.0] * given.act_dim, [1.0] * given.act_dim)
    return EnergyPolicy(MLP(8).build(given, torch.Generator().manual_seed(0)), box, actions, spec=given)


def parts_of(frames: np.ndarray) -> dict[str, Any]:
    """Frames [..., 5] as a dictionary."""
    return {
        "image": frames[..., 3:].reshape(*frames.shape[:-1], 1, 2),
        "goal": frames[..., 2],
        "joints": frames[..., :2],
    }


@pytest.mark.parametrize("history", [1, 3])
@pytest.mark.parametrize("batch", [(), (1,), (4,)])
def test_a_dictionary_is_the_flat_observation(history: int, batch: tuple[int, ...]) -> None:
    frames = np.random.default_rng().normal(size=(*batch, *((history,) if history > 1 else ()), 5))
    flat = frames.reshape(*batch, -1)
    np.testing.assert_array_equal(flat_observation(parts_of(frames), PARTS, history), flat)
    columns = parts_of(frames) | {"shoulder": frames[..., 0], "elbow": frames[..., 1]}
    columns.pop("joints")
    np.testing.assert_array_equal(flat_observation(columns, PARTS, history), flat)
    tensors = {name: torch.as_tensor(value) for name, value in parts_of(frames).items()}
    found = flat_observation(tensors, PARTS, history)
    assert isinstance(found, torch.Tensor) and torch.equal(found, torch.as_tensor(flat))
    assert flat_observation(flat, PARTS, history) is flat, "what is no dictionary passes"


@pytest.mark.parametrize("history", [1, 3])
def test_acting_on_a_dictionary_is_acting_on_its_flat_form(history: int) -> None:
    acting = policy(history)
    for batch in ((), (1,), (4,)):
        frames = np.random.default_rng().normal(size=(*batch, *((history,) if history > 1 else ()), 5))
        given, flat = parts_of(frames), frames.reshape(*batch, -1)
        action = acting.act(given)
        assert action.shape == (*batch, 4)
        np.testing.assert_array_equal(action, acting.act(flat))
        torch.testing.assert_close(acting.propose(given).candidates, acting.propose(flat).candidates)
        acting.check(given)


def test_a_runner_remembers_dictionaries() -> None:
    named, flat = Runner(policy(3), execute=1), Runner(policy(3), execute=1)
    for _ in range(4):
        frames = np.random.default_rng().normal(size=(2, 5))
        np.testing.assert_array_equal(named.act(parts_of(frames)), flat.act(frames))
    one, same = Runner(policy(3)), Runner(policy(3))
    frame = np.random.default_rng().normal(size=5)
    np.testing.assert_array_equal(one.act(parts_of(frame)), same.act(frame))


def test_two_envs_and_one_give_the_same_number_of_axes() -> None:
    """Columns by name: a batch of one is a batch."""
    only = (Part("obs", (2,), ("x", "y")),)
    for count in (1, 2):
        assert flat_observation({"x": np.zeros(count), "y": np.ones(count)}, only).shape == (count, 2)
    assert flat_observation({"x": 0, "y": 1.5}, only).tolist() == [0.0, 1.5]
    assert flat_observation({"obs": [1, 2]}, only).tolist() == [1, 2]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda given: given.pop("goal"), r"obs: goal is missing; the parts are 'joints' \[2\] \(shoulder, elbow\)"),
        (lambda given: given.update(gaol=1), "there is no part 'gaol'; the parts are 'joints'"),
        (lambda given: given.update(image=np.zeros((2, 1))), r"part 'image' has shape \(2, 1\), expected \[1, 2\] or"),
        (lambda given: given.update(goal=np.zeros(3)), "do not agree whether and how many observations there are"),
        (lambda given: given.update(goal="left"), "part 'goal' must be numbers, got <U4"),
        (lambda given: given.update(goal=None), "part 'goal' must be numbers"),
        (lambda given: given.update(joints=[[1], [1, 2]]), "part 'joints' is ragged"),
        (lambda given: (given.pop("joints"), given.update(elbow=1.0)), r"joints\.shoulder is missing"),
        (lambda given: given.update(elbow=1.0), "there is no part 'elbow'"),
        (lambda given: given.clear(), "joints, goal, image is missing"),
    ],
)
def test_what_is_wrong_with_a_dictionary_is_named(change: Callable[[dict[str, Any]], object], message: str) -> None:
    given = parts_of(np.zeros(5))
    change(given)
    acting = policy()
    for call in (acting.act, acting.propose, acting.check, Runner(acting).act):
        with pytest.raises(ValueError, match=message):
            call(given)


def test_names_survive_kinds_of_columns_and_files(tmp_path: Path) -> None:
    """An angle is two features inside; outside its part keeps its name and size."""
    random = np.random.default_rng()
    parts = (Part("heading", ()), Part("place", (2,), ("x", "y")))
    obs, actions = random.uniform(-3, 3, (40, 3)), random.normal(size=(40, 1))
    data = cebm.Demonstrations.from_arrays(obs, actions, [20, 40], parts=parts)
    trial = cebm.vary(cebm.TRIALS["mse"], obs_kinds=(Angle("heading"),), history=2)
    trainer = cebm.Trainer(trial, data, data, steps=1)
    trainer.step()
    trainer.policy().save(tmp_path / "policy")
    loaded = cebm.load(tmp_path / "policy")
    assert loaded.parts == parts and loaded.specification.frame == 4
    given = {"heading": obs[:2, 0], "place": obs[:2, 1:]}
    np.testing.assert_array_equal(loaded.act(given), loaded.act(obs[:2].ravel()))
    one, other = Runner(loaded), Runner(loaded)
    np.testing.assert_array_equal(one.act({"heading": 1.0, "x": 0.5, "y": 0.0}), other.act([1.0, 0.5, 0.0]))
