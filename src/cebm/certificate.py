"""Does this sampler sample what it claims? Analytic targets, and the errors of a sampler on them.

A target is an energy without observation whose mean and standard deviation are known exactly. A sampler runs on it
twice: as `chains` (1000 independent chains, last states) and as `single` (one chain of 4000 steps, last 1000 states,
the appendix's experiment), and a `Certificate` compares what came out with the truth. The single chain has 63 replicas
beside it: its errors are its own, their sampling error and the verdict come from all 64.
"""

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cebm.energies.base import Actions, Context, Energies, EnergyModel, Obs
from cebm.samplers import MALA, Collect, DerivativeFree, Langevin, Sampler, StepInfo, run
from cebm.spaces import NORMALISED_RANGE, margin_limit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

RunName = Literal["chains", "single"]
Verdict = Literal["samples the target", "inconclusive", "biased", "does not sample"]
Points = Float[Tensor, "*points act"]
SamplerFactory = Callable[["Target", int], Sampler]

CHAINS = 1000
SINGLE_STEPS, SINGLE_KEPT = 4000, 1000
SINGLE_REPLICAS = 64

# The rule of the verdict, see `Certificate.verdict`.
_Z = 4.5
_GROSS = 0.5
_ATOMS = 0.01


# ---------------------------------------------------------------------------------------------- targets


class Target(EnergyModel):
    """Abstract: E(y) = Σ_d E_d(y_d), no observation (`encode` gives [batch, 0]), with its exact mean and standard
    deviation per dimension, and how to run a sampler on it."""

    def __init__(
        self,
        name: str,
        mean: Sequence[float],
        std: Sequence[float],
        start: tuple[float, float],
        step_sizes: tuple[float, float],
        chain_steps: int,
        margin: float | None = None,
    ) -> None:
        super().__init__()
        self.obs_dim, self.act_dim, self.context_dim = 0, len(mean), 0
        self.name, self.mean, self.std = name, tuple(mean), tuple(std)
        self.start = start
        """Chains start uniformly between these, in every dimension."""
        self.step_sizes = step_sizes
        """λ of the first and the last step for the named samplers."""
        self.chain_steps = chain_steps
        """Steps of each of the 1000 chains: enough for their start to be forgotten at these step sizes."""
        self.margin = margin
        """Of a target bounded by the box [-1, 1] with this margin; None for an unbounded one."""

    @abstractmethod
    def terms(self, actions: Points) -> tuple[Points, Points]:
        """E_d(y_d) and its derivative, dimension by dimension."""

    def encode(self, obs: Obs) -> Context:
        return obs.new_empty(obs.shape[0], 0)

    def energies(self, context: Context, actions: Actions) -> Energies:
        return self.energies_and_gradients(context, actions)[0]

    def energies_and_gradients(self, context: Context, actions: Actions) -> tuple[Energies, Actions]:
        self.check(context, actions)
        energies, gradients = self.terms(actions)
        return energies.sum(-1), gradients

    def starts(self, batch: int, samples: int, generator: torch.Generator) -> Actions:
        """Where chains begin."""
        low, high = self.start
        unit = torch.rand(batch, samples, self.act_dim, generator=generator, device=generator.device)
        return low + (high - low) * unit


class Gaussian(Target):
    """The appendix's target: E_d = (y − μ)²/2s², chains from [0, 1]², λ from 5e-3 to 1e-3, no clipping."""

    location: Tensor
    scale: Tensor

    def __init__(self, mean: Sequence[float] = (0.3, 0.4), std: Sequence[float] = (0.1, 0.2)) -> None:
        super().__init__("gaussian", mean, std, start=(0.0, 1.0), step_sizes=(5e-3, 1e-3), chain_steps=50)
        self.register_buffer("location", torch.tensor(self.mean))
        self.register_buffer("scale", torch.tensor(self.std))

    def terms(self, actions: Points) -> tuple[Points, Points]:
        z = (actions - self.location) / self.scale
        return z.square() / 2, z / self.scale


