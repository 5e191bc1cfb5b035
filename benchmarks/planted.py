"""Samplers with one planted fault each, to measure the power of the certificate, and right ones, to measure its size.

`python -m benchmarks.planted --repetitions 100` writes docs/certificate.jsonl. Each fault is a sampler that somebody
could have written: a Langevin, Metropolis, Hamiltonian or tempering step with one thing wrong.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor

from cebm.certificate import (
    Certificate,
    CorrelatedGaussian,
    RunName,
    Target,
    analytic_targets,
    certify,
    named_sampler,
)
from cebm.samplers import MALA, StepInfo, Tempering
from cebm.spaces import margin_limit
from cebm.storage import write_atomically

OUT = Path(__file__).parents[1] / "docs" / "certificate.jsonl"
RIGHT = ("mala", "hmc", "tempering", "langevin-correct")
"""Samplers of `named_sampler` that sample their targets; unadjusted Langevin only those without walls."""
CLOSE = 100_000
"""Chains of a close look."""
Look = Literal["chains", "single", "close"]

Hook = Callable[..., Any]


@dataclass(frozen=True)
class _Step:
    """What the three kinds of step share: sizes, walls, and the hooks that plant a fault."""

    steps: int
    size: float
    """τ of Langevin and Metropolis steps; ε² of Hamiltonian ones."""
    margin: float | None
    hooks: Mapping[str, Hook] = field(default_factory=lambda: MappingProxyType({}))

    def hooked(self, name: str, value: Any, *arguments: Any) -> Any:
        """The value, as the fault has it."""
        return self.hooks[name](value, *arguments) if name in self.hooks else value

    def init(self, energy: Any, context: Any, start: Tensor, generator: torch.Generator) -> Any:
        energies, gradients = energy.energies_and_gradients(context, start)
        noise = torch.randn(start.shape, generator=generator)
        return SimpleNamespace(actions=start, energies=energies, gradients=gradients, noise=noise, start=start)

    def noise(self, state: Any, generator: torch.Generator) -> Tensor:
        return self.hooked("noise", torch.randn(state.actions.shape, generator=generator), state)

    def outside(self, actions: Tensor) -> Tensor:
        if self.margin is None:
            return torch.zeros(actions.shape[:2], dtype=torch.bool)
        return (actions.abs() > margin_limit(self.margin)).any(-1)

    def after(self, state: Any, energy: Any, context: Any, proposal: Tensor, taken: Tensor) -> Any:
        """The state where `taken`, with fresh energies and gradients."""
        actions = self.hooked(
            "after", torch.where(taken.unsqueeze(-1), proposal, state.actions), proposal, taken, state
        )
        energies, gradients = energy.energies_and_gradients(context, actions)
        new = {"actions": actions, "energies": energies, "gradients": gradients}
        return SimpleNamespace(**{**vars(state), **self.hooked("state", new, state)})


def _info(state: Any) -> StepInfo:
    return StepInfo.of(state.energies, state.gradients)


@dataclass(frozen=True)
class PlantedLangevin(_Step):
    """y' = y − τ∇E + √(2τ) ω, clipped to the box where there is one."""

    def step(self, energy: Any, context: Any, state: Any, k: int, generator: torch.Generator) -> tuple[Any, StepInfo]:
        gradients = self.hooked("gradients", state.gradients, k)
        actions = state.actions - self.size * gradients + sqrt(2 * self.size) * self.noise(state, generator)
        if self.margin is not None:
            actions = actions.clamp(-margin_limit(self.margin), margin_limit(self.margin))
        everything = torch.ones(actions.shape[:2], dtype=torch.bool)
        return self.after(state, energy, context, actions, everything), _info(state)


@dataclass(frozen=True)
class PlantedMetropolis(_Step):
    """MALA with a step that does not adapt."""

    def step(self, energy: Any, context: Any, state: Any, k: int, generator: torch.Generator) -> tuple[Any, StepInfo]:
        scale = sqrt(2 * self.size)
        noise = self.noise(state, generator)
        proposal = state.actions - self.size * state.gradients + scale * self.hooked("width", 1.0) * noise
        proposal = self.hooked("proposal", proposal, self.margin)
        energies, gradients = energy.energies_and_gradients(context, proposal)
        backwards = (state.actions - proposal + self.size * gradients) / scale
        drop, correction = state.energies - energies, 0.5 * (noise.square() - backwards.square()).sum(-1)
        log_ratio = self.hooked("ratio", drop + correction, drop, correction)
        uniform = torch.rand(log_ratio.shape, generator=generator)
        taken = self.hooked("taken", uniform < log_ratio.exp(), log_ratio, generator)
        proposal = self.hooked("parts", proposal, state.actions, log_ratio, generator)
        taken = taken & ~self.outside(proposal)
        return self.after(state, energy, context, proposal, taken), _info(state)


