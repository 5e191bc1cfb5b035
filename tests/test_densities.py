"""The explicit baselines: energies like any other, with a known normaliser, a known answer and known samples."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cebm.energies import (
    CorrelatedMixtureEnergy,
    EnergyModel,
    MixtureDensityEnergy,
    MLPEnergy,
    NearestEnergy,
    RegressionEnergy,
    TiltedEnergy,
    TwoStepEnergy,
)
from cebm.energies.base import Context, leaves, mapped
from cebm.information import Quadrature
from cebm.losses import info_nce

OBS, ACT = 3, 2


def stored(generator: torch.Generator, pairs: int = 40) -> NearestEnergy:
    """Random pairs, remembered."""
    energy = NearestEnergy(OBS, ACT, pairs)
    energy.remember(torch.randn(pairs, OBS, generator=generator), torch.randn(pairs, ACT, generator=generator))
    return energy


CASES: dict[str, Callable[[torch.Generator], EnergyModel]] = {
    "regression": lambda g: RegressionEnergy(OBS, ACT, 16, generator=g),
    "regression, linear": lambda g: RegressionEnergy(OBS, ACT, 16, 0, generator=g),
    "regression, normal": lambda g: RegressionEnergy(OBS, ACT, 16, init="normal", generator=g),
    "mixture": lambda g: MixtureDensityEnergy(OBS, ACT, 64, generator=g),
    "mixture, one component": lambda g: MixtureDensityEnergy(OBS, ACT, 64, components=1, generator=g),
    "mixture, deep": lambda g: MixtureDensityEnergy(OBS, ACT, 64, 4, 3, generator=g),
    "mixture, floored": lambda g: MixtureDensityEnergy(OBS, ACT, 64, floor=0.1, generator=g),
    "correlated": lambda g: CorrelatedMixtureEnergy(OBS, ACT, 64, components=3, generator=g),
    "correlated, floored": lambda g: CorrelatedMixtureEnergy(OBS, ACT, 64, floor=0.1, generator=g),
    "nearest": lambda g: stored(g),
    "two steps": lambda g: TwoStepEnergy(OBS, ACT, 16, generator=g),
}
every_energy = pytest.mark.parametrize("name", CASES)


def make(
    name: str, generator: torch.Generator, batch: int = 3, samples: int = 5, dtype: torch.dtype = torch.float64
) -> tuple[EnergyModel, Tensor, Tensor]:
    energy = CASES[name](generator).to(dtype)
    obs = torch.randn(batch, OBS, generator=generator, dtype=dtype)
    return energy, obs, torch.randn(batch, samples, ACT, generator=generator, dtype=dtype)


def mixture(
    weights: list[float], means: list[list[float]], stds: list[list[float]], dtype: torch.dtype = torch.float64
) -> tuple[MixtureDensityEnergy, Context]:
    """The mixture with these parameters whatever the observation, and a context of it."""
    parts = [torch.tensor(part, dtype=dtype) for part in (weights, means, stds)]
    energy = MixtureDensityEnergy(1, parts[1].shape[1], 4, 0, len(weights)).to(dtype)
    # The inverse of log σ = 4.5 tanh(raw / 4.5) − 2.5.
    raw = 4.5 * torch.atanh((parts[2].log() + 2.5) / 4.5)
    with torch.no_grad():
        for parameter in energy.parameters():
            parameter.zero_()
        energy.weighing.layers[-1].bias.copy_(parts[0].log())
        energy.placing.layers[-1].bias.copy_(torch.cat([parts[1].flatten(), raw.flatten()]))
    return energy, mapped(Tensor.detach, energy.encode(torch.zeros(1, 1, dtype=dtype)))


def repeated(context: Context, rows: int) -> Context:
    """The context of one observation for so many."""
    return mapped(lambda part: part.expand(rows, *part.shape[1:]), context)


# -------------------------------------------------------------------------------------------- the contract


@every_energy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grad", [True, False])
def test_shapes_and_dtypes(name: str, dtype: torch.dtype, grad: bool, generator: torch.Generator) -> None:
    energy, obs, actions = make(name, generator, dtype=dtype)
    with torch.set_grad_enabled(grad):
        context = energy.encode(obs)
        energies, gradients = energy.energies_and_gradients(context, actions)
        best = energy.best(context)
        drawn = energy.propose(context, 7, generator) if energy.proposes else best.unsqueeze(1).expand(-1, 7, -1)
    parts = list(leaves(context))
    assert all(part.shape[0] == 3 for part in parts)
    assert energies.shape == (3, 5) and gradients.shape == (3, 5, ACT)
    assert best.shape == (3, ACT) and drawn.shape == (3, 7, ACT)
    for tensor in (*parts, energies, gradients, best, drawn):
        assert tensor.dtype == dtype and torch.isfinite(tensor).all()
    if not grad:
        assert not energies.requires_grad and not gradients.requires_grad


@every_energy
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_gradients_are_those_of_autograd(name: str, mode: type, generator: torch.Generator) -> None:
    energy, obs, actions = make(name, generator)
    leaf = actions.clone().requires_grad_()
    expected = energy(obs, leaf)
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    with mode():
        energies, gradients = energy.energies_and_gradients(energy.encode(obs), actions.clone())
    torch.testing.assert_close(energies.detach(), expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients.detach(), gradient, rtol=1e-10, atol=1e-12)


@every_energy
def test_gradients_are_those_of_central_differences(name: str, generator: torch.Generator) -> None:
    """Independent of autograd, which the mixture uses itself."""
    energy, obs, actions = make(name, generator)
    with torch.no_grad():
        context = energy.encode(obs)
        gradients = energy.energies_and_gradients(context, actions)[1]
        for dim in range(ACT):
            step = torch.zeros(ACT, dtype=torch.float64)
            step[dim] = 1e-5
            difference = (energy.energies(context, actions + step) - energy.energies(context, actions - step)) / 2e-5
            # The mixture's third derivative over σ³, with σ above e⁻⁴ for these weights, leaves 1e-10 · e¹².
            torch.testing.assert_close(gradients[..., dim], difference, rtol=1e-4, atol=1e-4)


@every_energy
def test_a_loss_on_the_gradient_reaches_the_parameters(name: str, generator: torch.Generator) -> None:
    energy, obs, actions = make(name, generator)
    energies, gradients = energy.energies_and_gradients(energy.encode(obs), actions.requires_grad_())
    (energies.square().sum() + gradients.square().sum()).backward()
    for parameter_name, parameter in energy.named_parameters():
        if name == "mixture, one component" and parameter_name.startswith("weighing"):
            continue  # the weight of one component is 1
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, parameter_name


@every_energy
def test_observations_and_samples_do_not_mix(name: str, generator: torch.Generator) -> None:
    energy, obs, actions = make(name, generator, 4, 6)
    rows, columns = torch.randperm(4, generator=generator), torch.randperm(6, generator=generator)
    energies = energy(obs, actions)
    torch.testing.assert_close(energy(obs[rows], actions[rows][:, columns]), energies[rows][:, columns])
    assert not torch.allclose(energies[0], energy(obs[1:2], actions[:1])[0])


@every_energy
def test_the_generator_decides_weights_and_draws(name: str, generator: torch.Generator) -> None:
    state = generator.get_state()
    global_state = torch.get_rng_state()

    def build() -> tuple[EnergyModel, Tensor]:
        energy, obs, _ = make(name, generator)
        context = energy.encode(obs)
        return energy, energy.propose(context, 9, generator) if energy.proposes else energy.best(context)

    first, drawn = build()
    generator.set_state(state)
    second, again = build()
    assert torch.equal(drawn, again)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), global_state)


@every_energy
def test_wrong_shapes_are_named(name: str, generator: torch.Generator, unchecked_shapes: None) -> None:
    energy, obs, actions = make(name, generator)
    context = energy.encode(obs)
    with pytest.raises(ValueError, match=r"obs must be \[batch, 3\], got \(3, 2\)"):
        energy.encode(obs[:, :2])
    for call in (energy.energies, energy.energies_and_gradients):
        with pytest.raises(ValueError, match=r"actions must be \[3, samples, 2\], got \(3, 5, 1\)"):
            call(context, actions[..., :1])
        with pytest.raises(ValueError, match=r"actions must be \[3, samples, 2\], got \(2, 5, 2\)"):
            call(context, actions[:2])
        with pytest.raises(ValueError, match="actions must not be empty"):
            call(context, actions[:, :0])
        with pytest.raises(ValueError, match="context must be"):
            call(mapped(lambda part: part[:, :-1], context), actions)


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="components must be at least 1, got 0"):
        MixtureDensityEnergy(OBS, ACT, components=0)
    for energy in (RegressionEnergy, MixtureDensityEnergy):
        with pytest.raises(ValueError, match="width must be at least 1, got 0"):
            energy(OBS, ACT, width=0)
        with pytest.raises(ValueError, match="hidden_layers must be at least 0, got -1"):
            energy(OBS, ACT, hidden_layers=-1)


@pytest.mark.parametrize("floor", [-0.1, math.nan, math.inf])
def test_a_bad_floor_is_named(floor: float, unchecked_shapes: None) -> None:
    with pytest.raises(ValueError, match="floor must be at least 0 and finite"):
        MixtureDensityEnergy(OBS, ACT, floor=floor)


def test_they_compose_like_any_energy(generator: torch.Generator) -> None:
    (one, obs, actions), (other, _, _) = make("regression", generator), make("mixture", generator)
    together: EnergyModel = one + 0.5 * other
    torch.testing.assert_close(together(obs, actions), one(obs, actions) + 0.5 * other(obs, actions))


# -------------------------------------------------------------------------------------------- regression


def test_the_regression_energy_is_half_the_squared_error(generator: torch.Generator) -> None:
    energy, obs, actions = make("regression", generator)
    context = energy.encode(obs)
    by_hand = [
        [sum((y - f) ** 2 for y, f in zip(row, mean, strict=True)) / 2 for row in rows]
        for rows, mean in zip(actions.tolist(), context.tolist(), strict=True)
    ]
    torch.testing.assert_close(energy.energies(context, actions), torch.tensor(by_hand, dtype=torch.float64))
    assert torch.equal(energy.best(context), context)
    assert not energy.proposes
    with pytest.raises(TypeError, match="RegressionEnergy has no proposal to draw from"):
        energy.propose(context, 4, generator)


def test_minimising_the_regression_energy_is_least_squares(generator: torch.Generator) -> None:
    """A linear network against the normal equations. The curvature's eigenvalues are those of the inputs' second
    moments, so the steps that gradient descent needs are known beforehand."""
    inputs = torch.randn(50, OBS, generator=generator, dtype=torch.float64)
    targets = torch.randn(50, ACT, generator=generator, dtype=torch.float64)
    energy = RegressionEnergy(OBS, ACT, 8, 0, generator=generator).double()
    design = torch.cat([inputs, torch.ones(50, 1, dtype=torch.float64)], 1)
    curvature = torch.linalg.eigvalsh(design.T @ design / 50)
    rate = 1 / curvature[-1]
    steps = math.ceil(30 * float(curvature[-1] / curvature[0]))  # (1 − 1/κ)^(30κ) < e⁻³⁰
    optimiser = torch.optim.SGD(energy.parameters(), float(rate))
    for _ in range(steps):
        optimiser.zero_grad()
        energy(inputs, targets.unsqueeze(1)).mean().backward()
        optimiser.step()
    expected = design @ torch.linalg.lstsq(design, targets).solution
    torch.testing.assert_close(energy.best(energy.encode(inputs)).detach(), expected, rtol=0, atol=1e-9)


# -------------------------------------------------------------------------------------------- mixture densities


def test_the_mixture_against_torch_distributions(generator: torch.Generator) -> None:
    from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    means = torch.tensor([[0.0, 1.0], [-1.0, 0.5], [0.3, -0.7]], dtype=torch.float64)
    stds = torch.tensor([[0.1, 0.2], [0.05, 0.7], [1.0, 0.02]], dtype=torch.float64)
    energy, context = mixture(weights.tolist(), means.tolist(), stds.tolist())
    actions = torch.randn(1, 40, 2, generator=generator, dtype=torch.float64)
    expected = MixtureSameFamily(Categorical(weights), Independent(Normal(means, stds), 1)).log_prob(actions)
    torch.testing.assert_close(energy.energies(context, actions), -expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("floor", [0.0, 0.05])
@pytest.mark.parametrize("obs_dim", [OBS, 0])
@pytest.mark.parametrize("dims", [1, 2])
def test_the_density_integrates_to_one(dims: int, obs_dim: int, floor: float, generator: torch.Generator) -> None:
    """For random weights of torch's size: means within ±3, σ around e⁻²·⁵. A forgotten 2π gives log Z = 0.9."""
    energy = MixtureDensityEnergy(obs_dim, dims, 16, floor=floor, generator=generator).double()
    obs = 2 * torch.rand(4, OBS, generator=generator, dtype=torch.float64) - 1
    quadrature = Quadrature((-4.0,) * dims, (4.0,) * dims, 1024 if dims == 1 else 512)
    with torch.no_grad():
        assert quadrature.log_partition(energy, obs).abs().max() < 1e-6


