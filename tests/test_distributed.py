"""One run on two processes: same weights, the sum of their shares, exact resume, and an end that is an end for all."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cebm.demonstrations import Demonstrations
from cebm.distributed import (
    ALONE,
    Group,
    GroupError,
    _answered,
    _from_words,
    _portable,
    group_of_environment,
    started_by_torchrun,
)
from cebm.recipes import TRIALS
from cebm.runs import TrainingError, _check_processes, checkpoints, load_checkpoint, load_metrics, resume
from cebm.settings import StorageError
from cebm.trainer import Trainer
from test_runs import comparable, contents
from test_trainer import particle, small
from waiting import PATIENCE, eventually

ROOT = Path(__file__).parents[1]
STEPS = 100
TINY = (
    f"joint-replay --steps {STEPS} --log-every 5 --checkpoint-every 20 --evaluate-every 50 --threads 1 "
    "--energy.width 16 --objective.source.sampler.steps 2 --objective.source.capacity 200 --objective.count 2 "
    "--optimiser.batch-size 32 --evaluation-candidates 4"
).split()


def torchrun(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Two processes."""
    paths = [str(ROOT / "src"), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    return subprocess.Popen(command, env=environment, **options)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to torchrun and to the processes that it started, which are in sessions of their own."""
    started = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
    for pid in (process.pid, *map(int, started.split())):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def finish(process: subprocess.Popen[bytes]) -> int:
    """The exit code; a group that hangs is killed."""
    try:
        return process.wait(3 * PATIENCE)
    except subprocess.TimeoutExpired:
        kill_all(process)
        raise


def reached(where: Path, step: int) -> bool:
    """Whether the metrics have reached this step."""
    rows = load_metrics(where)
    return bool(rows) and rows[-1]["step"] >= step


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two processes that was killed and resumed, and what they printed."""
    place = tmp_path_factory.mktemp("runs")
    data, where, log = place / "demonstrations", place / "resumed", place / "log"
    made = particle(12)
    Demonstrations.from_arrays(made.obs, made.actions, made.episode_ends).save(data)  # without a task to roll out
    with open(log, "wb") as file:
        to_file = {"stdout": file, "stderr": file}
        process = torchrun("-m", "cebm", "train", *TINY, "--data", str(data), "--out", str(where), **to_file)
        eventually(lambda: process.poll() is not None or reached(where, 30), 3 * PATIENCE, pause=0.001)
        assert process.poll() is None, "the run ended before it could be stopped"
        kill_all(process)
        process = torchrun("-m", "cebm", "train", "--resume", str(where), "--threads", "1", **to_file)
        assert finish(process) == 0, log.read_text()
    return where, log.read_text()


def test_the_first_process_alone_writes_and_prints(resumed: tuple[Path, str]) -> None:
    where, printed = resumed
    parts = ("demonstrations to train on", "best at step", f"step    {STEPS}")
    assert [printed.count(part) for part in parts] == [1, 1, 1]
    assert json.loads((where / "run.json").read_text())["processes"] == 2
    rows = load_metrics(where)
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(5, STEPS + 1, 5))
    header, tensors = load_checkpoint(checkpoints(where)[0])
    assert (header["step"], header["processes"]) == (STEPS, 2)
    # What the processes have for themselves: random numbers and chains.
    for name in ("generator", "learner.pieces.source.stored"):
        assert not torch.equal(tensors[name], tensors[f"rank-1.{name}"])
    assert not any(name.startswith("rank-1.learner.energy") for name in tensors)


def test_a_killed_run_resumes_bit_for_bit(resumed: tuple[Path, str], inside: list[dict[str, Any]]) -> None:
    where, whole = resumed[0], inside[0]["whole"]
    assert comparable(load_metrics(where)) == comparable(load_metrics(whole))
    for name in ("policy", "best", f"checkpoints/step-{STEPS:08d}"):
        assert contents(where / name) == contents(whole / name), name


def test_sigterm_to_one_process_stops_all_and_they_resume(inside: list[dict[str, Any]]) -> None:
    """Process 1 gets the signal in its eighth step, after the last checkpoint."""
    for found in inside:
        assert found["terminated"] == ("Interrupted", "stopped at step 8 on request; resume continues from there")
    files = [inside[0][name] for name in ("interrupted", "undisturbed")]
    assert comparable(load_metrics(files[0])) == comparable(load_metrics(files[1]))
    for name in ("policy", "best", "checkpoints/step-00000016"):
        assert contents(files[0] / name) == contents(files[1] / name), name


def test_another_number_of_processes_is_refused(resumed: tuple[Path, str], tmp_path: Path) -> None:
    where = Path(shutil.copytree(resumed[0], tmp_path / "run"))
    before = contents(where)
    with pytest.raises(TrainingError, match=r"began with 2 processes, and now there is 1 process; resume needs"):
        resume(where, steps=STEPS + 10)
    assert contents(where) == before
    _check_processes({}, ALONE, where)  # an older run had one process
    with pytest.raises(TrainingError, match=r"began with 1 process, and now there are 2 processes"):
        _check_processes({}, Group(1, 2), where)


