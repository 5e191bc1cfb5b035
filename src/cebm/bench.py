"""How fast: each benchmark measures the library beside a plain yardstick, interleaved in one run, so that a busy
machine slows both. A benchmark is a function that yields rows; a row knows its JSON.
"""

import json
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cebm.energy import MLPEnergy
from cebm.samplers import Langevin, run

# The paper's training step: 512 examples, 8 negatives each, two hidden layers of 256, 10 Langevin steps.
_BATCH, _SAMPLES, _WIDTH, _STEPS = 512, 8, 256, 10
_OBS_DIM, _ACT_DIM = 8, 2
# Useful work of a chain: the two 256×256 products of each step, W₂h₁ forward and W₂ᵀg backward.
_CHAIN_FLOP = _STEPS * 2 * (2 * _BATCH * _SAMPLES * _WIDTH * _WIDTH)
_MM_FLOP = 2 * 512 * 256 * 256


@dataclass(frozen=True)
class ChainBench:
    """Speed of a whole chain for one thread count. Rates are medians over the repeats; the fraction is the median of
    each repeat's own chain rate over the rate of the products timed just before and after it."""

    threads: int
    mm_gflops: float
    """torch.mm(out=) on (512×256)·(256×256)."""
    chain_gflops: float
    """The chain, counting only its two hidden products as work."""
    fraction: float
    """Chain rate over product rate."""
    fraction_q25: float
    fraction_q75: float
    chain_ms: float
    """Median time of a chain."""
    peak_extra_mb: float
    """Most memory that a chain holds at once beyond its inputs, in 10⁶ bytes."""
    repeats: int
    cores: int
    note: str | None
    """What to know before comparing this row."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        text = (
            f"{self.threads} thread{'s' if self.threads > 1 else ''}: chain {self.chain_gflops:.1f} GFLOP/s, "
            f"torch.mm {self.mm_gflops:.1f} GFLOP/s, fraction {self.fraction:.2f} "
            f"(quartiles {self.fraction_q25:.2f} to {self.fraction_q75:.2f}), {self.chain_ms:.0f} ms a chain, "
            f"{self.peak_extra_mb:.1f} MB"
        )
        return f"{text} ({self.note})" if self.note else text


def bench_chain(threads: Sequence[int] = (1, 2), repeats: int = 25) -> Iterator[ChainBench]:
    """The paper's chain (batch 512 × 8 samples, width 256, 10 ibc steps) beside plain products, per thread count.

    Torch's own thread count is as before when the rows are through.
    """
    for count in threads:
        if count < 1:
            raise ValueError(f"threads must be at least 1, got {count}")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    before = torch.get_num_threads()
    try:
        for count in threads:
            torch.set_num_threads(count)
            yield _bench_chain(count, repeats)
    finally:
        torch.set_num_threads(before)


def _bench_chain(threads: int, repeats: int) -> ChainBench:
    generator = torch.Generator()  # its seed is always the same, and the numbers do not matter
    energy = MLPEnergy(_OBS_DIM, _ACT_DIM, _WIDTH, generator=generator)
    sampler = Langevin("ibc", _STEPS, noise=0.1)
    obs = torch.rand(_BATCH, _OBS_DIM, generator=generator) * 2 - 1
    start = torch.rand(_BATCH, _SAMPLES, _ACT_DIM, generator=generator) * 2.2 - 1.1
    left, right = torch.rand(512, 256, generator=generator), torch.rand(256, 256, generator=generator)
    out = torch.empty(512, 256)

    def chain() -> None:
        with torch.no_grad():
            run(sampler, energy, energy.encode(obs), start, generator)

    def product() -> None:
        torch.mm(left, right, out=out)

    note = _note(threads)
    chain_rates, mm_rates = _interleaved(chain, _CHAIN_FLOP, product, _MM_FLOP, repeats)
    q25, fraction, q75 = np.quantile(chain_rates / mm_rates, [0.25, 0.5, 0.75]).tolist()
    return ChainBench(
        threads=threads,
        mm_gflops=float(np.median(mm_rates)) / 1e9,
        chain_gflops=float(np.median(chain_rates)) / 1e9,
        fraction=fraction,
        fraction_q25=q25,
        fraction_q75=q75,
        chain_ms=1e3 * _CHAIN_FLOP / float(np.median(chain_rates)),
        peak_extra_mb=_peak_memory(chain) / 1e6,
        repeats=repeats,
        cores=_cores(),
        note=note,
    )


def _interleaved(
    subject: Callable[[], None], subject_flop: int, yardstick: Callable[[], None], yardstick_flop: int, repeats: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rates (FLOP/s) of subject and yardstick, one pair per repeat. In time: yardstick, subject, yardstick, …, each
    slice about as long as the subject, and a subject is paired with the slices on both sides of it."""
    for _ in range(2):
        subject_time = _time(subject)
    for _ in range(2):
        yardstick_time = _time(yardstick, 20) / 20
    calls = max(1, round(subject_time / yardstick_time / 2))
    slices, subjects = [_time(yardstick, calls)], []
    for _ in range(repeats):
        subjects.append(_time(subject))
        slices.append(_time(yardstick, calls))
    around = np.array(slices[:-1]) + np.array(slices[1:])
    return subject_flop / np.array(subjects), 2 * calls * yardstick_flop / around


def _time(work: Callable[[], None], calls: int = 1) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    return time.perf_counter() - begin


def _peak_memory(work: Callable[[], None]) -> int:
    """Most bytes of tensors alive at once that `work` made."""
    with _Ledger() as ledger:
        work()
    return ledger.peak


class _Ledger(TorchDispatchMode):
    """Adds up the storages that operations return, and takes off those that are gone. (torch's profiler knows this
    too, but writes log lines that cannot be turned off.)"""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        # What exists already, an input or its view, is no news.
        known = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in self.alive | known:
                storage = leaf.untyped_storage()
                self.alive.add(_key(leaf))
                self.held += storage.nbytes()
                self.peak = max(self.peak, self.held)
                weakref.finalize(storage, self._forget, _key(leaf), storage.nbytes())
        return result

    def _forget(self, key: int, size: int) -> None:
        self.alive.discard(key)
        self.held -= size


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _note(threads: int) -> str | None:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    notes = []
    if threads > _cores():
        notes.append(f"{threads} threads on {_cores()} cores")
    # Threads wait for each other: where other work takes a core away, no rate of several threads means much.
    if load > _cores():
        notes.append(f"busy machine, load {load:.1f} on {_cores()} cores")
    return "; ".join(notes) or None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
