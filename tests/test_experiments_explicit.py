"""Claim 14: the lead of the implicit policy, and whether several modes are what gives it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cebm.experiments import ledger
from cebm.experiments.explicit_policies import TRIALS, ExplicitPolicies
from cebm.experiments.ledger import PAPER, Results, Training
from cebm.training import demonstrations_of
from test_experiments_running import TINY, short

NOISE = np.array([0.02, -0.01, 0.0, 0.01, -0.02])


def results(mse: float, ibc: float, mse_random: float, ibc_random: float, noise: float = 1.0) -> Results:
    """Five seeds around these rates."""
    rates = {"mse": mse, "ibc": ibc, "mdn": 0.9}
    rates |= {"mse, random order": mse_random, "ibc, random order": ibc_random, "mdn, random order": 0.4}
    # The noise of `ibc` alone: with the same in both there would be none in the difference.
    values = {label: rate + noise * NOISE * label.startswith("ibc") for label, rate in rates.items()}
    return Results({label: [{"last": {"success": float(v)}} for v in group] for label, group in values.items()})


def test_the_verdict() -> None:
    judge = ExplicitPolicies().judge
    assert judge(results(0.9, 0.6, 0.0, 0.4)).verdict == "holds"
    assert judge(results(0.9, 0.6, 0.4, 0.0)).verdict == "does not hold"  # reversed with the random order
    assert judge(results(0.0, 0.6, 0.0, 0.3)).verdict == "does not hold"  # a lead, but modes shrink it
    assert judge(results(0.0, 0.0, 0.0, 0.0)).verdict == "inconclusive"
    # So noisy that nothing can be told: both the lead and its growth reach across zero.
    assert judge(results(0.9, 0.6, 0.0, 0.01, noise=10.0)).verdict == "inconclusive"


def test_orders_are_not_mixed_up() -> None:
    """Swapping the two tasks turns a growth into a loss."""
    straight = results(0.9, 0.6, 0.0, 0.4)
    swapped = {
        label.removesuffix(", random order") if "random" in label else f"{label}, random order": runs
        for label, runs in straight.by_label.items()
    }
    growth = ExplicitPolicies().judge(straight).numbers["growth"][0]
    finding = ExplicitPolicies().judge(Results(swapped))
    assert finding.verdict == "does not hold" and finding.numbers["growth"][0] == pytest.approx(-growth)


def test_the_data_are_the_same_and_have_two_modes() -> None:
    tasks = [task for task in ExplicitPolicies().tasks(PAPER, [3]) if isinstance(task, Training)]
    assert {task.label for task in tasks} == {*TRIALS, *(f"{trial}, random order" for trial in TRIALS)}
    assert len({(task.job.task, task.job.episodes, task.job.seed) for task in tasks}) == 2
    for task in tasks[0], tasks[-1]:
        demonstrations = demonstrations_of(replace(task.job, episodes=60))[0]
        starts = np.arange(0, len(demonstrations.obs), 50)
        first_goal = demonstrations.obs[starts, 4:6]
        share = (np.abs(demonstrations.actions[starts] - first_goal).max(1) < 1e-6).mean()
        # Of 60 coin flips all but none fall within 15 and 45 (4 standard deviations).
        assert 0.25 < share < 0.75 if "random" in task.label else share == 1


def test_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    monkeypatch.setattr(ledger, "information", lambda *_: {})  # takes time, and this claim does not ask
    claim = ExplicitPolicies()
    tasks = [short(task) for task in claim.tasks(TINY, range(2))]
    finding = claim.judge(Results.of(tasks, {task.key: task.run(tmp_path / task.key) for task in tasks}))
    assert finding.verdict in ("holds", "does not hold", "inconclusive")
    figure = Figure()
    claim.draw(replace(finding, numbers=json.loads(json.dumps(finding.numbers))), figure)
    assert len(figure.axes) == 2
