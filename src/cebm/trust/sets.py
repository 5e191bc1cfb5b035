"""Conformal highest-density sets of a density of one output: unions of intervals that hold y with a chosen probability.

S(x) = {y : log p(y|x) ≥ −τ}, with τ the ⌈(n + 1)(1 − α)⌉-th smallest of −log p(yᵢ|xᵢ) over n held-out pairs. A new pair
that is exchangeable with those lies in its set with a probability of at least 1 − α, and of at most 1 − α + 1/(n + 1)
where scores have no ties. That holds for any density; a bad one gives large sets (Lei, Robins and Wasserman 2013;
Izbicki et al. 2022, HPD-split).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from cebm.trust.calibration import threshold

BLOCK = 2**17
"""Densities that are asked for at once."""


class Interval(NamedTuple):
    """From `low` to `high`, both included."""

    low: float
    high: float


@dataclass(frozen=True, eq=False)
class ConformalSets:
    """Sets of a share 1 − α, one for each observation. `ConformalSets.fit` makes them."""

    log_density: Callable[[Any, Any], np.ndarray]
    """log p(y|x) of rows x and outputs y, up to a constant."""
    level: float
    """The smallest log-density that belongs to a set."""
    low: float
    """Sets are looked for from here, where nothing was below, with a margin,"""
    high: float
    """to here."""
    alpha: float
    """Largest share of outputs outside of their sets."""

    @classmethod
    def fit(
        cls, log_density: Callable[[Any, Any], np.ndarray], X: Any, y: Any, alpha: float = 0.1, margin: float = 0.2
    ) -> "ConformalSets":
        """From held-out rows X and outputs y: pass `model.score_samples` of a fitted regressor, whose training data
        these must not be. The sets are looked for within the range of y with a share `margin` of it on both ends."""
        outputs = np.asarray(y, np.float64)
        if outputs.ndim != 1 or len(outputs) != len(X):
            raise ValueError(f"y must be [{len(X)}], one output per row, got {outputs.shape}")
        if not np.isfinite(outputs).all():
            raise ValueError("y must be finite")
        if not 0 <= margin < np.inf:
            raise ValueError(f"margin must be at least 0 and finite, got {margin}")
        scores = -np.asarray(log_density(X, outputs), np.float64)
        level = threshold(np.where(np.isnan(scores), np.inf, scores), alpha)
        room = margin * float(np.ptp(outputs))
        return cls(log_density, -level, float(outputs.min()) - room, float(outputs.max()) + room, alpha)

    def contains(self, X: Any, y: Any) -> Bool[np.ndarray, " rows"]:
        """Whether outputs lie in their sets; exact, without a grid."""
        return np.asarray(self.log_density(X, np.asarray(y, np.float64))) >= self.level

    def intervals(self, X: Any, points: int = 512) -> list[list[Interval]]:
        """The set of each row as intervals in rising order. Their ends are found on a grid of so many points and then
        by linear interpolation of the log-density; an interval narrower than the grid may be missed."""
        grid, densities = self._grid(X, points)
        return [self._of_row(grid, row) for row in densities]

    def sizes(self, X: Any, points: int = 512) -> Float[np.ndarray, " rows"]:
        """The total length of each row's set."""
        return np.array([sum(high - low for low, high in row) for row in self.intervals(X, points)])

    def _grid(self, X: Any, points: int) -> tuple[np.ndarray, np.ndarray]:
        if points < 2:
            raise ValueError(f"points must be at least 2, got {points}")
        rows, grid = np.asarray(X), np.linspace(self.low, self.high, points)
        size, parts = max(1, BLOCK // points), []
        for begin in range(0, len(rows), size):
            block = rows[begin : begin + size]
            found = self.log_density(np.repeat(block, points, 0), np.tile(grid, len(block)))
            parts.append(np.asarray(found, np.float64).reshape(len(block), points))
        return grid, np.concatenate(parts)

    def _of_row(self, grid: np.ndarray, densities: np.ndarray) -> list[Interval]:
        inside = np.concatenate([[False], densities >= self.level, [False]])
        starts, ends = np.flatnonzero(~inside[:-1] & inside[1:]), np.flatnonzero(inside[:-1] & ~inside[1:]) - 1
        return [
            Interval(self._edge(grid, densities, first, first - 1), self._edge(grid, densities, last, last + 1))
            for first, last in zip(starts.tolist(), ends.tolist(), strict=True)
        ]

    def _edge(self, grid: np.ndarray, densities: np.ndarray, inner: int, outer: int) -> float:
        """Where the log-density crosses the level between two neighbours."""
        if not 0 <= outer < len(grid) or not np.isfinite(densities[[inner, outer]]).all():
            return float(grid[inner])
        share = (densities[inner] - self.level) / (densities[inner] - densities[outer])
        return float(grid[inner] + share * (grid[outer] - grid[inner]))
