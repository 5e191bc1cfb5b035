"""The table of the studio's speed, from docs/studio.json, which `python -m benchmarks.studio` writes."""

import json
from pathlib import Path

from benchmarks.document import table

RECORD = Path(__file__).parents[2] / "docs/studio.json"


def tables() -> dict[str, str]:
    """The table of docs/studio.md."""
    record = json.loads(RECORD.read_text())
    head = ("what is shown", "processor time", "coarse picture", "95th percentile", "fine picture", "95th percentile")
    names = ("server_cpu_ms", "coarse_ms", "coarse_ms_p95", "fine_ms", "fine_ms_p95")
    rows = [(row["case"], *(f"{row[name]:.0f} ms" for name in names)) for row in record["latency"]]
    return {"studio speed": table(head, rows)}
