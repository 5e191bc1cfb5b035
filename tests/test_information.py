"""Information: quadrature against closed forms, importance sampling against quadrature, InfoNCE against Gaussians."""

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cebm import information
from cebm.energies import EnergyModel, MarginalEnergy, MLPEnergy, ModuleEnergy, Penalty
from cebm.information import (
    CoarseQuadratureWarning,
    MutualInformationBound,
    Quadrature,
    SaturatedBoundWarning,
    conditional_entropy,
    energy_score,
    entropy_importance,
    info_nce_bound,
    marginal_entropy,
    marginal_entropy_importance,
    model_information,
    model_mutual_information,
)

LINE = Quadrature((-6.0,), (6.0,), points_per_dim=128)
PLANE = Quadrature((-6.0, -7.0), (6.0, 7.0), points_per_dim=96)


class LinearGaussian(nn.Module):
    """E = ½ (y - Kx)ᵀ P (y - Kx) + offset, P = LLᵀ: everything is known in closed form."""

    def __init__(self, gain: Tensor, cholesky: Tensor) -> None:
        super().__init__()
        self.gain, self.cholesky = nn.Parameter(gain), nn.Parameter(cholesky)

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        residual = actions - features @ self.gain.T
        return (residual @ self.cholesky).square().sum(dim=1) / 2 + 3.0


def gaussian(dims: int, gain: float = 0.4) -> tuple[EnergyModel, Quadrature, LinearGaussian]:
    if dims == 1:
        module = LinearGaussian(torch.tensor([[gain, -0.2]]).double(), torch.tensor([[1.6]]).double())
        return ModuleEnergy(module, 2, 1), LINE, module
    cholesky = torch.tensor([[1.7, 0.0], [-0.9, 1.3]]).double()
    module = LinearGaussian(torch.tensor([[gain, 0.0], [0.1, -0.5]]).double(), cholesky)
    return ModuleEnergy(module, 2, 2), PLANE, module


def some_obs(generator: torch.Generator, batch: int = 4) -> Tensor:
    return 2 * torch.rand(batch, 2, generator=generator, dtype=torch.float64) - 1


