"""Runs that are killed, damaged, starved of disk and resumed."""

import csv
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cebm.storage
from cebm import provenance, runs, selection
from cebm.annealing import Annealed
from cebm.cli import main
from cebm.composition import vary
from cebm.demonstrations import Demonstrations
from cebm.denoising import DenoisingScore, LevelContrast, Sum
from cebm.energies import MLP
from cebm.evaluation import TEST_SEED, VALIDATION_SEED
from cebm.loading import load
from cebm.negatives import ShortChains, Uniform
from cebm.objectives import GradientPenalty
from cebm.policy import FORMAT, VERSION
from cebm.recipes import TRIALS
from cebm.runs import (
    DivergedError,
    Interrupted,
    Job,
    TrainingError,
    load_job,
    load_metrics,
    read_record,
    resume,
    train,
    trainer_of,
)
from cebm.selection import TIMES, score
from cebm.settings import StorageError
from cebm.storage import LockedError, load_bundle, locked, read_document, write_document
from cebm.tasks import Gym, ParticleTask, TaskError, collect_particle
from cebm.trainer import Trainer
from test_trainer import same_state, small

GOLDEN = Path(__file__).parent / "golden" / "runs"


def small_job(name: str = "ibc", **changes: Any) -> Job:
    """Settings of the job, and of its trial."""
    known = {each.name for each in fields(Job)}
    trial = small(TRIALS[name], **{key: value for key, value in changes.items() if key not in known})
    settings = {
        "trial": trial,
        "task": ParticleTask(steps=12),
        "episodes": 10,
        "steps": 24,
        "log_every": 2,
        "evaluate_every": 8,
        "checkpoint_every": 6,
        "evaluation_episodes": 4,
        "evaluation_candidates": 8,
    }
    return Job(name, **(settings | {key: value for key, value in changes.items() if key in known}))


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def same_weights(one: Path, other: Path) -> bool:
    for part in ("policy", "best"):
        a, b = (load_bundle(run / part, FORMAT, VERSION)[1] for run in (one, other))
        if a.keys() != b.keys() or not all(torch.equal(a[k], b[k]) for k in a):
            return False
    return True


def contents(where: Path) -> dict[str, bytes]:
    """Every file of a directory."""
    return {str(path.relative_to(where)): path.read_bytes() for path in where.rglob("*") if path.is_file()}


class Killed(BaseException):
    """Stands for a SIGKILL: nothing in the library may catch it."""


def bomb(after: int) -> Callable[[dict[str, Any]], None]:
    def listen(row: dict[str, Any]) -> None:
        if row["step"] >= after:
            raise Killed

    return listen


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests work on a copy."""
    where = tmp_path_factory.mktemp("runs") / "finished"
    train(small_job(steps=20), where)
    return where


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


# -------------------------------------------------------------------------------------------- bit for bit

SMALL_LEVELS = {"energy.width": 16, "energy.encoder_width": 16, "optimiser.batch_size": 32}
RESUMABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "average and dropout": ("ibc", {"energy": MLP(16, dropout=0.2), "average": 0.9}),
    "spectral norm": ("ibc", {"energy": MLP(16, spectral_norm=True), "penalties": (GradientPenalty(1.0),)}),
    "marginal sampler": ("correct-mas-maxent", {}),
    "replay buffer": ("joint-replay", {}),
    "explicit": ("mdn", {}),
    "levels": ("annealed", SMALL_LEVELS),
    "levels, in turns": (
        "annealed",
        SMALL_LEVELS | {"objective": Sum((DenoisingScore(), LevelContrast(ShortChains(Annealed(), Uniform()))))},
    ),
}


@pytest.mark.parametrize("case", RESUMABLE)
def test_resume_is_bit_for_bit(case: str, tmp_path: Path) -> None:
    name, changes = RESUMABLE[case]
    job = small_job(name, **changes)
    whole = train(job, tmp_path / "whole")
    broken = tmp_path / "broken"
    with pytest.raises(Killed):
        train(job, broken, bomb(2))  # before the first checkpoint
    for after in (8, 14, 20):
        with pytest.raises(Killed):
            resume(broken, bomb(after))
    resumed = resume(broken)
    assert comparable(resumed.metrics) == comparable(whole.metrics)
    assert comparable(load_metrics(broken)) == comparable(whole.metrics)
    assert same_weights(tmp_path / "whole", broken)
    assert resumed.best_step == whole.best_step


def test_the_resume_test_would_notice(tmp_path: Path) -> None:
    """Planted bug: a checkpoint without the generator's state gives other metrics. With it, a trainer in memory gives
    the metrics of the run, so the step that a run rehearses leaves no trace."""
    job = small_job()
    whole = train(job, tmp_path / "whole")
    trainer = trainer_of(job)
    for _ in range(12):
        trainer.step()
    for forget in (True, False):
        other = trainer_of(job)
        state = trainer.state() | ({"generator": other.generator.get_state()} if forget else {})
        other.load_state(state, 12)
        other.step()
        row = next(r for r in whole.metrics if r["step"] == 14 and r["kind"] == "train")
        assert (float(other.step()["loss"]) != row["loss"]) == forget


OWN = """
from dataclasses import dataclass, replace
import torch
from cebm.acting import Found
from cebm.energies import MLP, ModuleEnergy
from cebm.optimisers import Adam

