"""Writes what stability.py measured, docs/stability/*.json, into docs/stability.md (between the marks) and
docs/stability.png."""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.document import BLUE, GREEN, ORANGE, RED, replaced, table

DOCS = Path(__file__).parent.parent / "docs"
Records = dict[str, list[dict[str, Any]]]
WAYS = {
    "as-trained": "drawn (default)",
    "minimum": "minimum of 16",
    "proposal-only": "one draw of q",
    "three-steps": "drawn, three steps",
    "raw": "raw weights, minimum of 64",
    "averaged": "averaged weights, minimum of 64",
    "averaged-softmax": "averaged, softmax over 64",
    "averaged-16": "averaged, minimum of 16",
    "corrected": "E − log p̂(y), minimum of 64, from p̂(y)",
    "corrected-draw": "E − log p̂(y), drawn from 64",
    "corrected-box": "E − log p̂(y), minimum of 64, from the box",
    "uncorrected": "E alone, minimum of 64, from the box",
    "averaged-40-steps": "averaged, minimum of 64, 40 steps",
    "averaged-normalised": "averaged, minimum of 64, normalised gradients",
}
TARGETS = {
    "steady-2d-2000": ("2-D, 2,000 demonstrations", 97),
    "steady-2d-300": ("2-D, 300 demonstrations", 90),
    "steady-16d": ("16-D, 2,000 demonstrations", 95),
    "steady-32d": ("32-D, 2,000 demonstrations", 80),
    "steady-random-order": ("2-D, random goal order", 75),
    "steady-random-order-history": ("2-D, random goal order, history of 8", 85),
}


def read(directory: Path) -> Records:
    """The records of each case, by seed."""
    found: Records = {}
    for path in sorted(directory.glob("*.json")):
        record = json.loads(path.read_text())
        found.setdefault(record["case"], []).append(record)
    return {case: sorted(records, key=lambda record: record["seed"]) for case, records in found.items()}


def sections(found: Records) -> dict[str, str]:
    """Each table by the name of its marks."""
    return {
        "reached": _reached(found),
        "checkpoints": _checkpoints(found),
        "ibc": _ways(found["ibc-2d-300"]) if "ibc-2d-300" in found else "",
        "penalty": _ways(found["ibc-penalty"]) if "ibc-penalty" in found else "",
        "landscape": _landscape(found),
        "training": _training(found),
        "ablation": _changes(found, "ablation-"),
        "marginal": _changes(found, "marginal-"),
    }


def documented(text: str, found: Records) -> str:
    """The document with its tables replaced."""
    for name, content in sections(found).items():
        text = replaced(text, name, content)
    return text


def _reached(found: Records) -> str:
    rows = []
    for case, (what, target) in TARGETS.items():
        records = found.get(case, [])
        if records:
            ways = [
                _percent([record["last"][way]["success"] for record in records])
                for way in WAYS
                if way in records[0]["last"]
            ]
            each = ", ".join(f"{100 * record['last']['as-trained']['success']:.1f}" for record in records)
            rows.append((what, f"{records[0]['steps']:,}", f"≥ {target} %", *ways, each))
    measured = next(found[case][0]["last"] for case in TARGETS if found.get(case))
    head = ("task", "steps", "to reach", *(name for way, name in WAYS.items() if way in measured), "default, per seed")
    return table(head, rows)


def _checkpoints(found: Records) -> str:
    rows = []
    for case in ("steady-2d-2000", "steady-2d-300"):
        for record in found.get(case, []):
            half = {
                int(step): 100 * ways["as-trained"]["success"]
                for step, ways in record["checkpoints"].items()
                if int(step) >= record["steps"] // 2
            }
            last, worst = half[record["steps"]], min(half, key=lambda step: (half[step], step))
            best = max(half, key=lambda step: (half[step], -step))
            rows.append(
                (
                    TARGETS[case][0],
                    record["seed"],
                    f"{last:.1f} %",
                    f"{half[worst]:.1f} % at {worst:,}",
                    f"{half[worst] - last:+.1f}",
                    f"{half[best]:.1f} % at {best:,}",
                )
            )
    return table(("task", "seed", "end", "worst of steps 5,000 to 10,000", "difference to the end", "best"), rows)


def _ways(records: list[dict[str, Any]]) -> str:
    ways = [way for way in WAYS if way in records[0]["last"]]
    steps = sorted(int(step) for step, tried in records[0]["checkpoints"].items() if set(ways) <= set(tried))
    rows = [
        (WAYS[way], *(_percent([r["checkpoints"][str(step)][way]["success"] for r in records]) for step in steps))
        for way in ways
    ]
    distances = [
        f"{mean(r['checkpoints'][str(step)]['averaged']['min_distance_first'] for r in records):.3f} and "
        f"{mean(r['checkpoints'][str(step)]['averaged']['min_distance_second'] for r in records):.3f}"
        for step in steps
    ]
    rows.append(("nearest to goal 1 and to goal 2, averaged weights", *distances))
    return table(("way to act", *(f"{step:,} steps" for step in steps)), rows)


