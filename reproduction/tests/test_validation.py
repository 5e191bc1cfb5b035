"""Claim 12: the settings are the reference's, and the comparison sees what differs."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cebm.energies import MLP
from cebm.negatives import Uniform
from cebm.objectives import InfoNCE
from cebm.samplers import run
from cebm.spaces import Specification
from reproduction.claims.validation import (
    CASES,
    COLUMNS,
    COMPARED,
    DISTANCE,
    TRAINED,
    Case,
    Recorder,
    Validation,
    deviation,
    read_reference,
    reference_trial,
    trainer_of,
    within,
)
from reproduction.command import REFERENCE
from reproduction.ledger import Computation, Results
from reproduction.tests.test_running import TINY, short
from reproduction.trainings import PAPER, Result

STEPS = np.arange(31)


def course(scale: float = 1.0) -> dict[str, list[float]]:
    """Curves such as those of a training."""
    fall = np.exp(-STEPS / 8)
    energies = {"positive_energy": -10 * (1 - fall), "chain_first_energy": 5 * (1 - fall)}
    energies |= {"chain_last_energy": -2 * (1 - fall)}
    rest = {name: 0.5 + 1.5 * fall for name in COLUMNS if name not in energies}
    return {name: (scale * values).tolist() for name, values in (energies | rest).items()}


def results(ours: list[dict[str, list[float]]], error: float = 0.01) -> Results:
    """Three seeds."""
    row = {"step": 1, "info_nce": 1.0, "positive_energy": 0.0, "negative_energy": 1.0, "energy_gap": 1.0}
    trained: list[Result] = [
        {
            "curve": [{"train_action_error": error + 0.001 * seed}],
            "training": [row | {"negative_distance": 1.0}],
            "last": {"success": 0.5},
        }
        for seed in range(3)
    ]
    computed = [
        {
            "cases": {case.name: {"ours": one, "reference": course()} for case in CASES},
            "other_episodes": [course(1.1)[DISTANCE], course(0.9)[DISTANCE]],
            "success": 0.8,
        }
        for one in ours
    ]
    return Results({"computation": computed, "1 episode": list(trained)} | dict.fromkeys(TRAINED[1:], trained))


def near(noise: float) -> list[dict[str, list[float]]]:
    """Three seeds about the reference, each off by a share of it; the level of the energies is free."""
    found = []
    for sign, level in ((-1.0, 0.0), (0.5, 50.0), (1.0, -7.0)):
        one = course(1 + sign * noise)
        found.append(
            {name: [v + level for v in values] if "energy" in name else values for name, values in one.items()}
        )
    return found


def test_the_verdict() -> None:
    judge = Validation().judge
    assert judge(results(near(0.02))).verdict == "holds"
    turned = [{name: values[::-1] for name, values in one.items()} for one in near(0.02)]
    assert judge(results(turned)).verdict == "does not hold"
    assert judge(results(near(0.02), error=0.2)).verdict == "does not hold"
    assert judge(results([course(1.0), course(1.9), course(1.0)])).verdict == "inconclusive"
    lost = results(near(0.02))
    lost.by_label["1 episode"][:] = [{"diverged": "loss is nan", "curve": [], "training": []}] * 3
    assert judge(lost).verdict == "does not hold"
    # One column of one case is enough.
    wrong = near(0.02)
    for one in wrong:
        one["positive_energy"] = [value + 8 for value in one["positive_energy"]]
    assert judge(results(wrong)).verdict == "does not hold"


def test_what_keeps_it_from_holding_is_named() -> None:
    judge = Validation().judge
    comment = judge(results(near(0.02))).comment
    assert "Not within its limit" not in comment
    far = results(near(0.02))
    for computed in far.by_label["computation"]:  # the distances of the one episode, and nothing else
        both = computed["cases"][CASES[0].name]
        both["ours"] = both["ours"] | {DISTANCE: course(2.0)[DISTANCE]}
    finding = judge(far)
    assert finding.verdict == "does not hold" and finding.comment.endswith("seeds and episodes do.")
    assert "limit: distance in 2-D, 1 episode." in finding.comment
    assert "100 % of the rows" in finding.measured and "9 episodes of ours, 3 of them lower" in finding.measured
    for computed in far.by_label["computation"]:
        computed["other_episodes"] = [course(1.5)[DISTANCE]]
    assert judge(far).comment.endswith("0 % of the time in the range of ours.")
    assert judge(results(near(0.02), error=0.2)).comment.endswith("limit: action error on the one episode.")


def test_rows_within_others_by_hand() -> None:
    assert within([1.0, 2.0, 3.0, 4.0], [[0.0, 2.0, 4.0, 5.0], [2.0, 2.0, 5.0, 3.0]]) == 0.75


def test_a_deviation_by_hand() -> None:
    both = {
        "ours": course() | {"info_nce": [1.0, 2.0, 2.0]},
        "reference": course() | {"info_nce": [1.0, 3.0, 5.0]},
    }
    assert deviation(both, "info_nce") == pytest.approx((0 + 1 + 3) / 3 / 4)
    assert deviation(both, "first_gap") == 0.0


@pytest.mark.parametrize(("case", "box"), [(CASES[0], 1.1), (CASES[1], 1.0)])
def test_the_sampler_is_the_references(case: Case, box: float, generator: torch.Generator) -> None:
    """y ← y − clip(λ(½∇E + σω)), λ from 0.1 to 1e-5 by the square, moves of at most a tenth of half the box, whose
    margin is that of the case."""
    trial = reference_trial(case, PAPER, 100_000)
    energy = MLP(16).build(Specification.flat(8, 2), generator)
    for weight in energy.parameters():
        weight.data *= 30  # steep enough that gradient, noise and clip all matter
    context = energy.encode(torch.randn(5, 8, generator=generator)).detach()
    start = box * (2 * torch.rand(5, 4, 2, generator=generator) - 1)
    seed = generator.initial_seed() // 2
    found = run(trial.objective.source.sampler, energy, context, start, torch.Generator().manual_seed(seed)).actions

    def by_hand(exponent: float) -> torch.Tensor:
        generator, y = torch.Generator().manual_seed(seed), start
        for k in range(10):
            size = (0.1 - 1e-5) * (1 - k / 9) ** 2 + 1e-5
            gradient = energy.energies_and_gradients(context, y)[1].detach()
            noise = torch.randn(y.shape, generator=generator)
            y = (y - (0.5 * size * gradient - size**exponent * noise).clamp(-0.1 * box, 0.1 * box)).clamp(-box, box)
        return y

    torch.testing.assert_close(found, by_hand(1.0))
    assert (found - by_hand(0.5)).abs().max() > 0.01  # the correct formulation would be seen


def test_the_other_settings_are_the_references() -> None:
    for case, pairs in zip(CASES, (50, 100_000, 100_000), strict=True):
        trial = reference_trial(case, PAPER, pairs)
        optimiser, decay = trial.optimiser, trial.optimiser.schedule
        assert (optimiser.batch_size, optimiser.learning_rate, trial.objective.count) == (512, 1e-3, 8)
        assert isinstance(trial.objective, InfoNCE) and trial.penalties == ()
        assert trial.inputs.obs_scaling == "standardise" and trial.energy == MLP(256, 2)
        # × 0.99 every 100 steps, in the long run.
        period = decay.epochs * max(1, pairs // 512)
        assert math.log(decay.factor) / period == pytest.approx(math.log(0.99) / 100)
    assert reference_trial(CASES[0], PAPER, 50).optimiser.schedule.epochs == 100


def test_distances_are_those_of_the_negatives(generator: torch.Generator) -> None:
    actions = torch.full((64, 2), 5.0)
    recorder = Recorder(Uniform(0.0))
    drawn = recorder.sample(
        MLP(8).build(Specification.flat(3, 2), generator), torch.zeros(64, 3), actions, 8, generator
    )
    wanted = np.mean([(float(v) - 5.0) ** 2 for v in drawn.actions.flatten()])
    assert recorder.squared_distance == pytest.approx(wanted, rel=1e-5)
    trainer, recorder = trainer_of(CASES[0], TINY, 0)
    log = trainer.step()
    # Jensen: a mean square is at least the square of the mean; two dimensions.
    assert 2 * recorder.squared_distance >= float(log["negative_distance"]) ** 2 > 0


def test_reference_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"

    def write(columns: list[str], steps: list[int]) -> None:
        with open(path, "w", newline="") as file:
            rows: list[list[Any]] = [columns, *([step, *[0.5] * (len(columns) - 1)] for step in steps)]
            csv.writer(file).writerows(rows)

    write(["step", *COLUMNS], [0, 20, 40])
    assert read_reference(path)["info_nce"] == [0.5] * 3
    write(["step", *COLUMNS[:-1]], [0, 20])
    with pytest.raises(ValueError, match="column grad_norm_last is missing"):
        read_reference(path)
    write(["step", *COLUMNS], [0, 10])
    with pytest.raises(ValueError, match="every 20 steps"):
        read_reference(path)


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="the reference curves are not beside the project")
def test_the_reference_curves_are_as_long_as_the_runs() -> None:
    for case in CASES:
        columns = read_reference(REFERENCE / case.file)
        assert {len(values) for values in columns.values()} == {case.steps // 20 + 1}
        assert all(deviation({"ours": columns, "reference": columns}, metric) == 0 for metric in COMPARED)


def test_without_the_reference_it_says_so(tmp_path: Path) -> None:
    assert "--reference" in Validation().compute(TINY, 0)["skipped"]
    claim = Validation(str(tmp_path / "nowhere"))
    found = claim.compute(TINY, 0)
    assert "particle_2d_1_episode.csv" in found["skipped"]
    hand = results(near(0.02))
    finding = claim.judge(replace(hand, by_label=hand.by_label | {"computation": [found]}))
    assert finding.verdict == "inconclusive" and found["skipped"] in finding.measured
    assert str(tmp_path) not in json.dumps(finding.numbers)


@pytest.mark.slow
def test_end_to_end(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    for case in CASES:
        with open(tmp_path / case.file, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", *COLUMNS])
            writer.writerows([20 * i, *(2.0 + i * j for j in range(1, 8))] for i in range(case.steps // 20 + 1))
    claim, scale = Validation(str(tmp_path)), replace(TINY, steps=20)
    tasks = [short(task) for task in claim.tasks(scale, [0])]
    assert [task.label for task in tasks] == ["computation", *TRAINED]
    found = {task.key: task.run(tmp_path / task.key) for task in tasks}
    measured = next(found[task.key] for task in tasks if isinstance(task, Computation))
    for case in CASES:
        ours = measured["cases"][case.name]["ours"]
        # Small weights: the first loss is that of guessing among nine, the second is lower, if by little.
        assert len(ours["info_nce"]) == 2 and ours["info_nce"][0] == pytest.approx(math.log(9), abs=0.05)
    finding = claim.judge(Results.of(tasks, found))
    finding = replace(finding, numbers=json.loads(json.dumps(finding.numbers, default=float)))
    figure = Figure()
    claim.draw(finding, figure)
    assert len(figure.axes) == 12
    claim.draw(replace(finding, numbers={k: v for k, v in finding.numbers.items() if k != "curves"}), Figure())
