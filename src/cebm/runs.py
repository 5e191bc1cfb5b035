"""Training in a run directory, which holds all that is needed to read, resume and act:

run.json (settings, versions, commit, the data's fingerprint), metrics.jsonl, checkpoints/step-… (the last two), best/
and policy/. One process at a time writes to it: the first, where a group of processes trains.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

import torch

from cebm import legacy
from cebm.demonstrations import Demonstrations, open_demonstrations
from cebm.distributed import ALONE, Group, GroupError
from cebm.evaluation import VALIDATION_SEED
from cebm.loading import load
from cebm.policy import FORMAT, VERSION, EnergyPolicy
from cebm.provenance import source_commit, versions
from cebm.recipes import Trial
from cebm.selection import evaluation_row, score
from cebm.settings import StorageError, from_json, to_json
from cebm.spaces import usable_device
from cebm.stopping import stop_signals
from cebm.storage import (
    load_bundle,
    locked,
    read_document,
    read_rows,
    remove_bundle,
    row_line,
    save_bundle,
    take,
    tidy_bundle,
    write_atomically,
    write_document,
)
from cebm.tasks import Task, task_of
from cebm.trainer import Trainer

CHECKPOINT_FORMAT, CHECKPOINT_VERSION = "cebm.checkpoint", 2
VALIDATION_EPISODES = 256
"""Demonstrations of a task to validate on: as many as there are pairs, so that no two pairs share an episode."""
EXPERT_EPISODES = 300
"""Demonstrations that a task's expert gives where nobody says how many (the paper's number)."""


class TrainingError(RuntimeError):
    """Training cannot go on; the message names the step and the last good checkpoint."""


class DivergedError(TrainingError):
    """A loss, a gradient or an energy is NaN or infinite."""


class Interrupted(RuntimeError):
    """SIGTERM or Ctrl-C: the state was saved, `resume` continues."""


@dataclass(frozen=True)
class Job:
    """All that decides a run; written to run.json."""

    name: str
    """The trial's name, for people."""
    trial: Trial
    """What is learned and how."""
    task: Task | None = None
    """Gives demonstrations where there is no `data`, limits of the action, and roll-outs that choose the best policy.
    None: the task that the data name, if any."""
    data: str | None = None
    """A file or directory of demonstrations, of any format that is known; None: those of the task's expert."""
    episodes: int | None = None
    """The most demonstrations to train on; validation episodes come on top. None: all of `data`, 300 of an expert."""
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
    evaluation_execute: int | None = None
    """Actions of a chunk to play in these evaluations before the policy is asked again; None: all."""
    device: str = "cpu"
    """Where to train."""
    keep_checkpoints: int = 2
    """Checkpoints to keep, the newest; 0: all, for studies of how training goes."""
    data_obs: tuple[str, ...] = ()
    """Arrays or columns of the data that are observations: names, patterns, or NAME=PATTERN; by default the usual."""
    data_action: tuple[str, ...] = ()
    """Those that are actions."""
    data_episodes: tuple[str, ...] = ()
    """What tells where episodes end: ends, lengths, an id per step, flags of the last step; or `one`, `each`."""

    def __post_init__(self) -> None:
        counts = ("steps", "log_every", "evaluate_every", "checkpoint_every")
        for name in (*counts, "evaluation_episodes", "evaluation_candidates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.episodes is not None and self.episodes < 1:
            raise ValueError(f"episodes must be at least 1, got {self.episodes}")
        horizon = self.trial.inputs.horizon
        if self.evaluation_execute is not None and not 1 <= self.evaluation_execute <= horizon:
            raise ValueError(
                f"evaluation_execute must be between 1 and the horizon {horizon}, got {self.evaluation_execute}"
            )
        if self.keep_checkpoints < 0:
            raise ValueError(f"keep_checkpoints must not be negative, got {self.keep_checkpoints}")
        if self.task is None and self.data is None:
            raise ValueError("a run needs a task or data")
        for name in ("data_obs", "data_action", "data_episodes"):
            if getattr(self, name) and self.data is None:
                raise ValueError(f"{name} names columns of data, but there is no data")


@dataclass(frozen=True)
class Material:
    """What a run learns from and is measured by."""

    training: Demonstrations
    validation: Demonstrations
    task: Task | None
    """Measures the policy and limits its actions, where one is known."""

    def fingerprint(self) -> str:
        """Tells whether the data are still the same."""
        return f"{self.training.fingerprint()}-{self.validation.fingerprint()}"

    def summary(self) -> str:
        """How many demonstrations serve for what."""
        if self.training is self.validation:
            return "1 demonstration, to train and to validate on"
        return f"{self.training.episodes:,} demonstrations to train on, {self.validation.episodes:,} to validate on"


def demonstrations_of(job: Job, data: str, listen: Callable[[float], None] = lambda share: None) -> Demonstrations:
    """The demonstrations of a file or directory, read as the job says; `listen` gets the share that is read."""
    words = {"obs": job.data_obs, "action": job.data_action, "episodes": job.data_episodes}
    return open_demonstrations(data, **words, listen=listen)


def material_of(job: Job, listen: Callable[[float], None] = lambda share: None) -> Material:
    """The demonstrations of a run: all but a tenth of its data to train on, or the expert's; `listen` gets the share
    of the data that is read."""
    if job.data is None:
        if job.task is None:
            raise ValueError("a run needs a task or data")
        training = job.task.demonstrations(job.episodes or EXPERT_EPISODES, job.seed)
        return Material(training, job.task.demonstrations(VALIDATION_EPISODES, VALIDATION_SEED), job.task)
    demonstrations = demonstrations_of(job, job.data, listen)
    task = task_of(demonstrations.metadata) if job.task is None else job.task
    if task is not None:  # now, and not when the first policy is rolled out
        task.check_policy(demonstrations.obs_dim, demonstrations.act_dim)
    if demonstrations.episodes == 1:
        return Material(demonstrations, demonstrations, task)
    training, validation = demonstrations.split(0.1, job.seed)
    if job.episodes is not None:
        training = training.select(range(min(job.episodes, training.episodes)))
    return Material(training, validation, task)


@dataclass(frozen=True)
class Outcome:
    """What a finished run gave."""

    directory: Path
    policy: EnergyPolicy
    """The best policy by validation."""
    best_step: int
    metrics: list[dict[str, Any]]


Listener = Callable[[dict[str, Any]], None]


def train(
    job: Job,
    directory: str | Path,
    listen: Listener = lambda row: None,
    material: Material | None = None,
    group: Group = ALONE,
    say: Callable[[str], None] = lambda line: None,
    choose_threads: bool = False,
) -> Outcome:
    """Starts a run in a new or empty directory; `listen` gets each row of metrics as it is written, and `say` a line
    for each thing that the units of the data are, before the first step. Nothing is written
    before the data are read and a first step has been tried, so a start that fails leaves nothing behind. `material`:
    the job's, if it was read already. `group`: the processes that train together; all must see the directory.
    `choose_threads`: measure on some steps how many threads of torch are fastest now, say it, and keep to that."""
    where = Path(directory)
    with group.together():
        check_new(where)
        material = material_of(job) if material is None else material
        trainer = trainer_of(job, material, group)
        if group.first:
            for line in trainer.notes:
                say(line)
    group.check_same(material.fingerprint(), "the data are")
    trainer.align()
    try:
        trainer.rehearse()
    except FloatingPointError as error:
        raise DivergedError(f"{error}, at step 1; start again, with a lower learning rate") from error
    if choose_threads and group.size == 1:
        say(trainer.choose_threads())
    record = _run_record(job, material, group, trainer.notes)
    with ExitStack() as stack:
        with group.together():
            if group.first:
                with _writing(where):
                    where.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(where))
                check_new(where)  # another process may have been faster
                with _writing(where):
                    write_document(where / "run.json", record)
        return _loop(job, trainer, material, {}, [], where, listen)


