"""Results on real tasks: many runs of the recipes, each evaluated in several ways on the same held-out episodes.

    cebm demos push-t --from PATH --out runs/push-t.npz
    cebm sweep benchmarks/task_studies.py:push_t --out runs/push-t-study --workers 2
    python -m benchmarks.task_studies runs/push-t-study docs/tasks/push-t.json

    cebm demos forks --episodes 223 --out runs/forks.npz
    cebm sweep benchmarks/task_studies.py:forks --out runs/forks-study --workers 2
    python -m benchmarks.task_studies runs/forks-study docs/tasks/forks.json --metric success

    for t in reach push pick-place door-open drawer-open drawer-close button-press-topdown peg-insert-side window-open \
        window-close; do for s in "" :mixed; do
        cebm demos metaworld:$t-v3$s --episodes 23 --out runs/metaworld/$t-v3${s/:/-}.npz; done; done
    cebm sweep benchmarks/task_studies.py:metaworld --out runs/metaworld-study --workers 2
    python -m benchmarks.task_studies runs/metaworld-study docs/tasks/metaworld.json --metric success

One setting for all recipes: history 2, horizon 16, 8 actions of a chunk are executed, the last checkpoint acts, 200
held-out episodes for each training seed. Differences are paired by seed and episode. A tenth of the demonstrations is
held out, also where nothing is chosen by it: 206 of Push-T leave 186 to train on, 223 of Forks leave 200 and 23 of a
Meta-World task leave 20.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cebm.denoising import DenoisingScore
from cebm.evaluation import TEST_SEED, evaluate
from cebm.intervals import Interval
from cebm.loading import load
from cebm.policy import EnergyPolicy
from cebm.recipes import find_trial, vary
from cebm.runs import Job, load_job, load_metrics
from cebm.storage import write_atomically
from cebm.sweep.results import records
from cebm.sweep.studies import Planned, Record
from cebm.tasks import Forks, MetaWorld, PushT, Task
from cebm.tasks.metaworld import Style
from cebm.units import Gaussian, PlanarPose, Relative

EPISODES = 200
HISTORY, HORIZON, EXECUTE = 2, 16, 8


@dataclass(frozen=True)
class Way:
    """A way to let trained weights act."""

    change: Callable[[EnergyPolicy], EnergyPolicy] = lambda policy: policy
    """Makes the policy that acts from the one that was trained."""
    effort: Mapping[str, Any] = field(default_factory=lambda: {"execute": EXECUTE})
    """Settings of the `Runner`."""


def without_tilt(policy: EnergyPolicy) -> EnergyPolicy:
    """The policy with the learned part f of E = f − log q ignored: its base alone acts."""
    base: Any = getattr(policy.energy, "base", None)
    if base is None:
        raise ValueError(f"{policy} has no base that could act alone")
    return replace(policy, energy=base)


def way_of(**acting: Any) -> Way:
    """Another way to search, by settings of the policy's own."""
    return Way(lambda policy: replace(policy, acting=vary(policy.acting, **acting)))


_ANNEALED = {
    "as trained": Way(),
    "one draw": way_of(choice="first", candidates=1),
    "one draw of ten steps": way_of(**{"choice": "first", "candidates": 1, "sampler.steps": 10}),
    "softmax": way_of(choice="softmax"),
}
WAYS: dict[str, dict[str, Way]] = {
    "annealed": _ANNEALED,
    "annealed, padding dropped": _ANNEALED,
    "denoising alone": _ANNEALED,
    "steady": {
        "as trained": Way(),
        "without f": Way(without_tilt),
        "executing 1": Way(effort={"execute": 1}),
        "executing 1, from the last plan": Way(effort={"execute": 1, "warm_start": True}),
    },
}
"""Ways by recipe; one that is not here acts as trained."""