@dataclass(frozen=True)
class PlantedHamiltonian(_Step):
    """Five leapfrog steps, reflected at the walls, and an accept step."""

    def step(self, energy: Any, context: Any, state: Any, k: int, generator: torch.Generator) -> tuple[Any, StepInfo]:
        first = self.noise(state, generator)
        epsilon = sqrt(self.size)
        actions, gradients, momentum, energies = state.actions, state.gradients, first, state.energies
        momentum = momentum - epsilon * self.hooked("first kick", 0.5) * gradients
        best = (state.energies, state.actions)
        for index in range(5):
            actions = actions + epsilon * momentum
            if self.margin is not None:
                limit = margin_limit(self.margin)
                over = actions.abs() > limit
                actions = torch.where(over, actions.sign() * 2 * limit - actions, actions)
                momentum = torch.where(over, self.hooked("turned", -1.0) * momentum, momentum)
            energies, gradients = energy.energies_and_gradients(context, actions)
            kick = 1.0 if index < 4 else self.hooked("last kick", 0.5)
            momentum = momentum - epsilon * kick * gradients
            lower = energies < best[0]
            best = torch.where(lower, energies, best[0]), torch.where(lower.unsqueeze(-1), actions, best[1])
        actions = self.hooked("end", actions, best[1])
        drop, kinetic = state.energies - energies, 0.5 * (first.square() - momentum.square()).sum(-1)
        log_ratio = self.hooked("ratio", drop + kinetic, drop, kinetic)
        taken = torch.rand(log_ratio.shape, generator=generator) < log_ratio.exp()
        return self.after(state, energy, context, actions, taken & ~self.outside(actions)), _info(state)


@dataclass(frozen=True)
class PlantedTempering:
    """Parallel tempering whose result `change` spoils after every step."""

    inner: Tempering
    change: Hook

    @property
    def steps(self) -> int:
        return self.inner.steps

    def init(self, energy: Any, context: Any, start: Tensor, generator: torch.Generator) -> Any:
        state = self.inner.init(energy, context, start, generator)
        return SimpleNamespace(state=state, actions=state.actions)

    def step(self, energy: Any, context: Any, state: Any, k: int, generator: torch.Generator) -> tuple[Any, StepInfo]:
        new, info = self.inner.step(energy, context, state.state, k, generator)
        new, actions = self.change(new, k)
        return SimpleNamespace(state=new, actions=actions), info


def _always_swapped(state: Any, k: int) -> tuple[Any, Tensor]:
    """The two coldest levels exchange their states whatever their energies."""
    rows, inner, beta = state.rows, state.inner, state.betas
    swap = torch.arange(len(beta)).view(rows, -1)  # a row of temperatures for each observation
    swap[:, :2] = swap[:, :2].flip(1)
    swap = swap.flatten()
    ratio = (beta / beta[swap]).view(-1, 1)
    inner = inner._replace(
        actions=inner.actions[swap],
        energies=inner.energies[swap] * ratio,
        gradients=inner.gradients[swap] * ratio.unsqueeze(-1),
    )
    state = type(state)(inner, state.context, state.betas, state.swapped, rows)
    return state, state.actions


# ---------------------------------------------------------------------------------------------- the faults


def _keep(names: list[str]) -> Hook:
    """A state whose named parts are those from before."""
    return lambda new, old: {**new, **{name: getattr(old, name) for name in names}}


def _one_for_all(_: Tensor, log_ratio: Tensor, generator: torch.Generator) -> Tensor:
    shared = torch.rand((1, 1), generator=generator) < log_ratio.mean().exp()
    return shared.expand(log_ratio.shape)


def _own_decisions(proposal: Tensor, old: Tensor, log_ratio: Tensor, generator: torch.Generator) -> Tensor:
    taken = torch.rand(proposal.shape, generator=generator) < log_ratio.exp().unsqueeze(-1)
    return torch.where(taken, proposal, old)


def _clamped(proposal: Tensor, margin: float | None) -> Tensor:
    return proposal if margin is None else proposal.clamp(-margin_limit(margin), margin_limit(margin))


