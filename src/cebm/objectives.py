"""Objectives: the losses that training minimises. An objective owns its source of negatives and their count.

Each is a frozen dataclass with one method, `terms`; the formulas are in `losses`. Penalties are added to any of them.
"""

from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from cebm.energies.base import EnergyModel, Obs
from cebm.losses import (
    entropy_regulariser,
    gradient_penalty,
    importance_nll,
    info_nce,
    maximum_entropy_loss,
    mcmc_loss,
    positive_l2,
    ranking_nce,
)
from cebm.negatives import GaussianMixture, InBatch, Negatives, Positives, ShortChains, Uniform, has_density, own_losses
from cebm.samplers import Langevin

if TYPE_CHECKING:
    from cebm.recipes import Trial


@dataclass(frozen=True)
class Terms:
    """The result of an objective on a batch. Only `loss` is needed; the rest serves penalties and the log."""

    loss: Float[Tensor, ""]
    """The loss to minimise."""
    positive: Float[Tensor, " batch"] | None = None
    """Energies of the demonstrated actions."""
    negative: Float[Tensor, "batch samples"] | None = None
    """Energies of the negatives."""
    drawn: Negatives | None = None
    """The negatives that were drawn."""
    own: dict[str, Tensor] = field(default_factory=dict)
    """Losses of weights that the source has for itself, by the name to log them under."""
    log: dict[str, Tensor] = field(default_factory=dict)
    """Further numbers to log."""


@runtime_checkable
class Objective(Protocol):
    """Anything with this method trains an energy. `density_ratio = True` says that its minimum is the log-ratio of
    what the negatives are drawn from to the data, which a `Tilted` energy asks for."""

    def terms(self, energy: EnergyModel, obs: Obs, actions: Positives, generator: torch.Generator) -> Terms:
        """The loss on a batch of demonstrated pairs, normalised."""
        ...


@runtime_checkable
class LossPenalty(Protocol):
    """Anything with this method can stand in a trial's `penalties`."""

    def penalty(self, energy: EnergyModel, obs: Obs, terms: Terms) -> Float[Tensor, ""]:
        """What to add to the loss."""
        ...


def contrast(
    energy: EnergyModel, source: Any, count: int, obs: Obs, actions: Positives, generator: torch.Generator
) -> Terms:
    """Draws `count` negatives per pair and computes the energies of data and negatives; the loss is 0, to be replaced.
    For a tilted energy these are the values of the tilt."""
    drawn = source.sample(energy, obs, actions, count, generator)
    target = energy.contrasted
    if drawn.obs.ndim > obs.ndim:  # pairs (x, y), of a joint model
        positive = target(obs, actions.unsqueeze(1))[:, 0]
        negative = target.pairs()(obs, torch.cat([drawn.obs, drawn.actions], -1))
    else:
        together = target(obs, torch.cat([actions.unsqueeze(1), drawn.actions], 1))
        positive, negative = together[:, 0], together[:, 1:]
    return Terms(positive.new_zeros(()), positive, negative, drawn, own_losses(source, actions, drawn.actions))


@dataclass(frozen=True)
class InfoNCE:
    """L = mean −log(e^{−E⁺} / (e^{−E⁺} + Σ e^{−E⁻})) (eq. InfoNCE): tell the demonstrated action from negatives."""

    source: Any = ShortChains(Langevin("ibc", noise=0.1))
    """Where negatives come from."""
    count: int = 8
    """Negatives per example (the paper is silent: our reading)."""

    density_ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_contrast(self)

    def terms(self, energy: EnergyModel, obs: Obs, actions: Positives, generator: torch.Generator) -> Terms:
        found, positive, negative = _contrast(self, energy, obs, actions, generator)
        return replace(found, loss=info_nce(positive, negative))


@dataclass(frozen=True)
class RankingNCE:
    """L = mean −log(e^{−E⁺}/q⁺ / (e^{−E⁺}/q⁺ + Σ e^{−E⁻}/q⁻)): InfoNCE of energies with log q added, which takes the
    density of the negatives out again (Ma & Collins 2018)."""

    source: Any = GaussianMixture()
    """Where negatives come from; its density must be known."""
    count: int = 64
    """Number of negatives per example."""

    def __post_init__(self) -> None:
        _check_contrast(self, known=True)

    def terms(self, energy: EnergyModel, obs: Obs, actions: Positives, generator: torch.Generator) -> Terms:
        found, positive, negative = _contrast(self, energy, obs, actions, generator)
        log_q, log_q_positive = _densities(self, found)
        return replace(found, loss=ranking_nce(positive, negative, log_q_positive, log_q))


@dataclass(frozen=True)
class ImportanceNLL:
    """L = mean(E⁺ + log Ẑ), with Z by importance sampling, weights 1/q (Sec. III)."""

    source: Any = GaussianMixture()
    """Where negatives come from; its density must be known."""
    count: int = 64
    """Number of negatives per example."""

    def __post_init__(self) -> None:
        _check_contrast(self, known=True)

    def terms(self, energy: EnergyModel, obs: Obs, actions: Positives, generator: torch.Generator) -> Terms:
        found, positive, negative = _contrast(self, energy, obs, actions, generator)
        return replace(found, loss=importance_nll(positive, negative, _densities(self, found)[0]))


