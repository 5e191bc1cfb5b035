"""log Z of any energy with an error bar, and draws of it with weights: what a density in numbers needs.

p(y|x) = exp(−E(x, y))/Z(x). The draws come from the energy's proposal q, or from the box where it has none. Where the
weights e^{−E}/q of these say that they cannot be trusted, they are moved to p by annealed importance sampling (Neal
2001): along E_β = −log q + β(E + log q), β from 0 to 1, weighed at every rise of β and moved by Hamiltonian steps. Both
give independent draws with weights whose mean is Z/Z_q, so both have the same standard error and the same diagnostic,
the Pareto k̂ of the weights (Vehtari et al. 2024): below 0.7 the error bar can be believed.

The support is that of the reference: all actions where the energy has a proposal, else the box with its margin.
"""

import math
import warnings
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel, autograd_gradients, leaves, mapped
from cebm.samplers.hamiltonian import HMC, HMCState, Tuning

GOOD_SHAPE = 0.7
"""Largest Pareto k̂ with which an estimate from weights can be trusted."""
GOOD_ERROR = 0.05
"""Standard error of log Z above which the draws of the proposal are annealed, in nats."""
_SPREAD, _SPREAD_OF_ALL = 0.03, 0.3
"""Squared coefficient of variation of the weights of one rise of β: the first, or the second over the dimensions."""
_APART = 5
_MISSED = 0.01
"""Share of the annealed draws that may weigh more under a fitted mixture than all of its own draws."""
_LEAPFROGS = 3
_MOST_LEVELS = 500
_AT_ONCE = 2**16


class UntrustedDensityWarning(UserWarning):
    """An estimate of log Z whose error bar cannot be believed; the message names the observation."""


class Weighted(NamedTuple):
    """Draws with weights, per observation: under them averages are averages over p(y|x)."""

    actions: Actions
    """The draws."""
    log_weights: Energies
    """Log of their weights; the mean weight is an unbiased estimate of Z."""
    log_partition: Float[Tensor, " batch"]
    """log Z, the log of the mean weight."""
    standard_error: Float[Tensor, " batch"]
    """Standard error of log Z, from the spread of the weights."""
    shape: Float[Tensor, " batch"]
    """Pareto k̂ of the largest weights."""

    @property
    def trusted(self) -> Bool[Tensor, " batch"]:
        """Where k̂ is good."""
        return self.shape < GOOD_SHAPE


class LogProb(NamedTuple):
    """Log-densities with their errors, per observation."""

    value: Float[Tensor, " batch"]
    """log p(y|x)."""
    standard_error: Float[Tensor, " batch"]
    """Standard error of log Z(x), the only part that is estimated."""
    shape: Float[Tensor, " batch"]
    """Pareto k̂ of the weights; above 0.7 the error bar is not to be believed."""


