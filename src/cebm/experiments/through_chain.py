"""Claim 13: what back-propagation through the chain of negatives costs, and what it brings."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cebm.energy import EnergyModel, FeedForwardEnergy, Obs
from cebm.evaluation import TEST_SEED, VALIDATION_SEED, evaluate
from cebm.experiments.ledger import (
    Claim,
    Computation,
    Finding,
    Interval,
    Result,
    Results,
    Scale,
    Task,
    decide,
    training,
)
from cebm.negatives import Negatives, Positives, ShortChains
from cebm.samplers import run
from cebm.training import Job, Trainer, demonstrations_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMED = 20
"""Steps of each kind whose time is taken, in turns, on the same machine at the same moment."""


@dataclass(frozen=True)
class ThroughChains:
    """`ShortChains` whose negatives ỹ(θ) keep the graph of every step: a loss of them has the gradient of the chain."""

    chains: ShortChains

    def sample(
        self, energy: EnergyModel, obs: Obs, actions: Positives, n: int, generator: torch.Generator
    ) -> Negatives:
        start = self.chains.start.sample(energy, obs, actions, n, generator).actions
        chain = run(self.chains.sampler, energy, energy.encode(obs), start, generator, keep_graph=True)
        return Negatives(chain.actions, obs, info=chain.info)


class ThroughChain(Claim):
    number = 13
    slug = "through-chain"
    section = "Sec. III"
    statement = (
        "To be correct, training should back-propagate through the entire chain of its negatives: in our reading, a "
        "policy trained that way is better than one that holds the negatives constant."
    )
    protocol = (
        "`ibc` as it is, its negatives held constant, and `ibc` with the graph of all 10 steps of its chains kept, so "
        "that InfoNCE is differentiated through them too. Same demonstrations of the 2-D particle task, same initial "
        "weights, batches, starts and noise, same number of steps, same search when acting. A run whose loss or "
        "gradient ceases to be finite ends there and is judged by its last weights. Times are those of 20 steps of "
        "each kind in turns, on one thread."
    )
    metric = (
        "Success of the last policy on held-out episodes, per seed, the difference paired by seed. For the cost, the "
        "ratio of the median times of a training step."
    )
    rule = (
        "Holds where the 95 % interval of success(through the chain) − success(held constant) lies above 0, does not "
        "hold where it lies below, else inconclusive. The cost is reported and decides nothing."
    )
    most_seeds = 3

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        tasks: list[Task] = [training("ibc", scale, seed) for seed in seeds]
        return tasks + [Computation(self, seed, scale, "through the chain", 3.5 * scale.steps) for seed in seeds]

    def compute(self, scale: Scale, seed: int) -> Result:
        job = training("ibc", scale, seed).job
        trainer = through_trainer(job)
        result: Result = {
            "seconds_per_step": seconds_per_step(job, min(TIMED, scale.steps)),
            "extra_gradient": {"first": extra_gradient(trainer)},
            "curve": [],
            "diverged": None,
        }
        for step in range(1, job.steps + 1):
            try:
                trainer.step()
            except (FloatingPointError, ValueError) as error:
                result["diverged"] = f"step {step}: {error}"
            if step % job.evaluate_every == 0 or step == job.steps or result["diverged"] is not None:
                success = _success(trainer, job, VALIDATION_SEED, job.evaluation_episodes)
                result["curve"].append({"step": step, "success": success})
            if result["diverged"] is not None:
                break
        if result["diverged"] is None:
            result["extra_gradient"]["last"] = extra_gradient(trainer)
        # As `measure` has it for the runs to compare with.
        result["last"] = {"success": _success(trainer, job, TEST_SEED, 2 * job.evaluation_episodes)}
        return result

    def judge(self, results: Results) -> Finding:
        through, constant = (results.values(label, "last", "success") for label in ("through the chain", "ibc"))
        difference = Interval.of_difference(through, constant)
        verdict = decide(difference)
        computed = results.by_label["through the chain"]
        seconds = {
            kind: results.values("through the chain", "seconds_per_step", kind) for kind in ("through", "constant")
        }
        ratio = Interval.of([a / b for a, b in zip(seconds["through"], seconds["constant"], strict=True)])
        ended = [result["diverged"] for result in computed if result["diverged"] is not None]
        last = [result["extra_gradient"].get("last", result["extra_gradient"]["first"]) for result in computed]
        extra = {part: [gradients[part] for gradients in last] for part in ("observation", "rest")}
        cause = (
            "InfoNCE falls when the negatives' energies rise, so the gradient through the chain rewards energies on "
            "which the chain finds no low ones; and as a ReLU network is linear in pieces, none of it reaches the "
            "weights of the observation. "
        )
        ending = {
            "holds": "It brings more than this would make one expect.",
            "does not hold": "To be the gradient of the loss as written does not make it a better one.",
            "inconclusive": "Whether this helps or harms a policy, these seeds do not tell apart.",
        }
        return Finding(
            verdict,
            f"Success {Interval.of(through).percent()} through the chain and {Interval.of(constant).percent()} with "
            f"negatives held constant: {difference.points()}. A step takes {ratio.number()} times as long. At the end "
            f"the chain changes the gradient of the weights that do not see the observation by "
            f"{100 * np.mean(extra['rest']):.1f} % of its norm, and that of those that do by "
            f"{100 * np.mean(extra['observation']):.1f} %."
            + (f" Runs that ended early: {'; '.join(ended)}." if ended else ""),
            {
                "success": {"through the chain": through, "held constant": constant},
                "difference": difference.to_json(),
                "seconds_per_step": seconds,
                "ratio": ratio.to_json(),
                "extra_gradient": extra,
                "diverged": ended,
                "curves": {
                    "through the chain": _curves(computed),
                    "held constant": _curves(results.by_label["ibc"]),
                },
            },
            cause + ending[verdict],
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from cebm.experiments.drawing import COLOURS, bars

        left, right = figure.subplots(1, 2, width_ratios=[2, 1])
        for colour, (label, runs) in zip(COLOURS, finding.numbers["curves"].items(), strict=False):
            for i, points in enumerate(runs):  # one line per seed: a run may end before the others
                left.plot(*zip(*points, strict=True), color=colour, alpha=0.7, label=label if i == 0 else None)
        left.set_xlabel("training step")
        left.set_ylabel("success")
        left.legend(frameon=False, fontsize=8)
        seconds = finding.numbers["seconds_per_step"]
        milliseconds = {
            label: [1e3 * value for value in seconds[kind]]
            for label, kind in (("through\nthe chain", "through"), ("held\nconstant", "constant"))
        }
        bars(right, milliseconds, "time of a step, ms")


def constant_trainer(job: Job) -> Trainer:
    """As the run of the job has it."""
    demonstrations, validation, task = demonstrations_of(job)
    limits = (0.0, 1.0) if task is not None else None
    return Trainer(job.trial, demonstrations, validation, job.seed, job.device, limits, job.steps)


def through_trainer(job: Job) -> Trainer:
    """The same but for the graph of its chains."""
    trainer = constant_trainer(job)
    assert isinstance(trainer.learner.source, ShortChains)
    trainer.learner.source = ThroughChains(trainer.learner.source)
    return trainer


def seconds_per_step(job: Job, steps: int) -> dict[str, float]:
    """Medians over `steps` of each, in turns; the first of each warms up and does not count."""
    trainers = {"through": through_trainer(job), "constant": constant_trainer(job)}
    times: dict[str, list[float]] = {kind: [] for kind in trainers}
    for _ in range(steps + 1):
        for kind, trainer in trainers.items():
            began = perf_counter()
            trainer.step()
            times[kind].append(perf_counter() - began)
    return {kind: float(np.median(values[1:])) for kind, values in times.items()}


def extra_gradient(trainer: Trainer) -> dict[str, float]:
    """‖g − g₀‖/‖g₀‖ on a batch of the data, where g is the gradient through the chain and g₀ that with the same
    negatives held constant: of the first layer's bias and its weights of the observation, and of all other weights."""
    learner, source = trainer.learner, trainer.learner.source
    assert isinstance(source, ThroughChains)
    windows = trainer.training
    rows = np.linspace(0, len(windows) - 1, trainer.trial.batch_size).astype(int)
    obs, actions = (torch.from_numpy(np.ascontiguousarray(part)).to(trainer.device) for part in windows[rows])
    obs, actions = trainer.obs_box.normalise(obs), trainer.act_box.normalise(actions)
    found = []
    for learner.source in (source.chains, source):  # ends with the one that was there
        loss, _ = learner.loss(obs, actions, torch.Generator(trainer.device).manual_seed(trainer.seed))
        found.append(_gradients(learner.conditional, loss))
    constant, through = found
    return {part: float((through[part] - constant[part]).norm() / constant[part].norm()) for part in constant}


def _gradients(energy: EnergyModel, loss: Tensor) -> dict[str, Tensor]:
    assert isinstance(energy, FeedForwardEnergy)
    first, seen = energy.first, energy.obs_dim
    others = [p for p in energy.parameters() if p is not first.weight and p is not first.bias]
    weight, bias, *rest = torch.autograd.grad(loss, [first.weight, first.bias, *others])
    return {
        "observation": torch.cat([weight[:, :seen].flatten(), bias]),
        "rest": torch.cat([weight[:, seen:].flatten(), *(gradient.flatten() for gradient in rest)]),
    }


def _success(trainer: Trainer, job: Job, seed: int, episodes: int) -> float:
    """As evaluations of a training have it."""
    assert job.task is not None
    candidates = min(job.evaluation_candidates, job.trial.candidates)
    found = evaluate(trainer.policy(), job.task, episodes=episodes, seed=seed, latency_calls=0, candidates=candidates)
    return float(found.summary()["success"])


def _curves(computed: Sequence[Result]) -> list[list[tuple[int, float]]]:
    return [[(row["step"], row["success"]) for row in result["curve"]] for result in computed]
