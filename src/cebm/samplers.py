"""Samplers of p(y|x) ∝ exp(-E(x, y)) in normalised units. A sampler is a frozen object of hyper-parameters with
`init` and `step`; `run` is the only loop. Randomness comes from the generator that is passed in, and nowhere else.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from math import inf, sqrt
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel, evaluating, leaves
from cebm.randomness import draw_index, draw_normal, draw_uniform
from cebm.spaces import StepConvention, check_all_finite, margin_limit, step_limit

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


def _positive(name: str, value: float) -> None:
    if not 0 < value < inf:
        raise ValueError(f"{name} must be positive and finite, got {value}")


@runtime_checkable
class Schedule(Protocol):
    """The step size of step k of n, counted from 0."""

    def __call__(self, k: int, n: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    """The same step size throughout."""

    value: float = 0.1
    """Size of every step."""

    def __post_init__(self) -> None:
        _positive("value", self.value)

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
            _positive(name, getattr(self, name))

    def __call__(self, k: int, n: int) -> float:
        progress = k / (n - 1) if n > 1 else 0.0
        return (self.init - self.final) * (1 - progress) ** self.power + self.final


@dataclass(frozen=True)
class Exponential:
    """init·decay^k: the step size falls by the same factor at every step."""

    init: float = 0.1
    """Size of the first step."""
    decay: float = 0.8
    """Factor between two consecutive step sizes."""

    def __post_init__(self) -> None:
        _positive("init", self.init)
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

    @classmethod
    def of(cls, energies: Energies, gradients: Actions | None = None, clipped: Tensor | None = None) -> "StepInfo":
        """For a sampler that accepts every move, from the energies and gradients before the step."""
        zero = energies.new_zeros(())
        norm = zero if gradients is None else _gradient_norm(gradients)
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
    """The actions that `run` ends with, for who does not want to know how the chains went."""
    move = getattr(sampler, "move", None)
    if move is None:
        return run(sampler, energy, context, start, generator).actions
    energy.check(context, start)
    _check_finite(context, start)
    with torch.no_grad(), evaluating(energy):
        state = sampler.init(energy, context, start, generator)
        for k in range(sampler.steps):
            state = move(energy, context, state, k, generator)
        return state.actions


def _check_finite(context: Context, start: Actions) -> None:
    """ValueError where a chain would begin with NaN or infinity."""
    check_all_finite([("start", start.detach()), *(("context", part.detach()) for part in leaves(context))])


# ---------------------------------------------------------------------------------------------- the samplers


class LangevinState(NamedTuple):
    """State of Langevin chains: the actions alone."""

    actions: Actions


@dataclass(frozen=True)
class Langevin:
    """Unadjusted Langevin, in two formulations.

    correct: y' = y − τ∇E + √(2τ) ω, ω ~ N(0, I) (eq. langevin-correct-impl). No accept step, so the variance is
    biased by O(τ). ibc: y' = y − (λ/2)∇E + λσ ω (eq. langevin-ibc): the noise is scaled by λ instead of √λ, so it
    does not sample exp(-E) but comes close to gradient descent as λ falls; σ is a standard deviation.
    Each step is clipped per coordinate, then the result to the box with its margin, in this order.
    """

    differentiable: ClassVar[bool] = True

    formulation: Literal["correct", "ibc"] = "correct"
    """How the step size scales the noise."""
    steps: int = 10
    """Number of sampler steps per chain."""
    schedule: Constant | Polynomial | Exponential | Schedule = Polynomial()
    """Step size of step k: τ for 'correct', λ for 'ibc'."""
    noise: float = 1.0
    """σ of the ibc formulation: 0.1 in the paper's training, 0.01 when acting. 'correct' admits only 1."""
    step_clip: float | None = 0.25
    """Largest move of a coordinate in one step, as a fraction of the action range. None: no limit."""
    clip_convention: StepConvention = "range"
    """Whether `step_clip` counts the range [-1, 1] (the paper) or half of it (the reference code)."""
    margin: float | None = 0.05
    """Chains stay in the box [-1, 1] grown by this fraction of the range on both ends. None: unbounded."""

    def __post_init__(self) -> None:
        if self.formulation not in ("correct", "ibc"):
            raise ValueError(f"formulation must be 'correct' or 'ibc', got {self.formulation!r}")
        _check_steps(self.steps)
        if not 0 <= self.noise < inf:
            raise ValueError(f"noise must be at least 0 and finite, got {self.noise}")
        if self.formulation == "correct" and self.noise != 1.0:
            raise ValueError("noise is the σ of the ibc formulation; the correct one has none, leave it at 1")
        if self.step_clip is not None:
            step_limit(self.step_clip, self.clip_convention)
        if self.margin is not None:
            margin_limit(self.margin)

    def init(self, energy: EnergyModel, context: Context, start: Actions, generator: torch.Generator) -> LangevinState:
        return LangevinState(start)

    def step(
        self, energy: EnergyModel, context: Context, state: LangevinState, k: int, generator: torch.Generator
    ) -> tuple[LangevinState, StepInfo]:
        energies, gradients = energy.energies_and_gradients(context, state.actions)
        move = self._wanted(gradients, k, generator)
        actions = self._clip(state.actions, move)
        clipped = (actions != state.actions + move).to(actions.dtype).mean()
        return LangevinState(actions), StepInfo.of(energies, gradients, clipped)

    def move(
        self, energy: EnergyModel, context: Context, state: LangevinState, k: int, generator: torch.Generator
    ) -> LangevinState:
        """The next state alone, without what `step` says about it."""
        gradients = energy.energies_and_gradients(context, state.actions)[1]
        return LangevinState(self._clip(state.actions, self._wanted(gradients, k, generator)))

    def small_steps(self, size: float) -> "Langevin":
        """The same chain with moves of at most `size` per coordinate."""
        return replace(self, step_clip=size / 2, clip_convention="range")

    def _wanted(self, gradients: Actions, k: int, generator: torch.Generator) -> Actions:
        """The move of step k before it is clipped."""
        size = _step_size(self.schedule, k, self.steps)
        scale = sqrt(2 * size) if self.formulation == "correct" else size * self.noise
        move = gradients * (-size if self.formulation == "correct" else -0.5 * size)
        return move + scale * draw_normal(generator, gradients.shape, gradients) if scale else move

    def _clip(self, actions: Actions, move: Actions) -> Actions:
        if self.step_clip is not None:
            limit = step_limit(self.step_clip, self.clip_convention)
            move = move.clamp(-limit, limit)
        result = actions + move
        if self.margin is not None:
            limit = margin_limit(self.margin)
            result = result.clamp(-limit, limit)
        return result


