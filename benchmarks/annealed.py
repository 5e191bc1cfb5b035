"""The settings of `annealed`, compared: one change at a time, several ways to act on the same weights.

    cebm demos push-t --from PATH --out runs/push-t.npz
    python -m benchmarks.annealed push-t recipe mirrored --seeds 100
    python -m benchmarks.annealed particle --seeds 100
    python -m benchmarks.annealed document

Seeds from 100 on and starts of validation: the results of docs/tasks.md have other seeds and other starts. Each
training is a run directory under --runs and resumes; a record `TASK-ARM-SEED.json` under --out is not measured again.
One thread.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.document import table
from benchmarks.task_studies import ANNEALED, CONTRAST, EXECUTE, MIRROR, push_t
from cebm.composition import vary
from cebm.denoising import DenoisingScore
from cebm.energies import NoiseConditional, NoiseConditionalTilt
from cebm.evaluation import VALIDATION_SEED, evaluate
from cebm.loading import load
from cebm.recipes import find_trial
from cebm.runs import Job, load_metrics, resume, train
from cebm.storage import write_atomically
from cebm.tasks import ParticleTask
from cebm.units import Gaussian, PlanarPose

LOW = {"objective": DenoisingScore(mean=-1.2)}
LARGE = {"inputs.jitter": (Gaussian((18, 19), 5.0), PlanarPose("0:18", 3.0, 0.03))}
AGENT = {"inputs.jitter": (Gaussian((18, 19), 5.0),)}
ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "particle": {
        "recipe": {},
        "low-levels": LOW,
        "contrast": {"objective": CONTRAST},
        "mixture-base": {"energy": NoiseConditionalTilt(NoiseConditional())},
    },
    "push-t": {
        "recipe": {},
        "low-levels": LOW,
        "low-levels-large-jitter": LOW | LARGE,
        "padding-dropped": {"inputs.padding": "drop"},
        "padding-dropped-agent-jitter": {"inputs.padding": "drop"} | AGENT,
        "mirrored": {"inputs.symmetries": MIRROR},
        "mirrored-large-jitter": {"inputs.symmetries": MIRROR} | LARGE,
        "mirrored-long": {"inputs.symmetries": MIRROR},
        "contrast": {"objective": CONTRAST},
    },
}
"""What each arm changes in the recipe."""
STEPS = {"particle": 10_000, "push-t": 20_000}
LONG = 5
"""How many times as long the arms train whose names end in "-long"."""
EPISODES = {"particle": 200, "push-t": 100}
NEAR = tuple(f"lowest within {reach:g} d" for reach in (0.25, 0.5, 0.7, 1.0, 1.5))
WAYS: dict[str, dict[str, Any]] = {
    "one draw": {"choice": "first", "candidates": 1},
    **{name: {"choice": "near", "reach": float(name.split()[2])} for name in NEAR},
    "lowest of 8": {"choice": "minimum", "candidates": 8},
    "lowest of 32": {"choice": "minimum"},
}
"""Ways to act on the same weights: changes of the search. d is the deviation of the actions."""
EXECUTED: dict[str, dict[str, Any]] = {
    **{f"executing {n}": {"execute": n} for n in (1, 2, 4, 16)},
    **{f"executing {n}, near the last plan": {"execute": n, "warm_start": True} for n in (1, 2, 4)},
}
"""Ways of Push-T's recipe to play its chunks: settings of the `Runner`."""
CLOSENESS = 1.0
"""Of the search, where it is told the last plan."""


def job_of(task: str, arm: str, seed: int) -> Job:
    """The training of one arm."""
    changes, steps = ARMS[task][arm], STEPS[task] * (LONG if arm.endswith("-long") else 1)
    if task == "push-t":
        recipe = push_t.recipes["annealed"]
        study = replace(push_t, recipes={arm: replace(recipe, settings={**ANNEALED, **changes}, steps=steps)})
        return study.job(arm, seed)
    trial = vary(find_trial("annealed"), **changes)
    return Job(
        arm, trial, ParticleTask(), episodes=2000, steps=steps, seed=seed, evaluate_every=steps, evaluation_episodes=1
    )


