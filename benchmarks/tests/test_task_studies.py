"""The studies of real tasks: their runs, what is measured of one, and the table."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import task_studies
from benchmarks.task_studies import Recipe, Results, Way, measured, table, without_tilt
from cebm.loading import load
from cebm.recipes import find_trial, vary
from cebm.runs import Job, train
from cebm.tasks import ParticleTask, PushT


def run(recipe: str, where: Path) -> Path:
    trial = vary(find_trial(recipe), **{"inputs.horizon": 8, "optimiser.batch_size": 16})
    job = Job(recipe, trial, ParticleTask(steps=3), episodes=2, steps=2, evaluation_episodes=1, evaluate_every=2)
    train(job, where)
    return where


def record(seed: int, rewards: dict[str, list[float]]) -> dict[str, Any]:
    ways = {name: {"reward": found, "success": [0, 1], "action_ms": 1.0} for name, found in rewards.items()}
    return {"label": "steady", "seed": seed, "result": {"seconds": 10.0 + seed, "ways": ways}}


def test_every_recipe_has_every_seed() -> None:
    planned = Results(
        PushT(), "push-t.npz", {"steady": Recipe("steady", 20), "mse": Recipe("mse", 10, {"width": 8})}, (0, 1)
    ).plan()
    assert [(each.job.name, each.job.seed, each.job.steps) for each in planned] == [
        ("steady", 0, 20),
        ("mse", 0, 10),
        ("steady", 1, 20),
        ("mse", 1, 10),
    ]
    assert planned[1].job.trial.energy.width == 8  # type: ignore[attr-defined]
    inputs = planned[0].job.trial.inputs
    assert (inputs.history, inputs.horizon) == (task_studies.HISTORY, task_studies.HORIZON)


def test_a_run_acts_in_every_way_of_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_studies, "EPISODES", 2)
    monkeypatch.setitem(task_studies.WAYS, "steady", {"as trained": Way(), "without f": Way(without_tilt)})
    directory = run("steady", tmp_path / "steady")
    found = measured(directory)
    assert list(found["ways"]) == ["as trained", "without f"] and found["seconds"] > 0
    assert all(len(way["success"]) == 2 for way in found["ways"].values())
    # The base alone: no energy of the tilt is left.
    policy = load(directory / "policy")
    base = without_tilt(policy)
    obs = policy.obs_box.centre
    energies = base.propose(obs, candidates=4).energies
    assert energies.shape == (1, 4) and base.energy.obs_dim == policy.energy.obs_dim
    assert not any(name.startswith("tilt") for name in base.energy.state_dict())
    with pytest.raises(ValueError, match="no base that could act alone"):
        without_tilt(base)


def test_the_table_pairs_episodes() -> None:
    rows = [record(seed, {"as trained": [0.2, 0.8], "other": [0.3, 1.0]}) for seed in (1, 0)]
    found = table(rows, "reward")
    assert found["steady, as trained"]["seeds"] == [0, 1] and found["steady, as trained"]["to as trained"] is None
    assert found["steady, other"]["reward"][0] == pytest.approx(0.65)
    half = 1.96 * np.std([0.1, 0.2, 0.1, 0.2], ddof=1) / 2
    assert found["steady, other"]["to as trained"] == pytest.approx([0.15, 0.15 - half, 0.15 + half])


def test_the_studies_can_be_planned() -> None:
    """Every name and setting of the committed studies exists."""
    labels = [each.job.name for each in task_studies.push_t.plan()]
    assert len(labels) == 5 * len(task_studies.push_t.recipes) and set(task_studies.WAYS) <= set(labels)