class MALAState(NamedTuple):
    """State of Metropolis chains, with what the next accept step needs."""

    actions: Actions
    energies: Energies
    gradients: Actions
    log_step: Float[Tensor, "batch 1 1"]


@dataclass(frozen=True)
class MALA:
    """Metropolis-adjusted Langevin: proposes y' = y − τ∇E(y) + √(2τ) ω and takes it with probability
    min(1, exp(E(y) − E(y')) q(y|y')/q(y'|y)), q(y'|y) = N(y'; y − τ∇E(y), 2τ). Samples exp(-E) exactly in the
    long run; restricted to the box where there is a margin (proposals outside are refused, not clipped).

    For the first `adapt` steps log τ follows the acceptance (Robbins–Monro), per observation; then it stays.
    """

    steps: int = 100
    """Number of sampler steps per chain."""
    step_size: float = 0.01
    """Step size τ of the first step."""
    adapt: int = 50
    """Steps during which τ adapts. Draw samples from the states after them."""
    target: float = 0.574
    """Acceptance to adapt to; 0.574 is optimal for many independent dimensions (Roberts & Rosenthal 1998)."""
    margin: float | None = 0.05
    """The support: the box [-1, 1] grown by this fraction of the range on both ends. None: unbounded."""

    def __post_init__(self) -> None:
        _check_steps(self.steps)
        _positive("step_size", self.step_size)
        if self.adapt < 0:
            raise ValueError(f"adapt must be at least 0, got {self.adapt}")
        if not 0 < self.target < 1:
            raise ValueError(f"target must be in (0, 1), got {self.target}")
        if self.margin is not None:
            margin_limit(self.margin)

    def init(self, energy: EnergyModel, context: Context, start: Actions, generator: torch.Generator) -> MALAState:
        if self.margin is not None:
            start = start.clamp(-margin_limit(self.margin), margin_limit(self.margin))
        energies, gradients = energy.energies_and_gradients(context, start)
        log_step = start.new_full((start.shape[0], 1, 1), self.step_size).log()
        return MALAState(start, energies, gradients, log_step)

    def small_steps(self, size: float) -> "MALA":
        """The same chain with noise of at most `size` per step; τ does not adapt."""
        return replace(self, step_size=min(self.step_size, size**2 / 2), adapt=0)

    def step(
        self, energy: EnergyModel, context: Context, state: MALAState, k: int, generator: torch.Generator
    ) -> tuple[MALAState, StepInfo]:
        step = state.log_step.exp()
        noise = draw_normal(generator, state.actions.shape, state.actions)
        proposal = state.actions - step * state.gradients + (2 * step).sqrt() * noise
        energies, gradients = energy.energies_and_gradients(context, proposal)
        # log q(y'|y) = −‖ω‖²/2 up to the constant that both directions share.
        backwards = (state.actions - proposal + step * gradients) / (2 * step).sqrt()
        log_ratio = state.energies - energies + 0.5 * (noise.square().sum(-1) - backwards.square().sum(-1))
        outside = torch.zeros_like(energies, dtype=torch.bool)
        if self.margin is not None:
            outside = (proposal.abs() > margin_limit(self.margin)).any(-1)
        # A proposal whose energy is NaN is refused too.
        probability = torch.where(outside | log_ratio.isnan(), 0.0, log_ratio.clamp(max=0).exp())
        taken = draw_uniform(generator, probability.shape, probability) < probability
        log_step = state.log_step
        if k < self.adapt:
            # Robbins–Monro: the gains add up to infinity, so any τ is reached; their squares do not, so it settles.
            gain = (k + 1) ** -0.6
            log_step = log_step + gain * (probability.mean(1).view(-1, 1, 1) - self.target)
        info = StepInfo(
            state.energies.mean(),
            _gradient_norm(state.gradients),
            outside.to(energies.dtype).mean(),
            taken.to(energies.dtype).mean(),
        )
        moved = taken.unsqueeze(-1)
        return (
            MALAState(
                torch.where(moved, proposal, state.actions),
                torch.where(taken, energies, state.energies),
                torch.where(moved, gradients, state.gradients),
                log_step,
            ),
            info,
        )


