"""Protocols of evaluation, so that numbers can be compared with those that others published.

They differ in what they pick. The best of several checkpoints, chosen on the episodes that it is then reported on, is
larger than what anybody finds again; so the last checkpoint always stands beside the chosen one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cebm.evaluation import TEST_SEED, Evaluation, evaluate
from cebm.intervals import Interval
from cebm.loading import load
from cebm.policy import EnergyPolicy
from cebm.runs import checkpoints, load_checkpoint, load_job, material_of, trainer_of
from cebm.tasks import Task

LAST, CHOSEN = "last checkpoint", "checkpoint chosen by validation"


@dataclass(frozen=True)
class Protocol:
    """Who is measured on how many episodes."""

    name: str
    """As on the command line."""
    seeds: int
    """Training seeds that it asks for: as many runs."""
    episodes: int
    """Held-out episodes for each checkpoint."""
    checkpoints: int = 0
    """The last checkpoints of a run whose best and mean it reports; 0: it reports the last one, and the chosen one."""


PROTOCOLS = {
    "ours": Protocol("ours", 5, 200),
    # Chi et al. 2023: "3 training seeds and 50 initial conditions", the best and the mean of the last ten checkpoints.
    "diffusion-policy": Protocol("diffusion-policy", 3, 50, 10),
    # One checkpoint, 500 episodes: the mean of the largest reward, and the share of successes.
    "lerobot": Protocol("lerobot", 1, 500),
}


@dataclass(frozen=True)
class Line:
    """One number of a protocol."""

    metric: str
    """The column of the episodes."""
    what: str
    """Which checkpoints it is of."""
    interval: Interval
    """Mean and 95 % interval: over training seeds, or over the episodes where there is one run and one checkpoint."""
    seeds: tuple[float, ...]
    """The value of each run."""


def measure(
    protocol: Protocol,
    runs: Sequence[Path],
    task: Task | None = None,
    *,
    seed: int = TEST_SEED,
    device: str = "cpu",
    listen: Callable[[str], None] = lambda words: None,
    **settings: Any,
) -> list[Line]:
    """The protocol's numbers of these runs, which differ in their training seed alone. `task`: by default each run's
    own. `settings` go to `evaluate`: workers, execute, candidates. `listen` gets a line for each checkpoint."""
    if not runs:
        raise ValueError("a protocol needs at least one run")
    for run in runs:
        if not (run / "run.json").exists():
            raise ValueError(f"{run}: a protocol measures run directories, and there is no run.json")
        kept = len(checkpoints(run))
        if kept < protocol.checkpoints:
            raise ValueError(
                f"{run}: {protocol.name} asks for the last {protocol.checkpoints} checkpoints, the run kept {kept}; "
                f"train with --keep-checkpoints {protocol.checkpoints}"
            )
    by_run, metric = [], "success"
    for run in runs:
        place = task or material_of(load_job(run)).task
        if place is None:
            raise ValueError(f"{run}: the run has no task to play; name one with --task")
        metric = place.metric
        found: list[tuple[str, Evaluation]] = []
        for what, policy in _policies(protocol, run, device):
            result = evaluate(policy, place, episodes=protocol.episodes, seed=seed, latency_calls=0, **settings)
            listen(f"{run.name}, {what}: {place.metric} {result.score(place.metric):.4g}")
            found.append((what, result))
        by_run.append(found)
    names = dict.fromkeys((metric, "success"))
    shown = [name for name in names if all(_measured(name, each) for found in by_run for _, each in found)]
    return [line for name in shown for line in _lines(name, by_run, protocol)]


def _policies(protocol: Protocol, run: Path, device: str) -> Iterator[tuple[str, EnergyPolicy]]:
    """What is measured of a run, the last checkpoint first."""
    yield LAST, load(run / "policy", device)
    if not protocol.checkpoints:
        yield CHOSEN, load(run / "best", device)
        return
    trainer = trainer_of(load_job(run))
    for directory in checkpoints(run)[: protocol.checkpoints]:
        header, tensors = load_checkpoint(directory)
        if header["step"] != trainer.steps:  # that of the end is the last one, measured already
            trainer.load_state(tensors, header["step"])
            yield f"step {header['step']}", trainer.policy()


def _measured(metric: str, result: Evaluation) -> bool:
    try:
        result.score(metric)
    except ValueError:
        return False
    return True


def _lines(metric: str, by_run: Sequence[Sequence[tuple[str, Evaluation]]], protocol: Protocol) -> Iterator[Line]:
    """What the protocol reports of one metric."""
    last = [found[0][1] for found in by_run]
    if protocol.checkpoints:
        scores = [[result.score(metric) for _, result in found] for found in by_run]
        count = protocol.checkpoints
        for words, value in (("best", np.max), ("mean", np.mean)):
            seeds = tuple(float(value(each)) for each in scores)
            yield Line(metric, f"{words} of the last {count} checkpoints", Interval.of(seeds), seeds)
    else:
        yield _line(metric, CHOSEN, [found[1][1] for found in by_run])
    yield _line(metric, LAST, last)


def _line(metric: str, what: str, results: Sequence[Evaluation]) -> Line:
    seeds = tuple(result.score(metric) for result in results)
    alone = len(results) == 1 and metric not in results[0].overall
    return Line(metric, what, results[0].interval(metric) if alone else Interval.of(seeds), seeds)


def words(protocol: Protocol, lines: Sequence[Line]) -> str:
    """The numbers for people."""
    runs = len(lines[0].seeds)
    asked = "" if runs == protocol.seeds else f" (it asks for {protocol.seeds})"
    head = f"{protocol.name}: {protocol.episodes} held-out episodes, {runs} training seed{'s' * (runs > 1)}{asked}"
    width = max(len(line.what) for line in lines)
    wide = max(len(line.metric) for line in lines)
    body = []
    for line in lines:
        found = line.interval
        span = f"[{found.low:.3f}, {found.high:.3f}]" if np.isfinite(found.low) else "(one value: no interval)"
        body.append(f"{line.metric:<{wide}}  {line.what:<{width}}  {found.mean:.3f} {span}")
    return "\n".join([head, *body])


def to_document(protocol: Protocol, runs: Sequence[Path], lines: Sequence[Line]) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "protocol": protocol.name,
        "episodes": protocol.episodes,
        "seeds_asked_for": protocol.seeds,
        "runs": [str(run) for run in runs],
        "lines": [
            {"metric": line.metric, "what": line.what, "interval": line.interval.to_json(), "seeds": list(line.seeds)}
            for line in lines
        ],
    }
