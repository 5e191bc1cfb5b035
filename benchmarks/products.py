"""What oneDNN's product brings a training step on this processor: `python -m benchmarks.products`.

Each recipe trains with MKL's products and with oneDNN's in turns, on one thread; the ratio is that of the medians of a
turn's CPU times. On a processor where the library leaves the products to MKL the record says so and has no rows.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import torch

from cebm import products
from cebm.composition import vary
from cebm.demonstrations import Demonstrations
from cebm.recipes import find_trial
from cebm.storage import write_atomically
from cebm.trainer import Trainer

RECIPES = ("ibc", "steady", "annealed", "correct-mas-maxent")
OUT = Path("docs/products.json")


def took(trainer: Trainer, steps: int) -> float:
    """CPU seconds of a step: the median of some."""
    times = []
    for _ in range(steps):
        began = process_time()
        trainer.step()
        times.append(process_time() - began)
    return median(times)


def measure(recipe: str, rounds: int, steps: int) -> dict[str, Any]:
    """Milliseconds of a step by either library in each round, on data of the particle's sizes."""
    random = np.random.default_rng(0)
    obs, actions = random.uniform(0, 1, (5000, 8)), random.uniform(0, 1, (5000, 2))
    data = Demonstrations.from_arrays(obs.astype(np.float32), actions.astype(np.float32), np.arange(50, 5001, 50))
    trainer = Trainer(vary(find_trial(recipe)), data, data, 0, steps=10_000)
    trainer.step()
    found: dict[str, list[float]] = {"mkl": [], "onednn": []}
    chosen = products._ONEDNN
    try:
        for _ in range(rounds):
            for name, times in found.items():
                products._ONEDNN = name == "onednn"
                times.append(1e3 * took(trainer, steps))
    finally:
        products._ONEDNN = chosen
    ratios = [one / other for one, other in zip(found["mkl"], found["onednn"], strict=True)]
    return {
        "recipe": recipe,
        **{f"{name}_ms": [round(value, 2) for value in times] for name, times in found.items()},
        "ratio": round(median(ratios), 2),
        "smallest": round(min(ratios), 2),
        "largest": round(max(ratios), 2),
    }


def main() -> None:
    """Writes the record and prints it."""
    parser = argparse.ArgumentParser(description="Training steps with MKL's products and with oneDNN's.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=OUT)
    words = parser.parse_args()
    torch.set_num_threads(1)
    quicker = products.onednn_is_quicker()
    rows = [measure(recipe, words.rounds, words.steps) for recipe in RECIPES] if quicker else []
    record = {"onednn_is_quicker": quicker, "torch": torch.__version__, "rows": rows}
    write_atomically(words.out, (json.dumps(record, indent=1) + "\n").encode())
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
