"""The certificate: its targets are what they say, right samplers pass, wrong ones do not."""

import json
import math
import sys
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from cebm.certificate import (
    SAMPLERS,
    Banana,
    BoxedExponential,
    Certificate,
    CorrelatedGaussian,
    DoubleWell,
    Funnel,
    Gaussian,
    LateFall,
    Ring,
    Skewed,
    Target,
    analytic_targets,
    certify,
    conclusion,
    figure,
    named_sampler,
    table,
)
from cebm.certificate.distances import by_chance, squared_distance
from cebm.certificate.judging import _certificate, _estimate, _verdict, run_on
from cebm.energies import EnergyModel
from cebm.samplers import MALA, Constant, Langevin, LangevinState, StepInfo

TARGETS = pytest.mark.parametrize("target", analytic_targets(), ids=lambda target: target.name)
UNBOUNDED = pytest.mark.parametrize("target", [Gaussian(), Skewed(), DoubleWell()], ids=lambda target: target.name)

# A sampler with Gaussian statistics is off by more than this many standard errors with probability 7e-6.
Z = 4.5


def certified(name: str, target: Target, run: str, generator: torch.Generator) -> Certificate:
    (row,) = certify(partial(named_sampler, name), [target], [run], generator, name)
    return row


# ---------------------------------------------------------------------------------------------- targets


def moments(target: Target, dim: int) -> tuple[float, float, float]:
    """Mean, standard deviation and E[(y − μ) E'(y)] of one dimension, by adaptive quadrature of the energy."""
    exact = target.double()
    low, high = (-1.1, 1.1) if target.margin is not None else (-4.0, 4.0)

    def integral(function) -> float:
        def integrand(y: float) -> float:
            point = torch.tensor(exact.mean, dtype=torch.float64)
            point[dim] = y
            energy, slope = exact.terms(point)
            return math.exp(-float(energy[dim])) * function(y, float(slope[dim]))

        return integrate.quad(integrand, low, high, points=[-1.0, 0.0, 0.4, 1.0], limit=200, epsrel=1e-8)[0]

    total = integral(lambda y, slope: 1.0)
    mean = integral(lambda y, slope: y) / total
    std = math.sqrt(integral(lambda y, slope: (y - mean) ** 2) / total)
    return mean, std, integral(lambda y, slope: (y - mean) * slope) / total


@pytest.mark.parametrize("make", [Gaussian, Skewed, DoubleWell, BoxedExponential])
def test_targets_know_their_exact_moments_and_the_virial_theorem_holds(make: type[Target]) -> None:
    target = make()
    for dim in range(target.act_dim):
        mean, std, virial = moments(target, dim)
        # The parameters are float32 numbers, so the density itself is good to about 1e-7.
        assert mean == pytest.approx(target.mean[dim], abs=1e-6 * std)
        assert std == pytest.approx(target.std[dim], rel=1e-6)
        if target.margin is None:
            assert virial == pytest.approx(1, rel=1e-6)
        else:
            assert abs(virial - 1) > 0.1, "the border adds a term: no temperature for a bounded target"


@TARGETS
def test_gradients_are_the_derivatives_of_the_energies(target: Target, generator: torch.Generator) -> None:
    exact = analytic_targets()[[t.name for t in analytic_targets()].index(target.name)].double()
    actions = torch.rand(3, 5, 2, generator=generator, dtype=torch.float64) * 2 - 1
    context = exact.encode(torch.zeros(3, 7))
    assert context.shape == (3, 0)
    energies, gradients = exact.energies_and_gradients(context, actions)
    torch.testing.assert_close(energies, exact.energies(context, actions))
    for dim in range(2):
        shift = torch.zeros(2, dtype=torch.float64)
        shift[dim] = 1e-6
        slope = (exact.energies(context, actions + shift) - exact.energies(context, actions - shift)) / 2e-6
        torch.testing.assert_close(gradients[..., dim], slope, rtol=1e-6, atol=1e-6)


DEPENDENT = pytest.mark.parametrize(
    "target", [CorrelatedGaussian(), Banana(), Funnel(), Ring()], ids=lambda target: target.name
)


@DEPENDENT
def test_dependent_targets_have_the_moments_that_they_say(target: Target) -> None:
    """By the rectangle rule in two dimensions, which converges fast for smooth densities that vanish at the ends."""
    axes = torch.linspace(-3.5, 3.5, 1401, dtype=torch.float64)
    points = torch.cartesian_prod(axes, axes)
    weights = torch.softmax(-target.double().density(points)[0], 0)
    mean = weights @ points
    centred = points - mean
    covariance = centred.T @ (weights.unsqueeze(1) * centred)
    std = covariance.diagonal().sqrt()
    assert mean.tolist() == pytest.approx(target.mean, abs=1e-4)
    assert std.tolist() == pytest.approx(target.std, rel=2e-3), "the funnel's tail leaves the grid"
    assert float(covariance[0, 1] / std.prod()) == pytest.approx(target.correlation, abs=1e-4)


