"""A regressor with scikit-learn's interface that learns the density p(y|x). Needs the extra `cebm[sklearn]`."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from cebm.demonstrations import Demonstrations
from cebm.densities import Estimator, Weighted, descended, resampled
from cebm.energies import MLP, CorrelatedMixture, MixtureDensity, Tilted
from cebm.energies.base import Context
from cebm.negatives import Proposed
from cebm.objectives import InfoNCE
from cebm.optimisers import Adam, Cosine
from cebm.policy import EnergyPolicy
from cebm.recipes import Inputs, Trial
from cebm.samplers import HMC
from cebm.trainer import Trainer

try:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ImportError("ConditionalEBMRegressor needs scikit-learn: pip install 'cebm[sklearn]'") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DESCENTS = 8
"""Candidates per row that run down to a mode."""
_SCOUTS, _TUNED, _MOVES = 16, 12, 6
"""Chains per row that tune the trajectories of `sample`, how many trajectories they have, and how many every draw has.
"""
_CHECKS = 12
"""Looks at the held-out rows in the course of a training."""
_MIXTURES: dict[str, type[MixtureDensity | CorrelatedMixture]] = {"diagonal": MixtureDensity, "full": CorrelatedMixture}
"""What `covariance` chooses from."""
_SMOOTHINGS = (0.0, 0.02, 0.05)
"""Smoothings that `smoothing="auto"` tries, normalised units."""


def _blocks(rows: int, per_row: int) -> list[slice]:
    """Slices of the rows of X with at most 65536 energies each, so that memory does not grow with X."""
    size = max(1, 2**16 // per_row)
    return [slice(start, start + size) for start in range(0, rows, size)]


class ConditionalEBMRegressor(RegressorMixin, BaseEstimator):
    """p(y|x) ∝ q(y|x) e^{−f(x, y)}: a mixture density q, fitted by likelihood, tilted by a network f that is trained by
    InfoNCE against draws of q. `predict` gives the mode, `sample` draws, `quantiles` and `interval` come from draws,
    `score_samples` is log p(y|x), `score` the skill in CRPS.

    q has `components` Gaussians, f `hidden_layers` layers of `width` units: more of both where p(y|x) is thin or bent.
    `covariance` 'full' gives the Gaussians whole covariance matrices, for outputs that depend on each other.

    `smoothing` is the deviation of the noise that the targets get in training, as a share of half of their range:
    0 (none, the default), or 'auto' for the one of 0, 0.02 and 0.05 with the best held-out likelihood (`smoothing_`
    says which). The density is that of the targets with this noise.

    With `validation_fraction` of the rows held out, the weights that are kept are those with the best likelihood there
    (`best_step_`), and the training stops when it has not risen for `patience` of its twelve looks; 0 trains to the
    end on all rows."""

    def __init__(
        self,
        width: int = 128,
        steps: int = 2000,
        negatives: int = 4,
        batch_size: int = 256,
        learning_rate: float = 3e-3,
        candidates: int = 256,
        smoothing: float | str = 0.0,
        validation_fraction: float = 0.1,
        patience: int = 3,
        random_state: Any = None,
        components: int = 8,
        hidden_layers: int = 2,
        covariance: str = "diagonal",
    ) -> None:
        self.width = width
        self.steps = steps
        self.negatives = negatives
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.candidates = candidates
        self.smoothing = smoothing
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.random_state = random_state
        self.components = components
        self.hidden_layers = hidden_layers
        self.covariance = covariance

    # ------------------------------------------------------------------------------------------ training

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "ConditionalEBMRegressor":
        """Learns p(y|x) from X [rows, features] and y [rows] or [rows, outputs]. A row of weight w counts as w rows:
        the training draws rows in proportion to their weights."""
        X, y = validate_data(self, X, y, dtype=np.float32, multi_output=True, y_numeric=True)
        targets = np.asarray(y, np.float32)
        self.single_output_ = targets.ndim == 1
        targets = targets.reshape(len(targets), -1)
        random = check_random_state(self.random_state)
        training, held_out = self._split(X, random)
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)[training]
            if not weights.sum() > 0:
                raise ValueError("sample_weight must not be zero for all rows of the training")
            training = random.choice(training, len(training), p=weights / weights.sum())
        rows = (X[training], targets[training]), (X[held_out], targets[held_out])
        seed = int(random.randint(2**31 - 1))
        choices = _SMOOTHINGS if self.smoothing == "auto" else (float(self.smoothing),)
        if len(choices) > 1 and not len(held_out):
            raise ValueError("smoothing='auto' needs held-out rows: validation_fraction must be above 0")
        fits = [(self._trained(*rows, smoothing, seed), smoothing) for smoothing in choices]
        (self.policy_, self.best_step_, self.held_out_score_), self.smoothing_ = max(fits, key=lambda fit: fit[0][2])
        return self

    def _split(self, X: np.ndarray, random: Any) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must be in [0, 1), got {self.validation_fraction}")
        order = random.permutation(len(X))
        held_out = int(self.validation_fraction * len(X))
        # A handful of rows cannot choose anything.
        return (order[held_out:], order[:held_out]) if held_out >= 5 else (np.arange(len(X)), order[:0])

    def _trained(
        self, training: tuple, held_out: tuple, smoothing: float, seed: int
    ) -> tuple[EnergyPolicy, int, float]:
        """The policy with the best held-out likelihood, its step, and that likelihood; without held-out rows, the last
        one and infinity."""
        if self.covariance not in _MIXTURES:
            raise ValueError(f"covariance must be one of {', '.join(map(repr, _MIXTURES))}, got {self.covariance!r}")
        mixture = _MIXTURES[self.covariance](self.width, components=self.components)
        trial = Trial(
            energy=Tilted(MLP(self.width, self.hidden_layers, init="torch"), mixture),
            objective=InfoNCE(Proposed(), self.negatives),
            optimiser=Adam(self.learning_rate, Cosine(), batch_size=self.batch_size, average=0.99),
            inputs=Inputs("standardise", smoothing=smoothing, constants="learn"),
        )
        pairs = Demonstrations.from_arrays(training[0], training[1], np.arange(1, len(training[0]) + 1))
        trainer = Trainer(trial, pairs, pairs, seed, "cpu", None, self.steps)
        if not len(held_out[0]):
            for _ in range(self.steps):
                trainer.step()
            return trainer.policy(), self.steps, np.inf
        best: tuple[EnergyPolicy, int, float] | None = None
        worse, every = 0, max(1, self.steps // _CHECKS)
        for step in range(1, self.steps + 1):
            trainer.step()
            if step % every and step != self.steps:
                continue
            policy = trainer.policy()
            likelihood = float(_log_density(policy, held_out[0][:512], held_out[1][:512], 128).mean())
            worse = 0 if best is None or likelihood > best[2] else worse + 1
            if best is None or not worse:
                best = policy, step, likelihood
            if worse >= self.patience:
                break
        if best is None:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        return best

    # ------------------------------------------------------------------------------------------ answers

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mode of p(y|x), and with `return_std` the deviation of p(y|x) beside it."""
        rows, policy = self._rows(X), self.policy_
        parts = []
        with torch.no_grad():
            for block in _blocks(len(rows), self.candidates):
                # The same random numbers for every row: an answer does not depend on the rows beside it.
                problem = policy.problem(rows[block])
                start = problem.clip(problem.start(self.candidates))
                keep = min(_DESCENTS, self.candidates)
                order = problem.energies(start).topk(keep, largest=False).indices
                start = start.gather(1, order.unsqueeze(-1).expand(-1, -1, start.shape[2]))
                ends, energies = descended(policy.energy, problem.context, start, problem.low, problem.high)
                best = energies.argmin(1)
                parts.append(policy.act_box.denormalise(ends[torch.arange(len(ends)), best]).double().numpy())
        modes = self._shaped(np.concatenate(parts))
        if not return_std:
            return modes
        return modes, self.sample(X, 256, random_state=0).astype(np.float64).std(1)

    def sample(self, X: Any, n: int = 1, random_state: Any = None) -> np.ndarray:
        """`n` draws per row, [rows, n] or [rows, n, outputs]: weighted draws, annealed where the mixture's are not
        enough, drawn anew by their weights and moved by a few trajectories of HMC."""
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        rows, policy = self._rows(X), self.policy_
        generator = torch.Generator().manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))
        parts = []
        with torch.no_grad():
            for block in _blocks(len(rows), max(512, n)):
                context = policy.problem(rows[block]).context
                found = Estimator(max(512, n))(policy.energy, context, policy.act_box.limit, generator)
                drawn = _spread(policy, context, found, n, generator)
                parts.append(policy.act_box.denormalise(drawn).numpy())
        result = np.concatenate(parts)
        return result[..., 0] if self.single_output_ else result

    def quantiles(self, X: Any, q: Any = (0.05, 0.5, 0.95), n: int = 1000) -> np.ndarray:
        """Quantiles of p(y|x), [rows, quantiles] or [rows, quantiles, outputs], from `n` draws of fixed seed."""
        levels = np.atleast_1d(np.asarray(q, np.float64))
        if not ((levels >= 0) & (levels <= 1)).all():
            raise ValueError(f"q must be between 0 and 1, got {levels.tolist()}")
        return np.moveaxis(np.quantile(self.sample(X, n, random_state=0), levels, axis=1), 0, 1)

    def interval(self, X: Any, coverage: float = 0.9, n: int = 1000) -> np.ndarray:
        """The central interval that holds a share `coverage` of p(y|x): [rows, 2] or [rows, 2, outputs]."""
        if not 0 < coverage < 1:
            raise ValueError(f"coverage must be between 0 and 1, got {coverage}")
        return self.quantiles(X, ((1 - coverage) / 2, (1 + coverage) / 2), n)

    def score_samples(self, X: Any, y: Any = None, return_std: bool = False) -> Any:
        """log p(y|x) per row, in the units of y, and with `return_std` its standard error. Warns where it is not to be
        trusted (`cebm.densities`). Without y it is taken at the mode: how sure the model is of its prediction."""
        rows = self._rows(X)
        targets = np.asarray(self.predict(X) if y is None else y, np.float32)
        columns = targets[:, None] if targets.ndim == 1 else targets
        if columns.shape != (len(rows), self.policy_.act_box.dim):
            raise ValueError(f"y must be [{len(rows)}, {self.policy_.act_box.dim}], got {targets.shape}")
        found = self.policy_.log_prob(rows, columns)
        value = found.value.numpy()
        return (value, found.standard_error.numpy()) if return_std else value

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Skill of the whole density: 1 − CRPS / CRPS of the targets' own distribution, which ignores X. 1 is perfect,
        0 is no better than that, as for R²; for several outputs it is the energy score, on standardised outputs."""
        rows = self._rows(X)
        targets = np.asarray(y, np.float64).reshape(len(rows), -1)
        weights = np.ones(len(rows)) if sample_weight is None else np.asarray(sample_weight, np.float64)
        scale = np.where(targets.std(0) > 0, targets.std(0), 1.0)
        draws = np.asarray(self.sample(rows, 128, random_state=0), np.float64).reshape(len(rows), 128, -1)
        own = _energy_score(draws / scale, targets / scale)
        index = np.random.default_rng(0).integers(len(rows), size=(len(rows), 128))
        nothing = _energy_score(targets[index] / scale, targets / scale)
        return float(1 - np.average(own, weights=weights) / max(np.average(nothing, weights=weights), 1e-300))

    def plot(self, X: Any, y: Any = None, feature: int = 0, axes: "Axes | None" = None) -> "Axes":
        """The mode and the bands of 50 % and 90 % along a feature, the others at their median; the rows (X, y) as
        points. Of several outputs the first. Needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("the plot needs matplotlib: pip install 'cebm[plot]'") from error
        rows = self._rows(X)
        if not 0 <= feature < rows.shape[1]:
            raise ValueError(f"feature must be between 0 and {rows.shape[1] - 1}, got {feature}")
        line = np.repeat(np.median(rows, 0, keepdims=True), 80, 0)
        line[:, feature] = np.linspace(rows[:, feature].min(), rows[:, feature].max(), 80)
        levels = self.quantiles(line, (0.05, 0.25, 0.75, 0.95)).reshape(80, 4, -1)[..., 0]
        if axes is None:
            axes = Figure(figsize=(6, 4), layout="constrained").subplots()
        for low, high, label in ((0, 3, "90 %"), (1, 2, "50 %")):
            axes.fill_between(
                line[:, feature], levels[:, low], levels[:, high], color="#0072B2", alpha=0.25, label=label
            )
        axes.plot(line[:, feature], self.predict(line).reshape(80, -1)[:, 0], ".", color="#D55E00", label="mode")
        if y is not None:
            axes.plot(rows[:, feature], np.asarray(y).reshape(len(rows), -1)[:, 0], ".", color="0.4", ms=2, zorder=0)
        axes.set(xlabel=f"feature {feature}", ylabel="y")
        axes.legend()
        return axes

    def _shaped(self, values: np.ndarray) -> np.ndarray:
        return values[:, 0] if self.single_output_ else values

    def _rows(self, X: Any) -> Float[np.ndarray, "rows features"]:
        check_is_fitted(self)
        return validate_data(self, X, dtype=np.float32, reset=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def log_likelihood(estimator: ConditionalEBMRegressor, X: Any, y: Any) -> float:
    """Mean log p(y|x): a scorer for grid searches, `GridSearchCV(..., scoring=log_likelihood)`."""
    return float(np.mean(estimator.score_samples(X, y)))


def _log_density(policy: EnergyPolicy, X: np.ndarray, y: np.ndarray, draws: int) -> torch.Tensor:
    """log p of held-out rows without annealing, for comparisons in the course of a training."""
    with torch.no_grad():
        problem, actions = policy.problem(X), policy.act_box.normalise(torch.from_numpy(y))
        found = Estimator(draws, anneal=False, shared=True)(policy.energy, problem.context, 1.1, problem.generator)
        return -policy.energy.energies(problem.context, actions.unsqueeze(1))[:, 0] - found.log_partition


def _spread(
    policy: EnergyPolicy, context: Context, found: Weighted, n: int, generator: torch.Generator
) -> Float[torch.Tensor, "batch n act"]:
    """`n` of the weighted draws, by their weights. Those that were taken twice are moved apart by a few trajectories of
    HMC, whose steps other chains have tuned: a step that depends on its own chain would not keep p(y|x)."""
    margin = None if policy.energy.proposes else policy.act_box.margin
    step = float(0.3 * found.actions.std(1).mean().clamp_min(1e-4))
    moves = HMC(_TUNED + _MOVES, step, adapt=_TUNED, longest=4, margin=margin)
    scouts = moves.init(policy.energy, context, resampled(found, _SCOUTS, generator), generator)
    for k in range(_TUNED):
        scouts, _ = moves.step(policy.energy, context, scouts, k, generator)
    state = moves.init(policy.energy, context, resampled(found, n, generator), generator)
    state = state._replace(tuning=scouts.tuning)
    for k in range(_TUNED, moves.steps):
        state, _ = moves.step(policy.energy, context, state, k, generator)
    return state.actions


def _energy_score(
    draws: Float[np.ndarray, "rows n outputs"], targets: Float[np.ndarray, "rows outputs"]
) -> Float[np.ndarray, " rows"]:
    """E‖Y − y‖ − E‖Y − Y'‖/2 (Gneiting & Raftery 2007), which is CRPS for one output; unbiased: each draw is compared
    with all others."""
    n = draws.shape[1]
    near = np.linalg.norm(draws - targets[:, None], axis=2).mean(1)
    apart = np.array([np.linalg.norm(row[:, None] - row[None], axis=2).sum() / (n * (n - 1)) for row in draws])
    return near - apart / 2