class Skewed(Target):
    """E_d = 5 log(1 + e^z) − a z with z = y/s, smooth: slope −a/s to the far left and (5 − a)/s to the right.

    z is the logit of a Beta(a, b) variable with b = 5 − a, so E[z] = ψ(a) − ψ(b) and Var[z] = ψ'(a) + ψ'(b). The
    skewness is 0.86 in the first dimension (a = 4) and −0.86 in the second (a = 1).
    """

    left: Tensor
    scale: Tensor

    def __init__(self) -> None:
        a, s = torch.tensor([[4.0, 1.0], [0.1, 0.15]], dtype=torch.float64)
        mean = s * (torch.digamma(a) - torch.digamma(5 - a))
        std = s * (torch.polygamma(1, a) + torch.polygamma(1, 5 - a)).sqrt()
        super().__init__("skewed", mean.tolist(), std.tolist(), (-1.0, 1.0), step_sizes=(5e-3, 1e-3), chain_steps=250)
        self.register_buffer("left", a.float())
        self.register_buffer("scale", s.float())

    def terms(self, actions: Points) -> tuple[Points, Points]:
        z = actions / self.scale
        energies = 5 * torch.logaddexp(z, torch.zeros_like(z)) - self.left * z
        return energies, (5 * torch.sigmoid(z) - self.left) / self.scale


class DoubleWell(Target):
    """E_d = (z² − 1)² + t z with z = y/w: wells near ±w behind a barrier of about 1, one deeper than the other by
    about 2|t|, so that a sampler that does not cross between them shows a wrong mean. Moments by quadrature.

    Chains start within reach of the wells: in the quartic tails, where MALA's proposals overshoot, it gets stuck.
    """

    tilt: Tensor
    width: Tensor

    def __init__(self) -> None:
        t, w = np.array([[0.25], [-0.25]]), np.array([[0.5], [0.4]])
        # The trapezoidal rule converges exponentially for a smooth function that vanishes at both ends.
        z = np.linspace(-4.0, 4.0, 4001)
        density = np.exp(-((z**2 - 1) ** 2) - t * z)
        density /= density.sum(1, keepdims=True)
        mean = w * (density * z).sum(1, keepdims=True)
        std = np.sqrt((density * (w * z - mean) ** 2).sum(1))
        super().__init__(
            "double-well", mean[:, 0].tolist(), std.tolist(), (-0.6, 0.6), step_sizes=(12e-3, 3e-3), chain_steps=500
        )
        self.register_buffer("tilt", torch.tensor(t[:, 0], dtype=torch.float32))
        self.register_buffer("width", torch.tensor(w[:, 0], dtype=torch.float32))

    def terms(self, actions: Points) -> tuple[Points, Points]:
        z = actions / self.width
        well = z.square() - 1
        return well.square() + self.tilt * z, (4 * z * well + self.tilt) / self.width


class BoxedExponential(Target):
    """E_d = β y inside the margin box [-1.1, 1.1] and infinite outside; the density is highest on the border.

    Clipping to the box leaves atoms of probability on the border, where the density has none; MALA refuses to
    leave the box and has none. The steps are coarse, as those of a policy are: atoms vanish as √τ.
    """

    slope: Tensor

    def __init__(self) -> None:
        margin, limit, beta = 0.05, margin_limit(0.05), np.array([3.0, -1.5])
        coth = 1 / np.tanh(beta * limit)
        mean = 1 / beta - limit * coth
        std = np.sqrt(1 / beta**2 + limit**2 * (1 - coth**2))
        super().__init__("box", mean.tolist(), std.tolist(), (-limit, limit), (5e-2, 1e-2), 250, margin)
        self.limit = limit
        self.register_buffer("slope", torch.tensor(beta, dtype=torch.float32))

    def terms(self, actions: Points) -> tuple[Points, Points]:
        energies = (self.slope * actions).masked_fill(actions.abs() > self.limit, math.inf)
        return energies, self.slope.expand_as(actions)


