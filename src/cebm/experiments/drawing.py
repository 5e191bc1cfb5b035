"""What the figures of several claims share."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

# Okabe & Ito's colours, which every reader can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#999933")


def curves(axes: Axes, groups: Mapping[str, Sequence[Sequence[Sequence[float | int]]]], what: str) -> None:
    """Mean over seeds, and a band from the lowest to the highest; `groups[label][seed]` is a list of (step, value)."""
    for colour, (label, runs) in zip(COLOURS, groups.items(), strict=False):
        steps = [point[0] for point in runs[0]]
        values = np.array([[point[1] for point in run] for run in runs])
        axes.plot(steps, values.mean(0), color=colour, label=label)
        axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("training step")
    axes.set_ylabel(what)
    axes.legend(frameon=False, fontsize=8)


def bars(axes: Axes, groups: Mapping[str, Sequence[float]], what: str) -> None:
    """Mean over seeds as a bar, every seed as a dot."""
    for i, (label, values) in enumerate(groups.items()):
        axes.bar(i, float(np.mean(values)), color=COLOURS[i % len(COLOURS)], alpha=0.6, label=label)
        axes.plot([i] * len(values), values, "k.", markersize=4)
    axes.set_xticks(range(len(groups)), list(groups), rotation=20 if len(groups) > 4 else 0, fontsize=8)
    axes.set_ylabel(what)
