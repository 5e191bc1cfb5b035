"""Information in an energy: exact references by quadrature, entropies, bounds of the mutual information.

I(x; y) = H(y) - H(y|x), in nats (Sec. V). For one- and two-dimensional actions `Quadrature` computes log Z,
the NLL and the entropies up to rounding, and autograd differentiates them: these are the references that
`losses` is tested against. For more dimensions there are importance sampling and the InfoNCE bound; each
docstring says where they fail.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cebm.energies.base import EnergyModel
from cebm.losses import info_nce_per_example

_PANEL = 8  # nodes of one Gauss-Legendre panel
_ROWS_AT_ONCE = 2**16  # energies evaluated together; a 256-wide layer then holds 64 MB of float32


class SaturatedBoundWarning(UserWarning):
    """The bound is at its ceiling log(M+1), so it says nothing about the data: take more negatives."""


class CoarseQuadratureWarning(UserWarning):
    """A density is narrower than the spacing of the nodes: take more points or a smaller box."""


@dataclass(frozen=True)
class Quadrature:
    """∫ f(y) dy over the box [low, high] by Gauss-Legendre panels of 8 nodes; in 2-D, by their product.

    The density is restricted to the box: p(y|x) = e^{-E} / ∫_box e^{-E}. For smooth energies the error falls
    with the 16th power of the panel's width; at a kink of a ReLU network with its square. Every result is
    differentiable with respect to the energy's parameters. Set the energy to `eval()` if it has dropout.

    Memory is batch × nodes numbers; the network's activations are held for 65536 rows at a time, and are
    recomputed in the backward pass.
    """

    low: tuple[float, ...]
    """Lower end of the box in each dimension."""
    high: tuple[float, ...]
    """Upper end of the box in each dimension."""
    points_per_dim: int = 256
    """A multiple of 8. In two dimensions there are points_per_dim² nodes."""

    def __post_init__(self) -> None:
        if len(self.low) not in (1, 2):
            raise ValueError(f"low: quadrature is for 1 or 2 dimensions, got {len(self.low)}")
        if len(self.high) != len(self.low):
            raise ValueError(f"high: {len(self.high)} dimensions, but low has {len(self.low)}")
        for dim, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            if not -math.inf < low < high < math.inf:
                raise ValueError(f"low: expected finite low < high, got {low} and {high} in dimension {dim}")
        if self.points_per_dim < _PANEL or self.points_per_dim % _PANEL:
            raise ValueError(f"points_per_dim: expected a multiple of {_PANEL}, got {self.points_per_dim}")

    def nodes(self, like: Tensor) -> tuple[Float[Tensor, "nodes act"], Float[Tensor, "nodes"]]:
        """Actions y_k and log w_k, with ∫ f(y) dy ≈ Σ_k w_k f(y_k); dtype and device are those of `like`."""
        unit_nodes, unit_weights = np.polynomial.legendre.leggauss(_PANEL)
        panels = self.points_per_dim // _PANEL
        axes, weights = [], []
        for low, high in zip(self.low, self.high, strict=True):
            width = (high - low) / panels
            starts = low + width * np.arange(panels)
            axes.append((starts[:, None] + width * (unit_nodes + 1) / 2).ravel())
            weights.append(np.tile(unit_weights * width / 2, panels))
        actions = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)
        products = np.prod(np.meshgrid(*weights, indexing="ij"), axis=0).ravel()
        return torch.from_numpy(actions).to(like), torch.from_numpy(np.log(products)).to(like)

    def energies(self, energy: EnergyModel, obs: Float[Tensor, "batch *obs"]) -> Float[Tensor, "batch nodes"]:
        """E(x, y_k) at every node."""
        if energy.act_dim != len(self.low):
            raise ValueError(f"energy: act_dim is {energy.act_dim}, the quadrature has {len(self.low)}")
        if len(obs) == 0:
            raise ValueError("obs: the batch is empty")
        actions, log_weights = self.nodes(obs)
        context = energy.encode(obs)
        chunks = actions.split(max(1, _ROWS_AT_ONCE // len(obs)))
        parts = []
        for chunk in chunks:
            rows = chunk.expand(len(obs), -1, -1)
            if torch.is_grad_enabled() and len(chunks) > 1:
                parts.append(checkpoint(energy.energies, context, rows, use_reentrant=False))
            else:
                parts.append(energy.energies(context, rows))
        energies = torch.cat(parts, dim=1)
        self._check_resolution(energies.detach(), log_weights)
        return energies

    def _check_resolution(self, energies: Tensor, log_weights: Tensor) -> None:
        # The smallest energy is NaN if any is. An energy of +inf is allowed: it forbids an action.
        bad = ~torch.isfinite(energies.amin(dim=1))
        if bad.any():
            row = int(bad.nonzero()[0])
            raise ValueError(f"energy: NaN, -inf or nothing but +inf in the box, for observation {row}")
        for dim, narrow in enumerate(self.coarse(_log_density(energies, log_weights)).any(0).tolist()):
            if narrow:
                message = f"one of {self.points_per_dim} nodes in dimension {dim} holds half of a density"
                warnings.warn(message, CoarseQuadratureWarning, stacklevel=4)

    def coarse(self, log_density: Float[Tensor, "batch nodes"]) -> Bool[Tensor, "batch act"]:
        """Where a density is narrower than the nodes' spacing: one of a dimension's nodes holds half of its mass."""
        log_weights = self.nodes(log_density)[1]
        mass = torch.exp(log_density + log_weights).unflatten(1, (self.points_per_dim,) * len(self.low))
        # A Gaussian as narrow as this has its log Z wrong by about 0.01, and soon by much more.
        marginals = (mass.sum(dim=2), mass.sum(dim=1)) if len(self.low) == 2 else (mass,)
        return torch.stack([marginal.amax(1) > 0.5 for marginal in marginals], 1)

    def log_density(self, energy: EnergyModel, obs: Float[Tensor, "batch *obs"]) -> Float[Tensor, "batch nodes"]:
        """log p(y_k|x) = -E(x, y_k) - log Z(x) at every node."""
        return _log_density(self.energies(energy, obs), self.nodes(obs)[1])

    def log_partition(self, energy: EnergyModel, obs: Float[Tensor, "batch *obs"]) -> Float[Tensor, "batch"]:
        """log Z(x) = log ∫ e^{-E(x, y)} dy."""
        return torch.logsumexp(self.nodes(obs)[1] - self.energies(energy, obs), dim=1)

    def nll(
        self, energy: EnergyModel, obs: Float[Tensor, "batch *obs"], actions: Float[Tensor, "batch act"]
    ) -> Float[Tensor, "batch"]:
        """-log p(y_i|x_i) = E(x_i, y_i) + log Z(x_i) (eq. NLL-loss, before the sum over i)."""
        if actions.shape != (len(obs), len(self.low)):
            raise ValueError(f"actions: expected shape {(len(obs), len(self.low))}, got {tuple(actions.shape)}")
        inside = (actions >= actions.new_tensor(self.low)) & (actions <= actions.new_tensor(self.high))
        if not inside.all():
            row, dim = (~inside).nonzero()[0].tolist()
            raise ValueError(
                f"actions: example {row} has {actions[row, dim].item()} in dimension {dim},"
                f" outside of the box [{self.low[dim]}, {self.high[dim]}]"
            )
        return energy(obs, actions[:, None])[:, 0] + self.log_partition(energy, obs)

    def entropy(self, energy: EnergyModel, obs: Float[Tensor, "batch *obs"]) -> Float[Tensor, "batch"]:
        """H(p(·|x)) = -∫ p log p = log Z(x) + E_p[E(x, y)]. Of a marginal energy, H(y) with any `obs[:1]`."""
        return _entropy(self.log_density(energy, obs), self.nodes(obs)[1])

    def expectation(
        self,
        energy: EnergyModel,
        obs: Float[Tensor, "batch *obs"],
        function: Callable[[Float[Tensor, "nodes act"]], Float[Tensor, "nodes values"]],
    ) -> Float[Tensor, "batch values"]:
        """E_{p(y|x)}[f(y)]; `function` maps all actions at once, e.g. `lambda y: y` for the mean."""
        actions, log_weights = self.nodes(obs)
        return torch.exp(self.log_density(energy, obs) + log_weights) @ function(actions)


def conditional_entropy(
    energy: EnergyModel, obs: Float[Tensor, "batch *obs"], quadrature: Quadrature
) -> Float[Tensor, ""]:
    """H(y|x) = mean_i H(p(·|x_i)), the observations taken as samples of p(x)."""
    return quadrature.entropy(energy, obs).mean()


def marginal_entropy(
    energy: EnergyModel, obs: Float[Tensor, "batch *obs"], quadrature: Quadrature
) -> Float[Tensor, ""]:
    """H(y) of the model's own marginal, the mixture p(y) = 1/N Σ_i p(y|x_i) over the observations.

    The entropy of a separate marginal energy E(y) is `quadrature.entropy(marginal, obs[:1])`.
    """
    return _mixture_entropy(quadrature.log_density(energy, obs), quadrature.nodes(obs)[1])


def model_mutual_information(
    energy: EnergyModel, obs: Float[Tensor, "batch *obs"], quadrature: Quadrature
) -> Float[Tensor, ""]:
    """I(x; y) = H(y) - H(y|x) of the model p(y|x) ∝ e^{-E}, the N observations as p(x) (Sec. V).

    This is the model's own information: no estimate and **no bound** of the data's. A model that is too sure of
    itself has more than the data. An energy that was trained with negatives of the marginal (`InBatch`,
    `MarginalActions`) is not -log p(y|x) but log p(y) - log p(y|x), so its e^{-E} is another density than the
    data's and reads too high (0.56 nats for 0.41 in one case): put the marginal back (`Tilted(base_sees="nothing")`) or
    take `info_nce_bound`, which is a lower bound of the data's information.

    N observations cannot carry more than log N nats: read a value close to it as "at least".
    """
    log_density, log_weights = quadrature.log_density(energy, obs), quadrature.nodes(obs)[1]
    return _mixture_entropy(log_density, log_weights) - _entropy(log_density, log_weights).mean()


def model_information(
    energy: EnergyModel, obs: Float[Tensor, "batch *obs"], quadrature: Quadrature
) -> tuple[float, float, float]:
    """H(y|x), I(x; y) and the share of observations whose density is too narrow for the quadrature, from one pass."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", CoarseQuadratureWarning)  # the returned share tells it
        log_density, log_weights = quadrature.log_density(energy, obs), quadrature.nodes(obs)[1]
        conditional = _entropy(log_density, log_weights).mean()
        information = _mixture_entropy(log_density, log_weights) - conditional
        coarse = quadrature.coarse(log_density).any(1).float().mean()
    return float(conditional), float(information), float(coarse)


