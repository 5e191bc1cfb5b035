"""Results on real tasks: many runs of the recipes, each evaluated in several ways on the same held-out episodes.

    cebm demos push-t --from PATH --out runs/push-t.npz
    cebm sweep benchmarks/task_studies.py:push_t --out runs/push-t-study --workers 2
    python -m benchmarks.task_studies runs/push-t-study docs/tasks/push-t.json

    cebm sweep benchmarks/task_studies.py:push_t_parts --out runs/push-t-parts --workers 2
    python -m benchmarks.task_studies runs/push-t-parts docs/tasks/push-t-parts.json \
        --reference "steady, horizon 16"

    cebm demos forks --episodes 223 --out runs/forks.npz
    cebm sweep benchmarks/task_studies.py:forks --out runs/forks-study --workers 2
    python -m benchmarks.task_studies runs/forks-study docs/tasks/forks.json --metric success --experts forks

    for t in reach push pick-place door-open drawer-open drawer-close button-press-topdown peg-insert-side window-open \
        window-close; do for s in "" :mixed; do
        cebm demos metaworld:$t-v3$s --episodes 23 --out runs/metaworld/$t-v3${s/:/-}.npz; done; done
    cebm sweep benchmarks/task_studies.py:metaworld --out runs/metaworld-study --workers 2
    python -m benchmarks.task_studies runs/metaworld-study docs/tasks/metaworld.json --metric success \
        --experts metaworld

One setting for all recipes: history 2, horizon 16, 8 actions of a chunk are executed, the last checkpoint acts, 200
held-out episodes for each training seed. Differences are paired by seed and episode. `--experts` plays the expert of
each task as often, on the seed of the held-out episodes. A tenth of the demonstrations is held out, also where nothing
is chosen by it: 206 of Push-T leave 186 to train on, 223 of Forks leave 200 and 23 of a Meta-World task leave 20.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import pi
from pathlib import Path
from typing import Any

import numpy as np

from cebm.acting import Search
from cebm.annealing import Annealed
from cebm.denoising import DenoisingScore, LevelContrast, Sum
from cebm.evaluation import TEST_SEED, evaluate
from cebm.intervals import Interval
from cebm.loading import load
from cebm.negatives import ShortChains, Uniform
from cebm.policy import EnergyPolicy
from cebm.recipes import find_trial, vary
from cebm.runs import Job, load_job, load_metrics
from cebm.samplers import Constant, Langevin
from cebm.storage import write_atomically
from cebm.sweep.results import records
from cebm.sweep.studies import Planned, Record
from cebm.tasks import Forks, MetaWorld, PushT, Task
from cebm.tasks.metaworld import Style
from cebm.tasks.pusht import KEYPOINTS
from cebm.units import Gaussian, PlanarMirror, PlanarPose, Relative

EPISODES = 200
HISTORY, HORIZON, EXECUTE = 2, 16, 8


AS_TRAINED = "as trained"
"""The way to act that the recipe itself has."""


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


_STILL = Langevin("ibc", 1, Constant(1e-12), noise=0.0, margin=None)
"""Leaves candidates where they were drawn."""
NEAR = Way(
    lambda policy: replace(policy, acting=vary(policy.acting, closeness=10.0, inertia=0.75)),
    {"execute": 1, "warm_start": True},
)
"""Draws anew at every step, prefers draws that go on with the last plan, and keeps most of that."""
_ANNEALED = {
    "as trained": Way(),
    "one draw": way_of(choice="first", candidates=1),
    "lowest": way_of(choice="minimum"),
}
WAYS: dict[str, dict[str, Way]] = {
    "annealed": _ANNEALED,
    "annealed, mirrored": _ANNEALED,
    "annealed, with contrast": _ANNEALED,
    "steady": {
        "as trained": Way(),
        "without f": Way(without_tilt),
        "one draw": way_of(candidates=1, keep=1),
        "without the denoising step": way_of(sampler=_STILL),
        "executing 1": Way(effort={"execute": 1}),
        "executing 1, from the last plan": Way(effort={"execute": 1, "warm_start": True}),
        "executing 1, near the last plan": NEAR,
    },
    "steady, 32 components": {
        "as trained": Way(),
        "without f": Way(without_tilt),
        "executing 1, near the last plan": NEAR,
    },
    "steady, horizon 16": {"as trained": Way(), **{f"executing {n}": Way(effort={"execute": n}) for n in (4, 16)}},
    "mdn": {"as trained": Way(), "drawn": Way(lambda policy: replace(policy, acting=Search(_STILL, 1, "draw")))},
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
        trial = vary(find_trial(recipe.trial), **{**window, **recipe.settings})
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


# Actions from the agent's position, in units of 64 px; the state moves by 5 px (agent), 1 px and 0.01 rad (block). A
# chunk may reach beyond its episode's end by the actions that are not executed.
RELATIVE = {
    "inputs.relative": Relative((0, 1), (18, 19), 64.0),
    "inputs.jitter": (Gaussian((18, 19), 5.0), PlanarPose("0:18", 1.0, 0.01)),
    "inputs.padding": EXECUTE - 1,
}
ANNEALED = {**RELATIVE, "energy.deviation": 1.0, "energy.precision": "measured"}
"""The precision does not change what is measured of an episode; "measured" trains in bf16 where that is faster."""
MIRROR = PlanarMirror("18:20", (0, 1), (256.0, 256.0), 3 * pi / 4, "0:18", tuple(map(tuple, KEYPOINTS.tolist())))
"""The goal of Push-T is its own image in this line."""
CONTRAST = Sum((DenoisingScore(), LevelContrast(ShortChains(Annealed(), Uniform()))), (1.0, 0.1), (1, 4))
"""InfoNCE at a level against the model's own draws, beside denoising."""
push_t = Results(
    PushT(),
    "runs/push-t.npz",
    {
        "annealed": Recipe("annealed", 20_000, ANNEALED),
        "annealed, mirrored": Recipe("annealed", 20_000, {**ANNEALED, "inputs.symmetries": MIRROR}),
        "steady": Recipe("steady", 10_000),
        "steady, relative": Recipe("steady", 10_000, RELATIVE),
        "annealed, with contrast": Recipe("annealed", 20_000, {**ANNEALED, "objective": CONTRAST}),
        "mdn": Recipe("mdn", 3_000),
        "mse": Recipe("mse", 3_000),
        "two-step": Recipe("two-step", 3_000),
        "nearest": Recipe("nearest", 1),
        "ibc": Recipe("ibc", 3_000),
    },
)


