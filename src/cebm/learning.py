"""`cebm.fit`: from arrays or demonstrations to a policy, in memory and in one call."""

from contextlib import ExitStack
from time import perf_counter
from typing import Any

import numpy as np
import torch

from cebm.composition import vary
from cebm.demonstrations import Demonstrations
from cebm.policy import EnergyPolicy
from cebm.progress import ProgressBar
from cebm.recipes import Trial, find_trial
from cebm.selection import evaluation_row, score
from cebm.tasks import as_task
from cebm.trainer import Limits, Trainer

LOG_EVERY = 20
"""Steps between two updates of the progress bar."""
MOST_CANDIDATES = 64
"""Candidates in evaluations along the way, at most, as in a run."""


def fit(
    demonstrations: Any,
    actions: Any = None,
    episode_ends: Any = None,
    *,
    trial: Trial | str = "steady",
    steps: int = 2000,
    seed: int = 0,
    device: torch.device | str = "cpu",
    limits: Limits | None = None,
    validation: float | Demonstrations | None = None,
    task: Any = None,
    evaluations: int = 10,
    evaluation_episodes: int = 50,
    execute: int | None = None,
    progress: bool = False,
    **settings: Any,
) -> EnergyPolicy:
    """A policy from `Demonstrations`, or from arrays [steps, obs] and [steps, act]: no files, no run directory.

    `episode_ends` (cumulative, exclusive) tells where episodes of arrays end; without it every row stands for itself.
    `limits`: the lowest and the highest action; by default those of the task.

    Without more the policy of the last step is returned. With `validation` (a share of the episodes to hold out, or
    demonstrations of their own) or a `task` (a `cebm.Task`, the id of a Gymnasium environment, an environment, or a
    function that makes one) the best of `evaluations` policies along the way is returned: by the task's metric in
    `evaluation_episodes` roll-outs on seeds that test nothing, which play `execute` actions of a chunk (None: all), and
    without a task by the energy score of the policy's
    draws on what is held out (see `selection.score`).

    `progress` shows a bar, and what each evaluation found. Further arguments are settings of the trial: `history=2`,
    `horizon=8`, `**{"acting.candidates": 32}`.
    """
    recipe = vary(find_trial(trial) if isinstance(trial, str) else trial, **settings)
    for name, value in (("steps", steps), ("evaluations", evaluations), ("evaluation_episodes", evaluation_episodes)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    data = _demonstrations(demonstrations, actions, episode_ends, recipe)
    training, held_out = _parted(data, validation, seed)
    place = None if task is None else as_task(task)
    if place is not None:
        place.check_policy(data.obs_dim, data.act_dim)
        limits = place.limits if limits is None else limits
    if execute is not None and (place is None or not 1 <= execute <= recipe.inputs.horizon):
        raise ValueError(
            f"execute needs a task, and a number between 1 and the horizon {recipe.inputs.horizon}; got {execute}"
        )
    trainer = Trainer(recipe, training, held_out, seed, device, limits, steps)
    if validation is None and place is None:
        evaluations = 0
    best, began = None, perf_counter()
    with ExitStack() as stack:
        metric = None if place is None else place.metric
        bar = stack.enter_context(ProgressBar("fit", steps, metric)) if progress else None
        for step in range(1, steps + 1):
            log = trainer.step()
            if bar is not None and (step % LOG_EVERY == 0 or step == steps):
                bar({"kind": "train", "step": step, **{name: float(value) for name, value in log.items()}})
            # Evenly spaced, the last step among them.
            if evaluations and step * evaluations // steps > (step - 1) * evaluations // steps:
                policy = trainer.policy()
                row = evaluation_row(trainer, policy, place, evaluation_episodes, MOST_CANDIDATES, execute)
                if best is None or score(row, place) > best[0]:
                    best = score(row, place), policy
                if bar is not None:
                    bar({"kind": "evaluation", "step": step, "seconds": perf_counter() - began, **row})
    return trainer.policy() if best is None else best[1]


def _demonstrations(given: Any, actions: Any, episode_ends: Any, recipe: Trial) -> Demonstrations:
    if isinstance(given, Demonstrations):
        if actions is not None or episode_ends is not None:
            raise ValueError("actions and episode_ends belong to arrays; demonstrations have their own")
        return given
    if actions is None:
        raise ValueError("actions must be given with an array of observations")
    if episode_ends is None:
        if recipe.inputs.history > 1 or recipe.inputs.horizon > 1:
            raise ValueError("episode_ends must be given for a trial with history or horizon")
        episode_ends = np.arange(1, len(given) + 1)
    return Demonstrations.from_arrays(given, actions, episode_ends)


def _parted(
    data: Demonstrations, validation: float | Demonstrations | None, seed: int
) -> tuple[Demonstrations, Demonstrations]:
    """What to train on and what to validate on; the same where nothing is held out."""
    if validation is None:
        return data, data
    if isinstance(validation, Demonstrations):
        if (validation.obs_dim, validation.act_dim) != (data.obs_dim, data.act_dim):
            raise ValueError(
                f"validation has {validation.obs_dim} and {validation.act_dim} columns of observations and actions, "
                f"the demonstrations {data.obs_dim} and {data.act_dim}"
            )
        return data, validation
    if not 0 < validation < 1:
        raise ValueError(f"validation must be a share between 0 and 1, or demonstrations, got {validation}")
    return data.split(validation, seed)
