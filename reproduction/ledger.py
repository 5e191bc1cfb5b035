"""What a claim is, what a run of it measures, and how its verdict is decided.

A claim names its tasks, judges their results by a rule that is written down before anything runs, and draws them.
Tasks are shared: the same recipe, data and seed is trained once, whatever number of claims asks for it.
"""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

from cebm.demonstrations import Demonstrations
from cebm.envs.particle import ParticleTask
from cebm.evaluation import TEST_SEED, evaluate
from cebm.information import Quadrature, model_information
from cebm.policy import ExplicitPolicy, ImplicitPolicy, load
from cebm.storage import to_json
from cebm.training import DivergedError, Job, demonstrations_of, evaluation_row, load_metrics, restored, resume, train
from cebm.trials import Trial, find_trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Verdict = Literal["holds", "does not hold", "inconclusive"]
Result = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """How much of everything. All trials of a comparison get the same."""

    name: Literal["smoke", "paper"]
    steps: int
    """Training steps, the same for all trials that are compared. The paper does not give them: `ibc` does not get
    better after 1,000 of 10,000 (docs/stability.md), so that 2,000 are past its rise."""
    demonstrations: int
    """The paper's 300."""
    many: int
    """The paper's 2,000, for its validation of the implementation."""
    evaluate_every: int
    evaluation_episodes: int
    """Per point of a learning curve, with 64 candidates; twice as many, held out, measure a finished run."""
    samples: int
    """Repetitions of computations that train nothing."""
    small: bool
    """Tiny networks and batches, to try the code and not the claim."""

    @property
    def half(self) -> int:
        """Half of the training steps, for runs that gain nothing by more."""
        return max(1, self.steps // 2)

    def trial(self, trial: Trial) -> Trial:
        """The trial at this scale."""
        if not self.small:
            return trial
        network = replace(trial.network, width=min(32, trial.network.width))
        return replace(trial, network=network, batch_size=64, candidates=min(16, trial.candidates))


PAPER = Scale("paper", 2000, 300, 2000, 400, 100, 200, False)
SMOKE = Scale("smoke", 30, 20, 40, 15, 10, 10, True)
SCALES = {scale.name: scale for scale in (SMOKE, PAPER)}


@dataclass(frozen=True)
class Training:
    """A run of a recipe, an ordinary run directory."""

    label: str
    """The recipe's name in tables and figures; not part of its identity."""
    job: Job

    @property
    def seed(self) -> int:
        return self.job.seed

    @property
    def settings(self) -> dict[str, Any]:
        """All of them, for its record."""
        return to_json(self.job)

    @property
    def cost(self) -> float:
        """For the time that is left: about how many million rows go through the network, there or back."""
        job, trial = self.job, self.job.trial
        if trial.network.explicit:
            return job.steps * trial.batch_size * 3 / 1e6 + job.steps / 500
        rows = 3.0 * (1 + trial.negative_count)  # there and back, and the weights' gradient
        if trial.negatives in ("chains", "replay", "mas"):
            width = trial.marginal_width if trial.negatives == "mas" else trial.network.width
            shares = 2 * trial.sampler.steps * (width / trial.network.width) ** 2
            rows += trial.negative_count * shares * (3 if trial.through_chain else 1)
        if trial.negatives == "long-chain":
            rows += 2.0 * (trial.burn_in + trial.thin * trial.negative_count)
        evaluations = math.ceil(job.steps / job.evaluate_every)
        episodes = job.evaluation_episodes * (evaluations + 2)  # twice as many test the last policy
        searched = min(job.evaluation_candidates, trial.candidates) * 2 * trial.acting.steps
        acting = episodes * (job.task.steps if job.task else 0) * searched
        return (job.steps * trial.batch_size * rows + acting) / 1e6 + job.steps / 500

    @property
    def key(self) -> str:
        """The name of its directory and its record: what it is, in words and as a digest."""
        settings = json.dumps(unusual(replace(self.job, name="", seed=0)), sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:10]
        return f"{self.job.name}-{digest}-{self.job.seed}"

    def run(self, directory: Path) -> Result:
        """Trains, or goes on, and measures."""
        try:
            if (directory / "run.json").exists():
                resume(directory)
            else:
                train(self.job, directory)
        except DivergedError as error:
            return measure_diverged(self.job, directory, str(error))
        return measure(self.job, directory)


@dataclass(frozen=True)
class Computation:
    """What a claim computes without training."""

    claim: "Claim"
    seed: int
    scale: Scale
    label: str = "computation"
    cost: float = 5.0

    @property
    def key(self) -> str:
        return f"{self.claim.slug}-{self.scale.name}-{self.seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """What it is, as far as words and the scale say it."""
        return {"protocol": self.claim.protocol, "scale": to_json(self.scale)}

    def run(self, directory: Path) -> Result:
        return self.claim.compute(self.scale, self.seed)


Task = Training | Computation


@dataclass(frozen=True)
class Finding:
    """What a claim's results say."""

    verdict: Verdict
    measured: str
    """One sentence with the numbers and their 95 % intervals."""
    numbers: dict[str, Any]
    """The same for machines, and all that the figure needs."""
    comment: str
    """What we think happens: one paragraph."""


class Claim(ABC):
    """One sentence of the paper, and how it is tested. Subclasses are final and have no state."""

    number: ClassVar[int]
    slug: ClassVar[str]
    """File name."""
    section: ClassVar[str]
    """Of the paper."""
    statement: ClassVar[str]
    """The claim in one sentence, our words."""
    protocol: ClassVar[str]
    metric: ClassVar[str]
    rule: ClassVar[str]
    """What decides the verdict, fixed before the runs that it compares."""
    most_seeds: ClassVar[int] = 5
    """Seeds at the paper's scale; fewer where a run takes long."""

    @abstractmethod
    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        """All that is to be run."""

    @abstractmethod
    def judge(self, results: "Results") -> Finding:
        """The verdict, by the rule."""

    @abstractmethod
    def draw(self, finding: Finding, figure: "Figure") -> None:
        """The plot, from the finding's numbers alone."""

    def compute(self, scale: Scale, seed: int) -> Result:
        """The work of a `Computation`."""
        raise TypeError(f"claim {self.slug} computes nothing of its own")


@dataclass(frozen=True)
class Results:
    """The results of a claim's tasks, by label, in the order of their seeds."""

    by_label: dict[str, list[Result]]
    seeds: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, tasks: Iterable[Task], records: dict[str, Result]) -> "Results":
        found: dict[str, list[tuple[int, Result]]] = {}
        for task in tasks:
            if task.key in records:
                found.setdefault(task.label, []).append((task.seed, records[task.key]))
        ordered = {label: sorted(pairs, key=lambda pair: pair[0]) for label, pairs in found.items()}
        return cls(
            {label: [result for _, result in pairs] for label, pairs in ordered.items()},
            {label: [seed for seed, _ in pairs] for label, pairs in ordered.items()},
        )

    def values(self, label: str, *path: str | int) -> list[float]:
        """One number per seed: results[label][seed][path[0]][path[1]]…"""
        values = []
        for result in self.by_label[label]:
            value: Any = result
            for part in path:
                value = value[part]
            values.append(float(value))
        return values

    def curves(
        self, labels: Iterable[str], what: str = "success", of: Literal["curve", "training"] = "curve"
    ) -> dict[str, list[list[tuple[float, float]]]]:
        """What evaluations along training found, or the training's own log, by label and seed, as `drawing.curves`
        takes it."""
        return {
            label: [[(float(row["step"]), row[what]) for row in run[of]] for run in self.by_label[label]]
            for label in labels
        }

    def at_the_end(self, label: str, what: str) -> list[float]:
        """One number per seed: the last that training logged; nothing of a run that diverged before it logged."""
        return [float(run["training"][-1][what]) for run in self.by_label[label] if run["training"]]

    def plateau(self, label: str) -> list[float]:
        """One success per seed: `second_half` of its run."""
        return [second_half(run) for run in self.by_label[label]]

    def distances(self, label: str, after: float = 0.5, until: float = 1.0) -> list[float]:
        """One per seed: how far the negatives were from the demonstrated actions, the mean over the second half of
        training, or another share of it, or over all of a run that did not get there."""
        found = []
        for run in self.by_label[label]:
            begin, end = after * run["steps"], until * run["steps"]
            rows = [row for row in run["training"] if begin < row["step"] <= end] or run["training"]
            found.append(float(np.mean([row["negative_distance"] for row in rows])))
        return found


