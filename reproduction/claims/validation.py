"""Claim 12: the implementation is validated, by overfitting, by full training, and against reference curves."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cebm.energies.base import EnergyModel, Obs
from cebm.evaluation import TEST_SEED, VALIDATION_SEED, evaluate
from cebm.negatives import Negatives, Positives, ShortChains, Source, Uniform
from cebm.optimisers import Decay
from cebm.recipes import Trial, find_trial, vary
from cebm.samplers import Langevin, Polynomial
from cebm.spaces import margin_limit
from cebm.tasks import ParticleTask, collect_particle
from cebm.trainer import Trainer
from reproduction.claims.dimensions import in_dimensions
from reproduction.intervals import Interval, Verdict
from reproduction.ledger import Claim, Computation, Finding, Results, Task
from reproduction.prose import validation as prose
from reproduction.trainings import Result, Scale
from reproduction.trainings import training as train_task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVERY = 20
"""Training steps between two rows of the reference curves."""
TOLERANCE = 0.2
"""The largest difference to the reference that counts as agreement, as a share of the curve's range."""
OVERFITTED = 0.05
"""The episode counts as fitted if the action error is below this, a goal's radius in the task's units."""


@dataclass(frozen=True)
class Case:
    """One of the reference runs."""

    name: str
    file: str
    dim: int
    episodes: int | None
    """Training episodes; None for the scale's `many`."""
    steps: int
    margin: float
    """Margin of the box around the actions. The reference has 5 %, cut back to the limits of the environment. Nothing
    is left if the demonstrations fill the space; all of it is left for one episode between two goals."""

    def length(self, scale: Scale) -> int:
        """Training steps: as many as the reference logged."""
        return min(self.steps, scale.steps) if scale.small else self.steps


CASES = (
    Case("2-D, 1 episode", "particle_2d_1_episode.csv", 2, 1, 300, 0.05),
    Case("2-D, many episodes", "particle_2d_2000_episodes.csv", 2, None, 1000, 0.0),
    Case("16-D, many episodes", "particle_16d_2000_episodes.csv", 16, None, 600, 0.0),
)
DISTANCE = "negative_positive_mse"
COLUMNS = (
    "info_nce",
    "positive_energy",
    "chain_first_energy",
    "chain_last_energy",
    DISTANCE,
    "grad_norm_first",
    "grad_norm_last",
)
ORDINARY = 0.9
"""A curve counts as one like ours if it lies between our lowest and our highest in at least this share of its rows."""
MORE_EPISODES = 3
"""Number of further single episodes per seed. They show how much of a difference is due to the episode."""
TRAINED = ("1 episode", "1 episode, 16-D", "2-D", "16-D")
COMPARED = {
    "info_nce": "loss",
    "first_gap": "energy of chain starts over data",
    "last_gap": "energy of chain ends over data",
    DISTANCE: "distance",
}
"""The metrics that decide, with their names in texts. InfoNCE does not change when a constant is added to the energies
of an observation, so their level drifts freely: only differences of energies are compared. The figure shows the
levels."""


