"""Draws of one energy, judged by another: what makes the draws and what chooses among them are learned apart."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel, EnergySettings, Level, Obs, described
from cebm.energies.feedforward import MLP
from cebm.energies.levels import NoiseConditional
from cebm.spaces import Specification


class JudgedEnergy(EnergyModel):
    """E_s(x, y) of `drawn`, an energy with levels, and beside it R(x, y) of `judge`, which contrast trains.

    Candidates fall by E_s, which is `at(s)`; the energy without a level is E + R. With negatives that are such draws,
    of density q, InfoNCE has its minimum at R = log q/p + c(x): that is `excess`, minus the log of the weight which
    makes a draw of q a draw of p. So the choice repairs the draws, and does not seek the heaviest mode as the lowest
    E_s does; and the contrast, whose minimum is no −log p, leaves the slopes of E_s alone. The context is the pair (of
    `drawn`, of `judge`).
    """

    def __init__(self, drawn: EnergyModel, judge: EnergyModel, levelled: bool = False) -> None:
        super().__init__()
        if not drawn.levels:
            raise ValueError(f"drawn must be an energy with levels, not {type(drawn).__name__}")
        if (drawn.obs_dim, drawn.act_dim) != (judge.obs_dim, judge.act_dim):
            raise ValueError(
                f"drawn is of {drawn.obs_dim} and {drawn.act_dim} dimensions, the judge of {judge.obs_dim} and "
                f"{judge.act_dim}"
            )
        self.drawn, self.judge, self.levelled = drawn, judge, levelled
        self.obs_dim, self.act_dim = drawn.obs_dim, drawn.act_dim
        self.closed_form = drawn.closed_form and judge.closed_form
        self.levels, self.deviation = drawn.levels, drawn.deviation

    def encode(self, obs: Obs) -> Context:
        return self.drawn.encode(obs), self.judge.encode(obs)

    def at(self, level: Level) -> "JudgedEnergy":
        """E at that level, without the judge, which knows no levels."""
        return JudgedEnergy(self.drawn.at(level), self.judge, levelled=True)

    def energies(self, context: Context, actions: Actions) -> Energies:
        self.check(context, actions)
        energies = self.drawn.energies(context[0], actions)
        return energies if self.levelled else energies + self.judge.energies(context[1], actions)

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        self.check(context, actions)
        energies, slopes = self.drawn.energies_and_gradients(context[0], actions)
        if self.levelled:
            return energies, slopes
        more, steeper = self.judge.energies_and_gradients(context[1], actions)
        return energies + more, slopes + steeper

    def excess(self, context: Context, actions: Actions) -> Energies:
        """R = log q/p, for draws of density q that fell through the levels."""
        self.check(context, actions)
        return self.judge.energies(context[1], actions)

    @property
    def judges(self) -> bool:
        return not self.levelled

    def check(self, context: Context, actions: Tensor) -> None:
        if not isinstance(context, tuple) or len(context) != 2:
            raise ValueError(f"context must be the pair (of the drawn, of the judge), got {described(context)}")
        self.drawn.check(context[0], actions)
        self.judge.check(context[1], actions)

    @property
    def contrasted(self) -> EnergyModel:
        return self.judge

    def own_losses(self, obs: Obs, actions: Tensor) -> dict[str, Tensor]:
        """Those of its parts."""
        return self.drawn.own_losses(obs, actions) | self.judge.own_losses(obs, actions)


@dataclass(frozen=True)
class Judged:
    """Settings of `JudgedEnergy`: an energy with levels whose draws another energy chooses from."""

    drawn: EnergySettings = NoiseConditional()
    """Settings of the energy with levels."""
    judge: EnergySettings = MLP(init="torch")
    """Settings of the energy that chooses."""

    explicit: ClassVar[bool] = False

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> EnergyModel:
        """The energy, its weights drawn from `generator`: first those of `drawn`, then those of the judge."""
        return JudgedEnergy(self.drawn.build(spec, generator), self.judge.build(spec, generator))
