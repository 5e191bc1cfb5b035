"""The measurements behind docs/annealed.md: arms of the recipe at equal CPU time, and ways to act on their weights.

    python -m benchmarks.annealed particle denoise own-draws --seconds 120 --out docs/annealed
    python -m benchmarks.annealed pusht denoise --seconds 900 --batch 64 --rate 1e-3 --data pusht.npz
    python -m benchmarks.annealed document

One JSON record `TASK-ARM-SEED.json` per run; what has a record is not measured again, and a policy that was trained is
not trained again. One thread.
"""

import argparse
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

import cebm
from cebm.annealing import Annealed, AnnealedSearch
from cebm.composition import vary
from cebm.denoising import DenoisingScore, LevelContrast, Sum
from cebm.energies import NoiseConditional, NoiseConditionalTilt
from cebm.evaluation import TEST_SEED, evaluate
from cebm.negatives import InBatch, Mixture, ShortChains, Uniform
from cebm.optimisers import Adam
from cebm.recipes import Inputs, Trial
from cebm.tasks import ParticleTask, PushT
from cebm.trainer import Trainer
from cebm.units import Gaussian, PlanarPose, Relative

OWN = ShortChains(Annealed(), Uniform())
BOTH = Mixture((OWN, InBatch()), (0.5, 0.5))
SCORE = DenoisingScore()
AFFINE = {"energy.form": "affine"}


def contrast(source: Any, weight: float = 0.1, every: int = 4, levels: tuple[float, ...] = (0.2,)) -> Sum:
    """Denoising with a contrast beside it."""
    return Sum((SCORE, LevelContrast(source, 7, levels)), (1.0, weight), (1, every))


HIGH = DenoisingScore(mean=-0.5)

ARMS: dict[str, dict[str, Any]] = {
    "denoise": {"objective": SCORE},
    "denoise-high": {"objective": HIGH},
    "denoise-higher": {"objective": DenoisingScore(mean=0.2)},
    "own-draws-high": {"objective": Sum((HIGH, LevelContrast(OWN, 7)), (1.0, 0.1), (1, 4))},
    "denoise-scalar": {"objective": SCORE, "energy.form": "scalar"},
    "denoise-affine": {"objective": SCORE, **AFFINE},
    "denoise-half-squares": {"objective": SCORE, "energy.form": "half-squared-difference"},
    "own-draws": {"objective": contrast(OWN)},
    "own-draws-1": {"objective": contrast(OWN, 1.0)},
    "own-draws-levels": {"objective": contrast(OWN, levels=(0.2, 0.5, 1.0))},
    "in-batch": {"objective": contrast(InBatch())},
    "in-batch-levels": {"objective": contrast(InBatch(), levels=(0.2, 0.5, 1.0))},
    "both": {"objective": contrast(BOTH)},
    "base": {"objective": SCORE, "around": NoiseConditionalTilt},
}
"""What each arm changes; `around` builds another energy around the start's."""

PROCEDURES: dict[str, dict[str, Any]] = {
    "one draw": {"candidates": 1, "choice": "first"},
    "lowest of 4": {"candidates": 4},
    "lowest of 32": {},
    "softmax over 32": {"choice": "softmax"},
}
"""Ways to act on the same weights."""


def particle_trial(arm: dict[str, Any], settings: argparse.Namespace) -> Trial:
    """The arm with a small network, as the particle's actions have two columns."""
    start = Trial(
        NoiseConditional(width=128, encoder_width=256, precision=settings.precision),
        SCORE,
        optimiser=Adam(settings.rate, Timed(settings.seconds, 0.7), settings.batch, average=0.999, weight_decay=1e-4),
        acting=AnnealedSearch(),
        inputs=Inputs("standardise"),
    )
    return composed(start, arm)


def composed(start: Trial, arm: dict[str, Any]) -> Trial:
    """The start with what an arm changes."""
    changes = dict(arm)
    around = changes.pop("around", None)
    if around is not None:
        changes["energy"] = around(start.energy)
    return vary(start, **changes)


