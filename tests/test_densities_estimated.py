"""log Z with an error bar: exact references up to 32 dimensions, honest errors, and warnings that name the row."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import cebm
from cebm.densities import (
    Estimator,
    UntrustedDensityWarning,
    modes_of,
    pareto_shape,
    resampled,
    warn_untrusted,
    weighted,
)
from cebm.energies import EnergyModel, MixtureDensityEnergy, Penalty, TiltedEnergy
from cebm.policy import EnergyPolicy
from cebm.spaces import Box

LOW, HIGH = torch.tensor(-1.1), torch.tensor(1.1)


def gaussian(dims: int, std: float) -> tuple[EnergyModel, float]:
    exact = dims * math.log(std * math.sqrt(2 * math.pi))
    return Penalty(lambda _, y: 0.5 * ((y - 0.2) / std).square().sum(-1), 0, dims), exact


def mixture(dims: int, std: float, share: float = 0.25) -> tuple[EnergyModel, float]:
    """Two Gaussians at ±0.4 in every dimension, the lower one with `share` of the mass."""
    means = torch.tensor([[-0.4], [0.4]]).expand(2, dims)
    logs = torch.tensor([share, 1 - share]).log()

    def energies(_: Tensor, y: Tensor) -> Tensor:
        return -(logs - 0.5 * ((y.unsqueeze(-2) - means) / std).square().sum(-1)).logsumexp(-1)

    return Penalty(energies, 0, dims), dims * math.log(std * math.sqrt(2 * math.pi))


def judged(energy: EnergyModel, exact: float, rows: int, generator: torch.Generator, draws: int = 1024) -> None:
    """Within 4.5 standard errors (3 in the issue, of one estimate; here there are dozens), and within 0.05 nats where
    the error says that it can be. A rounding of 1e-4 is allowed. The shape k̂ is an estimate too, up to 0.69 in 400
    rows where 0.7 is the limit: of some rows, one may be beyond it by chance, and then nothing is said of that row."""
    found = Estimator(draws)(energy, torch.zeros(rows, 0), 1.1, generator)
    assert found.trusted.sum() >= rows - 1, found.shape
    errors, standard = ((found.log_partition - exact).abs()[found.trusted], found.standard_error[found.trusted])
    assert (errors < 4.5 * standard + 1e-4).all(), (errors, standard)
    assert (errors[standard < 0.05 / 4.5] < 0.05).all()


@pytest.mark.parametrize(("dims", "std"), [(2, 0.01), (4, 0.05)])
@pytest.mark.parametrize("make", [gaussian, mixture])
def test_log_z_without_a_proposal(make, dims: int, std: float, generator: torch.Generator) -> None:
    """Uniform points, which the regressor used before, are off by 0.57 to 17 nats on these."""
    judged(*make(dims, std), 2, generator, 512)


@pytest.mark.parametrize(("dims", "std"), [(1, 0.05), (6, 0.05), (16, 0.1), (32, 0.1), (32, 0.05)])
@pytest.mark.parametrize("make", [gaussian, mixture])
@pytest.mark.slow
def test_log_z_in_many_dimensions(make, dims: int, std: float, generator: torch.Generator) -> None:
    judged(*make(dims, std), 3, generator)


def test_the_masses_of_modes_are_right(generator: torch.Generator) -> None:
    """In 3-D: the share of each row is its own to within its error. (The old sampler gave 0.42 ± 0.41.)"""
    energy, _ = mixture(3, 0.05)
    context = torch.zeros(4, 0)
    found = Estimator(1024)(energy, context, 1.1, generator)
    drawn = resampled(found, 1024, generator)
    # At least a quarter of the draws are worth an independent one.
    assert ((drawn.mean(-1) < 0).float().mean(1) - 0.25).abs().max() < 4.5 * math.sqrt(0.25 * 0.75 / 256)
    for modes in modes_of(energy, context, found, LOW, HIGH):
        assert len(modes) == 2
        for mode, (place, mass) in zip(modes, [(0.4, 0.75), (-0.4, 0.25)], strict=True):
            assert (mode.action - place).abs().max() < 0.05 * 0.05, "within a twentieth of a deviation"
            assert 0 < mode.error < 0.05 and abs(mode.mass - mass) < 4.5 * math.sqrt(0.25 * 0.75 / 256)


def tilted(generator: torch.Generator, strength: float) -> tuple[TiltedEnergy, float]:
    """A mixture density q tilted by a slope a·y: log Z is that of E_q[e^{−a y}], known for Gaussians."""
    base = MixtureDensityEnergy(1, 2, width=8, components=3, generator=generator)
    slope = Penalty(lambda _, y: strength * y.sum(-1), 1, 2)
    return TiltedEnergy(base, slope), strength


def within_their_errors(errors: Tensor, standard: Tensor) -> bool:
    """Twelve rows or more, a rounding of 1e-3 allowed: the median below 2.5 standard errors, and all but two below 4.5.
    The weights of annealed draws have long tails, and a resampling correlates them: of 300 rows one was 5.3 standard
    errors off. The median of twelve is beyond 2.5 with a probability of 1e-6, as a row is with 0.03; three of them
    beyond 4.5 with 3e-5."""
    scaled = (errors - 1e-3) / standard
    return len(scaled) >= 12 and bool(scaled.median() < 2.5) and int((scaled >= 4.5).sum()) <= 2


@pytest.mark.parametrize("strength", [0.5, 40.0])
def test_log_z_from_a_proposal_and_annealed_from_it(strength: float, generator: torch.Generator) -> None:
    """With a weak tilt the proposal's draws are enough; with a strong one they are annealed."""
    energy, slope = tilted(generator, strength)
    obs = torch.randn(14, 1, generator=generator)
    context = energy.encode(obs)
    logs, means, stds, _, _ = context[1]
    exact = (logs + (0.5 * slope**2 * (2 * stds).exp() - slope * means).sum(-1)).logsumexp(1)
    alone = Estimator(1024, anneal=False)(energy, context, 1.1, generator)
    found = Estimator(1024)(energy, context, 1.1, generator)
    if strength > 1:
        assert not alone.trusted.all() or (alone.standard_error > 0.05).any(), "the proposal is enough: shows nothing"
    else:
        assert torch.equal(found.trusted, alone.trusted)
    errors = (found.log_partition - exact).abs()[found.trusted]
    assert within_their_errors(errors, found.standard_error[found.trusted])
    assert not within_their_errors(
        errors + 4 * found.standard_error[found.trusted], found.standard_error[found.trusted]
    )


