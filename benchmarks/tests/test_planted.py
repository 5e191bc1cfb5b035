"""The certificate catches planted faults, and does not accuse samplers that have none. The measurement with many
repetitions is `python -m benchmarks.planted`, whose record is docs/certificate.jsonl."""

import json
from functools import partial

import pytest
import torch

from benchmarks.planted import FAULTS, HAMILTONIAN, LANGEVIN, METROPOLIS, OUT, RIGHT, judged, planted
from cebm.certificate import Gaussian, Ring, analytic_targets, certify, named_sampler

QUICK = (
    "one noise for all coordinates",
    "noise without the root of two",
    "gradient of the start",
    "ratio without the proposal's density",
    "ratio without the kinetic energy",
    "temperatures always swapped",
)


def test_there_are_forty_and_the_record_has_all_of_them() -> None:
    assert len(FAULTS) == len(set(FAULTS)) == 40
    rows = [json.loads(line) for line in OUT.read_text().splitlines()]
    faults = {row["fault"]: row for row in rows if "fault" in row}
    assert set(faults) == set(FAULTS)
    assert all(row["caught"] == row["repetitions"] > 0 for row in faults.values())
    right = {row["right"]: row for row in rows if "right" in row}
    assert set(right) == set(RIGHT)
    assert all(row["false_alarms"] == 0 for row in right.values())


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
