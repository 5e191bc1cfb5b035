"""What every sampler shares: step sizes, the contract, and `run`, the only loop. Randomness comes from the generator
that is passed in, and nowhere else.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from math import inf, sqrt
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel, evaluating, leaves
from cebm.randomness import draw_normal
from cebm.spaces import check_all_finite

StepSymbol = Literal["lambda", "epsilon", "tau"]


def convert_step_size(value: float, given: StepSymbol, wanted: StepSymbol) -> float:
    """The same Langevin step in another of the appendix's symbols: λ = ε² = 2τ."""
    if not value >= 0:
        raise ValueError(f"value must be at least 0, got {value}")
    for name, symbol in (("given", given), ("wanted", wanted)):
        if symbol not in ("lambda", "epsilon", "tau"):
            raise ValueError(f"{name} must be 'lambda', 'epsilon' or 'tau', got {symbol!r}")
    if given == wanted:
        return value
    step = value * {"lambda": 1, "epsilon": value, "tau": 2}[given]
    return {"lambda": step, "epsilon": sqrt(step), "tau": step / 2}[wanted]


# ---------------------------------------------------------------------------------------------- step sizes


def positive(name: str, value: float) -> None:
    """ValueError naming a value that is not positive and finite."""
    if not 0 < value < inf:
        raise ValueError(f"{name} must be positive and finite, got {value}")