def measured(task: str, arm: str, seed: int, where: Path) -> dict[str, Any]:
    """Trains, unless that is done, and tries all ways to act on the same starts."""
    job = job_of(task, arm, seed)
    if not (where / "policy").exists():
        resume(where) if (where / "run.json").exists() else train(job, where)
    if job.task is None:
        raise ValueError(f"{arm}: an arm has a task")
    policy, usual = load(where / "policy"), {"execute": EXECUTE} if task == "push-t" else {}
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {name: (changes, usual) for name, changes in WAYS.items()}
    if (task, arm) == ("push-t", "recipe"):
        ways |= {name: ({"closeness": CLOSENESS}, effort) for name, effort in EXECUTED.items()}
    record: dict[str, Any] = {"task": task, "arm": arm, "seed": seed, "steps": job.steps, "episodes": EPISODES[task]}
    record |= {"seconds": load_metrics(where)[-1]["seconds"], "ways": {}}
    for name, (changes, effort) in ways.items():
        found = evaluate(
            replace(policy, acting=vary(policy.acting, **changes)),
            job.task,
            episodes=EPISODES[task],
            seed=VALIDATION_SEED,
            latency_calls=0,
            **effort,
        )
        rewards, reached = (np.array([row[of] for row in found.rows], float) for of in (job.task.metric, "success"))
        record["ways"][name] = {
            "metric": [round(float(rewards.mean()), 4), round(float(rewards.std() / len(rewards) ** 0.5), 4)],
            "success": round(float(reached.mean()), 4),
        }
        print(task, arm, seed, name, record["ways"][name], flush=True)
    return record


def rows(task: str, records: list[dict[str, Any]]) -> str:
    """The records of a task as a table."""
    shown = [name for name in (*WAYS, *EXECUTED) if any(name in record["ways"] for record in records)]
    head = ("arm", "seed", *shown)
    lines = [
        (record["arm"].replace("-", " "), record["seed"], *(cell(task, record["ways"].get(name)) for name in shown))
        for record in records
    ]
    return table(head, lines)


def cell(task: str, way: Mapping[str, Any] | None) -> str:
    """Success of the particle; of Push-T reward ± its standard error, and success."""
    if way is None:
        return ""
    if task == "particle":
        return f"{100 * way['success']:.1f} %"
    return f"{way['metric'][0]:.3f} ± {way['metric'][1]:.3f} ({way['success']:.2f})"


def documented(text: str, where: Path) -> str:
    """The page with the tables of all records, arms in the order of `ARMS`."""
    for task, arms in ARMS.items():
        found = [
            json.loads(path.read_text()) for arm in arms for path in sorted(where.glob(f"{task}-{arm}-[0-9]*.json"))
        ]
        before, rest = text.split(f"<!-- {task} settings: begin -->", 1)
        after = rest.split(f"<!-- {task} settings: end -->", 1)[1]
        shown = rows(task, found) if found else "Not measured yet."
        text = f"{before}<!-- {task} settings: begin -->\n\n{shown}\n\n<!-- {task} settings: end -->{after}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=[*ARMS, "document"])
    parser.add_argument("arms", nargs="*", metavar="ARM", help="all of the task where none is named")
    parser.add_argument("--seeds", nargs="+", type=int, default=[100])
    parser.add_argument("--runs", type=Path, default=Path("runs/annealed"))
    parser.add_argument("--out", type=Path, default=Path("docs/annealed"))
    settings = parser.parse_args()
    if settings.task == "document":
        page = Path("docs/annealed.md")
        page.write_text(documented(page.read_text(), settings.out))
        return
    unknown = set(settings.arms) - ARMS[settings.task].keys()
    if unknown:
        parser.error(f"there is no arm {', '.join(sorted(unknown))}; there are {', '.join(ARMS[settings.task])}")
    torch.set_num_threads(1)
    for seed in settings.seeds:
        for arm in settings.arms or ARMS[settings.task]:
            name = f"{settings.task}-{arm}-{seed}"
            if not (settings.out / f"{name}.json").exists():
                record = measured(settings.task, arm, seed, settings.runs / name)
                write_atomically(settings.out / f"{name}.json", (json.dumps(record) + "\n").encode())


if __name__ == "__main__":
    main()
