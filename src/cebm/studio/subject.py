"""What the studio looks at: a policy, with observations and a task where they are at hand."""

from dataclasses import dataclass
from pathlib import Path

import torch

from cebm.demonstrations import Demonstrations, open_demonstrations
from cebm.loading import load
from cebm.policy import EnergyPolicy
from cebm.runs import demonstrations_of, load_job
from cebm.studio.training import Progress
from cebm.tasks import VALIDATION_SEED, Task, TaskError, task_of

EXPERT_EPISODES = 12
"""Episodes that a task's expert shows where there are no data."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A policy with what helps to look into it."""

    name: str
    """For people; the directory's name."""
    policy: EnergyPolicy
    """The policy itself."""
    path: Path | None = None
    """Where it was read."""
    progress: Progress | None = None
    """The run it comes from, which may be under way; None: a policy without a run."""
    demonstrations: Demonstrations | None = None
    """Observations to step through."""
    task: Task | None = None
    """Says where things are in an observation."""


def open_subject(
    path: str | Path, data: str | Path | None = None, task: Task | None = None, device: torch.device | str = "cpu"
) -> Subject:
    """The policy of a run directory (its best one, or that of its newest checkpoint), or a policy directory, with the
    run's own data and task where none are given. Data that moved away are left out; data that are given must fit."""
    where = Path(path)
    progress = Progress(where) if (where / "run.json").exists() else None
    if progress is not None and not (where / "best" / "header.json").exists():
        policy = progress.newest_policy()
    else:
        policy = load(where, device)
    demonstrations = None if data is None else open_demonstrations(data)
    if progress is not None and demonstrations is None:
        demonstrations, task = _of_run(where, task)
    if task is None and demonstrations is not None:
        task = task_of(demonstrations.metadata)
    if task is not None:
        task.check_policy(*policy.columns)
    if demonstrations is None and task is not None:
        demonstrations = _shown(task)
    if demonstrations is not None:
        _check_columns(policy, demonstrations, where, given=data is not None)
    return Subject(where.resolve().name, policy, where, progress, demonstrations, task)


def _of_run(where: Path, task: Task | None) -> tuple[Demonstrations | None, Task | None]:
    """The data and the task of a run, as far as they are at hand."""
    job = load_job(where)
    task = job.task if task is None else task
    if job.data is None:
        return None, task
    try:
        return demonstrations_of(job, job.data), task
    except (OSError, ValueError):  # moved away or changed: the studio does without
        return None, task


def _shown(task: Task) -> Demonstrations | None:
    try:
        return task.demonstrations(EXPERT_EPISODES, VALIDATION_SEED)
    except (TaskError, ImportError, OSError):
        return None


def _check_columns(policy: EnergyPolicy, data: Demonstrations, where: Path, given: bool) -> None:
    if (data.obs_dim, data.act_dim) != policy.columns:
        obs, act = policy.columns
        source = "the data" if given else "the run's data"
        raise ValueError(
            f"{where}: {source} have {data.obs_dim} observation and {data.act_dim} action columns, "
            f"the policy {obs} and {act}"
        )