push_t_parts = Results(
    PushT(),
    push_t.data,
    {
        "steady, horizon 16": Recipe("steady", 3_000),
        "steady, horizon 8": Recipe("steady", 3_000, {"inputs.horizon": 8}),
        "steady, horizon 32": Recipe("steady", 3_000, {"inputs.horizon": 32}),
        "steady, padding dropped": Recipe("steady", 3_000, {"inputs.padding": "drop"}),
        "steady, padding masked": Recipe("steady", 3_000, {"inputs.padding": "mask"}),
        "steady, history 1": Recipe("steady", 3_000, {"inputs.history": 1}),
    },
)
"""What horizon, padding and history bring `steady`, in shorter trainings, all against the first row."""

# ---------------------------------------------------------------------------------------------- Forks

forks = Results(
    Forks(),
    "runs/forks.npz",
    {
        "steady": Recipe("steady", 3_000),
        # There are 24 ways, and eight components for them.
        "steady, 32 components": Recipe("steady", 3_000, {"components": 32}),
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


def _metaworld(name: str, style: Style, recipes: Mapping[str, Recipe], seeds: Sequence[int]) -> Results:
    data = f"runs/metaworld/{name}{'' if style == 'scripted' else '-' + style}.npz"
    return Results(MetaWorld(name, style), data, recipes, seeds, episodes=20, case=f"{name}, {style}")


# Standardised, as `steady` has it: min-max scaling would squeeze the columns of objects that hardly turn.
_TRAINED = {
    "steady": Recipe("steady", 2_000),
    "mse": Recipe("mse", 2_000, {"inputs.obs_scaling": "standardise"}),
}
metaworld = Several(
    [
        *(_metaworld(name, style, _TRAINED, tuple(range(5))) for style in STYLES for name in MT10),
        # It has no randomness: one seed says all.
        *(_metaworld(name, style, {"nearest": Recipe("nearest", 1)}, (0,)) for style in STYLES for name in MT10),
    ]
)
"""Of each seed the mixed demonstrations come first, since they tell the recipes apart."""

# ---------------------------------------------------------------------------------------------- measuring


def measured(directory: Path) -> dict[str, Any]:
    """Every episode's metric and success by each way to act, and the time of training."""
    job, policy = load_job(directory), load(directory / "policy")
    if job.task is None:
        raise ValueError(f"{directory}: a run of this study has a task")
    found: dict[str, Any] = {"seconds": load_metrics(directory)[-1]["seconds"], "ways": {}}
    for name, way in WAYS.get(job.name, {AS_TRAINED: Way()}).items():
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


def table(rows: Iterable[Record], metric: str, reference: str | None = None) -> dict[str, dict[str, Any]]:
    """By recipe and way: means over seeds with 95 % intervals, and the paired differences to the recipe as trained
    and, where one is named, to the `reference` as trained, over the seeds that both have."""
    grouped: dict[str, list[Record]] = {}
    for row in sorted(rows, key=lambda row: int(row["seed"])):
        if "diverged" not in row["result"]:
            grouped.setdefault(row["label"], []).append(row)
    if reference is not None and reference not in grouped:
        raise ValueError(f"there is no recipe {reference!r} to compare with; there are {', '.join(grouped)}")
    return {
        f"{recipe}, {way}": {
            "recipe": recipe,
            "way": way,
            "seeds": [row["seed"] for row in runs],
            "seconds": Interval.of([row["result"]["seconds"] for row in runs]).to_json(),
            **{column: Interval.of(_means(runs, way, column)).to_json() for column in _columns(runs[0], way, metric)},
            "to as trained": None if way == AS_TRAINED else _paired(runs, way, runs, metric),
            "to the reference": (
                None
                if reference is None or (recipe, way) == (reference, AS_TRAINED)
                else _paired(runs, way, grouped[reference], metric)
            ),
            "action_ms": float(np.median([row["result"]["ways"][way]["action_ms"] for row in runs])),
        }
        for recipe, runs in grouped.items()
        for way in runs[0]["result"]["ways"]
    }


def _columns(run: Record, way: str, metric: str) -> list[str]:
    """The metric, success, and what the task says of all episodes together."""
    found = run["result"]["ways"][way]
    return list(dict.fromkeys([metric, "success", *(name for name in found if name not in (metric, "action_ms"))]))


def _means(runs: Sequence[Record], way: str, column: str) -> list[float]:
    return [float(np.mean(run["result"]["ways"][way][column])) for run in runs]


def _paired(runs: Sequence[Record], way: str, others: Sequence[Record], metric: str) -> list[float] | None:
    """Mean difference of this way to the others as trained and its 95 % interval, over all episodes of the seeds that
    both have; None where there are none."""
    by_seed = {run["seed"]: run["result"]["ways"][AS_TRAINED][metric] for run in others}
    pairs = [(run["result"]["ways"][way][metric], by_seed[run["seed"]]) for run in runs if run["seed"] in by_seed]
    if not pairs:
        return None
    one, other = (np.concatenate(values) for values in zip(*pairs, strict=True))
    half = 1.96 * float(np.std(one - other, ddof=1)) / len(one) ** 0.5
    mean = float(np.mean(one - other))
    return [mean, mean - half, mean + half]


def expert(task: Task) -> dict[str, float]:
    """How often the expert succeeds and, where the task measures it, how varied its ways are; from what it writes into
    the header of its demonstrations. (Of Meta-World as many episodes are played as it takes to succeed so often.)"""
    told = task.demonstrations(EPISODES, TEST_SEED).metadata
    if "expert_failures" in told:
        return {"success": EPISODES / (EPISODES + told["expert_failures"])}
    return {"success": told["expert_successes"] / EPISODES, "entropy": told["expert_entropy"]}


def experts(study: Results | Several) -> dict[str, dict[str, float]]:
    """The expert of each of a study's tasks, by the study's name for it."""
    studies = study.studies if isinstance(study, Several) else [study]
    return {case: expert(task) for case, task in {each.case: each.task for each in studies}.items()}


def with_others(found: list[Record], known: Iterable[Record]) -> list[Record]:
    """What was found, and of what is known the runs (a recipe with a seed) that were not made again."""
    again = {(row["label"], row["seed"]) for row in found}
    return [*found, *(row for row in known if (row["label"], row["seed"]) not in again)]


def main() -> None:
    """Writes the table of a study's folder, and prints it."""
    parser = argparse.ArgumentParser(description="The table of a study of real tasks.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--metric", default="reward")
    parser.add_argument("--reference", help="a recipe; all others are compared with it, by seed and episode")
    parser.add_argument("--experts", choices=("forks", "metaworld"), help="a study whose experts are played, too")
    parser.add_argument("--add", action="store_true", help="keep the records of OUT that FOLDER has not")
    arguments = parser.parse_args()
    found = [*records(arguments.folder).values()]
    if arguments.add:
        found = with_others(found, json.loads(arguments.out.read_text())["records"])
    rows = table(found, arguments.metric, arguments.reference)
    for name, row in rows.items():
        value, rate = row[arguments.metric], row["success"]
        print(
            f"{name:<45} {arguments.metric} {value[0]:.3f}  success {rate[0]:.3f}  {len(row['seeds'])} seeds  "
            f"{row['seconds'][0]:.0f} s  {row['action_ms']:.2f} ms"
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    plain = {"table": rows, "records": [{k: v for k, v in row.items() if k != "settings"} for row in found]}
    if arguments.experts is not None:
        plain["experts"] = experts(forks if arguments.experts == "forks" else metaworld)
    write_atomically(arguments.out, (json.dumps(plain) + "\n").encode())


if __name__ == "__main__":
    main()
