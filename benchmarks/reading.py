"""How long a large set takes to read, and how much memory to read, split and train on: one process per format.

    .venv/bin/python -m benchmarks.reading [FORMAT ...]

One million steps; 20 columns of observations and 7 of actions, of tables 8 and 2. Seconds are those of the processor,
which mean something on a busy machine too. Writes docs/reading.jsonl, a row per format. It needs the extra `data`, 1 GB
of disk, and about a minute.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from cebm.demonstrations import Demonstrations
from cebm.storage import write_atomically

RESULTS = Path(__file__).parent.parent / "docs" / "reading.jsonl"
STEPS, LENGTH = 1_000_000, 200
READ = """
import sys, time
import torch
torch.set_num_threads(1)
import cebm
path, history, horizon, table = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "table"
began = time.process_time()
names = {"obs": "o*", "action": "a*", "episodes": "episode"} if table else {}
training, validation = cebm.open_demonstrations(path, **names).split(0.1, 0)
seconds = time.process_time() - began
trainer = cebm.Trainer(cebm.vary(cebm.TRIALS["mse"], history=history, horizon=horizon), training, validation, steps=10)
for _ in range(10):
    trainer.step()
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(seconds, peak / 1e3)
"""


def rows(obs: int, act: int, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Observations, actions, and where episodes end."""
    random = np.random.default_rng(0)
    ends = np.arange(LENGTH, steps + 1, LENGTH)
    seen, done = (random.normal(size=(steps, width)).astype(np.float32) for width in (obs, act))
    return seen, done, ends


def _frame(steps: int) -> Any:
    import pandas

    obs, actions, _ = rows(8, 2, steps)
    columns = {f"o{i}": obs[:, i] for i in range(8)} | {f"a{i}": actions[:, i] for i in range(2)}
    return pandas.DataFrame({"episode": np.arange(steps) // LENGTH, **columns})


def _folder(path: Path, steps: int) -> None:
    obs, actions, ends = rows(20, 7, steps)
    Demonstrations.from_arrays(obs, actions, ends).save(path)


def _npz(path: Path, steps: int) -> None:
    obs, actions, ends = rows(20, 7, steps)
    np.savez(path, obs=obs, action=actions, episode_ends=ends)


def _zarr(path: Path, steps: int) -> None:
    import zarr

    obs, actions, ends = rows(20, 7, steps)
    root = zarr.open_group(path, mode="w", zarr_format=2)
    for name, values in (("data/obs", obs), ("data/action", actions), ("meta/episode_ends", ends)):
        root.create_array(name, data=values)


FORMATS: dict[str, tuple[str, Callable[[Path, int], None]]] = {
    "`.npy` folder": ("folder", _folder),
    "`.npz`": ("set.npz", _npz),
    "Zarr v2": ("set.zarr", _zarr),
    "Parquet": ("set.parquet", lambda path, steps: _frame(steps).to_parquet(path)),
    "CSV": ("set.csv", lambda path, steps: _frame(steps).to_csv(path, index=False)),
}
"""By the name of the table's row: the file, and what writes it."""
WINDOWS = ((1, 1), (2, 8))
"""History and horizon of the trainings; the second one only of `.npz`."""


def measure(name: str, steps: int = STEPS) -> dict[str, Any]:
    """The row of a format."""
    file, write = FORMATS[name]
    with TemporaryDirectory() as folder:
        path = Path(folder) / file
        write(path, steps)
        found: dict[str, Any] = {"format": name, "steps": steps, "cores": os.cpu_count()}
        for history, horizon in WINDOWS[: 1 + (name == "`.npz`")]:
            kind = "table" if path.suffix in (".csv", ".parquet") else "arrays"
            command = [sys.executable, "-c", READ, str(path), str(history), str(horizon), kind]
            told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            seconds, peak = map(float, told.split()[-2:])
            if horizon == 1:
                found |= {"seconds": round(seconds, 2), "peak_mb": round(peak)}
            else:
                found |= {"windows_peak_mb": round(peak)}
        return found


def main() -> None:
    """Measures the formats that are named, or all; other rows stay."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading", description=__doc__)
    parser.add_argument("formats", nargs="*", choices=[[], *FORMATS])
    kept = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    known = {row["format"]: row for row in kept}
    for name in parser.parse_args().formats or FORMATS:
        known[name] = measure(name)
        print(known[name], flush=True)
        lines = [json.dumps(known[each]) for each in FORMATS if each in known]
        write_atomically(RESULTS, ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