def test_the_standard_deviations_are_bounded(generator: torch.Generator) -> None:
    """However far the outputs go, e⁻⁷ ≤ σ ≤ e², so no demonstration can make the loss unbounded."""
    for floor in (0.0, 0.05):
        energy = MixtureDensityEnergy(OBS, ACT, 16, components=3, floor=floor, generator=generator).double()
        with torch.no_grad():
            for parameter in energy.parameters():
                parameter.zero_()
            for value, log_std in ((-1e6, -7.0), (0.0, -2.5), (1e6, 2.0)):
                energy.placing.layers[-1].bias[3 * ACT :] = value
                at_mean = energy(torch.zeros(1, OBS, dtype=torch.float64), torch.zeros(1, 1, ACT, dtype=torch.float64))
                std = math.hypot(math.exp(log_std), floor)
                expected = ACT * (math.log(std) + 0.5 * math.log(2 * math.pi))
                torch.testing.assert_close(at_mean, torch.full((1, 1), expected, dtype=torch.float64))


def test_best_has_the_most_probability_around_it() -> None:
    """Neither the heaviest component (too wide) wins nor the highest (a needle with little weight); two lighter
    components in one place beat a heavier one alone."""
    energy, context = mixture([0.6, 0.35, 0.05], [[0.0], [1.0], [-1.0]], [[1.0], [0.1], [0.002]])
    heights = energy.energies(context, torch.tensor([[[0.0], [1.0], [-1.0]]], dtype=torch.float64))[0]
    assert heights.argmin() == 2  # the needle
    torch.testing.assert_close(energy.best(context), torch.tensor([[1.0]], dtype=torch.float64))
    energy, context = mixture([0.3, 0.3, 0.4], [[0.5], [0.51], [-0.5]], [[0.01], [0.01], [0.01]])
    assert energy.best(context).item() > 0.4


