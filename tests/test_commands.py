"""The commands, through the installed entry point, as a user calls them."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cebm.envs.particle import ParticleTask
from cebm.training import load_job, load_metrics
from cebm.trials import TRIALS

from cebm.commands import train_command
from cebm.demonstrations import Demonstrations

CEBM = str(Path(sys.executable).with_name("cebm"))
ENV = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
SMALL = [
    "--network.width",
    "16",
    "--batch-size",
    "32",
    "--negative-count",
    "2",
    "--sampler.steps",
    "2",
    "--candidates",
    "8",
    "--episodes",
    "6",
]
SHORT = ["--evaluate-every", "10", "--log-every", "5", "--checkpoint-every", "5", "--evaluation-episodes", "3"]


def cebm(*arguments: object, cwd: Path, code: int = 0) -> str:
    done = subprocess.run([CEBM, *map(str, arguments)], cwd=cwd, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with demonstrations and a run trained on them."""
    where = tmp_path_factory.mktemp("user")
    cebm("demos", "particle", "--dim", 1, "--episodes", 8, "--seed", 3, "--out", "demos.npz", cwd=where)
    out = cebm("train", "ibc", "--data", "demos.npz", "--out", "run", "--steps", 20, *SMALL, *SHORT, cwd=where)
    assert out.startswith("best at step ") and out.rstrip().endswith("run")
    return where


def test_demos_writes_the_experts_episodes(finished: Path) -> None:
    demonstrations = Demonstrations.load(finished / "demos.npz")
    assert (demonstrations.episodes, demonstrations.obs_dim, demonstrations.act_dim) == (8, 4, 1)
    assert demonstrations.metadata["seed"] == 3 and demonstrations.metadata["expert_successes"] == 8


def test_train_takes_every_setting_of_the_trial(finished: Path) -> None:
    job = load_job(finished / "run")
    assert (job.name, job.steps, job.trial.network.width, job.trial.sampler.steps) == ("ibc", 20, 16, 2)
    assert job.data == str(finished / "demos.npz") and job.task is None
    assert any("success" in row for row in load_metrics(finished / "run"))  # the task comes from the data's header


def test_eval_prints_and_keeps_its_result(finished: Path) -> None:
    printed = json.loads(cebm("eval", "run", "--episodes", 5, "--candidates", 8, "--json", cwd=finished))
    assert printed["episodes"] == 5 and 0 <= printed["success_low"] <= printed["success"] <= printed["success_high"]
    assert printed["action_ms_p50"] <= printed["action_ms_p99"]
    assert json.loads((finished / "run/evaluation.json").read_text()) == printed
    with open(finished / "run/evaluation.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 and {"success", "min_distance_first", "final_distance"} <= rows[0].keys()
    again = json.loads(cebm("eval", "run", "--episodes", 5, "--candidates", 8, "--json", cwd=finished))
    times = ("action_ms_p50", "action_ms_p99", "seconds")
    assert {k: v for k, v in again.items() if k not in times} == {k: v for k, v in printed.items() if k not in times}


def test_eval_of_a_policy_directory_needs_an_environment(finished: Path) -> None:
    assert "env must be given" in cebm("eval", "run/policy", cwd=finished, code=2)
    line = cebm("eval", "run/policy", "--env", "cebm.envs:cebm/Particle-v0", "--episodes", 1, cwd=finished, code=2)
    assert "env has 8 observation and 2 action dimensions, the policy 4 and 1" in line


def test_resume_extends_a_run(finished: Path) -> None:
    cebm("train", "ibc", "--dim", 1, "--out", "long", "--steps", 10, *SMALL, *SHORT, cwd=finished)
    cebm("train", "--resume", "long", "--steps", 20, cwd=finished)
    rows = [row["step"] for row in load_metrics(finished / "long") if row["kind"] == "evaluation"]
    assert rows == [10, 20]


def test_ctrl_c_saves_and_says_so(finished: Path) -> None:
    arguments = ["train", "ibc", "--dim", 1, "--out", "stopped", "--steps", 100_000, *SMALL, *SHORT]
    process = subprocess.Popen([CEBM, *map(str, arguments)], cwd=finished, env=ENV, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not load_metrics(finished / "stopped"):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "resume continues from there" in errors
    step = int(errors.split("stopped at step ")[1].split()[0])
    assert (finished / f"stopped/checkpoints/step-{step:08d}/header.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nope"], "there is no trial 'nope'; there are steady"),
        (["train", "ibc", "--out", "run"], "holds a run already"),
        (["train", "ibc", "--data", "missing.npz"], "missing.npz"),
        (["train", "ibc", "--negative-count", "0"], "negative_count must be at least 1"),
        (["train", "--resume", "nowhere"], "not a run directory"),
        (["eval", "nowhere"], "nowhere"),
        (["demos", "particle", "--dim", "0", "--out", "x.npz"], "dim is 0"),
    ],
)
def test_mistakes_end_in_one_line(finished: Path, arguments: list[str], message: str) -> None:
    errors = cebm(*arguments, cwd=finished, code=2)
    assert message in errors and "Traceback" not in errors
    assert len(errors.strip().splitlines()) == 1


def test_tensorboard_gets_the_same_numbers(finished: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = ["--out", "board", "--steps", 10, "--tensorboard"]
    cebm("train", "ibc", "--dim", 1, *options, *SMALL, *SHORT, cwd=finished)
    events = accumulator.EventAccumulator(str(finished / "board/tensorboard"))
    events.Reload()
    rows = [row for row in load_metrics(finished / "board") if row["kind"] == "train"]
    assert [event.step for event in events.Scalars("train/loss")] == [row["step"] for row in rows]
    np.testing.assert_allclose([e.value for e in events.Scalars("train/loss")], [r["loss"] for r in rows], rtol=1e-6)


def test_without_a_name_the_default_trial_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cebm import commands

    seen = []
    monkeypatch.setattr(commands, "train", lambda job, out, listen: seen.append((job, out)))
    monkeypatch.setattr(commands, "_run", lambda name, steps, out, board, start: start(lambda row: None))
    train_command(["--dim", "3", "--seed", "7"])()
    job, out = seen[0]
    assert job.trial == TRIALS[commands.DEFAULT_TRIAL] and job.task == ParticleTask(dim=3)
    assert out == Path("runs") / f"{commands.DEFAULT_TRIAL}-7"


def test_the_example_of_a_new_trial_runs(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "examples/new_trial.py"
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=ENV, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert load_job(tmp_path / "runs/mine").trial.ema == 0.99