@dataclass(frozen=True)
class Validation(Claim):
    number = 12
    slug = "validation"
    section = "Appendix, implementation details"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE
    reference: str | None = None
    """A folder of curves that were logged from google-research/ibc. Without it, or without one of its files, the
    comparison is skipped, and the finding says so."""

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        tasks: list[Task] = []
        for seed in seeds:
            tasks.append(Computation(self, seed, scale, cost=scale.steps / 10))
            tasks.append(train_task("ibc", scale, seed, TRAINED[0], episodes=1, steps=scale.half))
            tasks.append(in_dimensions("ibc", 16, scale, seed, TRAINED[1], episodes=1))
            tasks += [in_dimensions("ibc", dim, scale, seed, f"{dim}-D") for dim in (2, 16)]
        return tasks

    def compute(self, scale: Scale, seed: int) -> Result:
        if self.reference is None:
            return {"skipped": "no folder of reference curves was given (--reference)"}
        folder = Path(self.reference)
        missing = [case.file for case in CASES if not (folder / case.file).is_file()]
        if missing:
            return {"skipped": f"there is no {missing[0]} in the folder of reference curves"}
        result: Result = {"cases": {}}
        for case in CASES:
            theirs = read_reference(folder / case.file)
            ours = follow(case, scale, seed)
            kept = {column: values[: len(ours["info_nce"])] for column, values in theirs.items()}
            result["cases"][case.name] = {"ours": ours, "reference": kept}
        others = [follow(CASES[0], scale, seed, seed + 100 * k)[DISTANCE] for k in range(1, MORE_EPISODES + 1)]
        return result | {"other_episodes": others, "success": success_of_small_batches(scale, seed)}

    def judge(self, results: Results) -> Finding:
        error, error_16 = (Interval.of([action_error(run) for run in results.by_label[one]]) for one in TRAINED[:2])
        rates = {label: results.values(label, "last", "success") for label in ("2-D", "16-D")}
        computed = results.by_label["computation"]
        skipped = next((run["skipped"] for run in computed if "skipped" in run), None)
        numbers: dict[str, Any] = {
            "action_error": error.to_json(),
            "action_error_16": error_16.to_json(),
            "success": rates,
            "skipped": skipped,
            "training": {label: _along(results.by_label[label]) for label in TRAINED},
        }
        trained = prose.Trained(error, error_16, {name: Interval.of(values) for name, values in rates.items()})
        if skipped is not None:
            return Finding("inconclusive", prose.skipped(trained, skipped), numbers, prose.COMMENT)
        shares = {
            case.name: {
                metric: Interval.of([deviation(run["cases"][case.name], metric) for run in computed])
                for metric in COMPARED
            }
            for case in CASES
        }
        limits = {
            f"{COMPARED[metric]} in {name}": (interval, TOLERANCE)
            for name, group in shares.items()
            for metric, interval in group.items()
        }
        limits["action error on the one episode"] = (error, OVERFITTED)
        beyond = [name for name, (interval, limit) in limits.items() if interval.high >= limit]
        verdict: Verdict = "inconclusive" if beyond else "holds"
        if any(interval.low > limit for interval, limit in limits.values()):
            verdict = "does not hold"
        one = CASES[0].name
        theirs = computed[0]["cases"][one]["reference"][DISTANCE]
        episodes = [run["cases"][one]["ours"][DISTANCE] for run in computed]
        episodes += [course for run in computed for course in run["other_episodes"]]
        ends, end, inside = [_end(course) for course in episodes], _end(theirs), within(theirs, episodes)
        small = Interval.of([run["success"] for run in computed])
        numbers |= {
            "shares": {name: {m: i.to_json() for m, i in group.items()} for name, group in shares.items()},
            "success_small_batches": small.to_json(),
            "curves": {case.name: _beside([run["cases"][case.name] for run in computed]) for case in CASES},
            "episodes": episodes,
        }
        facts = prose.Compared(
            shares={
                name: {COMPARED[metric]: interval for metric, interval in group.items()}
                for name, group in shares.items()
            },
            small_batches=small,
            end=end,
            ends=ends,
            inside=inside,
            beyond=beyond,
            distance_alone=beyond == [f"{COMPARED[DISTANCE]} in {one}"],
            ordinary=inside >= ORDINARY,
        )
        return Finding(verdict, prose.measured(trained, facts), numbers, prose.comment(facts))

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import COLOURS

        numbers = finding.numbers
        compared = "curves" in numbers
        rows = 4 if compared else 1
        figure.set_size_inches(9.0, 2.3 * rows)
        grid = figure.subplots(rows, 3, squeeze=False)
        panels = {
            "loss": ("info_nce",),
            "energy": ("positive_energy", "chain_first_energy", "chain_last_energy"),
            "distance²": (DISTANCE,),
        }
        for column, case in zip(grid.T, CASES if compared else (), strict=False):
            both = numbers["curves"][case.name]
            for axes, (title, names) in zip(column, panels.items(), strict=False):
                for name, colour in zip(names, COLOURS, strict=False):
                    ours = both["ours"][name]
                    steps = EVERY * np.arange(len(ours["mean"]))
                    axes.plot(steps, ours["mean"], color=colour, label=name.replace("_", " "))
                    axes.fill_between(steps, ours["low"], ours["high"], color=colour, alpha=0.2, linewidth=0)
                    axes.plot(steps, both["reference"][name], color=colour, linestyle="--", linewidth=1)
                axes.set_ylabel(title)
            column[0].set_title(case.name, fontsize=9)
        if compared:
            for course in numbers["episodes"]:
                grid[2, 0].plot(EVERY * np.arange(len(course)), course, color="#999999", linewidth=0.4, zorder=0)
            figure.suptitle(_TITLE, fontsize=10)
            grid[1, 0].legend(frameon=False, fontsize=6)
        labels = {"info_nce": "loss", "energy_gap": "energy gap", "negative_distance": "distance"}
        for axes, (name, title) in zip(grid[-1], labels.items(), strict=True):
            for (label, along), colour in zip(numbers["training"].items(), COLOURS[3:], strict=False):
                if not along:
                    continue
                axes.plot(along["step"], along[name]["mean"], color=colour, label=label)
                axes.fill_between(along["step"], along[name]["low"], along[name]["high"], color=colour, alpha=0.2)
            axes.set_ylabel(title)
        for axes in grid.flat:
            axes.set_xlabel("training step")
        grid[-1, 0].legend(frameon=False, fontsize=7)


