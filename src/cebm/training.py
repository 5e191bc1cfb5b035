"""Training in a run directory, which holds all that is needed to read, resume and act:

run.json (settings, versions, commit), metrics.jsonl, checkpoints/step-… (the last two), best/ and policy/.
"""

import json
import platform
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, TextIO

import numpy as np
import torch

from cebm import __version__
from cebm.demonstrations import Demonstrations
from cebm.envs.particle import ENV_ID, ParticleTask, collect_particle
from cebm.evaluation import VALIDATION_SEED, evaluate
from cebm.policy import ExplicitPolicy, ImplicitPolicy, Network, load
from cebm.samplers import MALA, Constant, DerivativeFree, Exponential, Langevin, Polynomial
from cebm.storage import StorageError, from_json, load_bundle, save_bundle, take, to_json, write_atomically
from cebm.trainer import Trainer
from cebm.trials import Trial

CHECKPOINT_FORMAT, CHECKPOINT_VERSION = "cebm.checkpoint", 1
TIMES = ("seconds", "steps_per_second", "action_ms_p50", "action_ms_p99")
"""Metrics that differ between two otherwise identical runs."""


class TrainingError(RuntimeError):
    """Training cannot go on; the message names the step and the last good checkpoint."""


class DivergedError(TrainingError):
    """A loss, a gradient or an energy is not a number any more."""


class Interrupted(RuntimeError):
    """SIGTERM or Ctrl-C: the state was saved, `resume` continues."""


VALIDATION_EPISODES = 256
"""Demonstrations of a task to validate on: as many as there are pairs, so that no two pairs share an episode."""


@dataclass(frozen=True)
class Job:
    """All that decides a run; written to run.json."""

    name: str
    """The trial's name, for people."""
    trial: Trial
    """What is learned and how."""
    task: ParticleTask | None = None
    """The particle task, for demonstrations and success; None: only `data`."""
    data: str | None = None
    """A file or directory of demonstrations; None: the expert's, in `task`."""
    episodes: int = 300
    """Demonstrations to generate, or the most to use of `data`; validation episodes come on top."""
    steps: int = 3000
    """Training steps."""
    seed: int = 0
    """Decides weights, noise, order and generated demonstrations."""
    log_every: int = 20
    """Steps between two rows of training metrics."""
    evaluate_every: int = 500
    """Steps between two evaluations."""
    checkpoint_every: int = 250
    """Steps between two checkpoints."""
    evaluation_episodes: int = 100
    """Episodes per evaluation along the way."""
    evaluation_candidates: int = 64
    """Candidates of the acting search in these evaluations, at most."""
    device: str = "cpu"
    """Where to train."""
    keep_checkpoints: int = 2
    """Checkpoints to keep, the newest; 0: all, for studies of how training goes."""

    def __post_init__(self) -> None:
        least = {"episodes": 1, "steps": 1, "log_every": 1, "evaluate_every": 1, "checkpoint_every": 1}
        for name, value in {**least, "evaluation_episodes": 1, "evaluation_candidates": 1}.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} must be at least {value}, got {getattr(self, name)}")
        if self.keep_checkpoints < 0:
            raise ValueError(f"keep_checkpoints must not be negative, got {self.keep_checkpoints}")
        if self.task is None and self.data is None:
            raise ValueError("a run needs a task or data")


JOB_CLASSES = [Job, Trial, Network, ParticleTask, Langevin, MALA, DerivativeFree, Constant, Polynomial, Exponential]


def demonstrations_of(job: Job) -> tuple[Demonstrations, Demonstrations, ParticleTask | None]:
    """Training and validation demonstrations, and the task that measures success where one is known."""
    if job.data is None:
        assert job.task is not None
        training = collect_particle(job.task, job.episodes, job.seed)
        return training, collect_particle(job.task, VALIDATION_EPISODES, VALIDATION_SEED), job.task
    demonstrations = Demonstrations.load(job.data)
    task = task_of(job, demonstrations)
    if demonstrations.episodes == 1:
        return demonstrations, demonstrations, task
    training, validation = demonstrations.split(0.1, job.seed)
    return training.select(range(min(job.episodes, training.episodes))), validation, task


def task_of(job: Job, demonstrations: Demonstrations | None = None) -> ParticleTask | None:
    """The particle task of a run: its own, or the one that the header of its data names."""
    if job.task is not None or job.data is None:
        return job.task
    metadata = (demonstrations or Demonstrations.load(job.data)).metadata
    return ParticleTask(**metadata["task"]) if metadata.get("env") == ENV_ID else None


