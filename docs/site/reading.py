"""The table of docs/data.md about large sets, from docs/reading.jsonl, which `python -m benchmarks.reading` writes."""

import json
from pathlib import Path

from benchmarks.document import table

RECORD = Path(__file__).parents[2] / "docs/reading.jsonl"


def tables() -> dict[str, str]:
    """How long each format takes, and its memory."""
    rows = [json.loads(line) for line in RECORD.read_text().splitlines()]
    head = ("format", "processor time to read and split", "peak memory", "with a history of 2 and a horizon of 8")
    shown = [
        (
            row["format"],
            f"{row['seconds']:.1f} s",
            f"{row['peak_mb']} MB",
            f"{row['windows_peak_mb']} MB" if "windows_peak_mb" in row else "",
        )
        for row in rows
    ]
    return {"reading": table(head, shown)}
