"""Records golden results of every trial: losses and weights after 20 steps, actions, saved policies and runs.

Run it from the repository's root: `.venv/bin/python tests/golden/record.py`. Results are bit-exact on one kind of
processor and one version of torch; the file says which.
"""

import hashlib
import json
import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from cebm.envs.particle import ParticleTask, collect_particle
from cebm.samplers import MALA, DerivativeFree, Langevin
from cebm.storage import to_json
from cebm.trainer import Trainer
from cebm.training import Job, resume, train
from cebm.trials import TRIALS

HERE = Path(__file__).parent


def digest(tensors):
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).tobytes())
    return sha.hexdigest()


def processor():
    flags = next((line for line in open("/proc/cpuinfo") if line.startswith("flags")), "")
    widest = [name for name in ("avx512f", "avx2", "avx") if name in flags.split()]
    return f"{platform.machine()} {widest[0] if widest else ''}".strip()


def small(trial):
    trial = replace(trial, network=replace(trial.network, width=16), batch_size=64, replay_capacity=200)
    return replace(trial, candidates=min(16, trial.candidates))


VARIANTS = {
    "ranking-nce": replace(TRIALS["gmm-nll"], objective="ranking-nce"),
    "regularised": replace(
        TRIALS["ibc"], positive_l2=0.1, entropy_weight=0.5, gradient_penalty=1.0, gradient_margin=0.1, ema=0.9
    ),
    "through-chain": small(replace(TRIALS["ibc"], through_chain=True)),
    "dropout": replace(TRIALS["ibc"], network=replace(TRIALS["ibc"].network, dropout=0.1, spectral_norm=True), ema=0.9),
    "residual-mala": replace(
        TRIALS["mcmc-loss"], network=replace(TRIALS["ibc"].network, kind="residual"), sampler=MALA(steps=5)
    ),
    "chunks": replace(TRIALS["steady"], history=2, horizon=3),
    "free-search": replace(TRIALS["uniform"], acting=DerivativeFree(autoregressive=True), keep=8, candidates=64),
    "cosine-draw": replace(TRIALS["ibc"], schedule="cosine", choice="draw", keep=3, obs_scaling="standardise"),
    "tilted-penalty": replace(TRIALS["steady"], gradient_penalty=0.5, gradient_margin=0.01),
    "maxent-mala-acting": replace(TRIALS["conditional-maxent"], acting=MALA(steps=6, adapt=2)),
    "marginal-correct": replace(TRIALS["ibc-mas-corrected"], sampler=Langevin("correct"), marginal_l2=0.5),
}


def main():
    torch.set_num_threads(1)
    task = ParticleTask()
    data, other = collect_particle(task, 30, 0), collect_particle(task, 5, 7)
    obs = np.concatenate([other.obs[::31]])
    trials = {**TRIALS, **VARIANTS}
    record = {"torch": torch.__version__, "processor": processor(), "trials": {}}
    for name, trial in trials.items():
        trainer = Trainer(trial, data, other, 3, limits=(0.0, 1.0), steps=200)
        logs = [{k: float(v) for k, v in trainer.step().items()} for _ in range(20)]
        policy = trainer.policy()
        window = np.tile(obs, (1, trial.history))
        generator = torch.Generator().manual_seed(5)
        acts = {
            "default": policy.act(window, candidates=8),
            "drawn": policy.act(window, candidates=8, generator=generator),
            "warm": policy.act(window, candidates=8, previous=np.full((len(obs), policy.act_box.dim), 0.4, np.float32)),
        }
        record["trials"][name] = {
            "trial": to_json(trial),
            "loss": [row["loss"].hex() for row in logs],
            "last": {key: value.hex() for key, value in logs[-1].items()},
            "weights": digest([*trainer.learner.parameters(), *trainer.learner.buffers()]),
            "norm": float(sum(p.detach().double().square().sum() for p in trainer.learner.parameters()) ** 0.5).hex(),
            "actions": {key: [[x.hex() for x in map(float, row)] for row in value] for key, value in acts.items()},
            "validate": {k: float(v).hex() for k, v in trainer.validate(policy, 8, 32).items()},
        }
        print(name, record["trials"][name]["weights"][:12])
    (HERE / "trials.json").write_text(json.dumps(record, indent=1) + "\n")

    # What today's format looks like on disk: small policies, and runs stopped half-way.
    expected = {}
    for name in ("steady", "ibc", "ibc-mas-corrected", "mse", "mdn", "dfo", "joint-replay", "chunks"):
        trial = small(trials[name])
        trainer = Trainer(trial, data, other, 3, limits=(0.0, 1.0), steps=200)
        for _ in range(5):
            trainer.step()
        policy = trainer.policy()
        policy.save(HERE / "policies" / name)
        actions = policy.act(np.tile(obs, (1, trial.history)), candidates=8)
        expected[name] = [[float(x).hex() for x in row] for row in actions]
    for name in ("steady", "correct-mas-maxent", "joint-replay", "regularised"):
        job = Job(name, small(trials[name]), ParticleTask(steps=10), None, 20, 12, 1, 4, 6, 6, 5, 8)
        train(job, HERE / "runs" / name)
        # Stopped at step 6 is what a reader finds; the metrics up to 12 are what resuming must give.
        where = HERE / "runs" / name
        rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
        expected[f"run {name}"] = [
            {k: v for k, v in row.items() if k not in ("seconds", "steps_per_second")} for row in rows
        ]
        last = where / "checkpoints" / "step-00000012"
        for file in last.iterdir():
            file.unlink()
        last.rmdir()
        for part in ("best", "policy"):
            for file in (where / part).iterdir():
                file.unlink()
            (where / part).rmdir()
        kept = [row for row in rows if row["step"] <= 6]
        (where / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