class Rows(torch.nn.Module):
    def __init__(self, spec, generator):
        super().__init__()
        self.layer = torch.nn.Linear(spec.obs_dim, spec.act_dim)
        with torch.no_grad():
            self.layer.weight.normal_(0, 0.1, generator=generator)
            self.layer.bias.zero_()
        self.dropout = torch.nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, features, actions):
        if self.training:
            self.seen += 1
        return (actions - self.dropout(self.layer(features))).square().sum(1) * (1 + 1e-4 * self.seen)

@dataclass(frozen=True)
class OwnEnergy:
    joint = False
    def build(self, spec, generator=None):
        return ModuleEnergy(Rows(spec, generator), spec.obs_dim, spec.act_dim)

@dataclass(frozen=True)
class OwnPenalty:
    weight: float = 0.1
    def penalty(self, energy, obs, terms):
        return self.weight * terms.positive.abs().mean()

@dataclass(frozen=True)
class Momentum:
    learning_rate: float = 0.01
    batch_size: int = 32
    average: float = 0.9
    def make(self, parameters):
        return torch.optim.SGD(parameters, self.learning_rate, momentum=0.9)
    def rate(self, step, steps, steps_per_epoch):
        return self.learning_rate / (1 + step / 100)

@dataclass(frozen=True)
class OwnObjective:
    inner: object
    def terms(self, energy, obs, actions, generator):
        found = self.inner.terms(energy, obs, actions, generator)
        noise = torch.rand((), generator=generator)
        return replace(found, loss=found.loss * (1 + 0.1 * noise), log={"noise": noise})

@dataclass(frozen=True)
class BestOfProposed:
    candidates: int = 16
    def search(self, problem):
        actions = problem.clip(problem.uniform(problem.candidates or self.candidates))
        energies = problem.energies(actions)
        return Found(actions, energies, energies.argmin(1))

def own(trial):
    return replace(trial, energy=OwnEnergy(), objective=OwnObjective(trial.objective), penalties=(OwnPenalty(),),
                   optimiser=Momentum(), acting=BestOfProposed())
"""
SCRIPT = """
import os, random, signal, sys, threading, torch
torch.set_num_threads(1)
sys.path[:0] = [{tests!r}, {folder!r}]
from my_pieces import own
from test_runs import small_job
from cebm.runs import train, resume
from dataclasses import replace
job = small_job("ibc-mas", steps=150, checkpoint_every=10, evaluate_every=50)
job = replace(job, trial=own(job.trial))
stopping = []
def listen(row):
    if {reach} and row["step"] >= {reach} and not stopping:  # soon after: at any moment, but before the end
        stopping.append(threading.Timer(random.uniform(0, 0.1), os.kill, (os.getpid(), signal.SIGSTOP)))
        stopping[0].start()
    if row["step"] == 150:
        [timer.join() for timer in stopping]
if os.path.exists({out!r} + "/run.json"):
    resume({out!r}, listen)
else:
    train(job, {out!r}, listen)