PLATEAU = (
    "Success on validation episodes, the mean over the evaluations of the second half of training, per seed, as that "
    "of a single moment scatters; 0 for a run that diverges."
)
"""The metric of claims that are decided by `Results.plateau`."""


def second_half(run: Result) -> float:
    """Mean success over the evaluations of the second half of training, as that of a single moment scatters; 0 for a
    run that diverged."""
    if "diverged" in run:
        return 0.0
    successes = [row["success"] for row in run["curve"] if 2 * row["step"] >= run["steps"]]
    return sum(successes) / len(successes)


# ---------------------------------------------------------------------------------------------- trainings


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
    """The run of a trial on the particle task, as all comparisons have it unless they say otherwise. One that is not
    followed is evaluated at its end alone."""
    name = trial if isinstance(trial, str) else label
    assert name is not None, "a trial without a name needs a label"
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


def unusual(settings: Any) -> Any:
    """Settings as JSON without what is as usual, so that they stay the same when a class gains a setting."""
    if not is_dataclass(settings):
        return to_json(settings)
    named = {each.name: (getattr(settings, each.name), each.default) for each in fields(settings)}
    return {
        "type": type(settings).__name__,
        **{name: unusual(value) for name, (value, usual) in named.items() if value != usual},
    }


def measure(job: Job, directory: Path) -> Result:
    """Everything that some claim asks of a run: its curve, its losses, how it ends, and what its energy knows."""
    _, validation, task = demonstrations_of(job)
    last = load(directory / "policy")
    assert task is not None, "experiments are on tasks whose success can be measured"
    return _course(job, directory) | {"last": _tested(last, job, task)} | information(last, validation)


