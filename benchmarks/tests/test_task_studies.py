"""The studies of real tasks: their runs, what is measured of one, and the table."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import task_studies
from benchmarks.task_studies import Recipe, Results, Way, measured, table, with_others, without_tilt
from cebm.loading import load
from cebm.recipes import find_trial, vary
from cebm.runs import Job, train
from cebm.tasks import Forks, ParticleTask, PushT


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
    parts = [each.job.name for each in task_studies.push_t_parts.plan()]
    assert len(labels) == 5 * len(task_studies.push_t.recipes) and set(task_studies.WAYS) <= {
        *labels,
        *parts,
        *task_studies.forks.recipes,
    }
    assert [each.job.trial.inputs.horizon for each in task_studies.push_t_parts.plan()[:3]] == [16, 8, 32]


def test_mixed_demonstrations_of_all_tasks_come_first() -> None:
    planned = task_studies.metaworld.plan()
    first = [each.job.name for each in planned[:20]]
    assert all("mixed: " in name for name in first) and len({name.split(",")[0] for name in first}) == 10
    assert [each.job.seed for each in planned] == sorted(each.job.seed for each in planned)
    names = [each.job.name for each in planned]
    assert len(names) == 5 * 10 * 2 * 2 + 10 * 2 and len(set(names)) == 60


def test_differences_to_a_reference_are_those_of_the_seeds_that_both_have() -> None:
    rows = [record(seed, {"as trained": [0.2, 0.8]}) for seed in (0, 1)]
    other = record(1, {"as trained": [0.3, 1.0], "drawn": [0.2, 0.8]}) | {"label": "mdn"}
    found = table([*rows, other], "reward", "steady")
    half = 1.96 * np.std([0.1, 0.2], ddof=1) / 2**0.5
    assert found["mdn, as trained"]["to the reference"] == pytest.approx([0.15, 0.15 - half, 0.15 + half])
    assert found["mdn, drawn"]["to the reference"] == pytest.approx([0.0, 0.0, 0.0])
    assert found["mdn, drawn"]["to as trained"] == pytest.approx([-0.15, -0.15 - half, -0.15 + half])
    assert found["steady, as trained"]["to the reference"] is None
    assert (found["mdn, drawn"]["recipe"], found["mdn, drawn"]["way"]) == ("mdn", "drawn")
    apart = record(5, {"as trained": [1.0, 1.0]}) | {"label": "ibc"}
    assert table([*rows, apart], "reward", "steady")["ibc, as trained"]["to the reference"] is None
    with pytest.raises(ValueError, match="no recipe 'annealed' to compare with; there are steady"):
        table(rows, "reward", "annealed")


def test_the_table_has_what_a_task_says_of_all_episodes() -> None:
    row = record(0, {"as trained": [0.2, 0.8]})
    row["result"]["ways"]["as trained"]["entropy"] = 0.75
    assert table([row], "success")["steady, as trained"]["entropy"][0] == 0.75


def test_experts_are_played_on_the_held_out_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_studies, "EPISODES", 60)
    [(case, found)] = task_studies.experts(task_studies.forks).items()
    assert case == "" and found["success"] == 1.0 and 0.85 < found["entropy"] <= 1.0
    one_way = replace(task_studies.forks, task=Forks(gaps=(1, 2), odds=((1.0,), (1.0, 0.0))), case="one way")
    assert task_studies.experts(one_way) == {"one way": {"success": 1.0, "entropy": 0.0}}


def test_draws_that_are_not_moved_are_those_of_the_mixture(tmp_path: Path) -> None:
    policy = load(run("mdn", tmp_path / "mdn") / "policy")
    drawn = task_studies.WAYS["mdn"]["drawn"].change(policy)
    obs = policy.obs_box.centre.expand(400, -1)
    generator = torch.Generator().manual_seed(0)
    actions = drawn.act(obs, generator=generator)
    assert len(actions.unique(dim=0)) == 400 and len(policy.act(obs).unique(dim=0)) == 1


def test_records_of_other_runs_stay() -> None:
    runs = (("steady", 0), ("annealed", 0), ("annealed", 1))
    old = [{"label": name, "seed": seed, "of": "old"} for name, seed in runs]
    new = [{"label": "annealed", "seed": 1, "of": "new"}, {"label": "annealed", "seed": 2, "of": "new"}]
    assert with_others(new, old) == [*new, *old[:2]]
