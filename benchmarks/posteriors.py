"""Posteriors of the simulation-based inference benchmark (Lueckmann et al. 2021), learned by the regressor.

    python -m benchmarks.posteriors --data SBIBM --simulations 100000 --seeds 0 1 2
    python -m benchmarks.posteriors --plot

First each of `CANDIDATES` trains for the same CPU time on simulations of its own, and the record keeps its likelihood
of held-out simulations; the best on a task is what is measured then. No reference draw has a part in the choice.
`--choose` does this alone.

`SBIBM` is a folder with `two_moons` and `slcp`, each with ten observations and 10,000 reference draws of their exact
posteriors. The regressor learns p(parameters | data) from simulated pairs; its draws are compared with the reference by
a classifier (C2ST: 0.5 is perfect, 1 is hopeless). Rows go to docs/densities.jsonl as they are known, and those that
are there are not measured again; models are kept in `--models`. `--plot` draws docs/densities.png from the rows.
Times are CPU seconds, so that other work on the machine changes nothing.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

import cebm
from benchmarks.moons import divergence
from benchmarks.posterior_tables import choices, scores
from cebm.regressor import ConditionalEBMRegressor

DOCS = Path(__file__).parents[1] / "docs"
OUT, PICTURE = DOCS / "densities.jsonl", DOCS / "densities.png"
SIMULATED, RANKS = 200, 99
"""Fresh simulations for calibration, and draws for the ranks of each."""
Row = dict[str, Any]


# ---------------------------------------------------------------------------------------------- the tasks


def two_moons(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A crescent of radius 0.1, whose place depends on |y₁ + y₂| and y₂ − y₁."""
    angle, radius = rng.uniform(-np.pi / 2, np.pi / 2, len(y)), rng.normal(0.1, 0.01, len(y))
    crescent = np.stack([radius * np.cos(angle) + 0.25, radius * np.sin(angle)], 1)
    return crescent + np.stack([-np.abs(y.sum(1)), y[:, 1] - y[:, 0]], 1) / np.sqrt(2)


