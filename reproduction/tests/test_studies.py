"""The studies beside the claims: their runs, the rules that read them, and what becomes of the records."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cebm.composition import vary
from cebm.energies import Residual
from cebm.engines import Local
from cebm.negatives.marginal import MarginalActionSampler
from cebm.objectives import GradientPenalty
from cebm.recipes import find_trial
from cebm.runs import restored, train, trainer_of
from cebm.storage import write_document
from cebm.sweep import sweep
from cebm.tasks import ParticleTask
from reproduction.evidence import markdown
from reproduction.intervals import Interval
from reproduction.studies import measuring, searches, shared, sixteen, ten_seeds
from reproduction.studies.__main__ import NAMES, find_study, write_evidence
from reproduction.studies.reading import Swept, sign_flip
from reproduction.studies.searches import DECIDES, SEARCHES, WEIGHTS, Searches, measured
from reproduction.trainings import PAPER, SMOKE, training

RESULTS = Path(__file__).parents[1] / "results"
TOY = replace(SMOKE, steps=4, demonstrations=4, many=4, evaluate_every=4, evaluation_episodes=1)

PAIR = f"correct-mas-maxent − ibc ({DECIDES})"


def record(label: str, seed: int, result: dict[str, Any]) -> dict[str, Any]:
    return {"key": f"{label}-{seed}", "label": label, "seed": seed, "result": result}


def of_searches(shift: float, seeds: int = 5) -> dict[str, Any]:
    """All trials are alike but one, which differs by `shift`, more or less, in the cell that decides."""
    rows = []
    for seed in range(seeds):
        for name in ("ibc", "correct-mas-maxent"):
            off = shift + 0.01 * (seed - 2) if name == "correct-mas-maxent" else 0.0
            rows.append(record(name, seed, dict.fromkeys(Searches.shown, 0.7) | {DECIDES: 0.7 + off}))
    return Searches().evidence(rows)


def compared(evidence: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [row for row in evidence["comparisons"] if row["what"] == name]
    return found


@pytest.mark.parametrize(("shift", "verdict"), [(0.02, "holds"), (-0.3, "does not hold"), (-0.1, "inconclusive")])
def test_on_par_is_within_ten_points(shift: float, verdict: str) -> None:
    found = of_searches(shift)
    assert compared(found, PAIR)["verdict"] == verdict and compared(found, PAIR)["decides"]
    other = compared(found, "correct-mas-maxent − ibc (averaged, 64 × 10)")
    assert other["verdict"] == "holds" and not other["decides"] and other["seeds"] == 5
    assert f"5 seeds: **{verdict}** (decides)" in markdown(found)


def test_fewer_seeds_decide_nothing() -> None:
    found = of_searches(-0.3, seeds=4)
    assert compared(found, PAIR)["verdict"] is None and compared(found, PAIR)["difference"][0] == pytest.approx(-0.305)
    assert "-0.305" in markdown(found) and "4 of 5 seeds, no verdict" in markdown(found)
    assert compared(found, f"ibc-mas − ibc ({DECIDES})")["seeds"] == 0
    assert f"ibc-mas − ibc ({DECIDES}): no seed yet." in markdown(found)
    one = of_searches(-0.3, seeds=1)
    assert compared(one, PAIR)["difference"][1:] == [None, None] and "1 of 5 seeds" in markdown(one)
    with pytest.raises(ValueError, match="searches: there is no record of this study"):
        Searches().evidence([record("another", 0, {})])


def test_pairs_are_of_the_same_seed_and_a_run_that_diverged_has_no_success() -> None:
    rows = [record("ibc", seed, {DECIDES: 0.5 + 0.1 * seed}) for seed in (0, 1, 2)]
    rows += [record("correct-mas-maxent", 2, {DECIDES: 0.7}), record("correct-mas-maxent", 1, {"diverged": "the loss"})]
    found = compared(Searches().evidence(rows), PAIR)
    assert found["seeds"] == 2 and found["difference"][0] == pytest.approx((0.0 - 0.6) / 2)


def test_the_pair_that_decides_runs_first() -> None:
    planned = Searches().plan()
    assert [(run.job.name, run.job.seed) for run in planned[:3]] == [
        ("ibc", 0),
        ("correct-mas-maxent", 0),
        ("ibc", 1),
    ]
    assert {run.job.name for run in planned[:10]} == {"ibc", "correct-mas-maxent"}
    assert len({run.key for run in planned}) == 20
    assert all(run.job.trial.optimiser.average == searches.AVERAGE and run.job.steps == 3000 for run in planned)


def test_raw_and_averaged_weights_are_both_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = vary(find_trial("ibc"), **{"optimiser.average": 0.5})
    job = training(trial, SMOKE, 0, "ibc", steps=4, followed=False).job
    train(job, tmp_path / "run")
    seen = []

    def success(policy: object, task: object, candidates: int, steps: int) -> float:
        seen.append((policy.energy.last.bias.item(), candidates, steps))  # type: ignore[attr-defined]
        return 0.5

    monkeypatch.setattr(searches, "success", success)
    found = measured(tmp_path / "run")
    assert list(found) == [f"{weights}, {search}" for weights in WEIGHTS for search in SEARCHES]
    trainer, _ = restored(job, tmp_path / "run")
    raw, averaged = (trainer.policy(averaged=one).energy.last.bias.item() for one in (False, True))
    assert raw != averaged
    assert seen == [(bias, *effort) for bias in (raw, averaged) for effort in SEARCHES.values()]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ten_seeds"])
def test_a_study_names_its_runs_and_reads_what_it_measures(name: str) -> None:
    study = find_study(name)
    assert isinstance(study, Swept) and study.slug == name
    planned = study.plan()
    assert len({run.key for run in planned}) == len(study.arms()) * study.seeds_needed
    assert {run.job.seed for run in planned} == set(range(study.seeds_needed))
    assert study.measure == f"reproduction.studies.{name}:measured"
    labels = {arm.label for arm in study.arms()}
    assert {each.arm for each in study.comparisons()} | {each.other for each in study.comparisons()} <= labels


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "ten_seeds"])
def test_a_study_runs_end_to_end_at_toy_size(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number that its table shows and its comparisons read is measured; a later reading adds to the first."""
    study = find_study(name)
    monkeypatch.setattr(type(study), "scale", TOY)
    monkeypatch.setattr(measuring, "EPISODES", 2)
    found = importlib.import_module(f"reproduction.studies.{name}").measured
    (tmp_path / "records").mkdir()
    told: set[str] = set()
    for i, arm in enumerate(study.arms()):  # type: ignore[attr-defined]
        run = arm.planned(TOY, 0)
        train(run.job, tmp_path / "runs" / run.key)
        result = found(tmp_path / "runs" / run.key)
        told |= result.keys()
        row = {"key": run.key, "label": arm.label, "seed": 0, "seconds": 1.0, "commit": "c", "result": result}
        write_document(tmp_path / "records" / f"{run.key}.json", row)
        evidence = write_evidence(study, tmp_path, tmp_path / "results") if i else None
    assert {*study.shown, *(each.metric for each in study.comparisons())} <= told
    assert evidence is None or len(evidence["runs"]) == len(study.arms())  # type: ignore[attr-defined]


