"""Tables of docs/deploy.md and docs/serving.md, from the records that benchmarks wrote."""

import json
from pathlib import Path
from typing import Any

from benchmarks.document import table

DOCS = Path(__file__).parents[1]
SICK = "a policy that raises or hangs"
"""A fault that the siege may find."""
Rows = list[dict[str, Any]]


def _lines(name: str) -> Rows:
    return [json.loads(line) for line in (DOCS / name).read_text().splitlines()]


def tables() -> dict[str, str]:
    """Each table by the name of its marks."""
    return {"deploy": deploy(), "parity": parity(), "served": served(), "soak": soak(), "latency": latency()}


def values() -> dict[str, str]:
    """Single numbers that the pages quote."""
    bare = next(row for row in _lines("deploy.jsonl") if row["way"] == "bare" and row["threads"] == 1)
    limits = 1 / bare["ratio_q75"], 1 / bare["ratio_q25"]
    served = next(row for row in _lines("serving.jsonl") if (row["policy"], row["clients"]) == ("steady", 64))
    siege = _siege()
    return {
        "act over bare": f"{1 / bare['ratio']:.2f} ({limits[0]:.2f} to {limits[1]:.2f})",
        "served ratio": f"{served['ratio']:.2f}",
        "served ratio alone": f"{max(served['rounds'], key=lambda each: -each['others'])['ratio']:.2f}",
        "served ratio disturbed": f"{max(served['rounds'], key=lambda each: each['others'])['ratio']:.2f}",
        "served others": f"{max(each['others'] for each in served['rounds']):.1f}",
        "soak p99": f"{siege['p99_attacked_ms'] / siege['p99_alone_ms']:.1f}",
        "soak crowded": f"{siege['p99_crowded_ms']:.0f} ms",
    }


def _siege() -> dict[str, Any]:
    return json.loads((DOCS / "soak.json").read_text())


WAYS = {
    "act": "`policy.act`",
    "bare": "its arithmetic by hand in torch",
    "onnx": "onnx, `load_exported`",
    "onnx session": "onnx, onnxruntime alone",
    "torch": "torch, `load_exported`",
    "torch session": "torch, the program alone",
    "aoti": "aoti, `load_exported`",
    "aoti session": "aoti, the package alone",
}


def deploy() -> str:
    """A single action of each way, on one thread."""
    rows = [
        (
            f"`{row['trial']}`{row['effort'] and ', ' + row['effort']}",
            WAYS[row["way"]],
            f"{row['ms_min']:.2f} ms",
            f"{row['ms_p50']:.2f} ms",
            f"{row['ms_p99']:.2f} ms",
            f"{row['ratio']:.2f} ({row['ratio_q25']:.2f} to {row['ratio_q75']:.2f})",
        )
        for row in _lines("deploy.jsonl")
        if row["threads"] == 1
    ]
    return table(("policy", "way", "smallest", "median", "p99", "of `policy.act` (quartiles)"), rows)


def parity() -> str:
    """Largest difference to `policy.act` by kind of policy and format."""
    formats = {
        "torch": "torch",
        "onnx": "onnx",
        "aoti": "aoti",
        "float64": "`policy.act` in float64",
        "nudged": "its inputs nudged",
    }
    found: dict[str, dict[str, str]] = {}
    for row in _lines("parity.jsonl"):
        beyond = f", {row['beyond']} of {row['rows']:,} beyond 1e-5" if row["beyond"] else ""
        found.setdefault(row["kind"], {})[row["format"]] = f"{row['largest']:.1e}{beyond}"
    rows = [(kind, *(each.get(name, "not measured") for name in formats)) for kind, each in found.items()]
    return table(("policy", *formats.values()), rows)


def served() -> str:
    """Rates of the server beside those of its process alone."""
    rows = []
    for row in _lines("serving.jsonl"):
        ratios = sorted(each["ratio"] for each in row["rounds"])
        rows.append(
            (
                f"`{row['policy'].partition(':')[0]}`"
                + (f", {row['policy'].partition(':')[2]} candidates" if ":" in row["policy"] else ""),
                row["clients"],
                f"{row['in_process']:,.0f}/s",
                f"{row['served']:,.0f}/s",
                f"{row['ratio']:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                f"{row['p50_ms']:.1f} ms",
                f"{row['p99_ms']:.1f} ms ({row['p99_ms'] / row['p50_ms']:.1f} ×)",
                f"{row['shares']:.2f}",
                f"{row['others']:.1f}",
            )
        )
    head = ("policy", "clients", "in process", "served", "ratio (smallest to largest)", "p50", "p99", "largest share")
    head = (*head, "cores that others took")
    return table(head, rows)


def soak() -> str:
    """What a siege found."""
    row = _siege()
    before, after = row["megabytes"]
    alone, attacked = row["p99_alone_ms"], row["p99_attacked_ms"]
    rows = [
        ("hostile frames", f"{sum(row['frames'].values()):,}", ""),
        ("answers to good clients", f"{row['good_requests']:,}", ""),
        ("wrong answers", row["wrong"], "0"),
        ("good connections lost", row["lost"], "0"),
        ("the server goes on", _yes(row["alive"]), "yes"),
        ("tracebacks in its log", len(row["tracebacks"]), "0"),
        ("memory", f"{before:.1f} to {after:.1f} MB ({after / before - 1:+.1%})", "at most +5 %"),
        ("p99 of good clients, alone", f"{alone:.0f} ms", ""),
        ("p99 of good clients, attacked", f"{attacked:.0f} ms ({attacked / alone:.1f} ×)", "at most 3 ×"),
        ("history after SIGKILL", _yes(row["goes_on_after_sigkill"]), "yes"),
        (f"{SICK} harms nobody else", _yes(SICK not in row["faults"]), "yes"),
    ]
    return table(("", "measured", "aim"), rows)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


PLAYED = {
    "waiting": "stands still until the answer is there",
    "apart": "plays the chunk on",
    "joined": "plays on, and the search starts at the rest of the chunk",
    "joined, closeness": "plays on, and a term of closeness (`closeness=10`) draws near the rest of the chunk",
}


def latency() -> str:
    """What latency costs on Push-T."""
    found = json.loads((DOCS / "tasks/push-t-latency.json").read_text())
    rows = [
        (
            f"{row['late_ms']} ms",
            PLAYED[row["way"].partition(", closeness")[0] + (", closeness" if "closeness" in row["way"] else "")],
            f"{row['reward']:.3f} ± {row['error']:.3f}",
            f"{row['success']:.2f}",
            f"{row['seam']:.1f} px",
            f"{row['within']:.1f} px",
        )
        for row in found["rows"]
    ]
    return table(("latency", "meanwhile the loop", "reward", "success", "jump at a seam", "change within"), rows)
