"""Certificates for people: a sentence, a table, the report of `cebm certify` and the paper's figure."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float

from cebm.certificate.judging import Certificate, SamplerFactory, certify, run_on
from cebm.certificate.named import SAMPLERS, named_sampler
from cebm.certificate.targets import Gaussian, Target
from cebm.samplers import Sampler

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table


def conclusion(rows: Sequence[Certificate]) -> str:
    """One sentence per sampler, which names the targets where it fails."""
    sentences = []
    for name in dict.fromkeys(row.sampler for row in rows):
        mine = [row for row in rows if row.sampler == name]
        targets = dict.fromkeys(row.target for row in mine)
        failed = dict.fromkeys(row.target for row in mine if row.failed)
        if failed:
            text = f"fails on {'every target' if len(failed) == len(targets) else ', '.join(failed)}"
        else:
            text = "samples every target" if all(row.passed for row in mine) else "shows no fault"
        sentences.append(f"{name} {text}")
    return "; ".join(sentences) + "."


def table(rows: Sequence[Certificate]) -> "Table":
    """The rows of one sampler for a terminal."""
    from rich import box
    from rich.table import Table

    colours = {"samples the target": "green", "inconclusive": "yellow", "biased": "red", "does not sample": "bold red"}
    title = f"[bold not italic]{rows[0].sampler}"
    result = Table(box=box.SIMPLE_HEAD, show_edge=False, title=title, title_justify="left", padding=0)
    # Fixed widths: the tables of several samplers line up, and fit into 80 columns.
    widths = {"target": 11, "run": 6, "mean err.": 9, "std err.": 9, "temp.": 10, "accept": 6, "clip": 4, "verdict": 18}
    for heading, width in widths.items():
        result.add_column(heading, width=width, overflow="fold")
    for row in rows:
        result.add_row(
            row.target,
            row.run,
            _plus_minus(row.mean_error, row.mean_sampling_error),
            _plus_minus(row.std_error, row.std_sampling_error),
            _plus_minus(row.temperature, row.temperature_sampling_error),
            "–" if row.acceptance is None else f"{row.acceptance:.2f}",
            f"{row.clipped:.2f}" if row.clipped else "–",
            f"[{colours[row.verdict]}]{row.verdict}",
        )
    return result


def _plus_minus(value: float | None, error: float | None) -> str:
    if value is None or error is None:
        return "–"
    digits = 2 if max(abs(value), error) < 10 else 1
    return f"{value:.{digits}f}±{error:.{digits}f}" if abs(value) < 1e3 else "diverged"


def report(
    names: Sequence[str], seed: int, as_json: bool, out: Path | None, own: Mapping[str, Sampler | SamplerFactory]
) -> list[Certificate]:
    """What `cebm certify` does: prints the rows of each of `names` (all of ours if there are none; others are in `own`)
    and, given `out`, writes certificate.jsonl and langevin.png there. The figure comes first, to fail early."""
    from rich.console import Console

    console, notes, rows = Console(), Console(stderr=True), []
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        figure(torch.Generator().manual_seed(seed)).savefig(out / "langevin.png", dpi=150)
    for name in names or SAMPLERS:
        with notes.status(f"certifying {name}"):
            # A generator each: what a sampler gets does not depend on its neighbours.
            sampler = own.get(name, partial(named_sampler, name))
            mine = certify(sampler, name=name, generator=torch.Generator().manual_seed(seed))
        rows += mine
        if as_json:
            print("\n".join(row.to_json() for row in mine), flush=True)
        else:
            console.print(table(mine), "")
    if not as_json:
        console.print("± is one standard error. A single chain's numbers are its own, its verdict is that of 64 such.")
        console.print(conclusion(rows))
    if out is not None:
        (out / "certificate.jsonl").write_text("".join(row.to_json() + "\n" for row in rows))
        notes.print(f"wrote {out / 'certificate.jsonl'} and {out / 'langevin.png'}")
    return rows


def figure(generator: torch.Generator | None = None) -> "Figure":
    """The paper's figure of two panels: the last 1000 of 4000 states of one chain, by IBC's formulation and by the
    correct one, over the Gaussian's density. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the figure needs matplotlib: pip install 'cebm[plot]'") from error
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    target = Gaussian()
    drawn = Figure(figsize=(9, 6.2), layout="constrained")
    panels = drawn.subplots(1, 2, sharex=True, sharey=True)
    # Okabe & Ito's vermillion and blue, which every reader can tell apart.
    for axes, name, title, colour in (
        (panels[0], "langevin-ibc", "IBC's Langevin", "#D55E00"),
        (panels[1], "langevin-correct", "true Langevin", "#0072B2"),
    ):
        states, _ = run_on(partial(named_sampler, name), target, "single", generator)
        _panel(axes, target, states[0].double().cpu().numpy(), title, colour)
    panels[0].set_ylabel("y₂")
    drawn.suptitle("One chain of 4000 steps: its last 1000 states, over the density they should follow")
    return drawn


def _panel(axes: "Axes", target: Target, states: Float[np.ndarray, "time two"], title: str, colour: str) -> None:
    mean, std = np.array(target.mean), np.array(target.std)
    low, high = mean - np.array([5.5, 4.2]) * std, mean + np.array([5.5, 3.6]) * std
    x, y = np.meshgrid(np.linspace(low[0], high[0], 400), np.linspace(low[1], high[1], 400))
    radius = np.hypot((x - mean[0]) / std[0], (y - mean[1]) / std[1])
    extent = (low[0], high[0], low[1], high[1])
    axes.imshow(np.exp(-(radius**2) / 2), extent=extent, origin="lower", cmap="Greys", vmax=2.2, zorder=0)
    lines = axes.contour(x, y, radius, levels=[1, 2, 3], colors="0.45", linewidths=0.8)
    axes.clabel(lines, fmt=lambda level: f"{level:.0f}σ", fontsize=8)
    axes.scatter(states[:, 0], states[:, 1], s=10, color=colour, alpha=0.5, linewidths=0, zorder=3)
    found = [states.mean(0), states.std(0, ddof=1)]
    note = "\n".join(
        f"{label} ({a:.3f}, {b:.3f})  exact ({c:.3f}, {d:.3f})"
        for label, (a, b), (c, d) in zip(("mean", "std "), found, (mean, std), strict=True)
    )
    axes.text(0.5, 0.02, note, transform=axes.transAxes, ha="center", va="bottom", family="monospace", fontsize=8.5)
    axes.set(title=title, xlabel="y₁", aspect="equal")
    axes.title.set(color=colour, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
