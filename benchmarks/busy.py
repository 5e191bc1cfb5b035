"""Training beside a busy neighbour: what happens to a training step when another program keeps one core busy.

    .venv/bin/python -m benchmarks.busy

Each way to train is a process of its own, as OpenMP reads its settings once. In each round they run one after the
other, first on the idle machine, then beside a process that computes without end; a ratio is taken within a round.
What any third program took is in the record; a measurement in which it was much is repeated.
Writes docs/busy.jsonl, a row per trial, way and neighbour.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
import tyro

from benchmarks.bench import Row, machine, make_trainer, quartiles
from cebm.recipes import TRIALS
from cebm.threads import SPINS, choose

RESULTS = Path(__file__).parents[1] / "docs" / "busy.jsonl"
ONE, DEFAULT = "one thread", "default"
PASSIVE, SHORT = {"OMP_WAIT_POLICY": "PASSIVE"}, {"GOMP_SPINCOUNT": SPINS}
ATTEMPTS, DISTURBED = 3, 0.3
"""A measurement is repeated so often while third programs take so many cores."""
WAYS: dict[str, tuple[dict[str, str], int | None]] = {
    ONE: (SHORT, 1),
    DEFAULT: (SHORT, None),
    "all threads, which wait spinning for a moment": (SHORT, 0),
    "all threads, which wait asleep": (PASSIVE, 0),
    "all threads, which wait spinning": ({}, 0),
}
"""Settings of OpenMP, and threads: 0 for all cores, None for those that `cebm train` chooses."""


@dataclass(frozen=True, kw_only=True)
class BusyBench(Row):
    """A training step, with or without a neighbour that keeps a core busy."""

    bench: str = "busy"
    trial: str
    way: str
    neighbour: bool
    step_ms: float
    ratio: float
    """How many times as fast as one thread in the same round."""
    ratio_q25: float
    ratio_q75: float
    others: float
    """Cores that third programs took meanwhile, by the mean."""
    chosen: dict[str, int]
    """Of the default: in how many rounds it took how many threads."""

    def sentence(self) -> str:
        beside = "beside a busy neighbour" if self.neighbour else "on an idle machine"
        return (
            f"{self.trial} {beside}, {self.way}: {self.step_ms:.1f} ms a step, {self.ratio:.2f} times as fast as one "
            f"thread [{self.ratio_q25:.2f}, {self.ratio_q75:.2f}]"
        )


@dataclass(frozen=True)
class Arguments:
    """Trains beside a busy neighbour."""

    trials: tuple[str, ...] = ("steady", "ibc")
    """Names of the trials."""
    rounds: int = 5
    """Measurements of each way."""
    seconds: float = 2.0
    """Length of a measurement."""
    out: Path = RESULTS
    """The record to write."""
    subject: str | None = None
    """Be the process that trains this trial; the driver starts it."""
    threads: int | None = None
    """Its threads, 0 for all; by default those that are fastest when it is asked."""


def subject(trial: str, threads: int | None) -> None:
    """Takes steps of a training for as many seconds as each line of the input says, and prints what it did."""
    trainer, most = make_trainer(TRIALS[trial]), len(os.sched_getaffinity(0))
    torch.set_num_threads(threads or most)
    trainer.step()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        chosen = choose(trainer.step, most).threads if threads is None else threads or most
        print(json.dumps({"chosen": chosen}), flush=True)
        done, began = 0, perf_counter()
        while perf_counter() - began < float(line):
            trainer.step()
            done += 1
        print(json.dumps({"rate": done / (perf_counter() - began), "threads": chosen}), flush=True)


class Subject:
    """Such a process, and how to ask it."""

    def __init__(self, trial: str, way: str) -> None:
        settings, threads = WAYS[way]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        command = [sys.executable, "-m", "benchmarks.busy", "--subject", trial]
        command += [] if threads is None else ["--threads", str(threads)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment | settings, **pipes)

    def ready(self) -> None:
        """Waits until it can be asked."""
        self._answer()

    def ask(self, seconds: float, beside: int | None) -> dict[str, Any]:
        """Steps per second, with how many threads, and how many cores third programs took: the least disturbed of
        a few attempts. `beside` is the neighbour's process."""
        found: list[dict[str, Any]] = []
        while len(found) < ATTEMPTS and not (found and found[-1]["others"] < DISTURBED):
            print(seconds, file=self.process.stdin, flush=True)
            if not json.loads(self._answer()).get("chosen"):
                raise RuntimeError("the process that trains answered out of turn")
            ours = [self.process.pid, *([] if beside is None else [beside])]
            began, before = perf_counter(), _taken() - sum(map(_taken, ours))
            answer = json.loads(self._answer())
            after = _taken() - sum(map(_taken, ours))
            found.append(answer | {"others": (after - before) / (perf_counter() - began)})
        return min(found, key=lambda each: each["others"])

    def _answer(self) -> str:
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not line:
            raise RuntimeError(f"the process that trains ended with exit code {self.process.wait()}")
        return line

    def __enter__(self) -> "Subject":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def _taken(process: int | None = None) -> float:
    """Seconds of processor time so far, of a process or of the whole machine (Linux)."""
    if process is None:
        user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
        return (user + nice + system) / os.sysconf("SC_CLK_TCK")
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def neighbour(wanted: bool) -> Iterator[int | None]:
    """A process that keeps one core busy, wherever the system puts it; its number."""
    if not wanted:
        yield None
        return
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"  # it ends with us
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        sleep(0.5)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def busy(arguments: Arguments) -> Iterator[BusyBench]:
    """A row per trial, neighbour and way."""
    around = machine(len(os.sched_getaffinity(0)))
    for trial in arguments.trials:
        with ExitStack() as stack:
            subjects = {way: stack.enter_context(Subject(trial, way)) for way in WAYS}
            for each in subjects.values():
                each.ready()
            found: dict[bool, list[dict[str, dict[str, Any]]]] = {False: [], True: []}
            for _ in range(arguments.rounds):
                for wanted, rounds in found.items():
                    with neighbour(wanted) as beside:
                        rounds.append({way: each.ask(arguments.seconds, beside) for way, each in subjects.items()})
        for wanted, rounds in found.items():
            for way in WAYS:
                yield _row(trial, way, wanted, rounds, around)


def _row(
    trial: str, way: str, wanted: bool, rounds: Sequence[dict[str, dict[str, Any]]], around: dict[str, Any]
) -> BusyBench:
    rates, alone = (np.array([each[name]["rate"] for each in rounds]) for name in (way, ONE))
    q25, ratio, q75 = quartiles(rates / alone)
    taken = [str(each[way]["threads"]) for each in rounds]
    return BusyBench(
        trial=trial,
        way=way,
        neighbour=wanted,
        step_ms=1e3 / float(np.median(rates)),
        ratio=ratio,
        ratio_q25=q25,
        ratio_q75=q75,
        others=float(np.mean([each[way]["others"] for each in rounds])),
        chosen={each: taken.count(each) for each in sorted(set(taken))} if way == DEFAULT else {},
        repeats=len(rounds),
        **around,
    )


def main() -> None:
    arguments = tyro.cli(Arguments)
    if arguments.subject is not None:
        subject(arguments.subject, arguments.threads)
        return
    with open(arguments.out, "w") as file:
        for row in busy(arguments):
            print(row, flush=True)
            print(row.to_json(), file=file, flush=True)


if __name__ == "__main__":
    main()
