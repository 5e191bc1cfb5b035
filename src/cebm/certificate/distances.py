"""The energy distance of states to exact draws, with the largest value that chance explains.

D²(P, Q) = 2 E‖X − Y‖ − E‖X − X'‖ − E‖Y − Y'‖ (Székely & Rizzo 2013) is zero for equal distributions alone, so it sees
what no moment does. D is a metric: a sampler that is off by no more than the tolerance may be as far away as the
target is from itself, shifted and widened by the tolerance, plus chance.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

Points = Float[Tensor, "n act"]


def squared_distance(first: Points, second: Float[Tensor, "m act"]) -> float:
    """D² of two sets of points, each as a distribution of its own (the V-statistic); infinite unless all are finite."""
    if not bool(first.isfinite().all() & second.isfinite().all()):
        return math.inf
    across, within, other = (torch.cdist(a, b).mean() for a, b in ((first, second), (first, first), (second, second)))
    return max(0.0, float(2 * across - within - other))


def by_chance(exact: Points, n: int, m: int, level: float) -> float:
    """A value that D² of n and m independent draws of one distribution exceeds with a probability below `level`.

    D² is (1/n + 1/m) Σᵢ λᵢ Zᵢ², with λ the eigenvalues of the centred kernel −‖x − y‖, here of the sample `exact`, and
    independent standard normal Z. The bound is Chernoff's: P(Σ λ Z² > q) ≤ e^{−tq} Πᵢ (1 − 2tλᵢ)^{−1/2} for all t.
    """
    kernel = -torch.cdist(exact, exact)
    centred = kernel - kernel.mean(0) - kernel.mean(1, keepdim=True) + kernel.mean()
    values = (torch.linalg.eigvalsh(centred) / len(exact)).clamp_min(0)
    tilts = torch.linspace(0.02, 0.98, 97, dtype=values.dtype, device=values.device).unsqueeze(1) / (2 * values.max())
    bounds = (-math.log(level) - 0.5 * torch.log1p(-2 * tilts * values).sum(1)) / tilts[:, 0]
    return (1 / n + 1 / m) * float(bounds.min())


def tolerated(exact: Points, tolerance: float) -> float:
    """D² of the distribution and itself, shifted by `tolerance` and widened by the factor 1 + `tolerance`."""
    return squared_distance(exact * (1 + tolerance) + tolerance, exact)