def entropy_importance(
    energies: Float[Tensor, "batch samples"], log_q: Float[Tensor, "batch samples"]
) -> Float[Tensor, "batch"]:
    """H(p(·|x)) = log Ẑ + Σ_m w_m E_m with w_m ∝ e^{-E_m}/q_m, Σ w = 1, from samples of q. Any dimension.

    Consistent for any q that covers p, biased by O(1/M). Negatives and their `log_q` can be fed as they are.
    A marginal energy is a batch of one; the mean over the batch is H(y|x).
    """
    _check_samples(energies, log_q, energies.shape)
    log_weights = -log_q - math.log(energies.shape[1])
    return _entropy(_log_density(energies, log_weights), log_weights)


def marginal_entropy_importance(
    energies: Float[Tensor, "batch samples"], log_q: Float[Tensor, "samples"]
) -> Float[Tensor, ""]:
    """H(y) of the mixture 1/N Σ_i p(y|x_i), from M samples of q: energies[i, m] = E(x_i, y_m), shared by all i.

    Minus the mean of `entropy_importance` on the same samples, it is I(x; y), within [0, log N]. Consistent
    for any q that covers every p(·|x_i), biased by O(1/M).
    """
    _check_samples(energies, log_q, energies.shape[1:])
    log_weights = -log_q - math.log(energies.shape[1])
    return _mixture_entropy(_log_density(energies, log_weights), log_weights)


