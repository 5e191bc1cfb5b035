"""The benchmark's numbers have the promised form; how good they are is for the benchmark itself to say."""

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import bench, busy, document, from_nothing, measure, parallel
from benchmarks.bench import ChainBench, machine, make_trainer, varied, work_and_memory
from benchmarks.deploy import bare_steady
from cebm.composition import vary
from cebm.distributed import ALONE
from cebm.negatives import Uniform
from cebm.objectives import InfoNCE
from cebm.products import onednn_is_quicker
from cebm.recipes import TRIALS

ROOT = Path(__file__).parents[2]
SMALL = vary(varied(TRIALS["ibc"], {"batch": 16, "width": 16}), candidates=4)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks of next to nothing, each measured twice."""
    monkeypatch.setattr(bench, "TRIALS", {"ibc": SMALL, "steady": replace(SMALL, objective=InfoNCE(Uniform(), 8))})
    monkeypatch.setattr(bench, "_SECONDS", 0.0)
    monkeypatch.setattr(bench, "_FEWEST", 2)
    monkeypatch.setattr(bench, "_BATCH", 4)
    monkeypatch.setattr(bench, "_VARIATIONS", ({"width": 64}, {"samples": 20, "batch": 8}))
    monkeypatch.setattr(bench, "_GROWTH", {"batch": (4, 8, 16), "dimension": (1, 2)})
    monkeypatch.setattr(bench, "_ACT_BATCHES", (1, 3))
    monkeypatch.setattr(bench, "_ENV_EPISODES", 10)
    monkeypatch.setattr(bench, "_EVALUATION_EPISODES", 3)


MOST = 3.0 if onednn_is_quicker() else 1.2
"""Of torch.mm's rate: that is MKL's, and oneDNN may be more than twice as fast."""


def test_a_row_per_thread_count_with_sane_numbers() -> None:
    before = torch.get_num_threads()
    (row,) = bench.bench("chain", threads=[1], repeats=3)
    assert isinstance(row, ChainBench)
    assert torch.get_num_threads() == before
    assert (row.threads, row.repeats) == (1, 3)
    assert row.mm_gflops > 0.1 and row.chain_gflops > 0.1
    assert 0.2 < row.fraction < MOST
    assert row.fraction_q25 <= row.fraction <= row.fraction_q75
    assert row.chain_ms == pytest.approx(10 * 2 * 2 * 4096 * 256 * 256 / row.chain_gflops / 1e6)
    written = json.loads(row.to_json())
    assert {"mm_gflops", "chain_gflops", "fraction", "threads", "fraction_q25", "fraction_q75"} <= set(written)
    assert ChainBench(**written) == row
    assert str(row).startswith("1 thread: chain ")


def test_memory_does_not_grow_with_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    monkeypatch.setattr(bench, "_BATCH", 256)
    for steps in (5, 20):
        monkeypatch.setattr(bench, "_STEPS", steps)
        (row,) = bench.bench("chain", threads=[1], repeats=1)
        assert isinstance(row, ChainBench)
        peaks.append(row.peak_extra_mb)
    # The info record keeps four numbers per step. One hidden activation of the whole batch would be 2.1 MB.
    assert peaks[1] == pytest.approx(peaks[0], abs=0.01)
    assert peaks[0] < 2.1


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

    assert work_and_memory(work) == (0, 6000)


def test_too_many_threads_are_noted_and_the_count_is_given_back() -> None:
    before = torch.get_num_threads()
    rows = bench.bench("chain", threads=[bench._cores() + 1, 1], repeats=1)
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
        list(bench.bench("chain", threads=[0]))
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        list(bench.bench("chain", repeats=0))
    with pytest.raises(
        ValueError, match="no benchmark 'speed'; there are chain, train, growth, act, env, deploy and all"
    ):
        list(bench.bench("speed"))
    with pytest.raises(ValueError, match="sizes must be of batch, samples, steps or width, got 'depth'"):
        varied(SMALL, {"depth": 3})


# ---------------------------------------------------------------------------------------------- useful work


def test_the_paper_s_step_has_12_7_gflop() -> None:
    """The generic count is the closed form: two hidden products per chain step, three in the loss (forward, and
    backward to weights and inputs) for 8 negatives and the positive, and the thin layers, below 1 %."""
    trainer = make_trainer(TRIALS["ibc"])
    trainer.step()
    flop, peak = work_and_memory(trainer.step)
    hidden = 2 * 256 * 256 * (10 * 2 * 512 * 8 + 3 * 512 * 9)
    assert hidden < flop < 1.01 * hidden
    assert f"{flop / 1e9:.1f}" == "12.7"
    # What autograd keeps is two activations per row; whole-batch passes over them would take as much again.
    kept = 2 * 4 * 512 * 9 * 256
    assert kept < peak < 1.3 * kept


def test_the_count_is_that_of_a_product() -> None:
    left, right, square = torch.ones(3, 5), torch.ones(5, 7), torch.ones(2, 4, 4)
    out = torch.empty(3, 7)

    def work() -> None:
        torch.mm(left, right, out=out)
        left.add_(1)
        torch.bmm(square, square)

    assert work_and_memory(work)[0] == 2 * (3 * 5 * 7 + 2 * 4 * 4 * 4)


@pytest.mark.parametrize(
    ("axis", "value", "exponent"), [("batch", 32, 1), ("samples", 16, 0.95), ("steps", 20, 0.9), ("width", 64, 1.7)]
)
def test_each_axis_is_varied(axis: str, value: int, exponent: float) -> None:
    """Work grows with the varied size, and by about as much as it should."""
    base = varied(SMALL, {"width": 32})
    flops = []
    for size in (value // 2, value):
        trainer = make_trainer(varied(base, {axis: size}))
        flops.append(work_and_memory(trainer.step)[0])
    assert np.log2(flops[1] / flops[0]) == pytest.approx(exponent, abs=0.3)


# ---------------------------------------------------------------------------------------------- all benchmarks


@pytest.mark.usefixtures("small")
def test_all_benchmarks_give_rows_that_know_their_json() -> None:
    rows = list(bench.bench("all", threads=[1], repeats=2))
    assert list(dict.fromkeys(row.bench for row in rows)) == ["chain", "train", "growth", "act", "env"]
    for row in rows:
        written = json.loads(row.to_json())
        assert type(row)(**written) == row
        for name in ("fraction", "step_ms", "exponent", "additions", "control_steps_per_second"):
            if f"{name}_q25" in written:
                assert written[f"{name}_q25"] <= written[name] <= written[f"{name}_q75"]
        assert row.repeats == 2 and row.torch == torch.__version__
        assert str(row).startswith("1 thread: ")
    trains = [json.loads(row.to_json()) for row in rows if row.bench == "train"]
    assert [(row["trial"], row["setting"]) for row in trains] == [
        ("ibc", "as it is"),
        ("steady", "as it is"),
        ("ibc", "width 64"),
        ("ibc", "samples 20, batch 8"),
    ]
    for row in trains:
        assert row["steps_per_second"] == pytest.approx(1e3 / row["step_ms"])
        assert 0 < row["fraction"] < MOST and row["gflop"] > 0 and row["peak_extra_mb"] > 0
    actions = [json.loads(row.to_json()) for row in rows if row.bench == "act"]
    assert [(row["trial"], row["batch"]) for row in actions] == [("ibc", 1), ("ibc", 3), ("steady", 1), ("steady", 3)]
    for row in actions:
        assert 0 < row["ms_p50"] <= row["ms_p99"]
        assert 0.1 < row["addition_us"] < 1000 and row["additions"] > 10  # a call has many operations


@pytest.mark.usefixtures("small")
def test_the_bare_action_is_the_policy_s_to_the_last_bit() -> None:
    """Otherwise their times could not be compared."""
    trainer = make_trainer(TRIALS["steady"])
    policy, bare = trainer.policy(), bare_steady(trainer.policy())
    for obs in torch.as_tensor(trainer.training[np.arange(5)][0]):
        assert torch.equal(policy.act(obs), bare(obs))


@pytest.mark.usefixtures("small")
def test_growth_takes_the_first_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row.threads for row in bench.bench("growth", [1, 1], 1)] == [1, 1]  # two axes


def test_a_known_power_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times ∝ value^1.5, on a machine that is now fast, now slow."""
    values = np.array([128, 256, 512, 1024])

    def measured(subjects: list, repeats: int, longer: int = 1) -> tuple[np.ndarray, np.ndarray]:
        speed = np.array([1e9, 3e9, 2e9])
        return values[:, None] ** 1.5 / speed, np.broadcast_to(speed, (4, 3))

    monkeypatch.setattr(bench, "interleaved", measured)
    monkeypatch.setattr(bench, "_GROWTH", {"batch": tuple(values.tolist())})
    (row,) = bench._bench_growth(1, 3)
    assert (row.exponent, row.exponent_q25, row.exponent_q75) == pytest.approx((1.5, 1.5, 1.5))
    assert row.step_ms == pytest.approx((1e3 * values**1.5 / 2e9).tolist())