@dataclass(frozen=True)
class MCMC:
    """L = mean(E⁺ − mean E⁻) (eq. MCMC-loss): the likelihood's gradient, for negatives that are samples of p(y|x)."""

    source: Any = ShortChains(Langevin("ibc", noise=0.1))
    """Where negatives come from."""
    count: int = 8
    """Number of negatives per example."""
    anchor: float = 1.0
    """Weight of mean (E⁺)². The loss alone has no minimum: where chains miss the demonstrated action, its energy can
    fall for ever, and does. 0: the bare loss of the equation."""
    anchor_negatives: float = 0.0
    """Weight of mean (E⁻)²: with the same weight as `anchor`, the regulariser of Du and Mordatch (2019)."""

    def __post_init__(self) -> None:
        _check_anchored(self)

    def terms(self, energy: EnergyModel, obs: Obs, actions: Positives, generator: torch.Generator) -> Terms:
        found, positive, negative = _contrast(self, energy, obs, actions, generator)
        return replace(found, loss=mcmc_loss(positive, negative) + _anchor(self, positive, negative))


@dataclass(frozen=True)
class MaximumEntropy:
    """L = mean(E⁺ − mean E⁻ + ½ Var E⁻) (appendix, Maximum Entropy Regularization)."""

    source: Any = ShortChains(Langevin("correct"))
    """Where negatives come from."""
    count: int = 8
    """Number of negatives per example."""
    anchor: float = 1.0
    """Weight of mean (E⁺)². The loss alone has no minimum: where chains miss the demonstrated action, its energy can
    fall for ever, and does. 0: the bare loss of the equation."""
    anchor_negatives: float = 0.0
    """Weight of mean (E⁻)²: with the same weight as `anchor`, the regulariser of Du and Mordatch (2019)."""

    def __post_init__(self) -> None:
        _check_anchored(self)

    def terms(self, energy: EnergyModel, obs: Obs, actions: Positives, generator: torch.Generator) -> Terms:
        found, positive, negative = _contrast(self, energy, obs, actions, generator)
        return replace(found, loss=maximum_entropy_loss(positive, negative) + _anchor(self, positive, negative))


@dataclass(frozen=True)
class Likelihood:
    """L = mean E⁺, for explicit energies, which are −log p(y|x) in closed form and need no negatives."""

    count: int = 8
    """Other examples' actions per example: they serve to log what contrastive objectives log, and train nothing."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be at least 1, got {self.count}")

    def check_composition(self, trial: "Trial") -> None:
        if not getattr(trial.energy, "explicit", False):
            name = type(trial.energy).__name__
            raise ValueError(
                f"Likelihood does not go with {name}: it needs an energy that is −log p(y|x) in closed form "
                "(`explicit = True` in its settings)"
            )

    def terms(self, energy: EnergyModel, obs: Obs, actions: Positives, generator: torch.Generator) -> Terms:
        count = min(self.count, max(1, len(actions) - 1))
        source = InBatch() if len(actions) > 1 else Uniform()
        found = contrast(energy, source, count, obs, actions, generator)
        if found.positive is None:
            raise TypeError("contrast gives the energies of the data")
        return replace(found, loss=found.positive.mean())


@dataclass(frozen=True)
class TwoSquares:
    """L = mean ½‖f(x, 0, 0) − y‖² + ½‖f(x, t y + (1 − t) z, t) − y‖², z ~ N(0, 1): the two steps of a `TwoStep` energy,
    each by squared error, side by side. The refinement learns from the demonstrated action under noise, and not from
    what the first step gives."""

    count: int = 8
    """Other examples' actions per example: they serve to log what contrastive objectives log, and train nothing."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be at least 1, got {self.count}")

    def check_composition(self, trial: "Trial") -> None:
        if not getattr(trial.energy, "refines", False):
            raise ValueError(
                f"TwoSquares does not go with {type(trial.energy).__name__}: it needs an energy that refines its "
                "prediction (`refines = True` in its settings, `predict` and `level` in the energy)"
            )

    def terms(self, energy: Any, obs: Obs, actions: Positives, generator: torch.Generator) -> Terms:
        noise = torch.randn(actions.shape, generator=generator, dtype=actions.dtype, device=actions.device)
        level = energy.level
        first = energy.predict(obs, torch.zeros_like(actions), 0.0)
        second = energy.predict(obs, level * actions + (1 - level) * noise, level)
        squares = [0.5 * (each - actions).square().sum(1).mean() for each in (first, second)]
        with torch.no_grad():
            found = Likelihood(self.count).terms(energy, obs, actions, generator)
        own = {"first_loss": squares[0].detach(), "second_loss": squares[1].detach()}
        return replace(found, loss=squares[0] + squares[1], log=own)