# -------------------------------------------------------------------------------------------- inside two processes

SCRIPT = """
import os, pickle, signal, sys
from dataclasses import dataclass, replace
from pathlib import Path
import torch
torch.set_num_threads(1)
from cebm.distributed import group_of_environment
from cebm.runs import load_job, resume, train
from test_distributed import trainer_of_two
from test_runs import small_job

out, job = sys.argv[1], load_job(sys.argv[2])
found = {name: Path(out, name) for name in ("whole", "interrupted", "undisturbed")}
calls = []

@dataclass(frozen=True)
class Trap:
    rank: int
    step: int
    def penalty(self, energy, obs, terms):
        if group.rank == self.rank and current.step_count == self.step:
            raise KeyError("a trap")
        return 0 * terms.positive.mean()

@dataclass(frozen=True)
class Signal:
    step: int
    def penalty(self, energy, obs, terms):
        calls.append(1)
        if group.rank and len(calls) == self.step + 1:  # the first call rehearses
            os.kill(os.getpid(), signal.SIGTERM)
        return 0 * terms.positive.mean()

def said(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)

def full(row):
    if row["step"] == 12:
        raise OSError(28, "No space left on device")

def threads():
    return len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0

before = threads()
with group_of_environment() as group:
    train(job, found["whole"], group=group)
    job = small_job("correct-mas", steps=16, checkpoint_every=5, evaluate_every=16, average=0.9)
    job = replace(job, trial=replace(job.trial, penalties=(Signal(8),)))
    found["terminated"] = said(lambda: train(job, found["interrupted"], group=group))
    resume(found["interrupted"], group=group)
    calls = [0] * 100
    train(job, found["undisturbed"], group=group)

    trainer = trainer_of_two(group)
    trainer.align()
    losses = [group.means({"loss": float(trainer.step()["loss"])})["loss"] for _ in range(4)]
    found["losses"], found["weights"] = losses, dict(trainer.learner.named_parameters())

    left = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)] + [torch.nn.Parameter(torch.ones(1).double())]
    left[0].grad = torch.full((2,), 1.0 + group.rank)
    left[1].grad = torch.ones(2) if group.rank else None
    left[3].grad = torch.full((1,), 2.0 * group.rank).double()
    group.average_gradients(left)
    found["gradients"] = [None if each.grad is None else each.grad.tolist() for each in left]

    current = trainer_of_two(group, penalties=(Trap(1, 2),))
    found["trap"] = said(lambda: [current.step() for _ in range(5)]), current.step_count
    job = small_job("mcmc-loss", learning_rate=1e30, steps=20, checkpoint_every=1)
    found["diverged"] = said(lambda: train(job, out + "/diverged", group=group))
    job = small_job("ibc", steps=20, checkpoint_every=5, evaluate_every=20)
    found["full"] = said(lambda: train(job, out + "/full", full, group=group))
    found["other data"] = said(lambda: group.check_same(str(group.rank), "the data are"))
found["threads left"] = threads() - before
with open(f"{out}/{group.rank}", "wb") as file:
    pickle.dump(found, file)
"""
SHARED = "correct-mas-maxent"


def trainer_of_two(group: Group, **settings: Any) -> Trainer:
    data = particle()
    trial = small(TRIALS[SHARED], average=0.9, **settings)
    return Trainer(trial, data, data, 5, limits=(0.0, 1.0), steps=10, group=group)


