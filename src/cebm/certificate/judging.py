"""Runs a sampler on analytic targets and judges its states: the errors, their sampling errors, and a verdict.

A single chain has 63 replicas beside it: the errors that are reported are its own, but their sampling errors and the
verdict come from all 64.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cebm.certificate.dependent import analytic_targets
from cebm.certificate.distances import by_chance, squared_distance, tolerated
from cebm.certificate.targets import Target
from cebm.samplers import Collect, Sampler, StepInfo, run
from cebm.spaces import margin_limit

RunName = Literal["chains", "single"]
Verdict = Literal["samples the target", "inconclusive", "biased", "does not sample"]
SamplerFactory = Callable[[Target, int], Sampler]

CHAINS = 1000
SINGLE_STEPS, SINGLE_KEPT = 4000, 1000
SINGLE_REPLICAS = 64

# The rule of the verdict, see `Certificate.verdict`.
_Z = 4.5
_GROSS = 0.5
_ATOMS = 0.01
_LEVEL = 3.4e-6
"""Probability of a normal variable above `_Z`."""
_EXACT, _SPECTRUM = 2000, 500
"""Exact draws that the states are compared with, and those of them that give the distribution of the distance."""


@dataclass(frozen=True)
class Certificate:
    """The errors of one sampler on one target. Relative errors are the largest over dimensions, and infinite for a run
    that diverged."""

    sampler: str
    target: str
    run: RunName
    mean_error: float
    """|mean − exact| / exact standard deviation."""
    std_error: float
    """|standard deviation / exact − 1|."""
    temperature: float | None
    """E[(y − μ)·∇E]/d, which is 1 for exp(-E), and T for exp(-E/T) on a Gaussian. None for a bounded target, whose
    border adds to it."""
    acceptance: float | None
    """Share of proposals accepted in the second half of the steps. None for a sampler that accepts them all."""
    verdict: Verdict
    """An error of all chains together is real when it exceeds tolerance + t·(its standard error). `tolerance` (0.1)
    is what an unadjusted sampler may be off by for its step size (aτ/4 of a standard deviation at curvature a; 1 % to
    8 % with the step sizes of the targets) and for its start. t is Student's quantile at the level of 4.5 standard
    deviations. The temperature is a square and has twice the tolerance. More than 1 % of the states on the border of
    a bounded target are a real error; so is a single chain that on average covers less than half of a standard
    deviation.

    With a real error the verdict is 'biased', or 'does not sample' if an error exceeds 0.5. Without one it is
    'samples the target', or 'inconclusive' if t·(standard error) exceeds 0.5: a gross error would have passed too."""
    mean_sampling_error: float
    """Standard error of `mean_error`. For a single chain it is the spread over the replicas, so that it accounts for
    the autocorrelation."""
    std_sampling_error: float
    """Standard error of `std_error`."""
    temperature_sampling_error: float | None
    """Standard error of `temperature`."""
    clipped: float
    """Fraction of coordinates that a clip changed (MALA: of proposals outside the box), over all steps."""
    border: float | None
    """Fraction of states on or beyond the border of a bounded target, where it has no mass; None if unbounded."""
    chains: int
    """Independent chains that ran; in a `single` run, the chain and its replicas."""
    steps: int
    """Number of steps of each chain."""
    correlation_error: float
    """|artanh r − artanh ρ|, the largest over pairs of dimensions: an error of the correlation in units of its own
    spread (Fisher), which is the same for all ρ."""
    correlation_sampling_error: float
    """Standard error of `correlation_error`."""
    distance: float | None = None
    """Energy distance D of the chains' states to exact draws, both whitened: it sees what moments do not. None for a
    single chain, whose states are not independent."""
    distance_allowed: float | None = None
    """What D may be: that of the target to itself when it is shifted and widened by `tolerance`, plus the largest by
    chance (see `cebm.certificate.distances`)."""

    @property
    def passed(self) -> bool:
        return self.verdict == "samples the target"

    @property
    def failed(self) -> bool:
        """Whether a real error was found; neither passed nor failed is inconclusive."""
        return self.verdict in ("biased", "does not sample")

    def to_json(self) -> str:
        """One line of JSON, with null for NaN and infinity."""
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}
        return json.dumps(row)


def certify(
    sampler: Sampler | SamplerFactory,
    targets: Sequence[Target] | None = None,
    runs: Sequence[RunName] = ("chains", "single"),
    generator: torch.Generator | None = None,
    name: str | None = None,
    tolerance: float = 0.1,
    repetitions: int = 1,
    chains: int | None = None,
) -> list[Certificate]:
    """Runs `sampler` on analytic targets and says how far its samples are from them; see `Certificate.verdict`.

    `sampler` is any object with `steps`, `init` and `step`, used as it is: only `steps` is raised to what a run has
    (50 to 500 for many chains, 4000 for one). With small step sizes, give it more `steps` yourself. Or it is a
    function (target, steps) -> sampler, for parameters that follow the target, as `named_sampler` has them.
    Without `generator` the seed is fresh; with one, the result repeats. `repetitions` run side by side, and each gives
    a row; they share the acceptance and the clipping that the rows report.

    With `chains` in place of the 1000, smaller errors are seen: at the level of 4.5 standard deviations, an error of a
    correlation of 4.5/√chains, and of a deviation of 3.2/√chains. Only a sampler with an accept step passes a close
    look, `tolerance=0` and many chains, on a target where its chains have forgotten their start by `chain_steps`.
    """
    make = _factory(sampler)
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
    if repetitions < 1:
        raise ValueError(f"repetitions must be at least 1, got {repetitions}")
    if chains is not None and chains < 2:
        raise ValueError(f"chains must be at least 2, got {chains}")
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    label = name or str(getattr(sampler, "__name__", type(sampler).__name__))
    rows = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # states are small: a second thread costs more than it saves
    try:
        for target in analytic_targets() if targets is None else targets:
            for kind in runs:
                together, info = run_on(make, target.to(generator.device), kind, generator, repetitions, chains)
                for states in together.chunk(repetitions):
                    exact = target.draw(_EXACT, generator) if kind == "chains" else None
                    rows.append(_certificate(label, target, kind, states, info, tolerance, exact))
    finally:
        torch.set_num_threads(threads)
    return rows


def _factory(sampler: Sampler | SamplerFactory) -> SamplerFactory:
    if isinstance(sampler, type):
        raise ValueError(f"sampler must be an object, not the class {sampler.__name__}: give {sampler.__name__}(...)")
    if isinstance(sampler, Sampler):
        return lambda target, steps: _with_steps(sampler, max(steps, sampler.steps))
    if callable(sampler):
        return sampler
    raise ValueError(f"sampler must have steps, init and step, or be a function: {type(sampler).__name__} is neither")


def _with_steps(sampler: Sampler, steps: int) -> Sampler:
    if is_dataclass(sampler) and any(field.name == "steps" and field.init for field in fields(sampler)):
        return replace(cast(Any, sampler), steps=steps)
    # Any other object is wrapped: `run` needs no more than these three.
    return cast(Sampler, SimpleNamespace(steps=steps, init=sampler.init, step=sampler.step))


def run_on(
    make: SamplerFactory,
    target: Target,
    kind: RunName,
    generator: torch.Generator,
    repetitions: int = 1,
    chains: int | None = None,
) -> tuple[Float[Tensor, "chains time act"], StepInfo]:
    """Runs the sampler on the target; gives the states that are judged, chain by chain, one repetition after the
    other."""
    if kind == "chains":
        # One observation with many candidates: what a sampler of populations expects.
        start = target.starts(repetitions, chains or CHAINS, generator)
        chain = run(make(target, target.chain_steps), target, target.encode(start[:, 0]), start, generator)
        return chain.actions.flatten(0, 1).unsqueeze(1), chain.info
    if kind == "single":
        replicas = repetitions * SINGLE_REPLICAS
        sampler, start = make(target, SINGLE_STEPS), target.starts(replicas, 1, generator)
        collect = Collect(sampler.steps - SINGLE_KEPT)
        chain = run(sampler, target, target.encode(start[:, 0]), start, generator, collect)
        return chain.actions, chain.info
    raise ValueError(f"runs must hold 'chains' or 'single', got {kind!r}")


# ---------------------------------------------------------------------------------------------- statistics


class _Estimate(NamedTuple):
    """A quantity per dimension, as it is reported and as it is judged."""

    value: Float[np.ndarray, " act"]
    """The reported value: over all chains, or of the first one in a `single` run."""
    error: Float[np.ndarray, " act"]
    """Standard error of `value`."""
    pooled: Float[np.ndarray, " act"]
    """The value over all chains."""
    reach: Float[np.ndarray, " act"]
    """Largest error of `pooled` by chance, at the level of `_Z` standard deviations."""


def _estimate(kind: RunName, each: Float[np.ndarray, "chains act"]) -> _Estimate:
    """From the averages along each chain. Correlation within a chain shows in the spread between chains, so no
    autocorrelation needs to be estimated. `reach` is Student's quantile times the standard error, because few
    chains also know their own spread badly; expanded to second order in 1/chains (Abramowitz & Stegun 26.7.5)."""
    chains, pooled, spread = len(each), each.mean(0), each.std(0, ddof=1)
    error, nu = spread / math.sqrt(chains), chains - 1
    quantile = _Z + (_Z**3 + _Z) / (4 * nu) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * nu**2)
    value, error_of_value = (pooled, error) if kind == "chains" else (each[0], spread)
    return _Estimate(value, error_of_value, pooled, quantile * error)


def _mean_and_std(kind: RunName, units: Float[np.ndarray, "chains time act"]) -> tuple[_Estimate, _Estimate]:
    """Mean and standard deviation of states in units of the exact moments: (0, 1) for a correct sampler."""
    mean = _estimate(kind, units.mean(1))
    square = _estimate("chains", ((units - mean.pooled) ** 2).mean(1))
    pooled = np.sqrt(square.pooled)
    # Chains of equal states have no spread to divide by, and no error of it.
    slope = np.divide(0.5, pooled, out=np.zeros_like(pooled), where=pooled > 0)
    if kind == "chains":
        return mean, _Estimate(pooled, slope * square.error, pooled, slope * square.reach)
    return mean, _estimate(kind, units.std(1, ddof=1))._replace(pooled=pooled, reach=slope * square.reach)


def _correlation(kind: RunName, units: Float[np.ndarray, "chains time act"]) -> _Estimate:
    """artanh of the correlation of each pair of dimensions. The error is that of the linearised estimate: of
    z₁z₂ − r(z₁² + z₂²)/2 over 1 − r², with z the states in units of their own mean and deviation."""
    z = (units - units.mean((0, 1))) / units.std((0, 1))
    first, second = np.triu_indices(units.shape[2], 1)
    products = z[:, :, first] * z[:, :, second]
    r = products.mean((0, 1)).clip(-1 + 1e-12, 1 - 1e-12)
    influence = (products - r / 2 * (z[:, :, first] ** 2 + z[:, :, second] ** 2)).mean(1) / (1 - r**2)
    estimate = _estimate(kind, influence)
    value = np.arctanh(r)
    # The influence has a mean of zero: it is the deviation from the value over all chains.
    return _Estimate(value + (estimate.value - estimate.pooled), estimate.error, value, estimate.reach)


def _root(target: Target) -> Float[np.ndarray, "act act"]:
    """The Cholesky factor of the target's correlations."""
    matrix = np.full((target.act_dim, target.act_dim), target.correlation)
    np.fill_diagonal(matrix, 1.0)
    return np.linalg.cholesky(matrix)


