"""Claim 2: the certificate's numbers become a verdict, and a wrong sampler changes it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cebm.certificate import Gaussian, Target, named_sampler
from cebm.energies.base import Actions, Context, EnergyModel
from cebm.samplers import Langevin, LangevinState, Sampler, StepInfo
from reproduction.claims import langevin
from reproduction.claims.langevin import LangevinStep
from reproduction.ledger import Results
from reproduction.running import conclude, run_task
from reproduction.trainings import SMOKE, Result

CLAIM = LangevinStep()
TARGETS = ("gaussian", "skewed", "double-well")
PASSED, FAILED, UNCLEAR = "samples the target", "biased", "inconclusive"


def fresh_seeds(generator: torch.Generator, count: int = 2) -> list[int]:
    return sorted({int(seed) for seed in torch.randint(2**31, (count,), generator=generator)})


def results_of(cases: list[tuple[float, str, float, str]]) -> Results:
    """Of seeds with (temperature and verdict of IBC's step, those of the correct one), on all targets alike."""

    def part(temperature: float, verdict: str) -> Result:
        return {
            "temperature": dict.fromkeys(TARGETS, temperature),
            "verdicts": {f"{target}, {run}": verdict for target in TARGETS for run in ("chains", "single")},
            "states": [[0.3, 0.4]],
        }

    return Results({"computation": [{"ibc": part(*case[:2]), "correct": part(*case[2:])} for case in cases]})


def test_end_to_end(tmp_path: Path, generator: torch.Generator) -> None:
    """The certificate errs at the level of 4.5 standard deviations."""
    pytest.importorskip("matplotlib")
    tasks = CLAIM.tasks(SMOKE, fresh_seeds(generator))
    (tmp_path / "runs").mkdir()
    for task in tasks:
        run_task(task, tmp_path, tmp_path)
    finding = conclude(CLAIM, tasks, SMOKE, tmp_path)
    assert finding.verdict == "holds"
    # IBC's temperature on a Gaussian is λ, here between 0.001 and 0.005, plus what is left of the start: after 50 steps
    # Σλ/2 = 0.092, so exp(−2·0.092/0.2²) = 1 % of a start whose square is 2.3 in the second dimension.
    assert max(finding.numbers["temperature"]["ibc"]["gaussian"]) < 0.03
    record = json.loads((tmp_path / "02-langevin.json").read_text())
    assert record["verdict"] == "holds" and record["rule"] == CLAIM.rule
    assert {len(states) for states in record["measurements"]["states"].values()} == {100}
    # Planted: the two steps mixed up.
    computed = [json.loads((tmp_path / "runs" / f"{task.key}.json").read_text())["result"] for task in tasks]
    swapped = [{"ibc": result["correct"], "correct": result["ibc"]} for result in computed]
    assert CLAIM.judge(Results({"computation": swapped})).verdict == "does not hold"
    assert (tmp_path / "02-langevin.png").stat().st_size > 5000


@dataclass(frozen=True)
class Cold:
    """The correct step without its √2: the temperature is ½."""

    of: Langevin

    @property
    def steps(self) -> int:
        return self.of.steps

    def init(self, energy: EnergyModel, context: Context, start: Actions, generator: torch.Generator) -> LangevinState:
        return self.of.init(energy, context, start, generator)

    def step(
        self, energy: EnergyModel, context: Context, state: LangevinState, k: int, generator: torch.Generator
    ) -> tuple[LangevinState, StepInfo]:
        moved, info = self.of.step(energy, context, state, k, generator)
        drift = (
            state.actions - self.of.schedule(k, self.steps) * energy.energies_and_gradients(context, state.actions)[1]
        )
        return LangevinState(drift + (moved.actions - drift) / math.sqrt(2)), info


def test_a_missing_root_of_two_is_found(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    """Planted: the standard deviation is off by 0.29, the certificate allows 0.1 + 4.5/√2000 = 0.2."""

    def planted(name: str, target: Target, steps: int) -> Sampler:
        sampler = named_sampler(name, target, steps)
        assert isinstance(sampler, Langevin)
        return Cold(sampler) if name == "langevin-correct" else sampler

    monkeypatch.setattr(langevin, "named_sampler", planted)
    monkeypatch.setattr(langevin, "unbounded_targets", lambda: [Gaussian()])
    computed = [CLAIM.compute(SMOKE, seed) for seed in fresh_seeds(generator)]
    finding = CLAIM.judge(Results({"computation": computed}))
    assert finding.verdict == "does not hold"
    # The mean of 2·2·1000 squares, plus a bias for the step and the start below 0.1.
    assert abs(sum(finding.numbers["temperature"]["correct"]["gaussian"]) / 2 - 0.5) < 0.1 + 4.5 * 0.5 * math.sqrt(
        2 / 4000
    )


HOLDS = [(0.01, FAILED, 1.0, PASSED), (0.02, FAILED, 1.05, PASSED), (0.015, FAILED, 0.95, PASSED)]
CASES: dict[str, tuple[str, list[tuple[float, str, float, str]]]] = {
    "as the paper says": ("holds", HOLDS),
    "reversed": ("does not hold", [(*case[2:], *case[:2]) for case in HOLDS]),
    "both sample": ("does not hold", [(*case[2:], *case[2:]) for case in HOLDS]),
    "neither samples": ("does not hold", [(*case[:2], *case[:2]) for case in HOLDS]),
    "the correct one is cold, unseen by the certificate": (
        "does not hold",
        [(*case[:2], 0.7 + 0.01 * i, PASSED) for i, case in enumerate(HOLDS)],
    ),
    "one seed of three disagrees": ("inconclusive", [*HOLDS[:2], (0.015, FAILED, 0.95, FAILED)]),
    "one cannot tell": ("inconclusive", [*HOLDS[:2], (0.015, UNCLEAR, 0.95, PASSED)]),
    "a temperature that scatters": ("inconclusive", [*HOLDS[:2], (0.9, FAILED, 0.95, PASSED)]),
    "one seed has no interval": ("inconclusive", HOLDS[:1]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rule(case: str) -> None:
    expected, rows = CASES[case]
    finding = CLAIM.judge(results_of(rows))
    assert finding.verdict == expected
    assert ("do not show it" in finding.comment) == (expected != "holds")


def test_one_target_is_enough_to_fail() -> None:
    results = results_of(HOLDS)
    for result in results.by_label["computation"]:
        result["correct"]["verdicts"]["skewed, single"] = FAILED
    assert CLAIM.judge(results).verdict == "does not hold"
