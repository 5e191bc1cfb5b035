"""Did these chains mix, and how many independent draws are they worth? Diagnostics of any run of any sampler.

R̂ and the effective sample sizes are those of Vehtari et al. 2021 ("Rank-normalization, folding, and localization"),
which Stan and ArviZ report: the numbers are the same as ArviZ' to rounding (`tests/test_diagnostics.py`).
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from cebm.samplers import Chain, StepInfo

Draws = Float[Tensor, "chains time"]

MIXED = 1.01
"""Largest R̂ of chains that have mixed (Vehtari et al. 2021)."""
ENOUGH = 100
"""Smallest effective sample size per chain for R̂ and the errors to be believed (Vehtari et al. 2021)."""


@dataclass(frozen=True)
class Diagnosis:
    """What the draws of several chains are worth, per dimension."""

    rhat: Float[Tensor, " act"]
    """Rank-normalised split R̂, the larger of the plain and the folded one: 1 for chains that cannot be told apart."""
    ess_bulk: Float[Tensor, " act"]
    """Effective sample size in the bulk: how far means can be trusted."""
    ess_tail: Float[Tensor, " act"]
    """Effective sample size of the 5 % and the 95 % quantile, the smaller one."""
    chains: int
    """Number of chains."""
    draws: int
    """Number of draws of each chain."""
    acceptance: float | None = None
    """Share of proposals that were taken after the first half of the steps; None without the run's info."""
    divergences: float | None = None
    """Share of chains and steps that diverged after the first half of the steps; None without the run's info."""
    ess_per_gradient: float | None = None
    """Smallest effective sample size in the bulk, per gradient of the kept steps; None without the run's info."""

    @property
    def complaints(self) -> tuple[str, ...]:
        """What speaks against these draws, in sentences; empty if nothing does."""
        found = []
        if not bool((self.rhat <= MIXED).all()):
            found.append(f"the chains have not mixed: R̂ is {float(self.rhat.max()):.3f}, above {MIXED}")
        for name, sizes in (("bulk", self.ess_bulk), ("tails", self.ess_tail)):
            if not bool((sizes >= ENOUGH * self.chains).all()):
                least = float(sizes.min())
                found.append(
                    f"{least:.0f} effective draws in the {name}, below {ENOUGH} for each of {self.chains} chains"
                )
        if self.divergences:
            found.append(f"{self.divergences:.2%} of the trajectories diverged: the step is too large somewhere")
        return tuple(found)


def diagnose(
    draws: Float[Tensor, "chains time act"] | Chain, info: StepInfo | None = None, chains: int = 1
) -> Diagnosis:
    """Diagnoses draws [chains, time, act] of one target, or a `Chain` of one observation that was run with `Collect`
    from `chains` starting points (its info is then used)."""
    if isinstance(draws, Chain):
        if draws.actions.shape[0] != 1 or draws.actions.shape[1] % chains:
            shape = tuple(draws.actions.shape)
            raise ValueError(f"chains: {shape} are not the draws of one observation by {chains} chains")
        info = draws.info
        values = draws.actions[0].detach().double().unflatten(0, (chains, -1))
    else:
        values = draws.detach().double()
    if values.shape[1] < 4:
        raise ValueError(f"draws: each chain must have at least 4, got {values.shape[1]}")
    columns = [values[..., dim] for dim in range(values.shape[2])]
    bulk = torch.stack([ess_bulk(column) for column in columns])
    acceptance = divergences = per_gradient = None
    if info is not None:
        half = len(info.acceptance) // 2
        acceptance = float(info.acceptance[half:].double().mean())
        divergences = float(info.divergent[half:].double().mean())
        cost = float(info.evaluations[-values.shape[1] :].double().mean()) * values.shape[0] * values.shape[1]
        per_gradient = float(bulk.min()) / cost
    return Diagnosis(
        torch.stack([rhat(column) for column in columns]),
        bulk,
        torch.stack([ess_tail(column) for column in columns]),
        values.shape[0],
        values.shape[1],
        acceptance,
        divergences,
        per_gradient,
    )


def rhat(draws: Draws) -> Float[Tensor, ""]:
    """Rank-normalised split R̂: the larger of that of the draws and that of their distances to the median. NaN where a
    draw is not finite."""
    split = _split(draws.double())
    if not bool(split.isfinite().all()):
        return split.new_tensor(math.nan)
    folded = (split - _median(split)).abs()
    return torch.maximum(_rhat(_rank_normalised(split)), _rhat(_rank_normalised(folded)))