def _landscape(found: Records) -> str:
    rows = []
    for case in ("ibc-2d-300", "steady-2d-300", "steady-2d-2000"):
        records = found.get(case, [])
        for step in sorted({int(s) for r in records for s, c in r["checkpoints"].items() if "energy" in c}):
            energies = [r["checkpoints"][str(step)]["energy"] for r in records]
            rows.append(
                (
                    case,
                    f"{step:,}",
                    *(
                        _number([e[key] for e in energies])
                        for key in ("range", "gradient_norm_box", "gradient_norm_data", "clipped_acting")
                    ),
                )
            )
    head = ("case", "step", "range over the box", "gradient, box", "gradient, demonstrated", "clipped when acting")
    return table(head, rows)


def _training(found: Records) -> str:
    records = found.get("ibc-2d-300", [])
    keys = {
        "loss": "loss",
        "positive_energy": "energy, positive",
        "negative_energy": "energy, negative",
        "gradient_norm_last": "gradient norm, last chain step",
        "clipped": "clipped share of chain steps",
    }
    rows = []
    for step in (500, 1000, 2000, 5000, 10_000):
        logged = [row for record in records for row in record["training"] if row["step"] == step]
        if logged:
            rows.append((f"{step:,}", *(_number([row[key] for row in logged]) for key in keys)))
    return table(("step", *keys.values()), rows)


def _changes(found: Records, kind: str) -> str:
    rows = []
    for case, records in found.items():
        if case.startswith(kind):
            for way in records[0]["last"]:
                success = {
                    step: _percent([record["checkpoints"][step][way]["success"] for record in records])
                    for step in records[0]["checkpoints"]
                }
                along = (success.get("1000", ""), success["2000"])
                rows.append((case.removeprefix(kind), WAYS[way], *along, len(records)))
    return table(("recipe", "way to act", "1,000 steps", "2,000 steps", "seeds"), rows)


def _percent(values: list[float]) -> str:
    """Mean, and the spread over seeds."""
    if len(values) == 1:
        return f"{100 * values[0]:.1f} %"
    return f"{100 * mean(values):.1f} ± {100 * stdev(values):.1f} %"


def _number(values: list[float]) -> str:
    centre = mean(values)
    digits = 2 if abs(centre) < 10 else 0
    return f"{centre:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def figure(found: Records) -> Figure:
    """Success along training, and what the energies do meanwhile."""
    drawn = Figure(figsize=(10, 3.6), layout="constrained")
    success, energy = drawn.subplots(1, 2)
    for case, way, colour in (
        ("ibc-2d-300", "raw", RED),
        ("ibc-2d-300", "averaged", ORANGE),
        ("steady-2d-300", "as-trained", GREEN),
        ("steady-2d-2000", "as-trained", BLUE),
    ):
        label = f"{case}, {WAYS[way]}"
        for i, record in enumerate(found.get(case, [])):
            points = {int(s): c[way]["success"] for s, c in record["checkpoints"].items() if way in c}
            steps = sorted(points)
            style = {"color": colour, "alpha": 0.7, "linewidth": 1, "marker": "o", "markersize": 2.5}
            success.plot(steps, [100 * points[s] for s in steps], label=None if i else label, **style)
    success.set_xlabel("training step")
    success.set_ylabel("success, %")
    success.set_ylim(0, 101)
    success.legend(fontsize=7, frameon=False, loc="lower right")
    for case, colour in (("ibc-2d-300", RED), ("steady-2d-300", GREEN)):
        for i, record in enumerate(found.get(case, [])):
            _draw_energies(energy, record, colour, None if i else case)
    energy.set_xlabel("training step")
    energy.set_ylabel("contrasted |E|, dashed: negatives")
    energy.set_yscale("log")
    energy.legend(fontsize=7, frameon=False)
    for axes in (success, energy):
        axes.spines[["top", "right"]].set_visible(False)
    return drawn


def _draw_energies(axes: Axes, record: dict[str, Any], colour: str, label: str | None) -> None:
    steps = [row["step"] for row in record["training"]]
    for key, style in (("positive_energy", "-"), ("negative_energy", "--")):
        values = [abs(row[key]) for row in record["training"]]
        axes.plot(steps, values, style, color=colour, linewidth=1, label=label if style == "-" else None)


def main() -> None:
    found = read(DOCS / "stability")
    document = DOCS / "stability.md"
    document.write_text(documented(document.read_text(), found))
    figure(found).savefig(DOCS / "stability.png", dpi=110)


if __name__ == "__main__":
    main()
