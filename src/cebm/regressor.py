"""A regressor with scikit-learn's interface that learns the density p(y|x). Needs the extra `cebm[sklearn]`."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from cebm.acting import Search
from cebm.energies import MLP
from cebm.information import Quadrature
from cebm.learning import fit
from cebm.negatives import Uniform
from cebm.objectives import InfoNCE
from cebm.optimisers import Adam
from cebm.recipes import Inputs, Trial
from cebm.samplers import MALA, DerivativeFree, Langevin, run

try:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ImportError("ConditionalEBMRegressor needs scikit-learn: pip install 'cebm[sklearn]'") from error


def _blocks(rows: int, per_row: int) -> list[slice]:
    """Slices of the rows of X with at most 65536 energies each, so that memory does not grow with X."""
    size = max(1, 2**16 // per_row)
    return [slice(start, start + size) for start in range(0, rows, size)]


class ConditionalEBMRegressor(RegressorMixin, BaseEstimator):
    """p(y|x) ∝ exp(-E(x, y)), learned by InfoNCE with uniform negatives, for which −E is log p(y|x) up to a constant
    of x. `predict` gives the mode (lowest energy), `sample` draws from p(y|x), `score_samples` is log p(y|x)."""

    def __init__(
        self,
        width: int = 256,
        steps: int = 2000,
        negatives: int = 64,
        batch_size: int = 256,
        learning_rate: float = 1e-3,
        candidates: int = 256,
        random_state: Any = None,
    ) -> None:
        self.width = width
        self.steps = steps
        self.negatives = negatives
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.candidates = candidates
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "ConditionalEBMRegressor":
        """Learns p(y|x) from X [rows, features] and y [rows] or [rows, outputs]."""
        X, y = validate_data(self, X, y, dtype=np.float32, multi_output=True, y_numeric=True)
        targets = np.asarray(y, np.float32)
        self.single_output_ = targets.ndim == 1
        trial = Trial(
            energy=MLP(width=self.width, init="torch"),
            objective=InfoNCE(Uniform(), self.negatives),
            optimiser=Adam(self.learning_rate, batch_size=self.batch_size, average=0.99),
            # No noise when predicting: a row's answer must not depend on the rows beside it.
            acting=Search(Langevin("ibc", noise=0.0), self.candidates),
            inputs=Inputs(constants="learn"),  # the density is over all outputs
        )
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.policy_ = fit(X, targets.reshape(len(targets), -1), trial=trial, steps=self.steps, seed=seed)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The mode of p(y|x)."""
        rows, policy = self._rows(X), self.policy_
        blocks = _blocks(len(rows), self.candidates)
        actions = np.concatenate([policy.act(rows[block]) for block in blocks]).astype(np.float64)
        return actions[:, 0] if self.single_output_ else actions

    def sample(self, X: Any, n: int = 1, random_state: Any = None) -> np.ndarray:
        """`n` draws per row, [rows, n] or [rows, n, outputs]: resampled candidates, refined by a Metropolis chain."""
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        rows = self._rows(X)
        policy, energy = self.policy_, self.policy_.energy
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        generator = torch.Generator().manual_seed(seed)
        parts, candidates = [], max(512, n)
        with torch.no_grad():
            obs = policy.obs_box.normalise(torch.from_numpy(rows))
            for block in _blocks(len(rows), candidates):
                context = energy.encode(obs[block])
                start = policy.act_box.sample(len(context), candidates, generator=generator)
                drawn = run(DerivativeFree(steps=1), energy, context, start, generator).actions[:, :n]
                refined = run(MALA(steps=30, adapt=20), energy, context, drawn.contiguous(), generator).actions
                parts.append(policy.act_box.denormalise(refined).numpy())
        result = np.concatenate(parts)
        return result[..., 0] if self.single_output_ else result

    def score_samples(self, X: Any, y: Any = None) -> Float[np.ndarray, " rows"]:
        """log p(y|x) per row, normalised by quadrature over the box of the training targets with its margin, in the
        units of y. With more than two outputs the normaliser comes from uniform samples. Without y, the density is
        taken at the mode, which says how sure the model is of its prediction."""
        rows = self._rows(X)
        targets = np.asarray(self.predict(X) if y is None else y, np.float32)
        policy, energy = self.policy_, self.policy_.energy
        box = policy.act_box
        columns = targets[:, None] if targets.ndim == 1 else targets
        if columns.shape != (len(rows), box.dim):
            raise ValueError(f"y must be [{len(rows)}, {box.dim}], got {targets.shape}")
        with torch.no_grad():
            obs = policy.obs_box.normalise(torch.from_numpy(rows))
            actions = box.normalise(torch.from_numpy(columns))
            parts = []
            for block in _blocks(len(rows), 4096 if box.dim > 1 else 256):
                energies = energy(obs[block], actions[block].unsqueeze(1))[:, 0]
                parts.append(-energies - self._log_partition(obs[block]))
            log_density = torch.cat(parts) - box.scale.log().sum()
            return torch.where((actions.abs() <= box.limit).all(1), log_density, -torch.inf).numpy()

    def _log_partition(self, obs: Float[torch.Tensor, "rows features"]) -> Float[torch.Tensor, " rows"]:
        energy, box = self.policy_.energy, self.policy_.act_box
        if box.dim <= 2:
            edge = (box.limit,) * box.dim
            quadrature = Quadrature(tuple(-e for e in edge), edge, 256 if box.dim == 1 else 64)
            return quadrature.log_partition(energy, obs)
        # The same points for all rows: a row's score does not depend on those beside it.
        points = box.sample(4096, generator=torch.Generator().manual_seed(0))
        energies = energy(obs, points.expand(len(obs), -1, -1))
        return (-energies).logsumexp(1) - np.log(len(points)) + box.dim * np.log(2 * box.limit)

    def _rows(self, X: Any) -> Float[np.ndarray, "rows features"]:
        check_is_fitted(self)
        return validate_data(self, X, dtype=np.float32, reset=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
