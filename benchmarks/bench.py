"""How fast: each benchmark measures the library beside a plain yardstick, interleaved in one run, so that a busy
machine slows both. A benchmark is a function that yields rows; a row knows its JSON.

The yardstick is torch.mm(out=) on (512×256)·(256×256). Useful work is a step's matrix products (mm, addmm, bmm, as
torch's own counter sees them) and nothing else: chain, loss and parameter gradients, thin first and last layers
included. The paper's step has 12.7 GFLOP: 10.7 in the chain's two 256×256 products per step, 1.8 in the three of the
loss (forward, and backward to weights and inputs), 0.1 in the thin ones.
"""

import json
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from cebm.energies import MLPEnergy
from cebm.evaluation import evaluate
from cebm.products import onednn_is_quicker
from cebm.recipes import TRIALS, Trial, vary
from cebm.samplers import Langevin, run
from cebm.tasks import BatchedParticle, ParticleTask, collect_particle
from cebm.trainer import Trainer

# The paper's training step: 512 examples, 8 negatives each, two hidden layers of 256, 10 Langevin steps.
_BATCH, _SAMPLES, _WIDTH, _STEPS = 512, 8, 256, 10
_OBS_DIM, _ACT_DIM = 8, 2
# Useful work of a chain: the two 256×256 products of each step, W₂h₁ forward and W₂ᵀg backward.
_CHAIN_FLOP = _STEPS * 2 * (2 * _BATCH * _SAMPLES * _WIDTH * _WIDTH)
_MM_FLOP = 2 * 512 * 256 * 256

# A row takes about _SECONDS, and has at least _FEWEST repeats. Shared machines are fast for some seconds and slow for
# others: the unchanged training step is measured four times as long, to see both.
_SECONDS, _FEWEST = 6.0, 3
AS_IT_IS_LONGER = 4

# Settings of `train` beside the paper's. With 512 samples, 64 examples are already too many rows for the cache; 512
# examples would take a quarter of a minute per step.
LARGE = {"samples": 512, "batch": 64}
_VARIATIONS: tuple[dict[str, int], ...] = ({"width": 64}, {"width": 1024}, {"samples": 64}, {"steps": 100}, LARGE)

# The sizes that `growth` tries, one axis at a time, around the paper's setting.
_GROWTH = {
    "batch": (128, 256, 512, 1024),
    "samples": (4, 8, 16, 32),
    "steps": (5, 10, 20, 40),
    "width": (64, 128, 256, 512),
    "dimension": (2, 8, 32),
}
_ACT_BATCHES = (1, 16, 256)
_ENV_EPISODES, _EVALUATION_EPISODES = 1000, 200


