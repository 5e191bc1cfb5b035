"""Is the energy wrong, or the search? The paper's four trials, acted upon by several searches on the same checkpoints.

    cebm sweep reproduction/searches.py --out runs/searches
    python -m reproduction.searches runs/searches --out reproduction/results/searches.json

The rule was written before the first run of this study. Each trial trains as the ledger's claim 11 does (2-D particle,
300 demonstrations, 3,000 steps) and keeps averaged weights beside its raw ones, which averaging does not change. The
last weights act on 200 held-out episodes, by three searches: 64 candidates and 10 steps (the ledger's), 512 and 10 (the
reference code's, and so the paper's way of acting), 64 and 40 (a longer one). A trial is on par with `ibc` by a search
if the 95 % interval of its paired difference in success, over five seeds, lies within ±10 points. Raw weights with 512
candidates decide, as the paper averages nothing; the other five cells are reported and decide nothing.
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cebm.composition import vary
from cebm.evaluation import TEST_SEED, evaluate
from cebm.policy import EnergyPolicy
from cebm.recipes import find_trial
from cebm.runs import load_job, restored
from cebm.storage import write_atomically
from cebm.sweep.results import records
from cebm.sweep.studies import Planned, Record
from cebm.tasks import Task
from reproduction.anchored import AVERAGE
from reproduction.claims.marginal import PAPERS, on_par
from reproduction.intervals import Interval, Verdict
from reproduction.trainings import PAPER, training

STEPS = 3000
EPISODES = 200
SEEDS = 5
SEARCHES = {"64 × 10": (64, 10), "512 × 10": (512, 10), "64 × 40": (64, 40)}
"""Candidates and steps, by the names in tables."""
WEIGHTS = ("raw", "averaged")
DECIDES = ("raw", "512 × 10")


@dataclass(frozen=True)
class Searches:
    """The study: every trial of the paper at every seed, the first seed first."""

    steps: int = STEPS
    seeds: tuple[int, ...] = tuple(range(SEEDS))

    measure = "reproduction.searches:measured"

    def plan(self, finished: Iterable[Record] = ()) -> list[Planned]:
        found = []
        for seed in self.seeds:
            for name in PAPERS:
                trial = vary(find_trial(name), **{"optimiser.average": AVERAGE})
                job = training(trial, PAPER, seed, name, steps=self.steps, followed=False).job
                found.append(Planned(job, {"trial": name, "steps": self.steps}))
        return found


study = Searches()


def measured(directory: Path) -> dict[str, Any]:
    """Success of a run's last weights, raw and averaged, by every search."""
    job = load_job(directory)
    trainer, _ = restored(job, directory)
    if job.task is None:
        raise ValueError(f"{directory}: a run of this study has a task")
    return {
        f"{weights}, {name}": success(trainer.policy(averaged=weights == "averaged"), job.task, *effort)
        for weights in WEIGHTS
        for name, effort in SEARCHES.items()
    }


def success(policy: EnergyPolicy, task: Task, candidates: int, steps: int) -> float:
    """Share of held-out episodes that succeed with this effort."""
    found = evaluate(
        policy, task, episodes=EPISODES, seed=TEST_SEED, latency_calls=0, candidates=candidates, steps=steps
    )
    return float(found.summary()["success"])


@dataclass(frozen=True)
class Cell:
    """One trial by one search, against `ibc` by the same."""

    success: list[float]
    """One per seed."""
    difference: list[float | None]
    """To `ibc`: mean and 95 % interval, paired by seed."""
    verdict: Verdict
    """Whether it is on par with `ibc`."""


def cells(found: Mapping[str, Record]) -> dict[str, dict[str, Cell]]:
    """By trial and search, over the seeds that all trials have."""
    by_trial: dict[str, dict[int, Mapping[str, float]]] = {name: {} for name in PAPERS}
    for record in found.values():
        if record["label"] in by_trial and "diverged" not in record["result"]:
            by_trial[record["label"]][record["seed"]] = record["result"]
    seeds = sorted(set.intersection(*(set(rows) for rows in by_trial.values())))
    if not seeds:
        raise ValueError("no seed has been run for all four trials yet")
    table: dict[str, dict[str, Cell]] = {}
    for name, rows in by_trial.items():
        table[name] = {}
        for column in (f"{weights}, {search}" for weights in WEIGHTS for search in SEARCHES):
            mine, theirs = ([each[seed][column] for seed in seeds] for each in (rows, by_trial["ibc"]))
            difference = Interval.of_difference(mine, theirs)
            verdict = on_par(difference) if len(seeds) >= SEEDS else "inconclusive"
            table[name][column] = Cell(mine, difference.to_json(), verdict)
    return table


def main() -> None:
    """Writes the table of a study's folder as JSON, and prints it."""
    parser = argparse.ArgumentParser(description="The table of the searches' study.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    table = cells(records(arguments.folder))
    for name, row in table.items():
        for column, cell in row.items():
            mean = 100 * sum(cell.success) / len(cell.success)
            decides = "  (decides)" if column == ", ".join(DECIDES) and name != "ibc" else ""
            print(f"{name:<20} {column:<20} {mean:5.1f} %  {len(cell.success)} seeds  {cell.verdict}{decides}")
    if arguments.out is not None:
        plain = {name: {column: vars(cell) for column, cell in row.items()} for name, row in table.items()}
        write_atomically(arguments.out, (json.dumps(plain, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
