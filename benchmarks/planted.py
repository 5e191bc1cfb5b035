"""Forty samplers with a planted fault, to measure the power of the certificate, and right ones, to measure its size.

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
from typing import Any

import torch
import tyro
from torch import Tensor

from cebm.certificate import Certificate, RunName, Target, analytic_targets, certify, named_sampler
from cebm.samplers import MALA, StepInfo, Tempering
from cebm.spaces import margin_limit

OUT = Path(__file__).parents[1] / "docs" / "certificate.jsonl"
RIGHT = ("mala", "hmc", "tempering", "langevin-correct")
"""Samplers of `named_sampler` that sample their targets; unadjusted Langevin only those without walls."""

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
    swap = torch.cat([torch.arange(rows, 2 * rows), torch.arange(rows), torch.arange(2 * rows, len(beta))])
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


def judged(make: Any, generator: torch.Generator, name: str, stop: bool) -> list[Certificate]:
    """Certificates on all targets, many chains first; `stop` at the first that fails."""
    rows: list[Certificate] = []
    order: tuple[RunName, ...] = ("chains", "single")
    for kind in order:
        for target in analytic_targets():
            if name == "langevin-correct" and target.margin is not None:
                continue
            rows += certify(make, [target], [kind], generator, name)
            if stop and rows[-1].failed:
                return rows
    return rows


@dataclass(frozen=True)
class Measurement:
    """Measures how often the certificate catches each fault, and how often it accuses a right sampler."""

    repetitions: int = 100
    """Of each right sampler, on all targets, many chains and single ones."""
    faults: int = 10
    """Repetitions of each fault."""
    seed: int = 0
    """Of the random numbers."""
    single: bool = True
    """Run the single chains of right samplers too, which take most of the time."""
    out: Path = OUT
    """Where the rows go."""

    def __call__(self) -> None:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(self.seed)
        rows = []
        for fault in FAULTS:
            found = [judged(partial(planted, fault), generator, fault, True) for _ in range(self.faults)]
            caught = [each[-1] for each in found if each[-1].failed]
            where = sorted({f"{row.target}, {row.run}" for row in caught})
            rows.append({"fault": fault, "repetitions": self.faults, "caught": len(caught), "by": where})
            print(json.dumps(rows[-1]), flush=True)
        for name in RIGHT:
            rows.append(self.size(name, generator))
            print(json.dumps(rows[-1]), flush=True)
        self.out.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def size(self, name: str, generator: torch.Generator) -> dict[str, Any]:
        """Verdicts of a right sampler over the repetitions."""
        began, verdicts = time.process_time(), []
        kinds: list[RunName] = ["chains", "single"] if self.single else ["chains"]
        targets = [t for t in analytic_targets() if not (name == "langevin-correct" and t.margin is not None)]
        for _ in range(self.repetitions):
            verdicts += certify(partial(named_sampler, name), targets, kinds, generator, name)
        wrong = sorted({f"{row.target}, {row.run}" for row in verdicts if row.failed})
        return {
            "right": name,
            "repetitions": self.repetitions,
            "verdicts": len(verdicts),
            "false_alarms": sum(row.failed for row in verdicts),
            "inconclusive": sum(row.verdict == "inconclusive" for row in verdicts),
            "where": wrong,
            "seconds": round(time.process_time() - began),
        }


if __name__ == "__main__":
    tyro.cli(Measurement)()