def test_best_is_the_best_mean_of_the_density_smoothed(generator: torch.Generator) -> None:
    """Against a direct average of the density over N(mean, 0.05²), by quadrature."""
    offsets = torch.linspace(-0.4, 0.4, 801, dtype=torch.float64)
    kernel = torch.exp(-0.5 * (offsets / 0.05).square())
    for _ in range(20):
        weights = torch.rand(5, generator=generator, dtype=torch.float64)
        means = torch.rand(5, 1, generator=generator, dtype=torch.float64)
        stds = 0.02 + 0.2 * torch.rand(5, 1, generator=generator, dtype=torch.float64)
        energy, context = mixture((weights / weights.sum()).tolist(), means.tolist(), stds.tolist())
        with torch.no_grad():
            density = (-energy.energies(context, (means + offsets).reshape(1, -1, 1))).exp().view(5, -1)
        smoothed = density @ kernel
        chosen = (means[:, 0] - energy.best(context)[0]).abs().argmin()
        assert smoothed[chosen] >= smoothed.max() * (1 - 1e-6)


def test_best_is_chosen_per_observation(generator: torch.Generator) -> None:
    energy = MixtureDensityEnergy(OBS, ACT, 16, generator=generator).double()
    obs = torch.randn(20, OBS, generator=generator, dtype=torch.float64)
    together = energy.best(energy.encode(obs))
    alone = torch.cat([energy.best(energy.encode(row)) for row in obs.split(1)])
    torch.testing.assert_close(together, alone)


