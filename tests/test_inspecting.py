"""`cebm data inspect`: each thing that looks wrong is planted once, and a clean set has no remarks."""

from typing import Any

import numpy as np
import pytest

from cebm.demonstrations import Demonstrations
from cebm.demonstrations.inspecting import Inspection, column_names, inspect
from cebm.spaces import Part

STEPS, EPISODES = 3000, 20
ENDS = np.arange(STEPS // EPISODES, STEPS + 1, STEPS // EPISODES)


def clean() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng()
    return random.normal(size=(STEPS, 3)), random.uniform(-1, 1, size=(STEPS, 2))


def found(obs: np.ndarray, actions: np.ndarray, ends: np.ndarray = ENDS, **named: Any) -> Inspection:
    return inspect(Demonstrations.from_arrays(obs, actions, ends, **named))


def test_a_clean_set_has_no_remarks() -> None:
    inspection = found(*clean())
    assert not inspection.warnings and not any(column.remarks for column in inspection.columns), str(inspection)
    assert (inspection.episodes, inspection.steps, inspection.lengths) == (20, 3000, (150, 150.0, 150))
    text = str(inspection)
    assert "20 episodes, 3,000 steps (150 to 150 per episode, median 150)" in text and "action[1]" in text


def test_noise_whose_range_is_a_turn_is_no_angle() -> None:
    obs, actions = clean()
    obs[:, 1] = np.clip(obs[:, 1], -3.1, 3.1)
    obs[100:102, 1] = -3.1, 3.1  # as noise does now and then
    assert found(obs, actions).columns[1].remarks == ()


def test_ranges_and_names_are_those_of_the_columns() -> None:
    obs, actions = clean()
    parts = (Part("joints", (2,), ("a", "b")), Part("t", ()))
    inspection = found(obs, actions, parts=parts)
    assert [column.name for column in inspection.columns] == ["joints.a", "joints.b", "t", "action[0]", "action[1]"]
    for index, column in enumerate(inspection.columns[:3]):
        values = obs[:, index].astype(np.float32)
        assert (column.low, column.high) == (float(values.min()), float(values.max()))
        assert column.mean == pytest.approx(values.mean(), abs=1e-4) and column.deviation == pytest.approx(
            values.std(), 1e-4
        )
    assert column_names((Part("obs", (2,), ("x", "y")),)) == ["x", "y"]


def planted(kind: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng()
    obs, actions = clean()
    walk = np.cumsum(random.uniform(0.05, 0.2, STEPS))
    if kind == "constant":
        obs[:, 1] = 4.2
    elif kind == "outlier":
        obs[7, 1] = 1e6
    elif kind == "angle":
        obs[:, 1] = np.mod(walk, 2 * np.pi) - np.pi
    elif kind == "degrees":
        obs[:, 1] = np.mod(30 * walk, 360)
    elif kind == "category":
        obs[:, 1] = random.integers(0, 4, STEPS)
    elif kind == "still":
        obs[random.random(STEPS) < 0.98, 1] = 0.5
    return obs, actions


@pytest.mark.parametrize(
    "kind, remark",
    [
        ("constant", "constant"),
        ("outlier", "outliers: 99.8 % are in"),
        ("angle", "wraps: an angle in radians?"),
        ("degrees", "wraps: an angle in degrees?"),
        ("category", "4 whole numbers: categories?"),
        ("still", "of the steps have the same value"),
    ],
)
def test_a_suspicious_column_is_named(kind: str, remark: str) -> None:
    columns = found(*planted(kind)).columns
    assert any(remark in each for each in columns[1].remarks), columns[1]
    assert not columns[0].remarks and not columns[2].remarks


def test_unit_quaternions_are_recognised() -> None:
    obs, actions = clean()
    turns = np.random.default_rng().normal(size=(STEPS, 4))
    turns /= np.linalg.norm(turns, axis=1, keepdims=True)
    inspection = found(np.hstack([obs, turns]), actions, parts=(Part("p", (3,)), Part("q", (4,))))
    assert [column.remarks for column in inspection.columns[3:7]] == [("part of a unit quaternion?",)] * 4


@pytest.mark.parametrize("shift", [-2, -1, 0, 1, 3])
def test_actions_that_are_a_shifted_observation(shift: int) -> None:
    """Shifted inside each episode; at its ends there is nothing to compare."""
    obs, actions = clean()
    for begin, end in zip(ENDS - 150, ENDS, strict=True):
        rows = np.clip(np.arange(begin, end) + shift, begin, end - 1)
        actions[begin:end, 1] = obs[rows, 2]
    (warning,) = found(obs, actions).warnings
    expected = {
        -2: "the action action[1] lags: it is the observation obs[2] of 2 steps before; are rows shifted?",
        -1: "the action action[1] lags: it is the observation obs[2] of 1 step before; are rows shifted?",
        0: "the action action[1] equals the observation obs[2] of the same step: the policy only needs to copy it",
        1: "the action action[1] is the observation obs[2] of 1 step later",
        3: "the action action[1] is the observation obs[2] of 3 steps later",
    }
    assert warning == expected[shift]


def test_duplicates_pauses_and_odd_lengths() -> None:
    obs, actions = clean()
    obs[150:300], actions[150:300] = obs[:150], actions[:150]
    assert found(obs, actions).warnings == ("episodes that are copies of others: 1 (such as 1, a copy of 0)",)
    obs, actions = clean()
    obs[1::2], actions[1::2] = obs[::2], actions[::2]
    assert any("repeat the observation and the action before them" in each for each in found(obs, actions).warnings)
    obs, actions = clean()
    obs[:, 2] = obs[:, 0]
    assert found(obs, actions).warnings == ("the columns obs[0] and obs[2] are the same",)
    obs, actions = clean()
    ends = np.array([1, 21, 41, 61, 81, 101, 3000])
    assert found(obs, actions, ends).warnings == (
        "episodes with a single step: 1",
        "episode 6 has 2,899 steps, 20 times the median: were ends lost?",
    )


def test_a_large_set_is_looked_at_in_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extremes are those of all steps, wherever they are."""
    monkeypatch.setattr("cebm.demonstrations.inspecting._SAMPLE", 500)
    obs, actions = clean()
    obs[1234, 0] = 77.0
    inspection = found(obs, actions)
    assert inspection.columns[0].high == 77.0 and inspection.steps == STEPS