@dataclass(frozen=True)
class Timed:
    """A rate that rises over 500 steps, stays, and falls to 0 over the last `fall` share of so many CPU seconds: arms
    whose steps differ in cost are compared at equal time."""

    seconds: float
    fall: float
    began: float = field(default_factory=process_time)

    @property
    def left(self) -> float:
        """The share of the time that is left."""
        return max(0.0, 1 - (process_time() - self.began) / self.seconds)

    def rate(self, peak: float, step: int, steps: int | None, steps_per_epoch: int) -> float:
        return peak * min(1.0, (step + 1) / 500) * min(1.0, self.left / self.fall)


def trained(trainer: Trainer, seconds: float) -> dict[str, Any]:
    """Trains until the time ends."""
    rows, began = [], process_time()
    while process_time() - began < seconds:
        log = trainer.step()
        if trainer.step_count % 1000 == 0:
            rows.append({"step": trainer.step_count, **{name: round(float(v), 5) for name, v in log.items()}})
            print(rows[-1], flush=True)
    return {"steps": trainer.step_count, "cpu_seconds": seconds, "rows": rows[-3:]}


def particle(arm: str, seed: int, where: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """2,000 demonstrations of the 2-D particle, one action, 200 held-out episodes."""
    torch.manual_seed(seed)
    task = ParticleTask()
    trial = particle_trial(ARMS[arm], settings)
    record: dict[str, Any] = {"task": "particle", "arm": arm, "seed": seed}
    if not (where / "header.json").exists():
        data = task.demonstrations(2050, seed)
        training, validation = data.select(np.arange(2000)), data.select(np.arange(2000, 2050))
        trainer = Trainer(trial, training, validation, seed, limits=task.limits, steps=10**9)
        record |= trained(trainer, settings.seconds)
        trainer.policy().save(where)
        (where / "trained.json").write_text(json.dumps(record))
    record = json.loads((where / "trained.json").read_text())
    policy = cebm.load(where)
    record["success"], rows = {}, {}
    for name, changes in PROCEDURES.items():
        acting = vary(trial.acting, **changes)
        found = evaluate(replace(policy, acting=acting), task, episodes=200, seed=TEST_SEED, latency_calls=0)
        rows[name] = [bool(row["success"]) for row in found.rows]
        record["success"][name] = float(np.mean(rows[name]))
        print(arm, name, record["success"][name], flush=True)
    record["paired"] = paired(rows, "one draw")
    return record


def pusht(arm: str, seed: int, where: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """206 human demonstrations, keypoints; held-out starts, the same for all ways to act."""
    record: dict[str, Any] = {"task": "pusht", "arm": arm, "seed": seed}
    task, trial = PushT(), pusht_trial(ARMS[arm], settings)
    if not (where / "header.json").exists():
        training, validation = task.convert(settings.data).split(0.05, seed)
        trainer = Trainer(trial, training, validation, seed, limits=task.limits, steps=10**9)
        record |= trained(trainer, settings.seconds)
        trainer.policy().save(where)
        (where / "trained.json").write_text(json.dumps(record))
    record = json.loads((where / "trained.json").read_text())
    policy, rows = cebm.load(where), {}
    record["reward"], record["success"], record["episodes"] = {}, {}, settings.episodes
    for name in settings.procedures:
        acting = vary(trial.acting, **PROCEDURES[name])
        found = evaluate(replace(policy, acting=acting), task, episodes=settings.episodes, latency_calls=0, execute=8)
        rows[name] = [row["reward"] for row in found.rows]
        error = np.std(rows[name], ddof=1) / settings.episodes**0.5
        record["reward"][name] = [round(float(np.mean(rows[name])), 4), round(float(error), 4)]
        record["success"][name] = float(np.mean([row["success"] for row in found.rows]))
        print(arm, name, record["reward"][name], record["success"][name], flush=True)
    record["paired"] = paired(rows, settings.procedures[0])
    return record


def pusht_trial(arm: dict[str, Any], settings: argparse.Namespace) -> Trial:
    """The arm with the recipe's network. Actions are relative to the agent, in units of 64 px, with a deviation of
    about 1; the state of a training example moves by 5 px (agent), 3 px and 0.03 rad (block)."""
    start = Trial(
        NoiseConditional(deviation=1.0, precision=settings.precision),
        SCORE,
        optimiser=Adam(settings.rate, Timed(settings.seconds, 0.5), settings.batch, average=0.999, weight_decay=1e-4),
        acting=AnnealedSearch(),
        inputs=Inputs(
            "standardise",
            history=2,
            horizon=16,
            relative=Relative((0, 1), (18, 19), 64.0),
            jitter=(Gaussian((18, 19), 5.0), PlanarPose("0:18", 3.0, 0.03)),
        ),
    )
    return composed(start, arm)


def paired(rows: dict[str, list[Any]], against: str) -> dict[str, list[float]]:
    """Mean and standard error of the differences, episode by episode."""
    found = {}
    for name in rows:
        away = np.array(rows[name], float) - np.array(rows[against], float)
        found[name] = [round(float(away.mean()), 4), round(float(away.std(ddof=1) / len(away) ** 0.5), 4)]
    return found


def table(task: str, records: list[dict[str, Any]]) -> str:
    """The records of a task as a table: success or reward of each way to act, and the lowest of 32 against one draw."""
    shown = [name for name in PROCEDURES if all(name in record["paired"] for record in records)]
    head = ["arm", "seed", "CPU seconds, steps", *shown, "lowest of 32 minus one draw"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for record in records:
        cells = [record["arm"], str(record["seed"]), f"{record['cpu_seconds']:.0f}, {record['steps']:,}"]
        for name in shown:
            if task == "particle":
                cells.append(f"{100 * record['success'][name]:.1f} %")
            else:
                mean, error = record["reward"][name]
                cells.append(f"{mean:.3f} ± {error:.3f} ({record['success'][name]:.2f})")
        mean, error = record["paired"]["lowest of 32"]
        scale, digits = (100, 1) if task == "particle" else (1, 3)
        cells.append(f"{scale * mean:+.{digits}f} ± {scale * error:.{digits}f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def documented(text: str, where: Path) -> str:
    """The page with the tables of all records."""
    for task in ("particle", "pusht"):
        records = [json.loads(path.read_text()) for path in sorted(where.glob(f"{task}-*.json"))]
        before, rest = text.split(f"<!-- {task}: begin -->", 1)
        after = rest.split(f"<!-- {task}: end -->", 1)[1]
        shown = table(task, records) if records else "Not measured yet."
        text = f"{before}<!-- {task}: begin -->\n\n{shown}\n\n<!-- {task}: end -->{after}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["particle", "pusht", "document"])
    parser.add_argument("arms", nargs="*", metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--precision", default="float32", choices=["float32", "bf16"])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/pusht/pusht.npz"))
    parser.add_argument("--episodes", type=int, default=100, help="of Push-T, per way to act")
    parser.add_argument("--procedures", nargs="+", default=["one draw", "lowest of 32", "softmax over 32"])
    parser.add_argument("--runs", type=Path, default=Path("runs/annealed"))
    parser.add_argument("--out", type=Path, default=Path("docs/annealed"))
    settings = parser.parse_args()
    unknown = set(settings.arms) - ARMS.keys()
    if unknown:
        parser.error(f"there is no arm {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    if settings.task == "document":
        page = Path("docs/annealed.md")
        page.write_text(documented(page.read_text(), settings.out))
        return
    torch.set_num_threads(1)
    settings.out.mkdir(parents=True, exist_ok=True)
    for seed in settings.seeds:
        for arm in settings.arms:
            name = f"{settings.task}-{arm}-{seed}"
            record = settings.out / f"{name}.json"
            if record.exists():
                continue
            (settings.runs / name).mkdir(parents=True, exist_ok=True)
            measure = {"particle": particle, "pusht": pusht}[settings.task]
            measured = measure(arm, seed, settings.runs / name, settings)
            record.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