@dataclass(frozen=True)
class Outcome:
    """What a finished run gave."""

    directory: Path
    policy: ImplicitPolicy | ExplicitPolicy
    """The best policy by validation."""
    best_step: int
    metrics: list[dict[str, Any]]


Listener = Callable[[dict[str, Any]], None]


def train(job: Job, directory: str | Path, listen: Listener = lambda row: None) -> Outcome:
    """Starts a run in a new or empty directory; `listen` gets each row of metrics as it is written."""
    where = Path(directory)
    if (where / "run.json").exists():
        raise FileExistsError(f"{where} holds a run already; resume it or choose another directory")
    try:
        where.mkdir(parents=True, exist_ok=True)
        write_atomically(where / "run.json", (json.dumps(_run_record(job), indent=1) + "\n").encode())
    except OSError as error:
        raise TrainingError(f"cannot write to {where}: {error.strerror or error}") from error
    return _loop(job, where, listen)


def resume(directory: str | Path, listen: Listener = lambda row: None, steps: int | None = None) -> Outcome:
    """Continues a run from its last good checkpoint, bit for bit; `steps` extends it. A learning rate that follows a
    cosine then follows that of the new length, and rises again from the 0 that a finished run ended with."""
    where = Path(directory)
    job = load_job(where)
    if steps is not None and steps != job.steps:
        job = replace(job, steps=steps)
        write_atomically(where / "run.json", (json.dumps(_run_record(job), indent=1) + "\n").encode())
    return _loop(job, where, listen)


def load_job(directory: str | Path) -> Job:
    """The settings of a run."""
    path = Path(directory) / "run.json"
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise StorageError(f"{path}: not a run directory ({error.strerror or error})") from error
    except ValueError as error:
        raise StorageError(f"{path}: damaged, not JSON ({error})") from error
    return from_json(take(record, "job", str(path)), JOB_CLASSES, str(path))


