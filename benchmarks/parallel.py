"""How much faster a training step is on several processes than on one. torchrun starts it, one thread per process:

torchrun --standalone --nproc-per-node 2 -m benchmarks.parallel

Writes docs/parallel.jsonl, a row per trial and batch. Each round times a step of one process alone (the others wait),
one of a single process with as many threads as there are processes, and one of the whole group; a ratio is taken within
a round, so that a busy machine slows all three.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
import tyro

from benchmarks.bench import Row, machine, quartiles, torch_threads
from cebm.demonstrations import Demonstrations
from cebm.distributed import ALONE, Group, group_of_environment
from cebm.recipes import TRIALS, Trial, vary
from cebm.tasks import ParticleTask, collect_particle
from cebm.trainer import Trainer

RESULTS = Path(__file__).parents[1] / "docs" / "parallel.jsonl"
FEWEST = 5
"""Measurements of each kind of step, at least."""


@dataclass(frozen=True, kw_only=True)
class ParallelBench(Row):
    """A training step of a group of processes beside that of one."""

    bench: str = "parallel"
    trial: str
    batch: int
    """Examples per step, of all processes together."""
    processes: int
    alone_ms: float
    """A step of one process with one thread."""
    group_ms: float
    """A step of the group, one thread each."""
    speed_up: float
    """How many times faster the group is than one process with one thread."""
    speed_up_q25: float
    speed_up_q75: float
    over_threads: float
    """How many times faster the group is than one process with as many threads."""
    over_threads_q25: float
    over_threads_q75: float

    def sentence(self) -> str:
        return (
            f"{self.trial}, batch {self.batch}: {self.processes} processes are {self.speed_up:.2f} times as fast as "
            f"one [{self.speed_up_q25:.2f}, {self.speed_up_q75:.2f}], {self.over_threads:.2f} times as fast as one "
            f"with {self.processes} threads [{self.over_threads_q25:.2f}, {self.over_threads_q75:.2f}]"
        )


@dataclass(frozen=True)
class Arguments:
    """Measures the speed-up of several processes over one."""

    trials: tuple[str, ...] = ("steady", "ibc")
    """Names of the trials."""
    batches: tuple[int, ...] = (128, 512, 2048, 8192)
    """Examples per step, of all processes together."""
    rounds: int = 30
    """Measurements of each kind of step, at most."""
    seconds: float = 15.0
    """Time for a trial and batch, after five measurements."""
    out: Path = RESULTS
    """The record to write."""
    episodes: int = 200
    """Demonstrations to train on, 50 pairs each."""


def parallel(arguments: Arguments, group: Group) -> Iterator[ParallelBench]:
    """A row per batch size, in the first process; the others only take part."""
    demonstrations = collect_particle(ParticleTask(), arguments.episodes, seed=0)
    for name, batch in product(arguments.trials, arguments.batches):
        trial = vary(TRIALS[name], batch_size=batch)
        seconds = _rounds(trial, demonstrations, arguments, group)
        if group.first:
            one, threaded, several = np.array(seconds).T
            q25, speed_up, q75 = quartiles(one / several)
            over_q25, over, over_q75 = quartiles(threaded / several)
            yield ParallelBench(
                trial=name,
                batch=batch,
                processes=group.size,
                alone_ms=1e3 * float(np.median(one)),
                group_ms=1e3 * float(np.median(several)),
                speed_up=speed_up,
                speed_up_q25=q25,
                speed_up_q75=q75,
                over_threads=over,
                over_threads_q25=over_q25,
                over_threads_q75=over_q75,
                repeats=len(seconds),
                **machine(1),
            )


def _rounds(
    trial: Trial, demonstrations: Demonstrations, arguments: Arguments, group: Group
) -> list[tuple[float, float, float]]:
    """Seconds of a step: of one process, of one with more threads, of the group. The first round does not count."""
    alone, together = (
        Trainer(trial, demonstrations, demonstrations, steps=3000, group=each) for each in (ALONE, group)
    )
    found: list[tuple[float, float, float]] = []
    began = time.perf_counter()
    for _ in range(arguments.rounds + 1):
        one = threaded = 0.0
        if group.first:
            one = _seconds(alone.step)
            with torch_threads(group.size):
                threaded = _seconds(alone.step)
        late = group.first and len(found) > FEWEST and time.perf_counter() - began > arguments.seconds
        if group.any(late):  # all begin together, or end
            break
        found.append((one, threaded, _seconds(together.step)))
    return found[1:]


def _seconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def main() -> None:
    arguments = tyro.cli(Arguments)
    torch.set_num_threads(1)
    with group_of_environment() as group:
        if group.size == 1:
            raise SystemExit(
                "start this with torchrun: torchrun --standalone --nproc-per-node 2 -m benchmarks.parallel"
            )
        with open(arguments.out if group.first else os.devnull, "w") as file:
            for row in parallel(arguments, group):
                print(row, flush=True)
                print(row.to_json(), file=file, flush=True)


if __name__ == "__main__":
    main()