def analytic_targets() -> tuple[Target, ...]:
    """The four targets of the certificate."""
    return Gaussian(), Skewed(), DoubleWell(), BoxedExponential()


# ---------------------------------------------------------------------------------------------- named samplers


@dataclass(frozen=True)
class LateFall:
    """init − (init − final)·(k/(n−1))²: the schedule of the appendix's experiment. It falls late, where
    `Polynomial` falls early."""

    init: float
    """The first step size."""
    final: float
    """The last step size."""

    def __call__(self, k: int, n: int) -> float:
        return self.init - (self.init - self.final) * (k / max(n - 1, 1)) ** 2


SAMPLERS = (
    "langevin-ibc",
    "langevin-correct",
    "langevin-correct-clipped",
    "mala",
    "derivative-free",
    "derivative-free-autoregressive",
)


def named_sampler(name: str, target: Target, steps: int) -> Sampler:
    """One of `SAMPLERS` with the step sizes of `target`: λ for ibc (σ = 1), τ = λ/2 for the others, and clipped to
    the box only where the target has one. '-clipped' limits each step to 0.45 of the last step's noise."""
    init, final = target.step_sizes
    correct = Langevin("correct", steps, LateFall(init / 2, final / 2), step_clip=None, margin=target.margin)
    match name:
        case "langevin-ibc":
            return replace(correct, formulation="ibc", schedule=LateFall(init, final))
        case "langevin-correct":
            return correct
        case "langevin-correct-clipped":
            return replace(correct, step_clip=0.45 * math.sqrt(final) / NORMALISED_RANGE)
        case "mala":
            return MALA(steps, step_size=init / 2, adapt=steps // 2, margin=target.margin)
        case "derivative-free":
            return DerivativeFree(steps, margin=target.margin)
        case "derivative-free-autoregressive":
            return DerivativeFree(steps, margin=target.margin, autoregressive=True)
    raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, got {name!r}")


# ---------------------------------------------------------------------------------------------- the certificate


@dataclass(frozen=True)
class Certificate:
    """What one sampler did on one target. Relative errors are the largest over dimensions; a diverged run has
    infinite ones."""

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
    """Proposals taken, in the second half of the steps. None for a sampler that takes them all."""
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
    """Steps of each."""

    @property
    def passed(self) -> bool:
        return self.verdict == "samples the target"

    @property
    def failed(self) -> bool:
        """Whether a real error was found; neither passed nor failed is inconclusive."""
        return self.verdict in ("biased", "does not sample")

    def to_json(self) -> str:
        """One line of JSON; numbers that are not finite become null."""
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}
        return json.dumps(row)


def certify(
    sampler: Sampler | SamplerFactory,
    targets: Sequence[Target] | None = None,
    runs: Sequence[RunName] = ("chains", "single"),
    generator: torch.Generator | None = None,
    name: str | None = None,
    tolerance: float = 0.1,
) -> list[Certificate]:
    """Runs `sampler` on analytic targets and says how far its samples are from them; see `Certificate.verdict`.

    `sampler` is any object with `steps`, `init` and `step`, used as it is: only `steps` is raised to what a run has
    (50 to 500 for many chains, 4000 for one). With small step sizes, give it more `steps` yourself. Or it is a
    function (target, steps) -> sampler, for parameters that follow the target, as `named_sampler` has them.
    Without `generator` the seed is fresh; with one, the result repeats.
    """
    make = _factory(sampler)
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    label = name or str(getattr(sampler, "__name__", type(sampler).__name__))
    rows = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # states are small: a second thread costs more than it does
    try:
        for target in analytic_targets() if targets is None else targets:
            for kind in runs:
                states, info = _run(make, target.to(generator.device), kind, generator)
                rows.append(_certificate(label, target, kind, states, info, tolerance))
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
    # Of another object, `run` reads no more than these three.
    return cast(Sampler, SimpleNamespace(steps=steps, init=sampler.init, step=sampler.step))