@pytest.fixture(scope="module")
def inside(resumed: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    where = tmp_path_factory.mktemp("inside")
    (where / "script.py").write_text(SCRIPT)
    assert finish(torchrun(str(where / "script.py"), str(where), str(resumed[0]))) == 0
    return [pickle.loads((where / str(rank)).read_bytes()) for rank in range(2)]


def test_the_threads_of_the_group_end_with_it(inside: list[dict[str, Any]]) -> None:
    """A thread that still ran at the end of Python aborted the process, in 5 of 10 runs on a busy machine."""
    assert [found["threads left"] for found in inside] == [0, 0]


def reference(generators: list[torch.Generator]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a training in one process that computes both shares of every batch in turn."""
    trainer = trainer_of_two(ALONE)
    losses = []
    for step in range(4):
        trainer.step_count = step
        for settings in trainer.optimiser.param_groups:
            settings["lr"] = trainer._learning_rate()
        obs, actions = trainer._batch(step)
        trainer.optimiser.zero_grad()
        parts = []
        for share, generator in zip((slice(0, 16), slice(16, 32)), generators, strict=True):
            loss, log = trainer.learner.loss(obs[share], actions[share], generator)
            (loss / 2).backward()
            parts.append(float(log["loss"]))
        trainer.optimiser.step()
        losses.append(sum(parts) / 2)
    return losses, dict(trainer.learner.named_parameters())


def test_two_processes_are_one_that_computes_both_shares(inside: list[dict[str, Any]]) -> None:
    first, second = inside
    assert first["weights"].keys() == second["weights"].keys()
    assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())
    seeds = [Group(rank, 2).seed(5) for rank in range(2)]
    losses, weights = reference([torch.Generator().manual_seed(seed) for seed in seeds])
    assert first["losses"] == second["losses"] == pytest.approx(losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(first["weights"][name], value, rtol=1e-4, atol=1e-6)
    # Planted bug: both processes draw the same negatives.
    wrong = reference([torch.Generator().manual_seed(seeds[0]) for _ in range(2)])[0]
    assert wrong != pytest.approx(losses, rel=1e-5)


def test_parameters_without_a_gradient_are_averaged_as_zeros_or_left_alone(inside: list[dict[str, Any]]) -> None:
    for found in inside:
        assert found["gradients"] == [[1.5, 1.5], [0.5, 0.5], None, [1.0]]


def test_all_processes_end_with_the_same_error(inside: list[dict[str, Any]]) -> None:
    first, second = inside
    for found in inside:
        assert found["trap"] == (("KeyError", "'a trap'"), 2)
        assert found["diverged"][0] == "DivergedError"
        assert found["full"][0] == "TrainingError"
        assert "No space left on device; last good checkpoint: step 10" in found["full"][1]
        assert found["other data"] == ("ValueError", "the data are not the same in all 2 processes")
    assert first["diverged"] == second["diverged"]
    assert "at step 2; there is no good checkpoint" in first["diverged"][1]


# -------------------------------------------------------------------------------------------- without a second process


def test_shares_make_the_whole_batch_and_negatives_differ() -> None:
    alone, *ranks = trainer_of_two(ALONE), trainer_of_two(Group(0, 2)), trainer_of_two(Group(1, 2))
    for step in (0, 1, 5, 9):
        for column, wanted in enumerate(alone._batch(step)):
            assert torch.equal(torch.cat([each._batch(step)[column] for each in ranks]), wanted)
    weights = [each.learner.state_dict() for each in (alone, *ranks)]
    assert all(torch.equal(weights[0][name], other[name]) for other in weights[1:] for name in other)
    obs, actions = alone._batch(0)
    drawn = [each.learner.objective.terms(each.learner.energy, obs, actions, each.generator).drawn for each in ranks]
    assert (drawn[0].actions == drawn[1].actions).float().mean() < 0.2  # both may be at the same limit


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size 31 cannot be divided equally among 2 processes"):
        trainer_of_two(Group(1, 2), batch_size=31)


def test_a_process_needs_its_own_state() -> None:
    trainer = trainer_of_two(Group(1, 2))
    with pytest.raises(StorageError, match="the state of process 1 is missing"):
        trainer.load_state(trainer_of_two(ALONE).state(), 0)


def test_seeds_and_devices_belong_to_a_process() -> None:
    seeds = {Group(rank, size).seed(seed) for seed in (0, 1) for size in (2,) for rank in range(2)}
    assert len(seeds) == 4 and all(0 <= seed < 2**63 for seed in seeds)
    assert ALONE.seed(7) == 7 and ALONE.device("cuda") == "cuda"
    assert Group(3, 4, 1).device("cuda") == "cuda:1" and Group(3, 4, 1).device("cpu") == "cpu"


def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not started_by_torchrun()
    with group_of_environment() as group:
        assert group is ALONE
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ValueError, match="device must be 'cuda' where 2 processes train"),
        group_of_environment("cuda:1"),
    ):
        pass
    monkeypatch.setenv("WORLD_SIZE", "1")
    with group_of_environment() as group:
        assert group is ALONE
    assert group.gathered(3) == [3] and group.of_first("a") == "a" and group.totals([1.0]) == [1.0]
    with pytest.raises(KeyError), group.together():
        raise KeyError("as it is")


class OddError(ValueError):
    """An error of somebody's own, that takes more than a message."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def test_errors_travel_as_their_kind() -> None:
    odd = OddError("one", "two")
    known = [FloatingPointError("loss is nan"), StorageError("a"), TrainingError("b"), OSError(28, "full", "file")]
    for error in (odd, *known, UnicodeDecodeError("utf-8", b"", 0, 1, "bad")):
        words = _portable(error)
        other = _from_words(*words)
        assert all(isinstance(word, str) for word in words) and isinstance(error, type(other))
        assert str(error) in str(other) and (type(other) is type(error)) == (error in known)
    assert _portable(odd) == ("builtins:ValueError", "OddError: one and two")


def test_a_process_that_is_gone_has_a_name() -> None:
    with pytest.raises(GroupError, match="another process ended, or did not answer within 30 minutes"), _answered():
        raise RuntimeError("Connection reset by peer")
