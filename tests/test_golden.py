"""What every trial gave before the rooms were opened, it gives today: losses, weights, actions. Old files load."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import cebm
from cebm.composition import vary
from cebm.recipes import TRIALS
from cebm.runs import load_job, resume
from golden import record

GOLDEN = Path(__file__).parent / "golden"
RECORD = json.loads((GOLDEN / "trials.json").read_text())
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
KEYS = {"candidates": 8}


@pytest.fixture(autouse=True)
def _one_thread():
    """The records were made on one thread; sums over two round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same_machine() -> bool:
    """Whether bits can be compared: the same torch on the same kind of processor."""
    return RECORD["torch"] == torch.__version__ and RECORD["processor"] == record.processor()


def close(one: float, other: float) -> bool:
    """Equal to the last bit where the machine is the same, otherwise up to what rounding does in twenty steps."""
    if same_machine():
        return one == other
    return math.isclose(one, other, rel_tol=2e-2, abs_tol=2e-3)


def close_metric(key: str, one: float, other: float) -> bool:
    """Two metrics were mended since: errors are taken in float64, and a bound below 0, which says nothing, is 0."""
    if key.endswith("_action_error"):
        return math.isclose(one, other, rel_tol=1e-5 if same_machine() else 2e-2)
    return close(one, max(0.0, other) if key == "mi_bound" else other)


def trial_of(name: str):
    return record.trial_of(RECORD["trials"][name]["trial"], name)


@pytest.mark.parametrize("name", [name for name in RECORD["trials"] if name in TRIALS])
def test_a_trial_is_composed_as_its_strings_said(name):
    trial = TRIALS[name]
    if name in ("mcmc-loss", "conditional-maxent"):  # their loss had no anchor then
        trial = vary(trial, anchor=0.0)
    assert trial_of(name) == trial


QUICK = ("steady", "ibc", "correct-mas-maxent", "joint-replay", "mdn", "in-batch-corrected")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RECORD["trials"]]
)
def test_twenty_steps_and_the_actions_are_as_they_were(name):
    golden, found = RECORD["trials"][name], record.results(trial_of(name))
    for step, (loss, wanted) in enumerate(zip(found["loss"], golden["loss"], strict=True)):
        assert close(float.fromhex(loss), float.fromhex(wanted)), f"loss of step {step}"
    assert found["last"].keys() == golden["last"].keys()
    for key, value in golden["last"].items():
        assert close(float.fromhex(found["last"][key]), float.fromhex(value)), key
    if same_machine():
        assert found["weights"] == golden["weights"]
        assert found["actions"] == golden["actions"]
    for key, value in found["validate"].items():
        assert close_metric(key, float.fromhex(value), float.fromhex(golden["validate"][key])), key


@pytest.mark.parametrize("name", sorted(path.name for path in (GOLDEN / "policies").iterdir()))
def test_a_policy_of_format_2_loads_and_acts_as_it_did(name):
    policy = cebm.load(GOLDEN / "policies" / name)
    obs = np.tile(record.observations(), (1, policy.history))
    actions = policy.act(obs, **KEYS)
    wanted = [[float.fromhex(x) for x in row] for row in EXPECTED[name]]
    if same_machine():
        assert actions.tolist() == wanted
    else:
        np.testing.assert_allclose(actions, wanted, atol=1e-3)


@pytest.mark.parametrize("name", sorted(path.name for path in (GOLDEN / "runs").iterdir()))
def test_a_run_of_the_first_format_resumes(name, tmp_path):
    where = tmp_path / name
    shutil.copytree(GOLDEN / "runs" / name, where)
    assert load_job(where).name == name
    outcome = resume(where)
    wanted = EXPECTED[f"run {name}"]
    assert [(row["kind"], row["step"]) for row in outcome.metrics] == [(row["kind"], row["step"]) for row in wanted]
    for row, golden in zip(outcome.metrics, wanted, strict=True):
        if row["step"] <= 6:  # rows that were there before stay as they are
            golden, row = {}, golden
        for key, value in golden.items():
            assert row[key] == value if isinstance(value, str) else close_metric(key, row[key], value), key