def check_new(where: Path) -> None:
    """A run begins in a new or empty directory."""
    others = sorted(path.name for path in where.iterdir() if path.name != ".lock") if where.is_dir() else []
    if "run.json" in others:
        raise FileExistsError(f"{where} holds a run already; resume it or choose another directory")
    if others:
        raise FileExistsError(f"{where} is not empty (it holds {others[0]!r}); choose another directory")


@contextmanager
def _writing(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(f"cannot write to {where}: {error.strerror or error}") from error


def resume(
    directory: str | Path, listen: Listener = lambda row: None, steps: int | None = None, group: Group = ALONE
) -> Outcome:
    """Continues a run from its last good checkpoint, bit for bit; `steps` extends it. A learning rate that follows a
    cosine then follows that of the new length, and rises again from the 0 that a finished run ended with. The `group`
    must have as many processes as the one that began the run.

    Nothing is written before data, checkpoints and metrics are known to fit: what cannot be resumed stays as it is.
    """
    where = Path(directory)
    with ExitStack() as stack:
        with group.together():
            read_record(where)  # before there is a lock in a directory that holds no run
            if group.first:
                stack.enter_context(locked(where))
        with group.together():
            record, job = read_record(where), load_job(where)
            _check_processes(record, group, where)
            changed = steps is not None and steps != job.steps
            job = replace(job, steps=steps) if steps is not None else job
            material = material_of(job)
            before = record.get("data")
            if before is not None and before != material.fingerprint():
                source = job.data or "the task's demonstrations"
                raise TrainingError(f"{where}: {source} changed since the run began; resume needs the same data")
            trainer = trainer_of(job, material, group)
            best, rows = _restore(trainer, job, where)
        group.check_same(f"step {trainer.step_count}", f"the checkpoint found in {where} is")
        if trainer.step_count == 0:
            trainer.align()
        with group.together():
            if group.first:
                _tidy(where, job.keep_checkpoints, trainer.step_count)
            if changed and group.first:
                with _writing(where):
                    write_document(where / "run.json", _run_record(job, material, group, trainer.notes))
        return _loop(job, trainer, material, best, rows, where, listen)


def _check_processes(record: dict[str, Any], group: Group, where: Path) -> None:
    """Shares of the batch and random numbers belong to a number of processes; a run without one had one process."""
    before = record.get("processes", 1)
    if before != group.size:
        raise TrainingError(
            f"{where}: the run began with {_processes(before)}, and now there {'is' if group.size == 1 else 'are'} "
            f"{_processes(group.size)}; resume needs the same number"
        )


def _processes(number: int) -> str:
    return f"{number} process{'' if number == 1 else 'es'}"


def read_record(directory: str | Path) -> dict[str, Any]:
    """What run.json holds: the job as JSON, versions, commit, threads, the data's fingerprint."""
    path = Path(directory) / "run.json"
    record = read_document(path, "run directory", old=True)
    job = take(record, "job", str(path))
    if not isinstance(job, dict):
        raise StorageError(f"{path}: damaged, the job is no JSON object")
    # Only the first format has no checksum.
    return record if job.get("type") == "Job" else read_document(path, "run directory")


def load_job(directory: str | Path) -> Job:
    """The settings of a run."""
    path = Path(directory) / "run.json"
    stored = read_record(directory)["job"]
    if stored.get("type") == "Job":
        stored = legacy.job(stored, str(path))
    stored = legacy.with_learned_constants(stored)
    return from_json(stored, Job, str(path))


def load_metrics(directory: str | Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a last line that a kill cut short is left out, other damage is a StorageError."""
    return read_rows(Path(directory) / "metrics.jsonl")


def _loop(
    job: Job,
    trainer: Trainer,
    material: Material,
    best: dict[str, Any],
    rows: list[dict[str, Any]],
    where: Path,
    listen: Listener,
) -> Outcome:
    group = trainer.group
    began = perf_counter() - (rows[-1]["seconds"] if rows else 0.0)
    with ExitStack() as stack:
        with group.together():
            file = stack.enter_context(_metrics_file(where, rows)) if group.first else None
        stop = stack.enter_context(stop_signals(once=group.size == 1))

        def write(row: dict[str, Any]) -> None:
            if file is None:
                return
            row = {"step": trainer.step_count, **row, "seconds": round(perf_counter() - began, 3)}
            rows.append(row)
            file.write(row_line(row))
            file.flush()
            listen(row)

        timer = perf_counter()
        try:
            while trainer.step_count < job.steps:
                with _diverging(f"step {trainer.step_count + 1}", trainer, where):
                    log = trainer.step()
                step = trainer.step_count
                last = step == job.steps
                if step % job.log_every == 0 or last:
                    now = perf_counter()
                    speed = min(job.log_every, step) / (now - timer)
                    timer = now
                    numbers = group.means({name: float(value) for name, value in log.items()})
                    with group.together():
                        write({"kind": "train", **numbers, "steps_per_second": round(speed, 2)})
                if step % job.evaluate_every == 0 or last:
                    with _diverging(f"the evaluation of step {step}", trainer, where), group.together():
                        if group.first:
                            best = _evaluate(trainer, job, material.task, where, best, write)
                    timer = perf_counter()
                halt = group.any(bool(stop))
                if step % job.checkpoint_every == 0 or last or halt:
                    with _diverging(f"the checkpoint of step {step}", trainer, where), group.together():
                        trainer.check_weights()
                    state = trainer.group_state()
                    with group.together():
                        if file is not None:
                            os.fsync(file.fileno())  # no checkpoint is newer than its metrics, if the power fails
                            _save_checkpoint(trainer, state, where, best, job.keep_checkpoints)
                if halt and not last:
                    raise Interrupted(f"stopped at step {step} on request; resume continues from there")
            with group.together():
                if group.first:
                    trainer.policy().save(where / "policy")
        except OSError as error:
            raise TrainingError(
                f"cannot write to {where} at step {trainer.step_count}: {error.strerror or error}; "
                f"{_last_good(trainer, where)}"
            ) from error
    best, rows = group.of_first((best, rows))
    return Outcome(where, load(where / "best", group.device(job.device)), best["step"], rows)


@contextmanager
def _diverging(what: str, trainer: Trainer, where: Path) -> Iterator[None]:
    """Stop when the loss is NaN or infinite; the message names the last checkpoint from which training can go on."""
    try:
        yield
    except (FloatingPointError, ValueError) as error:
        raise DivergedError(f"{error}, at {what}; {_last_good(trainer, where)}") from error


def _last_good(trainer: Trainer, where: Path) -> str:
    """The newest checkpoint that loads and whose next step is finite; the trainer is left at one of them."""
    for directory in checkpoints(where):
        try:
            with trainer.group.together():
                step, _, tensors = _checkpoint(directory)
                trainer.load_state(tensors, step)
            trainer.step()
            with trainer.group.together():
                trainer.check_weights()
            return f"last good checkpoint: step {step}"
        except GroupError:
            raise
        except (ArithmeticError, ValueError, RuntimeError):
            continue
    return "there is no good checkpoint: start again, with a lower learning rate"


def trainer_of(job: Job, material: Material | None = None, group: Group = ALONE) -> Trainer:
    """The trainer of a run as it begins."""
    found = material_of(job) if material is None else material
    limits = None if found.task is None else found.task.limits
    device = usable_device(group.device(job.device))
    return Trainer(job.trial, found.training, found.validation, job.seed, device, limits, job.steps, group)


def restored(job: Job, where: Path) -> tuple[Trainer, dict[str, Any]]:
    """The trainer of a run as its newest checkpoint has it, or as it began; and the record of its best policy."""
    trainer = trainer_of(job)
    return trainer, _restore(trainer, job, where)[0]


def _evaluate(
    trainer: Trainer,
    job: Job,
    task: Task | None,
    where: Path,
    best: dict[str, Any],
    write: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Logs an evaluation and keeps the policy if it is the best so far (see `selection.score`)."""
    policy = trainer.policy()
    row = evaluation_row(
        trainer, policy, task, job.evaluation_episodes, job.evaluation_candidates, job.evaluation_execute
    )
    write({"kind": "evaluation", **row})
    found = score(row, task)
    if best and best["score"] >= found:
        return best
    policy.save(where / "best")
    return {"step": trainer.step_count, "score": found}


def _save_checkpoint(
    trainer: Trainer, state: dict[str, torch.Tensor], where: Path, best: dict[str, Any], keep: int
) -> None:
    directory = where / "checkpoints" / _checkpoint_name(trainer.step_count)
    header = {"step": trainer.step_count, "best": best, "processes": trainer.group.size}
    save_bundle(directory, CHECKPOINT_FORMAT, CHECKPOINT_VERSION, header, state)
    _remove_old(where, keep, trainer.step_count)


def _remove_old(where: Path, keep: int, step: int) -> None:
    """Removes the checkpoints from before `step`, a good one, but for the newest `keep` of all; 0 keeps all."""
    for old in checkpoints(where)[keep:] if keep else []:
        if old.name < _checkpoint_name(step):
            remove_bundle(old)


def _checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def _tidy(where: Path, keep: int, step: int) -> None:
    """Removes what a killed process left of a run's bundles and no reader looks at, and old checkpoints that it had no
    time to remove."""
    for directory in (where / "checkpoints").glob("step-*"):
        tidy_bundle(directory, CHECKPOINT_FORMAT, CHECKPOINT_VERSION)
    _remove_old(where, keep, step)
    for name in ("best", "policy"):
        tidy_bundle(where / name, FORMAT, VERSION)


def checkpoints(where: Path) -> list[Path]:
    """The checkpoints of a run, newest first; a directory without a header was never finished."""
    return sorted((path.parent for path in (where / "checkpoints").glob("step-*/header.json")), reverse=True)


def load_checkpoint(directory: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Header and tensors of a checkpoint, of earlier formats too."""
    header, tensors = load_bundle(directory, CHECKPOINT_FORMAT, CHECKPOINT_VERSION)
    return header, tensors if header["version"] > 1 else legacy.upgraded_checkpoint(tensors)


def _checkpoint(directory: Path) -> tuple[int, dict[str, Any], dict[str, torch.Tensor]]:
    """Step, record of the best policy and tensors of a checkpoint."""
    header, tensors = load_checkpoint(directory)
    step, best = (take(header, name, str(directory)) for name in ("step", "best"))
    if type(step) is not int or step < 0:
        raise StorageError(f"{directory}: step must be an integer of at least 0, got {step!r}")
    if not isinstance(best, dict) or (best and not best.keys() >= {"step", "score"}):
        raise StorageError(f"{directory}: the record of the best policy makes no sense, got {best!r}")
    return step, best, tensors


def _restore(trainer: Trainer, job: Job, where: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Brings the trainer to the newest checkpoint that fits. Returns the record of the best policy so far, and the rows
    of metrics up to there. Nothing is written; a StorageError names the files because of which a run cannot go on."""
    rows, found, problems = load_metrics(where), checkpoints(where), []
    for directory in found:
        try:
            step, best, tensors = _checkpoint(directory)
            trainer.load_state(tensors, step)
            break
        except StorageError as error:
            problems.append(f"{directory}: {error}")
    else:
        if problems:
            raise StorageError(f"no checkpoint of {where} fits, so it cannot be resumed: {'; '.join(problems)}")
        _check_young(job, rows, where)
        return {}, []
    for problem in problems:
        warnings.warn(f"skipping a checkpoint: {problem}", stacklevel=3)
    rows = [row for row in rows if row["step"] <= step]
    _check_rows(rows, step - step % job.log_every, where)
    return _check_best(best, where), rows


def _check_young(job: Job, rows: list[dict[str, Any]], where: Path) -> None:
    """A run without checkpoints begins again, unless it must have had some: those are saved every `checkpoint_every`
    steps and before the final policy."""
    late = bool(rows) and rows[-1]["step"] > job.checkpoint_every
    if late or (where / "policy").exists():
        raise StorageError(f"{where / 'checkpoints'}: the checkpoints are missing, so the run cannot be resumed")
    if (where / "best").exists() and not rows:
        raise StorageError(f"{where / 'metrics.jsonl'}: the metrics are missing, so the run cannot be resumed")


def _check_rows(rows: list[dict[str, Any]], logged: int, where: Path) -> None:
    """Metrics are on disk before a checkpoint is: those up to the last step that is `logged` must be there."""
    path, last = where / "metrics.jsonl", rows[-1]["step"] if rows else 0
    if last < logged:
        raise StorageError(f"{path}: rows up to step {logged} are missing, so the run cannot be resumed")
    if rows and type(rows[-1].get("seconds")) not in (int, float):
        raise StorageError(f"{path}: the row of step {last} has no seconds")


def _check_best(best: dict[str, Any], where: Path) -> dict[str, Any]:
    """The record, where the policy that it speaks of is there."""
    if best and not (where / "best").exists():
        warnings.warn(f"{where / 'best'} is missing: the best policy is chosen anew", stacklevel=4)
        return {}
    if best:
        load(where / "best")
    return best


@contextmanager
def _metrics_file(where: Path, rows: list[dict[str, Any]]) -> Iterator[TextIO]:
    """Opens metrics.jsonl for appending, after cutting it back to `rows`."""
    path = where / "metrics.jsonl"
    content = "".join(map(row_line, rows))
    with _writing(where):
        if not path.exists() or path.read_text() != content:
            write_atomically(path, content.encode())
        file = open(path, "a")  # noqa: SIM115
    with file:
        yield file


def _run_record(job: Job, material: Material, group: Group = ALONE, units: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "job": to_json(job),
        "versions": versions(),
        "commit": source_commit(),
        "threads": torch.get_num_threads(),
        "processes": group.size,
        "data": material.fingerprint(),
        "units": list(units),
    }
