"""Training runs: their scale, the name of their directory, and the measurements that claims take from them.

Claims see a run directory only through this module.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from cebm.composition import settings_of, vary
from cebm.demonstrations import Demonstrations
from cebm.evaluation import TEST_SEED, evaluate
from cebm.information import Quadrature, model_information
from cebm.loading import load
from cebm.policy import EnergyPolicy
from cebm.recipes import Trial, find_trial
from cebm.runs import DivergedError, Job, load_metrics, material_of, restored, resume, train
from cebm.selection import evaluation_row
from cebm.settings import to_json
from cebm.sweep.studies import digest
from cebm.tasks import ParticleTask

Result = dict[str, Any]
"""What a task measured, as JSON."""

ALIASES: dict[str, str] = json.loads((Path(__file__).parent / "aliases.json").read_text())
"""Digests of settings as they are written today, and those of the records made before that stand for them."""


@dataclass(frozen=True)
class Scale:
    """The size of an experiment. All trials that are compared have the same one."""

    name: Literal["smoke", "paper"]
    steps: int
    """Training steps. The paper does not give a number. `ibc` stops improving after 1,000 of 10,000 steps
    (docs/stability.md), so 2,000 are enough."""
    demonstrations: int
    """Training episodes of most claims; the paper has 300."""
    many: int
    """Training episodes of the claims that need many; the paper has 2,000 where it validates its implementation."""
    evaluate_every: int
    """Training steps between two points of a learning curve."""
    evaluation_episodes: int
    """Validation episodes per point of a learning curve, with 64 candidates per action. A finished run is tested on
    twice as many held-out episodes."""
    samples: int
    """Repetitions in computations that train nothing."""
    small: bool
    """Use tiny networks and batches, which test the code and say nothing about the claim."""

    @property
    def half(self) -> int:
        """Half of the training steps, for runs that do not improve in the second half."""
        return max(1, self.steps // 2)

    def trial(self, trial: Trial) -> Trial:
        """The trial at this scale."""
        if not self.small:
            return trial
        small = {
            name: min(32, value)
            for name, value in settings_of(trial).items()
            if name.startswith("energy.") and name.endswith(".width")
        }
        small["optimiser.batch_size"] = 64
        if hasattr(trial.acting, "candidates"):
            small["acting.candidates"] = min(16, trial.acting.candidates)
        return vary(trial, **small)


PAPER = Scale("paper", 2000, 300, 2000, 400, 100, 200, False)
SMOKE = Scale("smoke", 30, 20, 40, 15, 10, 10, True)
SCALES = {scale.name: scale for scale in (SMOKE, PAPER)}


@dataclass(frozen=True)
class Training:
    """A task that trains a recipe in an ordinary run directory and measures the result."""

    label: str
    """The recipe's name in tables and figures. Two trainings with the same job are the same task, whatever their
    labels are."""
    job: Job

    @property
    def seed(self) -> int:
        return self.job.seed

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the job, for the record."""
        return to_json(self.job)

    @property
    def cost(self) -> float:
        """Estimated work, to tell the remaining time: million rows through the network, forward or backward."""
        job, trial, batch = self.job, self.job.trial, self.job.trial.optimiser.batch_size
        source = getattr(trial.objective, "source", None)
        if source is None:
            return job.steps * batch * 3 / 1e6 + job.steps / 500
        count, width = trial.objective.count, settings_of(trial)["energy.width"]
        rows = 3.0 * (1 + count)  # forward, backward, and the gradient of the weights
        if hasattr(source, "burn_in"):
            rows += 2.0 * (source.burn_in + source.thin * count)
        elif hasattr(source, "sampler"):  # chains, of the energy or of one of the source's own
            shares = 2 * source.sampler.steps * (getattr(source, "width", width) / width) ** 2
            rows += count * shares * (3 if getattr(source, "keep_graph", False) else 1)
        evaluations = math.ceil(job.steps / job.evaluate_every)
        episodes = job.evaluation_episodes * (evaluations + 2)  # twice as many test the last policy
        search = settings_of(trial.acting)
        searched = min(job.evaluation_candidates, search["candidates"]) * 2 * search["sampler.steps"]
        acting = episodes * getattr(job.task, "steps", 0) * searched
        return (job.steps * batch * rows + acting) / 1e6 + job.steps / 500

    @property
    def key(self) -> str:
        """The name of the run directory and of the record: trial, digest of the settings, seed. A record that was made
        when trials were written in other words keeps the digest that it has (`ALIASES`)."""
        digest = self.digest
        return f"{self.job.name}-{ALIASES.get(digest, digest)}-{self.job.seed}"

    @property
    def digest(self) -> str:
        """Of all settings but the name and the seed."""
        return digest(self.job)

    def run(self, directory: Path) -> Result:
        """Train, or resume a training that was stopped, then measure."""
        try:
            if (directory / "run.json").exists():
                resume(directory)
            else:
                train(self.job, directory)
        except DivergedError as error:
            return measure_diverged(self.job, directory, str(error))
        return measure(self.job, directory)