# ---------------------------------------------------------------------------------------------- penalties


@dataclass(frozen=True)
class PositiveL2:
    """weight · mean (E⁺)², which anchors the energies of the data at zero."""

    weight: float = 1.0
    """Its weight in the loss."""

    def __post_init__(self) -> None:
        _check_weight(self.weight)

    def penalty(self, energy: EnergyModel, obs: Obs, terms: Terms) -> Float[Tensor, ""]:
        return self.weight * positive_l2(_given(self, terms)[0])


@dataclass(frozen=True)
class EntropyRegulariser:
    """weight · ½ Var E⁻, whose gradient estimates that of −H(y|x) (appendix A). 1 is the weight in `MaximumEntropy`."""

    weight: float = 1.0
    """Its weight in the loss."""

    def __post_init__(self) -> None:
        _check_weight(self.weight)

    def penalty(self, energy: EnergyModel, obs: Obs, terms: Terms) -> Float[Tensor, ""]:
        return self.weight * entropy_regulariser(_given(self, terms)[1])


@dataclass(frozen=True)
class GradientPenalty:
    """weight · mean max(0, ‖∇E‖_∞ − margin)² at the negatives (IBC, Sec. B.3.1). ∇ is over y; over (x, y) for a joint
    model."""

    weight: float = 1.0
    """Its weight in the loss."""
    margin: float = 1.0
    """Norm of the gradient below which it is zero."""

    def __post_init__(self) -> None:
        _check_weight(self.weight)
        if not 0 <= self.margin < inf:
            raise ValueError(f"margin must be at least 0 and finite, got {self.margin}")

    def penalty(self, energy: EnergyModel, obs: Obs, terms: Terms) -> Float[Tensor, ""]:
        drawn, target = _given(self, terms)[2], energy.contrasted
        places = drawn.actions
        if drawn.obs.ndim > obs.ndim:  # pairs (x, y), of a joint model
            target, places = target.pairs(), torch.cat([drawn.obs, drawn.actions], -1)
        gradients = target.energies_and_gradients(target.encode(obs), places)[1]
        return self.weight * gradient_penalty(gradients, self.margin)


# ---------------------------------------------------------------------------------------------- helpers


def _contrast(
    objective: Any, energy: EnergyModel, obs: Obs, actions: Positives, generator: torch.Generator
) -> tuple[Terms, Tensor, Tensor]:
    found = contrast(energy, objective.source, objective.count, obs, actions, generator)
    positive, negative, _ = _given(objective, found)
    return found, positive, negative


def _given(piece: Any, terms: Terms) -> tuple[Tensor, Tensor, Negatives]:
    """Energies of data and negatives, which the piece needs."""
    if terms.positive is None or terms.negative is None or terms.drawn is None:
        raise ValueError(
            f"{type(piece).__name__} needs an objective whose terms hold the energies of data and negatives"
        )
    return terms.positive, terms.negative, terms.drawn


def _densities(objective: Any, terms: Terms) -> tuple[Tensor, Tensor]:
    drawn = terms.drawn
    if drawn is None or drawn.log_q is None or drawn.log_q_positive is None:
        raise ValueError(f"{_pair(objective)}: the source gave no densities log_q and log_q_positive")
    return drawn.log_q, drawn.log_q_positive


def _check_contrast(objective: Any, known: bool = False) -> None:
    if objective.count < 1:
        raise ValueError(f"count must be at least 1, got {objective.count}")
    source = objective.source
    if isinstance(source, type):
        name = source.__name__
        raise ValueError(
            f"{type(objective).__name__}: source must be an object, not the class {name}: give {name}(...)"
        )
    if not (hasattr(source, "sample") or hasattr(source, "build")):
        raise ValueError(f"{_pair(objective)}: a source has a method `sample`, or `build` where it has weights")
    if known and not has_density(source):
        raise ValueError(f"{_pair(objective)}: the density of the negatives must be known (a method `log_prob`)")


def _anchor(objective: Any, positive: Tensor, negative: Tensor) -> Tensor | float:
    """What holds the energies near zero; 0 for a bare loss, which stays as it is bit for bit."""
    terms = ((objective.anchor, positive), (objective.anchor_negatives, negative))
    return sum((weight * energies.square().mean() for weight, energies in terms if weight), 0.0)


def _check_anchored(objective: Any) -> None:
    _check_contrast(objective)
    for name in ("anchor", "anchor_negatives"):
        weight = getattr(objective, name)
        if not 0 <= weight < inf:
            raise ValueError(f"{name} must be at least 0 and finite, got {weight}")


def _pair(objective: Any) -> str:
    return f"{type(objective).__name__} does not go with {type(objective.source).__name__}"


def _check_weight(weight: float) -> None:
    if not 0 <= weight < inf:
        raise ValueError(f"weight must be at least 0 and finite, got {weight}")
