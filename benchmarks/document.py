"""Writes what measure.py and from_nothing.py found, docs/performance.jsonl and docs/from_nothing.jsonl, into
docs/performance.md (between the marks) and docs/performance.png."""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

DOCS = Path(__file__).parent.parent / "docs"
Rows = list[dict[str, Any]]
# Okabe & Ito's colours, which every reader can tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
AXES = {"batch": BLUE, "samples": ORANGE, "steps": GREEN, "width": RED, "dimension": PURPLE}


def read(path: Path) -> Rows:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def section(rows: Rows) -> str:
    """The tables, as Markdown."""
    first = rows[0]
    parts = [
        f"`make bench`, {first['cores']} cores, torch {first['torch']}: medians, quartiles in brackets, all numbers in "
        "[performance.jsonl](performance.jsonl).",
        "Speed, as a fraction of the `torch.mm` rate:",
        table(
            ("what", "threads", "per second", "fraction of `torch.mm`", "peak memory"),
            [
                ("chain of `ibc` alone", r["threads"], _short(1e3 / r["chain_ms"]), _spread(r, "fraction"), _memory(r))
                for r in _of(rows, "chain")
            ]
            + [
                (_setting(r), r["threads"], _short(r["steps_per_second"]), _spread(r, "fraction"), _memory(r))
                for r in _of(rows, "train")
            ],
        ),
        "The same training step in plain PyTorch, interleaved; the ratio says how many times faster the library is:",
        table(
            ("`ibc`", "threads", "baseline", "ratio", "fractions of `torch.mm`", "peak memory"),
            [
                (
                    r["setting"],
                    r["threads"],
                    r["baseline"],
                    _spread(r, "ratio"),
                    f"{r['library_fraction']:.2f} and {r['baseline_fraction']:.2f}",
                    f"{r['library_mb']:.0f} MB and "
                    + (f"{r['baseline_mb']:.0f} MB" if r["baseline_mb"] else "unknown"),
                )
                for r in _of(rows, "compare")
            ],
        ),
        "Time of a training step ∝ sizeᵉ, fitted around the paper's setting:",
        table(
            ("size", "values", "milliseconds", "exponent e"),
            [
                (
                    r["axis"],
                    ", ".join(map(str, r["values"])),
                    ", ".join(map(_short, r["step_ms"])),
                    _spread(r, "exponent"),
                )
                for r in _of(rows, "growth")
            ],
        ),
        "One call of `policy.act`, with the trial's own number of candidates. Beside it the machine's pace, a "
        "`torch.add` of 4×2 numbers between the calls:",
        table(
            (
                "trial",
                "threads",
                "observations",
                "p50",
                "p99",
                "calls",
                "one addition",
                "call, in additions",
                "peak memory",
            ),
            [
                (
                    f"`{r['trial']}`",
                    r["threads"],
                    r["batch"],
                    f"{_short(r['ms_p50'])} ms",
                    f"{_short(r['ms_p99'])} ms",
                    r["repeats"],
                    f"{r['addition_us']:.1f} µs",
                    f"{r['additions']:.0f} ({r['additions_q25']:.0f}–{r['additions_q75']:.0f})",
                    _memory(r),
                )
                for r in _of(rows, "act")
            ],
        ),
        "The particle task:",
        table(
            ("threads", "control steps a second without a policy", "evaluation"),
            [
                (
                    r["threads"],
                    f"{r['control_steps_per_second'] / 1e6:.2f} million, {r['episodes']} episodes side by side",
                    f"{r['evaluation_episodes']} episodes of `{r['trial']}` with {r['evaluation_candidates']} "
                    f"candidates in {r['evaluation_seconds']:.1f} s",
                )
                for r in _of(rows, "env")
            ],
        ),
    ]
    notes = [r["note"] for r in rows if r["note"]]
    if notes:
        parts.append(f"Before comparing: {len(notes)} of {len(rows)} rows carry a note, the first: {notes[0]}.")
    return "\n\n".join(parts)


def from_nothing(rows: Rows) -> str:
    """A line per seed, and the mean."""
    names = ("success", "seconds", "action_ms_p50", "action_ms_p99")
    body = [(r["seed"], *(r[name] for name in names)) for r in rows]
    body.append(("mean", *(mean(r[name] for r in rows) for name in names)))
    return table(
        ("seed", f"success of {rows[0]['episodes']}", "seconds", "one action, p50", f"p99 of {rows[0]['calls']}"),
        [
            (seed, f"{100 * success:.1f} %", f"{seconds:.0f}", f"{_short(p50)} ms", f"{_short(p99)} ms")
            for seed, success, seconds, p50, p99 in body
        ],
    )


