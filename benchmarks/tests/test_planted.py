"""The certificate catches planted faults, and does not accuse samplers that have none. The measurement with many
repetitions is `python -m benchmarks.planted`, whose record is docs/certificate.jsonl."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import planted as measuring
from benchmarks.planted import FAULTS, HAMILTONIAN, LANGEVIN, METROPOLIS, OUT, RIGHT, closely, judged, planted
from cebm.certificate import (
    BoxedExponential,
    CorrelatedGaussian,
    Gaussian,
    Ring,
    analytic_targets,
    certify,
    named_sampler,
)

QUICK = (
    "one noise for all coordinates",
    "noise without the root of two",
    "gradient of the start",
    "ratio without the proposal's density",
    "ratio without the kinetic energy",
    "temperatures always swapped",
)


def test_the_record_has_all_faults_and_no_false_alarm() -> None:
    assert len(FAULTS) == len(set(FAULTS)) == 41
    rows = [json.loads(line) for line in OUT.read_text().splitlines()]
    faults = {row["fault"]: row for row in rows if "fault" in row}
    assert set(faults) == set(FAULTS)
    assert all(row["caught"] == row["repetitions"] > 0 for row in faults.values())
    right = {(row["right"], row["run"]): row for row in rows if "right" in row}
    assert {name for name, _ in right} == set(RIGHT)
    assert all(row["false_alarms"] == 0 < row["repetitions"] for row in right.values())


def test_a_record_is_continued_and_written_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "FAULTS", ("sign of the gradient flipped",))
    monkeypatch.setattr(measuring, "RIGHT", ("langevin-correct",))
    monkeypatch.setattr(measuring, "analytic_targets", lambda: (Gaussian(), BoxedExponential()))
    out = tmp_path / "record.jsonl"
    for repetitions in (1, 3):
        measuring.Measurement(repetitions, 1, block=2, runs=("chains",), out=out)()
        fault, right = map(json.loads, out.read_text().splitlines())
        assert (fault["repetitions"], fault["caught"], fault["by"]) == (1, 1, ["gaussian, chains"])
        assert (right["repetitions"], right["verdicts"], right["false_alarms"]) == (repetitions, repetitions, 0)


def test_a_close_look_sees_decisions_for_each_coordinate(generator: torch.Generator) -> None:
    """Its error of artanh r is 0.026: eight standard errors of 100,000 chains, less than one of 1,000."""
    fault = "a decision for each coordinate"
    assert not certify(partial(planted, fault), [CorrelatedGaussian()], ["chains"], generator)[0].failed
    assert closely(partial(planted, fault), generator, fault)[0].failed
    assert not closely(partial(planted, fault, mended=True), generator, fault)[0].failed


@pytest.mark.parametrize("fault", QUICK)
def test_a_planted_fault_is_caught(fault: str, generator: torch.Generator) -> None:
    assert judged(partial(planted, fault), generator, fault, True)[-1].failed


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in QUICK])
@pytest.mark.slow
def test_every_planted_fault_is_caught(fault: str, generator: torch.Generator) -> None:
    assert judged(partial(planted, fault), generator, fault, True)[-1].failed


@pytest.mark.parametrize("kind", [LANGEVIN, METROPOLIS, HAMILTONIAN], ids=["langevin", "metropolis", "hamiltonian"])
def test_without_its_fault_it_passes(kind: dict, generator: torch.Generator) -> None:
    fault = next(iter(kind))
    assert certify(partial(planted, fault, mended=True), [Gaussian()], ["chains"], generator)[0].passed


@pytest.mark.parametrize("name", [name for name in RIGHT if name != "langevin-correct"])
def test_right_samplers_pass_where_dimensions_depend_on_each_other(name: str, generator: torch.Generator) -> None:
    assert certify(partial(named_sampler, name), [Ring()], ["chains"], generator)[0].passed


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.slow
def test_right_samplers_pass_everywhere(name: str, generator: torch.Generator) -> None:
    targets = [
        target for target in analytic_targets() if not (name == "langevin-correct" and target.margin is not None)
    ]
    assert not any(row.failed for row in certify(partial(named_sampler, name), targets, generator=generator))