@dataclass(frozen=True)
class Estimator:
    """How log Z = log ∫ e^{−E(x, y)} dy is estimated: log mean e^{−E(yᵢ)}/q(yᵢ) over draws of a density q."""

    draws: int = 1024
    """Draws per observation."""
    pilot: int = 128
    """Draws that find the levels of β and the steps, where the proposal is not enough."""
    anneal: bool = True
    """Whether to anneal where the proposal's draws are not enough; without a proposal it always is."""
    shared: bool = False
    """Use the same random numbers for every observation, so that a result does not depend on its neighbours. Only
    proposals can be shared."""

    def __post_init__(self) -> None:
        for name, least in (("draws", 32), ("pilot", 32)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    def __call__(self, energy: EnergyModel, context: Context, limit: float, generator: torch.Generator) -> Weighted:
        """Weighted draws of p(y|x) for each observation of `context`; `limit` is half the width of the box."""
        with torch.no_grad():
            rows = len(next(leaves(context)))
            size = max(1, _AT_ONCE // self.draws)
            blocks = [_rows(context, slice(a, a + size)) for a in range(0, rows, size)]
            parts = [self._block(energy, block, limit, generator) for block in blocks]
            return Weighted(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _block(self, energy: EnergyModel, context: Context, limit: float, generator: torch.Generator) -> Weighted:
        if not energy.proposes:
            return self._annealed(energy, context, limit, generator)
        actions = energy.propose(context, self.draws, generator, self.shared)
        found = weighted(actions, -energy.excess(context, actions))
        poor = ~found.trusted | ~(found.standard_error < GOOD_ERROR)
        if self.anneal and bool(poor.any()):
            better = self._annealed(energy, _rows(context, poor), limit, generator)
            for old, new in zip(found, better, strict=True):
                old[poor] = new
        return found

    def _annealed(self, energy: EnergyModel, context: Context, limit: float, generator: torch.Generator) -> Weighted:
        path = _Path(energy, limit)
        levels = self._levels(path, context, generator)
        actions = path.start(context, self.draws, generator)
        state, log_weights = (
            path.state(context, actions, levels[0].betas, levels[0].tuning),
            torch.zeros_like(actions[..., 0]),
        )
        for before, level in pairwise(levels):
            rise = (level.betas - before.betas).unsqueeze(1)
            log_weights = log_weights - rise * path.excess(context, state.actions)
            state = path.moved(context, state, level, generator)
        volume = 0.0 if energy.proposes else energy.act_dim * math.log(2 * limit)
        result = weighted(state.actions, log_weights + volume)
        reached = levels[-1].betas >= 1
        result = result._replace(shape=torch.where(reached, result.shape, torch.inf))
        # Resampled draws are copies of few: some trajectories at β = 1 draw them apart, for the fit below.
        level = levels[-1]
        apart = path.state(context, resampled(result, 2 * self.draws, generator), level.betas, level.tuning)
        for _ in range(_APART):
            apart = path.moved(context, apart, level, generator)
        return self._refined(energy, context, result, apart.actions, limit, generator)

    def _refined(
        self,
        energy: EnergyModel,
        context: Context,
        found: Weighted,
        draws: Actions,
        limit: float,
        generator: torch.Generator,
    ) -> Weighted:
        """Importance sampling from a mixture that is fitted to the annealed draws, where its error is the smaller one:
        near the target its weights vary less than those of a long annealing."""
        best, annealed = found, draws
        for components in (1, 2, 8, 8):
            # The last fit is to the best draws so far, of which there are more and with weights that vary less.
            mixture = Mixture.fitted(draws, generator, components)
            actions, log_q = (part.to(found.actions.dtype) for part in mixture.draw(4 * self.draws, generator))
            log_weights = -energy.energies(context, actions) - log_q
            if not energy.proposes:
                log_weights = log_weights.masked_fill((actions.abs() > limit).any(-1), -torch.inf)
            better = weighted(actions, log_weights)
            # A part of p that the fit has missed does not show in its own draws, but in those of the annealing.
            seen = -energy.energies(context, annealed) - mixture.parts(annealed.double()).logsumexp(2).to(
                annealed.dtype
            )
            missed = (seen > log_weights.amax(1, keepdim=True)).to(seen.dtype).mean(1) > _MISSED
            if best is found:  # as many draws, to be compared row by row
                best = found._replace(actions=found.actions.repeat(1, 4, 1), log_weights=found.log_weights.repeat(1, 4))
            take = ~missed & better.trusted & found.shape.isfinite() & (better.standard_error < best.standard_error)
            pairs = zip(better, best, strict=True)
            best = Weighted(*(torch.where(take.view(-1, *[1] * (new.ndim - 1)), new, old) for new, old in pairs))
            draws = torch.where(take.view(-1, 1, 1), resampled(best, draws.shape[1], generator), draws)
        # Fewer draws, of equal weights, with the estimate of all of them.
        few = resampled(best, self.draws, generator)
        return best._replace(actions=few, log_weights=best.log_partition.unsqueeze(1).expand(-1, self.draws))

    def _levels(self, path: "_Path", context: Context, generator: torch.Generator) -> list["_Level"]:
        """The levels of β and the steps at each, found by a small population that is resampled (sequential Monte
        Carlo). The large one then follows them as they are, so its weights are unbiased."""
        actions = path.start(context, self.pilot, generator)
        rows = len(actions)
        tuning = _tuning(actions)
        levels = [_Level(actions.new_zeros(rows), tuning)]
        for _ in range(_MOST_LEVELS):
            excess = path.excess(context, actions)
            betas = _raised(levels[-1].betas, excess, min(_SPREAD, _SPREAD_OF_ALL / path.energy.act_dim))
            log_weights = -(betas - levels[-1].betas).unsqueeze(1) * excess
            index = torch.multinomial(log_weights.softmax(1), self.pilot, replacement=True, generator=generator)
            actions = actions.gather(1, index.unsqueeze(-1).expand_as(actions))
            scale = actions.std(1, keepdim=True).clamp_min(1e-6)
            level = _Level(betas, levels[-1].tuning._replace(scale=scale))
            state = path.moved(context, path.state(context, actions, betas, level.tuning), level, generator, adapt=True)
            levels.append(_Level(betas, state.tuning))
            actions = state.actions
            if bool((betas >= 1).all()):
                break
        return levels


class _Level(NamedTuple):
    """One level of the annealing, per observation."""

    betas: Float[Tensor, " batch"]
    tuning: Tuning


class _Path:
    """E_β = −log q + β(E + log q), from the reference to the energy. Without a proposal, q is uniform in the box."""

    def __init__(self, energy: EnergyModel, limit: float) -> None:
        self.energy, self.limit = energy, limit
        margin = None if energy.proposes else (limit - 1) / 2
        self.sampler = HMC(steps=2, adapt=2, leapfrogs=_LEAPFROGS, target=0.8, margin=margin)

    def start(self, context: Context, n: int, generator: torch.Generator) -> Actions:
        if self.energy.proposes:
            return self.energy.propose(context, n, generator)
        like = next(leaves(context))
        unit = torch.rand(
            (len(like), n, self.energy.act_dim),
            generator=generator,
            dtype=_dtype(self.energy, like),
            device=like.device,
        )
        return (2 * unit - 1) * self.limit

    def excess(self, context: Context, actions: Actions) -> Energies:
        return self.energy.excess(context, actions)

    def state(self, context: Context, actions: Actions, betas: Tensor, tuning: Tuning) -> HMCState:
        return HMCState(actions, *_Between(self.energy, betas).energies_and_gradients(context, actions), tuning)

    def moved(
        self, context: Context, state: HMCState, level: _Level, generator: torch.Generator, adapt: bool = False
    ) -> HMCState:
        """The states after two trajectories at a level; with `adapt`, the step follows the acceptance."""
        between = _Between(self.energy, level.betas)
        state = self.state(context, state.actions, level.betas, level.tuning)
        for _ in range(self.sampler.steps):
            passed = self.sampler.trajectory(between, context, state, generator)
            state = passed.state
            if adapt:
                gain = 0.5 * (passed.probability.mean(1).view(-1, 1, 1) - self.sampler.target)
                log_step = (state.tuning.log_step + gain).clamp(-7, 1)
                state = state._replace(tuning=state.tuning._replace(log_step=log_step))
        return state


class _Between(EnergyModel):
    """E_β of rows with a β each."""

    def __init__(self, energy: EnergyModel, betas: Float[Tensor, " batch"]) -> None:
        super().__init__()
        self.obs_dim, self.act_dim = energy.obs_dim, energy.act_dim
        self.inner, self.betas = [energy], betas.unsqueeze(1)  # in a list: its weights are not ours

    def encode(self, obs: Tensor) -> Context:
        raise TypeError("a level of the annealing has no encoder of its own")

    def energies(self, context: Context, actions: Actions) -> Energies:
        return self.energies_and_gradients(context, actions)[0]

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        energy = self.inner[0]
        energies, gradients = energy.energies_and_gradients(context, actions)
        if not energy.proposes:
            return self.betas * energies, self.betas.unsqueeze(2) * gradients
        excess, slopes = autograd_gradients(lambda y: energy.excess(context, y), actions)
        rest = 1 - self.betas
        return energies - rest * excess, gradients - rest.unsqueeze(2) * slopes


class Mixture(NamedTuple):
    """A Gaussian mixture per observation."""

    log_shares: Float[Tensor, "batch k"]
    means: Float[Tensor, "batch k act"]
    roots: Float[Tensor, "batch k act act"]
    """Cholesky factors of the covariances."""

    @classmethod
    def fitted(cls, actions: Actions, generator: torch.Generator, components: int = 6, rounds: int = 12) -> "Mixture":
        """By expectation maximisation, from centres that lie far apart. A covariance is drawn towards its diagonal by
        the weight of twice as many draws as there are dimensions, and is a tenth wider than fitted, for the tails."""
        dims = actions.shape[2]
        points = actions.double()
        means = points[:, :1]
        for _ in range(components - 1):
            nearest = torch.cdist(points, means).amin(2).square() + 1e-300
            index = torch.multinomial(nearest, 1, generator=generator)
            means = torch.cat([means, points.gather(1, index.unsqueeze(-1).expand(-1, -1, dims))], 1)
        shares = torch.cdist(points, means).argmin(2)
        responsibilities = torch.nn.functional.one_hot(shares, components).double()
        mixture = cls._maximised(points, responsibilities)
        for _ in range(rounds):
            mixture = cls._maximised(points, mixture.parts(points).softmax(-1))
        return mixture._replace(roots=mixture.roots * 1.05)

    @classmethod
    def _maximised(cls, points: Tensor, shares: Tensor) -> "Mixture":
        n, dims = points.shape[1:]
        counts = shares.sum(1) + 1e-6
        means = torch.einsum("bnk,bnd->bkd", shares, points) / counts.unsqueeze(-1)
        away = points.unsqueeze(2) - means.unsqueeze(1)
        covariance = torch.einsum("bnk,bnkd,bnke->bkde", shares, away, away) / counts.view(*counts.shape, 1, 1)
        diagonal = torch.diag_embed(covariance.diagonal(dim1=2, dim2=3))
        whole = torch.diag_embed(points.var(1)).unsqueeze(1)
        keep = (counts / (counts + 2 * dims)).view(*counts.shape, 1, 1)
        # A component of hardly any draws keeps a share of the deviation of all.
        covariance = keep * covariance + (1 - keep) * (0.9 * diagonal + 0.1 * whole)
        floor = 1e-6 * whole + 1e-18 * torch.eye(dims, dtype=points.dtype, device=points.device)
        return cls((counts / n).log().log_softmax(-1), means, torch.linalg.cholesky(covariance + floor))

    def parts(self, points: Tensor) -> Float[Tensor, "batch n k"]:
        """log w_k N(y; μ_k, Σ_k)."""
        away = (points.unsqueeze(1) - self.means.unsqueeze(2)).transpose(2, 3)
        z = torch.linalg.solve_triangular(self.roots, away, upper=False)
        heights = self.log_shares - self.roots.diagonal(dim1=2, dim2=3).log().sum(-1)
        constant = 0.5 * points.shape[2] * math.log(2 * math.pi)
        return (heights.unsqueeze(2) - 0.5 * z.square().sum(2) - constant).transpose(1, 2)

    def draw(self, n: int, generator: torch.Generator) -> tuple[Actions, Energies]:
        """Draws and log q of them, in double precision."""
        index = torch.multinomial(self.log_shares.exp(), n, replacement=True, generator=generator)
        z = torch.randn(
            *index.shape, self.means.shape[2], generator=generator, dtype=torch.float64, device=index.device
        )
        points = torch.empty_like(z)
        for k in range(self.means.shape[1]):
            placed = self.means[:, k : k + 1] + z @ self.roots[:, k].transpose(1, 2)
            points = torch.where((index == k).unsqueeze(-1), placed, points)
        return points, self.parts(points).logsumexp(2)


def _tuning(actions: Actions) -> Tuning:
    """The first step of a pilot: a tenth of the reference's deviation."""
    scale = actions.std(1, keepdim=True).clamp_min(1e-6)
    return Tuning.initial(actions, 0.5, _LEAPFROGS)._replace(scale=scale)


def _raised(betas: Float[Tensor, " batch"], excess: Energies, spread: float) -> Float[Tensor, " batch"]:
    """The largest β ≤ 1 whose weights still vary by no more than `spread`, by bisection on a logarithmic scale."""
    room = 1 - betas

    def too_far(rise: Tensor) -> Tensor:
        logs = -(rise.unsqueeze(1) * excess)
        logs = logs - logs.amax(1, keepdim=True)
        weights = logs.exp()
        return ~(weights.square().mean(1) <= (1 + spread) * weights.mean(1).square())

    low, high = (room * 1e-12).clamp_min(1e-15).log(), room.clamp_min(1e-15).log()
    whole = ~too_far(room)
    for _ in range(40):
        middle = (low + high) / 2
        far = too_far(middle.exp())
        low, high = torch.where(far, low, middle), torch.where(far, middle, high)
    return torch.where(whole, torch.ones_like(betas), betas + low.exp())


def weighted(actions: Actions, log_weights: Energies) -> Weighted:
    """Draws and the log of their weights, with log Z, its error and k̂."""
    log_weights = log_weights.nan_to_num(-torch.inf, posinf=torch.inf)
    n = log_weights.shape[1]
    total = log_weights.logsumexp(1)
    share = (log_weights - total.unsqueeze(1)).exp()
    # The spread of the weights over their mean, over √n: the error of the log of their mean.
    error = ((n * share.square().sum(1) - 1).clamp_min(0) / (n - 1)).sqrt()
    return Weighted(actions, log_weights, total - math.log(n), error, pareto_shape(log_weights))


def pareto_shape(log_weights: Energies) -> Float[Tensor, " batch"]:
    """k̂ of a generalised Pareto distribution fitted to the min(n/5, 3√n) largest weights (Zhang & Stephens 2009, with
    the weak prior of Vehtari et al. 2024): weights have a finite variance below 1/2. −∞ where they are all equal."""
    n = log_weights.shape[1]
    tail = int(min(n / 5, 3 * math.sqrt(n)))
    largest = log_weights.double().topk(tail + 1, dim=1).values
    top = largest[:, :1]
    scaled = (largest - top).exp()
    excess = (scaled[:, :-1] - scaled[:, -1:]).flip(1)  # ascending
    spread = excess[:, -1] > 1e-9 * scaled[:, 0]
    excess = torch.where(spread.unsqueeze(1), excess, torch.linspace(0.1, 1, tail, dtype=excess.dtype).to(excess))
    grid = 30 + int(math.sqrt(tail))
    quarter = excess[:, int(tail / 4 + 0.5) - 1].clamp_min(1e-300)
    order = torch.arange(1, grid + 1, dtype=excess.dtype, device=excess.device)
    theta = (1 - (grid / (order - 0.5)).sqrt()) / (3 * quarter.unsqueeze(1)) + 1 / excess[:, -1:]
    k = torch.log1p(-theta.unsqueeze(2) * excess.unsqueeze(1)).mean(2)
    likelihood = tail * ((-theta / k).log() - k - 1)
    weights = likelihood.nan_to_num(-torch.inf).softmax(1)
    best = (weights * theta).sum(1, keepdim=True)
    shape = torch.log1p(-best * excess).mean(1)
    shape = (shape * tail + 0.5 * 10) / (tail + 10)
    shape = torch.where(spread, shape, -torch.inf)
    bad = ~top[:, 0].isfinite() | shape.isnan()
    return torch.where(bad, torch.inf, shape).to(log_weights.dtype)


def warn_untrusted(found: Weighted, stacklevel: int = 3) -> None:
    """Warns of the first observation whose log Z is not to be trusted, and says how many there are."""
    bad = ~found.trusted
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        message = (
            f"log Z of observation {row} is not to be trusted: Pareto k̂ is {float(found.shape[row]):.2f}, above "
            f"{GOOD_SHAPE} (standard error {float(found.standard_error[row]):.2f}); {int(bad.sum())} of {len(bad)} "
            "observations are like this: take more draws"
        )
        warnings.warn(message, UntrustedDensityWarning, stacklevel=stacklevel)


def resampled(found: Weighted, n: int, generator: torch.Generator) -> Actions:
    """`n` draws of p(y|x) per observation, by systematic resampling: the share of each is its weight to within 1/n."""
    shares = found.log_weights.softmax(1).double()
    offset = torch.rand((len(shares), 1), generator=generator, dtype=torch.float64, device=shares.device)
    places = (torch.arange(n, dtype=torch.float64, device=shares.device) + offset) / n
    index = torch.searchsorted(shares.cumsum(1).contiguous(), places).clamp_max(shares.shape[1] - 1)
    mixed = torch.rand(index.shape, generator=generator, device=index.device).argsort(1)  # in no order
    index = index.gather(1, mixed)
    return found.actions.gather(1, index.unsqueeze(-1).expand(-1, -1, found.actions.shape[2]))


def _rows(context: Context, rows: slice | Tensor) -> Context:
    """The context of some of the observations."""
    return mapped(lambda part: part[rows], context)


def _dtype(energy: EnergyModel, like: Tensor) -> torch.dtype:
    return next((p.dtype for p in energy.parameters() if p.is_floating_point()), like.dtype)


# ---------------------------------------------------------------------------------------------- modes


@dataclass(frozen=True)
class Mode:
    """A mode of p(y|x): a lowest energy, and the draws that run down to it."""

    action: Float[Tensor, " act"]
    """Where the energy is lowest."""
    mass: float
    """Share of the probability in its basin."""
    error: float
    """Standard error of the mass."""
    energy: float
    """The energy there."""


def descended(
    energy: EnergyModel, context: Context, actions: Actions, low: Tensor, high: Tensor, steps: int = 150
) -> tuple[Actions, Energies]:
    """Runs every action down to a minimum of the energy within the limits, by gradient descent with the step sizes of
    Barzilai & Borwein (1988). A step that does not go down is taken back and shortened: the best state is kept."""
    here = actions.clamp(low, high)
    energies, gradients = energy.energies_and_gradients(context, here)
    energies = energies.nan_to_num(torch.inf)
    size = 0.02 / gradients.norm(dim=-1, keepdim=True).clamp_min(1e-6)
    for _ in range(steps):
        move = -size * gradients
        length = move.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        move = move * (0.1 / length).clamp(max=1)  # not across to another basin
        there = (here + move).clamp(low, high)
        above, slopes = energy.energies_and_gradients(context, there)
        better = (above <= energies).unsqueeze(-1)
        moved, turned = there - here, slopes - gradients
        curved = (moved * turned).sum(-1, keepdim=True)
        fitted = moved.square().sum(-1, keepdim=True) / curved.clamp_min(1e-30)
        grown = torch.where(curved > 0, fitted.clamp(max=100 * size.amax()), 2 * size)
        size = torch.where(better, grown, 0.25 * size)
        here = torch.where(better, there, here)
        gradients = torch.where(better, slopes, gradients)
        energies = torch.where(better[..., 0], above, energies)
    return here, energies


def modes_of(
    energy: EnergyModel, context: Context, found: Weighted, low: Tensor, high: Tensor, barrier: float = 0.1
) -> list[list[Mode]]:
    """The modes of each observation, the heaviest first, from weighted draws: each draw runs down the energy, and ends
    with no rise of `barrier` nats between them are one mode. The error is that of the weights' average."""
    with torch.no_grad():
        ends, energies = descended(energy, context, found.actions, low, high)
        result = []
        for row in range(len(ends)):
            alone = _rows(context, slice(row, row + 1))
            result.append(
                _row_modes(energy, alone, ends[row], energies[row], found.log_weights[row].softmax(0), barrier)
            )
        return result


def _row_modes(
    energy: EnergyModel, context: Context, ends: Tensor, energies: Tensor, shares: Tensor, barrier: float
) -> list[Mode]:
    """Takes the lowest end that is left, and with it all ends that can be reached without a rise."""
    left = energies.isfinite()
    modes: list[Mode] = []
    fractions = torch.linspace(0, 1, 12, dtype=ends.dtype, device=ends.device)[1:-1].view(-1, 1, 1)
    while bool(left.any()) and len(modes) < 100:
        lowest = int(energies.masked_fill(~left, torch.inf).argmin())
        between = ends[lowest] + fractions * (ends - ends[lowest])
        along = energy.energies(context, between.flatten(0, 1).unsqueeze(0))[0].view(len(fractions), -1)
        own = left & (along.amax(0) - energies < barrier)
        own[lowest] = True
        mass = float(shares[own].sum())
        error = float((shares.square() * (own.to(shares.dtype) - mass).square()).sum().sqrt())
        modes.append(Mode(ends[lowest], mass, error, float(energies[lowest])))
        left = left & ~own
    return sorted(modes, key=lambda mode: -mode.mass)
