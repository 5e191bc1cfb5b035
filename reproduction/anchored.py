"""Run the arms of `reproduction.anchoring`: claims 6, 7 and 8 with anchored energies.

    python -m reproduction.anchored --workers 1                     # all families, five seeds
    python -m reproduction.anchored --families mcmc-loss-anchored --seeds 0 1

A second call continues where the first was stopped. `cebm reproduce mcmc-loss maxent` runs the families that decide.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cebm.engines import Local
from cebm.provenance import source_commit
from reproduction.anchoring import SEEDS, arms, planned
from reproduction.running import results_in, run_all
from reproduction.trainings import PAPER, SCALES, Scale


def run(
    families: Sequence[str], scale: Scale, seeds: Sequence[int], workers: int, out: Path, runs: Path
) -> dict[str, str]:
    """Run what has no record in `out` yet, one seed after the other. Returns why some runs failed, by key."""
    (out / "runs").mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}
    while True:
        known = results_in(out)
        asked = {task.key: task for family in families for task in planned(family, scale, seeds, known)}
        missing = [task for key, task in asked.items() if key not in known and key not in failures]
        if not missing:
            return failures
        seed = min(task.seed for task in missing)
        now = [task for task in missing if task.seed == seed]
        failures |= run_all(now, len(asked), Local(workers, 1, runs / "logs"), out, runs, source_commit())


def main() -> None:
    """Runs the arms at the seeds asked for; a second call continues where the first was stopped."""
    parser = argparse.ArgumentParser(description="The runs of claims 6, 7 and 8 with anchored energies.")
    parser.add_argument("--families", nargs="+", choices=list(arms()), default=list(arms()))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(SEEDS)))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--scale", choices=SCALES, default=PAPER.name)
    parser.add_argument("--out", type=Path, default=Path("reproduction/results"))
    parser.add_argument("--runs", type=Path, default=Path("runs/anchored"))
    words = parser.parse_args()
    failures = run(words.families, SCALES[words.scale], words.seeds, words.workers, words.out, words.runs)
    if failures:
        sys.exit("\n".join(f"{key}: {reason.splitlines()[0]}" for key, reason in failures.items()))


if __name__ == "__main__":
    main()