@pytest.mark.parametrize("target", analytic_targets(), ids=lambda target: target.name)
def test_exact_draws_are_of_the_density(target: Target, generator: torch.Generator) -> None:
    """Mean, deviation, correlation, and E[(y − μ)·∇E] = d, which ties the draws to the energy; each within 4.5 of its
    standard errors. The last holds where there are no walls."""
    n = 20_000
    draws = target.float().draw(n, generator).double()
    units = (draws - torch.tensor(target.mean)) / torch.tensor(target.std)
    products = units[:, 0] * units[:, 1] - target.correlation
    for values in (units[:, 0], units[:, 1], units[:, 0] ** 2 - 1, units[:, 1] ** 2 - 1, products):
        assert abs(values.mean()) < Z * values.std() / math.sqrt(n)
    if target.margin is None:
        _, gradients = target.density(draws.float())
        virial = ((draws - torch.tensor(target.mean)) * gradients).sum(1) - 2
        assert abs(virial.mean()) < Z * virial.std() / math.sqrt(n) + 1e-4


def test_what_is_only_wrong_together_is_caught(generator: torch.Generator) -> None:
    """One noise for all coordinates, and a banana's marginals drawn apart: every marginal is right. The certificate of
    earlier versions passed the first on all of its targets."""

    @dataclass(frozen=True)
    class OneNoise(Mine):
        def step(self, energy, context, state, k, generator):
            energies, gradients = energy.energies_and_gradients(context, state.actions)
            noise = torch.randn(state.actions[..., :1].shape, generator=generator)
            actions = state.actions - self.tau * gradients + self.noise * math.sqrt(self.tau) * noise
            return LangevinState(actions), StepInfo.of(energies, gradients)

    for target in (Gaussian(), Skewed()):
        assert all(row.failed and row.correlation_error > 0.5 for row in certify(OneNoise(), [target], ["chains"]))
    # A banana's are told by what is left of its whitened moments, those of a rotated Gaussian by the distance as well.
    info = StepInfo(*(torch.ones(2) for _ in range(4)))
    for target in (Banana(), CorrelatedGaussian()):
        apart = torch.stack([target.draw(1000, generator)[:, d] for d in range(2)], 1)
        exact = target.draw(2000, generator)
        for states, passes in ((apart, False), (target.draw(1000, generator), True)):
            row = _certificate("drawn", target, "chains", states.unsqueeze(1), info, 0.1, exact)
            assert row.passed == passes, row
            if isinstance(target, CorrelatedGaussian):
                assert row.distance is not None and (row.distance < row.distance_allowed) == passes


def test_the_distance_by_chance_is_a_bound(generator: torch.Generator) -> None:
    """At a level of 0.1, at most 0.1 of 200 pairs of exact draws are further apart: fewer than 42 with a probability
    of 1 − 4e-6 (binomial); and the bound is not idle: within a factor 5 of the mean distance squared."""
    target = Ring()
    exact = target.draw(400, generator).double()
    allowed = by_chance(exact, 100, 200, 0.1)
    found = [
        squared_distance(target.draw(100, generator).double(), target.draw(200, generator).double()) for _ in range(200)
    ]
    assert sum(value > allowed for value in found) < 42
    assert np.mean(found) < allowed < 5 * np.mean(found)
    assert squared_distance(exact, exact * math.nan) == math.inf


def test_starts_and_steps_follow_the_target(generator: torch.Generator) -> None:
    """A right MALA failed on a Gaussian of other parameters, whose starts and steps were those of the default."""
    for target in (Gaussian((3.0, -2.0), (0.01, 0.015)), Gaussian((-5.0, 8.0), (2.0, 3.0))):
        assert certified("mala", target, "chains", generator).passed


def test_the_box_has_no_density_outside() -> None:
    target = BoxedExponential()
    actions = torch.tensor([[[0.0, 1.2], [1.1, -1.1]]])
    energies = target.energies(torch.empty(1, 0), actions)
    assert energies[0, 0] == math.inf
    assert energies[0, 1].isfinite()


