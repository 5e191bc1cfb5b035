"""The exact posterior of two_moons, and how far a learned density is from it.

A parameter y is seen as x = p − s(y), s = (|y₁ + y₂|, y₁ − y₂)/√2, with p on a crescent; s turns the plane and folds it
once. So given x, every p with x₁ ≤ p₁ belongs to two parameters, mirror images of each other, of which the prior allows
those within [-1, 1]²; the turn keeps areas, and the posterior is the density of p over the share that is allowed.
"""

import numpy as np
import torch

from cebm.densities import Estimator
from cebm.energies.base import Context, EnergyModel, mapped
from cebm.policy import EnergyPolicy

ROOT = np.sqrt(2.0)
RADIUS, THICKNESS, MIDDLE = 0.1, 0.01, 0.25


def posterior(x: np.ndarray, n: int, rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """Exact draws [some, 2] of p(y|x), and the log of the share by which its density is divided, from `n` points of
    the crescent."""
    angle, radius = rng.uniform(-np.pi / 2, np.pi / 2, n), rng.normal(RADIUS, THICKNESS, n)
    shift = np.stack([radius * np.cos(angle) + MIDDLE, radius * np.sin(angle)], 1) - x
    shift = shift[shift[:, 0] >= 0]
    both = np.concatenate([np.stack([sign * shift[:, 0], shift[:, 1]], 1) for sign in (1, -1)])
    y = np.stack([both[:, 0] + both[:, 1], both[:, 0] - both[:, 1]], 1) / ROOT
    y = y[(np.abs(y) <= 1).all(1)]
    return y, float(np.log(len(y) / n))


def log_likelihood(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """log p(x|y)."""
    away = x + np.stack([np.abs(y.sum(1)), y[:, 0] - y[:, 1]], 1) / ROOT - [MIDDLE, 0.0]
    radius = np.hypot(*away.T)
    height = -0.5 * ((radius - RADIUS) / THICKNESS) ** 2 - np.log(THICKNESS * np.sqrt(2 * np.pi) * np.pi * radius)
    return np.where(away[:, 0] > 0, height, -np.inf)


def divergence(policy: EnergyPolicy, X: np.ndarray, x: np.ndarray, rng: np.random.Generator) -> dict[str, float]:
    """Of the learned density and of its mixture alone: Kullback–Leibler divergence from the exact posterior, and the
    accuracy that the best possible classifier would have, (1 + total variation)/2, where C2ST is that of a small
    network. Means over the rows x; X is what the policy sees of them."""
    with torch.no_grad():
        whole = policy.problem(X.astype(np.float32)).context
    found: dict[str, list[float]] = {}
    for row, data in enumerate(x):
        y, share = posterior(data, 4000, rng)
        exact = log_likelihood(data, y) - share
        for name, energy, context in (
            ("", policy.energy, whole),
            (", mixture alone", getattr(policy.energy, "base", policy.energy), whole[1]),
        ):
            learned = _log_density(policy, energy, _row(context, row), y)
            found.setdefault(f"divergence{name}", []).append(float((exact - learned).mean()))
            missed = np.maximum(0, 1 - np.exp(np.minimum(learned - exact, 50))).mean()
            found.setdefault(f"best accuracy{name}", []).append(float(0.5 + 0.5 * missed))
    return {name: round(float(np.mean(values)), 4) for name, values in found.items()}


def _row(context: Context, row: int) -> Context:
    return mapped(lambda part: part[row : row + 1], context)


def _log_density(policy: EnergyPolicy, energy: EnergyModel, context: Context, y: np.ndarray) -> np.ndarray:
    """log p(y|x) within the prior, in the units of the parameters."""
    box = policy.act_box
    with torch.no_grad():
        drawn = Estimator(4096, anneal=False)(energy, context, box.limit, torch.Generator().manual_seed(0))
        inside = (box.denormalise(drawn.actions).abs() <= 1).all(-1).to(drawn.log_weights.dtype)
        allowed = (drawn.log_weights.softmax(1) * inside).sum(1)
        points = box.normalise(torch.from_numpy(y.astype(np.float32))).unsqueeze(0)
        value = -energy.energies(context, points)[0] - drawn.log_partition - allowed.log() - box.scale.log().sum()
    return value.double().numpy()
