"""Claim 10: the numbers against known ones, and the rule."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reproduction.claims import bound
from reproduction.claims.bound import COUNTS, ENERGIES, NATS, NEGATIVES, REST, RHO, Bound
from reproduction.ledger import Results
from reproduction.running import conclude, run_task
from reproduction.trainings import SMOKE

CLAIM = Bound()
TOY = replace(SMOKE, samples=40)
PAIRS = 2 * 5 * TOY.samples
# Of log p(y|x)/p(y), whose variance is 20ρ². The loss follows it, and x through the negatives, with slopes up to 1.
DEVIATION = math.sqrt(2 * 20) * RHO
REFERENCE = {7: 1.8085, 63: 3.0676, 255: 3.543}
"""Of the density ratio with negatives of the marginal, see test_info_nce_of_correlated_gaussians."""


def fresh_seeds(generator: torch.Generator) -> list[int]:
    return sorted({int(seed) for seed in torch.randint(2**31, (2,), generator=generator)})


def z_of(values: dict[str, dict[str, list[list[float]]]]) -> float:
    """How far the tight bound is from its reference, at worst, in (large) standard errors."""
    found = dict(zip(REFERENCE, values["marginal"]["density ratio"], strict=True))
    errors = [abs(sum(seeds) / len(seeds) - REFERENCE[m]) for m, seeds in found.items()]
    return max(errors) / (DEVIATION / math.sqrt(PAIRS))


def test_end_to_end(tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "COUNTS", tuple(REFERENCE))
    pytest.importorskip("matplotlib")
    seeds = fresh_seeds(generator)
    tasks = CLAIM.tasks(TOY, seeds)
    (tmp_path / "runs").mkdir()
    for task in tasks:
        run_task(task, tmp_path, tmp_path)
    finding = conclude(CLAIM, tasks, TOY, tmp_path)
    assert finding.verdict == "holds"
    values = finding.numbers["values"]
    assert z_of(values) < 4.5
    # Of positives that cannot be told from their negatives: below 0, here by 3 with a standard error of √10/√400.
    assert sum(values["long chain"]["conditional"][-1]) / 2 < -1
    # Too flat by 16: at least log 256 − log(1 + 255 exp(10/16)/(1 + 1.05)^10) = 5.2, with a standard error of 0.2/√400.
    assert sum(values["long chain"]["flat"][-1]) / 2 > NATS + 0.5
    for by_energy in values.values():
        for by_count in by_energy.values():
            assert all(max(seeds) < math.log(m + 1) for m, seeds in zip(REFERENCE, by_count, strict=True))
    assert (tmp_path / "10-bound.png").stat().st_size > 5000

    # Planted: pairs that do not belong together.
    monkeypatch.setattr(bound, "RHO", 0.0)
    broken = Results({"computation": [CLAIM.compute(TOY, seeds[0])]})
    assert z_of(CLAIM.judge(broken).numbers["values"]) > 9


def test_energies_are_the_densities_they_are_named_after(generator: torch.Generator) -> None:
    """Up to a function of x: differences between two actions."""
    x, y = torch.randn(5, 20, generator=generator).double(), torch.randn(5, 2, 20, generator=generator).double()
    residual = (y - RHO * x.unsqueeze(1)).square().sum(-1) / (2 * REST)
    exact = {"conditional": residual, "density ratio": residual - y.square().sum(-1) / 2, "flat": residual / 16}
    for name, energy in ENERGIES.items():
        found = energy(x, y)
        torch.testing.assert_close(found[:, 0] - found[:, 1], exact[name][:, 0] - exact[name][:, 1])
    assert -10 * math.log(REST) == pytest.approx(NATS)


def test_the_chain_samples_its_conditional(generator: torch.Generator) -> None:
    """Last states: mean gain·x, variance 1/precision/(1 − 0.05)."""
    x = torch.randn(1000, 20, generator=generator)
    for energy in ENERGIES.values():
        last = energy.chain().sample(energy, x, x, 2, generator).actions[:, -1]
        units = (last - energy.gain * x) * math.sqrt(energy.precision * 0.95)
        assert abs(units.mean()) * math.sqrt(20_000) < 4.5
        assert abs(units.var() - 1) * math.sqrt(20_000 / 2) < 4.5


def results_of(marginal: float, chain: float, spread: float = 0.1) -> Results:
    """Three seeds around values that are `marginal` and `chain` for one case, and far below I for the others."""

    def part(value: float) -> dict[str, list[float]]:
        return {name: [0.5] * (len(COUNTS) - 1) + [value if name == "flat" else 0.5] for name in ENERGIES}

    shifts = (-spread, 0.0, spread)
    return Results({"computation": [{"marginal": part(marginal + s), "long chain": part(chain + s)} for s in shifts]})


@pytest.mark.parametrize(
    ("expected", "results"),
    [
        ("holds", results_of(3.5, 5.0)),
        ("holds", results_of(4.05, 5.0)),  # within its error of the truth
        ("does not hold", results_of(5.0, 3.0)),
        ("does not hold", results_of(5.0, 5.0)),
        ("does not hold", results_of(3.0, 3.0)),
        ("inconclusive", results_of(3.5, 4.1)),
        ("inconclusive", Results({"computation": results_of(3.5, 5.0).by_label["computation"][:1]})),
    ],
)
def test_the_rule(expected: str, results: Results) -> None:
    finding = CLAIM.judge(results)
    assert finding.verdict == expected
    assert ("do not show it" in finding.comment) == (expected != "holds")


def test_reversed_negatives_turn_the_verdict() -> None:
    results = results_of(3.5, 5.0)
    one, other = NEGATIVES
    swapped = [{one: result[other], other: result[one]} for result in results.by_label["computation"]]
    assert CLAIM.judge(results).verdict == "holds"
    assert CLAIM.judge(Results({"computation": swapped})).verdict == "does not hold"
