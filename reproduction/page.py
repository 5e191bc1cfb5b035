"""The ledger: the claims' JSON files as Markdown, and as one self-contained HTML page."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from cebm import __version__
from cebm.storage import write_atomically
from reproduction.claims import CLAIMS
from reproduction.evidence import markdown, sentence

PARTS = (
    *("number", "slug", "claim", "section", "protocol", "metric", "rule", "measured", "verdict", "comment", "seeds"),
    *("settings", "commit", "commits_of_runs", "diverged", "runs"),
)
RULES = (
    "Intervals are 95 % over seeds unless a claim says otherwise. Every rule was fixed before the runs that it "
    "compares, except that our runs of `ibc` and `correct`, which many claims share, and three of claim 11 were known "
    "when some of the others got their present rules. What was added after a result had been seen is said to be, and "
    "decides nothing."
)
VERDICTS = ("holds", "does not hold", "inconclusive")


def read_claims(out: Path) -> list[dict[str, Any]]:
    """The records NN-SLUG.json of a folder of results, by number."""
    found = []
    for path in sorted(Path(out).glob("[0-9][0-9]-*.json")):
        try:
            record = json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: damaged, not JSON ({error})") from error
        lacking = [name for name in PARTS if name not in record]
        if lacking:
            raise ValueError(f"{path}: {lacking[0]} is missing")
        found.append(record)
    if not found:
        raise ValueError(f"there are no results in {out}; `cebm reproduce` measures them")
    return sorted(found, key=lambda record: record["number"])


def read_evidence(out: Path) -> list[dict[str, Any]]:
    """What studies have found beside the claims: the files studies/NAME.json of a folder of results."""
    return [json.loads(path.read_bytes()) for path in sorted((Path(out) / "studies").glob("*.json"))]


def further_evidence(record: dict[str, Any], evidence: list[dict[str, Any]]) -> list[str]:
    """The studies that are about a claim, each with its first sentence of what decides."""
    found = []
    for study in evidence:
        if record["number"] in study["claims"]:
            decisive = [row for row in study["comparisons"] if row["decides"]] or study["comparisons"]
            told = " ".join(sentence(row, study["seeds_needed"]) for row in decisive)
            found.append(f"[{study['title']}](#{anchor_of(study['title'])}): {told}")
    return found


def write_ledger(out: Path) -> Path:
    """Write `out`.md from the records in `out` alone."""
    target = Path(out).with_suffix(".md")
    write_atomically(target, ledger(Path(out)).encode())
    return target


def ledger(out: Path) -> str:
    """The text of the ledger."""
    records, evidence = read_claims(out), read_evidence(out)
    lines = ["# Results", "", summary(records), ""]
    caution, taken = smoke(records), duration(records, out)
    if caution:
        lines += [f"**{caution}**", ""]
    lines += [
        f"Written by `cebm reproduce --scale paper --out DIR` from the files in [{out.name}/]({out.name}), "
        f"whose runs it does not repeat. {RULES}",
        "",
        conditions(records),
        "",
        *([taken, ""] if taken else []),
        "| | claim | verdict | measured |",
        "| --- | --- | --- | --- |",
    ]
    for record in records:
        cells = (
            f"[{record['number']}](#{anchor(record)})",
            record["claim"],
            f"**{record['verdict']}**",
            headline(record),
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    lines += ["", unmeasured(records)] if unmeasured(records) else []
    for record in records:
        lines += ["", f"## {heading(record)}", "", f"{record['claim']} ({record['section']})", ""]
        lines += [f"- **{name.capitalize()}:** {record[name]}" for name in ("protocol", "metric", "rule")]
        lines += [f"- **Measured:** {record['measured']}", f"- **Verdict:** **{record['verdict']}**"]
        lines += [f"- **Further evidence:** {told}" for told in further_evidence(record, evidence)] + [""]
        lines += [
            f"![{record['claim']}]({out.name}/{stem(record)}.png)",
            "",
            record["comment"],
            "",
            circumstances(record),
        ]
    if evidence:
        lines += ["", "## Further evidence", ""]
        lines += [
            "Studies beside the claims, whose rules were written before their runs. They decide no verdict above; with "
            "fewer seeds than its rule needs, a study has none either.",
        ]
        for study in evidence:
            lines += ["", markdown(study)]
    return "\n".join(lines) + "\n"


def write_page(out: Path, html: Path) -> Path:
    """Write the ledger as one HTML page that contains its figures and opens offline."""
    records, evidence = read_claims(out), read_evidence(out)
    for record in records:
        figure = Path(out) / f"{stem(record)}.png"
        if not figure.is_file():
            raise FileNotFoundError(f"{figure}: the figure of claim {record['number']} is missing")
        record["figure"] = "data:image/png;base64," + base64.b64encode(figure.read_bytes()).decode()
        for part in (heading, anchor, headline, circumstances):
            record[part.__name__] = part(record)
        record["further"] = [
            re.sub(r"\[(.*?)\]\(.*?\)|\*\*", r"\1", told) for told in further_evidence(record, evidence)
        ]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["prose"] = prose
    text = environment.get_template("template.html").render(
        records=records,
        style=report_style(environment),
        summary=summary(records),
        caution=smoke(records),
        rules=RULES,
        conditions=conditions(records),
        duration=duration(records, Path(out)),
        unmeasured=unmeasured(records),
        tally=[(sum(record["verdict"] == verdict for record in records), verdict) for verdict in VERDICTS],
        version=__version__,
    )
    target = Path(html)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, text.encode())
    return target


def report_style(environment: jinja2.Environment) -> Markup:
    """The style sheets of the run report, colours first, so that the two pages look alike."""
    sheets = (("studio/page", "panels.css"), ("report", "style.css"))
    return Markup(
        "\n".join(jinja2.PackageLoader("cebm", folder).get_source(environment, name)[0] for folder, name in sheets)
    )


def prose(text: str) -> Markup:
    """Text as HTML: escaped, `code` as <code>, and no line break before a % sign."""
    parts = str(escape(text.replace(" %", "\u00a0%"))).split("`")
    if len(parts) % 2 == 0:  # an unpaired backtick is an ordinary character
        return Markup("`".join(parts))
    return Markup("".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)))


def summary(records: list[dict[str, Any]]) -> str:
    """One sentence: how many claims hold, do not hold, and are inconclusive."""
    counts = {verdict: sum(record["verdict"] == verdict for record in records) for verdict in VERDICTS}
    measured = f" {len(records)} {'is' if len(records) == 1 else 'are'} measured:" if unmeasured(records) else ""
    parts = (
        f"{counts['holds']} hold{'s' if counts['holds'] == 1 else ''}",
        f"{counts['does not hold']} {'does' if counts['does not hold'] == 1 else 'do'} not hold",
        f"{counts['inconclusive']} {'is' if counts['inconclusive'] == 1 else 'are'} inconclusive",
    )
    return f"Of the paper's {len(CLAIMS)} claims{measured} {parts[0]}, {parts[1]} and {parts[2]}."


def unmeasured(records: list[dict[str, Any]]) -> str:
    """One sentence that names the claims without a record; empty if there are none."""
    known = {record["number"] for record in records}
    missing = [f"{claim.number} {claim.slug}" for claim in CLAIMS if claim.number not in known]
    return f"Not yet measured: {', '.join(missing)}." if missing else ""


def smoke(records: list[dict[str, Any]]) -> str:
    """A warning that names the claims measured at the smoke scale; empty if there are none."""
    tried = [str(record["number"]) for record in records if record["settings"]["name"] != "paper"]
    if not tried:
        return ""
    which = "Claim" if len(tried) == 1 else "Claims"
    return f"{which} {', '.join(tried)}: measured at the smoke scale, which tries the code and not the claim."


def conditions(records: list[dict[str, Any]]) -> str:
    """The settings that all trainings share."""
    steps, episodes = max((r["settings"]["steps"], r["settings"]["evaluation_episodes"]) for r in records)
    return (
        f"Trainings take {steps:,} steps unless a claim says otherwise: the curves of `ibc` rise for 1,000. Success "
        f"along training is that of {episodes} validation episodes, and that of a finished run of {2 * episodes} "
        "held-out ones, with 64 candidates for an action. The episodes are the same for all seeds and trials: the "
        "intervals are about training, not about which episodes are tested. A run whose numbers cease to be finite is "
        "measured as its last checkpoint has it, and named. In figures, lines and bars are means over seeds, bands and "
        "whiskers their 95 % intervals unless the figure says otherwise, dots the seeds."
    )


def duration(records: list[dict[str, Any]], out: Path) -> str:
    """How long the runs of these claims took, each counted once; empty if no run is on disk."""
    paths = [out / "runs" / f"{key}.json" for key in sorted({key for record in records for key in record["runs"]})]
    seconds: dict[str, list[float]] = {}
    for path in filter(Path.is_file, paths):
        recipe, _, _ = path.stem.rpartition("-")
        seconds.setdefault(recipe, []).append(json.loads(path.read_bytes())["seconds"])
    if not seconds:
        return ""
    taken = sum(map(sum, seconds.values())) / 3600
    least = sum(len(seeds) * min(seeds) for seeds in seconds.values()) / 3600
    return (
        f"The {sum(map(len, seconds.values()))} runs took {taken:.3g} hours of a core. Were all seeds of a recipe as "
        f"fast as its fastest, the one least disturbed by other work, it would be {least:.3g} hours, or "
        f"{least / 2:.3g} on two cores."
    )


def headline(record: dict[str, Any]) -> str:
    """The first sentence of the measured result."""
    return re.split(r"(?<=\.) (?=[A-Z`])", record["measured"])[0]


def stem(record: dict[str, Any]) -> str:
    return f"{record['number']:02d}-{record['slug']}"


def heading(record: dict[str, Any]) -> str:
    return f"Claim {record['number']}: {record['slug'].replace('-', ' ')}"


def anchor(record: dict[str, Any]) -> str:
    """The anchor of a claim's heading."""
    return anchor_of(heading(record))


def anchor_of(title: str) -> str:
    """The anchor that Markdown renderers give to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def circumstances(record: dict[str, Any]) -> str:
    """Seeds, scale and commits of a record, and its diverged runs."""
    seeds = ", ".join(map(str, record["seeds"]))
    commits = ", ".join(sorted({_short(commit) for commit in record["commits_of_runs"]}))
    commit = f", run at {commits}, judged at {_short(record['commit'])}" if record["commit"] else ""
    diverged = f" Diverged: {', '.join(record['diverged'])}." if record["diverged"] else ""
    scale = record["settings"]["name"]
    return f"Seed{'s' if len(record['seeds']) != 1 else ''} {seeds}; {scale} scale{commit}.{diverged}"


def _short(commit: str) -> str:
    return re.sub(r"^([0-9a-f]{10})[0-9a-f]+", r"\1", commit)