def slcp(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Four draws of a Gaussian: mean (y₁, y₂), deviations y₃² and y₄², correlation tanh y₅; 1e-6 on the diagonal."""
    first, second = y[:, 2] ** 2, y[:, 3] ** 2
    shared = np.tanh(y[:, 4]) * first * second
    covariance = np.stack([first**2 + 1e-6, shared, shared, second**2 + 1e-6], 1).reshape(-1, 2, 2)
    noise = rng.normal(size=(len(y), 4, 2))
    return (y[:, None, :2] + noise @ np.linalg.cholesky(covariance).transpose(0, 2, 1)).reshape(len(y), 8)


@dataclass(frozen=True)
class Posterior:
    """A task of the benchmark."""

    simulate: Callable[[np.ndarray, np.random.Generator], np.ndarray]
    """Data for parameters [rows, parameters]."""
    parameters: int
    limit: float
    """The prior is uniform between −limit and limit."""

    def pairs(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Data and parameters of simulations, parameters from the prior."""
        y = rng.uniform(-self.limit, self.limit, (count, self.parameters))
        return self.simulate(y, rng), y


TASKS = {"two_moons": Posterior(two_moons, 2, 1.0), "slcp": Posterior(slcp, 5, 3.0)}


def seen(x: np.ndarray) -> np.ndarray:
    """What the regressor gets of the data: themselves, as two_moons' parameters are a straight line of them, and their
    asinh, as slcp's have heavy tails."""
    return np.concatenate([x, np.arcsinh(x)], 1)


# ---------------------------------------------------------------------------------------------- model and scores


@dataclass(frozen=True)
class Training:
    """How the regressor is trained."""

    negatives: int = 4
    hidden_layers: int = 3
    components: int = 32
    learning_rate: float = 3e-3
    width: int = 256
    batch_size: int = 256
    covariance: str = "diagonal"

    def within(self, seconds: float, X: np.ndarray, y: np.ndarray) -> int:
        """Steps that take so many CPU seconds, by a trial of 60 after one that warms up."""
        spent = []
        for steps in (10, 20, 80):
            began = process_time()
            self.model(steps, 0).set_params(validation_fraction=0.0).fit(X, y)
            spent.append(process_time() - began)
        spent = spent[1:]
        each, once = (spent[1] - spent[0]) / 60, spent[0] - (spent[1] - spent[0]) / 3
        return max(100, int((seconds - max(0.0, once)) / max(each, 1e-6)))

    def model(self, steps: int, seed: int) -> ConditionalEBMRegressor:
        """The regressor, not yet trained."""
        return ConditionalEBMRegressor(
            width=self.width,
            steps=steps,
            negatives=self.negatives,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            validation_fraction=0.05,
            patience=_LOOKS,
            random_state=seed,
            components=self.components,
            hidden_layers=self.hidden_layers,
            covariance=self.covariance,
        )


CANDIDATES = {
    "16 negatives, 2 layers, 8 components": Training(16, 2, 8),
    "4 negatives, 3 layers, 16 whole covariances": Training(4, 3, 16, covariance="full"),
    "4 negatives, 3 layers, 32 whole covariances": Training(4, 3, 32, covariance="full"),
}
"""What `--choose` chooses from."""
_LOOKS = 12
"""Looks at the held-out rows: as many without a rise as there are end no training before its rate has fallen to 0."""
CHOSEN_BY = 1000
"""Seed of the simulations that choose; those that are measured have others."""


def within_prior(
    model: ConditionalEBMRegressor, limit: float, X: np.ndarray, n: int, seed: int
) -> tuple[np.ndarray, float]:
    """`n` draws per row that the prior allows [rows, n, parameters], and the share of all that it allows."""
    few = model.sample(X, n, seed)
    share = float((np.abs(few) <= limit).all(2).mean())
    lowest = float((np.abs(few) <= limit).all(2).mean(1).min())
    drawn = np.concatenate([few, model.sample(X, int(n * (1.3 / max(lowest, 0.2) - 1)) + 32, seed + 1)], 1)
    good = (np.abs(drawn) <= limit).all(2)
    if good.sum(1).min() < n:
        raise ValueError(f"a posterior has {int(good.sum(1).min())} draws within the prior, {n} are needed")
    return np.stack([row[keep][:n] for row, keep in zip(drawn, good, strict=True)]), share


def c2st(reference: np.ndarray, draws: np.ndarray) -> float:
    """Accuracy of a classifier that tells the two apart (Lopez-Paz & Oquab 2017), as the benchmark has it: two hidden
    layers of 10 × columns units, five shuffled folds, both standardised by the reference."""
    from sklearn.model_selection import KFold, cross_val_score
    from sklearn.neural_network import MLPClassifier

    middle, spread = reference.mean(0), reference.std(0)
    both = np.concatenate([(reference - middle) / spread, (draws - middle) / spread])
    labels = np.repeat([0, 1], [len(reference), len(draws)])
    width = 10 * reference.shape[1]
    judge = MLPClassifier((width, width), activation="relu", solver="adam", max_iter=10_000, random_state=1)
    folds = KFold(5, shuffle=True, random_state=1)
    return float(cross_val_score(judge, both, labels, cv=folds, scoring="accuracy").mean())


def exactly(model: ConditionalEBMRegressor, rows: int = 20) -> Row:
    """How far the density is from two_moons' posterior, which is known: means over fresh simulations."""
    rng = np.random.default_rng(CHOSEN_BY + 1)
    x, _ = TASKS["two_moons"].pairs(rows, rng)
    return divergence(model.policy_, seen(x), x, rng)


def calibrated(model: ConditionalEBMRegressor, task: Posterior, rng: np.random.Generator) -> Row:
    """Of fresh simulations the ranks of the true parameters among draws (Talts et al. 2018), and the share of draws
    that are likelier than the truth: uniform on 0 to 1 where regions of highest density cover what they should."""
    x, y = task.pairs(SIMULATED, rng)
    ranks, levels = [], []
    for begin in range(0, SIMULATED, 50):
        X, truth = seen(x[begin : begin + 50]), y[begin : begin + 50]
        draws, _ = within_prior(model, task.limit, X, RANKS, begin)
        ranks.append((draws < truth[:, None]).sum(1))
        policy = model.policy_
        together = torch.from_numpy(np.concatenate([truth[:, None], draws], 1).astype(np.float32))
        with torch.no_grad():
            context = policy.problem(X.astype(np.float32)).context
            energies = policy.energy.energies(context, policy.act_box.normalise(together))
        levels.append((energies[:, 1:] < energies[:, :1]).double().mean(1).numpy())
    return {"ranks": np.concatenate(ranks).tolist(), "levels": np.concatenate(levels).round(4).tolist()}


# ---------------------------------------------------------------------------------------------- the record


class Record:
    """Rows of measurements in a file, each appended as it is known."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def find(self, key: Row) -> Row | None:
        """The row with these entries."""
        return next((row for row in self.rows if key.items() <= row.items()), None)

    def measure(self, key: Row, measured: Callable[[], Row]) -> Row:
        """The row of that key: that of the file, or a new one."""
        found = self.find(key)
        if found is None:
            found = key | measured()
            self.rows.append(found)
            with self.path.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print({name: value for name, value in found.items() if name not in ("ranks", "levels")}, flush=True)
        return found


def fitted(name: str, simulations: int, seed: int, training: Training, minutes: float) -> tuple[Any, Row]:
    """A model that was trained for so many minutes of CPU, and what its training was."""
    x, y = TASKS[name].pairs(simulations, np.random.default_rng([seed, simulations, len(name)]))
    X = seen(x)
    steps = training.within(60 * minutes, X, y)
    wall, cpu = perf_counter(), process_time()
    model = training.model(steps, seed).fit(X, y)
    told = {
        "steps": steps,
        "best_step": model.best_step_,
        "held_out": model.held_out_score_,
        "seconds": round(perf_counter() - wall),
        "cpu_seconds": round(process_time() - cpu),
        **asdict(training),
    }
    return model, told


def _choice(name: str, simulations: int, training: Training, minutes: float) -> Row:
    """What the training of a candidate was, with its held-out likelihood."""
    return fitted(name, simulations, CHOSEN_BY, training, minutes)[1]


def choose(arguments: argparse.Namespace, name: str) -> str:
    """The candidate for a task: the one with the best held-out likelihood. Those that are not in the record, with
    whatever number of simulations, are trained first."""
    record = Record(arguments.out)
    for candidate, training in CANDIDATES.items():
        key: Row = {"what": "choice", "task": name, "candidate": candidate}
        if record.find(key) is None:
            key["simulations"] = arguments.simulations
            record.measure(key, partial(_choice, name, arguments.simulations, training, arguments.choice_minutes))
    return chosen(record.rows, name)


def chosen(rows: list[Row], name: str) -> str:
    """The candidate with the best held-out likelihood on a task."""
    scores = {row["candidate"]: row["held_out"] for row in rows if (row["what"], row["task"]) == ("choice", name)}
    if not scores.keys() & CANDIDATES.keys():
        raise ValueError(f"no candidate was tried on {name}: run --choose first")
    return max(scores.keys() & CANDIDATES.keys(), key=lambda candidate: float(scores[candidate]))


def trained(
    name: str, simulations: int, seed: int, training: Training, minutes: float, folder: Path
) -> tuple[ConditionalEBMRegressor, Row]:
    """The model that is kept in the folder, or a new one, and what its training was."""
    book = folder / "training.json"
    if not book.exists():
        model, told = fitted(name, simulations, seed, training, minutes)
        model.policy_.save(folder)
        book.write_text(json.dumps(told))
    task, model = TASKS[name], training.model(1, seed)
    model.policy_, model.single_output_ = cebm.load(folder), False
    model.n_features_in_ = seen(task.simulate(np.zeros((1, task.parameters)), np.random.default_rng(0))).shape[1]
    return model, json.loads(book.read_text())


def scored(place: Path, model: ConditionalEBMRegressor, limit: float, seed: int) -> Row:
    """C2ST of the model's draws for one observation, with the time that the draws took."""
    x = np.loadtxt(place / "observation.csv", delimiter=",", skiprows=1)
    reference = np.loadtxt(place / "reference_posterior_samples.csv.bz2", delimiter=",", skiprows=1)
    began = process_time()
    draws, share = within_prior(model, limit, seen(x[None]), len(reference), seed)
    seconds = round(process_time() - began, 1)
    return {"c2st": c2st(reference, draws[0].astype(float)), "within_prior": share, "seconds": seconds}


def measure(arguments: argparse.Namespace) -> None:
    """All rows of one number of simulations, with the chosen training; where none is chosen, it is chosen first."""
    for seed in arguments.seeds:
        for name in arguments.tasks:
            candidate = choose(arguments, name)
            record, training = Record(arguments.out), CANDIDATES[candidate]
            key: Row = {"task": name, "simulations": arguments.simulations, "seed": seed, "candidate": candidate}
            folder = arguments.models / f"{name}-{arguments.simulations}-{seed}-{list(CANDIDATES).index(candidate)}"
            model, told = trained(name, arguments.simulations, seed, training, arguments.minutes, folder)
            record.measure({**key, "what": "training"}, partial(dict, told))
            for index in range(1, arguments.observations + 1):
                place = arguments.data / name / f"num_observation_{index}"
                single = partial(scored, place, model, TASKS[name].limit, seed)
                record.measure({**key, "what": "c2st", "observation": index}, single)
            if name == "two_moons":
                record.measure({**key, "what": "exact"}, partial(exactly, model))
            all_together = partial(calibrated, model, TASKS[name], np.random.default_rng([seed, 7]))
            record.measure({**key, "what": "calibration"}, all_together)


def plot(rows: list[Row], out: Path) -> None:
    """Ranks of simulation-based calibration and expected coverage, one row of two pictures per task."""
    from matplotlib.figure import Figure

    found = [row for row in rows if row["what"] == "calibration"]
    figure = Figure(figsize=(9, 3.2 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), 2, squeeze=False)
    for (left, right), row in zip(axes, found, strict=True):
        title, ranks = f"{row['task']}, {row['simulations']:,} simulations", np.array(row["ranks"])
        bins = np.linspace(0, RANKS + 1, 11)
        for column in range(ranks.shape[1]):
            left.hist(ranks[:, column], bins, histtype="step", label=f"parameter {column + 1}")
        mean = len(ranks) / 10
        error = 1.96 * np.sqrt(mean * 0.9)
        left.axhspan(mean - error, mean + error, color="0.9")
        left.set(title=title, xlabel="rank of the truth among 99 draws", ylabel="simulations")
        left.legend(fontsize=7)
        nominal = np.linspace(0, 1, 51)
        covered = (np.array(row["levels"])[:, None] <= nominal).mean(0)
        half = 1.96 * np.sqrt(nominal * (1 - nominal) / len(ranks))
        right.fill_between(nominal, nominal - half, nominal + half, color="0.9")
        right.plot(nominal, covered)
        right.set(title=title, xlabel="nominal coverage", ylabel="expected coverage", xlim=(0, 1), ylim=(0, 1))
    figure.savefig(out, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--simulations", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--observations", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=15.0, help="of CPU that a training takes")
    parser.add_argument("--choice-minutes", type=float, default=4.0, help="of CPU that a training of the choice takes")
    parser.add_argument("--choose", action="store_true", help="try the candidates, measure nothing else")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", type=Path, default=Path("runs/posteriors"))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--plot", action="store_true", help="draw the picture from the rows, measure nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.plot:
        plot(Record(arguments.out).rows, PICTURE)
    elif arguments.choose:
        for name in arguments.tasks:
            choose(arguments, name)
    elif arguments.data is None:
        raise ValueError("--data must name the folder of the benchmark")
    else:
        measure(arguments)
    rows = Record(arguments.out).rows
    for heading, lines in (choices(rows), scores(rows)):
        print("\n".join(" | ".join(cells) for cells in (heading, *lines)), end="\n\n")


if __name__ == "__main__":
    main()
