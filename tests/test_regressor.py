"""The scikit-learn regressor: scikit-learn's own checks, and data whose answer is a set and not a number."""

import importlib
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("sklearn", reason="needs the extra cebm[sklearn]")

from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from cebm import regressor
from cebm.energies import CorrelatedMixtureEnergy, EnergyModel
from cebm.regressor import ConditionalEBMRegressor, log_likelihood

SMALL = {"width": 32, "steps": 60, "negatives": 16, "batch_size": 32, "candidates": 32}
NOISE = 0.1


def expected_failures(_: object) -> dict[str, str]:
    reason = "rows are drawn by their weights: equal in distribution, not in numbers"
    names = ("on_dense_data", "on_sparse_data")
    return {f"check_sample_weight_equivalence_{name}": reason for name in names}


@parametrize_with_checks([ConditionalEBMRegressor(**SMALL)], expected_failed_checks=expected_failures)
@pytest.mark.slow
def test_scikit_learns_own_checks(estimator, check, unchecked_shapes):
    """Without the tests' type checks: it is scikit-learn's way that constructors take anything."""
    check(estimator)


# -------------------------------------------------------------------------------------------- two branches


def branch(x: np.ndarray) -> np.ndarray:
    return 0.6 + 0.4 * x


@pytest.fixture(scope="module")
def rng() -> np.random.Generator:
    return np.random.default_rng()


@pytest.fixture(scope="module")
def bimodal(rng: np.random.Generator) -> tuple[ConditionalEBMRegressor, float]:
    """y = ±(0.6 + 0.4 x) + noise, + with probability 0.7, in units of 10 around 100. Also the share of + drawn."""
    x = rng.uniform(-1, 1, 2000)
    upper = rng.random(2000) < 0.7
    y = np.where(upper, 1, -1) * branch(x) + NOISE * rng.standard_normal(2000)
    model = ConditionalEBMRegressor(width=64, steps=600, negatives=32, batch_size=128, random_state=0)
    return model.fit(x[:, None], 100 + 10 * y), float(upper.mean())


GRID = np.linspace(-0.6, 0.8, 9)


def test_predictions_lie_on_a_branch(bimodal: tuple[ConditionalEBMRegressor, float]) -> None:
    """Within two standard deviations of the noise of ±f(x); the mean, which least squares gives, is at 0.4 f(x)."""
    model, _ = bimodal
    y = (model.predict(GRID[:, None]) - 100) / 10
    assert y.shape == (9,) and y.dtype == np.float64
    distance = np.minimum(np.abs(y - branch(GRID)), np.abs(y + branch(GRID)))
    assert distance.max() < 2 * NOISE
    assert np.minimum(np.abs(0.4 * branch(GRID) - branch(GRID)), 0.4 * branch(GRID)).max() > 2 * NOISE


def test_most_predictions_are_on_the_likelier_branch(bimodal: tuple[ConditionalEBMRegressor, float]) -> None:
    y = bimodal[0].predict(GRID[:, None]) - 100
    assert (y > 0).mean() > 0.5


def test_samples_cover_both_branches_in_proportion(bimodal: tuple[ConditionalEBMRegressor, float]) -> None:
    """Sampling error: 4.5 standard deviations of 9 · 400 draws that resampling of 512 candidates correlates (an
    effective 512/10 per row of σ = 0.1 in a box of 3). The fit itself is allowed 0.1."""
    model, share = bimodal
    drawn = (model.sample(GRID[:, None], 400, random_state=None) - 100) / 10
    assert drawn.shape == (9, 400)
    upper = (drawn > 0).mean()
    assert abs(upper - share) < 0.1 + 4.5 * np.sqrt(0.7 * 0.3 / (9 * 51))
    for x, row in zip(GRID, drawn, strict=True):
        assert 0.1 < (row > 0).mean() < 0.99
        nearest = np.minimum(np.abs(row - branch(x)), np.abs(row + branch(x)))
        assert np.mean(nearest < 4 * NOISE) > 0.9