def smooth_energy(generator: torch.Generator, act_dim: int = 1) -> EnergyModel:
    """A tanh network in a bowl: smooth, so that quadrature and finite differences are exact to many digits."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = nn.Sequential(nn.Linear(2 + act_dim, 5), nn.Tanh(), nn.Linear(5, 1))
            self.layers = layers.double()
            for parameter in self.parameters():
                parameter.data.normal_(generator=generator)

        def forward(self, features: Tensor, actions: Tensor) -> Tensor:
            bowl = 2 * actions.square().sum(dim=1)
            return self.layers(torch.cat([features, actions], dim=1))[:, 0] + bowl

    return ModuleEnergy(Network(), obs_dim=2, act_dim=act_dim)


# Quadrature


@pytest.mark.parametrize("dims", [1, 2])
def test_quadrature_of_a_gaussian_is_exact(dims, generator):
    energy, quadrature, module = gaussian(dims)
    obs = some_obs(generator)
    log_det = module.cholesky.diagonal().log().sum()  # ½ log det P
    log_z = dims / 2 * math.log(2 * math.pi) - log_det - 3.0
    entropy = dims / 2 * math.log(2 * math.pi * math.e) - log_det
    tight = {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(quadrature.log_partition(energy, obs), log_z.expand(4), **tight)
    torch.testing.assert_close(quadrature.entropy(energy, obs), entropy.expand(4), **tight)
    mean = obs @ module.gain.T
    torch.testing.assert_close(quadrature.expectation(energy, obs, lambda y: y), mean, **tight)
    square = quadrature.expectation(energy, obs, lambda y: y.square())
    variance = torch.linalg.inv(module.cholesky @ module.cholesky.T).diagonal()
    torch.testing.assert_close(square - mean.square(), variance.expand(4, -1), **tight)
    nll = quadrature.nll(energy, obs, mean + 0.1)
    torch.testing.assert_close(nll, energy(obs, (mean + 0.1)[:, None])[:, 0] + log_z, **tight)
    # Gradients: ∂(-log det L)/∂L = -L⁻ᵀ, and nothing depends on the gain.
    for result in (quadrature.log_partition(energy, obs), quadrature.entropy(energy, obs)):
        gain, cholesky = torch.autograd.grad(result.mean(), [module.gain, module.cholesky])
        torch.testing.assert_close(cholesky, -torch.linalg.inv(module.cholesky).T, **tight)
        torch.testing.assert_close(gain, torch.zeros_like(gain), **tight)


RESULTS: dict[str, Callable[[Quadrature, EnergyModel, Tensor, Tensor], Tensor]] = {
    "log_partition": lambda q, energy, obs, actions: q.log_partition(energy, obs),
    "nll": lambda q, energy, obs, actions: q.nll(energy, obs, actions),
    "entropy": lambda q, energy, obs, actions: q.entropy(energy, obs),
    "expectation": lambda q, energy, obs, actions: q.expectation(energy, obs, lambda y: y)[:, 0],
    "conditional_entropy": lambda q, energy, obs, actions: conditional_entropy(energy, obs, q),
    "marginal_entropy": lambda q, energy, obs, actions: marginal_entropy(energy, obs, q),
    "mutual_information": lambda q, energy, obs, actions: model_mutual_information(energy, obs, q),
}


def flat_gradient(result: Tensor, energy: EnergyModel) -> Tensor:
    gradients = torch.autograd.grad(result.sum(), list(energy.parameters()), materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("name", RESULTS)
def test_gradients_against_finite_differences(name, generator):
    energy, quadrature = smooth_energy(generator), Quadrature((-3.0,), (3.0,), points_per_dim=64)
    obs, actions = some_obs(generator), some_obs(generator)[:, :1]
    slopes = []
    for parameter in energy.parameters():
        values = parameter.data.view(-1)
        for k in range(len(values)):
            ends = []
            for step in (1e-5, -2e-5):
                values[k] += step
                ends.append(RESULTS[name](quadrature, energy, obs, actions).sum().item())
            values[k] += 1e-5
            slopes.append((ends[0] - ends[1]) / 2e-5)
    exact = flat_gradient(RESULTS[name](quadrature, energy, obs, actions), energy)
    torch.testing.assert_close(exact, torch.tensor(slopes).double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("dims", [1, 2])
def test_chunks_change_neither_value_nor_gradient(name, dims, generator, monkeypatch):
    energy = smooth_energy(generator, act_dim=dims)
    quadrature = Quadrature((-3.0,) * dims, (3.0,) * dims, points_per_dim=32)
    obs, actions = some_obs(generator), some_obs(generator)[:, :dims]
    whole = RESULTS[name](quadrature, energy, obs, actions)
    gradient = flat_gradient(whole, energy)
    monkeypatch.setattr(information, "_ROWS_AT_ONCE", 36)
    chunked = RESULTS[name](quadrature, energy, obs, actions)
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(flat_gradient(chunked, energy), gradient)


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shape_and_dtype_are_kept_and_inputs_are_not_modified(name, dtype, generator):
    energy = MLPEnergy(2, 1, width=16, init="torch", generator=generator).to(dtype)
    obs, actions = some_obs(generator).to(dtype), some_obs(generator)[:, :1].to(dtype)
    copies = obs.clone(), actions.clone()
    result = RESULTS[name](Quadrature((-1.1,), (1.1,)), energy, obs, actions)
    assert result.dtype == dtype
    assert result.shape == ((4,) if name in ("log_partition", "nll", "entropy", "expectation") else ())
    assert torch.isfinite(result).all()
    assert torch.equal(obs, copies[0])
    assert torch.equal(actions, copies[1])


def test_energies_of_ten_thousand_do_not_overflow(generator):
    for offset in (1e4, -1e4):
        energy = Penalty(lambda obs, y, offset=offset: offset + y[..., 0] ** 2, obs_dim=2, act_dim=1)
        for result in RESULTS.values():
            value = result(LINE, energy, some_obs(generator).float(), torch.zeros(4, 1))
            assert torch.isfinite(value).all()


def test_forbidden_actions_have_no_weight_and_finite_gradients(generator):
    wall = lambda obs, y: torch.where(y[..., 0] > 0.0, math.inf, 0.0).double()  # noqa: E731
    energy = smooth_energy(generator) + wall
    obs = some_obs(generator)
    half = Quadrature((-6.0,), (0.0,), points_per_dim=64)
    for name, result in RESULTS.items():
        value = result(LINE, energy, obs, -torch.ones(4, 1).double())
        reference = result(half, energy, obs, -torch.ones(4, 1).double())
        torch.testing.assert_close(value, reference, rtol=1e-9, atol=1e-9, msg=name)
        assert torch.isfinite(flat_gradient(value, energy)).all()


def test_a_marginal_energy_has_one_entropy(generator):
    energy = MarginalEnergy(act_dim=1, width=8, generator=generator)
    entropies = Quadrature((-1.1,), (1.1,)).entropy(energy, some_obs(generator).float())
    torch.testing.assert_close(entropies, entropies[:1].expand(4))
    assert entropies[0] <= math.log(2.2) + 1e-5  # the uniform density has the most
    assert model_mutual_information(energy, some_obs(generator).float(), LINE).abs() < 1e-5


@pytest.mark.parametrize("dims", [1, 2])
def test_a_density_narrower_than_the_nodes_is_reported(dims):
    quadrature = Quadrature((-1.1,) * dims, (1.1,) * dims, points_per_dim=64)

    def log_z(width: float) -> Tensor:
        def ridge(obs: Tensor, y: Tensor) -> Tensor:  # narrow in the last dimension only
            return (y[..., -1] - 0.02) ** 2 / (2 * width**2)

        return quadrature.log_partition(Penalty(ridge, 1, dims), torch.zeros(1, 1).double())

    with pytest.warns(CoarseQuadratureWarning, match=f"dimension {dims - 1} "):
        log_z(0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = math.log(0.05 * math.sqrt(2 * math.pi)) + (dims - 1) * math.log(2.2)
        assert log_z(0.05).item() == pytest.approx(expected, abs=1e-5)


# Entropy and mutual information of a model


def test_all_information_from_one_pass() -> None:
    quadrature = Quadrature((-1.1,) * 2, (1.1,) * 2, points_per_dim=64)
    obs = torch.tensor([[0.5], [-0.3], [0.0], [0.1]], dtype=torch.float64)

    def valley(obs: Tensor, y: Tensor) -> Tensor:  # the third is too narrow in one dimension
        centre = obs[:, :1]
        width = torch.where(centre == 0.0, 0.001, 0.1)
        return (y[..., 0] - centre) ** 2 / (2 * width**2) + y[..., 1] ** 2

    energy = Penalty(valley, 1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entropy, information, coarse = model_information(energy, obs, quadrature)
    assert coarse == 0.25
    with pytest.warns(CoarseQuadratureWarning, match="dimension 0 "):
        assert entropy == pytest.approx(float(conditional_entropy(energy, obs, quadrature)))
        assert information == pytest.approx(float(model_mutual_information(energy, obs, quadrature)))
    assert model_information(energy, obs[[0, 1, 3]], quadrature)[2] == 0


def test_mutual_information_of_gaussians_is_the_closed_form():
    # x at the middle of 400 equally likely parts of N(0, 1), y = ρ x + √(1-ρ²) ω; the tails cost about 1/400.
    rho, count = 0.8, 400
    levels = (torch.arange(count).double() + 0.5) / count
    obs = math.sqrt(2) * torch.erfinv(2 * levels - 1)[:, None]
    energy = Penalty(lambda x, y: (y[..., 0] - rho * x) ** 2 / (2 * (1 - rho**2)), obs_dim=1, act_dim=1)
    half = math.log(2 * math.pi * math.e) / 2
    assert marginal_entropy(energy, obs, LINE).item() == pytest.approx(half, abs=0.01)
    conditional = half + math.log(1 - rho**2) / 2
    assert conditional_entropy(energy, obs, LINE).item() == pytest.approx(conditional, abs=1e-9)
    information_value = model_mutual_information(energy, obs, LINE).item()
    assert information_value == pytest.approx(-math.log(1 - rho**2) / 2, abs=0.01)


def test_mutual_information_is_within_zero_and_log_n(generator):
    # Two observations whose densities do not overlap carry log 2, equal ones nothing, others something between.
    energy = Penalty(lambda x, y: 50 * (y[..., 0] - x[:, :1]) ** 2, obs_dim=2, act_dim=1)
    apart = torch.tensor([[-3.0, 0.0], [3.0, 0.0]]).double()
    assert model_mutual_information(energy, apart, LINE).item() == pytest.approx(math.log(2), abs=1e-9)
    assert model_mutual_information(energy, apart[[0, 0]], LINE).item() == pytest.approx(0, abs=1e-9)
    for _ in range(20):
        value = model_mutual_information(smooth_energy(generator), some_obs(generator), LINE).item()
        assert -1e-9 < value < math.log(4)


# Importance sampling


def test_importance_sampled_entropy_against_quadrature(generator):
    energy, samples, runs = smooth_energy(generator), 1000, 400
    obs = some_obs(generator, batch=1)
    nodes, log_weights = LINE.nodes(obs)
    log_normal = lambda y: -(y**2) / 2 - math.log(2 * math.pi) / 2  # noqa: E731
    with torch.no_grad():
        exact = LINE.entropy(energy, obs).item()
        # To second order in the errors of the two sums, with w = p/q: bias = -(½ Var w + Cov(w, w (E - E_p E))) / M.
        log_p, energies = LINE.log_density(energy, obs)[0], LINE.energies(energy, obs)[0]
        mean = (torch.exp(log_p + log_weights) * energies).sum()
        ratio = torch.exp(2 * log_p - log_normal(nodes[:, 0]) + log_weights)  # p²/q dy
        bias = -((ratio.sum() - 1) / 2 + (ratio * (energies - mean)).sum()).item() / samples
        actions = torch.randn(runs, samples, 1, generator=generator, dtype=torch.float64)
        sampled = energy(obs.expand(runs, -1), actions)
        log_q = log_normal(actions[..., 0])

    def z_of(estimates: Tensor) -> float:
        return abs(estimates.mean().item() - exact - bias) / (estimates.std().item() / math.sqrt(runs))

    assert z_of(entropy_importance(sampled, log_q)) < 5.5  # once in ten million runs
    assert z_of(entropy_importance(sampled, torch.zeros_like(log_q))) > 11  # planted: no weights
    assert entropy_importance(sampled, log_q).shape == (runs,)


def test_importance_sampled_marginal_entropy_and_information_against_quadrature(generator):
    """Samples of N(0, 1.5²) for a mixture of four Gaussians of width ½.

    The bias is about ρ/M and the noise of the mean √(ρ/(M R)), with ρ = E_q[(p/q)²] < 4 here: their ratio is below
    √(ρ R/M) = ¼, and the limit of 5.5 has room for 1.
    """
    energy = Penalty(lambda x, y: 2 * (y[..., 0] - x) ** 2, obs_dim=1, act_dim=1)
    obs, samples, runs = torch.tensor([[-1.0], [-0.3], [0.4], [1.2]]).double(), 4000, 60
    exact = torch.stack([marginal_entropy(energy, obs, LINE), model_mutual_information(energy, obs, LINE)])

    def z_of(weighted: bool) -> float:
        estimates = []
        for _ in range(runs):
            actions = 1.5 * torch.randn(samples, 1, generator=generator, dtype=torch.float64)
            log_q = -((actions[:, 0] / 1.5) ** 2) / 2 - math.log(1.5 * math.sqrt(2 * math.pi))
            log_q = log_q if weighted else torch.full_like(log_q, -math.log(12))
            energies = energy(obs, actions.expand(4, -1, -1))
            marginal = marginal_entropy_importance(energies, log_q)
            information_value = marginal - entropy_importance(energies, log_q.expand(4, -1)).mean()
            assert 0 < information_value < math.log(4)
            estimates.append(torch.stack([marginal, information_value]))
        values = torch.stack(estimates)
        return ((values.mean(0) - exact).abs() / (values.std(0) / math.sqrt(runs))).max().item()

    assert z_of(weighted=True) < 6.5
    assert z_of(weighted=False) > 13  # planted: no weights


def test_importance_sampled_entropy_contract(generator):
    energies = torch.randn(3, 6, generator=generator).requires_grad_()
    log_q = torch.randn(3, 6, generator=generator)
    (gradient,) = torch.autograd.grad(entropy_importance(energies, log_q).sum(), energies)
    assert gradient.abs().min() > 0
    assert entropy_importance(energies, log_q).dtype == torch.float32
    assert marginal_entropy_importance(energies, log_q[0]).shape == ()
    shifted = entropy_importance(energies + 1e4, log_q)
    torch.testing.assert_close(shifted, entropy_importance(energies, log_q), atol=1e-2, rtol=0)


# The InfoNCE bound


def critic_energies(count: int, negatives: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Energies -log p(y|x)/p(y), the best critic, of pairs of 20 correlated Gaussians with I = 4 nats."""
    rho_squared = 1 - math.exp(-2 * 4 / 20)  # I = -½·20·log(1 - ρ²)
    rho = math.sqrt(rho_squared)

    def energy(x: Tensor, y: Tensor) -> Tensor:
        dot = torch.einsum("bd,bmd->bm", x, y)
        squares = x.square().sum(-1, keepdim=True) + y.square().sum(-1)
        return -4.0 - (2 * rho * dot - rho_squared * squares) / (2 * (1 - rho_squared))

    x = torch.randn(count, 20, generator=generator)
    y = rho * x + math.sqrt(1 - rho_squared) * torch.randn(count, 20, generator=generator)
    marginal = torch.randn(count, negatives, 20, generator=generator)
    return energy(x, y[:, None])[:, 0], energy(x, marginal)