def test_the_shape_is_that_of_the_tail(generator: torch.Generator) -> None:
    """Weights whose tail is Pareto with index 1/k. The estimate's error is (1 + k)/√tail for a tail of 300, and the
    prior draws it to 1/2 by 10/310."""
    for k in (0.2, 0.8):
        uniform = torch.rand(4, 10000, generator=generator, dtype=torch.float64)
        logs = stats.genpareto.ppf(uniform.numpy(), k)
        found = pareto_shape(torch.from_numpy(np.log(logs)))
        assert ((found - k).abs() < 4.5 * (1 + k) / math.sqrt(300) + 0.05).all(), (k, found)
    assert (pareto_shape(torch.zeros(2, 100)) == -math.inf).all()
    assert (pareto_shape(torch.full((2, 100), -math.inf)) == math.inf).all()


def test_what_is_not_to_be_trusted_names_its_row(generator: torch.Generator) -> None:
    logs = torch.randn(3, 500, generator=generator)
    logs[1] *= 20
    found = weighted(torch.zeros(3, 500, 1), logs)
    with pytest.warns(UntrustedDensityWarning, match="observation 1 is not to be trusted: Pareto k̂ is .*; 1 of 3"):
        warn_untrusted(found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_untrusted(weighted(torch.zeros(1, 500, 1), logs[:1]))


def policy_of(energy: EnergyModel, dims: int) -> EnergyPolicy:
    """In units of 10 around 100."""
    act = Box(torch.full((dims,), 100.0), torch.full((dims,), 10.0), 0.05)
    return EnergyPolicy(energy, Box(torch.zeros(energy.obs_dim or 1), torch.ones(energy.obs_dim or 1), 0.05), act)


class OfOne(EnergyModel):
    """A Gaussian at the observation, in `dims` dimensions."""

    def __init__(self, dims: int, std: float) -> None:
        super().__init__()
        self.obs_dim, self.act_dim, self.context_dim, self.std = 1, dims, 1, std

    def encode(self, obs: Tensor) -> Tensor:
        return obs

    def energies(self, context: Tensor, actions: Tensor) -> Tensor:
        return 0.5 * ((actions - context.unsqueeze(1)) / self.std).square().sum(-1)


def test_a_policys_log_density_is_in_the_units_of_its_actions(generator: torch.Generator) -> None:
    policy = policy_of(OfOne(3, 0.05), 3)
    obs = np.array([[0.1], [-0.3]] * 7)
    action = 100 + 10 * (obs + 0.05 * np.array([[0.5, -1, 2], [0, 0, 0]] * 7))
    found = policy.log_prob(obs, action, draws=256, generator=generator)
    exact = stats.norm.logpdf(action, 100 + 10 * obs, 0.5).sum(1)
    trusted = found.shape < 0.7  # an estimate, too: one of 500 rows had 0.69
    errors = (found.value - torch.from_numpy(exact)).abs()[trusted]
    assert within_their_errors(errors, found.standard_error[trusted])
    assert (found.standard_error < 0.05).all()
    assert policy.log_prob(obs[:1], action[:1] - 50, draws=32, generator=generator).value.isneginf().all()
    with pytest.raises(ValueError, match="1 rows, obs has 14"):
        policy.log_prob(obs, action[:1])


def test_a_policys_modes_are_in_the_units_of_its_actions(generator: torch.Generator) -> None:
    rows = policy_of(OfOne(2, 0.05), 2).modes(np.array([[0.1], [-0.3]]), generator=generator)
    for modes, place in zip(rows, (101.0, 97.0), strict=True):
        assert len(modes) == 1 and modes[0].mass == pytest.approx(1)
        assert (modes[0].action - place).abs().max() < 0.05 * 0.5


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="draws must be at least 32, got 8"):
        Estimator(draws=8)
    assert cebm.Estimator is Estimator
