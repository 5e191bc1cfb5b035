"""The benchmark's numbers have the promised form; how good they are is for the benchmark itself to say."""

import json

import pytest
import torch

from cebm import bench
from cebm.bench import ChainBench, bench_chain


def test_a_row_per_thread_count_with_sane_numbers() -> None:
    before = torch.get_num_threads()
    (row,) = bench_chain(threads=[1], repeats=5)
    assert torch.get_num_threads() == before
    assert (row.threads, row.repeats) == (1, 5)
    assert row.mm_gflops > 0.1 and row.chain_gflops > 0.1
    assert 0.2 < row.fraction < 1.2
    assert row.fraction_q25 <= row.fraction <= row.fraction_q75
    assert row.chain_ms == pytest.approx(10 * 2 * 2 * 4096 * 256 * 256 / row.chain_gflops / 1e6)
    written = json.loads(row.to_json())
    assert {"mm_gflops", "chain_gflops", "fraction", "threads", "fraction_q25", "fraction_q75"} <= set(written)
    assert ChainBench(**written) == row
    assert str(row).startswith("1 thread: chain ")


def test_memory_does_not_grow_with_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    for steps in (5, 20):
        monkeypatch.setattr(bench, "_STEPS", steps)
        (row,) = bench_chain(threads=[1], repeats=1)
        peaks.append(row.peak_extra_mb)
    # The info record keeps four numbers per step. One hidden activation of the whole batch would be 4.2 MB.
    assert peaks[1] == pytest.approx(peaks[0], abs=0.01)
    assert peaks[0] < 4.2


def test_the_ledger_counts_what_is_alive() -> None:
    given = torch.zeros(1000)

    def work() -> None:
        a = given + 1  # 4000 bytes
        b = a.view(10, 100)  # the same ones
        c = torch.empty(500)  # 2000
        torch.add(c, 1, out=c)
        del a, b
        d = torch.zeros(250)  # 1000, while 2000 are alive
        given.add_(d.sum())

    assert bench._peak_memory(work) == 6000


def test_too_many_threads_are_noted_and_the_count_is_given_back() -> None:
    before = torch.get_num_threads()
    rows = bench_chain(threads=[bench._cores() + 1, 1], repeats=1)
    note = next(rows).note
    rows.close()
    assert note is not None and note.startswith(f"{bench._cores() + 1} threads on {bench._cores()} cores")
    assert torch.get_num_threads() == before


def test_a_busy_machine_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.3, 9.0, 9.0))
    assert bench._note(1) is None
    monkeypatch.setattr("os.getloadavg", lambda: (123.4, 0.0, 0.0))
    assert bench._note(1) == f"busy machine, load 123.4 on {bench._cores()} cores"


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        list(bench_chain(threads=[0]))
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        list(bench_chain(repeats=0))
