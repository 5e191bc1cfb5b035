"""The benchmark of reading: a small set, and what the committed record says."""

import json

import pytest

from benchmarks import reading


def test_the_record_has_every_format() -> None:
    rows = [json.loads(line) for line in reading.RESULTS.read_text().splitlines()]
    assert [row["format"] for row in rows] == list(reading.FORMATS)
    assert all(row["steps"] == reading.STEPS and row["seconds"] > 0 and row["peak_mb"] > 200 for row in rows)


@pytest.mark.slow
def test_a_small_set_is_measured() -> None:
    row = reading.measure("`.npz`", steps=4 * reading.LENGTH)
    assert row["seconds"] > 0 and row["windows_peak_mb"] > 100 and row["peak_mb"] > 100