_TITLE = (
    "Above: the reference's settings (solid: ours, dashed: the reference, grey: other episodes).\n"
    "Below: the paper's. Bands: from the lowest to the highest seed."
)

# ---------------------------------------------------------------------------------------------- the same settings


def reference_trial(case: Case, scale: Scale, pairs: int, batch_size: int = 512) -> Trial:
    """`ibc` with the settings of the reference code, for `pairs` pairs of observation and action."""
    # The reference clips a step at a share of half the chain's box, we clip it at a share of half of [-1, 1].
    clip = 0.1 * margin_limit(case.margin)
    sampler = Langevin(
        "ibc", 10, Polynomial(0.1, 1e-5), noise=1.0, step_clip=clip, clip_convention="half-range", margin=case.margin
    )
    # Chains start uniformly in their own box, as in the reference; those of `ibc` start in the paper's box.
    source = ShortChains(sampler, Uniform(case.margin))
    changes = {"objective.source": source, "obs_scaling": "standardise", "batch_size": batch_size}
    trial = scale.trial(vary(find_trial("ibc"), **changes))
    # The reference multiplies the learning rate by 0.99 every 100 steps; ours falls once per some epochs.
    epoch = max(1, pairs // trial.optimiser.batch_size)
    epochs = max(1, round(100 / epoch))
    return vary(trial, **{"optimiser.schedule": Decay(0.99 ** (epochs * epoch / 100), epochs)})


def trainer_of(
    case: Case, scale: Scale, seed: int, data_seed: int | None = None, batch_size: int = 512
) -> tuple[Trainer, "Recorder"]:
    """A trainer with these settings, and the recorder of its negatives. The demonstrations are those of `data_seed`,
    which is `seed` by default."""
    task = ParticleTask(dim=case.dim)
    data_seed = seed if data_seed is None else data_seed
    demonstrations = collect_particle(task, case.episodes or scale.many, data_seed)
    trial = reference_trial(case, scale, len(demonstrations.obs), batch_size)
    validation = collect_particle(task, 20, VALIDATION_SEED)
    trainer = Trainer(trial, demonstrations, validation, seed, limits=(0.0, 1.0))
    objective = trainer.learner.objective
    recorder = Recorder(objective.source)
    trainer.learner.objective = replace(objective, source=recorder)
    return trainer, recorder


class Recorder:
    """A source of negatives that remembers the mean squared distance of its last negatives to the data."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.squared_distance = math.nan

    def sample(
        self, energy: EnergyModel, obs: Obs, actions: Positives, n: int, generator: torch.Generator
    ) -> Negatives:
        drawn = self.source.sample(energy, obs, actions, n, generator)
        self.squared_distance = float((drawn.actions - actions.unsqueeze(1)).square().mean())
        return drawn


def follow(case: Case, scale: Scale, seed: int, data_seed: int | None = None) -> dict[str, list[float]]:
    """The reference's columns, measured in our training. Row k is of the batch of step 20 k, before its update."""
    trainer, recorder = trainer_of(case, scale, seed, data_seed)
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for step in range(case.length(scale) + 1):
        log = trainer.step()
        if step % EVERY:
            continue
        logged: dict[str, Any] = {
            "info_nce": log["info_nce"],
            "positive_energy": log["positive_energy"],
            "chain_first_energy": log["chain_energy_first"],
            "chain_last_energy": log["chain_energy_last"],
            DISTANCE: recorder.squared_distance,
            "grad_norm_first": log["gradient_norm_first"],
            "grad_norm_last": log["gradient_norm_last"],
        }
        for name in COLUMNS:
            columns[name].append(_digits(float(logged[name])))
    return columns


def success_of_small_batches(scale: Scale, seed: int) -> float:
    """Success on held-out episodes of the policy after 2,358 steps with batches of 128."""
    trainer, _ = trainer_of(CASES[1], scale, seed, batch_size=128)
    for _ in range(scale.steps if scale.small else 2358):
        trainer.step()
    episodes = 2 * scale.evaluation_episodes
    result = evaluate(
        trainer.policy(), ParticleTask(), episodes=episodes, seed=TEST_SEED, latency_calls=0, candidates=64
    )
    return float(result.summary()["success"])


def read_reference(path: Path) -> dict[str, list[float]]:
    """Read the columns of a file of curves; a ValueError says what is wrong with the file."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    lacking = [name for name in ("step", *COLUMNS) if not rows or name not in rows[0]]
    if lacking:
        raise ValueError(f"{path}: column {lacking[0]} is missing")
    if [int(row["step"]) for row in rows] != [EVERY * i for i in range(len(rows))]:
        raise ValueError(f"{path}: expected a row every {EVERY} steps, from 0")
    return {name: [float(row[name]) for row in rows] for name in COLUMNS}


# ---------------------------------------------------------------------------------------------- the comparison


def compared(columns: dict[str, list[float]], metric: str) -> np.ndarray:
    """A column, or for a gap the energies of the chain minus those of the data."""
    if metric in ("first_gap", "last_gap"):
        chain = np.array(columns[f"chain_{metric.removesuffix('_gap')}_energy"])
        return chain - np.array(columns["positive_energy"])
    return np.array(columns[metric])


def deviation(both: dict[str, dict[str, list[float]]], metric: str) -> float:
    """mean |ours − reference| / (max reference − min reference)."""
    ours, theirs = compared(both["ours"], metric), compared(both["reference"], metric)
    return float(np.abs(ours - theirs).mean() / (theirs.max() - theirs.min()))


def within(course: list[float], others: list[list[float]]) -> float:
    """The share of rows in which a curve lies between the lowest and the highest of the others."""
    return float(np.mean((np.min(others, 0) <= course) & (course <= np.max(others, 0))))


def _end(course: list[float]) -> float:
    """The mean of the last five rows, as a single row is noisy."""
    return float(np.mean(course[-5:]))


def _beside(runs: list[dict[str, dict[str, list[float]]]]) -> dict[str, Any]:
    """Our curves as bands over seeds, and the reference's, for the figure."""
    return {
        "ours": {name: _band([run["ours"][name] for run in runs]) for name in COLUMNS},
        "reference": runs[0]["reference"],
    }


def action_error(run: Result) -> float:
    """Action error of the last policy on its training episode; 1, the side of the space, for a run that diverged."""
    return 1.0 if "diverged" in run else float(run["curve"][-1]["train_action_error"])


def _along(runs: list[Result]) -> dict[str, Any]:
    """Loss, energies and distances along training, as bands over the seeds that did not diverge."""
    names = ("info_nce", "positive_energy", "negative_energy", "energy_gap", "negative_distance")
    runs = [run for run in runs if "diverged" not in run]
    if not runs:
        return {}
    bands = {name: _band([[row[name] for row in run["training"]] for run in runs]) for name in names}
    return {"step": [row["step"] for row in runs[0]["training"]], **bands}


def _band(curves: list[list[float]]) -> dict[str, list[float]]:
    """Mean, lowest and highest value over seeds."""
    values = np.array(curves)
    parts = {"mean": values.mean(0), "low": values.min(0), "high": values.max(0)}
    return {name: [_digits(value) for value in part.tolist()] for name, part in parts.items()}


def _digits(value: float) -> float:
    """Round to five significant digits, which are enough for a record."""
    return float(f"{value:.5g}")