@dataclass(frozen=True)
class Recipe:
    """A recipe of a study, with the settings that differ from it."""

    trial: str
    steps: int
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """A study: recipes with their numbers of steps, on one task, at every seed; the first seed of all recipes first."""

    task: Task
    data: str
    """Demonstrations, a file."""
    recipes: Mapping[str, Recipe]
    """By the name of the row in the table."""
    seeds: Sequence[int] = tuple(range(5))
    episodes: int | None = None
    """Demonstrations to train on, at most; None: all that are not held out."""
    case: str = ""
    """What stands before the recipe in a row's name, where a study has several tasks: "push-v3, mixed"."""

    measure = "benchmarks.task_studies:measured"

    def plan(self, finished: Iterable[Record] = ()) -> list[Planned]:
        return [Planned(self.job(name, seed), {"recipe": name}) for seed in self.seeds for name in self.recipes]

    def job(self, name: str, seed: int) -> Job:
        recipe = self.recipes[name]
        steps, window = recipe.steps, {"inputs.history": HISTORY, "inputs.horizon": HORIZON}
        trial = vary(find_trial(recipe.trial), **window, **recipe.settings)
        # Nothing is chosen by validation: the last checkpoint counts, so that one look at the end is enough.
        return Job(
            f"{self.case}: {name}" if self.case else name,
            trial,
            self.task,
            self.data,
            episodes=self.episodes,
            steps=steps,
            seed=seed,
            evaluate_every=steps,
            evaluation_episodes=1,
        )


@dataclass(frozen=True)
class Several:
    """Studies of several tasks as one: the first seed of all tasks first."""

    studies: Sequence[Results]

    measure = Results.measure

    def plan(self, finished: Iterable[Record] = ()) -> list[Planned]:
        found = [each for study in self.studies for each in study.plan(finished)]
        return sorted(found, key=lambda each: each.job.seed)


# Actions from the agent's position, in units of 64 px; the state moves by 5 px (agent), 3 px and 0.03 rad (block).
RELATIVE = {
    "inputs.relative": Relative((0, 1), (18, 19), 64.0),
    "inputs.jitter": (Gaussian((18, 19), 5.0), PlanarPose("0:18", 3.0, 0.03)),
}
push_t = Results(
    PushT(),
    "runs/push-t.npz",
    {
        "annealed": Recipe("annealed", 20_000, {**RELATIVE, "energy.deviation": 1.0}),
        # Without the windows that go beyond an episode's end, whose repeated last action teaches to stand still.
        "annealed, padding dropped": Recipe(
            "annealed", 20_000, {**RELATIVE, "energy.deviation": 1.0, "inputs.padding": "drop"}
        ),
        "steady": Recipe("steady", 10_000),
        "steady, relative": Recipe("steady", 10_000, RELATIVE),
        "denoising alone": Recipe(
            "annealed", 20_000, {**RELATIVE, "energy.deviation": 1.0, "objective": DenoisingScore()}
        ),
        "mdn": Recipe("mdn", 3_000),
        "mse": Recipe("mse", 3_000),
        "two-step": Recipe("two-step", 3_000),
        "nearest": Recipe("nearest", 1),
        "ibc": Recipe("ibc", 3_000),
    },
)


# ---------------------------------------------------------------------------------------------- Forks

forks = Results(
    Forks(),
    "runs/forks.npz",
    {
        "steady": Recipe("steady", 3_000),
        "mse": Recipe("mse", 3_000),
        "nearest": Recipe("nearest", 1),
        "two-step": Recipe("two-step", 3_000),
        "mdn": Recipe("mdn", 3_000),
        "ibc": Recipe("ibc", 1_000),
        "annealed": Recipe("annealed", 5_000),
    },
    episodes=200,
)

# ---------------------------------------------------------------------------------------------- Meta-World