def replaced(text: str, name: str, content: str) -> str:
    """A document with what is between the marks of that name replaced."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, rest = text.split(begin)
    return f"{before}{begin}\n{content}\n\n{end}{rest.split(end)[1]}"


def documented(text: str, rows: Rows, runs: Rows) -> str:
    """The document with its tables replaced."""
    return replaced(replaced(text, "make bench", section(rows)), "from nothing", from_nothing(runs))


def figure(rows: Rows) -> Figure:
    """Fractions of torch.mm, growth, and latency."""
    drawn = Figure(figsize=(11, 3.8), layout="constrained")
    speed, growth, latency = drawn.subplots(1, 3, width_ratios=(1.5, 1, 1))
    _draw_speed(speed, rows)
    _draw_growth(growth, _of(rows, "growth"))
    _draw_latency(latency, _of(rows, "act"))
    for axes in (speed, growth, latency):
        axes.spines[["top", "right"]].set_visible(False)
    return drawn


def _draw_speed(axes: Axes, rows: Rows) -> None:
    bars: list[tuple[str, str, dict[int, tuple[float, float, float]]]] = []

    def add(label: str, colour: str, row: dict[str, Any], low: float, middle: float, high: float) -> None:
        if not any(label == known for known, _, _ in bars):
            bars.append((label, colour, {}))
        next(values for known, _, values in bars if known == label)[row["threads"]] = (low, middle, high)

    for row in _of(rows, "train"):
        add(_plain(row), BLUE, row, row["fraction_q25"], row["fraction"], row["fraction_q75"])
    for row in _of(rows, "compare"):
        value = row["baseline_fraction"]
        name = "ibc" if row["setting"] == "as it is" else row["setting"]
        add(f"{row['baseline']}: {name}", ORANGE, row, value, value, value)
    counts = sorted({count for _, _, values in bars for count in values})
    height = 0.8 / len(counts)
    for place, (_, colour, values) in enumerate(bars):
        for i, count in enumerate(counts):
            if count in values:
                low, middle, high = values[count]
                axes.barh(
                    place + (i - (len(counts) - 1) / 2) * height,
                    middle,
                    height,
                    color=colour,
                    alpha=1 if i == 0 else 0.5,
                    xerr=[[middle - low], [high - middle]],
                    error_kw={"elinewidth": 0.8},
                )
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("fraction of the torch.mm rate")
    axes.set_title("training step: dark 1 thread, light 2; blue is the library", fontsize=9)


def _draw_growth(axes: Axes, rows: Rows) -> None:
    for row in rows:
        relative = [ms / row["step_ms"][0] for ms in row["step_ms"]]
        sizes = [value / row["values"][0] for value in row["values"]]
        label = f"{row['axis']}: {row['exponent']:.2f}"
        axes.loglog(sizes, relative, "o-", markersize=3, color=AXES[row["axis"]], label=label)
    _ticks(axes, (1, 2, 4, 8, 16), "x")
    _ticks(axes, (1, 2, 4, 8, 16, 32, 64, 128, 256), "y")
    axes.set_xlabel("size, relative to the smallest")
    axes.set_ylabel("step time, relative")
    axes.legend(fontsize=8, title="exponent", title_fontsize=8, frameon=False, loc="upper left")
    axes.set_title("growth of a training step", fontsize=9)


def _draw_latency(axes: Axes, rows: Rows) -> None:
    for i, trial in enumerate(dict.fromkeys(row["trial"] for row in rows)):
        for count, style in ((1, "o-"), (2, "s--")):
            mine = [row for row in rows if (row["trial"], row["threads"]) == (trial, count)]
            batches = [row["batch"] for row in mine]
            if mine:
                label = f"{trial}, {count} thread{'s' if count > 1 else ''}"
                colour = (BLUE, GREEN)[i]
                axes.loglog(batches, [row["ms_p50"] for row in mine], style, color=colour, markersize=3, label=label)
                axes.fill_between(
                    batches, [row["ms_p50"] for row in mine], [row["ms_p99"] for row in mine], color=colour, alpha=0.15
                )
    _ticks(axes, (1, 16, 256), "x")
    _ticks(axes, (1, 10, 100, 1000), "y")
    axes.set_xlabel("observations per call")
    axes.set_ylabel("milliseconds, p50 (shaded to p99)")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title("policy.act", fontsize=9)


def _ticks(axes: Axes, values: Iterable[int], which: str) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(list(values), [str(value) for value in values])
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _of(rows: Rows, bench: str) -> Rows:
    return [row for row in rows if row["bench"] == bench]


def _plain(row: dict[str, Any]) -> str:
    return row["trial"] if row["setting"] == "as it is" else f"{row['trial']}, {row['setting']}"


def _setting(row: dict[str, Any]) -> str:
    return f"`{row['trial']}`" if row["setting"] == "as it is" else f"`{row['trial']}`, {row['setting']}"


def _spread(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2f} ({row[name + '_q25']:.2f}–{row[name + '_q75']:.2f})"


def _memory(row: dict[str, Any]) -> str:
    return f"{row['peak_extra_mb']:.1f} MB"


def _short(value: float) -> str:
    """Two or three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(head: tuple[str, ...], body: list[tuple[Any, ...]]) -> str:
    """Markdown."""
    lines = [head, ("---",) * len(head), *body]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main() -> None:
    rows = read(DOCS / "performance.jsonl")
    document = DOCS / "performance.md"
    document.write_text(documented(document.read_text(), rows, read(DOCS / "from_nothing.jsonl")))
    figure(rows).savefig(DOCS / "performance.png", dpi=110)


if __name__ == "__main__":
    main()
