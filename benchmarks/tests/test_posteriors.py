"""The posterior benchmark: what it simulates, how it chooses, and one whole run of a tiny model."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import moons, posteriors
from benchmarks.posterior_tables import choices, scores
from benchmarks.posteriors import TASKS, Training, c2st, chosen


def test_the_simulators_have_the_moments_of_their_definitions() -> None:
    """At one parameter, 20,000 draws, within 4.5 standard errors."""
    rng, n = np.random.default_rng(), 20_000
    moons = TASKS["two_moons"].simulate(np.tile([0.3, -0.2], (n, 1)), rng)
    # E[r cos a] = 0.1 · 2/π for a uniform on (−π/2, π/2); Var = E[r²]/2 − mean² and E[r²]/2.
    middle = np.array([0.2 / np.pi + 0.25 - 0.1 / np.sqrt(2), -0.5 / np.sqrt(2)])
    spread = np.sqrt(np.array([0.0101 / 2 - (0.2 / np.pi) ** 2, 0.0101 / 2]))
    assert (np.abs(moons.mean(0) - middle) < 4.5 * spread / np.sqrt(n)).all()
    y = np.array([0.5, -1.0, 1.2, 0.8, 0.7])
    first, second = TASKS["slcp"].simulate(np.tile(y, (n, 1)), rng).reshape(-1, 2).T
    assert abs(first.mean() - 0.5) < 4.5 * 1.44 / np.sqrt(4 * n)
    assert abs(second.std() / 0.64 - 1) < 4.5 / np.sqrt(8 * n)
    assert abs(np.arctanh(np.corrcoef(first, second)[0, 1]) - 0.7) < 4.5 / np.sqrt(4 * n)


def test_the_choice_is_by_the_held_out_likelihood_of_the_task() -> None:
    one, two = list(posteriors.CANDIDATES)[:2]
    values = {one: (3.0, 1.0), two: (2.5, 2.0), "no candidate any more": (9.0, 9.0)}
    rows = [
        {"what": "choice", "task": task, "candidate": name, "held_out": value, "steps": 5}
        for name, each in values.items()
        for task, value in zip(TASKS, each, strict=True)
    ]
    assert [chosen(rows, task) for task in TASKS] == [one, two]
    assert choices(rows)[1][0] == (one, "3.000", "1.000", "5 and 5")
    with pytest.raises(ValueError, match="tried on slcp: run --choose first"):
        chosen(rows[:1], "slcp")


def test_c2st_tells_what_is_shifted_and_not_what_is_equal() -> None:
    """400 draws each: an accuracy of equal sets has a deviation of at most 0.018 about 0.5; a shift of two deviations
    lets the best classifier be right in Φ(1) = 84 %."""
    rng = np.random.default_rng()
    a, b = rng.normal(size=(2, 400, 2))
    assert abs(c2st(a, b) - 0.5) < 4.5 * 0.018
    assert c2st(a, b + np.array([2.0, 0.0])) > 0.84 - 4.5 * 0.013


@pytest.mark.parametrize("x", [(-0.2, 0.1), (0.28, 0.0), (-0.55, 0.5)], ids=["two moons", "folded", "cut"])
def test_the_exact_posterior_of_two_moons(x: tuple[float, float]) -> None:
    """The share makes the density integrate to 1 over the prior's square, by a grid; the mean log-likelihood of the
    draws is the grid's. A draw and its mirror image are one: the errors are those of half as many, and 4.5 of them."""
    data, rng, n = np.array(x), np.random.default_rng(), 20_000
    y, share = moons.posterior(data, n, rng)
    assert (np.abs(y) <= 1).all() and len(y) > 500
    axis = np.linspace(-0.9995, 0.9995, 2000)
    heights = moons.log_likelihood(data, np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2))
    likelihood = np.exp(heights)
    assert abs(likelihood.sum() * 1e-6 / np.exp(share) - 1) < 4.5 * 2 / np.sqrt(len(y)) + 0.005
    inside = likelihood > 0
    expected = float((likelihood[inside] * heights[inside]).sum() / likelihood.sum())
    drawn = moons.log_likelihood(data, y)
    assert abs(drawn.mean() - expected) < 4.5 * drawn.std() / np.sqrt(len(y) / 2) + 0.005


def test_a_whole_run_of_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice, training, scores, calibration, tables; a second run measures nothing again."""
    place = tmp_path / "two_moons" / "num_observation_1"
    place.mkdir(parents=True)
    rng = np.random.default_rng(0)
    np.savetxt(place / "observation.csv", [[-0.2, 0.1]], delimiter=",", header="x", comments="")
    reference = rng.uniform(-1, 1, (200, 2))
    np.savetxt(place / "reference_posterior_samples.csv.bz2", reference, delimiter=",", header="y", comments="")
    tiny = {"tiny": Training(2, 1, 2, width=8, batch_size=32)}
    monkeypatch.setattr(posteriors, "CANDIDATES", tiny)
    monkeypatch.setattr(posteriors, "TASKS", {"two_moons": TASKS["two_moons"]})
    monkeypatch.setattr(posteriors, "SIMULATED", 50)
    arguments = argparse.Namespace(
        data=tmp_path,
        tasks=["two_moons"],
        simulations=300,
        seeds=[0],
        observations=1,
        minutes=0.05,
        choice_minutes=0.05,
        models=tmp_path / "models",
        out=tmp_path / "rows.jsonl",
    )
    posteriors.measure(arguments)
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()]
    assert [row["what"] for row in rows] == ["choice", "training", "c2st", "exact", "calibration"]
    assert rows[1]["hidden_layers"] == 1 and rows[1]["steps"] >= 100
    assert 0.3 < rows[2]["c2st"] <= 1 and np.array(rows[4]["ranks"]).shape == (50, 2)
    assert scores(rows)[1][0][:5] == ("two_moons", "300", "tiny", "1", "1")
    assert rows[3]["divergence"] > 0 and 0.5 < rows[3]["best accuracy"] <= 1
    posteriors.measure(arguments)
    assert len(arguments.out.read_text().splitlines()) == 5
