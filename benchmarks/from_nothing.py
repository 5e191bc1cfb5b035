"""From nothing to a policy that succeeds, by the command line: the default recipe, one seed after the other. The clock
runs over demonstrations, training and evaluation; then single actions of that policy are timed, on one thread.

    .venv/bin/python -m benchmarks.from_nothing

Writes docs/from_nothing.jsonl, a row per seed. About a minute each on a quiet machine.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from cebm import ParticleTask, evaluate, load

RESULTS = Path(__file__).parent.parent / "docs" / "from_nothing.jsonl"
SEEDS = (0, 1, 2, 3, 4)
STEPS, EPISODES, CALLS = 1500, 200, 300


def measure(seed: int, steps: int = STEPS) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        data, run = f"{folder}/demonstrations.npz", f"{folder}/run"
        began = perf_counter()
        _cebm("demos", "particle", "--episodes", 2222, "--seed", seed, "--out", data)
        length = ("--steps", steps, "--evaluate-every", steps)
        _cebm("train", "--data", data, "--episodes", 2000, *length, "--seed", seed, "--out", run)
        found = json.loads(_cebm("eval", run, "--episodes", EPISODES, "--json"))
        seconds = perf_counter() - began
        acting = evaluate(load(f"{run}/best"), ParticleTask(), episodes=1, latency_calls=CALLS).summary()
    return {
        "seed": seed,
        "steps": steps,
        "episodes": EPISODES,
        "success": found["success"],
        "seconds": round(seconds, 1),
        "action_ms_p50": round(acting["action_ms_p50"], 2),
        "action_ms_p99": round(acting["action_ms_p99"], 2),
        "calls": CALLS,
    }


def _cebm(*arguments: object) -> str:
    command = [sys.executable, "-m", "cebm", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    torch.set_num_threads(1)
    rows = [json.dumps(measure(seed)) for seed in SEEDS]
    RESULTS.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