@dataclass(frozen=True)
class MutualInformationBound:
    """A lower bound of I(x; y), in nats, from one batch."""

    nats: float
    """The bound, log(M+1) - InfoNCE."""
    standard_error: float
    """Standard error of `nats` over the batch; NaN for a batch of one."""
    ceiling: float
    """log(M+1): the bound cannot exceed it, whatever the data."""
    saturated: bool
    """Whether the ceiling, and not the data, sets the value (see `info_nce_bound`)."""


def info_nce_bound(
    positive: Float[Tensor, "batch"], negative: Float[Tensor, "batch samples"]
) -> MutualInformationBound:
    """I(x; y) ≥ log(M+1) - InfoNCE (van den Oord et al. 2018; Poole et al. 2019), over the batch.

    A bound only if the negatives are independent samples of the **marginal** p(y) (Sec. V): with negatives of
    a chain or a box the number is a loss in other units. It holds in expectation, so one batch may exceed I
    within its error. Tight for -E = log p(y|x) - log p(y) + c(x) and many negatives.

    Saturated when the loss is below log 2, i.e. the bound within log 2 of its ceiling: a typical positive then
    outweighs all M negatives together. For the best critic that means p(y|x)/p(y) > M, so I is beyond the
    log M that M negatives can resolve, and the value says more about M than about the data. (With one or two
    negatives log 2 is most of the ceiling, so there the limit is half of it.) Warns SaturatedBoundWarning.
    """
    with torch.no_grad():
        losses = info_nce_per_example(positive, negative)
    ceiling = math.log(negative.shape[1] + 1)
    loss = losses.mean().item()
    if math.isnan(loss):
        raise ValueError("positive, negative: the energies give a NaN loss")
    saturated = loss < min(math.log(2), ceiling / 2)
    if saturated:
        message = (
            f"the bound, {ceiling - loss:.2f} nats, is at its ceiling log(M+1) = {ceiling:.2f}:"
            f" {negative.shape[1]} negatives cannot tell more"
        )
        warnings.warn(message, SaturatedBoundWarning, stacklevel=2)
    deviation = losses.std().item() if len(losses) > 1 else math.nan
    return MutualInformationBound(ceiling - loss, deviation / math.sqrt(len(losses)), ceiling, saturated)