def moment_scores(drawn: Tensor, weights: Tensor, means: Tensor, stds: Tensor) -> list[float]:
    """z-scores of the component counts and of the within-component means and variances of well separated draws."""
    n = drawn.shape[0]
    nearest = ((drawn.unsqueeze(1) - means) / stds).square().sum(-1).argmin(1)
    scores = []
    for k in range(len(weights)):
        own = drawn[nearest == k]
        count, share = len(own), float(weights[k])
        scores.append((count - n * share) / math.sqrt(n * share * (1 - share)))
        standard = (own - means[k]) / stds[k]
        scores += (standard.mean(0) * math.sqrt(count)).tolist()
        scores += ((standard.square().mean(0) - 1) * math.sqrt(count / 2)).tolist()
    return scores


@pytest.mark.parametrize("bug", [None, "variances for deviations", "uniform weights"])
def test_draws_follow_the_density(bug: str | None, generator: torch.Generator) -> None:
    """Components 20 σ apart, so that each draw belongs to one of them. 15 z-scores of 20,000 draws: |z| < 5.5 has a
    false alarm in a million runs (the variance's skewness at n ≥ 4,000 included); the planted bugs are far off."""
    weights, means = [0.2, 0.5, 0.3], [[0.0, 1.0], [-1.0, -1.0], [1.0, 0.0]]
    stds = [[0.05, 0.04], [0.02, 0.05], [0.05, 0.03]]
    energy, context = mixture(weights, means, stds)
    drawn = energy.propose(context, 20_000, generator)[0]
    assumed = [torch.tensor(part, dtype=torch.float64) for part in (weights, means, stds)]
    if bug == "variances for deviations":
        assumed[2] = assumed[2].square()
    if bug == "uniform weights":
        assumed[0] = torch.full((3,), 1 / 3, dtype=torch.float64)
    worst = max(abs(score) for score in moment_scores(drawn, *assumed))
    assert (worst < 5.5) == (bug is None), worst