def test_samples_are_as_wide_as_the_data(bimodal: tuple[ConditionalEBMRegressor, float]) -> None:
    """Neither collapsed onto the mode nor uniform: between half and twice the noise about their branch."""
    drawn = (bimodal[0].sample(GRID[:, None], 400) - 100) / 10
    residual = np.abs(drawn) - branch(GRID)[:, None]
    inner = residual[np.abs(residual) < 4 * NOISE]
    assert 0.5 * NOISE < inner.std() < 2 * NOISE


def test_the_density_is_normalised(bimodal: tuple[ConditionalEBMRegressor, float]) -> None:
    """∫ p(y|x) dy = 1 in the units of y, by the trapezoid rule, to within 4.5 standard errors and the rule's own."""
    model, _ = bimodal
    y = np.linspace(60, 140, 801)
    for x in (-0.7, 0.5):
        value, error = model.score_samples(np.full((801, 1), x), y, return_std=True)
        assert np.trapezoid(np.exp(value), y) == pytest.approx(1, abs=0.01 + 4.5 * float(error[0]))
        assert np.exp(value[[0, -1]]).max() < 1e-3 * np.exp(value).max()


def test_the_density_is_high_on_the_branches_and_low_between(bimodal: tuple[ConditionalEBMRegressor, float]) -> None:
    """By a factor e at least; in the data it is 0.3 e^(f²/2σ²), e⁵ and more. Without y, the score is the mode's."""
    model, _ = bimodal
    X = GRID[:, None]
    upper, lower, between = (
        model.score_samples(X, 100 + 10 * y) for y in (branch(GRID), -branch(GRID), np.zeros_like(GRID))
    )
    assert (upper > between + 1).all() and (lower > between + 1).all()
    assert upper.mean() > lower.mean()
    at_mode = model.score_samples(X)
    np.testing.assert_allclose(at_mode, model.score_samples(X, model.predict(X)), rtol=1e-6)
    assert (at_mode >= np.maximum(upper, lower) - 0.1).all()


def test_the_density_is_that_of_the_data(bimodal: tuple[ConditionalEBMRegressor, float], rng) -> None:
    """The held-out likelihood is within 0.2 nats of the truth's, which a uniform density misses by far."""
    x = rng.uniform(-0.9, 0.9, 500)
    z = NOISE * rng.standard_normal(500)
    y = np.where(rng.random(500) < 0.7, 1, -1) * branch(x) + z

    def log_normal(e: np.ndarray) -> np.ndarray:
        return -0.5 * (e / NOISE) ** 2 - np.log(NOISE * np.sqrt(2 * np.pi))

    truth = np.logaddexp(np.log(0.7) + log_normal(y - branch(x)), np.log(0.3) + log_normal(y + branch(x)))
    learned = bimodal[0].score_samples(x[:, None], 100 + 10 * y) + np.log(10)
    finite = np.isfinite(learned)
    assert finite.mean() > 0.98
    assert (truth - learned)[finite].mean() < 0.2
    assert (truth + np.log(2.6))[finite].mean() > 0.6  # uniform over the box


def test_a_row_does_not_depend_on_its_neighbours(bimodal: tuple[ConditionalEBMRegressor, float]) -> None:
    model, _ = bimodal
    together = model.predict(GRID[:, None])
    alone = np.concatenate([model.predict([[x]]) for x in GRID])
    np.testing.assert_allclose(together, alone, rtol=1e-4)