def measure_diverged(job: Job, directory: Path, reason: str) -> Result:
    """A run that ended in numbers that are none is measured as its newest checkpoint has it, which is what a user is
    left with; its curve stands still from there on."""
    trainer, _ = restored(job, directory)
    policy = trainer.policy()
    policy.save(directory / "policy")
    result = measure(job, directory)
    curve = [row for row in result["curve"] if row["step"] <= trainer.step_count]
    standing = _short(evaluation_row(trainer, policy, job, job.task))
    later = [step for step in range(job.evaluate_every, job.steps, job.evaluate_every) if step > trainer.step_count]
    return result | {
        "curve": curve + [{"step": step, **standing} for step in (*later, job.steps)],
        "diverged": reason,
    }


def _tested(policy: ImplicitPolicy | ExplicitPolicy, job: Job, task: ParticleTask) -> dict[str, float]:
    """On held-out episodes."""
    found = evaluate(
        policy,
        task,
        episodes=job.evaluation_episodes * 2,
        seed=TEST_SEED,
        latency_calls=0,
        candidates=min(job.evaluation_candidates, job.trial.candidates),
    )
    summary = found.summary()
    kept = ("success", "min_distance_first", "min_distance_second", "final_distance")
    nearest = [min(row["min_distance_first"], row["min_distance_second"]) for row in found.rows]
    reached = float(np.mean([distance <= task.goal_distance for distance in nearest]))
    return {key: summary[key] for key in kept} | {"reached_a_goal": reached}


def _course(job: Job, directory: Path) -> Result:
    """What a run is, and how it went."""
    rows = load_metrics(directory)
    return {
        "trial": job.name,
        "seed": job.seed,
        "steps": job.steps,
        "curve": [_short(row) for row in rows if row["kind"] == "evaluation"],
        "training": [_short(row) for row in rows if row["kind"] == "train"],
        "seconds_per_step": _seconds_per_step(rows),
    }


def information(policy: ImplicitPolicy | ExplicitPolicy, validation: Demonstrations, rows: int = 64) -> Result:
    """H(y|x) and I(x; y) of the last policy's energy at validation observations, one per episode, by quadrature, in
    nats; actions are normalised. None beyond two dimensions. `coarse` is the share of observations whose valley is too
    narrow for the nodes, so that its entropy is uncertain."""
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
    """A row of metrics without what takes room: five digits do."""
    return {
        key: float(f"{value:.5g}") if isinstance(value, float) else value
        for key, value in row.items()
        if key not in ("kind", "steps_per_second", "success_low", "success_high", "chain_energy_first", "acceptance")
    }


def _seconds_per_step(rows: list[dict[str, Any]]) -> float | None:
    speeds = [row["steps_per_second"] for row in rows if row["kind"] == "train"]
    return 1 / float(np.median(speeds)) if speeds else None


# ---------------------------------------------------------------------------------------------- statistics

# Student's t, two-sided 95 %, by degrees of freedom.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % interval (Student's t)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """Without an interval (infinite) for a single value."""
        numbers = np.asarray(values, np.float64)
        centre = float(numbers.mean())
        if len(numbers) < 2:
            return cls(centre, -math.inf, math.inf)
        freedom = len(numbers) - 1
        quantile = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.5 / freedom
        half = quantile * float(numbers.std(ddof=1)) / math.sqrt(len(numbers))
        return cls(centre, centre - half, centre + half)

    @classmethod
    def of_difference(cls, one: Sequence[float], other: Sequence[float]) -> "Interval":
        """Of one − other, paired by seed: both were trained on the same demonstrations."""
        return cls.of(minus(one, other))

    @property
    def half(self) -> float:
        """Half of its width; 0 for a single value, which has none."""
        return self.high - self.mean if math.isfinite(self.high) else 0.0

    def percent(self) -> str:
        return f"{100 * self.mean:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"

    def points(self) -> str:
        """A difference of percentages."""
        return f"{100 * self.mean:+.1f} points ({100 * self.low:+.1f} to {100 * self.high:+.1f})"

    def number(self) -> str:
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"

    def to_json(self) -> list[float | None]:
        """None for what is infinite, which JSON does not know."""
        return [value if math.isfinite(value) else None for value in (self.mean, self.low, self.high)]


def minus(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Seed by seed."""
    return [a - b for a, b in zip(one, other, strict=True)]


def percent(shares: Sequence[float]) -> str:
    """The mean of shares of 1."""
    return f"{100 * sum(shares) / len(shares):.0f} %"


def decide(interval: Interval, at_least: float = 0.0) -> Verdict:
    """The rule of all comparisons: a quantity that should exceed `at_least` holds where its whole 95 % interval does,
    does not hold where none of it does, and is inconclusive in between."""
    if interval.low > at_least:
        return "holds"
    return "does not hold" if interval.high < at_least else "inconclusive"


def all_parts(parts: Iterable[Verdict]) -> Verdict:
    """The verdict of a claim of several parts: holds where all do, does not hold where one does not."""
    verdicts = list(parts)
    if "does not hold" in verdicts:
        return "does not hold"
    return "inconclusive" if "inconclusive" in verdicts else "holds"