MT10 = (
    "reach-v3",
    "push-v3",
    "pick-place-v3",
    "door-open-v3",
    "drawer-open-v3",
    "drawer-close-v3",
    "button-press-topdown-v3",
    "peg-insert-side-v3",
    "window-open-v3",
    "window-close-v3",
)
"""The ten tasks of Meta-World's own MT10 benchmark, so that nobody chose them after a result."""
STYLES: Sequence[Style] = ("mixed", "scripted")
metaworld = Several(
    [
        Results(
            MetaWorld(name, style),
            f"runs/metaworld/{name}{'' if style == 'scripted' else '-' + style}.npz",
            {"steady": Recipe("steady", 2_000), "mse": Recipe("mse", 2_000)},
            episodes=20,
            case=f"{name}, {style}",
        )
        for name in MT10
        for style in STYLES
    ]
)

# ---------------------------------------------------------------------------------------------- measuring


def measured(directory: Path) -> dict[str, Any]:
    """Every episode's metric and success by each way to act, and the time of training."""
    job, policy = load_job(directory), load(directory / "policy")
    if job.task is None:
        raise ValueError(f"{directory}: a run of this study has a task")
    found: dict[str, Any] = {"seconds": load_metrics(directory)[-1]["seconds"], "ways": {}}
    for name, way in WAYS.get(job.name, {"as trained": Way()}).items():
        played = evaluate(
            way.change(policy), job.task, episodes=EPISODES, seed=TEST_SEED, latency_calls=20, **way.effort
        )
        found["ways"][name] = {
            job.task.metric: [round(float(row[job.task.metric]), 4) for row in played.rows],
            "success": [int(bool(row["success"])) for row in played.rows],
            "action_ms": round(played.action_ms_p50, 3),
            **{name: round(value, 4) for name, value in played.overall.items()},
        }
    return found


def table(rows: Iterable[Record], metric: str) -> dict[str, dict[str, Any]]:
    """By recipe and way: means over seeds with 95 % intervals, and the paired difference to the recipe as trained."""
    grouped: dict[str, list[Record]] = {}
    for row in sorted(rows, key=lambda row: int(row["seed"])):
        if "diverged" not in row["result"]:
            grouped.setdefault(row["label"], []).append(row)
    return {
        f"{recipe}, {way}": {
            "seeds": [row["seed"] for row in runs],
            "seconds": Interval.of([row["result"]["seconds"] for row in runs]).to_json(),
            **{column: Interval.of(_means(runs, way, column)).to_json() for column in (metric, "success")},
            "to as trained": _paired(runs, way, metric),
            "action_ms": float(np.median([row["result"]["ways"][way]["action_ms"] for row in runs])),
        }
        for recipe, runs in grouped.items()
        for way in runs[0]["result"]["ways"]
    }


def _means(runs: Sequence[Record], way: str, column: str) -> list[float]:
    return [float(np.mean(run["result"]["ways"][way][column])) for run in runs]


def _paired(runs: Sequence[Record], way: str, metric: str) -> list[float] | None:
    """Mean difference to acting as trained and its 95 % interval over all episodes of all seeds."""
    if way == "as trained":
        return None
    one, other = (np.concatenate([run["result"]["ways"][each][metric] for run in runs]) for each in (way, "as trained"))
    half = 1.96 * float(np.std(one - other, ddof=1)) / len(one) ** 0.5
    mean = float(np.mean(one - other))
    return [mean, mean - half, mean + half]


def main() -> None:
    """Writes the table of a study's folder, and prints it."""
    parser = argparse.ArgumentParser(description="The table of a study of real tasks.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--metric", default="reward")
    arguments = parser.parse_args()
    found = list(records(arguments.folder).values())
    rows = table(found, arguments.metric)
    for name, row in rows.items():
        value, rate = row[arguments.metric], row["success"]
        print(
            f"{name:<45} {arguments.metric} {value[0]:.3f}  success {rate[0]:.3f}  {len(row['seeds'])} seeds  "
            f"{row['seconds'][0]:.0f} s  {row['action_ms']:.2f} ms"
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    plain = {"table": rows, "records": [{k: v for k, v in row.items() if k != "settings"} for row in found]}
    write_atomically(arguments.out, (json.dumps(plain) + "\n").encode())


if __name__ == "__main__":
    main()
