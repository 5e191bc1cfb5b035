"""Claim 14: the lead of the implicit policy, and whether several modes are what gives it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cebm.evaluation import Evaluation
from cebm.runs import material_of
from cebm.tasks import ParticleTask
from reproduction import trainings
from reproduction.claims.explicit_policies import TASKS, TRIALS, ExplicitPolicies
from reproduction.ledger import Results
from reproduction.tests.test_running import TINY, short
from reproduction.trainings import PAPER, Training, training

NOISE = np.array([0.02, -0.01, 0.0, 0.01, -0.02])


def results(mse: float, mse_random: float, ibc_random: float, noise: float = 1.0, mdn_random: float = 0.9) -> Results:
    """Five seeds around these shares of episodes that reach a goal."""
    shares = {"mse, fixed": mse, "mdn, fixed": 0.9, "ibc, fixed": 0.9}
    shares |= {f"{trial}, plain": 0.1 for trial in TRIALS}
    shares |= {"mse, random": mse_random, "mdn, random": mdn_random, "ibc, random": ibc_random}
    # The noise of `ibc` and of the fixed order alone: with the same in both there would be none in the difference.
    noisy = ("ibc, random", "mse, fixed")
    values = {label: share + noise * NOISE * (label in noisy) for label, share in shares.items()}
    return Results(
        {
            label: [{"last": {"reached_a_goal": float(v), "success": float(1 - v)}} for v in group]
            for label, group in values.items()
        }
    )


def test_the_verdict() -> None:
    judge = ExplicitPolicies().judge
    assert judge(results(0.9, 0.3, 0.8)).verdict == "holds"
    assert judge(results(0.9, 0.8, 0.3)).verdict == "does not hold"  # reversed with the random order
    assert judge(results(0.3, 0.9, 1.0)).verdict == "does not hold"  # a lead, but not by the modes: `mse` gains
    assert judge(results(0.0, 0.0, 0.0)).verdict == "inconclusive"
    # So noisy that nothing can be told: both the lead and the loss reach across zero.
    assert judge(results(0.5, 0.4, 0.5, noise=10.0)).verdict == "inconclusive"


def test_orders_are_not_mixed_up() -> None:
    """Swapping the two tasks turns a loss into a gain."""
    straight = results(0.9, 0.3, 0.8)
    swapped = {
        label.replace("fixed", "random") if "fixed" in label else label.replace("random", "fixed"): runs
        for label, runs in straight.by_label.items()
    }
    loss = ExplicitPolicies().judge(straight).numbers["loss"][0]
    finding = ExplicitPolicies().judge(Results(swapped))
    assert finding.verdict == "does not hold" and finding.numbers["loss"][0] == pytest.approx(-loss)


def test_a_mixture_density_is_spoken_of_where_it_copes() -> None:
    judge = ExplicitPolicies().judge
    assert "being a mean is" in judge(results(0.9, 0.3, 0.8)).comment
    assert "being a mean is" not in judge(results(0.9, 0.3, 0.8, mdn_random=0.2)).comment
    assert "being a mean is" not in judge(results(0.9, 0.3, 0.2)).comment  # nothing for it to cope with as well


def test_the_data_are_the_same_and_have_two_modes() -> None:
    tasks = [task for task in ExplicitPolicies().tasks(PAPER, [3]) if isinstance(task, Training)]
    assert {task.label for task in tasks} == {f"{trial}, {order}" for trial in TRIALS for order in TASKS}
    assert len({(task.job.task, task.job.episodes, task.job.seed) for task in tasks}) == 3
    assert training("ibc", PAPER, 3).key in {task.key for task in tasks}  # which other claims train too
    for task in tasks:
        if task.label.endswith("plain"):
            continue
        demonstrations = material_of(replace(task.job, episodes=60)).training
        starts = np.arange(0, len(demonstrations.obs), 50)
        first_goal = demonstrations.obs[starts, 2:4]
        share = (np.abs(demonstrations.actions[starts] - first_goal).max(1) < 1e-6).mean()
        # Of 60 coin flips all but none fall within 15 and 45 (4 standard deviations).
        assert 0.25 < share < 0.75 if "random" in task.label else share == 1


@pytest.mark.usefixtures("unchecked_shapes")  # there is no policy
def test_a_goal_is_reached_by_going_there_and_not_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement itself, of agents whose behaviour is known."""
    task = next(task for task in ExplicitPolicies().tasks(PAPER, [0]) if task.label == "mse, random")
    assert isinstance(task, Training) and task.job.task is not None

    def share(act: Callable[[np.ndarray], np.ndarray]) -> float:
        def rolled(policy: Any, task: ParticleTask, *, episodes: int, seed: int, **_: Any) -> Evaluation:
            actor: Any = SimpleNamespace(act=act, reset=lambda: None)
            return Evaluation(task.roll_out(actor, episodes, seed).rows, seed, 0.0, 0.0, 0.0)

        monkeypatch.setattr(trainings, "evaluate", rolled)
        policy: Any = None
        return trainings._tested(policy, task.job, task.job.task)["reached_a_goal"]

    assert share(lambda obs: obs[:, 2:4]) == 1  # the first goal
    assert share(lambda obs: obs[:, 4:6]) == 1  # or the second
    between = share(lambda obs: (obs[:, 2:4] + obs[:, 4:6]) / 2)
    assert 0 < between < 0.5  # some start at one, or have it on their way, or their goals are together


def test_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    monkeypatch.setattr(trainings, "information", lambda *_: {})  # takes time, and this claim does not ask
    claim = ExplicitPolicies()
    tasks = [short(task) for task in claim.tasks(TINY, range(2))]
    finding = claim.judge(Results.of(tasks, {task.key: task.run(tmp_path / task.key) for task in tasks}))
    assert finding.verdict in ("holds", "does not hold", "inconclusive")
    figure = Figure()
    claim.draw(replace(finding, numbers=json.loads(json.dumps(finding.numbers))), figure)
    assert len(figure.axes) == 3