@runtime_checkable
class Schedule(Protocol):
    """The step size of step k of n, counted from 0."""

    def __call__(self, k: int, n: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    """sₖ = value: the same step size throughout."""

    value: float = 0.1
    """Size of every step."""

    def __post_init__(self) -> None:
        positive("value", self.value)

    def __call__(self, k: int, n: int) -> float:
        return self.value


@dataclass(frozen=True)
class Polynomial:
    """(init − final)·(1 − k/(n−1))^power + final, from `init` at k = 0 to `final` at k = n−1 (the paper's)."""

    init: float = 1.0
    """Size of the first step."""
    final: float = 1e-3
    """Size of the last step."""
    power: float = 2.0
    """1 falls linearly; 2 falls fast, then flattens."""

    def __post_init__(self) -> None:
        for name in ("init", "final", "power"):
            positive(name, getattr(self, name))

    def __call__(self, k: int, n: int) -> float:
        progress = k / (n - 1) if n > 1 else 0.0
        return (self.init - self.final) * (1 - progress) ** self.power + self.final


@dataclass(frozen=True)
class Exponential:
    """sₖ = init·decay^k: the step size falls by the same factor at every step."""

    init: float = 0.1
    """Size of the first step."""
    decay: float = 0.8
    """Factor between two consecutive step sizes."""

    def __post_init__(self) -> None:
        positive("init", self.init)
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {self.decay}")

    def __call__(self, k: int, n: int) -> float:
        return self.init * self.decay**k


# ---------------------------------------------------------------------------------------------- the contract


class StepInfo(NamedTuple):
    """What a step did, averaged over observations and samples; stacked over steps in `Chain.info`."""

    energy: Float[Tensor, "*steps"]
    """Mean energy before the step."""
    gradient_norm: Float[Tensor, "*steps"]
    """Mean ∞-norm of the gradient before the step (0 where a sampler takes no gradient)."""
    clipped: Float[Tensor, "*steps"]
    """Fraction of coordinates that a clip changed (MALA: of proposals outside the box)."""
    acceptance: Float[Tensor, "*steps"]
    """Fraction of proposals that were taken; 1 for samplers that take them all."""
    divergent: Float[Tensor, "*steps"] = torch.zeros(())
    """Fraction of chains whose trajectory left the energy's level by more than 1000, or met NaN (HMC)."""
    evaluations: Float[Tensor, "*steps"] = torch.ones(())
    """Gradients (or energies, where it takes none) that the step used for each chain, on average."""

    @classmethod
    def of(cls, energies: Energies, gradients: Actions | None = None, clipped: Tensor | None = None) -> "StepInfo":
        """For a sampler that accepts every move, from the energies and gradients before the step."""
        zero = energies.new_zeros(())
        norm = zero if gradients is None else gradient_norm(gradients)
        return cls(energies.mean(), norm, zero if clipped is None else clipped, torch.ones_like(zero))


@runtime_checkable
class ChainState(Protocol):
    """State of the chains: a sampler's own NamedTuple or dataclass, with all that its next step needs."""

    @property
    def actions(self) -> Actions: ...


@runtime_checkable
class Sampler(Protocol):
    """The contract: an object with these can be run, give negatives, search for actions and be certified.

    A sampler may have three more attributes: `differentiable = True`, where a loss can be differentiated through the
    chain; `small_steps(size)`, the same sampler with moves of about `size`, to stay near where it starts; and
    `move(energy, context, state, k, generator)`, the state that `step` gives without its `StepInfo`, which acting does
    not look at: of a short chain it may be a fifth of the time.
    """

    @property
    def steps(self) -> int: ...

    def init(self, energy: EnergyModel, context: Context, start: Actions, generator: torch.Generator) -> Any: ...

    def step(
        self, energy: EnergyModel, context: Context, state: Any, k: int, generator: torch.Generator
    ) -> tuple[Any, StepInfo]: ...


AnySampler = TypeVar("AnySampler", bound=Sampler)


def with_steps(sampler: AnySampler, steps: int) -> AnySampler:
    """The same sampler with another number of steps."""
    if not is_dataclass(sampler) or "steps" not in {each.name for each in fields(sampler)}:
        raise ValueError(f"steps: {type(sampler).__name__} is no dataclass with a field `steps`, so it cannot change")
    return replace(sampler, steps=steps)


@dataclass(frozen=True)
class Collect:
    """Keep states of a long chain instead of its last one: after `burn_in` steps, every `thin`-th."""

    burn_in: int
    """Number of first steps whose states are thrown away."""
    thin: int = 1
    """Steps between two kept states."""

    def __post_init__(self) -> None:
        if self.burn_in < 0:
            raise ValueError(f"burn_in must be at least 0, got {self.burn_in}")
        if self.thin < 1:
            raise ValueError(f"thin must be at least 1, got {self.thin}")

    def keeps(self, k: int) -> bool:
        """Whether the state after step k is kept."""
        return k >= self.burn_in and (k - self.burn_in) % self.thin == 0


class Chain(NamedTuple):
    """The result of `run`."""

    actions: Actions
    """Last states; with `Collect`, the kept states of each chain in order, chain after chain."""
    info: StepInfo
    """One entry per step."""


def run(
    sampler: Sampler,
    energy: EnergyModel,
    context: Context,
    start: Actions,
    generator: torch.Generator,
    collect: Collect | None = None,
    keep_graph: bool = False,
) -> Chain:
    """Runs `sampler.steps` steps of independent chains from `start`, one chain per sample.

    `context` is `energy.encode(obs)`. With `keep_graph` the result can be differentiated through every step, for
    a sampler whose moves are differentiable (Langevin); memory then grows with the steps, otherwise it does not.
    Dropout is off during the run.
    """
    energy.check(context, start)
    _check_finite(context, start)
    if keep_graph and not getattr(sampler, "differentiable", False):
        raise ValueError(f"keep_graph needs a sampler with differentiable moves, not {type(sampler).__name__}")
    if collect is not None and collect.burn_in >= sampler.steps:
        raise ValueError(f"burn_in {collect.burn_in} leaves nothing of {sampler.steps} steps")
    kept, infos = [], []
    with torch.set_grad_enabled(keep_graph), evaluating(energy):
        state = sampler.init(energy, context, start, generator)
        for k in range(sampler.steps):
            state, info = sampler.step(energy, context, state, k, generator)
            infos.append(info)
            if collect is not None and collect.keeps(k):
                kept.append(state.actions)
        actions = torch.stack(kept, 2).flatten(1, 2) if kept else state.actions
        return Chain(actions, StepInfo(*(torch.stack(column).detach() for column in zip(*infos, strict=True))))


def moved(
    sampler: Sampler, energy: EnergyModel, context: Context, start: Actions, generator: torch.Generator
) -> Actions:
    """The actions that `run` ends with, for an energy in evaluation mode, without autograd, and for who does not want
    to know how the chains went. Where the sampler has a `move`, nothing looks for NaN: the energies of the result tell.
    """
    move = getattr(sampler, "move", None)
    if move is None:
        return run(sampler, energy, context, start, generator).actions
    state = sampler.init(energy, context, start, generator)
    for k in range(sampler.steps):
        state = move(energy, context, state, k, generator)
    return state.actions


def _check_finite(context: Context, start: Actions) -> None:
    """ValueError where a chain would begin with NaN or infinity."""
    check_all_finite([("start", start.detach()), *(("context", part.detach()) for part in leaves(context))])


# ---------------------------------------------------------------------------------------------- helpers


def normal_like(values: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers of the shape, dtype and device of `values`."""
    return draw_normal(generator, values.shape, values)


def gradient_norm(gradients: Actions) -> Float[Tensor, ""]:
    """Mean ∞-norm of the gradients."""
    return gradients.detach().abs().amax(-1).mean()  # vector_norm would take 20 times as long


def size_at(schedule: Schedule, k: int, n: int) -> float:
    """The size of step k of n by the schedule, checked."""
    size = schedule(k, n)
    if not 0 <= size < inf:
        raise ValueError(f"schedule gave the step size {size} at step {k}; it must be at least 0 and finite")
    return size


def check_steps(steps: int) -> None:
    """ValueError unless there is at least one step."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
