"""What a study has found, as text for the ledger."""

from collections.abc import Mapping, Sequence
from typing import Any

from reproduction.intervals import Interval


def markdown(evidence: Mapping[str, Any]) -> str:
    """The section of the ledger."""
    about = ", ".join(map(str, evidence["claims"]))
    lines = [f"### {evidence['title']}", "", f"Claim{'s' if len(evidence['claims']) > 1 else ''} {about}. "]
    lines[-1] += evidence["rule"]
    lines += ["", *_table(evidence), ""]
    lines += [f"- {sentence(row, evidence['seeds_needed'])}" for row in evidence["comparisons"]]
    return "\n".join(lines)


def _table(evidence: Mapping[str, Any]) -> list[str]:
    shown = evidence["shown"]
    heads = [name.replace("|", "\\|") for name in shown]
    lines = [f"| | seeds | {' | '.join(heads)} |", "| --- | --- |" + " --- |" * len(shown)]
    for label, arm in evidence["arms"].items():
        cells = [_cell(arm["numbers"].get(name)) for name in shown]
        lines.append(f"| `{label}` | {len(arm['seeds'])} | {' | '.join(cells)} |")
    return lines


def _cell(values: Sequence[float] | None) -> str:
    if not values:
        return "–"
    found = Interval.of(values)
    if len(values) == 1:
        return f"{found.mean:.3f}"
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"


def sentence(row: Mapping[str, Any], needed: int) -> str:
    """A comparison in words, with its verdict where there are enough seeds."""
    if not row["seeds"]:
        return f"{row['what']}: no seed yet."
    mean, low, high = row["difference"]
    told = f"{row['what']}: {mean:+.3f}" + ("" if low is None else f" ({low:+.3f} to {high:+.3f})")
    told += f", p = {row['p']:.3f}" if "p" in row else ""
    if row["verdict"] is None:
        return f"{told}: {row['seeds']} of {needed} seeds, no verdict."
    return f"{told}, {row['seeds']} seeds: **{row['verdict']}**" + (" (decides)." if row["decides"] else ".")
