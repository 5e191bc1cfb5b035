"""Measures everything that docs/performance.md shows, about ten minutes: all of `cebm bench`, and
the training step beside the baselines of eager.py, in turns. Writes docs/performance.jsonl, one row per line.

torch.compile needs a C++ compiler.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.bench import (
    AS_IT_IS_LONGER,
    LARGE,
    Row,
    bench,
    described,
    interleaved,
    machine,
    make_trainer,
    quartiles,
    torch_threads,
    varied,
    work_and_memory,
)
from benchmarks.eager import EagerStep
from cebm.composition import settings_of
from cebm.recipes import TRIALS

# The paper's, and one whose activations fit no cache.
SETTINGS: tuple[dict[str, int], ...] = ({}, LARGE)
RESULTS = Path(__file__).parent.parent / "docs" / "performance.jsonl"


@dataclass(frozen=True, kw_only=True)
class CompareBench(Row):
    """The library's training step beside a baseline's."""

    bench: str = "compare"
    setting: str
    baseline: str
    library_ms: float
    baseline_ms: float
    ratio: float
    """How many times faster the library is."""
    ratio_q25: float
    ratio_q75: float
    library_fraction: float
    """Rate of the useful work over that of torch.mm."""
    baseline_fraction: float
    """The same work over the baseline's time: what it computes twice does not count."""
    library_mb: float
    """Peak memory of a step."""
    baseline_mb: float | None
    """None where it cannot be seen, inside compiled code."""

    def sentence(self) -> str:
        return (
            f"{self.setting}: {self.library_ms:.0f} ms a step, {self.baseline} {self.baseline_ms:.0f} ms, ratio "
            f"{self.ratio:.2f} (quartiles {self.ratio_q25:.2f} to {self.ratio_q75:.2f}), fractions of torch.mm "
            f"{self.library_fraction:.2f} and {self.baseline_fraction:.2f}"
        )


def compare(sizes: Mapping[str, int], threads: int, repeats: int = 25) -> Iterator[CompareBench]:
    """A row per baseline, for `ibc` with these sizes changed."""
    trial = varied(TRIALS["ibc"], sizes)
    around = machine(threads)
    generator = torch.Generator()
    trainer = make_trainer(trial)
    obs_dim, act_dim = trainer.obs_box.dim, trainer.act_box.dim
    obs = torch.rand(trial.optimiser.batch_size, obs_dim, generator=generator) * 2 - 1
    actions = torch.rand(trial.optimiser.batch_size, act_dim, generator=generator) * 2 - 1
    objective = trial.objective
    shape = (obs_dim, act_dim, settings_of(trial)["energy.width"], objective.count, objective.source.sampler.steps)
    baselines = {
        name: partial(EagerStep(*shape, compiled=name == "compiled").step, obs, actions, generator)
        for name in ("eager", "compiled")
    }
    subjects: list[Callable[[], object]] = [trainer.step, *baselines.values()]
    seconds, mm = interleaved(subjects, repeats, 1 if sizes else AS_IT_IS_LONGER)
    flop, library_peak = work_and_memory(trainer.step)
    fractions = np.median(flop / seconds / mm, 1).tolist()
    for i, (name, step) in enumerate(baselines.items(), 1):
        q25, ratio, q75 = quartiles(seconds[i] * mm[i] / (seconds[0] * mm[0]))
        yield CompareBench(
            setting=described(sizes),
            baseline=name,
            library_ms=1e3 * float(np.median(seconds[0])),
            baseline_ms=1e3 * float(np.median(seconds[i])),
            ratio=ratio,
            ratio_q25=q25,
            ratio_q75=q75,
            library_fraction=fractions[0],
            baseline_fraction=fractions[i],
            library_mb=library_peak / 1e6,
            baseline_mb=work_and_memory(step)[1] / 1e6 if name == "eager" else None,
            repeats=seconds.shape[1],
            **around,
        )


def rows(threads: list[int]) -> Iterator[Row]:
    """All of them."""
    yield from bench("all", threads)
    for count in threads:
        for sizes in SETTINGS:
            with torch_threads(count):
                yield from compare(sizes, count)


def main() -> None:
    lines = []
    for row in rows([1, 2] if machine(1)["cores"] > 1 else [1]):
        print(row, flush=True)
        lines.append(row.to_json() + "\n")
    RESULTS.write_text("".join(lines))


if __name__ == "__main__":
    main()
