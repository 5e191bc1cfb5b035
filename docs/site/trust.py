"""The tables of docs/trust.md about Push-T and about failures, from docs/trust-pusht.json and docs/trust.json."""

import json
from pathlib import Path
from typing import Any

from benchmarks.document import table

RECORD = Path(__file__).parents[2] / "docs/trust-pusht.json"
PARTICLE = RECORD.with_name("trust.json")
POLICIES = {"ibc": "of `ibc` after 1,000 steps", "mse": "of `mse` after 1,000 steps", "steady": "of `steady`"}
ALARMS = {
    "expected end": ("expected end (`FailureAlarm`)", (0.1, 0.2, 0.3)),
    "the clock alone": ("the clock alone: it takes longer than successes do", (0.1, 0.2, 0.3)),
    "change of plan over 8 decisions": ("change of plan over 8 decisions", (0.2,)),
    "unfamiliar or unlikely": ("unfamiliar or unlikely, calibrated on successes", (0.2,)),
}
"""What announces a failure, in words, and the shares of false alarms that are shown."""

WORDS = {name: words for name, (words, _) in ALARMS.items()}


def tables() -> dict[str, str]:
    """Each table by the name of its marks."""
    found = json.loads(RECORD.read_text())
    return {
        "push-t alarms": table(
            ("", "ten splits", "deviation of a split", "a thousand splits"),
            [
                (who, *(_percent(row[name]) for name in ("mean", "deviation", "mean of 1000 splits")))
                for who in ("policy", "guard")
                for row in [found[f"false alarms, {who}"]]
            ],
        ),
        "push-t moved": table(
            ("observations moved by, in deviations", "unfamiliar (AUROC)", "unlikely", "the larger of both"),
            [
                (name, *(f"{row[kind]:.3f}" for kind in ("observation", "action", "both")))
                for name, row in found["auroc of shifted observations"].items()
            ],
        ),
        "push-t chunks": table(
            ("chunks", "AUROC of a step", "AUROC of an episode", "episodes stopped", "four together stop"),
            [*_faults(found), *(_row(words, found, f"{name}, every eighth step") for name, words in POLICIES.items())],
        ),
        "push-t behind": _all_behind(found.get("roll-outs behind the guard", {})),
        "particle failures": table(
            ("announced by", "alpha", "of failures", "of successes", "balanced accuracy", "median step", "by step 40"),
            [
                (WORDS[name], alpha, *_announced(row, 40))
                for key, row in json.loads(PARTICLE.read_text())["failures"].items()
                if isinstance(row, dict)
                for name, alpha in [key.split(", alpha ")]
            ],
        ),
        "push-t failures": table(
            ("announced by", "alpha", "of failures", "of successes", "balanced accuracy", "median step", "by step 200"),
            _failures(found["failures"]),
        ),
    }


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _faults(found: dict[str, Any]) -> list[tuple[str, ...]]:
    return [_row(name, found, name) for name in found["four chunks together"] if name != "demonstrators"]


def _row(words: str, found: dict[str, Any], name: str) -> tuple[str, ...]:
    """A row of the table of chunks; four together were not tried with chunks of policies."""
    row, four = found["guard"][name], found["four chunks together"].get(name)
    alone = [f"{row[f'auroc of {what}']:.3f}" for what in ("a step", "an episode")]
    return (words, *alone, _percent(row["episodes stopped"], 0), "" if four is None else _percent(four, 0))


def _all_behind(found: dict[str, Any]) -> str:
    if not found:
        return "*Not measured yet.*"
    head = ("policy", "behind the guard", "reward", "gain", "success", "episodes with a question", "median step")
    return table(head, [_behind(name, row) for name, row in found.items()])


def _behind(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the roll-outs behind the guard; gains are of reward, against the same policy alone."""
    ways = ("alone", "asks", "asks, four chunks together too", "repairs")
    way = next(way for way in sorted(ways, key=len, reverse=True) if name.endswith(f", {way}"))
    start = f"{row['reward']:.3f}"
    if way == "alone":
        return (name.removesuffix(f", {way}"), way, start, "", _percent(row["success"], 0), "", "")
    gain = f"{round(row['gain'], 3) + 0.0:+.3f} ± {row['gain error']:.3f}".replace("-", "−")
    asked, first = _percent(row["episodes with a question"], 0), row["median step of the first"]
    return (name.removesuffix(f", {way}"), way, start, gain, _percent(row["success"], 0), asked, f"{first or 0:.0f}")


def _failures(found: dict[str, Any]) -> list[tuple[str, ...]]:
    shown = [(words, f"{alpha}", f"{name}, alpha {alpha}") for name, (words, all_) in ALARMS.items() for alpha in all_]
    shown.append(
        (
            "unfamiliar or unlikely, calibrated on demonstrations",
            "0.05",
            "unfamiliar or unlikely, thresholds from demonstrations",
        )
    )
    return [(words, alpha, *_announced(found[name], 200)) for words, alpha, name in shown]


def _announced(row: dict[str, Any], by: int) -> tuple[str, ...]:
    """Shares of failures and of successes that are announced, balanced accuracy, step, and the accuracy by a step."""
    return (
        *(_percent(row[f"{what} announced"], 0) for what in ("failures", "successes")),
        f"{row['balanced accuracy']:.3f}",
        f"{row['median step']:.0f}",
        f"{row[f'balanced accuracy by step {by}']:.3f}",
    )
