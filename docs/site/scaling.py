"""Training beside a busy neighbour (docs/busy.jsonl, by `python -m benchmarks.busy`) and on several processes
(docs/parallel.jsonl, by `python -m benchmarks.parallel`)."""

from pathlib import Path
from typing import Any

from benchmarks.document import read, table

BUSY = Path(__file__).parents[2] / "docs/busy.jsonl"
PARALLEL = Path(__file__).parents[2] / "docs/parallel.jsonl"


def tables() -> dict[str, str]:
    """The table of the neighbour in docs/performance.md, and that of processes in docs/scale.md."""
    return {"busy": _busy(), "parallel": _parallel()}


def values() -> dict[str, str]:
    """What pages quote of them."""
    return _neighbour() | _pays()


def _spread(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2f} ({row[f'{name}_q25']:.2f} to {row[f'{name}_q75']:.2f})"


def _busy() -> str:
    head = ("recipe", "machine", "threads", "a step", "times as fast as one thread", "cores that third programs took")
    rows = []
    for row in read(BUSY):
        machine = "a busy neighbour" if row["neighbour"] else "no neighbour"
        chosen = " and ".join(row["chosen"])
        way = f"**default**, which chose {chosen}" if chosen else row["way"]
        rows.append(
            (
                f"`{row['trial']}`",
                machine,
                way,
                f"{row['step_ms']:.1f} ms",
                _spread(row, "ratio"),
                f"{row['others']:.1f}",
            )
        )
    return table(head, rows)


def _parallel() -> str:
    head = ("recipe", "batch", "one process", "two processes", "times as fast", "as one process with two threads")
    return table(
        head,
        [
            (
                f"`{row['trial']}`",
                f"{row['batch']:,}",
                f"{row['alone_ms']:.0f} ms",
                f"{row['group_ms']:.0f} ms",
                _spread(row, "speed_up"),
                _spread(row, "over_threads"),
            )
            for row in read(PARALLEL)
        ],
    )


def _neighbour() -> dict[str, str]:
    """What the default and the ways to wait reach, by whether there is a neighbour."""
    short = {"default": "default", "asleep": "asleep", "spinning": "spinning", "moment": "moment"}
    return {
        f"{name} {'busy' if row['neighbour'] else 'idle'}": f"{row['ratio']:.2f}"
        for row in read(BUSY)
        for end, name in short.items()
        if row["trial"] == "steady" and row["way"].endswith(end)
    }


def _pays() -> dict[str, str]:
    """By recipe, the smallest batch from which on two processes are faster: in all rounds but a quarter at most."""
    found = {}
    for trial in ("steady", "ibc"):
        rows = [row for row in read(PARALLEL) if row["trial"] == trial]
        slow = [row["batch"] for row in rows if row["speed_up_q25"] <= 1]
        fast = [row["batch"] for row in rows if row["speed_up_q25"] > 1 and row["batch"] > max(slow, default=0)]
        found[f"two processes {trial}"] = f"{min(fast):,}" if fast else "none that was tried"
        found[f"two processes {trial} gain"] = f"{max(row['speed_up'] for row in rows):.2f}"
    return found
