"""Claim 11: equivalence is decided by a margin, and the number of negatives is what it says."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from cebm.recipes import find_trial, vary
from reproduction import trainings
from reproduction.claims.marginal import LONG, PAPERS, Marginal, on_par, steps_per_epoch
from reproduction.intervals import Interval
from reproduction.ledger import Finding, Results, second_half
from reproduction.tests.test_running import TINY, short
from reproduction.trainings import PAPER, Result, Training


def run(*successes: float) -> Result:
    return {
        "steps": 300,
        "curve": [{"step": 100 * (i + 1), "success": s} for i, s in enumerate(successes)],
        "training": [{"step": 100, "negative_distance": 9.0}, {"step": 200, "negative_distance": 1 - successes[-1]}],
        "conditional_entropy": -4 - successes[-1],
    }


def results(
    ibc: list[float], described: list[float], exact: list[float] | None = None, longer: list[float] | None = None
) -> Results:
    by_label = {trial: [run(0.0, s, s) for s in ibc] for trial in PAPERS}
    by_label["correct-mas-maxent"] = [run(0.0, s, s) for s in described]
    more = {f"correct-mas-maxent-{count}": by_label["correct-mas-maxent"][:3] for count in (32, 64)}
    for label, successes in (("in-batch", exact), (LONG, longer)):
        more[label] = [run(0.0, s, s) for s in (successes or described)[:3]]
    return Results(by_label | more)


def test_the_verdict_is_equivalence() -> None:
    ibc, claim = [0.5, 0.6, 0.55, 0.65, 0.6], Marginal()
    near = [s + d for s, d in zip(ibc, (0.02, -0.03, 0.01, 0.0, 0.03), strict=True)]
    assert claim.judge(results(ibc, near)).verdict == "holds"
    assert claim.judge(results(near, ibc)).verdict == "holds"  # neither may be the better one
    worse, better = ([s + sign * 0.3 for s in near] for sign in (-1, 1))
    assert claim.judge(results(ibc, worse)).verdict == "does not hold"
    assert claim.judge(results(ibc, better)).verdict == "does not hold"
    spread = [s + d for s, d in zip(ibc, (0.3, -0.3, 0.2, -0.2, 0.1), strict=True)]
    assert claim.judge(results(ibc, spread)).verdict == "inconclusive"
    assert claim.judge(results([0.1] * 5, [0.1] * 5)).verdict == "inconclusive"  # two that fail


def test_exact_samples_of_the_marginal_are_compared_on_the_same_seeds() -> None:
    def finding(exact: float, spread: float = 0.01) -> Finding:
        exacts = [exact, exact + spread, exact + 2 * spread]
        return Marginal().judge(results([0.7, 0.7, 0.7, 0.1, 0.1], [0.5, 0.52, 0.48, 0.9, 0.9], exacts))

    assert "Nor are exact samples of the marginal (`in-batch`) on par" in finding(0.4).comment
    assert "are on par with `ibc`: the sampler's error" in finding(0.7).comment
    assert "seeds so few do not tell" in finding(0.4, spread=0.1).comment
    assert finding(0.4).numbers["exact over ibc"][0] == pytest.approx(-0.29)
    assert finding(0.4).numbers["learnt over exact"][0] == pytest.approx(0.09)


def test_the_longer_training_is_compared_with_ibc_and_decides_nothing() -> None:
    def finding(longer: float) -> Finding:
        return Marginal().judge(results([0.7, 0.71, 0.72, 0.1, 0.1], [0.4] * 5, longer=[longer, longer, longer + 0.01]))

    assert finding(0.7).numbers["longer over ibc"][0] == pytest.approx(-0.02 / 3)
    assert "it takes longer" in finding(0.7).comment
    assert "time is not what it lacks" in finding(0.5).comment
    assert finding(0.61).comment.endswith("these seeds do not tell, but it is still behind.")
    assert finding(0.8).comment.endswith("these seeds do not tell.")
    assert finding(0.7).verdict == finding(0.5).verdict


def test_negatives_and_valleys_are_told_apart() -> None:
    finding = Marginal().judge(results([0.7] * 5, [0.5] * 5))
    assert finding.numbers["distances"]["ibc"] == pytest.approx([0.3] * 3)
    assert finding.numbers["conditional entropies"]["correct-mas-maxent"] == pytest.approx([-4.5] * 3)
    assert "are 0.5 (0.5 to 0.5) away" in finding.comment and "-4.5 (-4.5 to -4.5) and -4.7" in finding.comment


def test_the_margin() -> None:
    assert on_par(Interval(0.0, -0.09, 0.09)) == "holds"
    assert on_par(Interval(0.05, -0.01, 0.11)) == "inconclusive"
    assert on_par(Interval(-0.2, -0.29, -0.11)) == "does not hold"
    assert on_par(Interval(0.0, -0.4, 0.4)) == "inconclusive"


def test_the_second_half_counts() -> None:
    early, late = run(1.0, 0.2, 0.4), run(0.4, 0.2, 1.0)
    assert second_half(early) == pytest.approx(0.3)
    assert second_half(late) == pytest.approx(0.6)  # the same numbers reversed


def test_a_run_that_diverged_counts_as_zero() -> None:
    from matplotlib.figure import Figure

    hand = results([0.6] * 5, [0.6] * 5)
    gone = run(0.6) | {"diverged": "loss is nan"}
    lost = [*hand.by_label["correct-mas-maxent"][:4], gone]
    claim = Marginal()
    finding = claim.judge(Results(hand.by_label | {"correct-mas-maxent": lost}))
    assert finding.numbers["success"]["correct-mas-maxent"] == pytest.approx([0.6] * 4 + [0.0])
    assert finding.verdict == "inconclusive"  # one of five: −12 ± 33 points
    claim.draw(finding, Figure())
    claim.draw(claim.judge(Results(hand.by_label | {"correct-mas-maxent": [gone] * 5})), Figure())


def test_tasks_differ_in_the_sampler_alone() -> None:
    tasks = [task for task in Marginal().tasks(PAPER, range(5)) if isinstance(task, Training)]
    assert len(tasks) == 4 * 5 + 4 * 3
    assert [task.job.steps for task in tasks if task.label == LONG] == [9000] * 3
    assert vary(find_trial("in-batch"), **{"objective.source": find_trial("ibc").objective.source}) == find_trial("ibc")
    first = [task.job for task in tasks if task.seed == 0 and task.label != LONG]
    assert len({(job.steps, job.episodes, job.task) for job in first}) == 1
    more = next(job for job in first if job.name == "correct-mas-maxent-64")
    assert more.trial.objective.count == 64
    assert vary(more.trial, count=8) == find_trial("correct-mas-maxent")
    assert steps_per_epoch(3000) == 29 and steps_per_epoch(3001) is None and first[0].steps == 3000


def test_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    monkeypatch.setattr(trainings, "information", lambda *_: {"conditional_entropy": 0.0})  # for the time it takes
    claim = Marginal()
    tasks = [short(task) for task in claim.tasks(TINY, range(1))]
    found = Results.of(tasks, {task.key: task.run(tmp_path / task.key) for task in tasks})
    # Weights are small at first, so the first loss is that of guessing among M + 1: M reaches the loss.
    for label, count in (("ibc", 8), ("ibc-mas", 8), ("correct-mas-maxent-32", 32), ("correct-mas-maxent-64", 64)):
        assert found.by_label[label][0]["training"][0]["info_nce"] == pytest.approx(math.log(count + 1), abs=0.05)
    finding = claim.judge(found)
    assert finding.verdict == "inconclusive"  # a single seed has no interval
    finding = replace(finding, numbers=json.loads(json.dumps(finding.numbers)))
    figure = Figure()
    claim.draw(finding, figure)
    assert len(figure.axes) == 2 and figure.axes[0].get_legend() is not None
