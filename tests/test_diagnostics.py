"""R̂ and effective sample sizes: ArviZ' numbers on the same draws, and what they say of chains that are known."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from cebm.certificate import Gaussian
from cebm.diagnostics import diagnose, ess_bulk, ess_tail, rhat
from cebm.samplers import HMC, MALA, Chain, Collect, Constant, Langevin, run

REFERENCE = Path(__file__).parent / "golden" / "arviz.json"


def draws_of(seed: int, chains: int, time: int, kind: str) -> np.ndarray:
    """Draws of many kinds from numpy's generator, whose numbers are the same everywhere; `python -m
    tests.test_diagnostics` writes ArviZ' values for them."""
    rng = np.random.default_rng([seed, chains, time])
    noise = rng.standard_normal((chains, time))
    match kind:
        case "independent":
            return noise
        case "positive" | "negative":
            rho = 0.9 if kind == "positive" else -0.6
            for k in range(1, time):
                noise[:, k] = rho * noise[:, k - 1] + math.sqrt(1 - rho**2) * noise[:, k]
            return noise
        case "apart":
            return noise + 0.3 * np.arange(chains)[:, None]
        case "ties":
            return np.round(noise * 2) / 2
        case "heavy":
            return noise / np.abs(rng.standard_normal((chains, time)))
    raise ValueError(kind)


KINDS = ("independent", "positive", "negative", "apart", "ties", "heavy")
CASES = [
    (seed, chains, time, kind)
    for seed, (chains, time) in enumerate([(4, 250), (2, 101), (7, 37), (3, 4), (2, 5)])
    for kind in KINDS
]


def ours(values: np.ndarray) -> list[float]:
    draws = torch.from_numpy(values)
    return [float(rhat(draws)), float(ess_bulk(draws)), float(ess_tail(draws))]


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i])))
def test_the_numbers_are_those_of_arviz(index: int) -> None:
    expected = json.loads(REFERENCE.read_text())["values"][index]
    np.testing.assert_allclose(ours(draws_of(*CASES[index])), expected, rtol=1e-6)


def test_the_numbers_are_those_of_arviz_on_fresh_draws() -> None:
    arviz = pytest.importorskip("arviz", reason="compares with ArviZ itself")
    values = np.random.default_rng().standard_normal((4, 200)).cumsum(1) * 0.1 + np.random.default_rng().random((4, 1))
    expected = [float(f(values)) for f in (arviz.rhat, arviz.ess, lambda v: arviz.ess(v, method="tail"))]
    np.testing.assert_allclose(ours(values), expected, rtol=1e-6)


def test_chains_of_known_correlation_are_worth_what_theory_says(generator: torch.Generator) -> None:
    """An autoregressive chain of ρ is worth (1 − ρ)/(1 + ρ) of its length. The estimate's relative error is about
    √(20/1000) = 14 % for 8 chains of 4000 draws (19 correlation times); 4.5 of them are allowed."""
    rho = 0.9
    draws = torch.randn(8, 4000, generator=generator, dtype=torch.float64)
    for k in range(1, 4000):
        draws[:, k] = rho * draws[:, k - 1] + math.sqrt(1 - rho**2) * draws[:, k]
    expected = draws.numel() * (1 - rho) / (1 + rho)
    assert abs(float(ess_bulk(draws)) / expected - 1) < 4.5 * 0.14
    assert float(rhat(draws)) < 1.02


def test_a_run_is_diagnosed_with_its_info(generator: torch.Generator) -> None:
    target = Gaussian()
    start = target.starts(1, 4, generator)
    context = target.encode(start[:, 0])
    chain = run(MALA(1200, adapt=200, margin=None), target, context, start, generator, Collect(200))
    found = diagnose(chain, chains=4)
    assert (found.chains, found.draws) == (4, 1000) and found.rhat.shape == (2,)
    assert found.acceptance == pytest.approx(float(chain.info.acceptance[600:].mean()))
    assert found.divergences == 0 and found.ess_per_gradient == pytest.approx(float(found.ess_bulk.min()) / 4000)
    assert (found.rhat < 1.1).all() and (found.ess_tail > 50).all()


def test_what_is_wrong_is_said(generator: torch.Generator) -> None:
    """Chains that stay in their own corners, and steps that are too long."""
    apart = torch.randn(4, 500, 2, generator=generator) + 3 * torch.arange(4).view(4, 1, 1)
    words = diagnose(apart).complaints
    assert any("have not mixed: R̂ is" in each for each in words) and any(
        "effective draws in the bulk" in w for w in words
    )
    assert diagnose(torch.randn(4, 2000, 2, generator=generator)).complaints == ()
    target = Gaussian(std=(0.001, 0.2))
    start = target.starts(1, 4, generator)
    long = HMC(50, step_size=1.0, adapt=0, leapfrogs=8, margin=None)
    chain = run(long, target, target.encode(start[:, 0]), start, generator, Collect(10))
    found = diagnose(chain, chains=4)
    assert found.divergences is not None and found.divergences > 0.5
    assert any("trajectories diverged" in each for each in found.complaints)
    assert math.isnan(float(rhat(torch.full((2, 10), math.nan))))


def test_only_runs_that_can_be_diagnosed_are(generator: torch.Generator) -> None:
    target = Gaussian()
    start = target.starts(1, 4, generator)
    sampler = Langevin("correct", 9, Constant(1e-3), step_clip=None, margin=None)
    chain = run(sampler, target, target.encode(start[:, 0]), start, generator, Collect(2))
    with pytest.raises(ValueError, match=r"chains: .* are not the draws of one observation by 3 chains"):
        diagnose(chain, chains=3)
    with pytest.raises(ValueError, match="at least 4, got 3"):
        diagnose(torch.randn(2, 3, 1, generator=generator))
    assert isinstance(chain, Chain)


if __name__ == "__main__":
    import arviz

    rows = [
        [float(arviz.rhat(v)), float(arviz.ess(v)), float(arviz.ess(v, method="tail"))]
        for v in (draws_of(*case) for case in CASES)
    ]
    REFERENCE.write_text(json.dumps({"arviz": arviz.__version__, "values": rows}, indent=1) + "\n")