class Candidates(NamedTuple):
    """State of a derivative-free search: the candidates and their energies."""

    actions: Actions
    energies: Energies


@dataclass(frozen=True)
class DerivativeFree:
    """The derivative-free optimiser of IBC: draw candidates anew with probability softmax(-E/T), then, in every
    further step, add N(0, (deviation·shrink^(k−1))²) noise, clip to the box and draw anew. The first step is
    importance resampling of the start (of exp(-E) itself, for a uniform start and many candidates); the later
    ones weigh without correcting for their proposal, so this seeks minima and does not sample.

    `autoregressive` perturbs and redraws one action dimension after the other, which keeps candidates useful in
    high dimensions. (IBC trains one network per prefix of the action for it; here one energy serves all.)
    """

    steps: int = 3
    """Number of times that candidates are drawn anew."""
    deviation: float = 0.33
    """Standard deviation of the first perturbation, normalised units."""
    shrink: float = 0.5
    """Factor between two consecutive perturbations."""
    temperature: float = 1.0
    """Temperature T of the softmax."""
    margin: float | None = 0.05
    """Candidates stay in the box [-1, 1] grown by this fraction of the range on both ends. None: unbounded."""
    autoregressive: bool = False
    """Whether to move one dimension at a time, which takes act_dim times the energy evaluations."""

    def __post_init__(self) -> None:
        _check_steps(self.steps)
        _positive("deviation", self.deviation)
        _positive("temperature", self.temperature)
        if not 0 < self.shrink <= 1:
            raise ValueError(f"shrink must be in (0, 1], got {self.shrink}")
        if self.margin is not None:
            margin_limit(self.margin)

    def init(self, energy: EnergyModel, context: Context, start: Actions, generator: torch.Generator) -> Candidates:
        if self.margin is not None:
            start = start.clamp(-margin_limit(self.margin), margin_limit(self.margin))
        return Candidates(start, energy.energies(context, start))

    def small_steps(self, size: float) -> "DerivativeFree":
        """The same search with perturbations of at most `size`."""
        return replace(self, deviation=min(self.deviation, size))

    def step(
        self, energy: EnergyModel, context: Context, state: Candidates, k: int, generator: torch.Generator
    ) -> tuple[Candidates, StepInfo]:
        zero = state.energies.new_zeros(())
        before, clipped = state.energies.mean(), zero
        if k == 0:
            state = self._redraw(state.actions, state.energies, generator)
        else:
            size = self.deviation * self.shrink ** (k - 1)
            dims = range(state.actions.shape[2])
            for group in [[d] for d in dims] if self.autoregressive else [list(dims)]:
                actions, cut = self._perturb(state.actions, group, size, generator)
                clipped = clipped + cut
                state = self._redraw(actions, energy.energies(context, actions), generator)
        return state, StepInfo(before, zero, clipped, torch.ones_like(zero))

    def _perturb(
        self, actions: Actions, dims: list[int], size: float, generator: torch.Generator
    ) -> tuple[Actions, Float[Tensor, ""]]:
        wanted = actions.clone()
        wanted[..., dims] += size * draw_normal(generator, (*actions.shape[:2], len(dims)), actions)
        result = wanted
        if self.margin is not None:
            result = wanted.clamp(-margin_limit(self.margin), margin_limit(self.margin))
        return result, (result != wanted).to(wanted.dtype).mean()

    def _redraw(self, actions: Actions, energies: Energies, generator: torch.Generator) -> Candidates:
        weights = torch.softmax(-energies / self.temperature, 1)
        index = draw_index(generator, weights, actions.shape[1])
        return Candidates(actions.gather(1, index.unsqueeze(-1).expand_as(actions)), energies.gather(1, index))


# ---------------------------------------------------------------------------------------------- helpers


def _gradient_norm(gradients: Actions) -> Float[Tensor, ""]:
    return gradients.detach().abs().amax(-1).mean()  # vector_norm would take 20 times as long


def _step_size(schedule: Schedule, k: int, n: int) -> float:
    size = schedule(k, n)
    if not 0 <= size < inf:
        raise ValueError(f"schedule gave the step size {size} at step {k}; it must be at least 0 and finite")
    return size


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
