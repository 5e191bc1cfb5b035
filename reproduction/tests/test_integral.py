"""Claim 1: the bias of log Z at toy size, and the rule."""

import math
from pathlib import Path

import pytest
import torch

from cebm.negatives import Uniform
from reproduction.claims import integral
from reproduction.claims.integral import SOURCES, Integral
from reproduction.ledger import Results
from reproduction.running import conclude, run_task
from reproduction.trainings import SMOKE

CLAIM = Integral()


def test_end_to_end(tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """exp(−E) has a relative variance below V/(4π·0.15²) = 17 under uniform samples in the volume V = 2.2², as no
    component is narrower than 0.15 (what lies outside of the box is little). So log of the mean of 4,096 has a standard
    error of 0.065 and a bias of −0.002, and the mean over 2 energies with 16 observations one of 0.0115."""
    pytest.importorskip("matplotlib")
    seeds = sorted({int(seed) for seed in torch.randint(2**31, (2,), generator=generator)})
    tasks = CLAIM.tasks(SMOKE, seeds)
    (tmp_path / "runs").mkdir()
    for task in tasks:
        run_task(task, tmp_path, tmp_path)
    finding = conclude(CLAIM, tasks, SMOKE, tmp_path)
    bias = finding.numbers["bias"]
    assert max(abs(value) for value in bias["uniform"]) < 0.002 + 4.5 * 0.0115
    assert min(bias["gaussian mixture"]) > 0.1
    assert min(bias["ibc chains"]) > 0.1
    assert finding.verdict != "does not hold"
    assert (tmp_path / "01-integral.png").stat().st_size > 5000

    # Planted: uniform samples of a larger box than the volume says. There is no less mass in it than in the box of the
    # quadrature, and a mean over 3.2² in place of 2.2² is log 2.1 = 0.75 too small.
    monkeypatch.setattr(integral, "SOURCES", {"uniform": Uniform(margin=0.3)})
    assert abs(CLAIM.compute(SMOKE, seeds[0])["bias"]["uniform"]) > 2 * 4.5 * 0.0115


def results_of(uniform: float, mixture: float, chains: float, spread: float = 0.005) -> Results:
    """Three seeds around these biases."""
    shifts = (-spread, 0.0, spread)
    biases = [dict(zip(SOURCES, (uniform + s, mixture + s, chains + s), strict=True)) for s in shifts]
    return Results({"computation": [{"bias": bias} for bias in biases]})


@pytest.mark.parametrize(
    ("expected", "results"),
    [
        ("holds", results_of(0.0, 0.8, 1.5)),
        ("holds", results_of(0.0, -0.8, 1.5)),  # either sign is a bias
        ("holds", results_of(0.03, 0.8, 1.5)),  # the interval reaches into ±0.02
        ("does not hold", results_of(0.8, 0.0, 0.0)),  # reversed
        ("does not hold", results_of(0.8, 0.8, 1.5)),
        ("does not hold", results_of(0.0, 0.8, 0.0, spread=0.001)),
        ("inconclusive", results_of(0.06, 0.8, 1.5)),
        ("inconclusive", results_of(0.0, 0.8, 0.06)),
        ("inconclusive", results_of(0.0, 0.8, 1.5, spread=1.0)),
    ],
)
def test_the_rule(expected: str, results: Results) -> None:
    finding = CLAIM.judge(results)
    assert finding.verdict == expected
    assert all(math.isfinite(value) for interval in finding.numbers["intervals"].values() for value in interval)