def _distance(
    target: Target, states: Float[Tensor, "chains time act"], exact: Float[Tensor, "n act"], tolerance: float
) -> tuple[float, float]:
    """The energy distance of the last states to exact draws, and what it may be."""
    root = torch.from_numpy(_root(target)).to(exact.device)

    def whitened(points: Tensor) -> Tensor:
        units = (points.double() - points.new_tensor(target.mean)) / points.new_tensor(target.std)
        return torch.linalg.solve_triangular(root, units.double().T, upper=False).T

    last, reference = whitened(states[:_EXACT, -1]), whitened(exact)  # of more, the distances fill the memory
    chance = by_chance(reference[:_SPECTRUM], len(last), len(reference), _LEVEL)
    allowed = math.sqrt(chance) + math.sqrt(tolerated(reference[:_SPECTRUM], tolerance))
    return math.sqrt(squared_distance(last, reference)), allowed


def _temperature(kind: RunName, target: Target, states: Float[Tensor, "chains time act"]) -> _Estimate:
    """E[(y − μ)·∇E]/d. Integration by parts gives ∫ (y − μ)·∇E e^{-E} dy = d ∫ e^{-E} dy for any smooth E whose
    density vanishes at infinity (the virial theorem)."""
    _, gradients = target.energies_and_gradients(target.encode(states[:, 0]), states)
    product = (states - states.new_tensor(target.mean)) * gradients
    return _estimate(kind, product.mean((1, 2), dtype=torch.float64).unsqueeze(1).cpu().numpy())


