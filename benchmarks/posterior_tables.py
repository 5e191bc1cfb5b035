"""Tables of the record of `benchmarks.posteriors`, for its page and for the terminal."""

from statistics import mean
from typing import Any

Row = dict[str, Any]
Cells = tuple[tuple[str, ...], list[tuple[str, ...]]]


def scores(rows: list[Row]) -> Cells:
    """Heading and lines: per task, number of simulations and candidate the mean C2ST over observations and seeds, the
    range of the seeds' means and of single observations, and the CPU seconds of a training."""
    head = ("task", "simulations", "training", "seeds", "observations", "C2ST", "seeds", "observations", "CPU seconds")
    lines: list[tuple[str, ...]] = []
    measured = [row for row in rows if row["what"] == "c2st"]
    for task, simulations, candidate in dict.fromkeys((r["task"], r["simulations"], r["candidate"]) for r in measured):
        key = {"task": task, "simulations": simulations, "candidate": candidate}
        found: dict[int, list[float]] = {}
        for row in measured:
            if key.items() <= row.items():
                found.setdefault(row["seed"], []).append(row["c2st"])
        seconds = [row["cpu_seconds"] for row in rows if (key | {"what": "training"}).items() <= row.items()]
        means, every = [mean(each) for each in found.values()], [score for each in found.values() for score in each]
        lines.append(
            (
                task,
                f"{simulations:,}",
                candidate,
                str(len(means)),
                str(len(every)),
                f"{mean(every):.3f}",
                f"{min(means):.3f} to {max(means):.3f}",
                f"{min(every):.3f} to {max(every):.3f}",
                f"{mean(seconds):.0f}",
            )
        )
    return head, lines


def choices(rows: list[Row]) -> Cells:
    """Heading and lines: the held-out log-likelihood of each candidate and task."""
    found = {(row["candidate"], row["task"]): row for row in rows if row["what"] == "choice"}
    tasks = dict.fromkeys(task for _, task in found)
    lines = []
    for candidate in dict.fromkeys(candidate for candidate, _ in found):
        mine = [found.get((candidate, task)) for task in tasks]
        values = ["" if row is None else f"{row['held_out']:.3f}" for row in mine]
        steps = ["" if row is None else f"{row['steps']:,}" for row in mine]
        lines.append((candidate, *values, " and ".join(steps)))
    return ("training", *tasks, "steps"), lines
