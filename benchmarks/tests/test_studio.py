"""The studio's benchmark: its pieces, and what the committed record says."""

import json
import os

import pytest

pytest.importorskip("websockets", reason="the browser is driven over a websocket: pip install 'cebm[serve]'")
from benchmarks import studio
from tests.browser import chromium


def test_the_record_has_every_case() -> None:
    record = json.loads(studio.RESULTS.read_text())
    assert [row["case"] for row in record["latency"]] == list(studio.CASES)
    for row in record["latency"]:
        assert 0 < row["coarse_ms"] <= row["coarse_ms_p95"] and row["coarse_ms"] < row["fine_ms"]


def test_what_a_process_uses_is_read() -> None:
    mine = os.getpid()
    before, held = studio.processor_seconds(mine), studio.resident(mine)
    block = bytearray(os.urandom(60_000_000))
    while studio.processor_seconds(mine) - before < 0.05:
        sum(range(10_000))
    assert studio.resident(mine) - held > 50 and len(block) == 60_000_000


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="there is no Chromium: apt-get install chromium")
def test_a_short_run_measures_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studio, "CASES", {"steady": ("steady", {})})
    *_, found = studio.measure(moves=3, interactions=20)
    (row,) = found["latency"]
    assert row["case"] == "steady" and row["server_cpu_ms"] > 0
    assert [each["interactions"] for each in found["memory"]] == list(range(0, 21, 2))
    assert all(each["server_mb"] > 50 and each["page_mb"] > 0.1 for each in found["memory"])