def _run(
    make: SamplerFactory, target: Target, kind: RunName, generator: torch.Generator
) -> tuple[Float[Tensor, "chains time act"], StepInfo]:
    """The states that count, chain by chain."""
    if kind == "chains":
        # One observation with many candidates: what a sampler of populations expects.
        start = target.starts(1, CHAINS, generator)
        chain = run(make(target, target.chain_steps), target, target.encode(start[:, 0]), start, generator)
        return chain.actions.transpose(0, 1), chain.info
    if kind == "single":
        sampler, start = make(target, SINGLE_STEPS), target.starts(SINGLE_REPLICAS, 1, generator)
        collect = Collect(sampler.steps - SINGLE_KEPT)
        chain = run(sampler, target, target.encode(start[:, 0]), start, generator, collect)
        return chain.actions, chain.info
    raise ValueError(f"runs must hold 'chains' or 'single', got {kind!r}")


# ---------------------------------------------------------------------------------------------- statistics


class _Estimate(NamedTuple):
    """A quantity per dimension, as it is reported and as it is judged."""

    value: Float[np.ndarray, " act"]
    """Reported: of all chains, or of the first one in a `single` run."""
    error: Float[np.ndarray, " act"]
    """Standard error of `value`."""
    pooled: Float[np.ndarray, " act"]
    """Of all chains."""
    reach: Float[np.ndarray, " act"]
    """How far chance takes `pooled` at the level of `_Z`."""


def _estimate(kind: RunName, each: Float[np.ndarray, "chains act"]) -> _Estimate:
    """From the averages along each chain. What the states of a chain share shows in the spread between chains, so
    no autocorrelation needs to be estimated. `reach` is Student's quantile times the standard error, because few
    chains also know their own spread badly; expanded to second order in 1/chains (Abramowitz & Stegun 26.7.5)."""
    chains, pooled, spread = len(each), each.mean(0), each.std(0, ddof=1)
    error, nu = spread / math.sqrt(chains), chains - 1
    quantile = _Z + (_Z**3 + _Z) / (4 * nu) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * nu**2)
    value, error_of_value = (pooled, error) if kind == "chains" else (each[0], spread)
    return _Estimate(value, error_of_value, pooled, quantile * error)