"""


def test_sigkill_at_any_moment(tmp_path: Path) -> None:
    """A trial of somebody's energy, objective, penalty, optimiser and way to act, from a file of theirs. While the run
    is under way, others are told who works in it; a killed run's lock is no obstacle. The run stops itself before it
    is killed: on a busy machine it could end first."""
    (tmp_path / "my_pieces.py").write_text(OWN)

    def start(out: Path, reach: int = 0) -> subprocess.Popen[bytes]:
        code = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path), out=str(out), reach=reach)
        return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)

    whole = start(tmp_path / "whole")
    broken = tmp_path / "broken"
    for reach in (12, 60, 110):
        process = start(broken, reach)
        left = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert left is not None and left.si_code == os.CLD_STOPPED, "the run ended before it could be killed"
        for attempt in (lambda: resume(broken), lambda: train(small_job(), broken)):
            with pytest.raises((LockedError, FileExistsError)) as caught:
                attempt()
            assert isinstance(caught.value, FileExistsError) or f"in use by process {process.pid}" in str(caught.value)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert (broken / ".lock").exists()
    assert start(broken).wait() == 0
    assert whole.wait() == 0
    assert comparable(load_metrics(broken)) == comparable(load_metrics(tmp_path / "whole"))
    assert all("noise" in row for row in load_metrics(broken) if row["kind"] == "train")
    assert contents(broken).keys() == contents(tmp_path / "whole").keys()
    for name in ("policy", "best"):
        files = [contents(place / name) for place in (broken, tmp_path / "whole")]
        assert files[0] == files[1]
    # Without its module a run says which one it needs.
    with pytest.raises(StorageError, match="my_pieces"):
        load_job(broken)


def test_what_a_kill_left_is_removed_by_a_resume(run: Path) -> None:
    """And nothing that a header names, nor the file of a process that lives."""
    before = contents(run)
    newest = sorted((run / "checkpoints").iterdir())[-1]
    unfinished = run / "checkpoints/step-00000007"
    unfinished.mkdir()
    for directory in (newest, run / "best", run / "policy", unfinished):
        (directory / "tensors-0123456789ab.safetensors").write_bytes(b"cut short")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (newest / f".header.json.{gone.pid}.tmp").write_bytes(b"{")
    alive = run / f"best/.header.json.{os.getppid()}.tmp"
    alive.write_bytes(b"{")
    resume(run)
    assert contents(run) == {**before, str(alive.relative_to(run)): b"{"}
    assert not unfinished.exists()


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("step", ["step-00000006", "step-00000012"])
def test_a_checkpoint_whose_removal_was_cut_short_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, at: int
) -> None:
    """By a kill before its tensors or its header went: that of the first checkpoint, or of the one that the last of
    the run replaces."""
    removed = [Path.unlink, shutil.rmtree][at]

    def killed(path: Path, *args: Any, **kwargs: Any) -> None:
        if step in str(path):
            raise Killed
        removed(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(*[(Path, "unlink"), (shutil, "rmtree")][at], killed)
        with pytest.raises(Killed):
            train(small_job(), tmp_path / "run")
    resume(tmp_path / "run")
    train(small_job(), tmp_path / "whole")
    assert contents(tmp_path / "run").keys() == contents(tmp_path / "whole").keys()


def test_sigterm_saves_first(tmp_path: Path) -> None:
    job = small_job(checkpoint_every=1000)

    def terminate(row: dict[str, Any]) -> None:
        if row["step"] == 10 and row["kind"] == "train":
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="step 10"):
        train(job, tmp_path / "run", terminate)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000010"]
    resume(tmp_path / "run")
    train(job, tmp_path / "whole")
    assert same_weights(tmp_path / "run", tmp_path / "whole")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_damaged_checkpoint_falls_back(run: Path, tmp_path: Path) -> None:
    newest = sorted((run / "checkpoints").iterdir())[-1]
    tensors = next(newest.glob("*.safetensors"))
    flip(tensors, len(tensors.read_bytes()) // 2)
    with pytest.warns(UserWarning, match=r"skipping a checkpoint.*checksum"):
        resumed = resume(run, steps=24)
    whole = train(small_job(), tmp_path / "whole")
    shared = [row for row in comparable(whole.metrics) if row["step"] > 20]
    assert [row for row in comparable(resumed.metrics) if row["step"] > 20] == shared
    assert same_weights(run, tmp_path / "whole")
    assert load_job(run).steps == 24


# -------------------------------------------------------------------------------------------- what cannot be resumed


def refuses(where: Path, message: str, error: type[Exception] = StorageError) -> None:
    """Twice, with the length it has and with another; and every file stays as it is."""
    before = contents(where)
    for steps in (None, 40):
        with pytest.raises(error, match=message):
            resume(where, steps=steps)
        assert contents(where) == before


def forget_fingerprint(where: Path) -> None:
    """As a run of an earlier version is: nothing tells what its data were."""
    record = read_record(where)
    del record["data"]
    write_document(where / "run.json", record)


def write_data(path: Path, width: int = 3, shift: float = 0.0) -> str:
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(60, width)).astype(np.float32)
    Demonstrations.from_arrays(obs, obs[:, :1] * 2 + shift, [20, 40, 60]).save(path)
    return str(path)


@pytest.fixture(scope="module")
def data_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("data")
    train(small_job("mse", task=None, data=write_data(where / "data.npz"), steps=12), where / "run")
    return where


@pytest.mark.parametrize("width, shift", [(5, 0.0), (3, 1e-3)])
def test_other_data_are_refused(width: int, shift: float, data_run: Path) -> None:
    """Of another width, and of the same shape with other numbers. Then the same data again: it goes on."""
    data, where = data_run / "data.npz", data_run / "run"
    original = data.read_bytes()
    try:
        write_data(data, width, shift)
        refuses(where, rf"{data} changed since the run began; resume needs the same data", TrainingError)
    finally:
        data.write_bytes(original)
    assert resume(where).metrics[-1]["step"] == 12


def test_checkpoints_of_another_width_are_refused(data_run: Path, tmp_path: Path) -> None:
    """Where no fingerprint tells, the weights do; the trainer keeps its own."""
    where = Path(shutil.copytree(data_run / "run", tmp_path / "run"))
    forget_fingerprint(where)
    job = replace(load_job(where), data=write_data(tmp_path / "wide.npz", 5))
    trainer = trainer_of(job)
    before, files = trainer.state(), contents(where)
    with pytest.raises(StorageError, match=r"no checkpoint of .* fits.*step-00000012.*step-00000006"):
        runs._restore(trainer, job, where)
    same_state(trainer.state(), before)
    assert trainer.step_count == 0 and contents(where) == files


def test_missing_data_are_named(data_run: Path, tmp_path: Path) -> None:
    shutil.move(data_run / "data.npz", tmp_path / "moved.npz")
    try:
        refuses(data_run / "run", r"data\.npz", Exception)
    finally:
        shutil.move(tmp_path / "moved.npz", data_run / "data.npz")


def test_damaged_checkpoints_are_refused(run: Path) -> None:
    for tensors in (run / "checkpoints").glob("*/*.safetensors"):
        flip(tensors, 500)
    refuses(run, r"no checkpoint of .* fits.*step-00000020.*checksum.*step-00000018.*checksum")


@pytest.mark.parametrize("part", ["checkpoints", "checkpoints/*/header.json", "checkpoints/*/*.safetensors"])
def test_missing_checkpoints_are_refused(part: str, run: Path) -> None:
    for path in list(run.glob(part)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    refuses(run, r"checkpoints: the checkpoints are missing|no checkpoint of .* fits.*No such file")
    shutil.rmtree(run / "policy")  # as if the run had not been finished
    refuses(run, r"checkpoints: the checkpoints are missing|no checkpoint of .* fits.*No such file")


def test_a_run_without_checkpoints_yet_begins_again(tmp_path: Path, finished: Path) -> None:
    """Killed before its first checkpoint, and in the middle of writing it."""
    where = tmp_path / "run"
    job = small_job(steps=20, evaluate_every=4)
    with pytest.raises(Killed):
        train(job, where, bomb(6))
    assert [row["step"] for row in load_metrics(where)][-1] == 6 and (where / "best").exists()
    (where / "checkpoints/step-00000006").mkdir(parents=True)
    (where / "checkpoints/step-00000006/tensors-0.safetensors").write_text("half")
    assert comparable(resume(where).metrics) == comparable(train(job, tmp_path / "whole").metrics)


@pytest.mark.parametrize("damage", ["first byte", "no step", "missing", "short", "empty", "lines swapped for text"])
def test_damaged_metrics_are_refused(damage: str, run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    if damage == "first byte":
        flip(path, 0)
    elif damage == "no step":
        row = {key: value for key, value in json.loads(lines[1]).items() if key not in ("step", "crc")}
        path.write_text(lines[0] + json.dumps(row) + "\n" + "".join(lines[2:]))
    elif damage == "missing":
        path.unlink()
    elif damage == "short":
        path.write_text("".join(lines[:4]))
    elif damage == "empty":
        path.write_text("")
    else:
        path.write_text("a\nb\n")
    refuses(run, r"metrics\.jsonl")


def test_a_last_line_that_was_cut_short_is_no_damage(run: Path) -> None:
    path = run / "metrics.jsonl"
    before = load_metrics(run)
    with open(path, "a") as file:
        file.write('{"step": 21, "kind": "tr')
    assert comparable(resume(run).metrics) == comparable(before)


def test_a_damaged_best_policy_is_refused_and_a_missing_one_is_chosen_anew(run: Path) -> None:
    flip(next((run / "best").glob("*.safetensors")), 500)
    refuses(run, r"best.*checksum")
    shutil.rmtree(run / "best")
    with pytest.warns(UserWarning, match="best is missing: the best policy is chosen anew"):
        outcome = resume(run, steps=26)
    assert outcome.best_step > 20 and load(run / "best").act(np.full(8, 0.5)).shape == (2,)


def test_every_flipped_byte_of_run_json_is_noticed(run: Path) -> None:
    """Whatever still loads says the same, as where white space became other white space."""
    path = run / "run.json"
    whole, record, job = path.read_bytes(), read_record(run), load_job(run)
    names = [whole.index(b'"sha256"') + offset for offset in range(8)]  # the checksum's own name, always
    noticed = 0
    for place in [*names, *random.sample(range(len(whole)), min(200, len(whole)))]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ random.randrange(1, 256)]) + whole[place + 1 :])
        try:
            assert read_record(run) == record and load_job(run) == job
        except StorageError as error:
            assert str(path) in str(error)
            noticed += 1
    assert noticed > 190
    path.write_bytes(whole[:-30])
    refuses(run, r"run\.json")


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_a_damaged_run_json_of_the_first_format_is_a_storage_error_or_a_job(name: str, tmp_path: Path) -> None:
    """It has no checksum: not every change can be noticed, but none is a traceback of another kind."""
    where = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
    path = where / "run.json"
    whole = path.read_bytes()
    for place in random.sample(range(len(whole)), 200):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << random.randrange(8))]) + whole[place + 1 :])
        try:
            assert isinstance(load_job(where), Job)
        except StorageError as error:
            assert str(path) in str(error)


def test_a_checkpoint_whose_header_makes_no_sense_is_skipped(run: Path) -> None:
    newest, before = sorted((run / "checkpoints").iterdir(), reverse=True)
    header, tensors = load_bundle(before, runs.CHECKPOINT_FORMAT, runs.CHECKPOINT_VERSION)
    for best, step in ((7, 20), ({"step": 1}, 20), ({}, -1), ({}, "20"), ({}, True)):
        shutil.rmtree(newest)
        cebm.storage.save_bundle(newest, runs.CHECKPOINT_FORMAT, 2, {"step": step, "best": best}, tensors)
        with pytest.warns(UserWarning, match="skipping a checkpoint"):
            assert runs.restored(load_job(run), run)[0].step_count == header["step"] == 18


# -------------------------------------------------------------------------------------------- starts that fail


@dataclass(frozen=True)
class WrongEnergy:
    """Somebody's first attempt: builds, and fails in its first step."""

    def build(self, spec: Any, generator: Any = None) -> Any:
        energy = MLP(8).build(spec, generator)
        energy.act_dim += 1
        return energy


