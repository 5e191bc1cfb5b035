"""What every trial gives: losses and weights after 20 steps, actions, metrics. `tests/test_golden.py` compares.

`trials.json` was recorded before trials were composed of objects, with the trials in the words of that time; so it also
proves that old files mean today what they meant then. Results are bit-exact for one version of torch on one kind of
processor, which the file names. After a change that is meant to change them, or for a new torch, record them anew and
say why in the commit: `PYTHONPATH=. .venv/bin/python -m tests.golden.record`. The policies and runs beside it are of
the first format, and are never made anew.
"""

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cebm import legacy
from cebm.recipes import Trial
from cebm.settings import from_json
from cebm.tasks import ParticleTask, collect_particle
from cebm.trainer import Trainer

HERE = Path(__file__).parent


def processor() -> str:
    """The kind of processor, as far as rounding depends on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    widest = next((name for name in ("avx512f", "avx2", "avx") if name in flags), "")
    return f"{platform.machine()} {widest}".strip()


def trial_of(old: dict[str, Any], name: str) -> Trial:
    """The trial of a record."""
    return from_json(legacy.trial(old, name), Trial, name)


def observations() -> np.ndarray:
    """Where policies act."""
    return collect_particle(ParticleTask(), 5, 7).obs[::31]


def results(trial: Trial) -> dict[str, Any]:
    """Twenty steps on one thread, as hexadecimal floats."""
    training, validation = collect_particle(ParticleTask(), 30, 0), collect_particle(ParticleTask(), 5, 7)
    trainer = Trainer(trial, training, validation, 3, limits=(0.0, 1.0), steps=200)
    logs = [{key: float(value) for key, value in trainer.step().items()} for _ in range(20)]
    digest = hashlib.sha256()
    for tensor in [*trainer.learner.parameters(), *trainer.learner.buffers()]:
        digest.update(np.ascontiguousarray(tensor.detach().numpy()).tobytes())
    policy = trainer.policy()
    window = np.tile(observations(), (1, trial.inputs.history))
    previous = np.full((len(window), policy.act_box.dim), 0.4, np.float32)
    acts = {
        "default": policy.act(window, candidates=8),
        "drawn": policy.act(window, candidates=8, generator=torch.Generator().manual_seed(5)),
        "warm": policy.act(window, candidates=8, previous=previous),
    }
    return {
        "loss": [row["loss"].hex() for row in logs],
        "last": {key: value.hex() for key, value in logs[-1].items()},
        "weights": digest.hexdigest(),
        "actions": {key: [[float(x).hex() for x in row] for row in value] for key, value in acts.items()},
        "validate": {key: float(value).hex() for key, value in trainer.validate(policy, 8, 32).items()},
    }


def main() -> None:
    torch.set_num_threads(1)
    record = json.loads((HERE / "trials.json").read_text())
    record |= {"torch": torch.__version__, "processor": processor()}
    for name, golden in record["trials"].items():
        record["trials"][name] = {"trial": golden["trial"]} | results(trial_of(golden["trial"], name))
    (HERE / "trials.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