def test_an_exact_test_by_hand() -> None:
    assert sign_flip([1.0, 2.0, 3.0]) == 2 / 8  # only +++ and −−− are as far from 0
    assert sign_flip([1.0, -2.0, 3.0]) == 6 / 8  # a sum of 2 or more: ±(6, 4, 2)
    assert sign_flip([0.0, 0.0]) == 1.0
    assert sign_flip([0.1] * 10) == 2 / 2**10


def test_the_exact_test_keeps_its_level() -> None:
    """Of 4,000 samples without an effect a share of at most 2.5 % has p < 0.025; 4.5 standard deviations above it."""
    draws = np.random.default_rng().standard_normal((4000, 7))
    share = np.mean([sign_flip(list(row)) < 0.025 for row in draws])
    assert share < 0.025 + 4.5 * np.sqrt(0.025 * 0.975 / 4000)
    assert share > 0.005  # 2/128 of the patterns are that extreme


def of_ten(gain: float, spread: float, seeds: int = 10) -> dict[str, Any]:
    rows = []
    for seed in range(seeds):
        for name, value in (("ibc", 0.6 + gain + spread * (-1) ** seed), ("correct", 0.6)):
            rows.append(record(name, seed, {ten_seeds.HELD_OUT: value}))
    return compared(ten_seeds.study.evidence(rows), f"ibc − correct ({ten_seeds.HELD_OUT})")


