"""Announces episodes that will fail: by how long the demonstrations took from here.

A step t expects its episode to end at t + r(x), with r(x) the mean number of steps that the demonstrations had left at
the k observations nearest to x. The score of an episode is the largest such expectation, so one that stands still, or
has gone where demonstrations are long, has a large one. The threshold is that of split conformal prediction over
*successful* episodes of the policy (as FAIL-Detect, Xu et al. 2025, calibrates on successes alone): of those like them,
at most a share α is announced to fail. Nothing is promised of those that do fail: measure how many are announced.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cebm.demonstrations import Demonstrations
from cebm.trust.calibration import threshold

MOST = 4096
"""Observations that are kept."""


@dataclass(frozen=True, eq=False)
class FailureAlarm:
    """Says when an episode will end by the demonstrations, and announces failures. `FailureAlarm.fit` makes one."""

    seen: Float[Tensor, "some obs"]
    """Demonstrated observations, in deviations of each column."""
    left: Float[Tensor, " some"]
    """Steps that were left in their episodes."""
    spread: Float[Tensor, " obs"]
    """The deviation of each column."""
    neighbours: int
    """How many of the nearest observations count."""
    limit: float
    """An episode that is expected to end later is announced to fail."""
    alpha: float
    """Largest share of successful episodes, like those of the calibration, that are announced."""

    @classmethod
    def fit(
        cls, demonstrations: Demonstrations, successes: Demonstrations, alpha: float = 0.1, *, neighbours: int = 20
    ) -> "FailureAlarm":
        """From demonstrations, and from episodes in which the policy itself succeeded, of the same observations."""
        if neighbours < 1:
            raise ValueError(f"neighbours must be at least 1, got {neighbours}")
        if successes.obs_dim != demonstrations.obs_dim:
            raise ValueError(
                f"successes: an observation has {successes.obs_dim} columns, the demonstrations have "
                f"{demonstrations.obs_dim}"
            )
        rows = np.arange(0, demonstrations.steps, -(-demonstrations.steps // MOST))
        obs = np.asarray(demonstrations.obs, np.float32)
        ends = np.repeat(demonstrations.episode_ends, demonstrations.episode_ends - demonstrations.episode_starts)
        left = torch.from_numpy((ends - 1 - np.arange(demonstrations.steps))[rows]).float()
        spread = torch.from_numpy(obs.std(0))
        spread = torch.where(spread > 0, spread, torch.ones_like(spread))
        found = cls(torch.from_numpy(obs[rows]) / spread, left, spread, neighbours, np.inf, alpha)
        lengths = successes.episode_ends - successes.episode_starts
        steps = np.concatenate([np.arange(length) for length in lengths])
        ends_at = found.expected(np.asarray(successes.obs), steps).numpy()
        scores = np.array([part.max() for part in np.split(ends_at, successes.episode_ends[:-1])])
        return cls(found.seen, left, spread, neighbours, threshold(scores, alpha), alpha)

    def expected(self, obs: object, step: object) -> Float[Tensor, " batch"]:
        """The step at which episodes will end that show `obs` [batch, obs] at these steps, counted from 0."""
        rows = torch.as_tensor(np.asarray(obs, np.float32))
        if rows.ndim != 2 or rows.shape[1] != len(self.spread):
            raise ValueError(f"obs must be [batch, {len(self.spread)}], got {tuple(rows.shape)}")
        if not bool(rows.isfinite().all()):
            raise ValueError("obs must be finite")
        passed = torch.as_tensor(np.asarray(step, np.float32)).expand(len(rows))
        blocks = []
        for block in (rows / self.spread).split(4096):
            nearest = torch.cdist(block, self.seen).topk(min(self.neighbours, len(self.seen)), 1, largest=False)
            blocks.append(self.left[nearest.indices].mean(1))
        return passed + torch.cat(blocks)

    def __call__(self, obs: object, step: object) -> Bool[Tensor, " batch"]:
        """Which episodes are announced to fail; an announcement, once made, stands."""
        return self.expected(obs, step) > self.limit
