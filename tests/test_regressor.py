"""The scikit-learn regressor: scikit-learn's own checks, and data whose answer is a set and not a number."""

import importlib
import sys

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="needs the extra cebm[sklearn]")

from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from cebm import regressor
from cebm.regressor import ConditionalEBMRegressor

SMALL = {"width": 32, "steps": 60, "negatives": 16, "batch_size": 32, "candidates": 32}
NOISE = 0.1


@parametrize_with_checks([ConditionalEBMRegressor(**SMALL)])
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
    """∫ p(y|x) dy = 1 in the units of y, by the trapezoid rule. Outside of the box of the targets there is none."""
    model, _ = bimodal
    y = np.linspace(60, 140, 801)
    for x in (-0.7, 0.5):
        density = np.exp(model.score_samples(np.full((801, 1), x), y))
        assert np.trapezoid(density, y) == pytest.approx(1, abs=0.01)
        assert density[0] == density[-1] == 0


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
    assert np.isneginf(model.score_samples(x[:1], truth[:1] + 100)).all()


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
    assert model.policy_.acting.candidates == 7
    assert model.policy_.energy.width == 8
    assert model.policy_.propose(np.zeros(1)).candidates.shape == (1, 7, 1)
    assert model.policy_.acting.sampler.noise == 0


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