def _mean_and_std(kind: RunName, units: Float[np.ndarray, "chains time act"]) -> tuple[_Estimate, _Estimate]:
    """Of states in units of the exact moments, so (0, 1) if all is well."""
    mean = _estimate(kind, units.mean(1))
    square = _estimate("chains", ((units - mean.pooled) ** 2).mean(1))
    pooled = np.sqrt(square.pooled)
    # Chains of equal states have no spread to divide by, and no error of it.
    slope = np.divide(0.5, pooled, out=np.zeros_like(pooled), where=pooled > 0)
    if kind == "chains":
        return mean, _Estimate(pooled, slope * square.error, pooled, slope * square.reach)
    return mean, _estimate(kind, units.std(1, ddof=1))._replace(pooled=pooled, reach=slope * square.reach)


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
) -> Certificate:
    units = (states.double().cpu().numpy() - np.array(target.mean)) / np.array(target.std)
    border = temperature = None
    with np.errstate(all="ignore"):  # a diverged chain overflows; what is not a number counts as an error below
        mean, std = _mean_and_std(kind, units)
        checks = [(np.abs(mean.pooled), mean.reach, tolerance), (np.abs(std.pooled - 1), std.reach, tolerance)]
        if kind == "single":
            checks.append((1 - units.std(1).mean(0), np.zeros(1), _GROSS))
        if target.margin is None:
            temperature = _temperature(kind, target, states)
            checks.append((np.abs(temperature.pooled - 1), temperature.reach, 2 * tolerance))
        else:
            border = float((states.abs() >= margin_limit(target.margin)).any(-1).double().mean())
    mean_errors = np.nan_to_num(np.abs(mean.value), nan=np.inf, posinf=np.inf)
    std_errors = np.nan_to_num(np.abs(std.value - 1), nan=np.inf, posinf=np.inf)
    worst_mean, worst_std = int(mean_errors.argmax()), int(std_errors.argmax())
    steps = info.acceptance.shape[0]
    return Certificate(
        sampler,
        target.name,
        kind,
        mean_error=float(mean_errors[worst_mean]),
        std_error=float(std_errors[worst_std]),
        temperature=None if temperature is None else float(temperature.value[0]),
        acceptance=None if bool((info.acceptance == 1).all()) else float(info.acceptance[steps // 2 :].mean()),
        verdict=_verdict(checks, border),
        mean_sampling_error=float(mean.error[worst_mean]),
        std_sampling_error=float(std.error[worst_std]),
        temperature_sampling_error=None if temperature is None else float(temperature.error[0]),
        clipped=float(info.clipped.mean()),
        border=border,
        chains=states.shape[0],
        steps=steps,
    )


def _verdict(checks: list[tuple[np.ndarray, np.ndarray, float]], border: float | None) -> Verdict:
    """`checks` holds errors, how far chance takes them, and the tolerance; see `Certificate.verdict`."""
    real = any(not (error <= allowed + reach).all() for error, reach, allowed in checks)
    if real or (border is not None and border > _ATOMS):
        gross = any(not (error <= _GROSS).all() for error, _, _ in checks)
        return "does not sample" if gross else "biased"
    blind = any((reach > _GROSS).any() for _, reach, _ in checks[:2])
    return "inconclusive" if blind else "samples the target"


# ---------------------------------------------------------------------------------------------- for people


def conclusion(rows: Sequence[Certificate]) -> str:
    """One sentence per sampler: where it fails."""
    sentences = []
    for name in dict.fromkeys(row.sampler for row in rows):
        mine = [row for row in rows if row.sampler == name]
        targets = dict.fromkeys(row.target for row in mine)
        failed = dict.fromkeys(row.target for row in mine if row.failed)
        if failed:
            text = f"fails on {'every target' if len(failed) == len(targets) else ', '.join(failed)}"
        else:
            text = "samples every target" if all(row.passed for row in mine) else "shows no fault"
        sentences.append(f"{name} {text}")
    return "; ".join(sentences) + "."


def table(rows: Sequence[Certificate]) -> "Table":
    """The rows of one sampler for a terminal."""
    from rich import box
    from rich.table import Table

    colours = {"samples the target": "green", "inconclusive": "yellow", "biased": "red", "does not sample": "bold red"}
    title = f"[bold not italic]{rows[0].sampler}"
    result = Table(box=box.SIMPLE_HEAD, show_edge=False, title=title, title_justify="left", padding=0)
    # Fixed widths: the tables of several samplers line up, and fit into 80 columns.
    widths = {"target": 11, "run": 6, "mean err.": 9, "std err.": 9, "temp.": 10, "accept": 6, "clip": 4, "verdict": 18}
    for heading, width in widths.items():
        result.add_column(heading, width=width, overflow="fold")
    for row in rows:
        result.add_row(
            row.target,
            row.run,
            _plus_minus(row.mean_error, row.mean_sampling_error),
            _plus_minus(row.std_error, row.std_sampling_error),
            _plus_minus(row.temperature, row.temperature_sampling_error),
            "–" if row.acceptance is None else f"{row.acceptance:.2f}",
            f"{row.clipped:.2f}" if row.clipped else "–",
            f"[{colours[row.verdict]}]{row.verdict}",
        )
    return result


def _plus_minus(value: float | None, error: float | None) -> str:
    if value is None or error is None:
        return "–"
    digits = 2 if max(abs(value), error) < 10 else 1
    return f"{value:.{digits}f}±{error:.{digits}f}" if abs(value) < 1e3 else "diverged"


def report(
    names: Sequence[str], seed: int, as_json: bool, out: Path | None, own: Mapping[str, Sampler | SamplerFactory]
) -> list[Certificate]:
    """What `cebm certify` does: prints the rows of each of `names` (all of ours if there are none; others are in `own`)
    and, given `out`, writes certificate.jsonl and langevin.png there. The figure comes first, to fail early."""
    from rich.console import Console

    console, notes, rows = Console(), Console(stderr=True), []
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        figure(torch.Generator().manual_seed(seed)).savefig(out / "langevin.png", dpi=150)
    for name in names or SAMPLERS:
        with notes.status(f"certifying {name}"):
            # A generator each: what a sampler gets does not depend on its neighbours.
            sampler = own.get(name, partial(named_sampler, name))
            mine = certify(sampler, name=name, generator=torch.Generator().manual_seed(seed))
        rows += mine
        if as_json:
            print("\n".join(row.to_json() for row in mine), flush=True)
        else:
            console.print(table(mine), "")
    if not as_json:
        console.print("± is one standard error. A single chain's numbers are its own, its verdict is that of 64 such.")
        console.print(conclusion(rows))
    if out is not None:
        (out / "certificate.jsonl").write_text("".join(row.to_json() + "\n" for row in rows))
        notes.print(f"wrote {out / 'certificate.jsonl'} and {out / 'langevin.png'}")
    return rows


def figure(generator: torch.Generator | None = None) -> "Figure":
    """The paper's figure of two panels: the last 1000 of 4000 states of one chain, by IBC's formulation and by the
    correct one, over the Gaussian's density. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the figure needs matplotlib: pip install 'cebm[plot]'") from error
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    target = Gaussian()
    drawn = Figure(figsize=(9, 6.2), layout="constrained")
    panels = drawn.subplots(1, 2, sharex=True, sharey=True)
    # Okabe & Ito's vermillion and blue, which every reader can tell apart.
    for axes, name, title, colour in (
        (panels[0], "langevin-ibc", "IBC's Langevin", "#D55E00"),
        (panels[1], "langevin-correct", "true Langevin", "#0072B2"),
    ):
        states, _ = _run(partial(named_sampler, name), target, "single", generator)
        _panel(axes, target, states[0].double().cpu().numpy(), title, colour)
    panels[0].set_ylabel("y₂")
    drawn.suptitle("One chain of 4000 steps: its last 1000 states, over the density they should follow")
    return drawn


def _panel(axes: "Axes", target: Target, states: Float[np.ndarray, "time two"], title: str, colour: str) -> None:
    mean, std = np.array(target.mean), np.array(target.std)
    low, high = mean - np.array([5.5, 4.2]) * std, mean + np.array([5.5, 3.6]) * std
    x, y = np.meshgrid(np.linspace(low[0], high[0], 400), np.linspace(low[1], high[1], 400))
    radius = np.hypot((x - mean[0]) / std[0], (y - mean[1]) / std[1])
    extent = (low[0], high[0], low[1], high[1])
    axes.imshow(np.exp(-(radius**2) / 2), extent=extent, origin="lower", cmap="Greys", vmax=2.2, zorder=0)
    lines = axes.contour(x, y, radius, levels=[1, 2, 3], colors="0.45", linewidths=0.8)
    axes.clabel(lines, fmt=lambda level: f"{level:.0f}σ", fontsize=8)
    axes.scatter(states[:, 0], states[:, 1], s=10, color=colour, alpha=0.5, linewidths=0, zorder=3)
    found = [states.mean(0), states.std(0, ddof=1)]
    note = "\n".join(
        f"{label} ({a:.3f}, {b:.3f})  exact ({c:.3f}, {d:.3f})"
        for label, (a, b), (c, d) in zip(("mean", "std "), found, (mean, std), strict=True)
    )
    axes.text(0.5, 0.02, note, transform=axes.transAxes, ha="center", va="bottom", family="monospace", fontsize=8.5)
    axes.set(title=title, xlabel="y₁", aspect="equal")
    axes.title.set(color=colour, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