def test_a_failed_start_leaves_nothing_behind(tmp_path: Path) -> None:
    """No directory, nor those above it; an empty one that was there stays. The corrected call works."""
    where, data = tmp_path / "deep" / "down" / "run", tmp_path / "data.npz"
    good, other = small_job(steps=2), tmp_path / "other.npz"
    collect_particle(ParticleTask(dim=3, steps=12), 3, 0).save(other)

    class Local(WrongEnergy):
        """Cannot be written to run.json."""

        def build(self, spec: Any, generator: Any = None) -> Any:
            return MLP(8).build(spec, generator)

    wrong: list[tuple[Job, type[Exception], str]] = [
        (replace(good, task=None, data=str(data)), Exception, "data.npz"),
        (replace(good, data=str(other)), ValueError, "the policy 12 and 3"),
        (replace(good, task=Gym("CartPole-v1")), TaskError, "has no expert"),
        (replace(good, trial=replace(good.trial, energy=WrongEnergy())), Exception, "act"),
        (replace(good, trial=vary(small(TRIALS["steady"]), energy=MLP(8))), Exception, "no proposal|Proposed"),
        (replace(good, trial=replace(good.trial, energy=Local())), TypeError, "defined inside a function"),
        (replace(good, device="foo"), ValueError, "device 'foo'"),
        (replace(good, trial=vary(good.trial, **{"optimiser.learning_rate": 1e39})), DivergedError, "at step 1"),
    ]
    for exists in (False, True):
        if exists:
            where.mkdir(parents=True)
        for job, error, message in wrong:
            with pytest.raises(error, match=message):
                train(job, where)
            assert not list(where.iterdir()) if exists else not (tmp_path / "deep").exists(), message
    train(good, where)