# One set of formulas serves quadrature (log weights of the rule) and importance sampling (-log q - log M).


def _log_density(energies: Tensor, log_weights: Tensor) -> Float[Tensor, "batch nodes"]:
    log_density = -energies - torch.logsumexp(log_weights - energies, dim=1, keepdim=True)
    # A forbidden action has log p = -inf; a large finite number makes p log p zero, with a zero gradient.
    return log_density.clamp(min=torch.finfo(log_density.dtype).min / 4)


def _entropy(log_density: Tensor, log_weights: Tensor) -> Float[Tensor, "batch"]:
    return -(torch.exp(log_density + log_weights) * log_density).sum(dim=1)


def _mixture_entropy(log_density: Tensor, log_weights: Tensor) -> Float[Tensor, ""]:
    mixture = torch.logsumexp(log_density, dim=0) - math.log(len(log_density))
    return -(torch.exp(mixture + log_weights) * mixture).sum()


def _check_samples(energies: Tensor, log_q: Tensor, shape: torch.Size) -> None:
    if energies.ndim != 2 or energies.numel() == 0:
        raise ValueError(f"energies: expected non-empty (batch, samples), got shape {tuple(energies.shape)}")
    if log_q.shape != shape:
        raise ValueError(f"log_q: expected shape {tuple(shape)}, got {tuple(log_q.shape)}")
    if not torch.isfinite(energies.amin(dim=1)).all():
        raise ValueError("energies: NaN, -inf or nothing but +inf for an observation")
    if not torch.isfinite(log_q).all():
        raise ValueError("log_q: contains NaN or infinity")


def energy_score(
    draws: Float[Tensor, "batch draws act"], actions: Float[Tensor, "batch act"]
) -> Float[Tensor, " batch"]:
    """E‖Y − y‖ − ½ E‖Y − Y′‖ of draws Y, Y′ of a policy and the action y that was demonstrated (Gneiting and Raftery
    2007), low is good. A proper score: its mean over y ~ p is lowest for the policy that draws from p. The second mean
    is over pairs of different draws, so the estimate is unbiased for any number of draws from two on."""
    count = draws.shape[1]
    if count < 2:
        raise ValueError(f"draws must be two or more per observation, got {count}")
    away = (draws - actions.unsqueeze(1)).norm(dim=-1).mean(1)
    apart = (draws.unsqueeze(1) - draws.unsqueeze(2)).norm(dim=-1).sum((1, 2)) / (count * (count - 1))
    return away - apart / 2