def test_ten_seeds_need_the_interval_and_the_exact_test() -> None:
    assert of_ten(0.1, 0.02)["verdict"] == "holds" and of_ten(0.1, 0.02)["p"] == 2 / 1024
    assert of_ten(-0.1, 0.02)["verdict"] == "does not hold"
    assert of_ten(0.01, 0.1)["verdict"] == "inconclusive"
    assert of_ten(0.1, 0.02, seeds=9)["verdict"] is None


def test_the_ledger_s_own_records_are_read_with_ten_seeds() -> None:
    found = ten_seeds.study.records(RESULTS)
    assert {row["label"] for row in found.values()} == set(ten_seeds.study.labels())
    mine = next(row for row in found.values() if row["label"] == "correct" and row["seed"] == 2)
    whole = json.loads((RESULTS / "runs" / f"{mine['key']}.json").read_text())["result"]
    assert mine["result"][ten_seeds.HELD_OUT] == whole["last"]["success"]
    assert mine["result"][ten_seeds.ENTROPY] == whole["conditional_entropy"]


def test_shared_negatives_are_compared_at_equal_time() -> None:
    points = [[250, 0.1], [500, 0.4], [750, 0.6]]
    assert shared.at_time(points, 0.1, 60.0) == 0.4
    assert shared.at_time(points, 0.1, 10.0) is None
    assert shared.at_time(points, 0.1, 75.0) == 0.6
    assert shared.free(Interval(-0.02, -0.05, 0.01)) == "holds"
    assert shared.free(Interval(-0.2, -0.3, -0.1)) != "holds"


def test_a_marginal_that_is_flat_has_the_density_of_the_box_and_a_histogram_more() -> None:
    trial = vary(find_trial("correct-mas-maxent"), **{"optimiser.average": 0.5})
    task = ParticleTask(goal_clusters=2)
    job = training(trial, SMOKE, 0, "mas", task=task, episodes=200, steps=4, followed=False).job
    trainer = trainer_of(job)
    sampler = next(module for module in trainer.learner.modules() if isinstance(module, MarginalActionSampler))
    with torch.no_grad():
        for weight in sampler.marginal.parameters():
            weight.zero_()
    found = measuring.marginal_fit(trainer, job)
    assert found["log p, learnt marginal"] == pytest.approx(found["log p, uniform"], abs=1e-5)
    assert found["log p, histogram"] > found["log p, uniform"] + 0.3  # goals lie in clusters, and actions at goals
    assert measuring._by_histogram(np.zeros((3, 2)), np.ones((2, 2)), 1.1, 1) == pytest.approx(-2 * np.log(2.2))
    plain = trainer_of(training("ibc", SMOKE, 0, steps=4, followed=False).job)
    assert measuring.marginal_fit(plain, job) == {}


def test_the_settings_of_sixteen_dimensions_are_the_full_ones() -> None:
    trial = sixteen.full_settings(PAPER)
    assert trial.objective.source.sampler.steps == trial.acting.sampler.steps == 100
    assert isinstance(trial.energy, Residual) and trial.penalties == (GradientPenalty(1.0, margin=1.0),)
    run = sixteen.study.plan()[0].job
    assert (run.steps, run.episodes, run.task) == (10_000, 2000, ParticleTask(dim=16))


@pytest.mark.slow
def test_a_study_may_name_its_measure(tmp_path: Path) -> None:
    trial = vary(find_trial("mse"), **{"optimiser.average": 0.5})
    job = training(trial, SMOKE, 0, "mse", steps=4, followed=False).job
    (found,) = sweep([job], Local(1), tmp_path, measure="reproduction.tests.test_studies:counted", progress=False)
    assert found["result"] == {"files": 1}


def counted(directory: Path) -> dict[str, int]:
    return {"files": len(list(directory.glob("run.json")))}
