"""Claim 16: distances and shares against their closed forms, and the rule."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cebm.certificate import Gaussian
from reproduction.claims import descent
from reproduction.claims.descent import FRACTIONS, STEP_RULES, Descent, noise_and_descent
from reproduction.ledger import Results
from reproduction.running import conclude, run_task
from reproduction.trainings import SMOKE, Result

CLAIM = Descent()
TOY = replace(SMOKE, samples=2000)
CHAINS = 5 * TOY.samples
THRESHOLD = 4.5


def test_end_to_end(tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 10,000 chains log distance has a standard error of 0.005, and the slope over a factor of 16 one of 0.003.
    The interval of two seeds reaches nine times their own deviation to either side: from 0.5 to 0.25 if that is 0.028,
    nine times the expected."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(descent, "FRACTIONS", FRACTIONS[:3])
    monkeypatch.setattr(descent, "STEPS", 4)
    seeds = sorted({int(seed) for seed in torch.randint(2**31, (2,), generator=generator)})
    tasks = CLAIM.tasks(TOY, seeds)
    (tmp_path / "runs").mkdir()
    for task in tasks:
        run_task(task, tmp_path, tmp_path)
    finding = conclude(CLAIM, tasks, TOY, tmp_path)
    assert finding.verdict == "holds"
    for target in ("gaussian", "skewed", "double-well"):
        # In the first step of IBC's, λ cancels: what is left is the sampling error of a mean of 2·10,000 squares (in
        # unequal units, so at most that of 10,000), and that of the mean over step sizes.
        share = np.array(finding.numbers["share"][target]["ibc"])
        odds = share / (1 - share)
        assert np.abs(odds / odds.mean(1, keepdims=True) - 1).max() < THRESHOLD * np.sqrt(2 * 2 / CHAINS)
        # That of the correct step is closer to 1 with every smaller step.
        assert (np.diff(finding.numbers["share"][target]["correct"]) > 0).all()
    # Planted: the two steps mixed up.
    swapped = [_swapped(json.loads((tmp_path / "runs" / f"{task.key}.json").read_text())["result"]) for task in tasks]
    assert CLAIM.judge(Results({"computation": swapped})).verdict == "does not hold"
    assert (tmp_path / "16-descent.png").stat().st_size > 5000


def _swapped(result: Result) -> Result:
    return {
        name: {"sizes": part["sizes"], "ibc": part["correct"], "correct": part["ibc"]} for name, part in result.items()
    }


@pytest.mark.parametrize("formulation", STEP_RULES)
@pytest.mark.parametrize("steps", [1, 40])
def test_a_gaussian_has_closed_forms(formulation: str, steps: int, generator: torch.Generator) -> None:
    """y − μ shrinks by a = 1 − λ/2s² in each step; the noise of n steps has the variance v Σ a^2j, with v = λ² for
    IBC's step and λ for the correct one."""
    target, size, chains = Gaussian(), 2e-3, 2000
    start = target.starts(1, chains, generator)
    std = np.array(target.std)
    shrink = 1 - size / (2 * std**2)
    per_step = {"ibc": size**2, "correct": size}[formulation]
    exact = per_step / std**2 * sum(shrink ** (2 * j) for j in range(steps))
    error = np.sqrt((exact**2 * 2 / chains).sum()) / 2

    def z_of(noise: float) -> float:
        return (noise - exact.mean()) / error

    noise, moved = noise_and_descent(target, formulation, size, steps, start, generator)
    assert abs(z_of(noise)) < THRESHOLD
    gap = (start[0].double().numpy() - np.array(target.mean)) / std
    assert moved == pytest.approx(((gap * (1 - shrink**steps)) ** 2).mean(), rel=1e-4)
    # Planted: the other formulation.
    other, _ = noise_and_descent(target, STEP_RULES[formulation == "ibc"], size, steps, start, generator)
    assert abs(z_of(other)) > 2 * THRESHOLD


def results_of(slopes: list[tuple[float, float]], shares: tuple[float, float] = (0.1, 0.9)) -> Results:
    """Seeds with (slope of IBC's step, slope of the correct one), and their shares at the smallest step."""
    sizes = [0.01 * fraction for fraction in FRACTIONS]

    def part(slope: float, share: float) -> Result:
        values = [3 * size**slope for size in sizes]
        return {"distance": values, "share": [0.5, 0.5, 0.5, share], "share of the path": [0.1] * len(sizes)}

    return Results(
        {
            "computation": [
                {
                    name: {"sizes": sizes, "ibc": part(ibc, shares[0]), "correct": part(correct, shares[1])}
                    for name in ("gaussian", "skewed")
                }
                for ibc, correct in slopes
            ]
        }
    )


HOLDS = [(0.48, 0.01), (0.5, -0.02), (0.52, 0.0)]


@pytest.mark.parametrize(
    ("expected", "results"),
    [
        ("holds", results_of(HOLDS)),
        ("does not hold", results_of([pair[::-1] for pair in HOLDS])),
        ("does not hold", results_of([(ibc, ibc) for ibc, _ in HOLDS])),
        ("does not hold", results_of([(correct, correct) for _, correct in HOLDS])),
        ("does not hold", results_of(HOLDS, shares=(0.9, 0.1))),
        ("inconclusive", results_of([(0.1, 0.0), (0.5, 0.0), (0.4, 0.0)])),
        ("inconclusive", results_of(HOLDS, shares=(0.5, 0.5))),
        ("inconclusive", results_of(HOLDS[:1])),
    ],
)
def test_the_rule(expected: str, results: Results) -> None:
    finding = CLAIM.judge(results)
    assert finding.verdict == expected
    assert ("do not show it" in finding.comment) == (expected != "holds")


def test_the_slope_is_that_of_the_distance() -> None:
    finding = CLAIM.judge(results_of(HOLDS))
    assert finding.numbers["slopes"]["ibc"]["skewed"] == pytest.approx([0.48, 0.5, 0.52])
    assert finding.numbers["slopes"]["correct"]["skewed"] == pytest.approx([0.01, -0.02, 0.0], abs=1e-12)
