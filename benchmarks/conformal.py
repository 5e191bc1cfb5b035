"""Coverage and size of conformal sets of 90 % on five data sets, beside conformalised quantile regression.

    python -m benchmarks.conformal

Both get the same rows to learn from and the same rows to calibrate on; the intervals of quantile regression (gradient
boosting of the 5 % and the 95 % quantile) are widened as Romano et al. (2019) do. Coverage is the mean over ten random
halves of the held-out rows. Rows go to docs/conformal.jsonl as they are known; those that are there are not repeated.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_diabetes, make_friedman1
from sklearn.ensemble import HistGradientBoostingRegressor

from cebm import ConformalSets
from cebm.densities import Estimator
from cebm.regressor import ConditionalEBMRegressor
from cebm.trust.calibration import threshold

OUT = Path(__file__).parents[1] / "docs" / "conformal.jsonl"
ALPHA, SPLITS, SIZED = 0.1, 10, 200
Pairs = tuple[np.ndarray, np.ndarray]


def fork(rng: np.random.Generator, n: int) -> Pairs:
    """Two ways that part."""
    x = rng.uniform(-1, 1, (n, 1))
    return x, rng.choice([-1.0, 1.0], n) * (1 + x[:, 0]) + 0.1 * rng.normal(size=n)


def widening(rng: np.random.Generator, n: int) -> Pairs:
    """Noise that grows to both sides."""
    x = rng.uniform(-1, 1, (n, 1))
    return x, np.sin(3 * x[:, 0]) + (0.05 + 0.4 * np.abs(x[:, 0])) * rng.normal(size=n)


def skewed(rng: np.random.Generator, n: int) -> Pairs:
    """Noise on one side alone."""
    x = rng.uniform(-1, 1, (n, 1))
    return x, x[:, 0] + rng.exponential(0.5, n)


def friedman(rng: np.random.Generator, n: int) -> Pairs:
    """Friedman's first function of five of ten columns, noise of deviation 1."""
    return make_friedman1(n, noise=1.0, random_state=int(rng.integers(2**31)))


SETS: dict[str, Callable[[np.random.Generator, int], Pairs]] = {
    "fork": fork,
    "widening": widening,
    "skewed": skewed,
    "friedman": friedman,
}


def data(name: str, rng: np.random.Generator) -> tuple[Pairs, Pairs]:
    """Rows to learn from, and rows that are held out."""
    if name == "diabetes":
        x, y = load_diabetes(return_X_y=True)
        order = rng.permutation(len(x))
        return (x[order[:242]], y[order[:242]]), (x[order[242:]], y[order[242:]])
    return SETS[name](rng, 1500), SETS[name](rng, 2000)


def log_density(model: ConditionalEBMRegressor, X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """log p(y|x) in normalised units, with one estimate of log Z for equal rows that follow each other."""
    policy = model.policy_
    new = np.concatenate([[True], (X[1:] != X[:-1]).any(1)])
    rows, index = X[new].astype(np.float32), np.cumsum(new) - 1
    outputs = policy.act_box.normalise(torch.from_numpy(y.astype(np.float32)).unsqueeze(1))
    with torch.no_grad():
        problem = policy.problem(rows)
        estimate = Estimator(1024, shared=True)
        log_z = estimate(policy.energy, problem.context, policy.act_box.limit, problem.generator).log_partition
        every = policy.problem(X.astype(np.float32)).context
        found = -policy.energy.energies(every, outputs.unsqueeze(1))[:, 0] - log_z[torch.from_numpy(index)]
    return found.double().numpy()


def row(name: str, seed: int = 0) -> dict[str, Any]:
    """Coverage and mean size of both on one set."""
    rng = np.random.default_rng([seed, *name.encode()])
    (X, y), (X_out, y_out) = data(name, rng)
    model = ConditionalEBMRegressor(random_state=seed).fit(X, y)
    low, high = (HistGradientBoostingRegressor(loss="quantile", quantile=q).fit(X, y) for q in (0.05, 0.95))

    def density(rows: Any, outputs: Any) -> np.ndarray:
        return log_density(model, rows, outputs)

    scores = density(X_out, y_out)
    ends = low.predict(X_out), high.predict(X_out)
    misses = np.maximum(ends[0] - y_out, y_out - ends[1])
    covered: dict[str, list[float]] = {"sets": [], "quantile regression": []}
    wide = []
    for split in range(SPLITS):
        order = np.random.default_rng([10, split]).permutation(len(y_out))
        first, other = order[: len(order) // 2], order[len(order) // 2 :]
        covered["sets"].append(float((-scores[other] <= threshold(-scores[first], ALPHA)).mean()))
        wider = threshold(misses[first], ALPHA)
        covered["quantile regression"].append(float((misses[other] <= wider).mean()))
        wide.append(float(np.maximum(ends[1][other] - ends[0][other] + 2 * wider, 0).mean()))
    half = len(y_out) // 2
    sets = ConformalSets.fit(density, X_out[:half], y_out[:half], ALPHA)
    shown = X_out[half : half + SIZED]
    intervals = sets.intervals(shown)
    sizes = [sum(top - bottom for bottom, top in each) for each in intervals]
    return {
        "set": name,
        "coverage": round(float(np.mean(covered["sets"])), 4),
        "size": round(float(np.mean(sizes)), 4),
        "intervals": round(float(np.mean([len(each) for each in intervals])), 2),
        "coverage of quantile regression": round(float(np.mean(covered["quantile regression"])), 4),
        "size of quantile regression": round(float(np.mean(wide)), 4),
        "rows": [len(y), len(y_out)],
    }


def main() -> None:
    torch.set_num_threads(1)
    known = {json.loads(line)["set"] for line in OUT.read_text().splitlines()} if OUT.exists() else set()
    for name in (*SETS, "diabetes"):
        if name not in known:
            found = row(name)
            with OUT.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(found, flush=True)


if __name__ == "__main__":
    main()
