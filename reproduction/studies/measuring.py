"""What studies measure of a finished run, beside the learning curve."""

import time
from typing import Any

import numpy as np
import torch

from cebm.evaluation import TEST_SEED, evaluate
from cebm.information import Quadrature
from cebm.negatives.marginal import MarginalActionSampler
from cebm.policy import EnergyPolicy
from cebm.runs import Job, material_of, trainer_of
from cebm.tasks import Task
from cebm.trainer import Trainer

EPISODES = 200
"""Held-out episodes."""
BINS = (1, 2, 4, 8, 16)
"""Cells of histograms of actions, in each dimension."""


def success(policy: EnergyPolicy, task: Task | None, candidates: int | None = None, steps: int | None = None) -> float:
    """Share of held-out episodes that succeed with this effort; without one, with the policy's own."""
    if task is None:
        raise ValueError("success needs a task, and this run has none")
    effort: dict[str, Any] = {
        name: value for name, value in (("candidates", candidates), ("steps", steps)) if value is not None
    }
    found = evaluate(policy, task, episodes=EPISODES, seed=TEST_SEED, latency_calls=0, **effort)
    return float(found.summary()["success"])


def seconds_per_step(job: Job, steps: int = 8, skipped: int = 2) -> float:
    """CPU seconds of a training step: the median of some, which other work on the machine disturbs little."""
    trainer = trainer_of(job)
    taken = []
    for step in range(skipped + steps):
        began = time.process_time()
        trainer.step()
        if step >= skipped:
            taken.append(time.process_time() - began)
    return float(np.median(taken))


def marginal_fit(trainer: Trainer, job: Job) -> dict[str, float]:
    """How well the marginal energy of a trial with a marginal sampler knows p(y): the mean log-density, in nats, of
    validation actions by p_γ(y) ∝ exp(−E_γ(y)) on the box, by the best of some histograms of the training actions
    (with one count added to each cell), and by the uniform density. Two dimensions only; nothing of a trial
    without such a sampler."""
    found = [module for module in trainer.learner.modules() if isinstance(module, MarginalActionSampler)]
    if not found or trainer.spec.act_dim != 2:
        return {}
    marginal = found[0].marginal
    material = material_of(job)
    limit = trainer.act_box.limit
    train, held_out = (
        trainer.act_box.normalise(torch.from_numpy(np.ascontiguousarray(data.actions)))
        for data in (material.training, material.validation)
    )
    quadrature = Quadrature((-limit,) * 2, (limit,) * 2, 256)
    with torch.no_grad():
        nothing = held_out.new_empty(1, 0)
        log_z = quadrature.log_partition(marginal, nothing)
        energies = marginal.energies(marginal.encode(nothing), held_out.unsqueeze(0))
        learnt = float((-energies - log_z).mean())
    return {
        "log p, learnt marginal": learnt,
        "log p, histogram": max(_by_histogram(train.numpy(), held_out.numpy(), limit, bins) for bins in BINS),
        "log p, uniform": float(-2 * np.log(2 * limit)),
    }


def _by_histogram(train: np.ndarray, held_out: np.ndarray, limit: float, bins: int) -> float:
    """Mean log-density of actions by a histogram of others on [−limit, limit]²."""
    edges = np.linspace(-limit, limit, bins + 1)
    counts, _, _ = np.histogram2d(train[:, 0], train[:, 1], bins=bins, range=((-limit, limit), (-limit, limit)))
    density = (counts + 1) / (counts + 1).sum() / (edges[1] - edges[0]) ** 2
    cells = np.clip(np.digitize(held_out, edges) - 1, 0, bins - 1)
    return float(np.log(density[cells[:, 0], cells[:, 1]]).mean())


def curve(rows: list[dict[str, Any]]) -> list[list[float]]:
    """Steps and success of the evaluations along training."""
    return [[row["step"], row["success"]] for row in rows if row["kind"] == "evaluation"]