def load_metrics(directory: str | Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a last line that a kill cut short is left out."""
    path = Path(directory) / "metrics.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _loop(job: Job, where: Path, listen: Listener) -> Outcome:
    trainer, best = restored(job, where)
    task = task_of(job)
    rows = [row for row in load_metrics(where) if row["step"] <= trainer.step_count]
    began = perf_counter() - (rows[-1]["seconds"] if rows else 0.0)
    last_good = trainer.step_count
    with _metrics_file(where, rows) as file, _signals() as stop:

        def write(row: dict[str, Any]) -> None:
            row = {"step": trainer.step_count, **row, "seconds": round(perf_counter() - began, 3)}
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            listen(row)

        timer = perf_counter()
        try:
            while trainer.step_count < job.steps:
                with _diverging(f"step {trainer.step_count + 1}", last_good):
                    log = trainer.step()
                step = trainer.step_count
                last = step == job.steps
                if step % job.log_every == 0 or last:
                    now = perf_counter()
                    speed = min(job.log_every, step) / (now - timer)
                    timer = now
                    numbers = {name: float(value) for name, value in log.items()}
                    write({"kind": "train", **numbers, "steps_per_second": round(speed, 2)})
                if step % job.evaluate_every == 0 or last:
                    with _diverging(f"the evaluation of step {step}", last_good):
                        best = _evaluate(trainer, job, task, where, best, write)
                    timer = perf_counter()
                if step % job.checkpoint_every == 0 or last or stop:
                    _save_checkpoint(trainer, where, best, job.keep_checkpoints)
                    last_good = step
                if stop and not last:
                    raise Interrupted(f"stopped at step {step} on request; resume continues from there")
            trainer.policy().save(where / "policy")
        except OSError as error:
            raise TrainingError(
                f"cannot write to {where} at step {trainer.step_count}: {error.strerror or error}; "
                f"last good checkpoint: step {last_good}"
            ) from error
    return Outcome(where, load(where / "best", job.device), best["step"], rows)


@contextmanager
def _diverging(what: str, last_good: int) -> Iterator[None]:
    """Numbers that are none end the run, with the place where it can be taken up."""
    try:
        yield
    except (FloatingPointError, ValueError) as error:
        raise DivergedError(f"{error}, at {what}; last good checkpoint: step {last_good}") from error


def trainer_of(job: Job) -> Trainer:
    """The trainer of a run as it begins."""
    training, validation, task = demonstrations_of(job)
    limits = (0.0, 1.0) if task is not None else None
    return Trainer(job.trial, training, validation, job.seed, job.device, limits, job.steps)


def restored(job: Job, where: Path) -> tuple[Trainer, dict[str, Any]]:
    """The trainer of a run as its newest checkpoint has it, or as it began; and the record of its best policy."""
    trainer = trainer_of(job)
    return trainer, _restore(trainer, where)


def _evaluate(
    trainer: Trainer,
    job: Job,
    task: ParticleTask | None,
    where: Path,
    best: dict[str, Any],
    write: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Logs an evaluation and keeps the policy if it is the best so far: by success, then by action error."""
    policy = trainer.policy()
    row = evaluation_row(trainer, policy, job, task)
    write({"kind": "evaluation", **row})
    score = [row.get("success", 0.0), -row["validation_action_error"]]
    if best and best["score"] >= score:
        return best
    policy.save(where / "best")
    return {"step": trainer.step_count, "score": score}


def evaluation_row(
    trainer: Trainer, policy: ImplicitPolicy | ExplicitPolicy, job: Job, task: ParticleTask | None
) -> dict[str, float]:
    """Errors and information on demonstrations, and success on validation episodes where the task is known."""
    candidates = min(job.evaluation_candidates, job.trial.candidates)
    row = trainer.validate(policy, candidates)
    if task is not None:
        result = evaluate(
            policy,
            task,
            episodes=job.evaluation_episodes,
            seed=VALIDATION_SEED,
            latency_calls=0,
            candidates=candidates,
        ).summary()
        names = ("success", "success_low", "success_high", "min_distance_first", "min_distance_second")
        row |= {name: result[name] for name in names}
    return row


def _save_checkpoint(trainer: Trainer, where: Path, best: dict[str, Any], keep: int) -> None:
    directory = where / "checkpoints" / f"step-{trainer.step_count:08d}"
    header = {"step": trainer.step_count, "best": best}
    save_bundle(directory, CHECKPOINT_FORMAT, CHECKPOINT_VERSION, header, trainer.state())
    for old in _checkpoints(where)[keep:] if keep else []:
        for file in old.iterdir():
            file.unlink()
        old.rmdir()


def _checkpoints(where: Path) -> list[Path]:
    """Newest first; a directory without a header was never finished."""
    return sorted((path.parent for path in (where / "checkpoints").glob("step-*/header.json")), reverse=True)


def _restore(trainer: Trainer, where: Path) -> dict[str, Any]:
    """Loads the newest checkpoint that is whole; the record of the best policy so far."""
    for directory in _checkpoints(where):
        try:
            header, tensors = load_bundle(directory, CHECKPOINT_FORMAT, CHECKPOINT_VERSION)
            trainer.load_state(tensors, take(header, "step", str(directory)))
            return take(header, "best", str(directory))
        except (StorageError, RuntimeError) as error:
            warnings.warn(f"skipping a checkpoint: {error}", stacklevel=2)
    return {}


@contextmanager
def _metrics_file(where: Path, rows: list[dict[str, Any]]) -> Iterator[TextIO]:
    """Opens metrics.jsonl for appending, after cutting it back to `rows`."""
    path = where / "metrics.jsonl"
    content = "".join(json.dumps(row) + "\n" for row in rows)
    try:
        if not path.exists() or path.read_text() != content:
            write_atomically(path, content.encode())
        file = open(path, "a")  # noqa: SIM115
    except OSError as error:
        raise TrainingError(f"cannot write to {where}: {error.strerror or error}") from error
    try:
        yield file
    finally:
        file.close()


class _Stop:
    """Set by a signal, read between steps."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked


@contextmanager
def _signals() -> Iterator[_Stop]:
    """SIGTERM and Ctrl-C ask to stop after the current step; a second one acts at once. Main thread only."""
    stop = _Stop()
    previous: dict[int, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        stop.asked = True
        signal.signal(number, previous[number])

    try:
        for number in (int(signal.SIGTERM), int(signal.SIGINT)):
            previous[number] = signal.signal(number, ask)
    except ValueError:  # not the main thread: the caller's handlers stay
        pass
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def source_commit() -> str | None:
    """The commit of the code that runs, where it is a checkout; '-dirty' where the code is not as committed."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    commit = git("rev-parse", "HEAD").stdout.strip()
    dirty = git("diff", "--quiet", "HEAD", "--", ".").returncode == 1
    return f"{commit}-dirty" if commit and dirty else commit or None


def _run_record(job: Job) -> dict[str, Any]:
    versions = {"cebm": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return {
        "job": to_json(job),
        "versions": {**versions, "python": platform.python_version()},
        "commit": source_commit(),
        "threads": torch.get_num_threads(),
    }
