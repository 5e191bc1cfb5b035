"""Which checkpoint of a run is the best: what is measured along the way, and by what it is chosen."""

from typing import Any

from cebm.evaluation import VALIDATION_SEED, evaluate
from cebm.policy import EnergyPolicy
from cebm.tasks import Task
from cebm.trainer import Trainer

TIMES = ("seconds", "steps_per_second", "action_ms_p50", "action_ms_p99")
"""Metrics that differ between two otherwise identical runs."""
DRAWS = 4
"""Actions that the policy draws per validation pair for its energy score."""


def score(row: dict[str, Any], task: Task | None) -> list[float]:
    """What a checkpoint is chosen by, more is better: the task's metric, then the action error. Without a task the
    energy score of the policy's draws, a proper score: its mean is lowest for the policy that draws as the demonstrator
    does. The action error is lowest for the mean (or median) of what was demonstrated, which may be an action that
    nobody takes. Rows of earlier versions have no energy score: they are compared by the action error, and come after
    those that have one."""
    if task is not None:
        return [float(row.get(task.metric, 0.0)), -row["validation_action_error"]]
    if "validation_energy_score" in row:
        return [1.0, -row["validation_energy_score"]]
    return [0.0, -row["validation_action_error"]]


def evaluation_row(
    trainer: Trainer,
    policy: EnergyPolicy,
    task: Task | None,
    episodes: int,
    most_candidates: int,
    execute: int | None = None,
) -> dict[str, float]:
    """Errors and information on demonstrations, and the task's metrics on validation episodes where there is one, in
    which `execute` actions of a chunk are played (None: all). A
    ValueError where the task's own metric is not measured in every episode: nothing could choose."""
    most = getattr(policy.acting, "candidates", None)  # a way to act without candidates takes no effort
    candidates = None if most is None else min(most_candidates, most)
    if task is None:
        return trainer.validate(policy, candidates, draws=DRAWS)
    row = trainer.validate(policy, candidates)
    effort: dict[str, Any] = {"execute": execute} | ({} if candidates is None else {"candidates": candidates})
    result = evaluate(policy, task, episodes=episodes, seed=VALIDATION_SEED, latency_calls=0, **effort)
    found = result.summary() | {task.metric: result.score(task.metric)}
    about = {"episodes", "seed", "successes", "length", *TIMES}
    wanted = {name for name in found if name not in about and not name.endswith("_se")} | {f"{task.metric}_se"}
    return row | {name: value for name, value in found.items() if name in wanted}
