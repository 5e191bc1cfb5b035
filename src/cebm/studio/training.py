"""A run that may be under way: its curves, its checkpoints, and the policy of each. It only reads files."""

from functools import cached_property
from pathlib import Path
from typing import Any

from cebm.policy import EnergyPolicy
from cebm.runs import checkpoints, load_checkpoint, load_job, load_metrics, trainer_of
from cebm.settings import StorageError
from cebm.storage import take
from cebm.trainer import Trainer

MOST_ROWS = 600
"""Points of a curve, at most."""


class Progress:
    """What a run directory tells about its training. Each call reads the files anew, so a run that goes on shows its
    newest state, and one that was deleted gives a StorageError or an OSError."""

    def __init__(self, run: str | Path) -> None:
        self.run = Path(run)
        self._policies: dict[int, EnergyPolicy] = {}

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Every number of metrics.jsonl over the steps, by its name; those of evaluations as "evaluation: name"."""
        found: dict[str, list[tuple[int, float]]] = {}
        for row in load_metrics(self.run):
            prefix = "evaluation: " if row.get("kind") == "evaluation" else ""
            for name, value in row.items():
                if name == "step" or isinstance(value, bool) or not isinstance(value, int | float):
                    continue
                found.setdefault(prefix + name, []).append((int(row["step"]), float(value)))
        return {name: _thinned(points) for name, points in found.items() if len({step for step, _ in points}) > 1}

    def steps(self) -> tuple[int, int]:
        """Steps that the newest row tells of, and all steps of the run."""
        rows = load_metrics(self.run)
        return (int(rows[-1]["step"]) if rows else 0), load_job(self.run).steps

    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints that are there, the newest first."""
        if not (self.run / "run.json").exists():
            raise StorageError(f"{self.run}: the run directory is gone")
        return [int(path.name.removeprefix("step-")) for path in checkpoints(self.run)]

    def policy_at(self, step: int) -> EnergyPolicy:
        """The policy of a checkpoint. The first call reads the run's data, which its units come from."""
        if step not in self._policies:
            header, tensors = load_checkpoint(self.run / "checkpoints" / f"step-{step:08d}")
            found = take(header, "step", str(self.run))
            if found != step:
                raise StorageError(f"{self.run}: the checkpoint of step {step} says that it is of step {found!r}")
            self._trainer.load_state(tensors, step)
            while len(self._policies) >= 4:
                self._policies.pop(next(iter(self._policies)))
            self._policies[step] = self._trainer.policy()
        return self._policies[step]

    def newest_policy(self) -> EnergyPolicy:
        """The policy of the newest checkpoint."""
        steps = self.checkpoints()
        if not steps:
            raise StorageError(f"{self.run}: the run has no policy yet; wait for its first checkpoint")
        return self.policy_at(steps[0])

    @cached_property
    def _trainer(self) -> Trainer:
        return trainer_of(load_job(self.run))


def _thinned(points: list[Any]) -> list[Any]:
    """Every n-th point and the last one."""
    every = -(-len(points) // MOST_ROWS)
    kept = points[::every]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]
