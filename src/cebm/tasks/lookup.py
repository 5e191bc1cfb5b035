"""From what people and files name, to a task."""

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from cebm.settings import StorageError, from_json
from cebm.tasks.base import Task
from cebm.tasks.forks import Forks
from cebm.tasks.gym import Gym, MadeEnvironments, OneEnvironment
from cebm.tasks.metaworld import MetaWorld
from cebm.tasks.particle import ENV_ID, ParticleTask
from cebm.tasks.pusht import PushT

SHIPPED: dict[str, Callable[[str], Task]] = {
    "forks": lambda variant: _without_variant(Forks(), variant),
    "metaworld": lambda variant: MetaWorld(*variant.split(":", 1)),  # type: ignore[arg-type]
    "push-t": lambda variant: PushT(variant or "keypoints"),  # type: ignore[arg-type]
}
"""Tasks that ship with cebm by their names on the command line, from what follows the name and a colon."""


def as_task(env: Task | str | gymnasium.Env | Callable[[], gymnasium.Env]) -> Task:
    """A task as it is; the id of a registered Gymnasium environment; an environment; a function that makes one.

    In an environment that is given, episodes run one after the other, and it is not closed. A function is called once
    per episode, and once more to read the spaces; what it made is closed.
    """
    if isinstance(env, Task):
        return env
    if isinstance(env, str):
        return Gym(env)
    if isinstance(env, gymnasium.Env):
        return OneEnvironment(env)
    if callable(env):
        return MadeEnvironments(env)
    raise TypeError(
        f"a {type(env).__name__} is no task: give a cebm.tasks.Task, the id of a Gymnasium environment, "
        "an environment, or a function that makes one"
    )


def _without_variant(task: Task, variant: str) -> Task:
    if variant:
        raise ValueError(f"{task.name} has no variant {variant!r}")
    return task


def shipped(text: str) -> Task | None:
    """The task that ships with cebm under this name, as NAME or NAME:VARIANT: push-t, push-t:state; None where no
    shipped task has the name."""
    name, _, variant = text.partition(":")
    return SHIPPED[name](variant) if name in SHIPPED else None


def task_of(metadata: Mapping[str, Any]) -> Task | None:
    """The task that the header of demonstrations names: with its settings and their type under `task`, or the particle
    task with `env` and its settings alone. None where it names no environment, or one that is not ours."""
    stored = metadata.get("task")
    if isinstance(stored, Mapping) and "type" in stored:
        try:
            return from_json(stored, Task, "the demonstrations' header")
        except StorageError as error:
            raise ValueError(str(error)) from error
    if metadata.get("env") != ENV_ID:
        return None
    if "task" not in metadata:
        raise ValueError(f"the demonstrations' header names {ENV_ID}, but the settings under 'task' are missing")
    settings = metadata["task"]
    if not isinstance(settings, Mapping):
        raise ValueError(f"the demonstrations' header: 'task' is {settings!r}, expected the settings of {ENV_ID}")
    known = ParticleTask.__dataclass_fields__
    unknown = sorted(str(name) for name in settings if name not in known)
    if unknown:
        raise ValueError(
            f"the demonstrations' header: 'task' has unknown settings {', '.join(unknown)}; "
            f"{ENV_ID} has {', '.join(known)}"
        )
    try:
        return ParticleTask(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the demonstrations' header: 'task' is wrong: {error}") from error