def test_sampling_repeats_with_its_seed(bimodal: tuple[ConditionalEBMRegressor, float]) -> None:
    model, _ = bimodal
    one, again, other = (model.sample(GRID[:, None], 5, random_state=seed) for seed in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    assert model.sample(GRID[:1, None]).shape == (1, 1)
    assert model.sample(GRID[:1, None], 600).shape == (1, 600)


# -------------------------------------------------------------------------------------------- several outputs


@pytest.mark.parametrize("outputs", [1, 2, 3])
@pytest.mark.slow
def test_several_outputs(outputs: int, rng: np.random.Generator) -> None:
    """Unimodal, one column per output and its own scale; the shapes follow y, a column vector's included."""
    x = rng.uniform(-1, 1, (600, 2))
    truth = np.stack([(k + 1) * (x[:, k % 2] + k) for k in range(outputs)], 1)
    model = ConditionalEBMRegressor(width=32, steps=300, negatives=64, batch_size=64, candidates=128, random_state=1)
    model.fit(x, truth + 0.05 * rng.standard_normal(truth.shape))
    predicted = model.predict(x[:50])
    assert predicted.shape == (50, outputs)
    # Half of the spread of the data: a constant prediction has an error of about all of it.
    spread = truth.std(0)
    assert (np.sqrt(np.mean((predicted - truth[:50]) ** 2, 0)) < 0.5 * spread).all()
    assert model.sample(x[:4], 3, random_state=0).shape == (4, 3, outputs)
    here, away = model.score_samples(x[:50], truth[:50]), model.score_samples(x[:50], truth[:50][::-1])
    assert here.shape == (50,) and np.median(here) > np.median(away[np.isfinite(away)])
    assert (model.score_samples(x[:1], truth[:1] + 100) < here.min() - 50).all()


@pytest.mark.parametrize("outputs", [2, 3])
@pytest.mark.slow
def test_the_density_of_several_outputs_is_normalised(outputs: int, rng: np.random.Generator) -> None:
    """Its mean over uniform points of the box, times the volume, is 1: within 5 standard errors, and those of the
    normaliser's own 4,096 samples where there is no quadrature."""
    x = rng.uniform(-1, 1, (200, 1))
    y = np.concatenate([x, -2 * x, x**2], 1)[:, :outputs] + 0.3 * rng.standard_normal((200, outputs))
    model = ConditionalEBMRegressor(**{**SMALL, "steps": 200}, random_state=0).fit(x, y)
    box = model.policy_.act_box
    low, high = (box.centre - 1.1 * box.scale).numpy(), (box.centre + 1.1 * box.scale).numpy()
    points = rng.uniform(low, high, (2000, outputs))
    density = np.exp(model.score_samples(np.zeros((2000, 1)), points)) * np.prod(high - low)
    error = density.std() * np.sqrt(1 / 2000 + (1 / 4096 if outputs > 2 else 0))
    assert abs(density.mean() - 1) < 5 * error + 0.01
    assert density.std() > 0.1, "uniform: this shows nothing"


# -------------------------------------------------------------------------------------------- scikit-learn's ways


def test_fitting_repeats_with_its_seed(rng: np.random.Generator) -> None:
    x = rng.uniform(-1, 1, (100, 1))
    one, again, other = (
        ConditionalEBMRegressor(**SMALL, random_state=seed).fit(x, x[:, 0]).predict(x) for seed in (3, 3, 4)
    )
    assert np.array_equal(one, again) and not np.array_equal(one, other)


@pytest.mark.slow
def test_it_composes_with_pipelines_and_searches(rng: np.random.Generator) -> None:
    x = rng.uniform(-1, 1, (120, 1))
    y = 2 * x[:, 0]
    model = ConditionalEBMRegressor(**{**SMALL, "steps": 150}, random_state=0)
    search = GridSearchCV(make_pipeline(StandardScaler(), model), {"conditionalebmregressor__width": [8, 32]}, cv=2)
    assert search.fit(x, y).best_score_ > 0.3
    assert cross_val_score(clone(model), x, y, cv=2).shape == (2,)


def test_settings_reach_the_training(rng: np.random.Generator) -> None:
    x = rng.uniform(-1, 1, (50, 1))
    model = ConditionalEBMRegressor(width=8, steps=2, negatives=3, batch_size=10, candidates=7).fit(x, x[:, 0])
    assert model.policy_.energy.tilt.width == 8 and model.policy_.energy.base.components == 8
    assert model.best_step_ == 2 and model.smoothing_ == 0
    whole = ConditionalEBMRegressor(width=8, steps=2, batch_size=10, components=3, covariance="full")
    base = whole.fit(x, np.repeat(x, 2, 1)).policy_.energy.base
    assert isinstance(base, CorrelatedMixtureEnergy) and base.components == 3
    assert whole.sample(x[:2], 5).shape == (2, 5, 2)
    with pytest.raises(ValueError, match="covariance must be one of 'diagonal', 'full', got 'whole'"):
        ConditionalEBMRegressor(covariance="whole").fit(x, x[:, 0])


def test_before_fitting_there_is_nothing() -> None:
    model = ConditionalEBMRegressor()
    for call in (model.predict, model.sample, model.score_samples):
        with pytest.raises(NotFittedError):
            call([[0.0]])


def test_rows_are_worked_on_in_blocks(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers from blocks of few rows as from one of all; a sample's shape at least."""
    x = rng.uniform(-1, 1, (60, 1))
    for outputs in (1, 3):
        y = np.repeat(x, outputs, 1) + 0.1 * rng.standard_normal((60, outputs))
        model = ConditionalEBMRegressor(**SMALL, random_state=0).fit(x, y)
        whole = model.predict(x), model.score_samples(x, y)
        drawn = model.sample(x, 3, random_state=0)
        with monkeypatch.context() as patch:
            patch.setattr(regressor, "_blocks", lambda rows, per_row: [slice(0, 7), slice(7, 50), slice(50, None)])
            np.testing.assert_allclose(model.predict(x), whole[0], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(model.score_samples(x, y), whole[1], rtol=1e-4, atol=1e-4)
            again = model.sample(x, 3, random_state=0)
        assert again.shape == drawn.shape == (60, 3, outputs)
    assert regressor._blocks(10, 2**16 // 4) == [slice(0, 4), slice(4, 8), slice(8, 12)]


def test_bad_arguments_are_named(bimodal: tuple[ConditionalEBMRegressor, float]) -> None:
    model, _ = bimodal
    with pytest.raises(ValueError, match=r"y must be \[2, 1\], got \(3,\)"):
        model.score_samples([[0.0], [0.1]], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"y must be \[2, 1\], got \(2, 2\)"):
        model.score_samples([[0.0], [0.1]], np.zeros((2, 2)))
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        model.sample([[0.0]], 0)


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "sklearn" or name.startswith("sklearn.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "cebm.regressor")
    with pytest.raises(ImportError, match=r"needs scikit-learn: pip install 'cebm\[sklearn\]'"):
        importlib.import_module("cebm.regressor")


# -------------------------------------------------------------------------------------------- a known energy


class Known(EnergyModel):
    """A mixture of Gaussians of one deviation, in place of the learned energy: training plays no part."""

    def __init__(self, dims: int, std: float, shares: tuple[float, ...] = (1.0,)) -> None:
        super().__init__()
        self.obs_dim, self.act_dim, self.context_dim, self.std = 1, dims, 1, std
        self.places = torch.linspace(-0.4, 0.4, len(shares)) if len(shares) > 1 else torch.tensor([0.23])
        self.logs = torch.tensor(shares).log()

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        return obs

    def energies(self, context: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        away = (actions.unsqueeze(-2) - self.places.unsqueeze(1)) / self.std
        return -(self.logs - 0.5 * away.square().sum(-1)).logsumexp(-1)


def knowing(energy: Known) -> ConditionalEBMRegressor:
    """A fitted regressor whose energy is replaced, with targets in [-1, 1]: data units are normalised ones."""
    y = np.tile([[-1.0], [1.0]], (10, energy.act_dim))
    x = np.linspace(-1, 1, 20)[:, None]
    model = ConditionalEBMRegressor(width=4, steps=1, validation_fraction=0.0, random_state=0).fit(x, y)
    model.policy_ = replace(model.policy_, energy=energy)
    return model


@pytest.mark.parametrize(("dims", "std"), [(2, 0.01), (4, 0.05)])
def test_scores_of_a_known_energy_are_within_their_errors(dims: int, std: float) -> None:
    """With log Z from 4,096 uniform points they were off by 1.2 and 2.2 nats, without a warning."""
    model = knowing(Known(dims, std))
    value, error = model.score_samples(np.zeros((3, 1)), np.full((3, dims), 0.23), return_std=True)
    exact = -dims * np.log(std * np.sqrt(2 * np.pi))
    assert (error < 0.05).all() and (np.abs(value - exact) < 4.5 * error + 1e-3).all()


@pytest.mark.parametrize("dims", [1, 2, 4])
def test_predictions_of_a_known_energy_are_its_mode(dims: int) -> None:
    """Within a twentieth of a deviation; the noise-free search was 0.6, 1.2 and 2.6 deviations away."""
    for energy, mode in ((Known(dims, 0.05), 0.23), (Known(dims, 0.02, (0.25, 0.75)), 0.4)):
        found = knowing(energy).predict(np.zeros((3, 1)))
        assert np.abs(found - mode).max() < 0.05 * energy.std


@pytest.mark.parametrize(("dims", "std"), [(2, 0.01), (3, 0.05)])
def test_samples_of_a_known_energy_have_its_modes_in_proportion(dims: int, std: float) -> None:
    """25:75 in every row, where the old shares spread by 0.17 and 0.42; a quarter of the draws is worth an independent
    one at least. And the deviation about the modes, of which there are 800 draws by a few trajectories each."""
    drawn = knowing(Known(dims, std, (0.25, 0.75))).sample(np.zeros((2, 1)), 400).reshape(2, 400, dims)
    assert np.abs((drawn.mean(2) < 0).mean(1) - 0.25).max() < 4.5 * np.sqrt(0.25 * 0.75 / 100)
    away = np.abs(drawn) - 0.4
    assert abs(away.std() / std - 1) < 4.5 / np.sqrt(2 * 200)


# -------------------------------------------------------------------------------------------- the whole density


def test_the_score_knows_a_fork_from_nothing(bimodal: tuple[ConditionalEBMRegressor, float], rng) -> None:
    """The skill in CRPS: positive on a fork, where R² of the mode is −1; below 0 for targets that are turned round."""
    x = rng.uniform(-1, 1, 300)
    y = 100 + 10 * (np.where(rng.random(300) < 0.7, 1, -1) * branch(x) + NOISE * rng.standard_normal(300))
    model = bimodal[0]
    assert model.score(x[:, None], y) > 0.05
    assert model.score(x[:, None], 200 - y) < model.score(x[:, None], y) - 0.1
    weights = (y > 100).astype(float)
    assert model.score(x[:, None], y, weights) == pytest.approx(model.score(x[:, None], y, 3 * weights))
    likelihood = log_likelihood(model, x[:, None], y)
    assert likelihood == pytest.approx(model.score_samples(x[:, None], y).mean(), abs=1e-5)


def test_the_energy_score_is_crps() -> None:
    """E|Y − y| − E|Y − Y'|/2 of a standard normal at 0 is √(2/π) − 1/√π = 0.2337 (Gneiting & Raftery 2007)."""
    draws = stats.norm.ppf((np.arange(1000) + 0.5) / 1000)[None, :, None]
    assert regressor._energy_score(draws, np.zeros((1, 1)))[0] == pytest.approx(0.2337, abs=2e-3)


def test_intervals_cover_what_they_say(bimodal: tuple[ConditionalEBMRegressor, float], rng) -> None:
    """90 % of held-out targets, within 4.5 binomial errors of 400 and 4 points for the fit; quantiles are in order."""
    x = rng.uniform(-0.9, 0.9, 400)
    y = 100 + 10 * (np.where(rng.random(400) < 0.7, 1, -1) * branch(x) + NOISE * rng.standard_normal(400))
    model = bimodal[0]
    bounds = model.interval(x[:, None], 0.9, n=300)
    assert bounds.shape == (400, 2)
    inside = ((y > bounds[:, 0]) & (y < bounds[:, 1])).mean()
    assert abs(inside - 0.9) < 4.5 * np.sqrt(0.09 / 400) + 0.04
    quantiles = model.quantiles(x[:5, None], (0.1, 0.5, 0.9), n=100)
    assert quantiles.shape == (5, 3) and (np.diff(quantiles, axis=1) >= 0).all()
    mode, std = model.predict(x[:5, None], return_std=True)
    # Two branches with 0.7 and 0.3: a deviation of 2 f √0.21.
    assert mode.shape == std.shape == (5,) and (np.abs(std / (20 * branch(x[:5]) * np.sqrt(0.21)) - 1) < 0.3).all()
    with pytest.raises(ValueError, match="coverage must be between 0 and 1, got 1"):
        model.interval([[0.0]], 1.0)
    with pytest.raises(ValueError, match="q must be between 0 and 1"):
        model.quantiles([[0.0]], [2.0])


def test_weights_count_rows(rng: np.random.Generator) -> None:
    """Rows of weight 0 play no part: all of the mass is where the weighted rows are."""
    x = np.zeros((400, 1))
    y = np.where(np.arange(400) % 2, 1.0, -1.0) + 0.1 * rng.standard_normal(400)
    model = ConditionalEBMRegressor(width=16, steps=150, random_state=0).fit(x, y, sample_weight=(y > 0).astype(float))
    assert (model.sample(x[:1], 200) > 0).mean() > 0.95
    with pytest.raises(ValueError, match="at least one non-zero number"):
        model.fit(x, y, sample_weight=np.zeros(400))


def test_training_stops_when_held_out_rows_get_worse(rng: np.random.Generator) -> None:
    """Thirty rows of noise in five features are learned by heart: the best weights are early ones."""
    x, y = rng.standard_normal((60, 5)), rng.standard_normal(60)
    model = ConditionalEBMRegressor(width=64, steps=600, batch_size=32, random_state=0).fit(x, y)
    assert model.best_step_ < 600
    whole = ConditionalEBMRegressor(width=8, steps=5, batch_size=32, validation_fraction=0.0, random_state=0).fit(x, y)
    assert whole.best_step_ == 5 and whole.held_out_score_ == np.inf


def test_smoothing_is_set_or_chosen(rng: np.random.Generator) -> None:
    """On a set as sharp as 0.01 of the range the smoothing of 0.05 costs a nat and more: 'auto' does not take it."""
    x = rng.uniform(-1, 1, (400, 1))
    y = x[:, 0] + 0.01 * rng.standard_normal(400)
    settings = {"width": 32, "steps": 300, "batch_size": 64, "random_state": 0}
    model = ConditionalEBMRegressor(smoothing="auto", **settings).fit(x, y)
    smooth = ConditionalEBMRegressor(smoothing=0.05, **settings).fit(x, y)
    assert smooth.smoothing_ == 0.05 and model.smoothing_ < 0.05
    assert smooth.policy_.specification.smoothing == 0.05
    assert log_likelihood(model, x, y) > log_likelihood(smooth, x, y)
    with pytest.raises(ValueError, match="smoothing='auto' needs held-out rows"):
        ConditionalEBMRegressor(smoothing="auto", validation_fraction=0.0).fit(x, y)


def test_the_plot_shows_bands_mode_and_rows(bimodal: tuple[ConditionalEBMRegressor, float]) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra cebm[plot]")
    X = GRID[:, None]
    axes = bimodal[0].plot(X, 100 + 10 * branch(GRID))
    assert len(axes.collections) == 2 and len(axes.lines) == 2
    outer, inner = (band.get_paths()[0].vertices[:, 1] for band in axes.collections)
    assert outer.max() >= inner.max() and outer.min() <= inner.min()
    with pytest.raises(ValueError, match="feature must be between 0 and 0, got 1"):
        bimodal[0].plot(X, feature=1)
