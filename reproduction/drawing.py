"""Plots that several claims share."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reproduction.intervals import Interval

# The colours of Okabe & Ito, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#999933")


def curves(axes: Axes, groups: Mapping[str, Sequence[Sequence[Sequence[float | int]]]], what: str) -> None:
    """Mean over seeds with its 95 % interval; `groups[label][seed]` is a list of (step, value). A run that ended early
    counts in the mean up to its last step."""
    for colour, (label, runs) in zip(COLOURS, groups.items(), strict=False):
        at: dict[float, list[float]] = {}
        for step, value in (point for run in runs for point in run):
            at.setdefault(step, []).append(value)
        mean_and_band(axes, sorted(at), [at[step] for step in sorted(at)], colour, label)
    axes.set_xlabel("training step")
    axes.set_ylabel(what)
    if what == "success":
        axes.set_ylim(0, 1)
    axes.legend(frameon=False, fontsize=8)


def mean_and_band(
    axes: Axes, x: Sequence[float | int], values: Sequence[Sequence[float]], colour: str, label: str, line: str = "-"
) -> None:
    """A line of means over seeds, with their 95 % intervals as a band if there are several seeds; `values[i]` has one
    value per seed at `x[i]`."""
    found = [Interval.of(at) for at in values]
    axes.plot(x, [each.mean for each in found], line, color=colour, label=label)
    low, high = ([each.mean + sign * each.half for each in found] for sign in (-1, 1))
    axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def bars(axes: Axes, groups: Mapping[str, Sequence[float]], what: str) -> None:
    """One bar per group: the mean over seeds with its 95 % interval, and every seed as a dot."""
    for i, values in enumerate(groups.values()):
        bar(axes, i, values, COLOURS[i % len(COLOURS)])
    axes.set_xticks(range(len(groups)), list(groups), rotation=20 if len(groups) > 4 else 0, fontsize=8)
    axes.set_ylabel(what)


def bar(axes: Axes, x: float | int, values: Sequence[float], colour: str, width: float = 0.8) -> None:
    """One bar of `bars`."""
    found = Interval.of(values)
    axes.bar(x, found.mean, width, yerr=found.half, color=colour, alpha=0.6, error_kw={"linewidth": 0.8})
    axes.plot([x + width / 8] * len(values), values, "k.", markersize=4)


def success_and_gaps(figure: Figure, numbers: Mapping[str, Any]) -> None:
    """Two panels along training: success, and the mean energy of the negatives minus that of the positives."""
    left, right = figure.subplots(1, 2)
    curves(left, numbers["curves"], "success")
    curves(right, numbers["gaps"], "mean E⁻ − mean E⁺")
    right.set_yscale("symlog", linthresh=0.1)