def test_measurements_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, a, products, b, products, …; each subject is paired with the products around it."""
    clock = iter(np.cumsum(range(1000)).tolist())  # the n-th reading is 1 + … + n: every interval differs
    order: list[str] = []
    original = bench._time

    def timed(work, calls: int = 1) -> float:  # type: ignore[no-untyped-def]
        order.append(work.__name__)
        return original(lambda: None, calls)

    monkeypatch.setattr(bench, "_time", timed)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(bench, "_SECONDS", 1e9)

    def a() -> None: ...
    def b() -> None: ...

    seconds, rates = bench.interleaved([a, b], 3)
    assert seconds.shape == rates.shape == (2, 3)
    assert order == ["a", "b", "product", "product", "product", *["a", "product", "b", "product"] * 3]
    # Intervals grow, so later times are longer, and products around a later subject slower.
    times = seconds.T.ravel()
    assert all(x < y for x, y in pairwise(times)) and all(x > y for x, y in pairwise(rates.T.ravel()))


def test_slow_work_is_measured_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench._goes_on([100.0, 100.0], 25) and not bench._goes_on([100.0] * 3, 25)
    assert bench._goes_on([0.1] * 24, 25) and not bench._goes_on([0.1] * 25, 25)
    assert not bench._goes_on([100.0], 1)
    assert bench._goes_on([7.0] * 3, 25, 4) and not bench._goes_on([7.0] * 4, 25, 4)  # 24 seconds


# ---------------------------------------------------------------------------------------------- baselines


@pytest.mark.parametrize("samples", [8, 20])
def test_the_eager_baseline_computes_the_same_step(samples: int) -> None:
    """From the same weights, batch and random numbers: the same loss, and the same gradients of the weights."""
    trainer = make_trainer(vary(SMALL, count=samples))
    eager = measure.EagerStep(8, 2, 16, samples)
    own = list(trainer.learner.parameters())
    with torch.no_grad():
        for theirs, ours in zip(eager.network.parameters(), own, strict=True):
            theirs.copy_(ours)
    generator = torch.Generator()
    generator.set_state(trainer.generator.get_state())
    loss = eager.step(*trainer._batch(0), generator)
    torch.testing.assert_close(trainer.step()["loss"], loss)
    for theirs, ours in zip(eager.network.parameters(), own, strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-3, atol=1e-5)


def test_a_comparison_has_a_row_per_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)  # a real one takes half a minute
    rows = list(measure.compare({"width": 16, "batch": 16}, 1, 2))
    assert [row.baseline for row in rows] == ["eager", "compiled"]
    assert all(type(row)(**json.loads(row.to_json())) == row for row in rows)
    assert all(row.ratio_q25 <= row.ratio <= row.ratio_q75 and row.repeats == 2 for row in rows)
    assert rows[0].baseline_mb > 0 and rows[1].baseline_mb is None


@pytest.mark.usefixtures("small")
def test_results_become_tables_and_a_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """measure.py and document.py from end to end, on a copy of the document."""
    text = (ROOT / "docs/performance.md").read_text()
    (tmp_path / "performance.md").write_text(text)
    (tmp_path / "from_nothing.jsonl").write_bytes((ROOT / "docs/from_nothing.jsonl").read_bytes())
    monkeypatch.setattr(document, "DOCS", tmp_path)
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "performance.jsonl")
    monkeypatch.setattr(measure, "TRIALS", {"ibc": SMALL})
    monkeypatch.setattr(measure, "machine", lambda threads: bench.machine(threads) | {"cores": 1})
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(measure, "SETTINGS", ({},))
    measure.main()
    document.main()
    written = (tmp_path / "performance.md").read_text()
    assert capsys.readouterr().out.startswith("1 thread: chain ")
    begin, end = "<!-- make bench: begin -->", "<!-- make bench: end -->"
    assert written.split(begin)[0] == text.split(begin)[0]
    assert written.split(end)[1] == text.split(end)[1]
    for words in (
        "chain of `ibc` alone",
        "`steady`",
        "samples 20, batch 8",
        "| eager |",
        "| batch |",
        "control steps",
    ):
        assert words in written
    document.main()  # once more changes nothing
    assert (tmp_path / "performance.md").read_text() == written
    assert 10_000 < (tmp_path / "performance.png").stat().st_size < 200_000


def test_the_document_shows_the_committed_results() -> None:
    rows, runs = (document.read(ROOT / f"docs/{name}.jsonl") for name in ("performance", "from_nothing"))
    text = (ROOT / "docs/performance.md").read_text()
    assert document.documented(text, rows, runs) == text


@pytest.mark.slow
def test_from_nothing_measures_a_run_of_the_command_line() -> None:
    """One step, so that the policy knows nothing, but all is there: the commands work as they are written."""
    found = from_nothing.measure(seed=0, steps=1)
    assert found["success"] < 0.5 and found["seconds"] > 1
    assert 0 < found["action_ms_p50"] <= found["action_ms_p99"]


def test_a_speed_up_is_a_ratio_with_its_quartiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "TRIALS", {"ibc": SMALL})
    rows = list(parallel.parallel(parallel.Arguments(batches=(8, 16), trials=("ibc",), rounds=3, episodes=2), ALONE))
    assert [(row.batch, row.processes, row.repeats) for row in rows] == [(8, 1, 3), (16, 1, 3)]
    for row in rows:
        assert 0 < row.speed_up_q25 <= row.speed_up <= row.speed_up_q75
        assert f"batch {row.batch}: 1 processes are {row.speed_up:.2f} times as fast as one" in str(row)


def test_a_way_beside_a_neighbour_is_compared_within_its_round() -> None:
    """A machine that halves its pace in a round changes no ratio."""
    others = {"others": 0.1}
    rounds = [
        {
            busy.ONE: {"rate": 40.0 / slow, "threads": 1} | others,
            busy.DEFAULT: {"rate": 60 / slow, "threads": 2} | others,
        }
        for slow in (1, 2, 1)
    ]
    row = busy._row("ibc", busy.DEFAULT, True, rounds, machine(2))
    assert (row.ratio, row.ratio_q25, row.ratio_q75) == (1.5, 1.5, 1.5)
    assert row.chosen == {"2": 3} and row.others == pytest.approx(0.1) and row.step_ms == pytest.approx(1000 / 60)
    assert "ibc beside a busy neighbour, default: 16.7 ms a step, 1.50 times as fast as one thread" in str(row)
    assert not busy._row("ibc", busy.ONE, False, rounds, machine(2)).chosen


def test_the_neighbour_takes_a_core_and_leaves() -> None:
    with busy.neighbour(True) as process:
        assert process is not None
        late = time.monotonic() + 60
        while busy._taken(process) < 0.05:
            assert time.monotonic() < late, "the neighbour does not compute"
            time.sleep(0.05)
    assert not Path(f"/proc/{process}").exists()
    with busy.neighbour(False) as process:
        assert process is None


@pytest.mark.slow
def test_a_process_is_asked_for_its_pace() -> None:
    with busy.Subject("steady", busy.DEFAULT) as subject:
        subject.ready()
        found = subject.ask(0.2, None)
    assert found["rate"] > 0 and found["threads"] >= 1 and found["others"] >= -0.5