LANGEVIN: dict[str, dict[str, Hook]] = {
    "one noise for all coordinates": {"noise": lambda w, s: w[..., :1].expand_as(w)},
    "noise correlated between coordinates": {"noise": lambda w, s: 0.8 * w[..., :1] + 0.6 * w},
    "noise without the root of two": {"noise": lambda w, s: w / sqrt(2)},
    "noise with the root of two twice": {"noise": lambda w, s: w * sqrt(2)},
    "noise clipped to one deviation": {"noise": lambda w, s: w.clamp(-1, 1)},
    "uniform noise on [-1, 1]": {"noise": lambda w, s: torch.erf(w / sqrt(2))},
    "noise that is never negative": {"noise": lambda w, s: w.abs()},
    "the same noise in every step": {"noise": lambda w, s: s.noise},
    "one noise for all chains": {"noise": lambda w, s: w[:1, :1].expand_as(w)},
    "no noise in the last coordinate": {"noise": lambda w, s: w * torch.tensor([1.0, 0.0])},
    "sign of the gradient flipped": {"gradients": lambda g, k: -g},
    "gradient doubled": {"gradients": lambda g, k: 2 * g},
    "gradient halved": {"gradients": lambda g, k: g / 2},
    "gradient normalised": {"gradients": lambda g, k: g / g.norm(dim=-1, keepdim=True).clamp_min(1e-9)},
    "gradient clipped to 2": {"gradients": lambda g, k: g.clamp(-2, 2)},
    "gradient's coordinates swapped": {"gradients": lambda g, k: g.flip(-1)},
    "first coordinate's gradient for all": {"gradients": lambda g, k: g[..., :1].expand_as(g)},
    "gradient of the start": {"state": _keep(["gradients"])},
    "states rounded to 0.2": {"after": lambda y, *_: (y * 5).round() / 5},
    "states clipped to [-0.5, 0.5]": {"after": lambda y, *_: y.clamp(-0.5, 0.5)},
}
METROPOLIS: dict[str, dict[str, Hook]] = {
    "everything accepted": {"taken": lambda t, r, g: torch.ones_like(t)},
    "ratio without the proposal's density": {"ratio": lambda r, drop, q: drop},
    "ratio with the sign of the energy flipped": {"ratio": lambda r, drop, q: q - drop},
    "ratio with the sign of the proposal flipped": {"ratio": lambda r, drop, q: drop - q},
    "ratio at twice the temperature": {"ratio": lambda r, drop, q: r / 2},
    "ratio without the energy": {"ratio": lambda r, drop, q: q},
    "accepted where it should be refused": {"taken": lambda t, r, g: ~t},
    "one decision for all chains": {"taken": _one_for_all},
    "refused chains go back to their start": {"after": lambda y, _, t, s: torch.where(t.unsqueeze(-1), y, s.start)},
    "energies of the start": {"state": _keep(["energies"])},
    "refused chains go half of the way": {"after": lambda y, new, t, s: torch.where(t.unsqueeze(-1), y, (y + new) / 2)},
    "proposals half as wide as the ratio says": {"width": lambda w: 0.5},
    "proposals clipped to the box": {"proposal": _clamped},
    "a decision for each coordinate": {"taken": lambda t, r, g: torch.ones_like(t), "parts": _own_decisions},
}
HAMILTONIAN: dict[str, dict[str, Hook]] = {
    "momentum with one number for all coordinates": {"noise": lambda w, s: w[..., :1].expand_as(w)},
    "ratio without the kinetic energy": {"ratio": lambda r, drop, kinetic: drop},
    "kinetic energy without the half": {"ratio": lambda r, drop, kinetic: drop + 2 * kinetic},
    "reflection that does not turn the momentum": {"turned": lambda sign: 1.0},
    "lowest state of the trajectory taken": {"end": lambda y, best: best},
}
TEMPERING: dict[str, Hook] = {
    "states of the second temperature": lambda state, k: (state, state.inner.actions[state.rows : 2 * state.rows]),
    "temperatures always swapped": _always_swapped,
}
FAULTS = (*LANGEVIN, *METROPOLIS, *HAMILTONIAN, *TEMPERING)