@pytest.mark.filterwarnings("ignore::cebm.information.SaturatedBoundWarning")
@pytest.mark.parametrize(
    ("negatives", "issued", "reference", "reference_error"),
    [(7, 1.81, 1.8085, 0.0004), (63, 3.07, 3.0676, 0.0014), (255, 3.56, 3.543, 0.0016), (1023, 3.83, 3.801, 0.0016)],
)
def test_info_nce_of_correlated_gaussians(negatives, issued, reference, reference_error, generator):
    """`issued` are the values of the issue, known to 0.034; `reference` are ours, from up to 4·10⁶ pairs with another
    program (energies drawn through |x|² and x·y, and log p(y|x)/p(y) - 4 as control variate)."""
    parts = []
    for _ in range(4):
        parts.append(critic_energies(min(2**14, 2**20 // (negatives + 1)), negatives, generator))
    positive = torch.cat([part[0] for part in parts])
    negative = torch.cat([part[1] for part in parts])

    def z_of(bound: MutualInformationBound) -> float:
        return abs(bound.nats - reference) / math.hypot(bound.standard_error, reference_error)

    bound = info_nce_bound(positive, negative)
    assert z_of(bound) < 4.5
    assert abs(bound.nats - issued) < 4.5 * math.hypot(bound.standard_error, 0.034)
    assert bound.standard_error < 0.04
    assert bound.nats < min(4.0 + 4.5 * bound.standard_error, bound.ceiling)
    assert bound.ceiling == pytest.approx(math.log(negatives + 1))
    assert bound.saturated == (negatives == 7)
    if negatives < 1000:  # planted: the positive missing from the denominator; at M = 1023 it hardly counts
        losses = positive + torch.logsumexp(-negative, dim=1)
        error = (losses.std() / math.sqrt(len(losses))).item()
        assert math.log(negatives) - losses.mean().item() - reference > 9 * error
    if negatives == 7:  # planted: log M in the place of log(M+1)
        assert abs(math.log(7 / 8) + bound.nats - reference) > 4.5 * math.hypot(bound.standard_error, reference_error)


def test_saturation_is_a_loss_below_log_2_and_warns():
    def bound_of(loss: float, negatives: int) -> MutualInformationBound:
        negative = torch.full((3, negatives), math.log(negatives / math.expm1(loss)))
        return info_nce_bound(torch.zeros(3), negative)

    for loss, negatives in ((0.68, 100), (0.01, 3), (0.5, 2), (0.3, 1)):
        with pytest.warns(SaturatedBoundWarning, match=f" {negatives} negatives"):
            bound = bound_of(loss, negatives)
        assert bound.saturated
        assert bound.nats == pytest.approx(math.log(negatives + 1) - loss, abs=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss, negatives in ((0.71, 100), (math.log(4), 3), (math.log(2), 1), (0.6, 2), (20.0, 8)):
            assert not bound_of(loss, negatives).saturated  # a critic that knows nothing never saturates


def test_bound_of_one_example_has_no_standard_error():
    bound = info_nce_bound(torch.zeros(1), torch.zeros(1, 3))
    assert math.isnan(bound.standard_error)
    assert bound.nats == pytest.approx(0, abs=1e-6)


# Bad input, as a user without shape checking sees it


@pytest.mark.parametrize(
    ("argument", "low", "high", "points"),
    [
        ("low", (), (), 64),
        ("low", (0.0,) * 3, (1.0,) * 3, 64),
        ("low", (1.0,), (1.0,), 64),
        ("low", (math.nan,), (1.0,), 64),
        ("low", (0.0,), (math.inf,), 64),
        ("high", (0.0,), (1.0, 1.0), 64),
        ("points_per_dim", (0.0,), (1.0,), 0),
        ("points_per_dim", (0.0,), (1.0,), 63),
        ("points_per_dim", (0.0,), (1.0,), -8),
    ],
)
def test_bad_quadratures_are_named(argument, low, high, points):
    with pytest.raises(ValueError, match=f"^{argument}: "):
        Quadrature(low, high, points)


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_energies_and_actions_are_named(generator):
    energy, obs = smooth_energy(generator), some_obs(generator)
    with pytest.raises(ValueError, match=r"^energy: act_dim is 1"):
        PLANE.entropy(energy, obs)
    with pytest.raises(ValueError, match=r"^obs: "):
        LINE.entropy(energy, obs[:0])
    for actions, message in (
        (obs, "expected shape"),
        (obs[:2, :1], "expected shape"),
        (obs[:, :1] + 9, "example 0"),
        (obs[:, :1] * math.nan, "example 0"),
    ):
        with pytest.raises(ValueError, match=f"^actions: {message}"):
            LINE.nll(energy, obs, actions)
    for value in (math.nan, math.inf, -math.inf):
        row = torch.tensor([[0.0], [value], [0.0], [0.0]]).double()
        broken = Penalty(lambda x, y, row=row: row.expand(y.shape[:2]), obs_dim=2, act_dim=1)
        with pytest.raises(ValueError, match=r"^energy: .* observation 1$"):
            LINE.log_partition(broken, obs)


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_samples_are_named():
    zeros, nan = torch.zeros(2, 3), torch.full((2, 3), math.nan)
    for energies in (zeros[0], zeros[:0], zeros[:, :0], nan):
        with pytest.raises(ValueError, match=r"^energies: "):
            entropy_importance(energies, zeros)
    for log_q in (zeros[0], zeros[:, :2], nan):
        with pytest.raises(ValueError, match=r"^log_q: "):
            entropy_importance(zeros, log_q)
        with pytest.raises(ValueError, match=r"^log_q: "):
            marginal_entropy_importance(zeros, log_q[..., :2].squeeze())
    with pytest.raises(ValueError, match=r"^negative: "):
        info_nce_bound(zeros[:, 0], nan)
    with pytest.raises(ValueError, match=r"^negative: "):
        info_nce_bound(zeros[:, 0], zeros[:, :0])
    with pytest.raises(ValueError, match=r"^positive, negative: "):
        info_nce_bound(zeros[:, 0] + math.inf, zeros + math.inf)


# ---------------------------------------------------------------------------------------------- the energy score


@pytest.mark.parametrize("count", [2, 5])
def test_the_energy_score_is_proper_and_unbiased(count: int, generator: torch.Generator) -> None:
    """Of N(0, 1) against itself E|Y - y| = 2/sqrt(pi), so the score is 1/sqrt(pi) for any number of draws; and the
    score of a policy with another mean or deviation is larger, that of the point at the mean too."""
    n = 40_000
    y = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    draws = torch.randn(n, count, 1, generator=generator, dtype=torch.float64)

    def z(scores: Tensor, expected: float) -> float:
        return float((scores.mean() - expected) / scores.std() * math.sqrt(n))

    honest = energy_score(draws, y)
    assert abs(z(honest, 1 / math.sqrt(math.pi))) < 4.5
    for other in (draws + 0.5, 2 * draws, 0.5 * draws, 0 * draws):
        assert z(energy_score(other, y) - honest, 0.0) > 4.5
    # The planted fault: pairs of a draw with itself count, as they do in the score's plain double sum.
    apart = (draws.unsqueeze(1) - draws.unsqueeze(2)).norm(dim=-1).mean((1, 2))
    biased = (draws - y.unsqueeze(1)).norm(dim=-1).mean(1) - apart / 2
    assert abs(z(biased, 1 / math.sqrt(math.pi))) > 4.5


def test_the_energy_score_by_hand() -> None:
    draws = torch.tensor([[[0.0, 0.0], [3.0, 4.0]]])
    assert energy_score(draws, torch.tensor([[0.0, 0.0]])).tolist() == [2.5 - 2.5]
    assert energy_score(draws, torch.tensor([[6.0, 8.0]])).tolist() == [7.5 - 2.5]
    with pytest.raises(ValueError, match="draws must be two or more"):
        energy_score(draws[:, :1], torch.zeros(1, 2))


def test_the_models_information_is_no_bound_of_the_datas() -> None:
    """y = x/2 + √3/2 noise has ½ log 4/3 = 0.14 nats. What InfoNCE with marginal negatives learns, log p(y|x)/p(y),
    read as an energy, is another Gaussian, whose information is higher; the name and the docstring must say so."""
    rho = 0.5
    obs = torch.linspace(-4, 4, 201, dtype=torch.float64).unsqueeze(1)
    # The energy of log p(y|x) − log p(y), up to a constant of x.
    ratio = Penalty(
        lambda x, y: 0.5 * (y - rho * x.unsqueeze(1)).square().sum(-1) / (1 - rho**2) - 0.5 * y.square().sum(-1), 1, 1
    )
    weights = torch.exp(-0.5 * obs[:, 0] ** 2)
    drawn = obs[torch.multinomial(weights, 400, replacement=True)]
    truth = -0.5 * math.log(1 - rho**2)
    wide = Quadrature((-20.0,), (20.0,), 512)
    assert float(model_mutual_information(ratio, drawn, wide)) > 1.3 * truth
    assert "no bound" in (model_mutual_information.__doc__ or "")
    assert not hasattr(information, "mutual_information"), "the old name reads like the data's"
