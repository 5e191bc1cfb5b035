"""Fixed shares of several sources."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

import torch
from torch import Tensor

from cebm.energies.base import Actions, Energies, EnergyModel, Obs
from cebm.negatives.base import Density, Negatives, Positives, check_pairs, own_losses


@dataclass(frozen=True)
class Mixture:
    """Fixed shares of several sources. Where all densities are known, q is their mixture Σ_j (n_j/n) q_j
    with the actual counts n_j."""

    sources: Sequence[Any]
    """The sources, or settings of sources."""
    fractions: tuple[float, ...]
    """The share of each; they add up to 1. Counts are rounded so that they add up to n."""

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.fractions) or not self.sources:
            raise ValueError(f"fractions must name one share per source, got {self.fractions}")
        if any(not f >= 0 for f in self.fractions) or abs(sum(self.fractions) - 1) > 1e-6:
            raise ValueError(f"fractions must be shares that add up to 1, got {self.fractions}")

    def counts(self, n: int) -> list[int]:
        """Number of negatives of each source, n together: rounded down, then one more for the largest remainders."""
        exact = [f * n / sum(self.fractions) for f in self.fractions]
        counts = [int(e + 1e-9) for e in exact]
        by_remainder = sorted(range(len(exact)), key=lambda j: counts[j] - exact[j])
        for j in by_remainder[: n - sum(counts)]:
            counts[j] += 1
        return counts

    @property
    def known_density(self) -> bool:
        """Whether each source has a method `log_prob`. A mixture in a mixture has none: list its sources instead."""
        return all(isinstance(source, Density) for source in self.sources)

    def own_losses(self, actions: Positives, negatives: Actions) -> dict[str, Tensor]:
        """The losses of each source on the negatives that came from it. Where two sources give the same name, that of
        the later one gets its position in `sources`."""
        losses: dict[str, Tensor] = {}
        parts = negatives.split(self.counts(negatives.shape[1]), 1)
        for index, (source, part) in enumerate(zip(self.sources, parts, strict=True)):
            if part.shape[1]:
                for name, loss in own_losses(source, actions, part).items():
                    losses[f"{name}_{index}" if name in losses else name] = loss
        return losses

    def sample(
        self,
        energy: EnergyModel,
        obs: Obs,
        actions: Positives,
        n: int,
        generator: torch.Generator,
    ) -> Negatives:
        check_pairs(obs, actions, n)
        used = [(source, count) for source, count in zip(self.sources, self.counts(n), strict=True) if count]
        parts = [source.sample(energy, obs, actions, count, generator) for source, count in used]
        if any(part.obs.ndim != obs.ndim for part in parts):
            raise ValueError("sources that draw pairs (x, y), as the replay of a joint energy does, do not mix")
        info = next((part.info for part in parts if part.info is not None), None)
        mixed = Negatives(torch.cat([part.actions for part in parts], 1), obs, info=info)
        if not all(isinstance(source, Density) for source, _ in used):
            return mixed

        def log_prob(values: Actions) -> Energies:
            terms = [
                source.log_prob(actions, values) + log(count / n)
                for source, count in used
                if isinstance(source, Density)
            ]
            return torch.stack(terms).logsumexp(0)

        with torch.no_grad():
            return replace(mixed, log_q=log_prob(mixed.actions), log_q_positive=log_prob(actions.unsqueeze(1))[:, 0])