# ---------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True, kw_only=True)
class Row(ABC):
    """A result. Rates and times are medians over the repeats; _q25 and _q75 are their quartiles. A fraction or ratio is
    computed per repeat, with the yardstick that was timed just before and after it; its median is reported."""

    bench: str
    """Name of the benchmark."""
    threads: int
    repeats: int
    """Number of measurements."""
    cores: int
    torch: str
    """Version of torch."""
    note: str | None
    """Why this row may not be comparable with others, such as a busy machine."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @abstractmethod
    def sentence(self) -> str:
        """The measurement as a sentence."""

    def __str__(self) -> str:
        text = f"{self.threads} thread{'s' if self.threads > 1 else ''}: {self.sentence()}"
        return f"{text} ({self.note})" if self.note else text


@dataclass(frozen=True, kw_only=True)
class ChainBench(Row):
    """Speed of a whole chain."""

    bench: str = "chain"
    mm_gflops: float
    """torch.mm(out=) on (512×256)·(256×256)."""
    chain_gflops: float
    """The chain, counting only its two hidden products as work."""
    fraction: float
    """Chain rate over product rate."""
    fraction_q25: float
    fraction_q75: float
    chain_ms: float
    """Time of a chain."""
    peak_extra_mb: float
    """Most memory that a chain holds at once beyond its inputs, in 10⁶ bytes."""

    def sentence(self) -> str:
        return (
            f"chain {self.chain_gflops:.1f} GFLOP/s, "
            f"torch.mm {self.mm_gflops:.1f} GFLOP/s, fraction {self.fraction:.2f} "
            f"(quartiles {self.fraction_q25:.2f} to {self.fraction_q75:.2f}), {self.chain_ms:.0f} ms a chain, "
            f"{self.peak_extra_mb:.1f} MB"
        )


@dataclass(frozen=True, kw_only=True)
class TrainBench(Row):
    """Speed of `Trainer.step`: batch, negatives, loss, gradients, Adam."""

    bench: str = "train"
    trial: str
    setting: str
    """The sizes that differ from the trial's own."""
    steps_per_second: float
    step_ms: float
    step_ms_q25: float
    step_ms_q75: float
    gflop: float
    """Useful work in a step."""
    mm_gflops: float
    fraction: float
    """Rate of the useful work over that of the products."""
    fraction_q25: float
    fraction_q75: float
    peak_extra_mb: float
    """Most memory that a step holds at once beyond weights, data and Adam's state, in 10⁶ bytes."""

    def sentence(self) -> str:
        return (
            f"{self.trial}, {self.setting}: {self.steps_per_second:.2f} steps/s, {self.gflop:.1f} GFLOP each, "
            f"fraction {self.fraction:.2f} of torch.mm (quartiles {self.fraction_q25:.2f} to {self.fraction_q75:.2f}), "
            f"{self.peak_extra_mb:.1f} MB"
        )


@dataclass(frozen=True, kw_only=True)
class GrowthBench(Row):
    """How the time of a training step grows along one axis: time ∝ valueᵉ. The exponent is the least-squares slope
    of log time. Time is counted in matrix products timed beside the step, so that a busy moment does not matter."""

    bench: str = "growth"
    axis: str
    values: list[int]
    step_ms: list[float]
    exponent: float
    exponent_q25: float
    exponent_q75: float

    def sentence(self) -> str:
        times = ", ".join(f"{value}: {ms:.0f} ms" for value, ms in zip(self.values, self.step_ms, strict=True))
        return (
            f"step time grows as {self.axis}^{self.exponent:.2f} "
            f"(quartiles {self.exponent_q25:.2f} to {self.exponent_q75:.2f}; {times})"
        )


@dataclass(frozen=True, kw_only=True)
class ActBench(Row):
    """Time of one `policy.act` call. Weights are untrained, which does not change the time. The yardstick is a small
    operation, as a quick action consists of a few hundred of them."""

    bench: str = "act"
    trial: str
    batch: int
    """Observations per call."""
    ms_p50: float
    ms_p99: float
    addition_us: float
    """torch.add of 4×2 numbers, timed between the calls."""
    additions: float
    """A call's time over that of an addition just after it."""
    additions_q25: float
    additions_q75: float
    peak_extra_mb: float

    def sentence(self) -> str:
        return (
            f"{self.trial}, batch {self.batch}: p50 {self.ms_p50:.2f} ms, p99 {self.ms_p99:.2f} ms of {self.repeats} "
            f"calls, as long as {self.additions:.0f} small additions (quartiles {self.additions_q25:.0f} to "
            f"{self.additions_q75:.0f}) of {self.addition_us:.1f} µs, {self.peak_extra_mb:.1f} MB"
        )


@dataclass(frozen=True, kw_only=True)
class EnvBench(Row):
    """Speed of the particle task, alone and under an evaluation."""

    bench: str = "env"
    control_steps_per_second: float
    """Speed without a policy, resets included."""
    control_steps_per_second_q25: float
    control_steps_per_second_q75: float
    episodes: int
    """Number of episodes that run side by side."""
    trial: str
    evaluation_seconds: float
    """Time of one evaluation with the settings that training uses."""
    evaluation_episodes: int
    evaluation_candidates: int

    def sentence(self) -> str:
        return (
            f"{self.control_steps_per_second / 1e6:.2f} million control steps/s without a policy (quartiles "
            f"{self.control_steps_per_second_q25 / 1e6:.2f} to {self.control_steps_per_second_q75 / 1e6:.2f}); "
            f"{self.evaluation_episodes} episodes of {self.trial} with {self.evaluation_candidates} candidates "
            f"in {self.evaluation_seconds:.1f} s"
        )


