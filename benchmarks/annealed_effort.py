"""Effort that adapts: what it saves, and whether success stays. A few candidates of `annealed` fall first, and the
others only where these do not agree.

    python -m benchmarks.annealed_effort runs/annealed/push-t-mirrored-100 runs/annealed/particle-recipe-100
    python -m benchmarks.annealed_effort document

Each argument is a run directory of the recipe, such as `benchmarks.annealed` leaves. The same weights act in the same
episodes of validation, all at once; differences are paired by episode. What an action costs is measured apart from
that on observations from those roll-outs, one after the other and all of them at once. It is the CPU time of the
process, on one thread; the ways take turns, so that a slow moment meets all of them.
"""

import argparse
import json
from dataclasses import astuple, replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

from benchmarks.document import replaced, table
from benchmarks.task_studies import EXECUTE
from cebm.composition import vary
from cebm.evaluation import VALIDATION_SEED, Evaluation, evaluate
from cebm.loading import load
from cebm.policy import EnergyPolicy
from cebm.runs import load_job
from cebm.storage import write_atomically

RECORD, PAGE = Path("docs/annealed/effort.json"), Path("docs/annealed.md")
WAYS: dict[str, dict[str, Any]] = {
    "all 32": {},
    "4, and 28 more beyond 0.2 d": {"look": 4, "agreement": 0.2},
    "2, and 30 more beyond 0.2 d": {"look": 2, "agreement": 0.2},
    "2, and 30 more beyond 0.3 d": {"look": 2, "agreement": 0.3},
    "always 2": {"candidates": 2},
}
"""Ways to act on the same weights: changes of the search. d is the deviation of the actions."""


class Watched:
    """A policy that remembers some of what it saw, and how many of its candidates fell."""

    def __init__(self, policy: EnergyPolicy) -> None:
        self.policy = policy
        self.seen: list[np.ndarray] = []
        self.fell: list[float] = []
        self.history, self.horizon = policy.history, policy.horizon

    def reset(self) -> None:
        self.policy.reset()

    def act(self, obs: np.ndarray, generator: torch.Generator | None = None) -> np.ndarray:
        problem = self.policy.problem(obs, generator=generator)
        with torch.no_grad():
            found = self.policy.acting.search(problem)
            taken = found.actions[torch.arange(len(obs)), found.chosen].unsqueeze(1)
            action = self.policy.actions(taken, obs)[:, 0].numpy()
        self.seen.append(obs[0])
        self.fell += (found.energies < torch.inf).sum(1).tolist()
        return action


def times(policies: dict[str, EnergyPolicy], observations: np.ndarray) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of CPU per action: the mean of one observation after the other, and the best of five batches."""
    alone: dict[str, list[float]] = {name: [] for name in policies}
    together: dict[str, list[float]] = {name: [] for name in policies}
    for policy in policies.values():
        policy.act(observations[0])  # pays for warming up
    for obs in observations:
        for name, policy in policies.items():
            began = process_time()
            policy.act(obs)
            alone[name].append((process_time() - began) * 1e3)
    for _ in range(5):
        for name, policy in policies.items():
            began = process_time()
            policy.act(observations)
            together[name].append((process_time() - began) * 1e3 / len(observations))
    return {name: float(np.mean(each)) for name, each in alone.items()}, {n: min(each) for n, each in together.items()}


def measured(where: Path, episodes: int, calls: int) -> dict[str, Any]:
    """One run, by every way."""
    job, policy = load_job(where), load(where / "policy")
    if job.task is None:
        raise ValueError(f"{where}: the run has a task")
    policies = {name: replace(policy, acting=vary(policy.acting, **way)) for name, way in WAYS.items()}
    played: dict[str, Evaluation] = {}
    fell: dict[str, float] = {}
    seen: list[np.ndarray] = []
    for name, each in policies.items():
        watched = Watched(each)
        played[name] = evaluate(
            watched,
            job.task,
            episodes=episodes,
            seed=VALIDATION_SEED,
            latency_calls=0,
            execute=min(EXECUTE, policy.horizon),
        )
        fell[name] = float(np.mean(watched.fell))
        seen = seen or watched.seen
        print(where.name, name, played[name].score(job.task.metric), fell[name], flush=True)
    rows = np.linspace(0, len(seen) - 1, min(calls, len(seen))).round().astype(int)
    alone, together = times(policies, np.stack(seen)[rows])
    first = next(iter(WAYS))
    metric = job.task.metric
    return {
        "run": job.name,
        "task": job.task.name,
        "seed": job.seed,
        "metric": metric,
        "episodes": episodes,
        "ways": {
            name: {
                "metric": round(result.score(metric), 4),
                "difference": [round(end, 4) for end in astuple(result.minus(played[first], metric))],
                "success": None if result.successes is None else result.successes / episodes,
                "candidates": round(fell[name], 2),
                "mean_ms": round(alone[name], 3),
                "batch_ms": round(together[name], 4),
            }
            for name, result in played.items()
        },
    }


def rows(records: list[dict[str, Any]]) -> str:
    """The table of docs/annealed.md."""
    head = (
        "task",
        "candidates",
        "fell on average",
        "metric",
        "difference to all",
        "CPU of an action, one observation",
        "of all",
        "of many at once",
        "of all",
    )
    lines = []
    for record in records:
        whole = next(iter(record["ways"].values()))
        for name, way in record["ways"].items():
            middle, low, high = way["difference"]
            lines.append(
                (
                    record["task"],
                    name,
                    f"{way['candidates']:.1f}",
                    f"{way['metric']:.3f}",
                    "" if name == "all 32" else f"{middle:+.3f} ({low:+.3f} to {high:+.3f})",
                    f"{way['mean_ms']:.1f} ms",
                    f"{way['mean_ms'] / whole['mean_ms']:.2f}",
                    f"{way['batch_ms']:.2f} ms",
                    f"{way['batch_ms'] / whole['batch_ms']:.2f}",
                )
            )
    return table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run directories, or the word `document`")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--out", type=Path, default=RECORD)
    settings = parser.parse_args()
    if settings.runs == ["document"]:
        text = replaced(PAGE.read_text(), "effort", rows(json.loads(RECORD.read_text())))
        PAGE.write_text(text)
        return
    torch.set_num_threads(1)
    found = [measured(Path(run), settings.episodes, settings.calls) for run in settings.runs]
    write_atomically(settings.out, (json.dumps(found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