def training(
    trial: str | Trial,
    scale: Scale,
    seed: int,
    label: str | None = None,
    *,
    task: ParticleTask | None = None,
    episodes: int | None = None,
    steps: int | None = None,
    followed: bool = True,
) -> Training:
    """The training of a trial on the particle task with the settings that most comparisons use. With `followed=False`
    it is evaluated at its end only."""
    name = trial if isinstance(trial, str) else label
    if name is None:
        raise ValueError("label must be given for a trial that has no name")
    steps = steps or scale.steps
    job = Job(
        name,
        scale.trial(find_trial(trial) if isinstance(trial, str) else trial),
        task or ParticleTask(),
        episodes=episodes or scale.demonstrations,
        steps=steps,
        seed=seed,
        log_every=max(1, steps // 60),
        evaluate_every=scale.evaluate_every if followed else steps,
        evaluation_episodes=scale.evaluation_episodes,
    )
    return Training(label or name, job)


def bare(name: str) -> Trial:
    """The trial with its loss as the equation has it, without the anchor of the energies."""
    return vary(find_trial(name), **{"objective.anchor": 0.0})


def measure(job: Job, directory: Path) -> Result:
    """Everything that any claim needs from a finished run: learning curve, losses, success of the last policy, entropy
    and mutual information of its energy."""
    validation, task = material_of(job).validation, job.task
    last = load(directory / "policy")
    if not isinstance(task, ParticleTask):
        raise ValueError(f"run {job.name}: a claim needs a task whose success can be measured, this run has none")
    found = _course(job, directory) | {"last": _tested(last, job, task)} | information(last, validation)
    if job.trial.optimiser.average:
        trainer, _ = restored(job, directory)
        raw = trainer.policy(averaged=False)
        found["raw"] = _tested(raw, job, task)
        found["all candidates"] = {
            name: _tested(policy, job, task, fewer=False) for name, policy in (("averaged", last), ("raw", raw))
        }
    return found


def measure_diverged(job: Job, directory: Path, reason: str) -> Result:
    """Measure a run that stopped at a NaN or infinite loss. Its newest checkpoint counts, as that is what a user has;
    from there to the last step, the learning curve repeats the checkpoint's evaluation."""
    trainer, _ = restored(job, directory)
    policy = trainer.policy()
    policy.save(directory / "policy")
    result = measure(job, directory)
    curve = [row for row in result["curve"] if row["step"] <= trainer.step_count]
    standing = _short(evaluation_row(trainer, policy, job.task, job.evaluation_episodes, job.evaluation_candidates))
    later = [step for step in range(job.evaluate_every, job.steps, job.evaluate_every) if step > trainer.step_count]
    return result | {
        "curve": curve + [{"step": step, **standing} for step in (*later, job.steps)],
        "diverged": reason,
    }


def _tested(policy: EnergyPolicy, job: Job, task: ParticleTask, *, fewer: bool = True) -> dict[str, float]:
    """Success and distances of a policy on held-out episodes, with the candidates of the learning curves or, without
    `fewer`, with all those that its trial acts with."""
    most = getattr(job.trial.acting, "candidates", None)
    effort = {} if most is None or not fewer else {"candidates": min(job.evaluation_candidates, most)}
    found = evaluate(
        policy,
        task,
        episodes=job.evaluation_episodes * 2,
        seed=TEST_SEED,
        latency_calls=0,
        **effort,
    )
    summary = found.summary()
    kept = ("success", "min_distance_first", "min_distance_second", "final_distance")
    nearest = [min(row["min_distance_first"], row["min_distance_second"]) for row in found.rows]
    reached = float(np.mean([distance <= task.goal_distance for distance in nearest]))
    return {key: summary[key] for key in kept} | {"reached_a_goal": reached}


def _course(job: Job, directory: Path) -> Result:
    """Name, seed, learning curve, training log and speed of a run."""
    rows = load_metrics(directory)
    return {
        "trial": job.name,
        "seed": job.seed,
        "steps": job.steps,
        "curve": [_short(row) for row in rows if row["kind"] == "evaluation"],
        "training": [_short(row) for row in rows if row["kind"] == "train"],
        "seconds_per_step": _seconds_per_step(rows),
    }


def information(policy: EnergyPolicy, validation: Demonstrations, rows: int = 64) -> Result:
    """H(y|x) and I(x; y) of a policy's energy over normalised actions, in nats, by quadrature at `rows` validation
    observations, one per episode. All values are None for actions of more than two dimensions. `coarse` is the share of
    observations whose valley is too narrow for the quadrature's nodes; their entropy is uncertain."""
    numbers: tuple[float | None, ...] = (None, None, None)
    if policy.energy.act_dim <= 2:
        windows = validation.windows(policy.history, policy.horizon)
        chosen = windows.spread(rows, 0)
        obs = policy.obs_box.normalise(torch.from_numpy(np.ascontiguousarray(windows[chosen][0])))
        limit, dim = policy.act_box.limit, policy.energy.act_dim
        quadrature = Quadrature((-limit,) * dim, (limit,) * dim, 2048 if dim == 1 else 384)
        numbers = model_information(policy.energy, obs, quadrature)
    return dict(zip(("conditional_entropy", "mutual_information", "coarse"), numbers, strict=True))


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics for a record: five significant digits, and only the columns that claims use."""
    return {
        key: float(f"{value:.5g}") if isinstance(value, float) else value
        for key, value in row.items()
        if key not in ("kind", "steps_per_second", "success_low", "success_high", "chain_energy_first", "acceptance")
    }


def _seconds_per_step(rows: list[dict[str, Any]]) -> float | None:
    speeds = [row["steps_per_second"] for row in rows if row["kind"] == "train"]
    return 1 / float(np.median(speeds)) if speeds else None