# ---------------------------------------------------------------------------------------------- benchmarks


def bench(what: str, threads: Sequence[int] = (1, 2), repeats: int = 25) -> Iterator[Row]:
    """The rows of one benchmark, or of `all`, per thread count (growth: the first count only).

    Torch's thread count is restored after the last row.
    """
    if what == "deploy":
        from benchmarks.deploy import bench_deploy

        for count in threads:
            with torch_threads(count):
                yield from bench_deploy(count, repeats)
        return
    if what not in (*_BENCHES, "all"):
        raise ValueError(f"there is no benchmark {what!r}; there are {', '.join(_BENCHES)}, deploy and all")
    for count in threads:
        if count < 1:
            raise ValueError(f"threads must be at least 1, got {count}")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    for name in _BENCHES if what == "all" else [what]:
        for count in threads[:1] if name == "growth" else threads:
            with torch_threads(count):
                yield from _BENCHES[name](count, repeats)


def _bench_chain(threads: int, repeats: int) -> Iterator[ChainBench]:
    """The paper's chain (batch 512 × 8 samples, width 256, 10 ibc steps) beside plain products."""
    generator = torch.Generator()  # its seed is always the same, and the numbers do not matter
    energy = MLPEnergy(_OBS_DIM, _ACT_DIM, _WIDTH, generator=generator)
    sampler = Langevin("ibc", _STEPS, noise=0.1)
    obs = torch.rand(_BATCH, _OBS_DIM, generator=generator) * 2 - 1
    start = torch.rand(_BATCH, _SAMPLES, _ACT_DIM, generator=generator) * 2.2 - 1.1

    def chain() -> None:
        with torch.no_grad():
            run(sampler, energy, energy.encode(obs), start, generator)

    around = machine(threads)
    seconds, mm = interleaved([chain], repeats)
    q25, fraction, q75 = quartiles(_CHAIN_FLOP / seconds / mm)
    yield ChainBench(
        mm_gflops=float(np.median(mm)) / 1e9,
        chain_gflops=_CHAIN_FLOP / float(np.median(seconds)) / 1e9,
        fraction=fraction,
        fraction_q25=q25,
        fraction_q75=q75,
        chain_ms=1e3 * float(np.median(seconds)),
        peak_extra_mb=work_and_memory(chain)[1] / 1e6,
        repeats=seconds.size,
        **around,
    )


def _bench_train(threads: int, repeats: int) -> Iterator[TrainBench]:
    for name, setting, trial in _settings():
        around = machine(threads)
        trainer = make_trainer(trial)
        seconds, mm = interleaved([trainer.step], repeats, AS_IT_IS_LONGER if setting == described({}) else 1)
        flop, peak = work_and_memory(trainer.step)
        low, middle, high = quartiles(seconds)
        q25, fraction, q75 = quartiles(flop / seconds / mm)
        yield TrainBench(
            trial=name,
            setting=setting,
            steps_per_second=1 / middle,
            step_ms=1e3 * middle,
            step_ms_q25=1e3 * low,
            step_ms_q75=1e3 * high,
            gflop=flop / 1e9,
            mm_gflops=float(np.median(mm)) / 1e9,
            fraction=fraction,
            fraction_q25=q25,
            fraction_q75=q75,
            peak_extra_mb=peak / 1e6,
            repeats=seconds.size,
            **around,
        )


def _settings() -> Iterator[tuple[str, str, Trial]]:
    """Name of the trial, the changed sizes as text, and the changed trial."""
    for name, trial in _trials():
        yield name, described({}), trial
    for sizes in _VARIATIONS:
        yield "ibc", described(sizes), varied(TRIALS["ibc"], sizes)


