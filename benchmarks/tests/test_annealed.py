"""The measurements of docs/annealed.md: the page shows its records, and the arms are trials."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.annealed import ARMS, PROCEDURES, Timed, documented, paired, particle_trial, pusht_trial, table
from cebm.composition import vary

ROOT = Path(__file__).parents[2]
SETTINGS = argparse.Namespace(seconds=60.0, batch=64, rate=1e-3, precision="float32")


def test_the_page_shows_its_records() -> None:
    text = (ROOT / "docs/annealed.md").read_text()
    assert documented(text, ROOT / "docs/annealed") == text


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_trial_with_all_ways_to_act(arm: str) -> None:
    for trial in (particle_trial(ARMS[arm], SETTINGS), pusht_trial(ARMS[arm], SETTINGS)):
        for changes in PROCEDURES.values():
            vary(trial.acting, **changes)


def test_paired_differences() -> None:
    rows = {"one draw": [0.0, 1.0, 0.0, 1.0], "other": [1.0, 1.0, 1.0, 1.0]}
    assert paired(rows, "one draw") == {"one draw": [0, 0], "other": [0.5, round(float(np.sqrt(1 / 3) / 2), 4)]}


def test_the_rate_follows_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Timed(100.0, 0.5, began=0.0)
    for now, wanted in ((10.0, 2.0), (50.0, 2.0), (75.0, 1.0), (100.0, 0.0), (110.0, 0.0)):
        monkeypatch.setattr("benchmarks.annealed.process_time", lambda now=now: now)
        assert schedule.rate(2.0, 1000, None, 1) == pytest.approx(wanted)
    monkeypatch.setattr("benchmarks.annealed.process_time", lambda: 0.0)
    assert schedule.rate(2.0, 49, None, 1) == pytest.approx(0.2)


def test_tables() -> None:
    record = {
        "arm": "denoise",
        "seed": 3,
        "cpu_seconds": 60.0,
        "steps": 4000,
        "success": {"one draw": 0.5, "lowest of 32": 0.75},
        "reward": {"one draw": [0.8, 0.01], "lowest of 32": [0.9, 0.02]},
        "paired": {"one draw": [0.0, 0.0], "lowest of 32": [0.25, 0.05]},
    }
    assert "| denoise | 3 | 60, 4,000 | 50.0 % | 75.0 % | +25.0 ± 5.0 |" in table("particle", [record])
    assert "| 0.800 ± 0.010 (0.50) | 0.900 ± 0.020 (0.75) | +0.250 ± 0.050 |" in table("pusht", [record])
    assert json.dumps(record)