def test_draws_agree_with_the_energy(generator: torch.Generator) -> None:
    """E[−log p] over draws is the entropy, here by quadrature: ties `propose` to `energies` for overlapping parts."""
    energy, context = mixture([0.3, 0.7], [[0.0], [0.4]], [[0.3], [0.2]])
    energies = energy.energies(context, energy.propose(context, 40_000, generator))[0]
    with torch.no_grad():
        entropy = Quadrature((-4.0,), (4.0,), 512).entropy(energy, torch.zeros(1, 1, dtype=torch.float64))
    score = (energies.mean() - entropy) / (energies.std() / math.sqrt(40_000))
    assert abs(float(score)) < 5


def correlated(
    weights: list[float], means: Tensor, covariances: Tensor, floor: float = 0.0
) -> tuple[CorrelatedMixtureEnergy, Context]:
    """The mixture with these parameters whatever the observation, and a context of it: its outputs by hand."""
    k, act = means.shape
    energy = CorrelatedMixtureEnergy(1, act, 4, 0, k, floor).to(means.dtype)
    factors = torch.linalg.inv(torch.linalg.cholesky(covariances))
    diagonal = factors.diagonal(dim1=1, dim2=2)
    raw = 4.5 * torch.atanh((-diagonal.log() + 2.5) / 4.5)
    row, column = torch.tril_indices(act, act, -1)
    below = (factors / diagonal.unsqueeze(2))[:, row, column]
    with torch.no_grad():
        for parameter in energy.parameters():
            parameter.zero_()
        energy.weighing.layers[-1].bias.copy_(torch.tensor(weights).log())
        energy.placing.layers[-1].bias.copy_(torch.cat([means.flatten(), raw.flatten(), below.flatten()]))
    return energy, mapped(Tensor.detach, energy.encode(torch.zeros(1, 1, dtype=means.dtype)))