def _trials() -> list[tuple[str, Trial]]:
    """The trials that are measured: the paper's and our default."""
    return [(name, TRIALS[name]) for name in ("ibc", "steady")]


def varied(trial: Trial, sizes: Mapping[str, int]) -> Trial:
    """The trial with some sizes changed."""
    for axis, value in sizes.items():
        if axis == "batch":
            trial = vary(trial, batch_size=value)
        elif axis == "samples":
            trial = vary(trial, count=value)
        elif axis == "steps":
            trial = vary(trial, **{"objective.source.sampler.steps": value})
        elif axis == "width":
            trial = vary(trial, **{"energy.width": value})
        else:
            raise ValueError(f"sizes must be of batch, samples, steps or width, got {axis!r}")
    return trial


def described(sizes: Mapping[str, int]) -> str:
    """The changed sizes as text."""
    return ", ".join(f"{axis} {value}" for axis, value in sizes.items()) or "as it is"


def make_trainer(trial: Trial, dim: int = 2) -> Trainer:
    """A trainer on a few particle demonstrations: 1,500 pairs."""
    demonstrations = collect_particle(ParticleTask(dim=dim), 30, seed=0)
    return Trainer(trial, demonstrations, demonstrations, steps=3000)


def _bench_growth(threads: int, repeats: int) -> Iterator[GrowthBench]:
    paper = TRIALS["ibc"]
    for axis, values in _GROWTH.items():
        around = machine(threads)
        if axis == "dimension":
            trainers = [make_trainer(paper, value) for value in values]
        else:
            trainers = [make_trainer(varied(paper, {axis: value})) for value in values]
        seconds, mm = interleaved([trainer.step for trainer in trainers], repeats)
        slopes = np.polyfit(np.log(values), np.log(seconds * mm), 1)[0]  # one per repeat
        q25, exponent, q75 = quartiles(slopes)
        yield GrowthBench(
            axis=axis,
            values=list(values),
            step_ms=(1e3 * np.median(seconds, 1)).tolist(),
            exponent=exponent,
            exponent_q25=q25,
            exponent_q75=q75,
            repeats=seconds.shape[1],
            **around,
        )


def _bench_act(threads: int, repeats: int) -> Iterator[ActBench]:
    for name, trial in _trials():
        trainer = make_trainer(trial)
        policy = trainer.policy()
        policy.act(trainer.training[np.arange(1)][0])  # warms up
        numbers = torch.ones(4, 2)
        add = partial(torch.add, numbers, numbers)
        for batch in _ACT_BATCHES:
            around = machine(threads)
            act = partial(policy.act, trainer.training[np.arange(batch)][0])
            times: list[float] = []
            additions: list[float] = []
            # A 99th percentile needs more calls than a median.
            while _goes_on(times, 100 * repeats):
                times.append(_time(act))
                additions.append(_time(add, 100) / 100)
            p50, p99 = np.percentile(times, [50, 99]).tolist()
            q25, ratio, q75 = quartiles(np.array(times) / np.array(additions))
            yield ActBench(
                trial=name,
                batch=batch,
                ms_p50=1e3 * p50,
                ms_p99=1e3 * p99,
                addition_us=1e6 * float(np.median(additions)),
                additions=ratio,
                additions_q25=q25,
                additions_q75=q75,
                peak_extra_mb=work_and_memory(act)[1] / 1e6,
                repeats=len(times),
                **around,
            )


