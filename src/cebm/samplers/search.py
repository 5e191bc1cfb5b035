"""The derivative-free optimiser of IBC."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel
from cebm.randomness import draw_index, draw_normal
from cebm.samplers.contract import StepInfo, check_steps, positive
from cebm.spaces import margin_limit


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
        check_steps(self.steps)
        positive("deviation", self.deviation)
        positive("temperature", self.temperature)
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
