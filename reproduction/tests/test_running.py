"""Tasks, their records and their statistics: nothing is run twice, nothing finished is lost."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from cebm.engines import Local, Words, call
from cebm.loading import load
from cebm.recipes import find_trial, vary
from cebm.runs import restored
from cebm.samplers import Langevin
from cebm.storage import row_line
from cebm.sweep.studies import unusual
from cebm.trainer import Trainer
from reproduction import running, trainings
from reproduction.intervals import Interval, decide
from reproduction.ledger import Claim, Computation, Finding, Results, Task
from reproduction.running import ReproductionError, reproduce, run_task
from reproduction.trainings import Result, Scale, Training, training

TINY = Scale("smoke", 4, 2, 3, 4, 2, 2, True)


def short(task: Task) -> Task:
    """The same training in episodes of three steps: roll-outs are what takes time at this size."""
    if isinstance(task, Computation):
        return task
    assert task.job.task is not None
    return replace(task, job=replace(task.job, task=replace(task.job.task, steps=3)))


@dataclass(frozen=True)
class Counted(Claim):
    """Computes the seed, notes each call in a file, and fails for some seeds while a file says so."""

    number = 99
    slug = "counted"
    section = "none"
    statement = "Seeds are positive."
    protocol = metric = rule = "none"

    notes: str = ""
    """A file."""

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        return [Computation(self, seed, scale) for seed in seeds]

    def compute(self, scale: Scale, seed: int) -> Result:
        with open(self.notes, "a") as file:
            file.write(f"{seed} {os.getpid()}\n")
        if Path(self.notes).with_suffix(f".die-{seed}").exists():
            os._exit(9)
        if Path(self.notes).with_suffix(f".fail-{seed}").exists():
            raise ArithmeticError(f"the bad luck of seed {seed}")
        return {"value": seed + 1}

    def judge(self, results: Results) -> Finding:
        values = results.values("computation", "value")
        return Finding(decide(Interval.of(values)), f"Values {values}.", {"values": values}, "None.")

    def draw(self, finding: Finding, figure: Any) -> None:
        figure.subplots().plot(finding.numbers["values"])

    def calls(self) -> list[tuple[int, int]]:
        notes = Path(self.notes)
        lines = notes.read_text().splitlines() if notes.exists() else []
        return [(int(seed), int(process)) for seed, process in map(str.split, lines)]


class Inline:
    """Runs a task at once, in this process."""

    workers = 1

    def submit(self, task: Words) -> str:
        try:
            call(task)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def outcome(self, handle: str) -> str | None:
        return handle

    def close(self) -> None: ...


INLINE = Inline()


def test_tasks_run_in_processes_of_their_own(tmp_path: Path) -> None:
    claim = Counted(str(tmp_path / "notes"))
    found = reproduce([claim], TINY, 2, Local(1), tmp_path / "results", tmp_path / "runs")
    assert found["counted"].measured == "Values [1.0, 2.0]."
    assert sorted(seed for seed, _ in claim.calls()) == [0, 1]
    assert os.getpid() not in {process for _, process in claim.calls()}


def test_a_finished_task_is_not_run_again(tmp_path: Path) -> None:
    claim = Counted(str(tmp_path / "notes"))
    for seeds in (1, 2, 2, 3):
        reproduce([claim], TINY, seeds, INLINE, tmp_path / "results", tmp_path / "runs", retries=0)
    assert [seed for seed, _ in claim.calls()] == [0, 1, 2]
    record = json.loads((tmp_path / "results/99-counted.json").read_text())
    assert record["seeds"] == [0, 1, 2] and record["measurements"] == {"values": [1.0, 2.0, 3.0]}
    assert (tmp_path / "results/99-counted.png").read_bytes().startswith(b"\x89PNG")


def test_records_of_another_checkout_are_used(tmp_path: Path) -> None:
    claim = Counted(str(tmp_path / "notes"))
    first = reproduce([claim], TINY, 2, INLINE, tmp_path / "results", tmp_path / "runs", retries=0)
    shutil.copytree(tmp_path / "results/runs", tmp_path / "clone/results/runs")
    again = reproduce([claim], TINY, 2, 1, tmp_path / "clone/results", tmp_path / "clone/runs")
    assert first == again and len(claim.calls()) == 2
    # And they are what is judged: another number in a record is another finding.
    path = tmp_path / "clone/results/runs/counted-smoke-0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"result": {"value": -7}}))
    changed = reproduce([claim], TINY, 2, 1, tmp_path / "clone/results", tmp_path / "clone/runs")
    assert changed["counted"].measured == "Values [-7.0, 2.0]."


def test_failures_are_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    claim = Counted(str(tmp_path / "notes"))
    bad = tmp_path / "notes.fail-1"
    bad.touch()
    with pytest.raises(ReproductionError, match=r"^1 failed, the others are kept") as caught:
        reproduce([claim], TINY, 3, INLINE, tmp_path / "results", tmp_path / "runs", retries=0)
    assert "counted-smoke-1: " in str(caught.value) and "the bad luck of seed 1" in str(caught.value)
    assert "counted-smoke-0" not in str(caught.value)
    kept = sorted(path.name for path in (tmp_path / "results/runs").iterdir())
    assert kept == ["counted-smoke-0.json", "counted-smoke-2.json"]
    bad.unlink()
    reproduce([claim], TINY, 3, INLINE, tmp_path / "results", tmp_path / "runs", retries=0)
    assert sorted(seed for seed, _ in claim.calls()) == [0, 1, 1, 2]


@pytest.mark.slow
def test_a_worker_that_is_killed_does_not_end_the_reproduction(tmp_path: Path) -> None:
    claim = Counted(str(tmp_path / "notes"))
    dies = tmp_path / "notes.die-0"
    dies.touch()
    where = (tmp_path / "results", tmp_path / "runs")
    with pytest.raises(ReproductionError, match=r"^1 failed, the others are kept: counted-smoke-0: .*exit code 9"):
        reproduce([claim], TINY, 3, Local(1), *where, retries=1)
    assert sorted(seed for seed, _ in claim.calls()) == [0, 0, 1, 2]  # tried again, by another process
    assert len({process for _, process in claim.calls()}) == 4
    dies.unlink()
    assert reproduce([claim], TINY, 3, Local(1), *where)["counted"].measured == "Values [1.0, 2.0, 3.0]."


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    claim = Counted(str(tmp_path / "notes"))
    for task in (Computation(claim, 3, TINY, "a label", 7.0), training("ibc", TINY, 1, "another")):
        running.write_plan(task, tmp_path)
        assert running.read_plan(tmp_path / f"plans/{task.key}.json") == task


def test_records_of_other_settings_are_refused(tmp_path: Path) -> None:
    claim = Counted(str(tmp_path / "notes"))
    reproduce([claim], TINY, 1, INLINE, tmp_path / "results", tmp_path / "runs", retries=0)
    path = tmp_path / "results/runs/counted-smoke-0.json"
    record = json.loads(path.read_text())
    record["settings"]["scale"]["steps"] = 5
    path.write_text(json.dumps(record))
    with pytest.raises(ReproductionError, match=r"counted-smoke-0.json was made with other .*\(steps: 5, now 4\)"):
        reproduce([claim], TINY, 1, INLINE, tmp_path / "results", tmp_path / "runs", retries=0)
    del record["settings"]["scale"]["steps"]  # a setting that the record does not know is a later one
    path.write_text(json.dumps(record))
    reproduce([claim], TINY, 1, INLINE, tmp_path / "results", tmp_path / "runs", retries=0)


def test_the_settings_of_a_training_are_all_there() -> None:
    task = training("ibc", trainings.PAPER, 0)
    changed = replace(
        task,
        job=replace(task.job, trial=vary(task.job.trial, **{"objective.source.sampler": Langevin("ibc", noise=0.2)})),
    )
    assert running.differing(task.settings, task.settings) == ""
    assert running.differing(task.settings, changed.settings) == "noise: 0.1, now 0.2"


class Broken(Counted):
    """Cannot judge."""

    number = 98
    slug = "broken"

    def judge(self, results: Results) -> Finding:
        raise KeyError("what it asks for")


class Second(Counted):
    """Computes once the other claim is judged."""

    number = 98
    slug = "second"

    def compute(self, scale: Scale, seed: int) -> Result:
        assert (Path(self.notes).parent / "results/99-counted.json").exists()
        return super().compute(scale, seed)


def test_a_claim_that_cannot_be_judged_does_not_cost_the_others(tmp_path: Path) -> None:
    good, bad = Counted(str(tmp_path / "notes")), Broken(str(tmp_path / "others"))
    with pytest.raises(ReproductionError, match=r"^1 failed.*broken: KeyError"):
        reproduce([bad, good], TINY, 2, INLINE, tmp_path / "results", tmp_path / "runs", retries=0)
    assert json.loads((tmp_path / "results/99-counted.json").read_text())["verdict"] == "inconclusive"
    assert "17 claims 1 is measured: 0 hold," in (tmp_path / "results.md").read_text()
    assert "Traceback" in (tmp_path / "results/failures.txt").read_text()
    reproduce([good], TINY, 2, INLINE, tmp_path / "results", tmp_path / "runs", retries=0)
    assert not (tmp_path / "results/failures.txt").exists()  # it would be of the last time


def test_claims_are_judged_as_soon_as_they_can_be(tmp_path: Path) -> None:
    claims = [Counted(str(tmp_path / "notes")), Second(str(tmp_path / "others"))]
    reproduce(claims, TINY, 1, INLINE, tmp_path / "results", tmp_path / "runs", retries=0)


def test_what_was_skipped_is_tried_again(tmp_path: Path) -> None:
    claim = Counted(str(tmp_path / "notes"))
    reproduce([claim], TINY, 2, INLINE, tmp_path / "results", tmp_path / "runs", retries=0)
    path = tmp_path / "results/runs/counted-smoke-1.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"result": {"skipped": "no data there"}}))
    found = reproduce([claim], TINY, 2, INLINE, tmp_path / "results", tmp_path / "runs")
    assert found["counted"].measured == "Values [1.0, 2.0]."
    assert [seed for seed, _ in claim.calls()] == [0, 1, 1]


def test_two_processes_do_not_share_a_run(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    claim = Counted(str(tmp_path / "notes"))
    (tmp_path / "runs").mkdir()
    with open(tmp_path / "runs/counted-smoke-0.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ReproductionError, match="another process is at it"):
            run_task(claim.tasks(TINY, [0])[0], tmp_path, tmp_path / "runs")
    assert claim.calls() == []


def test_a_run_that_diverges_is_measured_as_its_last_checkpoint_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = short(training("ibc", replace(TINY, steps=9, evaluate_every=2), 0))
    assert isinstance(task, Training)
    task = replace(task, job=replace(task.job, checkpoint_every=3))
    step = Trainer.step

    def failing(trainer: Trainer) -> dict[str, Any]:
        if trainer.step_count == 5:
            raise FloatingPointError("loss is nan")
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", failing)
    monkeypatch.setattr(trainings, "information", lambda *_: {})
    result = task.run(tmp_path / task.key)
    assert result["diverged"] == "loss is nan, at step 6; last good checkpoint: step 3"
    assert [row["step"] for row in result["curve"]] == [2, 4, 6, 8, 9]
    standing = {key: value for key, value in result["curve"][1].items() if key != "step"}
    assert all({k: v for k, v in row.items() if k != "step"} == standing for row in result["curve"][2:])
    assert 0 <= result["last"]["success"] <= 1
    # The weights of step 3, and no others.
    at_three = restored(task.job, tmp_path / task.key)[0]
    assert at_three.step_count == 3
    saved = load(tmp_path / task.key / "policy").energy.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in at_three.policy().energy.state_dict().items())


def test_nothing_is_not_a_number_of_seeds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seeds must be at least 1, got 0"):
        reproduce([Counted(str(tmp_path / "notes"))], TINY, 0, INLINE, tmp_path / "results", tmp_path / "runs")


def test_a_training_goes_on_in_its_directory(tmp_path: Path) -> None:
    """What is there already is not trained again, and measures the same."""
    task = short(training("mse", replace(TINY, evaluate_every=2), 0))
    first = task.run(tmp_path / task.key)
    metrics = (tmp_path / task.key / "metrics.jsonl").read_bytes()
    assert task.run(tmp_path / task.key) == first
    assert (tmp_path / task.key / "metrics.jsonl").read_bytes() == metrics
    assert [row["step"] for row in first["curve"]] == [2, 4]
    assert set(first["last"]) >= {"success", "final_distance"} and isinstance(first["conditional_entropy"], float)


def test_the_time_of_a_run_counts_what_it_took_before_it_was_stopped(tmp_path: Path) -> None:
    task = short(training("mse", TINY, 0))
    (tmp_path / "results/runs").mkdir(parents=True)
    record = tmp_path / f"results/runs/{task.key}.json"
    run_task(task, tmp_path / "results", tmp_path)
    assert 0 < json.loads(record.read_text())["seconds"] < 1000
    metrics = tmp_path / task.key / "metrics.jsonl"
    rows = [json.loads(line) | {"seconds": 1000.0} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(map(row_line, rows)))
    run_task(task, tmp_path / "results", tmp_path)
    assert 1000 < json.loads(record.read_text())["seconds"] < 2000


def test_a_key_is_the_settings_and_not_the_label() -> None:
    plain = training("ibc", TINY, 0)
    assert training("ibc", TINY, 0, "another label").key == plain.key
    others = [
        training("ibc", TINY, 1),
        training("ibc-mas", TINY, 0),
        training("ibc", TINY, 0, episodes=3),
        training("ibc", TINY, 0, steps=5),
        training(vary(find_trial("ibc"), count=9), TINY, 0, "ibc"),
    ]
    assert len({plain.key, *(task.key for task in others)}) == 6
    # A setting that is as usual is not part of it, so that a class can gain settings.
    assert "keep_graph" not in json.dumps(unusual(plain.job))
    changed = replace(plain.job, trial=vary(plain.job.trial, **{"objective.source.sampler.noise": 0.3}))
    assert '"noise": 0.3' in json.dumps(unusual(changed)) and unusual(changed) != unusual(plain.job)


def test_costs_are_about_the_times_that_were_measured() -> None:
    # Seconds of one run on one core, of reproduction/results/runs, with nothing else on the machine.
    measured = {"ibc": 616, "mcmc-loss": 617, "correct": 645, "mse": 25}
    costs = {name: training(name, trainings.PAPER, 0).cost for name in measured}
    longer = training("ibc", trainings.PAPER, 0, steps=3000).cost
    seconds = [measured[name] / costs[name] for name in measured] + [979 / longer]
    assert max(seconds) < 2 * min(seconds)
    assert training("ibc", trainings.PAPER, 0, followed=False).cost < costs["ibc"]
    assert training("ibc", trainings.PAPER, 0, followed=False).job.evaluate_every == trainings.PAPER.steps


def test_results_follow_the_seeds() -> None:
    tasks = [training("mse", TINY, seed) for seed in (2, 0, 1)]
    results = Results.of(tasks, {task.key: {"deep": [{"value": 10 * task.seed}]} for task in tasks})
    assert results.values("mse", "deep", 0, "value") == [0.0, 10.0, 20.0]
    assert results.seeds == {"mse": [0, 1, 2]}


def test_an_interval_by_hand() -> None:
    # Mean 2, deviation 1, t = 4.303 with two degrees of freedom: 4.303/√3 = 2.4843.
    interval = Interval.of([1.0, 2.0, 3.0])
    assert interval.to_json() == pytest.approx([2.0, 2 - 2.48434, 2 + 2.48434], abs=1e-4)
    # Paired: the differences are 1, 2, 3, however far apart the pairs are.
    assert Interval.of_difference([101.0, 2.0, -7.0], [100.0, 0.0, -10.0]).to_json() == pytest.approx(
        interval.to_json()
    )
    with pytest.raises(ValueError):
        Interval.of_difference([1.0, 2.0], [1.0])
    single = Interval.of([0.5])
    assert single.mean == 0.5 and decide(single) == "inconclusive"


@pytest.mark.parametrize("n", [2, 3, 5, 8, 16, 17, 25, 60])
def test_an_interval_is_students(n: int) -> None:
    values = np.random.default_rng().normal(size=n)
    interval = Interval.of(values.tolist())
    half = scipy.stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n)
    assert interval.high - interval.mean == pytest.approx(half, rel=2e-3)
    assert interval.mean - interval.low == pytest.approx(half, rel=2e-3)


def test_decide() -> None:
    assert decide(Interval(0.2, 0.1, 0.3)) == "holds"
    assert decide(Interval(-0.2, -0.3, -0.1)) == "does not hold"
    assert decide(Interval(0.2, -0.1, 0.5)) == "inconclusive"
    assert decide(Interval(0.2, 0.1, 0.3), at_least=0.15) == "inconclusive"
    assert decide(Interval(0.2, 0.1, 0.3), at_least=0.4) == "does not hold"
    # At the limit itself nothing is decided.
    assert decide(Interval(0.1, 0.0, 0.2)) == decide(Interval(-0.1, -0.2, 0.0)) == "inconclusive"
