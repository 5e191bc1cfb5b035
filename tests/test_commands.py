"""The commands as a user calls them: in this process where that is enough, else through the installed entry point."""

import csv
import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cebm
from cebm import commands, storage
from cebm.certificate import analytic_targets
from cebm.cli import main
from cebm.commands import named_task, sentence, train_command
from cebm.demonstrations import Demonstrations
from cebm.evaluation import Evaluation
from cebm.progress import ProgressBar, measured
from cebm.recipes import TRIALS
from cebm.runs import load_job, load_metrics
from cebm.storage import locked, read_document
from cebm.tasks import TEST_SEED, Gym, ParticleTask
from waiting import PATIENCE, eventually

MODULE = [sys.executable, "-m", "cebm"]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
SHORT = [
    *("--steps", "10", "--evaluate-every", "10", "--log-every", "5", "--checkpoint-every", "5"),
    *("--evaluation-episodes", "3", "--optimiser.batch-size", "32"),
]
IBC = [
    *("ibc", "--energy.width", "16", "--objective.count", "2", "--objective.source.sampler.steps", "2"),
    *("--acting.candidates", "8", "--acting.sampler.steps", "2"),
]
OWN = '''
"""A user's pieces."""
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import torch

from cebm import Adam, Demonstrations, GymnasiumTask, MLP, Search, StepInfo, Trial, Uniform
from cebm.objectives import contrast


@dataclass(frozen=True)
class State:
    actions: torch.Tensor


@dataclass(frozen=True)
class Drift:
    """A sampler without noise: it samples nothing."""

    steps: int = 3
    size: float = 0.01
    """How far it goes."""

    def init(self, energy, context, start, generator):
        return State(start)

    def step(self, energy, context, state, k, generator):
        energies, gradients = energy.energies_and_gradients(context, state.actions)
        return State(state.actions - self.size * gradients), StepInfo.of(energies, gradients)


@dataclass(frozen=True)
class Scaled:
    """An energy of a user: the library's, smaller."""

    inside: Any = MLP(16)
    """What is scaled."""

    def build(self, spec, generator=None):
        return self.inside.build(spec, generator)


@dataclass(frozen=True)
class Hinge:
    source: Any = Uniform()
    count: int = 4
    margin: float = 1.0
    """How far above."""

    def __post_init__(self):
        if self.margin < 0:
            raise ValueError(f"margin must not be negative, got {self.margin}")

    def terms(self, energy, obs, actions, generator):
        found = contrast(energy, self.source, self.count, obs, actions, generator)
        gap = self.margin + found.positive.unsqueeze(1) - found.negative
        return replace(found, loss=gap.clamp(min=0).mean())


class Line(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-2, 2, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.time = self.np_random.uniform(-1, 1, 2).astype(np.float32), 0
        return self.place, {}

    def step(self, action):
        self.place, self.time = np.clip(self.place + 0.1 * action[0], -2, 2).astype(np.float32), self.time + 1
        return self.place, float(-abs(self.place[0])), False, self.time >= 5, {}


@dataclass(frozen=True)
class Centre(GymnasiumTask):
    metric: str = "nearness"

    def make(self):
        return Line()

    def measure(self, rewards, infos):
        return {"nearness": rewards[-1]}

    def demonstrations(self, episodes, seed):
        random = np.random.default_rng(seed)
        obs = random.uniform(-1, 1, (episodes, 5, 2)).astype(np.float32)
        return Demonstrations.from_episodes([(seen, -seen[:, :1]) for seen in obs])


@dataclass(frozen=True)
class NeedsSize:
    size: int


class Broken(Centre):
    def demonstrations(self, episodes, seed):
        raise ValueError("my own mistake")


centre = Centre()
broken = Broken()
mine = Trial(Scaled(), Hinge(), optimiser=Adam(batch_size=32), acting=Search(Drift(), 8))


def _local():
    @dataclass(frozen=True)
    class Hidden(Hinge):
        pass

    return Hidden()


unsaved = Trial(MLP(16), _local())
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: demonstrations, a run trained on them, a file of own pieces and a run made of these."""
    where = tmp_path_factory.mktemp("user")
    before = Path.cwd()
    os.chdir(where)
    try:
        Path("own_stuff.py").write_text(OWN)
        main(["demos", "particle", "--dim", "1", "--episodes", "20", "--seed", "3", "--out", "demos.npz"])
        main(["train", *IBC, "--data", "demos.npz", "--out", "run", *SHORT])
        options = ["--episodes", "6", "--objective.margin", "2", "--energy.inside.width", "8"]
        own = ["own_stuff.py:mine", "--task", "own_stuff.py:centre", *options]
        main(["train", *own, "--acting.sampler.size", "0.02", "--out", "own-run", *SHORT])
    finally:
        os.chdir(before)
    return where


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The one line that a failing command ends with."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("cebm: "), lines
    return lines[0]


# ---------------------------------------------------------------------------------------------- demos


def test_demos_writes_the_experts_episodes() -> None:
    demonstrations = Demonstrations.load("demos.npz")
    assert (demonstrations.episodes, demonstrations.obs_dim, demonstrations.act_dim) == (20, 4, 1)
    assert demonstrations.metadata["seed"] == 3 and demonstrations.metadata["expert_successes"] == 20


def test_demos_of_a_users_task(capsys: pytest.CaptureFixture[str]) -> None:
    main(["demos", "own_stuff.py:Centre", "--episodes", "4", "--out", "line.npz"])
    assert Demonstrations.load("line.npz").episodes == 4
    assert "line.npz" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- train


def test_train_sets_every_piece_by_its_path() -> None:
    job = load_job("run")
    trial: Any = job.trial
    assert (job.name, job.steps, trial.energy.width, trial.objective.source.sampler.steps) == ("ibc", 10, 16, 2)
    assert (trial.objective.count, trial.acting.candidates, trial.optimiser.batch_size) == (2, 8, 32)
    assert job.data == str(Path("demos.npz").absolute()) and job.task is None and job.episodes is None
    assert any("success" in row for row in load_metrics("run"))  # the task comes from the data's header


def test_train_of_a_users_pieces_sets_their_settings() -> None:
    job = load_job("own-run")
    trial: Any = job.trial
    assert (job.name, type(job.task).__name__) == ("mine", "Centre")
    assert (trial.energy.inside.width, trial.objective.margin, trial.acting.sampler.size) == (8, 2.0, 0.02)
    assert {"nearness", "nearness_se"} <= load_metrics("own-run")[-1].keys()


def test_help_has_a_users_settings_with_their_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "own_stuff.py:mine", "--help"])
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--objective.margin FLOAT How far above. (default: 1.0)" in printed
    assert "--energy.inside.width INT Hidden units per layer. (default: 16)" in printed


def jobs_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[Any, Path]:
    """The job that `cebm train` would run, and where."""
    seen: list[Any] = []
    monkeypatch.setattr(commands, "_run", lambda job, out, board, start, group: seen.append((job, out)))
    train_command(list(arguments))()
    return seen[0]


def test_without_a_name_the_default_trial_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    job, out = jobs_of(monkeypatch, "--dim", "3", "--seed", "7")
    assert job.trial == TRIALS[commands.DEFAULT_TRIAL] and job.task == ParticleTask(dim=3)
    assert out == Path("runs") / f"{commands.DEFAULT_TRIAL}-7"


def test_the_settings_of_the_default_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["--objective.count", "16", "--energy.tilt.width", "64", "--optimiser.learning-rate", "1e-2"]
    settings += ["--acting.candidates", "32", "--inputs.history", "2", "--keep-checkpoints", "0", "--random-order"]
    job, _ = jobs_of(monkeypatch, *settings)
    changes = {"objective.count": 16, "energy.tilt.width": 64, "optimiser.learning_rate": 1e-2}
    assert job.trial == cebm.vary(TRIALS["steady"], **changes, **{"acting.candidates": 32, "inputs.history": 2})
    assert job.keep_checkpoints == 0 and job.task == ParticleTask(random_order=True)


def test_the_data_are_summed_up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    job, _ = jobs_of(monkeypatch, "--data", "demos.npz")
    assert (job.episodes, job.task) == (None, None)
    assert capsys.readouterr().out == "18 demonstrations to train on, 2 to validate on (demos.npz)\n"
    job, _ = jobs_of(monkeypatch, "--data", "demos.npz", "--episodes", "5", "--task", "particle", "--dim", "1")
    assert (job.episodes, job.task) == (5, ParticleTask(dim=1))
    assert capsys.readouterr().out == "5 demonstrations to train on, 2 to validate on (demos.npz)\n"
    jobs_of(monkeypatch)
    assert capsys.readouterr().out == "300 demonstrations to train on, 256 to validate on (2-D particle task)\n"


@pytest.mark.parametrize("text", ["Pendulum-v1", "cebm.tasks:cebm/Particle-v0", "gym_pusht:gym_pusht/PushT-v0", "a/B"])
def test_a_gymnasium_id_is_a_task(text: str) -> None:
    assert named_task(text, {}) == Gym(text)


def test_a_users_task_is_found_as_an_object_and_as_a_class() -> None:
    assert named_task("own_stuff.py:centre", {}) == named_task("./own_stuff.py:Centre", {})
    assert named_task("own_stuff:centre", {}).metric == "nearness"


def test_resume_extends_a_run_of_a_users_pieces_only_with_their_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "own_stuff")  # as in a new process
    message = fails(capsys, "train", "--resume", "own-run", "--steps", "20")
    assert "own_stuff:" in message and "--with own_stuff.py" in message
    assert "--with own_stuff.py" in fails(capsys, "eval", "own-run")
    main(["train", "--resume", "own-run", "--steps", "20", "--with", "own_stuff.py"])
    printed = capsys.readouterr()
    assert re.search(r"step +20 .* nearness -0\.\d+ ± 0\.\d+", printed.err)
    assert re.match(r"best at step \d+: nearness -0\.\d+ ± 0\.\d+ \(validation\)  own-run\n", printed.out)
    assert [row["step"] for row in load_metrics("own-run") if row["kind"] == "evaluation"] == [10, 20]


def test_ctrl_c_saves_and_says_so(folder: Path) -> None:
    arguments = ["train", *IBC, "--dim", "1", "--episodes", "6", "--out", "stopped", *SHORT, "--steps", "100000"]
    process = subprocess.Popen([*MODULE, *arguments], env=ENV, stderr=subprocess.PIPE, text=True)
    eventually(lambda: process.poll() is not None or load_metrics("stopped"))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "resume continues from there" in errors
    step = int(errors.split("stopped at step ")[1].split()[0])
    assert (folder / f"stopped/checkpoints/step-{step:08d}/header.json").exists()


def test_tensorboard_gets_the_same_numbers_and_waits_for_the_first_row() -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    main(["train", *IBC, "--dim", "1", "--episodes", "6", "--out", "board", *SHORT, "--tensorboard"])
    events = accumulator.EventAccumulator("board/tensorboard")
    events.Reload()
    rows = [row for row in load_metrics("board") if row["kind"] == "train"]
    assert [event.step for event in events.Scalars("train/loss")] == [row["step"] for row in rows]
    np.testing.assert_allclose([e.value for e in events.Scalars("train/loss")], [r["loss"] for r in rows], rtol=1e-6)


# ---------------------------------------------------------------------------------------------- eval and report


def test_eval_prints_and_keeps_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    def evaluated() -> dict[str, Any]:
        main(["eval", "run", "--episodes", "5", "--candidates", "8", "--json"])
        return json.loads(capsys.readouterr().out)

    printed = evaluated()
    assert printed["episodes"] == 5 and 0 <= printed["success_low"] <= printed["success"] <= printed["success_high"]
    assert printed["action_ms_p50"] <= printed["action_ms_p99"]
    assert (printed["task"], printed["metric"]) == ("1-D particle task", "success")
    assert read_document(Path("run/evaluation.json"), "evaluation") == printed
    with open("run/evaluation.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 and {"success", "min_distance_first", "final_distance"} <= rows[0].keys()
    again = evaluated()
    times = ("action_ms_p50", "action_ms_p99", "seconds")
    assert {k: v for k, v in again.items() if k not in times} == {k: v for k, v in printed.items() if k not in times}


def test_eval_with_the_energy_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    """The same episodes twice, both kept, with the paired difference; a recipe that has nothing to ignore is refused
    before an episode is played, and an evaluation without the option leaves no old difference behind."""
    main(["train", "steady", "--dim", "1", "--episodes", "6", "--out", "tilted", *SHORT])
    capsys.readouterr()
    main(["eval", "tilted", "--episodes", "6", "--without-energy", "--json"])
    printed = json.loads(capsys.readouterr().out)
    bare = printed["without_energy"]
    assert (bare["episodes"], bare["seed"]) == (printed["episodes"], printed["seed"]) == (6, TEST_SEED)
    assert bare["difference"][0] == pytest.approx(printed["success"] - bare["success"])
    assert bare["difference"][1] < bare["difference"][0] < bare["difference"][2]
    assert read_document(Path("tilted/evaluation.json"), "evaluation") == printed
    with open("tilted/evaluation.csv") as file, open("tilted/evaluation-without-energy.csv") as other:
        one, two = (list(csv.DictReader(each)) for each in (file, other))
    assert [row["episode"] for row in one] == [row["episode"] for row in two]
    assert any(a["final_distance"] != b["final_distance"] for a, b in zip(one, two, strict=True))
    main(["eval", "tilted", "--episodes", "6", "--without-energy"])
    words = capsys.readouterr().out.splitlines()
    assert words[1].startswith("with its energy ignored: success ") and words[2].startswith("the energy adds ")
    main(["eval", "tilted", "--episodes", "2"])
    assert "without_energy" not in read_document(Path("tilted/evaluation.json"), "evaluation")
    assert not Path("tilted/evaluation-without-energy.csv").exists()
    capsys.readouterr()
    assert "does nothing without its energy" in fails(capsys, "eval", "run", "--without-energy")


def test_eval_in_other_places(capsys: pytest.CaptureFixture[str]) -> None:
    main(["eval", "own-run", "--episodes", "4", "--with", "own_stuff.py"])
    assert re.match(r"nearness -0\.\d+ ± 0\.\d+  \[-\d.*, -?\d.*\]  \(4 episodes\)  action ", capsys.readouterr().out)
    main(["eval", "own-run/best", "--episodes", "1", "--task", "own_stuff.py:centre", "--max-steps", "2", "--json"])
    assert json.loads(capsys.readouterr().out)["length"] == 2
    main(["eval", "run/policy", "--episodes", "2", "--task", "particle", "--execute", "1"])
    assert re.match(r"success \d+% \[.*\]  \(\d/2 episodes\)  action ", capsys.readouterr().out)
    arguments = ["eval", "run/policy", "--env", "cebm.tasks:cebm/Particle-v0", "--episodes", "1"]
    assert "env has 8 observation and 2 action dimensions, the policy 4 and 1" in fails(capsys, *arguments)
    assert "task must be given (--task)" in fails(capsys, "eval", "run/policy")
    assert "give one of them" in fails(capsys, "eval", "run", "--env", "Pendulum-v1", "--task", "particle")


def test_eval_writes_a_row_per_episode_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.csv"
    main(["eval", "run/policy", "--episodes", "3", "--task", "particle", "--csv", str(out)])
    with open(out) as file:
        rows = list(csv.DictReader(file))
    assert [row["episode"] for row in rows] == ["0", "1", "2"] and "min_distance_first" in rows[0]
    assert "--csv does not go with --protocol" in fails(capsys, "eval", "run", "--protocol", "ours", "--csv", str(out))


def test_a_full_disk_leaves_the_evaluation_as_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["eval", "run", "--episodes", "2", "--seed", "1"])
    before = {path.name: path.read_bytes() for path in Path("run").iterdir() if path.is_file()}
    capsys.readouterr()

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(SystemExit) as stop:
        main(["eval", "run", "--episodes", "3", "--seed", "2"])
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.out.startswith("success ")  # the result is not lost
    assert printed.err == "cebm: cannot write the evaluation to run: No space left on device\n"
    assert {path.name: path.read_bytes() for path in Path("run").iterdir() if path.is_file()} == before


def test_report_ends_with_what_was_reached(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The page itself is the report's business."""
    monkeypatch.setitem(sys.modules, "cebm.report", SimpleNamespace(write_report=lambda runs, out: out))
    main(["eval", "own-run", "--episodes", "4", "--with", "own_stuff.py"])
    main(["eval", "run", "--episodes", "4"])
    capsys.readouterr()
    main(["report", "own-run", "run", "--with", "own_stuff.py", "--out", "page.html"])
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"nearness -0\.\d+ ± \S+ \(4 episodes\)  page.html$", lines[0])
    assert re.match(r"success \d+% \[\d+%, \d+%\] \(4 episodes\)  page.html$", lines[1])
    assert "gone.py: no such file" in fails(capsys, "report", "run", "--with", "gone.py")


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train nope", "there is no trial 'nope'; there are steady"),
        ("train own_stuff.py", "'own_stuff.py': write FILE.py:NAME or MODULE:NAME"),
        ("train own_stuff.py:centre", "own_stuff.py:centre is a Centre, expected a cebm.Trial"),
        ("train own_stuff.py:Hinge", "own_stuff.py:Hinge is the class Hinge, expected a cebm.Trial"),
        ("train own_stuff.py:nothing", "own_stuff.py has no 'nothing'; it has "),
        ("train own_stuff.py:mine --objective.margin -1", "objective: margin must not be negative, got -1.0"),
        ("train own_stuff.py:unsaved", "Hidden is defined inside a function and cannot be saved"),
        ("train own_stuff.py:mine --task own_stuff.py:broken", "my own mistake"),
        ("train --task own_stuff.py:Line", "own_stuff.py:Line is a Line, expected a cebm.Task"),
        ("train --task own_stuff.py:NeedsSize", "is a class that needs settings"),
        ("train --task something", "task is 'something', expected particle"),
        ("train --task Pendulum-v1", "Pendulum-v1 has no expert"),
        ("train --task Pendulum-v1 --dim 3", "--dim: the particle task has this setting, Pendulum-v1 has not"),
        ("train --data demos.npz --dim 3", "dim: the data name their task"),
        ("train ibc --out run", "holds a run already"),
        ("train ibc --out .", "is not empty"),
        ("train ibc --data missing.npz", "missing.npz"),
        ("train ibc --data taskless.npz", "the settings under 'task' are missing"),
        ("train ibc --objective.count 0", "objective: count must be at least 1, got 0"),
        ("train ibc --steps 0", "steps must be at least 1, got 0"),
        ("train ibc --seed -1", "seed must be at least 0 and below 2^63, got -1"),
        ("eval run --seed 9223372036854775808", "seed must be at least 0 and below 2^63, got 9223372036854775808"),
        ("demos particle --seed -1 --out x.npz", "seed must be at least 0"),
        ("certify --seed -1", "seed must be at least 0"),
        ("train ibc --threads 0", "threads must be at least 1, got 0"),
        ("train ibc --device foo --episodes 6 --out new", "device 'foo' cannot be used on this machine"),
        ("train ibc --episodes 999999999999 --out new", "episodes must be at most 1,000,000"),
        ("train ibc --with gone.py", "gone.py: no such file"),
        ("train --resume nowhere", "not a run directory"),
        ("eval nowhere", "nowhere"),
        ("eval run --device foo", "device 'foo' cannot be used on this machine"),
        ("eval run --episodes 999999999999", "episodes must be at most 1,000,000"),
        ("eval run --env gym_pusht/PushT-v0", "'gym_pusht:gym_pusht/PushT-v0'"),
        ("eval run --env no_such_package:X-v0", "install the package that provides it"),
        ("eval run --execute 2", "execute must be between 1 and the policy's horizon 1"),
        ("eval run --max-steps 0", "max_steps must be a whole number of at least 1"),
        ("demos particle --dim 0 --out x.npz", "dim is 0"),
        ("demos particle --out z.txt", "z.txt"),
        ("demos particle --episodes 999999999999 --out x.npz", "episodes must be at most 1,000,000"),
        ("demos own_stuff.py:Centre --wait 3 --out x.npz", "--wait: the particle task has this setting"),
        ("demos Pendulum-v1 --out x.npz", "Pendulum-v1 has no expert"),
        ("certify --sampler nuts", "there is no sampler 'nuts'; there are langevin-ibc"),
        ("certify --sampler own_stuff.py:NeedsSize", "is a class that needs settings"),
        ("certify --sampler own_stuff.py:mine", "is a Trial, expected a sampler"),
    ],
)
def test_mistakes_end_in_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "taskless" in arguments:
        whole = Demonstrations.load("demos.npz")
        header = {"env": "cebm/Particle-v0"}
        Demonstrations.from_arrays(whole.obs, whole.actions, whole.episode_ends, metadata=header).save("taskless.npz")
    assert message in fails(capsys, *arguments.split())
    assert not Path("new").exists() and not Path("x.npz").exists() and not Path("z.txt").exists()


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "device 'cuda' cannot be used" in fails(capsys, "eval", "run", "--device", "cuda")


def test_a_mistake_in_a_users_code_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(capsys, "demos", "own_stuff.py:broken", "--out", "x.npz")
    number = OWN.splitlines().index('        raise ValueError("my own mistake")') + 1
    assert line.endswith(f"my own mistake ({Path('own_stuff.py').resolve()}, line {number})")


def test_a_run_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with locked("run"):
        assert "run is in use" in fails(capsys, "train", "--resume", "run", "--steps", "20")


def test_a_training_that_cannot_go_on_ends_with_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = ["--optimiser.learning-rate", "1e30", "--out", "diverged", "--data", "demos.npz"]
    with pytest.raises(SystemExit) as stop:
        main(["train", *IBC, *SHORT, *rate])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 1 and lines[-1].startswith("cebm: ") and "checkpoint" in lines[-1]

    def unknown(*_: Any) -> None:
        raise RuntimeError("nobody knows")

    monkeypatch.setattr(commands, "train", unknown)
    with pytest.raises(RuntimeError, match="nobody knows"):
        main(["train", *IBC])


# ---------------------------------------------------------------------------------------------- certify, words


def test_certify_judges_a_users_sampler(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from cebm.certificate import judging

    monkeypatch.setattr(judging, "SINGLE_STEPS", 1100)
    monkeypatch.setattr(judging, "CHAINS", 300)
    monkeypatch.setattr(judging, "SINGLE_REPLICAS", 16)
    main(["certify", "--json", "--sampler", "own_stuff.py:Drift"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 2 * len(analytic_targets()) and {row["sampler"] for row in rows} == {"own_stuff.py:Drift"}
    assert all(row["verdict"] in ("does not sample", "biased") for row in rows)


def test_words_for_any_metric() -> None:
    rows: list[dict[str, Any]] = [{"episode": i, "success": None, "coverage": 0.25 * i} for i in range(3)]
    result = Evaluation(rows, 0, 1.0, 2.0, 3.0)
    # 0.25 ± t s/√n with s = 0.25 and Student's t of two degrees of freedom, 4.303.
    told = sentence(result, "coverage")
    assert told == "coverage 0.25 ± 0.14  [-0.3711, 0.8711]  (3 episodes)  action 2.0 ms (p99 3.0)"
    assert sentence(Evaluation(rows[:2][1:], 0, 1.0, 2.0, 3.0), "coverage").startswith("coverage 0.25  (1 episodes)")
    both = [{**row, "success": True} for row in rows]
    told = sentence(Evaluation(both, 0, 1.0, 2.0, 3.0), "coverage")
    assert told.startswith("success 100% [44%, 100%]  coverage 0.25 ± 0.14  [-0.3711, 0.8711]  (3/3 episodes)")
    assert measured({"validation_action_error": 0.12345, "step": 3}) == "error 0.1235"
    assert measured({"a": 1.0, "a_se": 0.5, "b": 2.0}) == "a 1 ± 0.5"
    assert measured({}) == ""


ROWS: list[dict[str, Any]] = [
    {"kind": "train", "step": 5, "loss": 1.0, "seconds": 1.0},
    {"kind": "evaluation", "step": 10, "coverage": 0.5, "validation_action_error": 0.1, "seconds": 2.0},
]


@pytest.mark.parametrize("plain", [True, False])
def test_the_bar_writes_escape_codes_only_where_they_are_wanted(
    plain: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1") if plain else monkeypatch.delenv("NO_COLOR", raising=False)
    with ProgressBar("mine [x]", 10, "coverage") as bar:
        for row in ROWS:
            bar(row)
    printed = capsys.readouterr().err
    if plain:
        assert printed == "step     10  loss 1.000  coverage 0.5  2 s\n"
    else:
        assert "\x1b[" in printed and "coverage 0.5" in printed and "mine [x]" in printed