def test_a_composition_that_is_impossible_is_refused_before_there_is_a_job() -> None:
    with pytest.raises(ValueError, match="does not go with"):
        small_job("mse", energy=MLP(8))


def test_a_directory_that_is_not_empty_is_refused(run: Path, tmp_path: Path) -> None:
    """Checkpoints of a run whose run.json is gone would be taken for those of the new one."""
    (run / "run.json").unlink()
    before = contents(run)
    with pytest.raises(FileExistsError, match="is not empty"):
        train(small_job(), run)
    assert contents(run) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".hidden").write_text("")
    with pytest.raises(FileExistsError, match=r"it holds '\.hidden'"):
        train(small_job(), tmp_path / "other")


def test_an_unusable_directory_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(TrainingError, match="cannot write"):
            train(small_job(), place)
    with pytest.raises(FileExistsError, match="holds a run already"):
        train(small_job(), run)
    with pytest.raises(StorageError, match="not a run directory"):
        resume(tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_one_process_at_a_time(run: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with locked(tmp_path / "new"), pytest.raises(LockedError, match=f"in use by process {os.getpid()}"):
        train(small_job(steps=2), tmp_path / "new")
    before = contents(run)
    with locked(run), pytest.raises(LockedError, match=f"in use by process {os.getpid()}"):
        resume(run, steps=30)
    assert contents(run) == before
    (run / ".lock").write_text("1\n")  # of a process that was killed; the system has released it
    assert resume(run, steps=21).metrics[-1]["step"] == 21
    assert not (run / ".lock").exists()


# -------------------------------------------------------------------------------------------- full disks, divergence


def test_a_full_disk_names_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = cebm.storage.write_atomically

    def full(path: Path, content: bytes) -> None:
        if "step-00000012" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, content)

    monkeypatch.setattr(cebm.storage, "write_atomically", full)
    with pytest.raises(TrainingError, match=r"step 12.*No space left.*last good checkpoint: step 6"):
        train(small_job(), tmp_path / "run")
    monkeypatch.undo()
    resume(tmp_path / "run")
    train(small_job(), tmp_path / "whole")
    assert same_weights(tmp_path / "run", tmp_path / "whole")


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    """With an absurd learning rate the energies overflow in the second step, which the first checkpoint cannot take:
    it is not named."""
    job = small_job("mcmc-loss", learning_rate=1e30, steps=200, checkpoint_every=1)
    with pytest.raises(TrainingError, match="at step 2; there is no good checkpoint: start again"):
        train(job, tmp_path / "run")
    newest = sorted((tmp_path / "run/checkpoints").iterdir())[-1]
    tensors = load_bundle(newest, "cebm.checkpoint", 2)[1]
    assert all(torch.isfinite(value).all() for name, value in tensors.items() if name.startswith("learner."))


@pytest.mark.parametrize("name", ["ibc", "steady", "mse", "correct-mas"])
@pytest.mark.parametrize("rate", [1e10, 1e20, 1e38])
def test_a_last_good_checkpoint_is_one_that_training_can_go_on_from(name: str, rate: float, tmp_path: Path) -> None:
    """The named one takes a step; where none can, none is named."""
    job = small_job(name, learning_rate=rate, steps=100, checkpoint_every=1, evaluate_every=100, keep_checkpoints=0)
    where = tmp_path / "run"
    try:
        train(job, where)
    except DivergedError as error:
        message = str(error)
    else:
        pytest.skip("it did not diverge")
    if not where.exists():
        assert "at step 1;" in message
        return
    good = []
    for directory in runs.checkpoints(where):
        header, tensors = runs.load_checkpoint(directory)
        trainer = trainer_of(job)
        trainer.load_state(tensors, header["step"])
        try:
            trainer.step()
            trainer.check_weights()
        except (FloatingPointError, ValueError):
            continue
        good.append(header["step"])
    assert (f"last good checkpoint: step {max(good)}" if good else "there is no good checkpoint") in message


@pytest.mark.parametrize("damage", [False, True])
def test_the_newest_of_the_good_checkpoints_is_named(
    damage: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 15 has no loss. The checkpoint of step 14 cannot take it, that of step 13 can take its own next step; unless
    its file is damaged, too."""
    real = Trainer.step

    def failing(self: Trainer) -> dict[str, torch.Tensor]:
        if self.step_count == 14:
            if damage and (where / "checkpoints/step-00000014").exists():
                next((where / "checkpoints/step-00000013").glob("*.safetensors")).write_bytes(b"")
            raise FloatingPointError("loss is nan")
        return real(self)

    where = tmp_path / "run"
    monkeypatch.setattr(Trainer, "step", failing)
    good = 12 if damage else 13
    with pytest.raises(DivergedError, match=f"loss is nan, at step 15; last good checkpoint: step {good}$"):
        train(small_job(checkpoint_every=1, keep_checkpoints=0), where)


def test_an_evaluation_without_numbers_stops_the_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise ValueError("the energy is NaN or infinite at every candidate")

    monkeypatch.setattr(selection, "evaluate", failing)
    with pytest.raises(DivergedError, match=r"at the evaluation of step 8; last good checkpoint: step 6"):
        train(small_job(), tmp_path / "run")


# -------------------------------------------------------------------------------------------- the directory


def test_the_run_directory_is_complete(tmp_path: Path) -> None:
    job = small_job("correct-mas-maxent")
    outcome = train(job, tmp_path / "run")
    assert load_job(tmp_path / "run") == job
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["versions"]["torch"] == torch.__version__ and record["threads"] == torch.get_num_threads()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "best", "checkpoints", "metrics.jsonl", "policy", "run.json",
    ]  # fmt: skip
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000018", "step-00000024"]
    rows = load_metrics(tmp_path / "run")
    trained = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in trained] == list(range(2, 25, 2))
    wanted = "loss info_nce positive_energy negative_energy energy_gap negative_distance gradient_norm_first "
    wanted += "gradient_norm_last clipped acceptance marginal_loss parameter_gradient_norm steps_per_second seconds"
    assert set(wanted.split()) <= trained[0].keys()
    evaluated = [row for row in rows if row["kind"] == "evaluation"]
    assert [row["step"] for row in evaluated] == [8, 16, 24]
    wanted = "train_action_error validation_action_error mi_bound mi_ceiling success success_low success_high"
    assert set(wanted.split()) <= evaluated[0].keys()
    for row in evaluated:
        assert 0 <= row["mi_bound"] < row["mi_ceiling"] == pytest.approx(np.log(256), rel=1e-6)
        assert row["success_low"] <= row["success"] <= row["success_high"]
    best = max(evaluated, key=lambda row: (row["success"], -row["validation_action_error"]))
    assert outcome.best_step == best["step"]
    assert VALIDATION_SEED != TEST_SEED


@pytest.mark.parametrize("name", TRIALS)
def test_every_trial_trains_and_acts(name: str, tmp_path: Path) -> None:
    outcome = train(small_job(name, steps=4, evaluate_every=4), tmp_path / "run")
    action = outcome.policy.act(np.full(8, 0.5, np.float32))
    assert action.shape == (2,) and ((action >= 0) & (action <= 1)).all()
    contrast = {"info_nce", "positive_energy", "negative_energy", "negative_distance"}
    wanted = {"loss"} | ({"denoising_loss"} if name == "annealed" else contrast)
    assert all(wanted <= row.keys() for row in outcome.metrics if row["kind"] == "train")


@pytest.mark.parametrize("name", TRIALS)
def test_the_settings_of_a_run_survive_the_file(name: str, tmp_path: Path) -> None:
    job = Job(name, TRIALS[name], ParticleTask(3, 70, hide_velocity=True, wait=4, dt=0.004), None, 7, 11, 13)
    write_document(tmp_path / "run.json", runs._run_record(job, runs.material_of(small_job())))
    assert load_job(tmp_path) == job
    assert "data" in read_document(tmp_path / "run.json", "run directory")


def test_data_alone_is_enough(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.npz")
    outcome = train(small_job(task=None, data=data), tmp_path / "run")
    evaluated = [row for row in outcome.metrics if row["kind"] == "evaluation"]
    assert "success" not in evaluated[0]
    assert outcome.best_step == min(evaluated, key=lambda row: row["validation_energy_score"])["step"]


def test_without_a_task_a_proper_score_chooses_and_not_the_action_error() -> None:
    """Actions are -1 or 1, with equal odds: the best mean is 0, at which nobody acts. A policy that draws both has an
    energy score of 1/2 (in the units of the data), the mean one of 1."""
    rng = np.random.default_rng(0)
    data = Demonstrations.from_arrays(rng.uniform(-1, 1, (600, 1)), rng.choice([-1.0, 1.0], (600, 1)), range(1, 601))
    rows = {}
    for name in ("steady", "mse"):
        trainer = Trainer(small(TRIALS[name]), data, data, steps=150)
        for _ in range(150):
            trainer.step()
        rows[name] = trainer.validate(trainer.policy(), 16, draws=4)
    assert rows["steady"]["validation_energy_score"] < 0.75 < 0.9 < rows["mse"]["validation_energy_score"]
    assert score(rows["steady"], None) > score(rows["mse"], None)
    # The planted fault: by the action error alone, as rows of earlier versions are compared.
    old = {name: {"validation_action_error": row["validation_action_error"]} for name, row in rows.items()}
    assert abs(old["steady"]["validation_action_error"] - old["mse"]["validation_action_error"]) < 0.2
    assert score(rows["mse"], None) > score({"validation_action_error": 0.0}, None), "an old row gives way"


def test_a_metric_that_is_not_measured_cannot_choose(tmp_path: Path) -> None:
    """Pendulum says nothing about success."""
    task = Gym("Pendulum-v1", metric="success", max_steps=5)
    data = Demonstrations.from_arrays(np.random.default_rng(0).uniform(-1, 1, (40, 3)), np.full((40, 1), 0.5), [40])
    job = small_job(task=task, evaluation_episodes=2)
    data.save(tmp_path / "data.npz")
    with pytest.raises(DivergedError, match="column 'success' cannot score"):
        train(replace(job, data=str(tmp_path / "data.npz")), tmp_path / "run")


def test_history_and_chunks_train(tmp_path: Path) -> None:
    outcome = train(small_job(history=3, horizon=2), tmp_path / "run")
    policy = load(tmp_path / "run/policy")
    assert (policy.obs_box.dim, policy.act_box.dim, policy.history, policy.horizon) == (24, 4, 3, 2)
    assert any("success" in row for row in outcome.metrics)


def test_checkpoints_can_all_be_kept(tmp_path: Path) -> None:
    for keep, names in ((0, 4), (3, 3)):
        train(small_job(keep_checkpoints=keep), tmp_path / str(keep))
        assert len(list((tmp_path / str(keep) / "checkpoints").iterdir())) == names
    with pytest.raises(ValueError, match="keep_checkpoints must not be negative"):
        small_job(keep_checkpoints=-1)


def test_the_commit_is_that_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the .venv of somebody else's repository cebm has no commit; in a checkout of its own it has, dirty or not."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    (tmp_path / ".gitignore").write_text(".venv\n")
    package = tmp_path / ".venv" / "lib" / "cebm"
    shutil.copytree(Path(provenance.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    git("add", ".gitignore")
    git("commit", "-qm", "theirs")
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    assert provenance.source_commit() is None
    own = tmp_path / "src" / "cebm"
    shutil.copytree(package, own)
    monkeypatch.setattr(provenance, "__file__", str(own / "provenance.py"))
    assert provenance.source_commit() is None  # not yet committed
    git("add", "src")
    git("commit", "-qm", "ours")
    assert provenance.source_commit() == git("rev-parse", "HEAD")
    (own / "provenance.py").write_text("# changed")
    assert provenance.source_commit() == git("rev-parse", "HEAD") + "-dirty"
    monkeypatch.setenv("PATH", "")
    assert provenance.source_commit() is None


def test_evaluations_play_as_many_actions_of_a_chunk_as_the_job_says(tmp_path: Path) -> None:
    """All of them by default; the rows of a run that plays fewer are others, and `cebm eval` plays as the run did."""

    def distances(execute: int | None) -> list[float]:
        changes = {"inputs.horizon": 4, "evaluation_execute": execute, "steps": 8}
        where = tmp_path / f"execute-{execute}"
        train(small_job("steady", **changes), where)
        main(["eval", str(where), "--episodes", "4", "--seed", "1", "--csv", str(where / "rows.csv")])
        with open(where / "rows.csv") as file:
            rows = [float(row["final_distance"]) for row in csv.DictReader(file)]
        return [row["final_distance"] for row in load_metrics(where) if row["kind"] == "evaluation"] + rows

    assert distances(None) == distances(4) != distances(1)
    with pytest.raises(ValueError, match="evaluation_execute must be between 1 and the horizon 1, got 2"):
        small_job("steady", evaluation_execute=2)
