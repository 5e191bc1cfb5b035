"""Losses: plain functions of energies, so that any energy and any source of negatives can feed them.

`positive[i]` is E(x_i, y_i), the energy of a demonstrated action; `negative[i, m]` is E(x_i, ỹ_i^m), the
energy of a negative one; `log_q[i, m]` is log q(ỹ_i^m), the log density that the negative was drawn from.
Energies are low where actions are likely, p(y|x) = exp(-E(x, y)) / Z(x).

The paper sums its losses over the batch; here each is a **mean**, so that a learning rate does not depend on
the batch size. `info_nce_per_example` and the two `log_partition` functions keep the batch.

Wrong shapes and empty batches raise a ValueError that names the argument. So does a NaN on the CPU, where
looking is cheap, and in a training step, which looks at all its checks at once. Elsewhere on an accelerator a
look would stall the queue, so there a NaN travels into the loss.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from cebm.spaces import pending_checks


def _check(name: str, values: Tensor, axes: tuple[str, ...], finite: bool = False) -> None:
    if values.ndim != len(axes):
        raise ValueError(f"{name}: expected the axes ({', '.join(axes)}), got shape {tuple(values.shape)}")
    for axis, size in zip(axes, values.shape, strict=True):
        if size == 0:
            raise ValueError(f"{name}: the axis '{axis}' is empty, got shape {tuple(values.shape)}")
    if torch.compiler.is_compiling():
        return
    later = pending_checks()
    if later is None and values.device.type != "cpu":
        return
    # An infinite energy is allowed, as a penalty may forbid an action; an infinite log density is not.
    bad = (~torch.isfinite(values) if finite else torch.isnan(values)).any()

    def refuse() -> None:
        raise ValueError(f"{name}: contains {'NaN or infinity' if finite else 'NaN'}")

    if later is not None:
        later.add(bad, refuse)
        return
    try:
        found = bool(bad)
    except RuntimeError:  # under torch.func.vmap a tensor has no truth value
        return
    if found:
        refuse()


def _check_shape(name: str, values: Tensor, other_name: str, shape: torch.Size) -> None:
    if values.shape != shape:
        raise ValueError(f"{name}: shape {tuple(values.shape)} does not match {other_name}'s {tuple(shape)}")


def _check_energies(positive: Tensor, negative: Tensor) -> None:
    _check("positive", positive, ("batch",))
    _check("negative", negative, ("batch", "samples"))
    if len(negative) != len(positive):
        raise ValueError(f"negative: a batch of {len(negative)}, but positive has {len(positive)}")


def _check_weighted(negative: Tensor, log_q: Tensor) -> None:
    _check("negative", negative, ("batch", "samples"))
    _check("log_q", log_q, ("batch", "samples"), finite=True)
    _check_shape("log_q", log_q, "negative", negative.shape)


def info_nce_per_example(
    positive: Float[Tensor, "batch"], negative: Float[Tensor, "batch samples"]
) -> Float[Tensor, "batch"]:
    """-log( e^{-E⁺} / (e^{-E⁺} + Σ_m e^{-E⁻_m}) ), the summands of eq. InfoNCE.

    Computed as log(1 + Σ_m e^{E⁺ - E⁻_m}): differences first, so a large common offset costs no digits.
    """
    _check_energies(positive, negative)
    advantage = positive[:, None] - negative
    return torch.logsumexp(torch.cat([torch.zeros_like(advantage[:, :1]), advantage], dim=1), dim=1)


def info_nce(positive: Float[Tensor, "batch"], negative: Float[Tensor, "batch samples"]) -> Float[Tensor, ""]:
    """L = mean_i -log( e^{-E⁺} / (e^{-E⁺} + Σ_m e^{-E⁻_m}) ) (eq. InfoNCE; mean over the batch, not sum).

    Its minimum over all functions is -E(x, y) = log p(y|x) - log q(y) + c(x) for negatives from q. So e^{-E}
    is the conditional density only for uniform q; for q = p(y), the marginal, it is the density ratio, and
    log(M+1) - L is a lower bound of the mutual information (`information.info_nce_bound`). For other q,
    `ranking_nce` takes log q out again.
    """
    return info_nce_per_example(positive, negative).mean()


def ranking_nce(
    positive: Float[Tensor, "batch"],
    negative: Float[Tensor, "batch samples"],
    log_q_positive: Float[Tensor, "batch"],
    log_q: Float[Tensor, "batch samples"],
) -> Float[Tensor, ""]:
    """L = mean_i -log( (e^{-E⁺}/q⁺) / (e^{-E⁺}/q⁺ + Σ_m e^{-E⁻_m}/q_m) ).

    InfoNCE with log q added to the energies (Ma and Collins 2018; Gustafsson et al. 2020): its minimum is
    -E(x, y) = log p(y|x) + c(x) for any q that covers the data and does not depend on the positive. (Gustafsson et
    al. draw around the positive; log q then tells which one it is, and the minimum is too narrow, by O(1/M).)
    Equal to `info_nce` for uniform q. Not in the paper. Mean over the batch.
    """
    _check_energies(positive, negative)
    _check("log_q_positive", log_q_positive, ("batch",), finite=True)
    _check_shape("log_q_positive", log_q_positive, "positive", positive.shape)
    _check_weighted(negative, log_q)
    return info_nce_per_example(positive + log_q_positive, negative + log_q).mean()


def log_partition_unweighted(
    positive: Float[Tensor, "batch"], negative: Float[Tensor, "batch samples"]
) -> Float[Tensor, "batch"]:
    """log( e^{-E⁺} + Σ_m e^{-E⁻_m} ), what eq. int-approx puts in the place of log Z. Per example.

    For comparison only: without the factor 1/(M q) the value is off by log(M q) even for
    uniform negatives, where only its gradient tends to that of log Z. There the positive's own term moves
    the gradient by p(y⁺)·volume/M, and the ratio of sums by another O(1/M). For any other q the gradient
    tends to that of log ∫ q e^{-E} instead.
    """
    _check_energies(positive, negative)
    return torch.logsumexp(torch.cat([-positive[:, None], -negative], dim=1), dim=1)


def log_partition_importance(
    negative: Float[Tensor, "batch samples"], log_q: Float[Tensor, "batch samples"]
) -> Float[Tensor, "batch"]:
    """log Ẑ = log( 1/M Σ_m e^{-E⁻_m} / q_m ), negatives drawn from q (Sec. III). Per example.

    Ẑ and ∇Ẑ are unbiased for any q that covers p; log Ẑ is low by Var_q(p/q)/(2M), and its gradient, a
    ratio of sums, is off by O(1/M).
    """
    _check_weighted(negative, log_q)
    return torch.logsumexp(-negative - log_q, dim=1) - math.log(negative.shape[1])


def importance_nll(
    positive: Float[Tensor, "batch"],
    negative: Float[Tensor, "batch samples"],
    log_q: Float[Tensor, "batch samples"],
) -> Float[Tensor, ""]:
    """L = mean_i ( E⁺ + log Ẑ ), eq. NLL-loss with Z by importance sampling, weights 1/q (Sec. III).

    Mean over the batch. Biased by O(1/M) through log Ẑ (`log_partition_importance`).
    """
    _check_energies(positive, negative)
    return (positive + log_partition_importance(negative, log_q)).mean()


def mcmc_loss(positive: Float[Tensor, "batch"], negative: Float[Tensor, "batch samples"]) -> Float[Tensor, ""]:
    """L = mean_i ( E⁺ - 1/M Σ_{m=1}^M E⁻_m ) (eq. MCMC-loss; mean over the batch, not sum).

    Its gradient is an unbiased estimate of the gradient of the NLL when the negatives are samples of
    p_θ(y|x), held constant; its value means nothing. The paper's sum starts at m = 0, a typo: it would
    divide M + 1 terms by M.
    """
    _check_energies(positive, negative)
    return (positive - negative.mean(dim=1)).mean()


def entropy_regulariser(negative: Float[Tensor, "batch samples"], unbiased: bool = False) -> Float[Tensor, ""]:
    """mean_i ½ Var_m E⁻_m, whose gradient estimates that of -H(p_θ(·|x_i)) (appendix, Maximum Entropy Regularization).

    This holds when the negatives are samples of p_θ(y|x), held constant. The ½ is in the appendix's formula, not in the
    prose below it. The formula has the population variance, whose expectation is low by (M-1)/M; `unbiased` divides
    by M - 1 instead, which makes the gradient unbiased too.
    """
    _check("negative", negative, ("batch", "samples"))
    if unbiased and negative.shape[1] < 2:
        raise ValueError("negative: the unbiased variance needs at least 2 samples, got 1")
    return negative.var(dim=1, correction=int(unbiased)).mean() / 2


def maximum_entropy_loss(
    positive: Float[Tensor, "batch"], negative: Float[Tensor, "batch samples"], unbiased: bool = False
) -> Float[Tensor, ""]:
    """L = mean_i ( E⁺ - mean_m E⁻_m + ½ Var_m E⁻_m ) (appendix, Maximum Entropy Regularization).

    The sum of `mcmc_loss` and `entropy_regulariser`. When the negatives are samples of p_θ(y|x), held constant, its
    gradient estimates that of -log p_θ(y_i|x_i) - H(p_θ(·|x_i)).
    """
    return mcmc_loss(positive, negative) + entropy_regulariser(negative, unbiased)


def positive_l2(positive: Float[Tensor, "batch"]) -> Float[Tensor, ""]:
    """mean_i (E⁺)², which anchors the energies of the data at zero (trial "Correct, MAS+MaxEnt").

    The other losses do not see a constant added to the energy. The paper gives neither the weight of this
    term nor whether it squares; the square is our reading of "L2 norm".
    """
    _check("positive", positive, ("batch",))
    return positive.square().mean()


def gradient_penalty(
    gradients: Float[Tensor, "batch samples act"], margin: float = 1.0, norm: float | int = math.inf
) -> Float[Tensor, ""]:
    """mean max(0, ‖∇_y E‖ - margin)², over batch and samples (IBC, Sec. B.3.1).

    IBC takes the ∞-norm over the action's dimensions at the last state of each chain; 1 and 2 are the other
    norms of its code. The paper meant to use it and, through a bug, did not. The gradients come from
    `energies_and_gradients` with autograd on, so that the penalty reaches the parameters.
    """
    _check("gradients", gradients, ("batch", "samples", "act"))
    if norm not in (1, 2, math.inf):
        raise ValueError(f"norm: expected 1, 2 or inf, got {norm}")
    if not 0 <= margin < math.inf:
        raise ValueError(f"margin: expected a finite number of at least 0, got {margin}")
    excess = torch.linalg.vector_norm(gradients, ord=norm, dim=-1) - margin
    return excess.clamp(min=0).square().mean()
