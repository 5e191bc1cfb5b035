"""The settings of docs/annealed.md: the page shows its records, and the arms are trials."""

import json
from pathlib import Path

import pytest

from benchmarks import annealed_effort, mixture_start
from benchmarks.annealed import ARMS, WAYS, cell, documented, job_of
from cebm.composition import vary
from cebm.runs import Job, train
from cebm.tasks import ParticleTask

ROOT = Path(__file__).parents[2]


def test_the_page_shows_its_records() -> None:
    text = (ROOT / "docs/annealed.md").read_text()
    assert documented(text, ROOT / "docs/annealed") == text


@pytest.mark.parametrize(("task", "arm"), [(task, arm) for task in ARMS for arm in ARMS[task]])
def test_every_arm_is_a_job_with_all_ways_to_act(task: str, arm: str) -> None:
    trial = job_of(task, arm, 100).trial
    assert (trial == job_of(task, "recipe", 100).trial) == (arm == "recipe")
    for changes in WAYS.values():
        vary(trial.acting, **changes)


def test_cells() -> None:
    way = {"metric": [0.9651, 0.0042], "success": 0.335}
    assert cell("particle", way) == "33.5 %" and cell("push-t", way) == "0.965 ± 0.004 (0.34)"
    assert cell("push-t", None) == ""


def test_a_long_arm_trains_five_times_as_long() -> None:
    arm, longer = (job_of("push-t", name, 100) for name in ("mirrored", "mirrored-long"))
    assert longer.steps == 5 * arm.steps and longer.trial == arm.trial


def test_the_page_shows_what_adapting_saves() -> None:
    text = (ROOT / "docs/annealed.md").read_text()
    found = annealed_effort.rows(json.loads((ROOT / annealed_effort.RECORD).read_text()))
    assert found in text


def test_effort_is_measured_on_the_weights_of_a_run(tmp_path: Path) -> None:
    """Of a search that looks at two candidates first, never more than all fall, and never fewer than two."""
    trial = vary(job_of("particle", "recipe", 100).trial, **{"energy.width": 8, "energy.encoder_width": 8})
    train(Job("small", trial, ParticleTask(dim=1, steps=4), episodes=4, steps=3, evaluate_every=3), tmp_path / "run")
    record = annealed_effort.measured(tmp_path / "run", episodes=3, calls=2)
    ways = record["ways"]
    assert list(ways) == list(annealed_effort.WAYS)
    assert ways["all 32"]["candidates"] == 32 and ways["always 2"]["candidates"] == 2
    assert all(2 <= way["candidates"] <= 32 and way["mean_ms"] > 0 and way["batch_ms"] > 0 for way in ways.values())
    assert ways["all 32"]["difference"][0] == 0 and "always 2" in annealed_effort.rows([record])


def test_the_start_of_a_mixture_is_that_of_the_study() -> None:
    text = (ROOT / "docs/stability.md").read_text()
    assert mixture_start.documented(text, ROOT / "docs") == text
    plain, wide = (mixture_start.trial_of(spread) for spread in mixture_start.SPREADS)
    assert (plain.optimiser, plain.inputs) == (mixture_start.STEADY.optimiser, mixture_start.STEADY.inputs)
    assert vary(plain, spread=0.5) == wide
    assert len(mixture_start.losses(0.5, 0, dim=2, episodes=4, steps=100)) == 1
