"""Means over seeds with their confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Student's t, two-sided 95 %, by degrees of freedom.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % confidence interval (Student's t)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """Mean and interval of the values; a single value has an infinite interval."""
        numbers = np.asarray(values, np.float64)
        centre = float(numbers.mean())
        if len(numbers) < 2:
            return cls(centre, -math.inf, math.inf)
        freedom = len(numbers) - 1
        quantile = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.5 / freedom
        half = quantile * float(numbers.std(ddof=1)) / math.sqrt(len(numbers))
        return cls(centre, centre - half, centre + half)

    @classmethod
    def of_difference(cls, one: Sequence[float], other: Sequence[float]) -> "Interval":
        """Interval of one − other, paired by seed: runs with the same seed have the same demonstrations."""
        return cls.of(minus(one, other))

    @property
    def half(self) -> float:
        """Half of its width, for error bars; 0 for a single value."""
        return self.high - self.mean if math.isfinite(self.high) else 0.0

    def percent(self) -> str:
        return f"{100 * self.mean:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"

    def points(self) -> str:
        """A difference of two shares, in percentage points."""
        return f"{100 * self.mean:+.1f} points ({100 * self.low:+.1f} to {100 * self.high:+.1f})"

    def number(self) -> str:
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"

    def to_json(self) -> list[float | None]:
        """Mean, low and high; None in place of an infinite value, which JSON cannot write."""
        return [value if math.isfinite(value) else None for value in (self.mean, self.low, self.high)]


def minus(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """one − other, seed by seed."""
    return [a - b for a, b in zip(one, other, strict=True)]