def _certificate(
    sampler: str,
    target: Target,
    kind: RunName,
    states: Float[Tensor, "chains time act"],
    info: StepInfo,
    tolerance: float,
    exact: Float[Tensor, "n act"] | None = None,
) -> Certificate:
    units = (states.double().cpu().numpy() - np.array(target.mean)) / np.array(target.std)
    border = temperature = None
    with np.errstate(all="ignore"):  # a diverged chain overflows; NaN counts as an error below
        mean, std = _mean_and_std(kind, units)
        correlation = _correlation(kind, units)
        known = math.atanh(target.correlation)
        # Uncorrelated coordinates: the deviation across a narrow ridge, which hardly shows in that of the axes.
        across = _mean_and_std(kind, units @ np.linalg.inv(_root(target)).T)[1]
        checks = [
            (np.abs(mean.pooled), mean.reach, tolerance),
            (np.abs(std.pooled - 1), std.reach, tolerance),
            (np.abs(correlation.pooled - known), correlation.reach, tolerance),
            (np.abs(across.pooled - 1), across.reach, tolerance),
        ]
        if kind == "single":
            checks.append((1 - units.std(1).mean(0), np.zeros(1), _GROSS))
        if target.margin is None:
            temperature = _temperature(kind, target, states)
            checks.append((np.abs(temperature.pooled - 1), temperature.reach, 2 * tolerance))
        else:
            border = float((states.abs() >= margin_limit(target.margin)).any(-1).double().mean())
    distance = allowed = None
    if exact is not None:
        distance, allowed = _distance(target, states, exact, tolerance)
        # On the scale of the other errors, where the tolerance is exceeded by as much as the distance is.
        excess = max(0.0, distance - allowed) if math.isfinite(distance) else math.inf
        checks.append((np.array([excess]), np.zeros(1), 0.0))
    mean_error, mean_sampling = _worst(mean, 0.0)
    std_error, std_sampling = _worst(std, 1.0)
    correlation_error, correlation_sampling = _worst(correlation, known)
    steps = info.acceptance.shape[0]
    return Certificate(
        sampler,
        target.name,
        kind,
        mean_error=mean_error,
        std_error=std_error,
        temperature=None if temperature is None else float(temperature.value[0]),
        acceptance=None if bool((info.acceptance == 1).all()) else float(info.acceptance[steps // 2 :].mean()),
        verdict=_verdict(checks, border),
        mean_sampling_error=mean_sampling,
        std_sampling_error=std_sampling,
        temperature_sampling_error=None if temperature is None else float(temperature.error[0]),
        clipped=float(info.clipped.mean()),
        border=border,
        chains=states.shape[0],
        steps=steps,
        correlation_error=correlation_error,
        correlation_sampling_error=correlation_sampling,
        distance=distance,
        distance_allowed=allowed,
    )


def _worst(estimate: _Estimate, exact: float) -> tuple[float, float]:
    """The largest error of the reported values over dimensions, infinite where it is NaN, and its standard error."""
    if not len(estimate.value):
        return 0.0, 0.0
    errors = np.nan_to_num(np.abs(estimate.value - exact), nan=np.inf, posinf=np.inf)
    worst = int(errors.argmax())
    return float(errors[worst]), float(estimate.error[worst])


def _verdict(checks: list[tuple[np.ndarray, np.ndarray, float]], border: float | None) -> Verdict:
    """`checks` holds errors, their largest size by chance, and the tolerance; see `Certificate.verdict`."""
    real = any(not (error <= allowed + reach).all() for error, reach, allowed in checks)
    if real or (border is not None and border > _ATOMS):
        gross = any(not (error <= _GROSS).all() for error, _, _ in checks)
        return "does not sample" if gross else "biased"
    blind = any((reach > _GROSS).any() for _, reach, _ in checks[:2])
    return "inconclusive" if blind else "samples the target"
