"""Parallel tempering: chains at higher temperatures cross between modes, and hand their states down."""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel, mapped
from cebm.randomness import draw_uniform
from cebm.samplers.contract import Sampler, StepInfo, check_steps, gradient_norm, with_steps
from cebm.samplers.langevin import MALA


class _Heated(EnergyModel):
    """βE with a β per row: rows are temperatures, the coldest first, of each observation in turn."""

    def __init__(self, energy: EnergyModel, betas: Float[Tensor, " rows"]) -> None:
        super().__init__()
        self.obs_dim, self.act_dim, self.closed_form = energy.obs_dim, energy.act_dim, energy.closed_form
        self.inner, self.betas = [energy], betas.unsqueeze(1)  # in a list: its weights are not ours

    def encode(self, obs: Tensor) -> Context:
        raise TypeError("a heated energy lives inside of a sampler, where observations are encoded already")

    def energies(self, context: Context, actions: Actions) -> Energies:
        return self.betas * self.inner[0].energies(context, actions)

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        energies, gradients = self.inner[0].energies_and_gradients(context, actions)
        return self.betas * energies, self.betas.unsqueeze(2) * gradients


@dataclass(frozen=True)
class TemperingState:
    """State of the chains of all temperatures."""

    inner: Any
    """State of the inner sampler; its rows are the temperatures, the coldest first, of each observation in turn: so
    random numbers of an observation stand side by side."""
    context: Any
    """The context, each row once for each temperature."""
    betas: Float[Tensor, " rows"]
    """1/temperature of each row."""
    swapped: Float[Tensor, " pairs"]
    """Running share of swaps that were taken between neighbouring temperatures."""
    rows: int = field(default=1)
    """Number of observations."""

    @property
    def actions(self) -> Actions:
        """The states at temperature 1."""
        return self.coldest(self.inner.actions)

    def coldest(self, values: Tensor) -> Tensor:
        """The rows at temperature 1."""
        return values.unflatten(0, (self.rows, -1))[:, 0]


@dataclass(frozen=True)
class Tempering:
    """Parallel tempering (Geyer 1991; Earl & Deem 2005): one chain of exp(−βₖE) for each of `levels` temperatures,
    geometric from 1 to `hottest`. After each step of the inner sampler, neighbours k and k + 1 exchange their states
    with probability min(1, exp((βₖ − βₖ₊₁)(E(yₖ) − E(yₖ₊₁)))), even and odd pairs in turn. Each level is sampled
    exactly if the inner sampler does; the hot ones cross the barriers that the cold one does not.

    The inner sampler's state is a NamedTuple with `actions`, `energies` and `gradients`: MALA and HMC. It adapts to
    each temperature for itself. A target without walls has to keep its hottest chains together.
    """

    sampler: Sampler = MALA()
    """Moves the chains of each temperature; its own number of steps has no effect."""
    steps: int = 200
    """Number of steps of the inner sampler, each followed by swaps."""
    levels: int = 6
    """Number of temperatures."""
    hottest: float = 30.0
    """The highest temperature: about the height of the barriers, in nats."""

    def __post_init__(self) -> None:
        check_steps(self.steps)
        if self.levels < 2:
            raise ValueError(f"levels must be at least 2, got {self.levels}")
        if not 1 < self.hottest < float("inf"):
            raise ValueError(f"hottest must be above 1 and finite, got {self.hottest}")
        if isinstance(self.sampler, type) or not isinstance(self.sampler, Sampler):
            raise ValueError("sampler must have steps, init and step, such as MALA() or HMC()")

    def init(self, energy: EnergyModel, context: Context, start: Actions, generator: torch.Generator) -> TemperingState:
        rows = start.shape[0]
        ladder = self.hottest ** (
            -torch.arange(self.levels, dtype=start.dtype, device=start.device) / (self.levels - 1)
        )
        betas = ladder.repeat(rows)
        wide = mapped(self._widened, context)
        inner = self._inner.init(_Heated(energy, betas), wide, self._widened(start), generator)
        missing = [name for name in ("actions", "energies", "gradients") if not hasattr(inner, name)]
        if missing or not hasattr(inner, "_replace"):
            name = type(self.sampler).__name__
            raise ValueError(f"sampler: {name}'s state must be a NamedTuple with actions, energies and gradients")
        return TemperingState(inner, wide, betas, start.new_zeros(self.levels - 1), rows)

    def step(
        self, energy: EnergyModel, context: Context, state: TemperingState, k: int, generator: torch.Generator
    ) -> tuple[TemperingState, StepInfo]:
        inner, info = self._inner.step(_Heated(energy, state.betas), state.context, state.inner, k, generator)
        inner, swapped = self._swapped(inner, state, k % 2, generator)
        energies, gradients = state.coldest(state.inner.energies), state.coldest(state.inner.gradients)
        cost = info.evaluations * self.levels
        info = info._replace(energy=energies.mean(), gradient_norm=gradient_norm(gradients), evaluations=cost)
        return TemperingState(inner, state.context, state.betas, swapped, state.rows), info

    def _swapped(
        self, inner: Any, state: TemperingState, parity: int, generator: torch.Generator
    ) -> tuple[Any, Float[Tensor, " pairs"]]:
        """Neighbours exchanged, from the pair of levels (parity, parity + 1) on."""
        low = list(range(parity, self.levels - 1, 2))
        if not low:
            return inner, state.swapped
        high = [level + 1 for level in low]
        split = (state.rows, self.levels)
        betas = state.betas.view(*split, 1)
        actions, scaled, pulls = (part.unflatten(0, split) for part in (inner.actions, inner.energies, inner.gradients))
        energies, gradients = scaled / betas, pulls / betas.unsqueeze(-1)
        log_ratio = (betas[:, low] - betas[:, high]) * (energies[:, low] - energies[:, high])
        # Where both energies are infinite, or one is NaN, nothing is exchanged.
        probability = torch.where(log_ratio.isnan(), 0.0, log_ratio.clamp(max=0).exp())
        taken = draw_uniform(generator, probability.shape, probability) < probability
        # Each level, the one that it is paired with, and the number of the pair; a level without a pair is with itself.
        other, pair = list(range(self.levels)), [0] * self.levels
        for place, level in enumerate(low):
            other[level], other[level + 1] = level + 1, level
            pair[level] = pair[level + 1] = place
        own, theirs = (torch.tensor(each, device=actions.device).view(1, -1, 1) for each in (range(self.levels), other))
        order = torch.where(taken[:, pair], theirs, own)
        wide = order.unsqueeze(-1).expand_as(actions)
        actions, gradients = actions.gather(1, wide), gradients.gather(1, wide)
        energies = energies.gather(1, order)
        swapped = state.swapped.clone()
        swapped[low] = 0.9 * swapped[low] + 0.1 * taken.to(swapped.dtype).mean((0, 2))
        inner = inner._replace(
            actions=actions.flatten(0, 1),
            energies=(energies * betas).flatten(0, 1),
            gradients=(gradients * betas.unsqueeze(-1)).flatten(0, 1),
        )
        return inner, swapped

    def _widened(self, values: Tensor) -> Tensor:
        """Each row once for each temperature."""
        return values.repeat_interleave(self.levels, 0)

    @property
    def _inner(self) -> Sampler:
        """The inner sampler. Its length matters only to a schedule, which then spans all of the steps."""
        return with_steps(self.sampler, self.steps)