def _bench_env(threads: int, repeats: int) -> Iterator[EnvBench]:
    around = machine(threads)
    task = ParticleTask()
    env, actions = BatchedParticle(task), np.full((_ENV_EPISODES, task.dim), 0.5)

    def episodes() -> None:
        env.reset(0, _ENV_EPISODES)
        while not env.done:
            env.step(actions)

    episodes()
    times: list[float] = []
    while _goes_on(times, repeats):
        times.append(_time(episodes))
    q25, median, q75 = quartiles(_ENV_EPISODES * task.steps / np.array(times))
    for name, trial in _trials():
        candidates = min(64, getattr(trial.acting, "candidates", 1))  # as evaluations along the way take
        policy = make_trainer(trial).policy()
        result = evaluate(policy, task, episodes=_EVALUATION_EPISODES, latency_calls=0, candidates=candidates)
        yield EnvBench(
            control_steps_per_second=median,
            control_steps_per_second_q25=q25,
            control_steps_per_second_q75=q75,
            episodes=_ENV_EPISODES,
            trial=name,
            evaluation_seconds=result.seconds,
            evaluation_episodes=_EVALUATION_EPISODES,
            evaluation_candidates=candidates,
            repeats=len(times),
            **around,
        )


_BENCHES: dict[str, Callable[[int, int], Iterator[Row]]] = {
    "chain": _bench_chain,
    "train": _bench_train,
    "growth": _bench_growth,
    "act": _bench_act,
    "env": _bench_env,
}


# ---------------------------------------------------------------------------------------------- measuring


def interleaved(
    subjects: Sequence[Callable[[], object]], repeats: int, longer: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each subject and the rate of products around it (FLOP/s), both [subjects, repeats]. In time:
    products, subject, products, next subject, …, each slice of products half as long as the quickest subject (a
    quarter of a second at most); a subject is paired with the slices on both sides of it. One call of each comes
    first and does not count. `longer` multiplies the number of repeats."""
    generator = torch.Generator()
    left, right = torch.rand(512, 256, generator=generator), torch.rand(256, 256, generator=generator)
    out = torch.empty(512, 256)

    def product() -> None:
        torch.mm(left, right, out=out)

    quickest = min(_time(subject) for subject in subjects)
    for _ in range(2):
        one = _time(product, 20) / 20
    calls = max(1, round(min(quickest / 2, 0.25) / one))
    slices, times = [_time(product, calls)], []
    rounds: list[float] = []
    while _goes_on(rounds, longer * repeats, longer):
        begin = time.perf_counter()
        for subject in subjects:
            times.append(_time(subject))
            slices.append(_time(product, calls))
        rounds.append(time.perf_counter() - begin)
    around = np.array(slices[:-1]) + np.array(slices[1:])
    shape = (len(rounds), len(subjects))
    return np.array(times).reshape(shape).T, (2 * calls * _MM_FLOP / around).reshape(shape).T


def _goes_on(times: list[float], repeats: int, longer: int = 1) -> bool:
    """Whether to measure once more, after measurements that took these times."""
    return len(times) < repeats and (len(times) < _FEWEST or sum(times) < longer * _SECONDS)


def _time(work: Callable[[], object], calls: int = 1) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    return time.perf_counter() - begin


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Limit torch to `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def quartiles(values: np.ndarray) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    q25, median, q75 = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return q25, median, q75


def machine(threads: int) -> dict[str, Any]:
    """Columns of every row about the machine."""
    return {"threads": threads, "cores": _cores(), "torch": torch.__version__, "note": _note(threads)}


def _linear_flop(rows: Sequence[int], matrix: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * int(np.prod(rows)) * matrix[0]


_ONEDNN_FLOP = {torch.ops.mkldnn._linear_pointwise: _linear_flop} if onednn_is_quicker() else {}
"""The product that torch's counter does not know, of shapes [*rows, inputs] and [outputs, inputs]."""


def work_and_memory(work: Callable[[], object]) -> tuple[int, int]:
    """FLOP of the matrix products in `work`, and most bytes alive at once of the tensors that it made."""
    with FlopCounterMode(display=False, custom_mapping=_ONEDNN_FLOP) as counter, _Ledger() as ledger:
        work()
    return counter.get_total_flops(), ledger.peak


class _Ledger(TorchDispatchMode):
    """Counts the bytes of all live storages that operations returned. (torch's profiler can do this too, but it writes
    log lines that cannot be turned off.)"""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        # A result that shares its storage with an input is not new memory.
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
