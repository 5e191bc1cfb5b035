"""Which page is of which kind, and the pages as Sphinx reads them: links between them rewritten, tutorials run.

Pages stand in `docs/` and link to each other and to any file of the repository, as a reader of the repository expects.
Here they become pages of the site; a file that is no page is copied into the site and offered for download, and a
folder becomes a list of its files. A link that leads nowhere is an error.
"""

import os
import re
import shutil
from pathlib import Path

from docs.site import examples, reference
from docs.site.numbers import front, refreshed
from docs.site.running import FENCE, ran

ROOT = Path(__file__).parents[2]
KINDS: dict[str, dict[str, str]] = {
    "Tutorials": {
        "first-policy": "docs/first-policy.md",
        "your-data": "docs/your-data.md",
        "your-pieces": "docs/your-pieces.md",
        "to-the-robot": "docs/to-the-robot.md",
        "gallery": "docs/gallery.md",
    },
    "How-to": {
        "choose": "docs/choose.md",
        "report": "docs/report.md",
        "troubles": "docs/troubles.md",
        "data": "docs/data.md",
        "units": "docs/units.md",
        "scale": "docs/scale.md",
        "deploy": "docs/deploy.md",
        "serving": "docs/serving.md",
        "trust": "docs/trust.md",
        "studio": "docs/studio.md",
    },
    "Reference": {
        "reference": "docs/reference.md",
        "guide": "docs/guide.md",
        "sampling": "docs/sampling.md",
        "densities": "docs/densities.md",
    },
    "Explanation": {
        "why": "docs/why.md",
        "stability": "docs/stability.md",
        "annealed": "docs/annealed.md",
        "tasks": "docs/tasks.md",
        "theory": "docs/theory.md",
        "results": "reproduction/results.md",
        "performance": "docs/performance.md",
    },
    "Project": {"contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"},
}
"""The four kinds of pages, and those about the project: what is written where.
`reference.py` writes the public names into the page `reference`, and one page for each room."""
PAGES = {path: name for kind in KINDS.values() for name, path in kind.items()} | {"README.md": "index"}
RUN = {*KINDS["Tutorials"].values(), "docs/why.md"} - {"docs/gallery.md"}
"""The pages whose examples are run when the site is built; what they print is shown below them."""
DOORS = {
    "Tutorials": ("first-policy", "First policy in five minutes", "from nothing to a policy that acts"),
    "How-to": ("choose", "Choose a recipe", "by what your data is like"),
    "Reference": ("reference", "All public names", "with their settings and formulas"),
    "Explanation": ("why", "Why conditional energies go wrong", "and what helps: the paper's argument, with figures"),
}
LEAD_END = "## Does it work?"
"""The front page has the README up to here."""
LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))")


def lead() -> str:
    """What README and front page share: what cebm is for, code, picture, the two commands."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if text.count(f"\n{LEAD_END}\n") != 1:
        raise ValueError(f"README.md must have the heading {LEAD_END!r} once: the front page ends there")
    return text.split(LEAD_END)[0]


def front_page() -> str:
    """The README's lead, three numbers, four doors and the table of contents."""
    numbers = [f"- [**{number}** {what}]({page})" for number, what, page in front()]
    doors = [f"- [**{title}** {what}]({page}.md)" for page, title, what in DOORS.values()]
    parts = [":::{container} tiles numbers", *numbers, ":::", "", "## Where to go next", ""]
    parts += [":::{container} tiles doors", *doors, ":::", ""]
    for kind, names in KINDS.items():
        parts += ["```{toctree}", ":hidden:", f":caption: {kind}", "", *names, "```", ""]
    return f"{rewritten(lead(), 'README.md')}\n" + "\n".join(parts)


def destination(link: str, page: str) -> tuple[str, Path | None]:
    """Where a link of a page leads within the site, and the file or folder to copy for it, if it is no page."""
    if re.match(r"[a-z]+:|#", link):
        return link, None
    path, _, anchor = link.partition("#")
    target = Path(os.path.normpath((ROOT / page).parent / path))
    if not target.is_relative_to(ROOT) or not target.exists():
        raise ValueError(f"{page}: the link {link} leads nowhere")
    name = target.relative_to(ROOT).as_posix()
    if name in PAGES:
        return f"{PAGES[name]}.md" + (f"#{anchor}" if anchor else ""), None
    if target.suffix == ".md":
        raise ValueError(f"{page}: the link {link} leads to a page that is of no kind; list it in docs/site/pages.py")
    return (f"files/{name}/index.md" if target.is_dir() else f"files/{name}"), target


def rewritten(text: str, page: str, copied: set[Path] | None = None) -> str:
    """A page with its links as the site needs them; what they need is added to `copied`."""

    def replace(match: re.Match[str]) -> str:
        link, target = destination(match[1], page)
        if target is not None and copied is not None:
            copied.add(target)
        return link

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(replace, part) for part in parts[::2]]
    return "".join(parts)


def assemble(out: Path, run_tutorials: bool) -> None:
    """Writes every page to `out`, with what they show and link to."""
    (out / "_static").mkdir(parents=True)
    shutil.copy(ROOT / "docs/site/style.css", out / "_static")
    copied: set[Path] = set()
    names = {entry.name: entry.path for entry in reference.public_names()}
    rewritten(lead(), "README.md", copied)
    (out / "index.md").write_text(front_page(), encoding="utf-8")
    for path, name in PAGES.items():
        if name in ("index", "reference"):
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        text = rewritten(refreshed(text), path, copied)
        if run_tutorials and path in RUN:
            text = ran(text, path, out)
        (out / f"{name}.md").write_text(reference.linked(text, names), encoding="utf-8")
    for name, text in reference.pages(examples.rooms(out if run_tutorials else None)).items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")
    for target in sorted(copied):
        _copy(target, out / "files" / target.relative_to(ROOT))


def _copy(target: Path, where: Path) -> None:
    """A file, or a folder's files with a page that lists them."""
    if target.is_file():
        where.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(target, where)
        return
    where.mkdir(parents=True, exist_ok=True)
    inside = sorted(each for each in target.iterdir() if each.is_file() and each.suffix not in (".pyc", ".md"))
    for each in inside:
        shutil.copy(each, where)
    title = target.relative_to(ROOT).as_posix()
    lines = ["---", "orphan: true", "---", "", f"# Files of {title}", "", *(f"- [{e.name}]({e.name})" for e in inside)]
    (where / "index.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