def test_the_schedule_of_the_appendix() -> None:
    schedule = LateFall(5e-3, 1e-3)
    for k in (0, 17, 49):
        assert schedule(k, 50) == pytest.approx(5e-3 - 4e-3 * (k / 49) ** 2)
    assert schedule(0, 1) == 5e-3


# ---------------------------------------------------------------------------------------------- known values


def exact_chain(formulation: str, steps: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the last state on the Gaussian, in units of the target's: the update is linear,
    y' − μ = (1 − τ/s²)(y − μ) + noise, so both obey a recursion from the uniform start (mean 1/2, variance 1/12)."""
    mu, s = np.array([0.3, 0.4]), np.array([0.1, 0.2])
    offset, variance = 0.5 - mu, np.full(2, 1 / 12)
    for k in range(steps):
        step = 5e-3 - 4e-3 * (k / (steps - 1)) ** 2
        shrink = 1 - step / 2 / s**2
        offset, variance = shrink * offset, shrink**2 * variance + (step if formulation == "correct" else step**2)
    return offset / s, np.sqrt(variance) / s


@pytest.mark.parametrize(
    ("formulation", "known", "verdict"), [("ibc", 0.956, "does not sample"), ("correct", 0.0235, "samples the target")]
)
def test_known_values_of_many_chains(formulation: str, known: float, verdict: str, generator: torch.Generator) -> None:
    mean, std = exact_chain(formulation)
    errors = np.abs(std - 1)
    assert errors.max() == pytest.approx(known, abs=5e-4)
    # The standard error of a standard deviation is std/√(2n), for 1000 chains; the largest error is reported. (The
    # slow dimension of ibc is still partly the uniform start, whose short tails only make it smaller.)
    band = Z * std / math.sqrt(2 * 999)
    for _ in range(5):
        row = certified(f"langevin-{formulation}", Gaussian(), "chains", generator)
        assert (errors - band).max() < row.std_error < (errors + band).max()
        assert row.mean_error < (np.abs(mean) + Z * std / math.sqrt(1000)).max()
        assert row.verdict == verdict
        assert (row.chains, row.steps, row.acceptance, row.clipped, row.border) == (1000, 50, None, 0, None)
    if formulation == "correct":
        assert row.std_sampling_error == pytest.approx(1 / math.sqrt(2000), rel=0.35)
        assert row.mean_sampling_error == pytest.approx(1 / math.sqrt(1000), rel=0.15)


def test_known_values_of_the_single_chain(generator: torch.Generator) -> None:
    """The 1000 states of the slow dimension are worth about 24 independent ones for the variance (autocorrelation
    time 41), so std/exact is about √(χ²₂₄/24): within 0.47 and 1.6 with probability 1 − 1e-4."""
    row = certified("langevin-ibc", Gaussian(), "single", generator)
    assert row.verdict == "does not sample"
    assert 1 - 0.044 * 1.6 < row.std_error < 1 - 0.044 * 0.35
    assert row.temperature is not None and row.temperature < 0.01
    states, info = run_on(partial(named_sampler, "langevin-correct"), Gaussian(), "single", generator)
    row = _certificate("langevin-correct", Gaussian(), "single", states, info, 0.1)
    assert row.verdict == "samples the target"
    assert row.std_error < 0.65
    assert 0.05 < row.std_sampling_error < 0.3
    assert row.steps == 4000
    # The typical error is 0.12; a median of 64 of them has a standard error of 0.012.
    assert states.shape == (64, 1000, 2)
    errors = (states.double().std(1) / torch.tensor([0.1, 0.2]) - 1).abs().amax(1)
    assert abs(errors.median() - 0.12) < 0.06


def test_the_reach_of_chance_is_students_quantile() -> None:
    for chains in (64, 1000):
        values = np.linspace(-1, 1, chains)[:, None]
        estimate = _estimate("chains", values)
        quantile = stats.t.isf(stats.norm.sf(Z), chains - 1)
        assert estimate.reach[0] == pytest.approx(quantile * stats.sem(values[:, 0]), rel=0.01)


# ---------------------------------------------------------------------------------------------- verdicts


@TARGETS
def test_mala_samples_every_target(target: Target, generator: torch.Generator) -> None:
    for run in ("chains", "single") if target.name in ("double-well", "box") else ("chains",):
        row = certified("mala", target, run, generator)
        assert row.verdict == "samples the target", row
        assert row.acceptance is not None and 0.3 < row.acceptance < 0.9
        assert row.border in (None, 0.0)


@UNBOUNDED
def test_correct_langevin_samples_unbounded_targets(target: Target, generator: torch.Generator) -> None:
    row = certified("langevin-correct", target, "chains", generator)
    assert row.verdict == "samples the target", row
    assert row.temperature is not None and row.temperature_sampling_error is not None
    # The discretisation raises the temperature by about 4 % at most.
    assert abs(row.temperature - 1) < 0.05 + Z * row.temperature_sampling_error


@TARGETS
def test_ibc_and_the_optimisers_sample_nothing(target: Target, generator: torch.Generator) -> None:
    for name in ("langevin-ibc", "derivative-free", "derivative-free-autoregressive"):
        assert certified(name, target, "chains", generator).verdict == "does not sample"


def test_a_chain_that_stands_still_does_not_sample(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cebm.certificate.judging.SINGLE_STEPS", 1500)
    row = certified("derivative-free", DoubleWell(), "single", generator)
    assert row.verdict == "does not sample"
    assert row.std_error == pytest.approx(1, abs=1e-6)


def test_clipping_each_step_breaks_the_correct_sampler(generator: torch.Generator) -> None:
    for run in ("chains", "single"):
        row = certified("langevin-correct-clipped", Gaussian(), run, generator)
        assert row.failed and row.clipped > 0.5
    sampler = named_sampler("langevin-correct-clipped", Gaussian(), 50)
    assert isinstance(sampler, Langevin)
    # With the clip as the one difference: taking it away gives the sampler that passes.
    assert replace(sampler, step_clip=None) == named_sampler("langevin-correct", Gaussian(), 50)


def test_clipping_to_the_box_leaves_atoms_on_its_border(generator: torch.Generator) -> None:
    row = certified("langevin-correct", BoxedExponential(), "chains", generator)
    assert row.failed and row.temperature is None
    assert row.border is not None and row.border > 0.1


# ---------------------------------------------------------------------------------------------- users' samplers


@dataclass(frozen=True)
class Mine:
    """A user's own Langevin sampler."""

    steps: int = 400
    tau: float = 5e-4
    noise: float = math.sqrt(2)
    sign: float = 1.0

    def init(self, energy: EnergyModel, context: Tensor, start: Tensor, generator: torch.Generator) -> LangevinState:
        return LangevinState(start)

    def step(
        self, energy: EnergyModel, context: Tensor, state: LangevinState, k: int, generator: torch.Generator
    ) -> tuple[LangevinState, StepInfo]:
        energies, gradients = energy.energies_and_gradients(context, state.actions)
        noise = torch.randn(state.actions.shape, generator=generator)
        actions = state.actions - self.sign * self.tau * gradients + self.noise * math.sqrt(self.tau) * noise
        one = torch.ones(())
        return LangevinState(actions), StepInfo(energies.mean(), gradients.abs().mean(), 0 * one, one)


class Plain:
    """The same without a dataclass: nothing to set `steps` on."""

    def __init__(self, noise: float = math.sqrt(2)) -> None:
        self.steps, self._inner = 400, Mine(noise=noise)
        self.init, self.step = self._inner.init, self._inner.step


@pytest.mark.parametrize("sampler", [Mine(), Plain(), Langevin("correct", 400, Constant(5e-4), step_clip=None)])
def test_a_users_correct_sampler_is_certified(sampler: object, generator: torch.Generator) -> None:
    rows = certify(sampler, [Gaussian(), Skewed()], ["chains"], generator)
    assert all(row.passed for row in rows), rows
    assert {row.sampler for row in rows} == {type(sampler).__name__}
    assert {row.steps for row in rows} == {400}, "its own steps, where they are more than the target's"


@pytest.mark.parametrize("sampler", [Mine(noise=1.0), Plain(noise=1.0)], ids=["dataclass", "plain"])
def test_a_planted_missing_root_of_two_is_caught(sampler: object, generator: torch.Generator) -> None:
    for row in certify(sampler, [Gaussian(), Skewed()], ["chains"], generator):
        assert row.failed, row
    if isinstance(sampler, Plain):
        row = certify(sampler, [Gaussian()], ["single"], generator)[0]
        assert row.failed and row.steps == 4000, "64 replicas see what one chain cannot"


def test_a_planted_flipped_sign_is_caught(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cebm.certificate.judging.SINGLE_STEPS", 2000)
    rows = certify(Mine(sign=-1.0), [Gaussian()], generator=generator)
    assert [row.verdict for row in rows] == ["does not sample"] * 2
    diverged = rows[1]
    assert diverged.std_error == math.inf
    assert json.loads(diverged.to_json())["std_error"] is None, "infinity is no JSON"
    table(rows)


def test_the_rule_of_the_verdict() -> None:
    def verdict(error: float, reach: float, border: float | None = None) -> str:
        fine = (np.zeros(2), np.full(2, 0.1), 0.1)
        return _verdict([fine, (np.array([0.0, error]), np.array([0.0, reach]), 0.1)], border)

    assert verdict(0.19, 0.1) == "samples the target"
    assert verdict(0.21, 0.1) == "biased"
    assert verdict(0.61, 0.1) == "does not sample"
    assert verdict(math.nan, 0.1) == "does not sample"
    assert verdict(0.55, 0.51) == "inconclusive", "an error of 0.5 would have passed"
    assert verdict(0.0, 0.1, border=0.005) == "samples the target"
    assert verdict(0.0, 0.1, border=0.02) == "biased"


def test_a_function_follows_the_target(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cebm.certificate.judging.SINGLE_STEPS", 1500)
    seen = []

    def make(target: Target, steps: int) -> MALA:
        seen.append((target.name, steps))
        return MALA(steps, target.step_sizes[0], adapt=steps // 2, margin=target.margin)

    rows = certify(make, [Gaussian()], generator=generator, name="tuned")
    assert seen == [("gaussian", 50), ("gaussian", 1500)]
    assert certify(make, [Gaussian()], ["chains"], generator)[0].sampler == "make"
    assert all(row.passed and row.sampler == "tuned" for row in rows)


def test_other_dimensions_too(generator: torch.Generator) -> None:
    target = Gaussian(mean=[0.0] * 5, std=[0.2] * 5)
    assert certify(Mine(), [target], ["chains"], generator)[0].passed


def test_bad_arguments_are_named(generator: torch.Generator) -> None:
    with pytest.raises(ValueError, match=r"not the class Mine: give Mine\(\.\.\.\)"):
        certify(Mine)
    with pytest.raises(ValueError, match="tolerance"):
        certify(Mine(), tolerance=-1.0)
    with pytest.raises(ValueError, match=r"sampler must be one of langevin-ibc, .*, got 'nuts'"):
        named_sampler("nuts", Gaussian(), 10)


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_arguments_are_named_without_shape_checks_too(generator: torch.Generator) -> None:
    with pytest.raises(ValueError, match="sampler must have steps, init and step, or be a function: int is neither"):
        certify(3)
    with pytest.raises(ValueError, match="runs must hold 'chains' or 'single', got 'both'"):
        certify(Mine(), runs=["both"], generator=generator)


def test_randomness_is_the_generator_and_threads_are_given_back() -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, second = (
            certify(MALA(), [Gaussian()], ["chains"], torch.Generator().manual_seed(seed)) for seed in (5, 5)
        )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert first == second
    assert certify(MALA(), [Gaussian()], ["chains"]) != first, "without a generator the seed is fresh"
    assert torch.equal(before, torch.get_rng_state())


# ---------------------------------------------------------------------------------------------- for people


def test_json_has_the_keys_of_the_issue_first(generator: torch.Generator) -> None:
    row = certified("mala", Gaussian(), "chains", generator)
    written = json.loads(row.to_json())
    issue = ["sampler", "target", "run", "mean_error", "std_error", "temperature", "acceptance", "verdict"]
    assert list(written)[:8] == issue
    assert written == {field.name: getattr(row, field.name) for field in fields(row)}


def test_the_conclusion_says_where_a_sampler_fails(generator: torch.Generator) -> None:
    good = certified("mala", Gaussian(), "chains", generator)
    bad = replace(good, sampler="other", verdict="biased")
    unsure = replace(good, sampler="third", verdict="inconclusive")
    rows = [good, bad, replace(bad, target="box", verdict="samples the target"), unsure]
    assert conclusion(rows) == "mala samples every target; other fails on gaussian; third shows no fault."
    assert conclusion([bad]) == "other fails on every target."


def test_the_figure_shows_both_on_the_same_axes(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cebm.certificate.judging.SINGLE_STEPS", 2000)
    drawn = figure(generator)
    ibc, correct = drawn.axes
    assert ibc.get_xlim() == correct.get_xlim() and ibc.get_ylim() == correct.get_ylim()
    assert ibc.get_aspect() == correct.get_aspect() == 1.0
    spread = [np.asarray(axes.collections[-1].get_offsets()).std(0) for axes in (ibc, correct)]
    assert (spread[0] < 0.1 * np.array([0.1, 0.2])).all()
    assert (spread[1] > 0.3 * np.array([0.1, 0.2])).all()


def test_the_figure_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'cebm\[plot\]'"):
        figure()


def test_every_named_sampler_exists() -> None:
    for name in SAMPLERS:
        assert named_sampler(name, Gaussian(), 7).steps == 7
