"""Claim 15: rank correlations over the runs of the other claims, recipes being what varies."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

import reproduction.claims
from reproduction.claims import thesis
from reproduction.claims.explicit_policies import ExplicitPolicies
from reproduction.claims.formulation import Formulation
from reproduction.claims.integral import Integral
from reproduction.claims.marginal import Marginal
from reproduction.claims.thesis import Thesis, correlation, spearman
from reproduction.claims.validation import Validation
from reproduction.ledger import Results
from reproduction.tests.test_running import TINY, short
from reproduction.trainings import PAPER, Training

OTHERS = (Integral(), Formulation(), Marginal(), Validation(), ExplicitPolicies())


def results(success: Callable[[float], float], gap: Callable[[float], float], recipes: int = 12) -> Results:
    """Three seeds per recipe; both outcomes as functions of the bound, which rises with the recipe."""
    found = {}
    for i in range(recipes):
        found[f"recipe-{i}-digest"] = [
            {
                "curve": [
                    {"mi_bound": 99.0, "success": 0.0, "validation_action_error": 0.0, "train_action_error": 9.0},
                    {
                        "mi_bound": bound,
                        "mi_ceiling": 11.25,
                        "success": success(bound),
                        "validation_action_error": 0.1 + gap(bound),
                        "train_action_error": 0.1,
                    },
                ],
                "conditional_entropy": -bound,
                "coarse": 1.0 if i == 0 else 0.0,
            }
            for bound in (i + 0.1 * seed for seed in range(3))
        ]
    return Results(found)


def test_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thesis, "RESAMPLES", 200)
    judge = Thesis().judge
    finding = judge(results(lambda b: b, lambda b: -b))
    assert finding.verdict == "holds"
    assert finding.numbers["correlations"]["bound-success"] == pytest.approx([1, 1, 1])
    assert "ceiling in 1 of 36 runs" in finding.comment and "in 3 most valleys are too narrow" in finding.comment
    assert finding.numbers["correlations"]["entropy-success"] == pytest.approx([-1, -1, -1])
    assert finding.numbers["correlations"]["bound-error"] == pytest.approx([-1, -1, -1])
    assert "does not go with the bound" not in finding.comment
    assert "does not go with the bound" in judge(results(lambda b: b, lambda b: b)).comment
    assert judge(results(lambda b: -b, lambda b: b)).verdict == "does not hold"  # reversed
    assert judge(results(lambda b: b, lambda b: b)).verdict == "holds"  # the gap does not decide
    assert judge(results(lambda b: -b, lambda b: -b)).verdict == "does not hold"
    assert judge(results(lambda b: abs(b - 5.6), lambda b: -b)).verdict == "inconclusive"
    assert judge(results(lambda b: 0.0, lambda b: 0.0)).verdict == "inconclusive"  # nothing varies
    assert judge(results(lambda b: b, lambda b: -b, recipes=4)).verdict == "inconclusive"


def test_sharpness_is_told_apart_where_energies_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some recipes run away: they are the sharpest, and wrong. The others are the better the sharper they are."""
    monkeypatch.setattr(thesis, "RESAMPLES", 200)
    hand = results(lambda b: b, lambda b: -b)
    for name in list(hand.by_label)[:4]:
        for run in hand.by_label[name]:
            run["curve"][-1] |= {"mi_bound": -1000.0 - run["curve"][-1]["mi_bound"], "success": 0.0}
            run["conditional_entropy"] -= 20
    finding = Thesis().judge(hand)
    assert finding.verdict == "holds" and "24 runs with a bound above 0" in finding.measured
    assert finding.numbers["correlations"]["entropy-success"][2] > 0
    assert finding.numbers["correlations_above_0"]["entropy-success"] == pytest.approx([-1, -1, -1])
    assert "not seen over all runs; it is over those" in finding.comment
    for run in (run for name in list(hand.by_label)[4:] for run in hand.by_label[name]):
        run["conditional_entropy"] *= -1  # reversed: the flatter the better
    assert "nor over those with a bound above 0" in Thesis().judge(hand).comment
    assert (
        "to the paper the way to information, goes with success. A"
        in Thesis().judge(results(lambda b: b, lambda b: -b)).comment
    )


def test_runs_that_diverged_are_left_out_and_counted() -> None:
    hand = results(lambda b: b, lambda b: -b, recipes=6).by_label
    gone = {"diverged": "loss is nan", "curve": [], "conditional_entropy": None}
    finding = Thesis().judge(Results({**hand, "recipe-0-digest": [gone, gone], "gone-digest": [gone]}))
    assert "15 runs of 5 recipes" in finding.measured and finding.measured.endswith("Runs that diverged: 3.")


def test_spearman_is_scipys() -> None:
    generator = np.random.default_rng()
    x, y = generator.normal(size=40), generator.integers(4, size=40).astype(float)  # with ties
    assert spearman(x, y) == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
    assert spearman(x, np.zeros(40)) is None


def test_the_seeds_of_a_recipe_are_not_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty copies of each run say no more than one. A bootstrap over runs would shrink its interval by √20."""
    monkeypatch.setattr(thesis, "RESAMPLES", 500)
    generator = np.random.default_rng()
    x, y = generator.normal(size=10), generator.normal(size=10)
    once = correlation(x.tolist(), y.tolist(), list(range(10)))
    copies = correlation(np.repeat(x, 20).tolist(), np.repeat(y, 20).tolist(), np.repeat(range(10), 20).tolist())
    assert copies.to_json() == pytest.approx(once.to_json())
    as_if_apart = correlation(np.repeat(x, 20).tolist(), np.repeat(y, 20).tolist(), list(range(200)))
    assert as_if_apart.high - as_if_apart.low < 0.5 * (once.high - once.low)


def test_nothing_is_trained_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduction.claims, "CLAIMS", (*OTHERS, Thesis()))
    tasks = Thesis().tasks(PAPER, range(5))
    keys = [task.key for task in tasks]
    asked = {task.key for claim in OTHERS for task in claim.tasks(PAPER, range(claim.most_seeds))}
    assert len(keys) == len(set(keys)) and set(keys) <= asked
    assert all(isinstance(task, Training) for task in tasks)
    jobs = [task.job for task in tasks if isinstance(task, Training)]
    assert {job.task.dim for job in jobs if job.task is not None} == {2} and {job.episodes for job in jobs} == {300}
    assert not any(job.task.random_order for job in jobs if job.task is not None)
    assert {job.name for job in jobs} >= {"ibc", "correct", "correct-mas-maxent-32"} and not {
        "mse",
        "mdn",
    } & {job.name for job in jobs}
    # `ibc` is trained for 2,000 steps by one claim and for 3,000 by another: the longer run is the same, continued.
    assert {job.steps for job in jobs if job.name == "ibc"} == {3000} and 2000 in {job.steps for job in jobs}
    by_label: dict[str, set[int]] = {}
    for task in tasks:
        assert task.seed not in by_label.setdefault(task.label, set())
        by_label[task.label].add(task.seed)


@pytest.mark.slow
def test_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    monkeypatch.setattr(reproduction.claims, "CLAIMS", (Formulation(), Thesis()))
    claim = Thesis()
    tasks = [short(task) for task in claim.tasks(TINY, range(1))]
    finding = claim.judge(Results.of(tasks, {task.key: task.run(tmp_path / task.key) for task in tasks}))
    assert finding.verdict == "inconclusive" and "2 runs of 2 recipes" in finding.measured
    figure = Figure()
    claim.draw(replace(finding, numbers=json.loads(json.dumps(finding.numbers))), figure)
    assert len(figure.axes) == 9
