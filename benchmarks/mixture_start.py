"""Why seeds of `steady` scatter on the 32-D particle: how soon its mixture finds the two goals, by how wide its
components begin.

    python -m benchmarks.mixture_start
    python -m benchmarks.mixture_start document

The mixture is trained alone, with the optimiser, units and smoothing of the recipe; beside the energy it is trained by
the same loss with weights of its own. A record has the loss at every hundredth step. One thread.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.document import replaced, table
from benchmarks.stability import STEADY
from cebm.acting import Direct
from cebm.energies import MixtureDensity
from cebm.objectives import Likelihood
from cebm.recipes import Trial
from cebm.storage import write_atomically
from cebm.tasks import ParticleTask
from cebm.trainer import Trainer

RECORD, PAGE = Path("docs/mixture-start.json"), Path("docs/stability.md")
SPREADS = (None, 0.5)
STEPS, RUN = 600, 5000
"""Steps that are made, of a run that is planned as long as that of the study."""


def trial_of(spread: float | None) -> Trial:
    """The mixture of `steady`, alone."""
    return replace(STEADY, energy=MixtureDensity(spread=spread), objective=Likelihood(), acting=Direct())


def losses(spread: float | None, seed: int, dim: int = 32, episodes: int = 2000, steps: int = STEPS) -> list[float]:
    """Of every hundredth step."""
    task = ParticleTask(dim=dim)
    data = task.demonstrations(episodes, seed)
    trainer = Trainer(trial_of(spread), data, data, seed, limits=task.limits, steps=RUN)
    found = []
    for step in range(1, steps + 1):
        log = trainer.step()
        if step % 100 == 0:
            found.append(round(float(log["loss"]), 2))
    return found


def rows(starts: list[dict[str, Any]], runs: list[dict[str, Any]]) -> str:
    """Per seed: the mixture's loss early in the study's own run and its success; and of the mixture alone."""
    shown = (200, 400, 600)
    head = (
        "seed",
        "loss of the mixture in the study at step 500",
        "at 1,000",
        "at 5,000",
        "success",
        *(f"alone, begun at 0.08: step {step}" for step in shown),
        *(f"begun at 0.5: step {step}" for step in shown),
    )
    lines = []
    for run in runs:
        logged = {row["step"]: row["proposal_loss"] for row in run["training"]}
        alone = {start["spread"]: start["losses"] for start in starts if start["seed"] == run["seed"]}
        ends = [f"{logged[step]:.1f}" for step in (500, 1000, 5000)]
        early = [
            f"{alone[spread][step // 100 - 1]:.1f}" if spread in alone else "" for spread in SPREADS for step in shown
        ]
        lines.append((run["seed"], *ends, f"{100 * run['last']['as-trained']['success']:.1f} %", *early))
    return table(head, lines)


def documented(text: str, docs: Path) -> str:
    """docs/stability.md with its table of the records."""
    runs = [json.loads(path.read_text()) for path in sorted((docs / "stability").glob("steady-32d-[0-9].json"))]
    return replaced(text, "mixture start", rows(json.loads((docs / RECORD.name).read_text()), runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["measure", "document"], default="measure")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=RECORD)
    settings = parser.parse_args()
    if settings.what == "document":
        PAGE.write_text(documented(PAGE.read_text(), PAGE.parent))
        return
    torch.set_num_threads(1)
    found = json.loads(settings.out.read_text()) if settings.out.exists() else []
    done = {(each["spread"], each["seed"]) for each in found}
    for seed in settings.seeds:
        for spread in SPREADS:
            if (spread, seed) in done:
                continue
            found.append({"spread": spread, "seed": seed, "losses": losses(spread, seed)})
            print(found[-1], flush=True)
            write_atomically(settings.out, (json.dumps(found) + "\n").encode())


if __name__ == "__main__":
    main()
