"""Is the energy wrong, or the search? The paper's four trials, acted upon by several searches on the same checkpoints.

cebm sweep reproduction/studies/searches.py --workers 1 --out runs/searches
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cebm.composition import vary
from cebm.recipes import find_trial
from cebm.runs import load_job, restored
from reproduction.anchoring import AVERAGE
from reproduction.claims.marginal import DESCRIBED, PAPERS, on_par
from reproduction.studies.measuring import success
from reproduction.studies.reading import Arm, Comparison, Swept

STEPS = 3000
SEARCHES = {"64 × 10": (64, 10), "512 × 10": (512, 10), "64 × 40": (64, 40)}
"""Candidates and steps, by the names in tables."""
WEIGHTS = ("raw", "averaged")
DECIDES = "raw, 512 × 10"


class Searches(Swept):
    slug = "searches"
    title = "Is the energy wrong, or the search?"
    claims = (11,)
    rule = (
        "Each trial trains as claim 11's do (2-D particle, 300 demonstrations, 3,000 steps) and keeps averaged weights "
        "beside its raw ones, which averaging does not change. The last weights act on 200 held-out episodes, by "
        "three searches: 64 candidates and 10 steps (the ledger's), 512 and 10 (the reference code's, and so the "
        "paper's way of acting), 64 and 40 (a longer one). A trial is on par with `ibc` by a search if the 95 % "
        "interval of its paired difference in success, over five seeds, lies within ±10 points, and is not if it lies "
        "outside. Raw weights with 512 candidates decide, as the paper averages nothing; the other five cells are "
        "reported and decide nothing."
    )
    shown = tuple(f"{weights}, {search}" for weights in WEIGHTS for search in SEARCHES)
    measure = "reproduction.studies.searches:measured"

    def arms(self) -> list[Arm]:
        return [Arm(name, vary(find_trial(name), **{"optimiser.average": AVERAGE}), STEPS) for name in PAPERS]

    def order(self) -> Iterable[tuple[Arm, int]]:
        """The pair that decides first, at every seed; then the other samplers."""
        seeds, arms = range(self.seeds_needed), self.arms()
        first = [arm for arm in arms if arm.label in ("ibc", DESCRIBED)]
        other = [arm for arm in arms if arm not in first]
        return [(arm, seed) for group in (first, other) for seed in seeds for arm in group]

    def comparisons(self) -> list[Comparison]:
        return [
            Comparison(name, "ibc", cell, on_par, decides=name == DESCRIBED and cell == DECIDES)
            for name in PAPERS
            if name != "ibc"
            for cell in self.shown
        ]


study = Searches()


def measured(directory: Path) -> dict[str, Any]:
    """Success of a run's last weights, raw and averaged, by every search."""
    job = load_job(directory)
    trainer, _ = restored(job, directory)
    return {
        f"{weights}, {name}": success(trainer.policy(averaged=weights == "averaged"), job.task, *effort)
        for weights in WEIGHTS
        for name, effort in SEARCHES.items()
    }
