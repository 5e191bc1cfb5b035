"""Single numbers that docs/stability.md quotes, from the records beside its tables."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

RECORDS = Path(__file__).parents[1] / "stability"
STEPS = ("1000", "3000", "10000")
"""Of `ibc`: the steps at which all ways to act were tried."""
Runs = list[dict[str, Any]]


def values() -> dict[str, str]:
    """By the names of their marks."""
    return {**_ibc(), **_steady(), **_bounded()}


def _runs(case: str) -> Runs:
    found = [json.loads(path.read_text()) for path in sorted(RECORDS.glob(f"{case}-[0-9].json"))]
    if not found:
        raise ValueError(f"docs/stability has no record of {case}")
    return found


def _success(runs: Runs, way: str, step: str) -> float:
    return 100 * mean(run["checkpoints"][step][way]["success"] for run in runs)


def _span(numbers: list[float]) -> str:
    return f"{min(numbers):.0f} to {max(numbers):.0f}"


def _apart(run: dict[str, Any]) -> float:
    """How far the energies of positives and negatives are apart at the end."""
    return run["training"][-1]["negative_energy"] - run["training"][-1]["positive_energy"]


def _ibc() -> dict[str, str]:
    """How much of the success of `ibc` the search and the weights decide, after training for long."""
    runs = _runs("ibc-2d-300")
    late = [
        100 * found["raw"]["success"] for run in runs for step, found in run["checkpoints"].items() if int(step) >= 5000
    ]
    clipped = [mean(run["checkpoints"][step]["energy"]["clipped_acting"] for run in runs) for step in STEPS]
    ways = {"few candidates": "averaged-16", "longer search": "averaged-40-steps", "normalised": "averaged-normalised"}
    averaged = [f"{_success(runs, 'averaged', step):.0f}" for step in STEPS]
    return {
        "ibc usual search": f"{_success(runs, 'averaged', '10000'):.0f} %",
        "ibc averaged weights": f"{', '.join(averaged[:-1])} and {averaged[-1]} %",
        **{f"ibc {name}": f"{_success(runs, way, '10000'):.0f} %" for name, way in ways.items()},
        **{f"ibc {name}, 1000 steps": f"{_success(runs, way, '1000'):.0f} %" for name, way in ways.items()},
        "ibc raw weights": f"{_span(late)} %",
        "ibc apart": _span([_apart(run) for run in runs]),
        "ibc apart mean": f"{mean(_apart(run) for run in runs):.0f}",
        "ibc clipped": f"{100 * clipped[0]:.0f} to {100 * clipped[-1]:.0f} %",
    }


def _steady() -> dict[str, str]:
    """How little the checkpoints of the second half of a run differ, in points."""
    below_end, below_best, apart = [], [], []
    for case in ("steady-2d-2000", "steady-2d-300"):
        for run in _runs(case):
            half = [
                100 * found["as-trained"]["success"]
                for step, found in run["checkpoints"].items()
                if int(step) >= run["steps"] // 2
            ]
            end = 100 * run["last"]["as-trained"]["success"]
            below_end.append(end - min(half))
            below_best.append(max(half) - end)
            apart.append(abs(_apart(run)))
    return {
        "steady worst checkpoint": f"{max(below_end):.1f}",
        "steady best checkpoint": f"{max(below_best):.1f}",
        "steady apart": f"{max(apart):.3f}",
    }


def _bounded() -> dict[str, str]:
    """Ranges of energies over the box."""
    plain, smooth = (
        _runs(case)[0]["checkpoints"]["2000"]["energy"] for case in ("ablation-ibc", "ablation-ibc-smoothing")
    )
    penalty = [run["checkpoints"]["3000"]["energy"]["range"] for run in _runs("ibc-penalty")]
    return {
        "ibc range": f"{plain['range']:.0f}",
        "ibc smoothed range": f"{smooth['range']:.0f}",
        "ibc penalty range": f"{mean(penalty):.0f}",
    }
