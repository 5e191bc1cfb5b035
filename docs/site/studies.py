"""Tables that pages show from the committed records of studies: of trust, Push-T, samplers and planted faults."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.document import table
from docs.site import robots

ROOT = Path(__file__).parents[2]
Table = dict[str, Any]


def _json(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def _lines(path: str) -> list[Table]:
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines()]


def percent(share: float) -> str:
    """With one decimal, as all pages write it."""
    return f"{100 * share:.1f} %"


def tables() -> dict[str, str]:
    """Each table by the name of its marks."""
    return {**trust(), **push_t(), **samplers(), **annealed(), **robots.tables()}


def trust() -> dict[str, str]:
    """docs/trust.md."""
    found, gallery = _json("docs/trust.json"), _json("docs/gallery/records.json")["obstacle"]["numbers"]
    fixed, free = (found[f"one action of eight is played{more}"] for more in ("", ", goals in any order"))
    moved, guard = found["auroc of shifted observations"], found["guard"]
    return {
        "obstacles": table(
            ("who acts", "success", "set-points in a disc"),
            [
                (f"`{name.split(', ')[0]}`, {name.split(', ')[1]}", gallery[f"{name}, success"], gallery[name])
                for name in WAYS
            ],
        ),
        "chunks": table(
            ("search", "success", "jumps per episode", "success, goals in any order", "jumps"),
            [
                (
                    way,
                    *(
                        text
                        for row in (fixed[way], free[way])
                        for text in (percent(row["success"]), f"{row['jumps']:.2f}")
                    ),
                )
                for way in fixed
            ],
        ),
        "moved": table(
            ("observations moved by, in deviations", "unfamiliar", "unlikely", "the larger of both"),
            [
                (name, *(f"{row[kind]:.3f}" for kind in ("observation", "action", "both")))
                for name, row in moved.items()
            ],
        ),
        "faults": table(
            ("fault", "AUROC of a step", "episodes stopped", "median step of the first alarm"),
            [
                (
                    name,
                    f"{row['auroc of a step']:.3f}",
                    percent(row["episodes stopped"]),
                    f"{row['median step of the alarm']:.0f}",
                )
                for name, row in guard.items()
                if isinstance(row, dict) and "auroc of a step" in row
            ],
        ),
    }


WAYS = tuple(
    f"{trial}, {way}" for trial in ("steady", "mdn") for way in ("no constraint", "first allowed draw", "constrained")
)
PUSH_T = {
    "as trained": "as the recipe says",
    "one draw": "one draw, 5 levels",
    "one draw of ten steps": "one draw, 10 levels",
    "softmax": "softmax over 32",
    "without f": "its mixture alone",
    "executing 1": "executing 1 action",
    "executing 1, from the last plan": "executing 1, searching from the last plan",
}
"""The ways to act, in words."""


def push_t() -> dict[str, str]:
    """docs/tasks.md."""
    rows = []
    for name, row in _json("docs/tasks/push-t.json")["table"].items():
        recipe, _, way = name.partition(", as trained") if name.endswith(", as trained") else name.partition(", ")
        difference = row["to as trained"]
        rows.append(
            (
                f"`{recipe}`",
                PUSH_T.get(way, way) if way else PUSH_T["as trained"],
                len(row["seeds"]),
                _interval(row["reward"]),
                _interval(row["success"]),
                "" if difference is None else "{:+.3f} ({:+.3f} to {:+.3f})".format(*difference),
                f"{row['action_ms']:.1f} ms",
            )
        )
    head = ("recipe", "way to act", "seeds", "reward", "success", "reward, against as the recipe says", "one action")
    return {"push-t": table(head, rows)}


def _interval(values: list[float | None]) -> str:
    middle, low, high = values
    return f"{middle:.3f}" + ("" if low is None else f" ({low:.3f} to {high:.3f})")


def samplers() -> dict[str, str]:
    """docs/sampling.md."""
    rows, found = _lines("docs/samplers.jsonl"), _lines("docs/certificate.jsonl")
    names = list(dict.fromkeys(row["sampler"] for row in rows))
    targets = dict.fromkeys(row["target"] for row in rows)
    head = ("target", *(name.upper() for name in names))

    def cell(target: str, name: str) -> str:
        values = [row["ess_per_gradient"] for row in rows if (row["target"], row["sampler"]) == (target, name)]
        return f"{mean(values):.3f}"

    faults = [row for row in found if "fault" in row]
    right = [row for row in found if "right" in row]
    caught, tried = (sum(row[what] for row in faults) for what in ("caught", "repetitions"))
    planted = [
        (f"{len(faults)} with one fault each", f"{faults[0]['repetitions']} each", f"{caught} of {tried} caught"),
        *(
            (
                f"`{row['right']}`, which is right",
                row["repetitions"],
                f"{row['false_alarms']} false alarms in {row['verdicts']} verdicts",
            )
            for row in right
        ),
    ]
    return {
        "nuts": table(head, [(target, *(cell(target, name) for name in names)) for target in targets]),
        "planted": table(("sampler", "repetitions", "result"), planted),
    }


def annealed() -> dict[str, str]:
    """docs/annealed.md."""
    found = _json("docs/annealed/speed.json")
    rows = [
        (
            name,
            f"{found[name]['median']['step_ms']:.1f} ms",
            f"{found[name]['median']['mm_gigaflops_per_second']:.0f} GFLOP/s",
            f"{found[name]['median']['share_of_mm']:.2f}",
            f"{found[name]['replan_wall_ms_median']:.1f} ms",
        )
        for name in ("float32", "bf16")
    ]
    head = (
        "precision",
        "CPU time of a step",
        "`torch.mm` beside it",
        "share of it",
        "re-plan, 32 candidates, 5 levels",
    )
    return {"annealed speed": table(head, rows)}
