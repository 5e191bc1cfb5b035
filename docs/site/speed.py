"""How fast: the studio (docs/studio.json, by `python -m benchmarks.studio`) and the products of oneDNN
(docs/products.json, by `python -m benchmarks.products`)."""

import json
from pathlib import Path

from benchmarks.document import table

RECORD = Path(__file__).parents[2] / "docs/studio.json"
PRODUCTS = Path(__file__).parents[2] / "docs/products.json"


def tables() -> dict[str, str]:
    """The tables of docs/studio.md."""
    record = json.loads(RECORD.read_text())
    head = ("what is shown", "processor time", "coarse picture", "95th percentile", "fine picture", "95th percentile")
    names = ("server_cpu_ms", "coarse_ms", "coarse_ms_p95", "fine_ms", "fine_ms_p95")
    rows = [(row["case"], *(f"{row[name]:.0f} ms" for name in names)) for row in record["latency"]]
    held = [
        (f"{row['interactions']:,}", f"{row['server_mb']:.0f} MB", f"{row['page_mb']:.1f} MB")
        for row in record.get("memory", [])
    ]
    memory = table(("interactions", "server", "heap of the page"), held) if held else "*Not measured yet.*"
    return {"studio speed": table(head, rows), "studio memory": memory}


def values() -> dict[str, str]:
    """How many times faster a training step is with oneDNN's products, by recipe, and the machine of the studio."""
    rows, studio = json.loads(PRODUCTS.read_text())["rows"], json.loads(RECORD.read_text())
    return {
        **{
            f"products {row['recipe']}": f"{row['ratio']:.2f} ({row['smallest']:.2f} to {row['largest']:.2f})"
            for row in rows
        },
        "studio cores": str(studio["cores"]),
        "studio moves": str(min(row["moves"] for row in studio["latency"])),
    }
