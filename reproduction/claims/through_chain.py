"""Claim 13: what back-propagation through the chain of negatives costs, and what it brings."""

import math
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cebm.energies import FeedForwardEnergy
from cebm.energies.base import EnergyModel
from cebm.recipes import Trial, find_trial, vary
from cebm.runs import Job, trainer_of
from cebm.trainer import Trainer
from reproduction.intervals import Interval, decide
from reproduction.ledger import Claim, Computation, Finding, Results, Task
from reproduction.prose import through_chain as prose
from reproduction.trainings import Result, Scale, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABEL = "ibc-through-chain"
THROUGH = vary(find_trial("ibc"), keep_graph=True)
LATER = 100
"""Training steps after which the extra gradient is measured a second time."""
TIMED = 20
"""Number of timed steps of each kind. The two kinds take turns, so that a busy machine slows both."""


class ThroughChain(Claim):
    number = 13
    slug = "through-chain"
    section = "Sec. III"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE
    most_seeds = 3

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        tasks: list[Task] = []
        for seed in seeds:
            tasks += [training("ibc", scale, seed), training(THROUGH, scale, seed, LABEL)]
            tasks.append(Computation(self, seed, scale))
        return tasks

    def compute(self, scale: Scale, seed: int) -> Result:
        constant, through = (job_of(trial, scale, seed) for trial in (find_trial("ibc"), THROUGH))
        trainer = trainer_of(through)
        extra = {"first": extra_gradient(trainer)}
        for _ in range(min(LATER, scale.steps)):
            trainer.step()
        return {
            "seconds_per_step": seconds_per_step({"through": through, "constant": constant}, min(TIMED, scale.steps)),
            "extra_gradient": extra | {"later": extra_gradient(trainer)},
        }

    def judge(self, results: Results) -> Finding:
        through, constant = (results.plateau(label) for label in (LABEL, "ibc"))
        difference = Interval.of_difference(through, constant)
        verdict = decide(difference)
        seconds = {kind: results.values("computation", "seconds_per_step", kind) for kind in ("through", "constant")}
        ratio = Interval.of([a / b for a, b in zip(seconds["through"], seconds["constant"], strict=True)])
        extra = {
            part: results.values("computation", "extra_gradient", "later", part) for part in ("observation", "rest")
        }
        end = {
            what: {label: Interval.of(results.at_the_end(label, what)) for label in (LABEL, "ibc")}
            for what in ("info_nce", "gradient_norm_last")
        }
        losses, norms = end["info_nce"], end["gradient_norm_last"]
        facts = prose.Facts(
            through=prose.Run(Interval.of(through), losses[LABEL], norms[LABEL]),
            constant=prose.Run(Interval.of(constant), losses["ibc"], norms["ibc"]),
            difference=difference,
            ratio=ratio,
            later=LATER,
            extra={part: float(np.mean(values)) for part, values in extra.items()},
            guessing=math.log(1 + THROUGH.objective.count),
            flat=norms[LABEL].high < norms["ibc"].low,
            lower=losses[LABEL].low > losses["ibc"].high,
        )
        return Finding(
            verdict,
            prose.measured(facts),
            {
                "success": {LABEL: through, "ibc": constant},
                "difference": difference.to_json(),
                "seconds_per_step": seconds,
                "ratio": ratio.to_json(),
                "extra_gradient": extra,
                "end": {what: {k: found.to_json() for k, found in by.items()} for what, by in end.items()},
                "curves": results.curves((LABEL, "ibc")),
            },
            prose.comment(facts, verdict),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import bars, curves

        left, right = figure.subplots(1, 2, width_ratios=[2, 1])
        curves(left, finding.numbers["curves"], "success")
        seconds = finding.numbers["seconds_per_step"]
        milliseconds = {
            label: [1e3 * value for value in seconds[kind]]
            for label, kind in (("through\nthe chain", "through"), ("held\nconstant", "constant"))
        }
        bars(right, milliseconds, "time of a step, ms")


def job_of(trial: Trial, scale: Scale, seed: int) -> Job:
    return training(trial, scale, seed, LABEL).job


def seconds_per_step(jobs: dict[str, Job], steps: int) -> dict[str, float]:
    """Median time of a step of each job, over `steps` steps in turns. The first step of each job is a warm-up and does
    not count."""
    trainers = {kind: trainer_of(job) for kind, job in jobs.items()}
    times: dict[str, list[float]] = {kind: [] for kind in trainers}
    for _ in range(steps + 1):
        for kind, trainer in trainers.items():
            began = perf_counter()
            trainer.step()
            times[kind].append(perf_counter() - began)
    return {kind: float(np.median(values[1:])) for kind, values in times.items()}


def extra_gradient(trainer: Trainer) -> dict[str, float]:
    """‖g − g₀‖/‖g₀‖ on one batch, where g is the gradient through the chain and g₀ the gradient with the same negatives
    held constant. `observation` is that of the first layer's bias and its weights of the observation, `rest` that of
    all other weights."""
    learner, objective = trainer.learner, trainer.learner.objective
    if not getattr(objective.source, "keep_graph", False):
        raise TypeError(f"the trainer's negatives must keep the graph of their chains, got {objective.source}")
    windows = trainer.training
    rows = np.linspace(0, len(windows) - 1, trainer.trial.optimiser.batch_size).astype(int)
    obs, actions = (torch.from_numpy(np.ascontiguousarray(part)).to(trainer.device) for part in windows[rows])
    obs, actions = trainer.obs_box.normalise(obs), trainer.act_box.normalise(actions)
    found = []
    for learner.objective in (vary(objective, keep_graph=False), objective):  # the original comes last, and stays
        loss, _ = learner.loss(obs, actions, torch.Generator(trainer.device).manual_seed(trainer.seed))
        found.append(_gradients(learner.energy, loss))
    constant, through = found
    return {part: float((through[part] - constant[part]).norm() / constant[part].norm()) for part in constant}


def _gradients(energy: EnergyModel, loss: Tensor) -> dict[str, Tensor]:
    if not isinstance(energy, FeedForwardEnergy):
        raise TypeError(f"energy must be a FeedForwardEnergy, got {type(energy).__name__}")
    first, seen = energy.first, energy.obs_dim
    others = [p for p in energy.parameters() if p is not first.weight and p is not first.bias]
    weight, bias, *rest = torch.autograd.grad(loss, [first.weight, first.bias, *others])
    return {
        "observation": torch.cat([weight[:, :seen].flatten(), bias]),
        "rest": torch.cat([weight[:, seen:].flatten(), *(gradient.flatten() for gradient in rest)]),
    }
