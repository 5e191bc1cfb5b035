"""The server under load, on this machine: `python -m benchmarks.serving [--json]`.

Clients in a process of their own ask as fast as they are answered, on the same cores as the server. Beside it, in turns
in the same run, stands the rate of `policy.act` in this process on batches of as many observations.
"""

import argparse
import asyncio
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
from websockets.asyncio.client import connect

import cebm
from cebm import TRIALS, Box, EnergyPolicy, Specification
from cebm.serving.protocol import pack, unpack

OBS, ACT = 10, 2


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


async def load(url: str, clients: int, seconds: float, seeded: bool) -> dict[str, Any]:
    """What `clients` clients, each with one request at a time, saw."""
    frames = [_frame(i, seeded) for i in range(clients)]
    times: list[list[float]] = [[] for _ in range(clients)]
    start, until = asyncio.Event(), 0.0

    async def one(i: int) -> None:
        async with connect(url, compression=None, proxy=None, open_timeout=60) as socket:
            await socket.recv()
            await start.wait()
            while (began := perf_counter()) < until:
                await socket.send(frames[i])
                reply = await socket.recv()
                if isinstance(reply, str):
                    raise RuntimeError(reply)
                times[i].append((perf_counter() - began) * 1e3)
            if isinstance(reply, bytes) and unpack(reply)["actions"].shape != (1, ACT):
                raise RuntimeError("a wrong answer")

    tasks = [asyncio.create_task(one(i)) for i in range(clients)]
    await asyncio.sleep(0.5 + clients / 100)
    until, began = perf_counter() + seconds, perf_counter()
    start.set()
    await asyncio.gather(*tasks)
    took = perf_counter() - began
    counts = [len(each) for each in times]
    everything = np.concatenate(times)
    p50, p99 = np.percentile(everything, [50, 99])
    shares = max(counts) / max(1, min(counts))
    return {"served": sum(counts) / took, "p50_ms": float(p50), "p99_ms": float(p99), "shares": shares}


def _frame(i: int, seeded: bool) -> bytes:
    obs = np.random.default_rng(i).uniform(-1, 1, OBS).astype(np.float32)
    return pack({"obs": obs} if seeded else {"obs": obs, "cebm": {"seed": None}})


def measure(policy: EnergyPolicy, clients: int, seconds: float, rounds: int, seeded: bool = True) -> list[Round]:
    """In-process and served rates in turns, so that a busy moment of the machine meets both."""
    found = []
    with cebm.serve(policy, limits=cebm.Limits(connections=clients + 8)) as server:
        for _ in range(rounds):
            before = in_process(policy, clients, seconds / 2)
            seen = load_from_process(server.url, clients, seconds, seeded)
            after = in_process(policy, clients, seconds / 2)
            found.append(Round(2 / (1 / before + 1 / after), **seen))
    return found


def load_from_process(url: str, clients: int, seconds: float, seeded: bool) -> dict[str, Any]:
    """`load` in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.serving", "--load", url, "--clients", str(clients)]
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
    parser.add_argument("--load", metavar="URL", help="be the load generator for a server")
    parser.add_argument("--same", action="store_true", help="requests whose actions are not drawn anew")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if parsed.load:
        print(json.dumps(asyncio.run(load(parsed.load, parsed.clients[0], parsed.seconds, not parsed.same))))
        return
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
        f"p99 {row['p99_ms']:.1f} ms  shares {row['shares']:.2f}"
    )


if __name__ == "__main__":
    main()
