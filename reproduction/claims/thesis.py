"""Claim 15: the paper's thesis, that generalisation goes with mutual information, over the runs of all claims."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cebm.envs.particle import ParticleTask
from cebm.training import Job
from reproduction.intervals import Interval, Verdict, decide
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.trainings import Scale, Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = {"bound": "bound below its ceiling by, nats", "entropy": "H(y|x), nats"}
OUTCOMES = {"success": "validation success", "error": "validation error", "gap": "validation − training error"}
NEAR = 0.1
"""To the ceiling of the bound, in nats."""
RESAMPLES = 2000
LEAST_RECIPES = 5
"""Fewer than this say nothing about recipes."""


class Thesis(Claim):
    number = 15
    slug = "thesis"
    section = "Sec. V"
    statement = (
        "Conditional energies generalise better the more mutual information between observation and action they have."
    )
    protocol = (
        "All trainings of the other claims on the plain 2-D particle task with the paper's number of demonstrations, "
        "whatever they vary; explicit networks are left out, whose entropy is a convention, and runs that diverged, "
        "whose last energy is none. Of each run the last "
        "policy counts: the InfoNCE bound on the mutual information of validation pairs, the other pairs' actions "
        "being the negatives whatever the run was trained with, and H(y|x) of its energy on validation observations "
        "by quadrature; against its success on validation episodes, its action error on validation pairs, and the gap: "
        "that error minus the one on training pairs. Of a recipe that was trained for several lengths the longest "
        "counts. Added when the result had been seen, and deciding nothing: the same over the runs whose bound is "
        "above 0, as an energy with less tells the demonstrated action worse than guessing does."
    )
    metric = (
        "Spearman's rank correlation over runs, with a 95 % interval from 2,000 bootstrap samples over recipes, the "
        "seeds of a recipe staying together."
    )
    rule = (
        "Holds where the interval of the bound's correlation with success lies above 0, does not hold where it lies "
        "below 0; else inconclusive, as with fewer than five recipes. The other correlations are reported and decide "
        "nothing: a policy that fits nothing has no gap. (When the runs of `ibc` and `correct` and the first of claim "
        "11 were known, and no others, this rule replaced one that also asked for a correlation with the gap below 0.)"
    )

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        """What the others train, under the recipe's own name; nothing is trained for this claim alone."""
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

        def told(table: Correlations, measure: str) -> str:
            words = (("success", "success"), ("error", "the validation error"), ("gap", "the gap"))
            return ", ".join(f"with {word} {table[measure, outcome].number()}" for outcome, word in words)

        def as_json(table: Correlations) -> dict[str, list[float | None]]:
            return {f"{measure}-{outcome}": interval.to_json() for (measure, outcome), interval in table.items()}

        return Finding(
            verdict,
            f"Rank correlation over {len(runs)} runs of {len(names)} recipes: the bound {told(found, 'bound')}; H(y|x) "
            f"{told(found, 'entropy')}. Over the {len(telling)} runs with a bound above 0: the bound "
            f"{told(found_telling, 'bound')}; H(y|x) {told(found_telling, 'entropy')}."
            + (f" Runs that diverged: {diverged}." if diverged else ""),
            {
                "correlations": as_json(found),
                "correlations_above_0": as_json(found_telling),
                "recipes": names,
                "recipe": recipe,
                "columns": columns | {"ceiling": [row["mi_ceiling"] for row in last]},
            },
            "The bound is high where an energy tells the demonstrated action from those of other observations, and is "
            "confident only when right. H(y|x) measures sharpness alone, right or wrong: an energy that is sharp in "
            "the wrong place has low entropy and, held out, a low bound. "
            f"{_sharpness(found['entropy', 'success'], found_telling['entropy', 'success'])}{_other(found)} A "
            "correlation over recipes says what goes together, not what causes what, and the recipes are those that "
            "the other claims happen to compare. "
            f"The bound is within {NEAR} nats of its ceiling in {near} of {len(runs)} runs, where it shows differences "
            f"of information as small ones; in {coarse} most valleys are too narrow for the quadrature, so that their "
            "H(y|x) is about that of one cell.",
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
                    # Most are just below the ceiling, and a few energies are so confident and so wrong that on a
                    # linear axis the others would be one dot. To the right there is more information.
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
    """What is trained, and not for how long."""
    return replace(task.job, name="", seed=0, steps=1, log_every=1)


def _counts(task: Training, scale: Scale) -> bool:
    job = task.job
    same = job.task == ParticleTask() and job.data is None and job.episodes == scale.demonstrations
    return same and not job.trial.network.explicit


Correlations = dict[tuple[str, str], Interval]


def correlations(columns: dict[str, list[float]], recipe: Sequence[int]) -> Correlations:
    """Of every measure with every outcome."""
    return {
        (measure, outcome): correlation(columns[measure], columns[outcome], recipe)
        for measure in MEASURES
        for outcome in OUTCOMES
    }


def _sharpness(everywhere: Interval, telling: Interval) -> str:
    """What the correlations of H(y|x) with success say about the second half of the claim."""
    if everywhere.high < 0:
        return "A low H(y|x), to the paper the way to information, goes with success."
    seen = "That a low H(y|x), to the paper the way to information, goes with success is not seen over all runs"
    if telling.high < 0:
        return (
            f"{seen}; it is over those with a bound above 0, which know something: there sharp energies succeed more "
            "often, and the others are sharp and wrong."
        )
    return f"{seen}, nor over those with a bound above 0."


def _other(found: Correlations) -> str:
    """That success is not all there is to generalisation, where the gap does not go with the bound."""
    if found["bound", "gap"].high < 0:
        return ""
    return " Generalisation is success here: a smaller gap between validation and training does not go with the bound."


def correlation(x: Sequence[float], y: Sequence[float], recipe: Sequence[int]) -> Interval:
    """Spearman's correlation and its 95 % interval: recipes are drawn with replacement, each with all its runs.
    From -1 to 1 where that is undefined, as for a single recipe."""
    first, second, groups = np.asarray(x, np.float64), np.asarray(y, np.float64), np.asarray(recipe)
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    generator = np.random.default_rng(0)  # of the interval's own, so that the same runs give the same interval
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
    """Pearson's correlation of the ranks, ties sharing theirs; None where one of them is constant."""
    a, b = ranks(x), ranks(y)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale else None


def ranks(values: np.ndarray) -> np.ndarray:
    """From 1; equal values get the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]