def test_the_correlated_mixture_against_torch_distributions(generator: torch.Generator) -> None:
    """The density, and the mean and covariance of 40,000 draws of overlapping parts within 5.5 standard errors. A mean
    of products is correlated with nothing that a diagonal matrix knows: with it, the check fails."""
    from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

    weights, n = [0.2, 0.5, 0.3], 40_000
    means = torch.tensor([[0.0, 1.0, 0.2], [-1.0, 0.5, 0.0], [0.3, -0.7, -0.4]], dtype=torch.float64)
    roots = torch.tensor([0.3, 0.2, 0.5], dtype=torch.float64).diag() + 0.3 * torch.ones(3, 3).tril(-1)
    covariances = roots @ roots.T * torch.tensor([1.0, 0.5, 2.0]).view(3, 1, 1)
    energy, context = correlated(weights, means, covariances)
    exact = MixtureSameFamily(
        Categorical(torch.tensor(weights, dtype=torch.float64)), MultivariateNormal(means, covariances)
    )
    actions = torch.randn(1, 40, 3, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(energy.energies(context, actions), -exact.log_prob(actions), rtol=1e-6, atol=1e-6)
    drawn = energy.propose(context, n, generator)[0]
    second = torch.einsum("k,kij->ij", torch.tensor(weights, dtype=torch.float64), covariances) + torch.einsum(
        "k,ki,kj->ij", torch.tensor(weights, dtype=torch.float64), means, means
    )

    def worst(expected: Tensor) -> float:
        products = drawn.unsqueeze(2) * drawn.unsqueeze(1)
        return float(((products.mean(0) - expected) / products.std(0) * math.sqrt(n)).abs().amax())

    assert ((drawn.mean(0) - exact.mean) / drawn.std(0) * math.sqrt(n)).abs().amax() < 5.5
    assert worst(second) < 5.5
    assert worst(torch.diag(second.diagonal()) + torch.outer(exact.mean, exact.mean).fill_diagonal_(0)) > 5.5
    shared = energy.propose(repeated(context, 2), 3, generator, shared=True)
    torch.testing.assert_close(shared[0], shared[1])
    assert energy.best(context).tolist() == [means[1].tolist()], "the heaviest of the narrow ones"


def test_a_correlated_mixture_learns_a_ridge_that_a_diagonal_one_cannot(generator: torch.Generator) -> None:
    """One Gaussian of correlation 0.95: by −½ log(1 − r²) nats better than without, r that of the sample."""
    found = {}
    z = torch.randn(500, 2, generator=generator)
    y = torch.stack([z[:, 0], 0.95 * z[:, 0] + math.sqrt(1 - 0.95**2) * z[:, 1]], 1).unsqueeze(1) / 4
    obs, sample = torch.zeros(500, 1), float(torch.corrcoef(y[:, 0].T)[0, 1])
    for make in (CorrelatedMixtureEnergy, MixtureDensityEnergy):
        energy = make(1, 2, 8, 0, 1, generator=generator)
        adam = torch.optim.Adam(energy.parameters(), 0.05)
        for _ in range(800):
            adam.zero_grad()
            loss = energy(obs, y).mean()
            loss.backward()
            adam.step()
        found[make] = float(loss.detach())
    gain = found[MixtureDensityEnergy] - found[CorrelatedMixtureEnergy]
    assert gain == pytest.approx(-0.5 * math.log(1 - sample**2), abs=0.1)


def test_a_mixture_learns_two_modes(generator: torch.Generator) -> None:
    """Maximum likelihood on y = ±0.5: the likelihood gets within 0.1 nats of the data's own. All components may end in
    one of the modes, as they did in one or two of 64 repetitions: of five initialisations one must find both."""
    n, std = 512, 0.1
    sign = 2.0 * torch.randint(0, 2, (n, 1), generator=generator) - 1
    targets = (0.5 * sign + std * torch.randn(n, 1, generator=generator)).unsqueeze(1)
    obs = torch.zeros(n, 1)
    truth, context = mixture([0.5, 0.5], [[0.5], [-0.5]], [[std], [std]], torch.float32)
    own = truth.energies(repeated(context, n), targets).mean()
    for _ in range(5):
        energy = MixtureDensityEnergy(1, 1, 16, 1, 4, generator=generator)
        optimiser = torch.optim.Adam(energy.parameters(), 0.02)
        for _ in range(300):
            optimiser.zero_grad()
            energy(obs, targets).mean().backward()
            optimiser.step()
        with torch.no_grad():
            found = energy(obs, targets).mean() < own + 0.1
            drawn = energy.propose(energy.encode(obs[:1]), 1000, generator)[0, :, 0]
        if found:
            break
    assert found
    # Half of the draws on either side, up to the data's own imbalance and the fit (0.1 allows 3 nats per thousand).
    assert abs(float((drawn > 0).float().mean()) - float((sign > 0).float().mean())) < 0.1


def test_the_same_numbers_make_the_same_draws(generator: torch.Generator) -> None:
    """`place` alone with a row's numbers is that row of a batch: what makes an action independent of its batch."""
    energy = MixtureDensityEnergy(OBS, ACT, 16, generator=generator).double()
    context = energy.encode(torch.randn(6, OBS, generator=generator, dtype=torch.float64))
    uniform = torch.rand(6, 50, generator=generator, dtype=torch.float64)
    normal = torch.randn(6, 50, ACT, generator=generator, dtype=torch.float64)
    together = energy.place(context, uniform, normal)
    for i in range(6):
        own = mapped(lambda part, i=i: part[i : i + 1], context)
        alone = energy.place(own, uniform[i : i + 1], normal[i : i + 1])
        torch.testing.assert_close(alone[0], together[i])


def test_a_marginal_ignores_the_observation(generator: torch.Generator) -> None:
    energy = MixtureDensityEnergy(0, ACT, 16, generator=generator)
    actions = torch.randn(1, 7, ACT, generator=generator).expand(5, -1, -1)
    energies = energy(torch.randn(5, OBS, generator=generator), actions)
    assert torch.equal(energies, energies[:1].expand(5, -1))


# -------------------------------------------------------------------------------------------- tilted energies


def tilted(generator: torch.Generator, seen: int = OBS) -> TiltedEnergy:
    tilt = MLPEnergy(OBS, ACT, 16, init="torch", generator=generator)
    return TiltedEnergy(MixtureDensityEnergy(seen, ACT, 16, generator=generator), tilt).double()


@pytest.mark.parametrize("seen", [OBS, 0])
def test_a_tilted_energy_is_the_sum_of_its_parts(seen: int, generator: torch.Generator) -> None:
    energy = tilted(generator, seen)
    obs = torch.randn(3, OBS, generator=generator, dtype=torch.float64)
    actions = torch.randn(3, 5, ACT, generator=generator, dtype=torch.float64).requires_grad_()
    expected = energy.tilt(obs, actions) + energy.base(obs, actions)
    (gradient,) = torch.autograd.grad(expected.sum(), actions)
    context = energy.encode(obs)
    energies, gradients = energy.energies_and_gradients(context, actions)
    torch.testing.assert_close(energy.energies(context, actions), expected)
    torch.testing.assert_close(energies, expected)
    torch.testing.assert_close(gradients, gradient)
    for part, term in zip(context, (energy.tilt, energy.base), strict=True):
        torch.testing.assert_close(part, term.encode(obs))
    torch.testing.assert_close(energy.excess(context, actions), energy.tilt(obs, actions))


def train_on_a_ring(generator: torch.Generator, steps: int) -> tuple[TiltedEnergy, Tensor]:
    """Two components and a tilt, on points of a ring of radius ½ with deviation 0.05, whatever the observation;
    trained as `steady` trains: the likelihood of q, and InfoNCE of the tilt with negatives from q."""
    angle = 2 * math.pi * torch.rand(4096, generator=generator)
    ring = 0.5 * torch.stack([angle.cos(), angle.sin()], 1)
    data = ring + 0.05 * torch.randn(4096, 2, generator=generator)
    tilt = MLPEnergy(1, 2, 64, init="torch", generator=generator)
    energy = TiltedEnergy(MixtureDensityEnergy(1, 2, 16, 1, 2, 0.05, generator=generator), tilt)
    optimiser = torch.optim.Adam(energy.parameters(), 3e-3)
    obs = torch.zeros(256, 1)
    for _ in range(steps):
        actions = data[torch.randint(4096, (256,), generator=generator)]
        known = energy.base.encode(obs)
        negatives = energy.base.propose(known, 4, generator).detach()
        tilts = energy.tilt(obs, torch.cat([actions.unsqueeze(1), negatives], 1))
        loss = energy.base.energies(known, actions.unsqueeze(1)).mean() + info_nce(tilts[:, 0], tilts[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return energy, data


def test_the_tilt_makes_up_for_a_proposal_that_does_not_fit() -> None:
    """Two Gaussians cannot make a ring. Exact likelihoods by quadrature; the ring's own entropy is
    log(2π·½) + log(0.05 √(2πe)) = -0.43 nats up to curvature. Of 30 seeds q alone was 1.02 to 1.68 nats above it, with
    the tilt 0.01 to 0.10; but for one seed with 0.77, where one of the two Gaussians got lost. So two of three
    seeds count."""
    truth = math.log(math.pi) + math.log(0.05 * math.sqrt(2 * math.pi * math.e))
    quadrature, zero = Quadrature((-2.0, -2.0), (2.0, 2.0), 256), torch.zeros(1, 1)
    alone, together = [], []
    for seed in range(3):
        energy, data = train_on_a_ring(torch.Generator().manual_seed(seed), 600)
        with torch.no_grad():
            log_z = quadrature.log_partition(energy, zero)[0]
            alone.append(float(energy.base(zero, data.unsqueeze(0)).mean()))
            together.append(float(energy(zero, data.unsqueeze(0)).mean() + log_z))
        if sum(value < truth + 0.2 for value in together) == 2:
            break
    assert min(alone) > truth + 0.5  # it does not fit
    assert sum(value < truth + 0.2 for value in together) == 2
