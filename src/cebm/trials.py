"""Trials: named recipes. A trial is one frozen dataclass; the command line and the checkpoint both read it.

`TRIALS` holds the paper's four trials, its failed attempts, the baselines and ours.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cebm import negatives as sources
from cebm.energy import EnergyModel
from cebm.explicit import ExplicitEnergy, TiltedEnergy
from cebm.networks import FeedForwardEnergy, JointEnergy
from cebm.objectives import (
    entropy_regulariser,
    gradient_penalty,
    importance_nll,
    info_nce,
    maximum_entropy_loss,
    mcmc_loss,
    positive_l2,
    ranking_nce,
)
from cebm.policy import Choice, Network
from cebm.samplers import MALA, Constant, DerivativeFree, Langevin, Polynomial
from cebm.spaces import Scaling

Objective = Literal["info-nce", "ranking-nce", "nll", "mcmc", "maxent", "likelihood"]
NegativeSource = Literal["chains", "long-chain", "uniform", "in-batch", "gaussian-mixture", "replay", "mas", "proposal"]


@dataclass(frozen=True)
class Trial:
    """Everything that decides what is learned, apart from the data, the seed and the number of steps."""

    network: Network = Network()
    """The energy's architecture."""
    objective: Objective = "info-nce"
    """The loss. 'likelihood' is the mean energy of the data, for explicit networks, which are normalised."""
    negatives: NegativeSource = "chains"
    """Where negative actions come from. 'proposal': the mixture density of a tilted network, and only there."""
    negative_count: int = 8
    """Negatives per example (the paper is silent: our reading)."""
    sampler: Langevin | MALA | DerivativeFree = Langevin("ibc", noise=0.1)
    """Moves the chains in training."""
    through_chain: bool = False
    """Differentiate the loss through every step of the chains too, for 'chains' of a Langevin sampler."""
    burn_in: int = 50
    """Steps thrown away, for 'long-chain'."""
    thin: int = 5
    """Distance between kept states, for 'long-chain'."""
    joint: bool = False
    """Model p(x, y) with the energy and sample pairs, for 'replay'."""
    replay_capacity: int = 10_000
    """States that the replay buffer holds."""
    marginal_objective: Literal["mcmc", "maxent"] = "mcmc"
    """The loss of the marginal action sampler's energy, for 'mas'."""
    marginal_l2: float = 0.0
    """Weight of the squared positive energies in that loss."""
    marginal_width: int = 64
    """Hidden units of the marginal energy."""
    positive_l2: float = 0.0
    """Weight of the squared positive energies in the loss."""
    entropy_weight: float = 0.0
    """Weight of -H(y|x) in the loss, by half the variance of the negatives' energies (appendix A). 1 is the weight that
    'maxent' gives it."""
    gradient_penalty: float = 0.0
    """Weight of the penalty on the gradient at the negatives (IBC, Sec. B.3.1)."""
    gradient_margin: float = 1.0
    """∞-norm of the gradient below which that penalty is zero."""
    obs_scaling: Scaling = "min-max"
    """'min-max': observations fill [-1, 1] (the paper). 'standardise': zero mean, unit variance (reference code)."""
    history: int = 1
    """Observations the policy sees: this many, the current one last."""
    horizon: int = 1
    """Actions it gives at once: the current one first."""
    batch_size: int = 512
    """Examples per step."""
    learning_rate: float = 1e-3
    """Adam's."""
    schedule: Literal["decay", "cosine"] = "decay"
    """'decay': by `decay` every `decay_epochs` epochs. 'cosine': up over 100 steps, then half a cosine down to 0 at the
    end of the run."""
    decay: float = 0.99
    """What the learning rate is multiplied by every `decay_epochs` epochs."""
    decay_epochs: int = 100
    """Epochs between two decays."""
    ema: float = 0.0
    """Weight of the past in the moving average of the weights that acts. 0: the raw weights act."""
    acting: Langevin | MALA | DerivativeFree = Langevin("ibc", noise=0.01)
    """Searches for the action of lowest energy (implicit networks)."""
    candidates: int = 512
    """Candidates of that search (the paper is silent: our reading)."""
    choice: Choice = "minimum"
    """Whether the best of them acts, or one drawn from p(y|x)."""
    keep: int = 0
    """Candidates that the search goes on with after a first look. 0: all."""

    def __post_init__(self) -> None:
        for name in ("negative_count", "history", "horizon", "batch_size", "decay_epochs", "candidates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.keep < 0:
            raise ValueError(f"keep must not be negative, got {self.keep}")
        if not self.learning_rate > 0 or not 0 < self.decay <= 1 or not 0 <= self.ema < 1:
            raise ValueError("learning_rate must be positive, decay in (0, 1], ema in [0, 1)")
        if self.network.explicit != (self.objective == "likelihood"):
            raise ValueError(f"objective {self.objective!r} does not go with a {self.network.kind!r} network")
        if self.network.kind == "tilted":
            # The tilt is the log-ratio of where the negatives come from to the data, and q is what is put back.
            fitting = ("proposal",) if self.network.proposal == "conditional" else ("in-batch", "mas", "proposal")
            if self.objective != "info-nce" or self.negatives not in fitting:
                raise ValueError(
                    f"a tilted network with a {self.network.proposal} proposal goes with objective 'info-nce' and "
                    f"negatives {' or '.join(fitting)}, not {self.objective!r} and {self.negatives!r}"
                )
        elif self.negatives == "proposal":
            raise ValueError("negatives 'proposal' need a tilted network")
        if self.through_chain and not (self.negatives == "chains" and isinstance(self.sampler, Langevin)):
            raise ValueError("through_chain needs negatives 'chains' and a Langevin sampler")
        if self.joint != (self.negatives == "replay"):
            raise ValueError("joint energies take their negatives from 'replay', and only they do")
        if self.objective in ("nll", "ranking-nce") and self.negatives not in ("uniform", "gaussian-mixture"):
            raise ValueError(f"objective {self.objective!r} needs negatives of known density, not {self.negatives!r}")

    def source(self, obs_dim: int, act_dim: int, generator: torch.Generator | None = None) -> sources.Source:
        """The source of negatives; those with state draw their weights from `generator`."""
        device = generator.device if generator is not None else None
        if self.negatives in ("uniform", "proposal"):  # the latter's source is the energy itself
            return sources.Uniform()
        if self.negatives == "in-batch":
            return sources.InBatch()
        if self.negatives == "gaussian-mixture":
            return sources.GaussianMixture()
        if self.negatives == "long-chain":
            if not isinstance(self.sampler, Langevin):
                raise ValueError("negatives 'long-chain' need a Langevin sampler")
            return sources.LongChain(self.sampler, self.burn_in, self.thin)
        if self.negatives == "replay":
            return sources.Replay(obs_dim + act_dim, self.sampler, self.replay_capacity, device=device)
        if self.negatives == "mas":
            return sources.MarginalActionSampler(
                act_dim, self.sampler, self.marginal_objective, self.marginal_l2, self.marginal_width, None, generator
            )
        return sources.ShortChains(self.sampler, keep_graph=self.through_chain)


class Learner(nn.Module):
    """What a trial trains: the energy, and the source of negatives where it has state of its own."""

    def __init__(self, trial: Trial, obs_dim: int, act_dim: int, generator: torch.Generator) -> None:
        super().__init__()
        self.trial = trial
        energy = trial.network.build(obs_dim, act_dim, generator)
        if trial.joint:
            assert isinstance(energy, FeedForwardEnergy)
            energy = JointEnergy(energy)
        self.energy = energy
        self.source = trial.source(obs_dim, act_dim, generator)

    @property
    def conditional(self) -> EnergyModel:
        """The energy E(x, y) that acts."""
        return self.energy.network if isinstance(self.energy, JointEnergy) else self.energy

    @property
    def contrasted(self) -> EnergyModel:
        """The energy that positives and negatives are compared by: of a tilted one, the tilt."""
        return self.energy.tilt if isinstance(self.energy, TiltedEnergy) else self.energy

    def loss(
        self, obs: Float[Tensor, "batch obs"], actions: Float[Tensor, "batch act"], generator: torch.Generator
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """The loss to minimise, and what to log of this step."""
        trial = self.trial
        if trial.network.smoothing:
            noise = torch.randn(actions.shape, generator=generator, dtype=actions.dtype, device=actions.device)
            actions = actions + trial.network.smoothing * noise
        if isinstance(self.energy, ExplicitEnergy):
            # It trains without negatives; others' actions serve to log what the implicit trials log.
            count = min(trial.negative_count, max(1, len(actions) - 1))
            source = sources.InBatch() if len(actions) > 1 else sources.Uniform()
            drawn = source.sample(self.energy, obs, actions, count, generator)
            positive, negative = self._energies(obs, actions, drawn)
            loss = positive.mean()
            return loss, _numbers(loss, positive, negative, actions, drawn)
        tilted = self.energy if isinstance(self.energy, TiltedEnergy) else None
        known = tilted.proposal.encode(obs) if tilted else None
        if trial.negatives == "proposal":
            assert tilted is not None and known is not None
            samples = tilted.proposal.draw(known.detach(), trial.negative_count, generator)
            drawn = sources.Negatives(samples, obs)
        else:
            drawn = self.source.sample(self.energy, obs, actions, trial.negative_count, generator)
        positive, negative = self._energies(obs, actions, drawn)
        loss = self._objective(positive, negative, drawn)
        if trial.positive_l2:
            loss = loss + trial.positive_l2 * positive_l2(positive)
        if trial.entropy_weight:
            loss = loss + trial.entropy_weight * entropy_regulariser(negative)
        if trial.gradient_penalty:
            gradients = self.contrasted.energies_and_gradients(self.contrasted.encode(obs), drawn.actions)[1]
            loss = loss + trial.gradient_penalty * gradient_penalty(gradients, trial.gradient_margin)
        log = _numbers(loss, positive, negative, actions, drawn)
        # What follows has parameters of its own: Adam trains the parts as if apart.
        if tilted is not None and known is not None:
            likelihood = tilted.proposal.energies(known, actions.unsqueeze(1)).mean()
            log["proposal_loss"] = likelihood.detach()
            loss = loss + likelihood
        if isinstance(self.source, sources.MarginalActionSampler):
            marginal_loss = self.source.loss(actions, drawn.actions)
            log["marginal_loss"] = marginal_loss.detach()
            loss = loss + marginal_loss
        return loss, log

    def _energies(self, obs: Tensor, actions: Tensor, drawn: sources.Negatives) -> tuple[Tensor, Tensor]:
        if isinstance(self.energy, JointEnergy):
            positive = self.energy(obs, actions.unsqueeze(1))[:, 0]
            pairs = torch.cat([drawn.obs, drawn.actions], -1)
            return positive, self.energy.pairs(obs, pairs)
        together = self.contrasted(obs, torch.cat([actions.unsqueeze(1), drawn.actions], 1))
        return together[:, 0], together[:, 1:]

    def _objective(self, positive: Tensor, negative: Tensor, drawn: sources.Negatives) -> Tensor:
        if self.trial.objective == "info-nce":
            return info_nce(positive, negative)
        if self.trial.objective == "mcmc":
            return mcmc_loss(positive, negative)
        if self.trial.objective == "maxent":
            return maximum_entropy_loss(positive, negative)
        assert drawn.log_q is not None and drawn.log_q_positive is not None
        if self.trial.objective == "nll":
            return importance_nll(positive, negative, drawn.log_q)
        return ranking_nce(positive, negative, drawn.log_q_positive, drawn.log_q)


def _numbers(
    loss: Tensor, positive: Tensor, negative: Tensor, actions: Tensor, drawn: sources.Negatives
) -> dict[str, Tensor]:
    """What to log of a step."""
    with torch.no_grad():
        log = {
            "loss": loss.detach(),
            "info_nce": info_nce(positive, negative),
            "positive_energy": positive.mean(),
            "negative_energy": negative.mean(),
            "energy_gap": negative.mean() - positive.mean(),
            "negative_distance": (drawn.actions - actions.unsqueeze(1)).norm(dim=-1).mean(),
        }
    if drawn.info is None:
        return log
    return log | {
        "chain_energy_first": drawn.info.energy[0],
        "chain_energy_last": drawn.info.energy[-1],
        "gradient_norm_first": drawn.info.gradient_norm[0],
        "gradient_norm_last": drawn.info.gradient_norm[-1],
        "clipped": drawn.info.clipped.mean(),
        "acceptance": drawn.info.acceptance.mean(),
    }


_IBC = Trial()
_MAS = replace(_IBC, negatives="mas")
_CORRECT = Langevin("correct")
_CORRECTED = Network("tilted", proposal="marginal")

_SMOOTHING = 0.05

TRIALS: dict[str, Trial] = {
    # Ours, the default: docs/stability.md says why each of these is what it is.
    "steady": Trial(
        network=Network("tilted", init="torch", smoothing=_SMOOTHING),
        negatives="proposal",
        obs_scaling="standardise",
        learning_rate=3e-3,
        schedule="cosine",
        ema=0.995,
        negative_count=4,
        # y − s²∇E is the mean of the clean actions that a smoothed one may come from (Tweedie): one step, of the one
        # size that fits, whatever the task.
        acting=Langevin("ibc", 1, Constant(2 * _SMOOTHING**2), noise=0.0),
        candidates=16,
        choice="draw",
        keep=4,
    ),
    # The paper's four.
    "ibc": _IBC,
    "ibc-mas": _MAS,
    "correct-mas": replace(_MAS, sampler=_CORRECT),
    "correct-mas-maxent": replace(_MAS, sampler=_CORRECT, marginal_objective="maxent", marginal_l2=1.0),
    # The same with one thing changed.
    "correct": replace(_IBC, sampler=_CORRECT),
    "uniform": replace(_IBC, negatives="uniform"),
    "in-batch": replace(_IBC, negatives="in-batch"),
    # The same with the marginal correction: InfoNCE with negatives from p(y) learns log p(y|x)/p(y), so act by
    # E(x, y) − log p̂(y).
    "in-batch-corrected": replace(_IBC, negatives="in-batch", network=_CORRECTED),
    "ibc-mas-corrected": replace(_MAS, network=_CORRECTED),
    # IBC's derivative-free variant; 64 uniform negatives cost as much as 8 chains of 10 steps.
    "dfo": replace(_IBC, negatives="uniform", negative_count=64, acting=DerivativeFree()),
    # The explicit baselines.
    "mse": replace(_IBC, network=Network("regression", init="torch"), objective="likelihood"),
    "mdn": replace(_IBC, network=Network("mixture-density", init="torch"), objective="likelihood"),
    # The paper's failed attempts.
    "mcmc-loss": replace(_IBC, objective="mcmc"),
    "conditional-maxent": replace(_IBC, sampler=_CORRECT, objective="maxent"),
    "long-chain": replace(_IBC, negatives="long-chain", sampler=Langevin("correct", schedule=Constant(0.01))),
    "joint-replay": replace(
        _IBC,
        joint=True,
        negatives="replay",
        objective="mcmc",
        positive_l2=1.0,
        sampler=Langevin("correct", schedule=Polynomial(0.1, 1e-3)),
    ),
    "gmm-nll": replace(_IBC, negatives="gaussian-mixture", objective="nll", negative_count=64),
}


def find_trial(name: str) -> Trial:
    """The trial of that name; a ValueError lists the names there are."""
    if name not in TRIALS:
        raise ValueError(f"there is no trial {name!r}; there are {', '.join(TRIALS)}")
    return TRIALS[name]
