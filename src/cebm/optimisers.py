"""Optimisers: the torch optimiser, its learning rate over a run, the batch size, and the averaging of the weights."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class RateSchedule(Protocol):
    """The learning rate over a run."""

    def rate(self, peak: float, step: int, steps: int | None, steps_per_epoch: int) -> float:
        """The learning rate of step `step`, counted from 0, in a run of `steps` steps (None: length not known)."""
        ...


@dataclass(frozen=True)
class Decay:
    """rate = peak · factor^⌊epoch / epochs⌋: multiplies it by `factor` every `epochs` epochs."""

    factor: float = 0.99
    """Factor by which the rate is multiplied."""
    epochs: int = 100
    """Epochs between two decays."""

    def __post_init__(self) -> None:
        if not 0 < self.factor <= 1:
            raise ValueError(f"factor must be in (0, 1], got {self.factor}")
        if self.epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {self.epochs}")

    def rate(self, peak: float, step: int, steps: int | None, steps_per_epoch: int) -> float:
        return peak * self.factor ** (step // (steps_per_epoch * self.epochs))


@dataclass(frozen=True)
class Cosine:
    """rate = peak · min(1, (k + 1)/warm_up) · ½(1 + cos πk/n) in step k of n: it rises over `warm_up` steps, and
    follows half a cosine down to 0 at the end of the run."""

    warm_up: int = 100
    """Steps over which the rate rises."""

    def __post_init__(self) -> None:
        if self.warm_up < 1:
            raise ValueError(f"warm_up must be at least 1, got {self.warm_up}")

    def rate(self, peak: float, step: int, steps: int | None, steps_per_epoch: int) -> float:
        if steps is None:
            raise ValueError("steps must be given: a learning rate that follows a cosine needs the run's length")
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return peak * min(1.0, (step + 1) / self.warm_up) * fall


@dataclass(frozen=True)
class Trapezoid:
    """rate = peak · min(1, (k + 1)/warm_up) · min(1, (1 − k/n)/fall) in step k of n: it rises over `warm_up` steps,
    stays, and falls in a straight line to 0 over the last `fall` share of the run."""

    warm_up: int = 500
    """Steps over which the rate rises."""
    fall: float = 0.3
    """Share of the run over which it falls."""

    def __post_init__(self) -> None:
        if self.warm_up < 1:
            raise ValueError(f"warm_up must be at least 1, got {self.warm_up}")
        if not 0 < self.fall <= 1:
            raise ValueError(f"fall must be in (0, 1], got {self.fall}")

    def rate(self, peak: float, step: int, steps: int | None, steps_per_epoch: int) -> float:
        if steps is None:
            raise ValueError("steps must be given: a learning rate that falls at the end needs the run's length")
        fall = (1 - step / steps) / self.fall
        return peak * min(1.0, (step + 1) / self.warm_up) * min(1.0, max(0.0, fall))


@runtime_checkable
class Optimiser(Protocol):
    """The contract of a trial's optimiser. Its torch optimiser keeps its state in tensors and numbers."""

    @property
    def batch_size(self) -> int: ...

    @property
    def average(self) -> float: ...

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Torch's optimiser of these weights."""
        ...

    def rate(self, step: int, steps: int | None, steps_per_epoch: int) -> float:
        """The learning rate of a step."""
        ...


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma & Ba 2015): θ ← θ − r m̂/(√v̂ + ε), with m̂ and v̂ the averages of the gradient and of its square; or
    AdamW, θ ← (1 − r · weight_decay) θ before it. β and ε are torch's."""

    learning_rate: float = 1e-3
    """The largest rate of the run."""
    schedule: RateSchedule = Decay()
    """How the rate changes over the run."""
    batch_size: int = 512
    """Number of examples per step."""
    average: float = 0.0
    """Decay of the moving average of the weights, which the policy then uses. 0: the policy uses the raw weights."""
    weight_decay: float = 0.0
    """Decay of the weights per step and unit of rate, apart from the gradient (AdamW, Loshchilov & Hutter 2019)."""

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if not 0 <= self.average < 1:
            raise ValueError(f"average must be in [0, 1), got {self.average}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0 and finite, got {self.weight_decay}")
        if isinstance(self.schedule, type) or not isinstance(self.schedule, RateSchedule):
            given = self.schedule.__name__ if isinstance(self.schedule, type) else repr(self.schedule)
            raise ValueError(f"schedule must be an object with a method `rate`, got {given}")

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        # Torch refuses to optimise nothing, and an energy may have no weights.
        weights = [*parameters] or [nn.Parameter(torch.zeros(0))]
        if not self.weight_decay:
            return torch.optim.Adam(weights, self.learning_rate)
        # Fused: one pass over the weights, which is several times as fast as one operation after the other.
        return torch.optim.AdamW(weights, self.learning_rate, weight_decay=self.weight_decay, fused=True)

    def rate(self, step: int, steps: int | None, steps_per_epoch: int) -> float:
        return self.schedule.rate(self.learning_rate, step, steps, steps_per_epoch)
