"""Claim 15: the paper's thesis, that generalisation goes with mutual information, over the runs of all claims."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cebm.runs import Job
from cebm.tasks import ParticleTask
from reproduction.intervals import Interval, Verdict, decide
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.prose import thesis as prose
from reproduction.prose.thesis import Correlations
from reproduction.trainings import Scale, Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = {"bound": "bound below its ceiling by, nats", "entropy": "H(y|x), nats"}
OUTCOMES = {"success": "validation success", "error": "validation error", "gap": "validation − training error"}
NEAR = 0.1
"""A bound that is nearer to its ceiling than this, in nats, counts as near."""
RESAMPLES = 2000
"""Bootstrap samples of an interval."""
LEAST_RECIPES = 5
"""With fewer recipes the claim is inconclusive."""


class Thesis(Claim):
    number = 15
    slug = "thesis"
    section = "Sec. V"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        """The trainings of the other claims, labelled by their recipe. Nothing is trained for this claim alone."""
        from reproduction.claims import CLAIMS

        found: dict[str, Task] = {}
        for claim in CLAIMS:
            if claim.slug == self.slug:
                continue
            for task in claim.tasks(scale, seeds[: claim.most_seeds]):
                if isinstance(task, Training) and _counts(task, scale):
                    found[task.key] = replace(task, label=task.key.rsplit("-", 1)[0])
        longest: dict[Job, int] = {}
        trainings = [task for task in found.values() if isinstance(task, Training)]
        for task in trainings:
            longest[_recipe(task)] = max(task.job.steps, longest.get(_recipe(task), 0))
        return [task for task in trainings if task.job.steps == longest[_recipe(task)]]

    def judge(self, results: Results) -> Finding:
        whole = {name: [run for run in runs if "diverged" not in run] for name, runs in results.by_label.items()}
        names = [name for name, found in whole.items() if found]
        runs = [(i, run) for i, name in enumerate(names) for run in whole[name]]
        diverged = sum(len(found) for found in results.by_label.values()) - len(runs)
        recipe = [i for i, _ in runs]
        last = [run["curve"][-1] for _, run in runs]
        columns: dict[str, list[float]] = {
            "bound": [row["mi_bound"] for row in last],
            "entropy": [run["conditional_entropy"] for _, run in runs],
            "success": [row["success"] for row in last],
            "error": [row["validation_action_error"] for row in last],
            "gap": [row["validation_action_error"] - row["train_action_error"] for row in last],
        }
        found = correlations(columns, recipe)
        telling = [i for i, bound in enumerate(columns["bound"]) if bound > 0]
        found_telling = correlations(
            {name: [values[i] for i in telling] for name, values in columns.items()}, [recipe[i] for i in telling]
        )
        near = sum(row["mi_ceiling"] - row["mi_bound"] < NEAR for row in last)
        coarse = sum(run["coarse"] > 0.5 for _, run in runs)
        verdict: Verdict = decide(found["bound", "success"]) if len(names) >= LEAST_RECIPES else "inconclusive"

        def as_json(table: Correlations) -> dict[str, list[float | None]]:
            return {f"{measure}-{outcome}": interval.to_json() for (measure, outcome), interval in table.items()}

        facts = prose.Facts(
            recipes=len(names),
            runs=len(runs),
            correlations=found,
            telling=len(telling),
            correlations_telling=found_telling,
            sharp_succeed=found["entropy", "success"].high < 0,
            sharp_succeed_telling=found_telling["entropy", "success"].high < 0,
            smaller_gap=found["bound", "gap"].high < 0,
            diverged=diverged,
            near=near,
            nearness=NEAR,
            coarse=coarse,
        )
        return Finding(
            verdict,
            prose.measured(facts),
            {
                "correlations": as_json(found),
                "correlations_above_0": as_json(found_telling),
                "recipes": names,
                "recipe": recipe,
                "columns": columns | {"ceiling": [row["mi_ceiling"] for row in last]},
            },
            prose.comment(facts),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        numbers: dict[str, Any] = finding.numbers
        figure.set_size_inches(9.0, 8.6)
        grid = figure.subplots(3, 3, width_ratios=(3, 3, 2))
        recipe = np.array(numbers["recipe"])
        for row, (outcome, vertical) in zip(grid, OUTCOMES.items(), strict=True):
            for axes, (measure, horizontal) in zip(row, MEASURES.items(), strict=False):
                x, y = np.array(numbers["columns"][measure]), np.array(numbers["columns"][outcome])
                if measure == "bound":
                    # Most bounds are just below the ceiling and a few are far below, so that a linear axis would show
                    # most runs as one dot. The axis is inverted: more information is to the right.
                    x = np.array(numbers["columns"]["ceiling"]) - x
                    axes.set_xscale("log")
                    axes.xaxis.set_inverted(True)
                axes.plot(x, y, ".", color="#999999", markersize=3)
                for i in range(len(numbers["recipes"])):
                    mine = recipe == i
                    axes.text(np.median(x[mine]), np.median(y[mine]), str(i + 1), fontsize=7, ha="center", va="center")
                mean, low, high = numbers["correlations"][f"{measure}-{outcome}"]
                axes.set_title(f"ρ = {mean:.2f} ({low:.2f} to {high:.2f})", fontsize=9)
                axes.set_xlabel(horizontal)
                axes.set_ylabel(vertical)
        for axes in grid[:, 2]:
            axes.axis("off")
        names = [f"{i + 1} {name.rsplit('-', 1)[0]}" for i, name in enumerate(numbers["recipes"])]
        grid[0, 2].text(0, 1, "\n".join(names), fontsize=7, va="top", transform=grid[0, 2].transAxes)


def _recipe(task: Training) -> Job:
    """The job without its name, seed and length: equal for two trainings of the same recipe."""
    return replace(task.job, name="", seed=0, steps=1, log_every=1)


def _counts(task: Training, scale: Scale) -> bool:
    """Whether a training is of an implicit policy on the plain task, with the paper's number of demonstrations."""
    job = task.job
    same = job.task == ParticleTask() and job.data is None and job.episodes == scale.demonstrations
    return same and not getattr(job.trial.energy, "explicit", False)


def correlations(columns: dict[str, list[float]], recipe: Sequence[int]) -> Correlations:
    """The correlation of every measure with every outcome."""
    return {
        (measure, outcome): correlation(columns[measure], columns[outcome], recipe)
        for measure in MEASURES
        for outcome in OUTCOMES
    }


def correlation(x: Sequence[float], y: Sequence[float], recipe: Sequence[int]) -> Interval:
    """Spearman's correlation and its 95 % bootstrap interval: recipes are drawn with replacement, each with all its
    runs. The interval is -1 to 1 if that is undefined, as for a single recipe."""
    first, second, groups = np.asarray(x, np.float64), np.asarray(y, np.float64), np.asarray(recipe)
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    generator = np.random.default_rng(0)  # a fixed seed: the same runs give the same interval
    drawn = []
    for _ in range(RESAMPLES):
        chosen = np.concatenate([members[i] for i in generator.integers(len(members), size=len(members))])
        value = spearman(first[chosen], second[chosen])
        if value is not None:
            drawn.append(value)
    whole = spearman(first, second)
    if whole is None or len(members) < 2 or not drawn:
        return Interval(0.0 if whole is None else whole, -1.0, 1.0)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Interval(whole, float(low), float(high))


def spearman(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson's correlation of the ranks; None if x or y is constant."""
    a, b = ranks(x), ranks(y)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale else None


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values get the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]