def ess_bulk(draws: Draws) -> Float[Tensor, ""]:
    """Effective sample size of the rank-normalised split chains."""
    return _ess(_rank_normalised(_split(draws.double())))


def ess_tail(draws: Draws) -> Float[Tensor, ""]:
    """Effective sample size of the indicators of the 5 % and the 95 % quantile; the smaller one."""
    values = draws.double()
    if not bool(values.isfinite().all()):
        return values.new_tensor(math.nan)
    return torch.minimum(*(_ess(_split((values <= _quantile(values, q)).double())) for q in (0.05, 0.95)))


def _quantile(values: Tensor, q: float) -> Float[Tensor, ""]:
    """By linear interpolation. (torch.quantile refuses more than 2²⁴ numbers.)"""
    ordered = values.flatten().sort().values
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _median(values: Tensor) -> Float[Tensor, ""]:
    ordered = values.flatten().sort().values
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _split(draws: Tensor) -> Tensor:
    """Each chain as two; of an odd number of draws the middle one is left out."""
    half = draws.shape[1] // 2
    return torch.cat([draws[:, :half], draws[:, -half:]])


def _rank_normalised(draws: Tensor) -> Tensor:
    """Φ⁻¹((rank − 3/8)/(S + 1/4)), with the mean rank of equal draws."""
    _, inverse, counts = draws.flatten().unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0) - 0.5 * (counts - 1).double()
    return torch.special.ndtri((ranks[inverse] - 0.375) / (draws.numel() + 0.25)).view(draws.shape)


def _rhat(draws: Tensor) -> Float[Tensor, ""]:
    time = draws.shape[1]
    between = time * draws.mean(1).var(correction=1)
    within = draws.var(1, correction=1).mean()
    return ((between / within + time - 1) / time).sqrt()


def _autocovariance(draws: Tensor) -> Tensor:
    """Of each chain at all lags, by the fast Fourier transform."""
    time = draws.shape[1]
    size = 2 ** math.ceil(math.log2(2 * time))
    spectrum = torch.fft.rfft(draws - draws.mean(1, keepdim=True), size)
    return torch.fft.irfft(spectrum.abs().square(), size)[:, :time] / time


def _ess(draws: Tensor) -> Float[Tensor, ""]:
    """Geyer's initial monotone sequence over several chains."""
    chains, time = draws.shape
    if not bool(draws.isfinite().all()):
        return draws.new_tensor(math.nan)
    if float(draws.max() - draws.min()) < 1e-15:
        return draws.new_tensor(float(draws.numel()))
    covariances = _autocovariance(draws).mean(0)
    within = covariances[0] * time / (time - 1)
    total = covariances[0] + (draws.mean(1).var(correction=1) if chains > 1 else 0.0)
    correlations = (1 - (within - covariances) / total).tolist()
    rho, kept = _initial_positive(correlations)
    tau = max(_monotone_sum(rho, kept), 1 / math.log10(draws.numel()))
    return draws.new_tensor(draws.numel() / tau)


def _initial_positive(correlations: list[float]) -> tuple[list[float], int]:
    """Geyer's initial positive sequence: the correlations up to the first pair of neighbours with a negative sum, and
    zeros; and the last lag that counts in full. The even correlation after it counts once if it is positive."""
    rho = [1.0, correlations[1]] + [0.0] * (len(correlations) - 2)
    lag, even, odd = 1, 1.0, correlations[1]
    while lag < len(rho) - 3 and even + odd > 0:
        even, odd = correlations[lag + 1 : lag + 3]
        if even + odd >= 0:
            rho[lag + 1 : lag + 3] = even, odd
        lag += 2
    if even > 0:
        rho[lag - 1] = even
    return rho, lag - 2


def _monotone_sum(rho: list[float], kept: int) -> float:
    """−1 + 2 Σ ρ up to lag `kept`, the sums of pairs made monotone, plus the last even term."""
    for lag in range(1, kept - 1, 2):
        before = rho[lag - 1] + rho[lag]
        if rho[lag + 1] + rho[lag + 2] > before:
            rho[lag + 1] = rho[lag + 2] = before / 2
    return -1 + 2 * math.fsum(rho[: kept + 1]) + math.fsum(rho[kept + 1 : kept + 2])