def planted(fault: str, target: Target, steps: int, mended: bool = False) -> Any:
    """The sampler with this fault, with steps that fit the target; `mended`: the same without it."""
    init, final = target.step_sizes
    # Where there is an accept step, steps are as long as it allows: with short ones it has nothing to do.
    long = init if target.correlation else 2 * init
    longer = long if target.margin is None else 2 * long  # between walls, as long as the box
    if fault in LANGEVIN:
        return PlantedLangevin(steps, (init + final) / 4, target.margin, {} if mended else LANGEVIN[fault])
    if fault in METROPOLIS:
        return PlantedMetropolis(steps, 1.5 * long, target.margin, {} if mended else METROPOLIS[fault])
    if fault in HAMILTONIAN:
        return PlantedHamiltonian(steps, longer, target.margin, {} if mended else HAMILTONIAN[fault])
    inner = Tempering(MALA(steps, init / 2, steps // 2, margin=target.margin), steps, levels=3, hottest=4.0)
    return inner if mended else PlantedTempering(inner, TEMPERING[fault])


def closely(make: Any, generator: torch.Generator, name: str, repetitions: int = 1) -> list[Certificate]:
    """A close look at a sampler with an accept step: no tolerance, and `CLOSE` chains. An error of the correlation, as
    artanh r, is seen from 4.5/√CLOSE = 0.014 on."""
    rows: list[Certificate] = []
    for _ in range(repetitions):
        rows += certify(make, [CorrelatedGaussian()], ["chains"], generator, name, tolerance=0.0, chains=CLOSE)
    return rows


def judged(make: Any, generator: torch.Generator, name: str, stop: bool) -> list[Certificate]:
    """Certificates on all targets, many chains first; `stop` at the first that fails, and look closely if none does."""
    rows: list[Certificate] = []
    order: tuple[RunName, ...] = ("chains", "single")
    for kind in order:
        for target in analytic_targets():
            if name == "langevin-correct" and target.margin is not None:
                continue
            rows += certify(make, [target], [kind], generator, name)
            if stop and rows[-1].failed:
                return rows
    return rows + closely(make, generator, name) if stop else rows


@dataclass(frozen=True)
class Measurement:
    """Measures how often the certificate catches each fault, and how often it accuses a right sampler. The record grows
    with every block of repetitions; one that is there is continued, with other random numbers."""

    repetitions: int = 100
    """Of each right sampler, on all targets, for each of `runs`."""
    faults: int = 10
    """Repetitions of each fault."""
    close: int = 20
    """Close looks at each right sampler that has an accept step."""
    block: int = 10
    """Repetitions of a right sampler that run side by side."""
    runs: tuple[Look, ...] = ("chains", "single", "close")
    """Runs of the right samplers to repeat."""
    seed: int = 0
    """Of the random numbers."""
    out: Path = OUT
    """Where the rows go."""

    def __call__(self) -> None:
        torch.set_num_threads(1)
        record = Record(self.out)
        for fault in FAULTS:
            row = record.row({"fault": fault}, {"repetitions": 0, "caught": 0, "by": []})
            while row["repetitions"] < self.faults:
                found = judged(partial(planted, fault), self.generator(fault, row), fault, True)[-1]
                row["repetitions"] += 1
                row["caught"] += found.failed
                if found.failed:
                    look = "close" if found.chains == CLOSE else found.run
                    row["by"] = sorted({*row["by"], f"{found.target}, {look}"})
                record.write()
        for kind in self.runs:
            repetitions = self.close if kind == "close" else self.repetitions
            for name in RIGHT:
                if kind == "close" and name == "langevin-correct":
                    continue
                new = {"repetitions": 0, "verdicts": 0, "false_alarms": 0, "inconclusive": 0, "where": [], "seconds": 0}
                row = record.row({"right": name, "run": kind}, new)
                while row["repetitions"] < repetitions:
                    self.size(name, kind, row, min(self.block, repetitions - row["repetitions"]))
                    record.write()
                    print(json.dumps(row), flush=True)

    def generator(self, name: str, row: dict[str, Any]) -> torch.Generator:
        """Random numbers that only the seed, the name and the repetitions before decide."""
        words = [*name.encode(), *row.get("run", "").encode(), row["repetitions"]]
        seed = np.random.SeedSequence([self.seed, *words]).generate_state(1)
        return torch.Generator().manual_seed(int(seed[0]))

    def size(self, name: str, kind: Look, row: dict[str, Any], count: int) -> None:
        """Adds the verdicts of a block of repetitions of a right sampler to its row."""
        began = time.process_time()
        targets = [t for t in analytic_targets() if not (name == "langevin-correct" and t.margin is not None)]
        generator = self.generator(name, row)
        make = partial(named_sampler, name)
        if kind == "close":
            verdicts = closely(make, generator, name, count)
        else:
            verdicts = certify(make, targets, [kind], generator, name, repetitions=count)
        row["repetitions"] += count
        row["verdicts"] += len(verdicts)
        row["false_alarms"] += sum(each.failed for each in verdicts)
        row["inconclusive"] += sum(each.verdict == "inconclusive" for each in verdicts)
        row["where"] = sorted({*row["where"], *(each.target for each in verdicts if each.failed)})
        row["seconds"] += round(time.process_time() - began)


class Record:
    """The rows of a file, written anew whenever one has grown."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines()]

    def row(self, key: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        """The row with these entries, or a new one."""
        for row in self.rows:
            if key.items() <= row.items():
                return row
        self.rows.append({**key, **new})
        return self.rows[-1]

    def write(self) -> None:
        """All rows, one per line."""
        write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in self.rows).encode())


if __name__ == "__main__":
    tyro.cli(Measurement)()
