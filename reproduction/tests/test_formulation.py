"""Claim 3: end to end at toy size, and its rule by hand-made results."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from cebm.engines import Local
from cebm.recipes import find_trial, vary
from reproduction.claims.formulation import Formulation
from reproduction.ledger import Results, Task
from reproduction.running import reproduce
from reproduction.trainings import PAPER, SMOKE, Result, Training

TINY = replace(SMOKE, steps=4, demonstrations=2, evaluate_every=2, evaluation_episodes=2)


def results(ibc: list[float], correct: list[float]) -> Results:
    """The last policy's success, per seed; along training all was different. Better policies had nearer negatives."""

    def run(success: float) -> Result:
        curve = [{"step": 1, "success": 1 - success}, {"step": 2, "success": success}]
        training = [{"step": step, "negative_distance": 1 - success} for step in (1, 2)]
        last = {"last": {"success": success}, "conditional_entropy": -5 - success}
        return {"steps": 2, "curve": curve, "training": training} | last

    made = {"ibc": ibc, "correct": correct}
    tasks = Formulation().tasks(PAPER, range(len(ibc)))
    return Results.of(tasks, {task.key: run(made[task.label][task.seed]) for task in tasks})


def test_the_verdict_follows_the_difference_and_flips_with_it() -> None:
    good, bad = [0.6, 0.7, 0.65, 0.6, 0.7], [0.3, 0.35, 0.2, 0.3, 0.3]
    judge = Formulation().judge
    assert judge(results(good, bad)).verdict == "holds"
    assert "end further away, where they may teach less" in judge(results(good, bad)).comment
    assert "-5.65 (-5.71 to -5.59) nats with IBC's step and -5.29" in judge(results(good, bad)).comment
    assert judge(results(bad, good)).verdict == "does not hold"
    assert "do not end further away" in judge(results(bad, good)).comment
    assert judge(results(good, good)).verdict == "inconclusive"
    # Further away and yet better: what would explain the opposite is not said.
    odd = results(bad, good)
    for label, away in (("ibc", 0.2), ("correct", 0.9)):
        for run in odd.by_label[label]:
            run["training"] = [{"step": 2, "negative_distance": away}]
    assert judge(odd).verdict == "does not hold" and "teach less" not in judge(odd).comment
    assert "these runs do not show" in judge(odd).comment
    assert judge(results([0.9, 0.1, 0.9, 0.1, 0.5], [0.3] * 5)).verdict == "inconclusive"
    assert judge(results([0.9], [0.1])).verdict == "inconclusive"  # one seed decides nothing


def test_the_difference_is_paired_by_seed() -> None:
    # Seeds differ by far more than trials do, who gain 0.1 on each.
    correct = [0.0, 0.2, 0.4, 0.6, 0.8]
    ibc = [value + 0.1 + 0.01 * sign for value, sign in zip(correct, (-1, 1, 0, 1, -1), strict=True)]
    finding = Formulation().judge(results(ibc, correct))
    half = 2.776 * 0.01 / math.sqrt(5)  # Student's t with 4 degrees of freedom; the deviations' variance is 0.01²
    assert finding.numbers["difference"] == pytest.approx([0.1, 0.1 - half, 0.1 + half])
    assert finding.verdict == "holds"
    # Planted: one trial's seeds in another order. The differences then are up to 0.9, and decide nothing.
    assert Formulation().judge(results(ibc[::-1], correct)).verdict == "inconclusive"


def test_the_trials_differ_in_their_sampler_alone() -> None:
    ibc, correct = find_trial("ibc"), find_trial("correct")
    assert vary(correct, **{"objective.source.sampler": ibc.objective.source.sampler}) == ibc != correct


def run_short(task: Task, out: Path, runs: Path) -> None:
    """Runs a training with episodes of four steps, and writes its record as if they had all."""
    assert isinstance(task, Training) and task.job.task is not None
    job = replace(task.job, task=replace(task.job.task, steps=4))
    record = {"result": replace(task, job=job).run(runs / task.key), "commit": None, "seconds": 1.0}
    (out / "runs").mkdir(parents=True, exist_ok=True)
    (out / "runs" / f"{task.key}.json").write_text(json.dumps(record))


@pytest.mark.usefixtures("unchecked_shapes")  # for the time they take; test_training.py checks those of every trial
def test_end_to_end(tmp_path: Path) -> None:
    claim, out, runs = Formulation(), tmp_path / "results", tmp_path / "runs"
    tasks = claim.tasks(TINY, range(2))
    for task in tasks:
        run_short(task, out, runs)
    finding = reproduce([claim], TINY, 2, Local(1), out, runs)["formulation"]  # nothing is missing, so it only judges
    for task in tasks:
        measured = json.loads((out / "runs" / f"{task.key}.json").read_text())["result"]
        assert finding.numbers["success"][task.label][task.seed] == measured["last"]["success"]
        along = [(row["step"], row["success"]) for row in measured["curve"]]
        assert finding.numbers["curves"][task.label][task.seed] == along
        assert [step for step, _ in along] == [2, 4]
    record = json.loads((out / "03-formulation.json").read_text())
    assert record["verdict"] == finding.verdict and record["seeds"] == [0, 1]
    assert (out / "03-formulation.png").stat().st_size > 5000
