"""The studio's benchmark: its pieces, and what the committed record says."""

import json
import subprocess
import sys

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
    """Of a process of its own: this one may fill memory that it had before."""
    work = "block = b'x' * 60_000_000\nfor _ in range(200): sum(range(100_000))\nprint(len(block), flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"60000000\n"
        assert studio.resident(process.pid) > 60 and studio.processor_seconds(process.pid) > 0.05
        process.communicate(b"\n")


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="there is no Chromium: apt-get install chromium")
def test_a_short_run_measures_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studio, "CASES", {"steady": ("steady", {})})
    *_, found = studio.measure(moves=3, interactions=20)
    (row,) = found["latency"]
    assert row["case"] == "steady" and row["server_cpu_ms"] > 0
    assert [each["interactions"] for each in found["memory"]] == list(range(0, 21, 2))
    assert all(each["server_mb"] > 50 and each["page_mb"] > 0.1 for each in found["memory"])
