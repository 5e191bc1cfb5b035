"""Effective draws per gradient of our samplers and of blackjax' NUTS, on the certificate's targets, in one run.

`python -m benchmarks.nuts --blackjax /path/to/python` takes the interpreter of an environment with blackjax. Both get
the same starts, the same steps of warm-up and the same number of kept draws; both are measured by `cebm.diagnostics`:
the smallest bulk effective sample size over the coordinates and their squares, per gradient after the warm-up (and that
over the coordinates alone). The spread is that of `GROUPS` groups of chains. Writes docs/samplers.jsonl.

MALA and HMC run in two ways: "alone" adapts every chain by itself, as NUTS does; "together" takes the chains as those
of one observation, which share what they have learned, as chains do in a policy and in the certificate. A gradient
counts for the chain that takes the step; a chain that waits for a longer trajectory beside it pays nothing.
"""

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

from cebm.certificate import Target, analytic_targets
from cebm.diagnostics import ess_bulk, rhat
from cebm.samplers import HMC, MALA, Collect, Sampler, run

CHAINS, GROUPS, WARM, KEPT = 32, 4, 1000, 1000
OUT = Path(__file__).parents[1] / "docs" / "samplers.jsonl"


@dataclass(frozen=True)
class Comparison:
    """Compares our samplers with blackjax' NUTS."""

    blackjax: str = ""
    """Interpreter of an environment with blackjax. Empty: ours alone, and nothing is written."""
    seed: int = 0
    """Of the random numbers."""

    def __call__(self) -> None:
        torch.set_num_threads(1)
        rows = compare(self.blackjax, self.seed)
        if self.blackjax:
            OUT.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(summary(rows))


def ours(target: Target) -> dict[str, Sampler]:
    """Our samplers with no knowledge of the target but its walls."""
    steps = WARM + KEPT
    return {
        "mala": MALA(steps, adapt=WARM, margin=target.margin),
        "hmc": HMC(steps, adapt=WARM, margin=target.margin),
    }


def compare(blackjax: str, seed: int) -> list[dict[str, object]]:
    """One row per target and sampler."""
    generator = torch.Generator().manual_seed(seed)
    targets = analytic_targets()
    starts = {target.name: target.starts(CHAINS, 1, generator) for target in targets}
    theirs = _nuts(blackjax, starts, seed) if blackjax else {}
    rows = []
    for target in targets:
        if theirs:
            draws = torch.from_numpy(theirs[f"{target.name}.draws"])
            energies = target.energies(torch.empty(CHAINS, 0), draws[:, -1:])[:, 0]
            if not np.allclose(energies, theirs[f"{target.name}.energies"], rtol=1e-3, atol=1e-3):
                raise ValueError(f"{target.name}: the energy in nuts_blackjax is not the target's")
            rows += _rows(target, "nuts", draws, torch.from_numpy(theirs[f"{target.name}.gradients"]).double())
        for name, sampler in ours(target).items():
            for way, start in (("alone", starts[target.name]), ("together", starts[target.name].transpose(0, 1))):
                chain = run(sampler, target, target.encode(start[:, 0]), start, generator, Collect(WARM))
                draws = chain.actions.view(CHAINS, -1, target.act_dim)
                gradients = chain.info.evaluations[WARM:].sum().double().expand(CHAINS)
                rows += _rows(target, f"{name}, {way}", draws, gradients)
    return rows


def _nuts(python: str, starts: dict[str, Tensor], seed: int) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "starts.npz", Path(folder) / "draws.npz"
        arrays: dict[str, Any] = {name: start[:, 0].numpy() for name, start in starts.items()}
        np.savez(source, **arrays)
        script = Path(__file__).with_name("nuts_blackjax.py")
        arguments = [str(script), str(source), str(out), str(seed), str(WARM), str(KEPT)]
        subprocess.run([python, *arguments], check=True)
        return dict(np.load(out))


def _rows(target: Target, sampler: str, draws: Tensor, gradients: Tensor) -> list[dict[str, object]]:
    """One row per group of chains."""
    pairs = zip(draws.chunk(GROUPS), gradients.chunk(GROUPS), strict=True)
    return [_row(target, sampler, group, part, float(cost.sum())) for group, (part, cost) in enumerate(pairs)]


def _row(target: Target, sampler: str, group: int, draws: Tensor, gradients: float) -> dict[str, object]:
    away = draws.double() - torch.tensor(target.mean, dtype=torch.float64)
    columns = [*away.unbind(2), *away.square().unbind(2)]
    sizes = [float(ess_bulk(column)) for column in columns]
    coordinates = min(sizes[: target.act_dim])
    return {
        "target": target.name,
        "sampler": sampler,
        "group": group,
        "ess": min(sizes),
        "gradients": gradients,
        "ess_per_gradient": min(sizes) / gradients,
        "ess_of_means_per_gradient": coordinates / gradients,
        "rhat": max(float(rhat(column)) for column in columns),
    }


def summary(rows: list[dict[str, object]]) -> str:
    """One line per target and sampler: the mean over groups and its standard error."""
    lines = []
    for target in dict.fromkeys(row["target"] for row in rows):
        for sampler in dict.fromkeys(row["sampler"] for row in rows):
            mine = [row for row in rows if (row["target"], row["sampler"]) == (target, sampler)]
            if mine:
                shown = []
                for key in ("ess_per_gradient", "ess_of_means_per_gradient"):
                    found = np.array([row[key] for row in mine], float)
                    error = found.std(ddof=1) / np.sqrt(len(found)) if len(found) > 1 else np.nan
                    shown.append(f"{found.mean():.4f} ± {error:.4f}")
                lines.append(f"{target:12} {sampler:10} {'   '.join(shown)}")
    return "\n".join(lines)


if __name__ == "__main__":
    tyro.cli(Comparison)()
