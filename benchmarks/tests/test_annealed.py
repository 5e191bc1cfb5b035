"""The settings of docs/annealed.md: the page shows its records, and the arms are trials."""

from pathlib import Path

import pytest

from benchmarks import mixture_start
from benchmarks.annealed import ARMS, WAYS, cell, documented, job_of
from cebm.composition import vary

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


def test_the_start_of_a_mixture_is_that_of_the_study() -> None:
    text = (ROOT / "docs/stability.md").read_text()
    assert mixture_start.documented(text, ROOT / "docs") == text
    plain, wide = (mixture_start.trial_of(spread) for spread in mixture_start.SPREADS)
    assert (plain.optimiser, plain.inputs) == (mixture_start.STEADY.optimiser, mixture_start.STEADY.inputs)
    assert vary(plain, spread=0.5) == wide
    assert len(mixture_start.losses(0.5, 0, dim=2, episodes=4, steps=100)) == 1
