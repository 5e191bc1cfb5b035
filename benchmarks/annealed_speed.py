"""How near training and acting of `annealed` are to torch.mm, on one thread: `python -m benchmarks.annealed_speed`.

A training step multiplies each weight of the encoder by 2·3 numbers per observation (forward, and backward to weights
and inputs), and each weight of the head by 2·6 per level, as the head also goes back to its input and training
differentiates both ways. What is counted is these products alone, over the time of the whole step: levels and noise,
the optimiser and the averaged weights included. The rate of torch.mm is that of the head's own product, batch · levels
× width × width, measured between the steps. Times are CPU times of the process; the tenth percentile is that of a
machine at rest, the median what other programs leave of it.
"""

import argparse
import json
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

from cebm.composition import vary
from cebm.demonstrations import Demonstrations
from cebm.denoising import DenoisingScore
from cebm.recipes import TRIALS
from cebm.trainer import Trainer


def measure(precision: str, steps: int) -> dict[str, Any]:
    """Observations and chunks of the sizes of Push-T, the recipe's own network, denoising alone."""
    random = np.random.default_rng(0)
    obs, actions = random.normal(size=(3000, 40)), random.uniform(-1, 1, (3000, 32))
    data = Demonstrations.from_arrays(obs.astype(np.float32), actions.astype(np.float32), np.arange(100, 3001, 100))
    trial = vary(TRIALS["annealed"], objective=DenoisingScore(), **{"energy.precision": precision})
    trainer = Trainer(trial, data, data, 0, steps=10_000)
    energy, batch, levels = trainer.learner.energy, trial.optimiser.batch_size, trial.objective.draws
    sizes = {name: sum(w.numel() for w in getattr(energy, name).parameters()) for name in ("encoder", "head", "noise")}
    operations = 6 * sizes["encoder"] * batch + (12 * sizes["head"] + 6 * sizes["noise"]) * batch * levels
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    left, right = torch.randn(batch * levels, 256).to(dtype), torch.randn(256, 256).to(dtype)
    for _ in range(10):
        trainer.step()
    took, products = [], []
    for _ in range(steps):
        began = process_time()
        trainer.step()
        took.append(process_time() - began)
        began = process_time()
        for _ in range(20):
            torch.mm(left, right)
        products.append((process_time() - began) / 20)
    result: dict[str, Any] = {"precision": precision, "gigaflops_of_a_step": round(operations / 1e9, 2)}
    for name, percent in (("median", 50), ("tenth", 10)):
        step, product = float(np.percentile(took, percent)), float(np.percentile(products, percent))
        rate = 2 * left.shape[0] * 256 * 256 / product
        result[name] = {
            "step_ms": round(step * 1e3, 2),
            "mm_gigaflops_per_second": round(rate / 1e9, 1),
            "share_of_mm": round(operations / step / rate, 2),
        }
    policy, walls, cpus = trainer.policy(), [], []
    for i in range(200):
        wall, cpu = perf_counter(), process_time()
        policy.act(data.obs[i])
        walls.append(perf_counter() - wall)
        cpus.append(process_time() - cpu)
    result["replan_wall_ms_median"] = round(float(np.median(walls)) * 1e3, 2)
    for name, percent in (("median", 50), ("tenth", 10)):
        result[name]["replan_cpu_ms"] = round(float(np.percentile(cpus, percent)) * 1e3, 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps([measure(precision, arguments.steps) for precision in ("float32", "bf16")], indent=1))


if __name__ == "__main__":
    main()
