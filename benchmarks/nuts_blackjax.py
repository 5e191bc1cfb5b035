"""blackjax' NUTS on the certificate's targets: a script for an environment with blackjax, which cebm does not need.

Reads the targets' parameters from no one: the energies are written out here, in jax; `benchmarks.nuts` checks them
against the library's on the draws. Writes one .npz with the draws and the number of gradients per target.
"""

import sys
from collections.abc import Callable
from typing import Any

import blackjax
import jax
import jax.numpy as jnp
import numpy as np

LIMIT = 1.1


def gaussian(y: Any) -> Any:
    return jnp.sum(((y - jnp.array([0.3, 0.4])) / jnp.array([0.1, 0.2])) ** 2) / 2


def skewed(y: Any) -> Any:
    z = y / jnp.array([0.1, 0.15])
    return jnp.sum(5 * jnp.logaddexp(z, 0.0) - jnp.array([4.0, 1.0]) * z)


def double_well(y: Any) -> Any:
    z = y / jnp.array([0.5, 0.4])
    return jnp.sum((z**2 - 1) ** 2 + jnp.array([0.25, -0.25]) * z)


def box(y: Any) -> Any:
    return jnp.where(jnp.any(jnp.abs(y) > LIMIT), jnp.inf, jnp.sum(jnp.array([3.0, -1.5]) * y))


def correlated(y: Any) -> Any:
    std = jnp.array([0.1, 0.2])
    precision = jnp.linalg.inv(jnp.outer(std, std) * jnp.array([[1.0, 0.9], [0.9, 1.0]]))
    away = y - jnp.array([0.1, -0.1])
    return away @ precision @ away / 2


def banana(y: Any) -> Any:
    return y[0] ** 2 / (2 * 0.16) + (y[1] - y[0] ** 2 + 0.16) ** 2 / (2 * 0.04)


def funnel(y: Any) -> Any:
    return y[0] ** 2 / (2 * 0.16) + (y[1] / (0.15 * jnp.exp(1.25 * y[0]))) ** 2 / 2 + 1.25 * y[0]


def ring(y: Any) -> Any:
    return (jnp.sqrt(jnp.sum(y**2)) - 0.5) ** 2 / (2 * 0.12**2)


ENERGIES: dict[str, Callable[[Any], Any]] = {
    "gaussian": gaussian,
    "skewed": skewed,
    "double-well": double_well,
    "box": box,
    "correlated": correlated,
    "banana": banana,
    "funnel": funnel,
    "ring": ring,
}


def nuts(energy: Callable[[Any], Any], starts: Any, seed: int, warm: int, kept: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws [chains, kept, act] and leapfrog steps of each chain, after blackjax' window adaptation of each."""

    def density(y: Any) -> Any:
        return -energy(y)

    def chain(key: Any, start: Any) -> Any:
        adaptation = blackjax.window_adaptation(blackjax.nuts, density)
        warming, sampling = jax.random.split(key)
        (state, parameters), _ = adaptation.run(warming, start, warm)
        kernel = blackjax.nuts(density, **parameters)

        def step(state: Any, key: Any) -> Any:
            state, info = kernel.step(key, state)
            return state, (state.position, info.num_integration_steps)

        _, (positions, steps) = jax.lax.scan(step, state, jax.random.split(sampling, kept))
        return positions, steps.sum()

    keys = jax.random.split(jax.random.key(seed), len(starts))
    positions, steps = jax.jit(jax.vmap(chain))(keys, starts)
    return np.asarray(positions), np.asarray(steps)


def main(source: str, out: str, seed: int, warm: int, kept: int) -> None:
    """Runs all targets from the starts in `source`, writes `out`."""
    starts = np.load(source)
    found: dict[str, Any] = {"blackjax": np.array(blackjax.__version__), "jax": np.array(jax.__version__)}
    for name, energy in ENERGIES.items():
        draws, steps = nuts(energy, jnp.asarray(starts[name]), seed, warm, kept)
        found |= {
            f"{name}.draws": draws,
            f"{name}.gradients": steps,
            f"{name}.energies": np.asarray(jax.vmap(energy)(draws[:, -1])),
        }
    np.savez(out, **found)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
