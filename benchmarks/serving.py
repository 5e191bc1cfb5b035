"""The server under load, on this machine: `python -m benchmarks.serving [--json]`.

Clients in a process of their own ask as fast as they are answered, on the same cores as the server. Beside it, in turns
in the same run, stands the rate of `policy.act` in this process on batches of as many observations.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

import cebm
from benchmarks.disturbance import Others
from benchmarks.load import ACT, OBS
from cebm import TRIALS, Box, EnergyPolicy, Specification

DISTURBED = 0.1
"""Cores of other processes that disturb a round."""


@dataclass(frozen=True)
class Round:
    """One turn of the measurement."""

    in_process: float
    """Observations per second of `policy.act` on whole batches."""
    served: float
    """Requests per second that the server answered."""
    p50_ms: float
    """Median time of a request, seen by its client."""
    p99_ms: float
    """Its 99th percentile."""
    shares: float
    """Largest number of answers of a client over the smallest."""
    others: float = 0.0
    """Cores that other processes took meanwhile."""

    @property
    def ratio(self) -> float:
        """Served over in-process rate."""
        return self.served / self.in_process


def untrained(trial: str, history: int = 1, horizon: int = 1, candidates: int | None = None) -> EnergyPolicy:
    """A policy of a trial's make with random weights: as quick as a trained one."""
    recipe = TRIALS[trial] if candidates is None else cebm.vary(TRIALS[trial], **{"acting.candidates": candidates})
    spec = Specification.flat(OBS, ACT, history, horizon)
    energy = recipe.energy.build(spec, torch.Generator().manual_seed(0))
    obs_box, act_box = (Box.from_bounds([-1.0] * size, [1.0] * size) for size in (spec.obs_dim, spec.act_dim))
    return EnergyPolicy(energy, obs_box, act_box, recipe.acting, spec, recipe.energy)


def in_process(policy: EnergyPolicy, batch: int, seconds: float) -> float:
    """Observations per second."""
    obs = np.random.default_rng(0).uniform(-1, 1, (batch, OBS))
    generator = torch.Generator().manual_seed(0)
    policy.act(obs, generator=generator)
    began, calls = perf_counter(), 0
    while perf_counter() - began < seconds:
        policy.act(obs, generator=generator)
        calls += 1
    return batch * calls / (perf_counter() - began)


def measure(policy: EnergyPolicy, clients: int, seconds: float, rounds: int, seeded: bool = True) -> list[Round]:
    """In-process and served rates in turns, so that a busy moment of the machine meets both. Rounds that others disturb
    are measured again, three times as many at most; those that were disturbed least count."""
    found: list[Round] = []
    with cebm.serve(policy, limits=cebm.Limits(connections=clients + 8)) as server:
        while sum(not each.others > DISTURBED for each in found) < rounds and len(found) < 3 * rounds:
            others = Others()
            before = in_process(policy, clients, seconds / 2)
            seen = load_from_process(server.url, clients, seconds, seeded)
            after = in_process(policy, clients, seconds / 2)
            found.append(Round(2 / (1 / before + 1 / after), **seen, others=others.cores()))
    return sorted(found, key=lambda each: each.others)[:rounds]


def load_from_process(url: str, clients: int, seconds: float, seeded: bool) -> dict[str, Any]:
    """What clients saw whose process is their own."""
    words = [sys.executable, "-m", "benchmarks.load", url, "--clients", str(clients)]
    words += ["--seconds", str(seconds), *([] if seeded else ["--same"])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120 + 4 * seconds)
    if done.returncode:
        raise RuntimeError(f"the load generator failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line per policy and number of clients."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--policies", nargs="+", default=["steady", "ibc:64"], help="TRIAL or TRIAL:CANDIDATES")
    parser.add_argument("--same", action="store_true", help="requests whose actions are not drawn anew")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in parsed.policies:
        trial, _, candidates = name.partition(":")
        policy = untrained(trial, candidates=int(candidates) if candidates else None)
        for clients in parsed.clients:
            rounds = measure(policy, clients, parsed.seconds, parsed.rounds, not parsed.same)
            print(json.dumps(_row(name, clients, rounds)) if parsed.json else _line(name, clients, rounds), flush=True)


def _row(name: str, clients: int, rounds: list[Round]) -> dict[str, Any]:
    every = [{**asdict(each), "ratio": each.ratio} for each in rounds]
    middle = {key: median(each[key] for each in every) for key in every[0]}
    return {"policy": name, "clients": clients, **middle, "rounds": every}


def _line(name: str, clients: int, rounds: list[Round]) -> str:
    row = _row(name, clients, rounds)
    ratios = sorted(each.ratio for each in rounds)
    return (
        f"{name:10} {clients:4} clients  in process {row['in_process']:7.0f}/s  served {row['served']:7.0f}/s  "
        f"ratio {row['ratio']:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})  p50 {row['p50_ms']:.1f} ms  "
        f"p99 {row['p99_ms']:.1f} ms  shares {row['shares']:.2f}  others {row['others']:.2f} cores"
    )


if __name__ == "__main__":
    main()
