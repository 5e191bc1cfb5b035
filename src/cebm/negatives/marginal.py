"""The paper's Marginal Action Sampler (MAS): negatives from an energy of p(y), trained beside the conditional one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cebm.composition import built
from cebm.energies.base import Actions, EnergyModel, Obs, evaluating
from cebm.energies.feedforward import MarginalEnergy
from cebm.losses import maximum_entropy_loss, mcmc_loss, positive_l2
from cebm.negatives.base import Negatives, Positives, Source, check_pairs, check_positives, check_sampler, check_start
from cebm.negatives.plain import Uniform
from cebm.samplers import Langevin, Sampler, run
from cebm.spaces import Specification, check_finite

if TYPE_CHECKING:
    from cebm.recipes import Trial


class MarginalActionSampler(nn.Module):
    """MAS: negatives of p_γ(y) ∝ e^{−E_γ(y)}, a marginal energy that is trained beside the conditional one.

    `sample` runs chains of p_γ(y); `loss` trains E_γ on the very samples that served as negatives, with the MCMC
    loss or, 'maxent', with the maximum-entropy loss, plus `positive_l2` times the mean squared positive energy.
    `shared`: one set of chains serves the whole batch, as p(y) does not depend on the observation. The chains' work is
    then that of one example, whatever the batch; the negatives of different examples are no longer independent.
    """

    def __init__(
        self,
        act_dim: int,
        sampler: Sampler | None = None,
        objective: Literal["mcmc", "maxent"] = "mcmc",
        positive_l2: float = 0.0,
        width: int = 64,
        start: Source | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__()
        if objective not in ("mcmc", "maxent"):
            raise ValueError(f"objective must be 'mcmc' or 'maxent', got {objective!r}")
        if not positive_l2 >= 0:
            raise ValueError(f"positive_l2 must be at least 0, got {positive_l2}")
        self.sampler = sampler if sampler is not None else Langevin("correct")
        self.objective, self.positive_l2, self.shared = objective, positive_l2, shared
        self.start = start if start is not None else Uniform()
        self.marginal = MarginalEnergy(act_dim, width, generator=generator)

    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        check_pairs(obs, actions, n)
        rows = 1 if self.shared else len(actions)
        start = self.start.sample(self.marginal, obs, actions, n, generator).actions[:rows]
        with torch.no_grad(), evaluating(self.marginal):
            chain = run(self.sampler, self.marginal, self.marginal.encode(obs[:rows]), start, generator)
        return Negatives(chain.actions.expand(len(actions), -1, -1), obs, info=chain.info)

    def loss(self, actions: Positives, negatives: Actions) -> Float[Tensor, ""]:
        """The marginal's own loss. All negatives are samples of the one p_γ(y), so they count as one set."""
        check_positives(actions)
        if negatives.ndim != 3 or not negatives.numel() or negatives.shape[2] != actions.shape[1]:
            shape = tuple(negatives.shape)
            raise ValueError(f"negatives must be a non-empty [batch, samples, {actions.shape[1]}] tensor, got {shape}")
        check_finite(negatives, "negatives")
        if self.shared:  # each was drawn once
            negatives = negatives[:1]
        everything = torch.cat([actions, negatives.flatten(0, 1)]).unsqueeze(0)
        energies = self.marginal(everything[..., 0], everything)[0]
        positive, negative = energies.split([actions.shape[0], energies.shape[0] - actions.shape[0]])
        objective = maximum_entropy_loss if self.objective == "maxent" else mcmc_loss
        loss = objective(positive.mean().unsqueeze(0), negative.unsqueeze(0))
        return loss + self.positive_l2 * positive_l2(positive) if self.positive_l2 else loss

    def own_losses(self, actions: Positives, negatives: Actions) -> dict[str, Tensor]:
        """The loss of the marginal energy, which shares no weight with the conditional one."""
        return {"marginal_loss": self.loss(actions, negatives)}


@dataclass(frozen=True)
class MarginalActions:
    """Settings of a `MarginalActionSampler`, the paper's MAS: negatives of p_γ(y) ∝ e^{−E_γ(y)}."""

    sampler: Sampler = Langevin("correct")
    """Sampler of the marginal energy's chains."""
    objective: Literal["mcmc", "maxent"] = "mcmc"
    """The loss of the marginal energy."""
    positive_l2: float = 0.0
    """Weight of the mean squared energy of the data in that loss."""
    width: int = 64
    """Hidden units of the marginal energy."""
    start: Any = Uniform()
    """Source of the chains' first states."""
    shared: bool = False
    """Whether one set of chains serves the whole batch: many negatives for the chains of a few."""

    distribution: ClassVar[str] = "marginal"
    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_sampler(self)
        if self.objective not in ("mcmc", "maxent"):
            raise ValueError(f"objective must be 'mcmc' or 'maxent', got {self.objective!r}")
        if not self.positive_l2 >= 0:
            raise ValueError(f"positive_l2 must be at least 0, got {self.positive_l2}")

    def build(self, spec: Specification, generator: torch.Generator | None = None) -> MarginalActionSampler:
        """The sampler, its energy's weights drawn from `generator`."""
        start = built(self.start, spec, generator)
        settings = (self.sampler, self.objective, self.positive_l2, self.width, start)
        return MarginalActionSampler(spec.act_dim, *settings, generator, self.shared)

    def check_composition(self, trial: "Trial") -> None:
        check_start(self)
