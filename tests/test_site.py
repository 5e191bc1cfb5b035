"""The documentation site: pages, links, names and numbers are checked without Sphinx; the slow part builds it all."""

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.task_studies import table as results
from cebm.recipes import TRIALS
from docs.site import examples, numbers, pages, reference, running, studies

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def assembled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("site") / "source"
    pages.assemble(where, run_tutorials=False)
    return where


def test_every_page_is_of_one_kind() -> None:
    written = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert written <= set(pages.PAGES)
    assert len(set(pages.PAGES.values())) == len(pages.PAGES) == 1 + sum(map(len, pages.KINDS.values()))


def test_links_of_the_assembled_site_lead_somewhere(assembled: Path) -> None:
    """Files and headings; MyST makes a heading's anchor as GitHub does."""
    broken, seen = [], 0
    for page in assembled.rglob("*.md"):
        for link in re.findall(r"\]\(([^()\s]+)\)", "".join(running.FENCE.split(page.read_text())[::2])):
            if re.match(r"[a-z]+:", link):
                continue
            seen += 1
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.is_file() or (anchor and anchor not in _anchors(target)):
                broken.append(f"{page.relative_to(assembled)}: {link}")
    assert not broken and seen > 100


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_a_broken_link_stops_the_build() -> None:
    with pytest.raises(ValueError, match=r"docs/guide.md: the link nowhere.md leads nowhere"):
        pages.rewritten("see [this](nowhere.md)", "docs/guide.md")
    with pytest.raises(ValueError, match="leads nowhere"):
        pages.rewritten("see [this](../../outside.txt)", "docs/guide.md")
    assert pages.rewritten("```\n[a](b.md)\n```", "docs/guide.md") == "```\n[a](b.md)\n```"


def test_every_public_name_is_on_a_page_of_the_reference(assembled: Path) -> None:
    overview = (assembled / "reference.md").read_text()
    entries = reference.public_names()
    assert len(entries) > 120
    for entry in entries:
        assert f"<{entry.path}>`" in overview, entry.path
        page = (assembled / f"reference/{entry.room}.md").read_text()
        assert re.search(rf"^::::\{{py:\w+\}} {entry.name}\b", page, re.M), entry.path
    fields = (assembled / "reference/acting.md").read_text()
    assert "- **candidates** `int = " in fields


def test_a_public_name_without_a_docstring_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Bare:
        field: int = 1

    class Inherits(reference.Name):
        pass

    def short() -> None:
        """Three short words."""

    planted = [reference.Name(thing.__name__, "acting", thing) for thing in (Bare, Inherits, short)]
    assert reference.undocumented(planted) == ["cebm.Bare", "cebm.Inherits", "cebm.short"]
    entries = reference.public_names()
    assert reference.undocumented(entries) == []
    monkeypatch.setattr(reference, "public_names", lambda: [*entries, planted[0]])
    with pytest.raises(ValueError, match=r"need a docstring of 4 words or more: cebm\.Bare"):
        reference.pages({})


FORMULA = re.compile(r"[=∝≤≥<←∇Σ√²‖∫~]|\bE\(|exp\(|E_s|\bVar\b|\bmean \(|p\(y")
WITH_FORMULAS = {
    *("annealing", "constraints", "densities", "denoising", "energies", "negatives", "objectives", "optimisers"),
    "samplers",
}
"""Rooms whose pieces compute something that has a formula."""
WITHOUT = {
    *(
        "Collect",
        "ConstrainedPolicy",
        "Constraint",
        "EnergyModel",
        "Negatives",
        "Scene",
        "StepInfo",
        "Terms",
        "contrast",
    ),
    *("UntrustedDensityWarning", "run"),
}
"""Of these rooms: contracts, records and loops."""


def test_public_names_have_their_formula_and_their_shapes() -> None:
    entries = reference.public_names()
    lacking = [
        each.name for each in entries if each.room in WITH_FORMULAS and not FORMULA.search(reference.docstring(each))
    ]
    assert set(lacking) <= WITHOUT
    # What takes or gives tensors says their shapes, and the page writes them out: no alias hides them.
    pages_of = {entry.path: reference._entry(entry, {}) for entry in entries}
    bare = [
        path
        for path, shown in pages_of.items()
        if re.search(r"(?<!\[)\b(?:Tensor|ndarray)\b(?![,\]])", shown)
        and not re.search(r"\w\[(?:Tensor|np\.ndarray),|\[(?:batch|steps|rows)", shown)
    ]
    assert bare == []
    assert (
        "actions: Float[Tensor, 'batch samples act']) -> Float[Tensor, 'batch samples']" in pages_of["cebm.EnergyModel"]
    )


@pytest.mark.parametrize("room", examples.parts()[1])
def test_the_examples_of_the_reference_run(room: str, tmp_path: Path, unchecked_shapes: None) -> None:
    examples.shown(room, tmp_path)


def test_a_public_name_without_an_example_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = reference.public_names()
    assert reference.without_example(entries) == []
    assert {entry.room for entry in entries} == set(examples.parts()[1])
    planted = reference.Name("uncalled", "acting", test_names_become_references_but_not_in_code)
    monkeypatch.setattr(reference, "public_names", lambda: [*entries, planted])
    monkeypatch.setattr(reference, "undocumented", lambda entries: [])
    with pytest.raises(ValueError, match=r"need an example in docs/reference\.md: acting\.uncalled$"):
        reference.pages({})


def test_names_become_references_but_not_in_code() -> None:
    names = {"Langevin": "cebm.Langevin"}
    assert "py:obj" in reference.linked("# Heading\n\n`Langevin`", names)
    assert reference.linked("`Langevin`", names) == "{py:obj}`Langevin <cebm.Langevin>`"
    for text in ("```\n`Langevin`\n```", "# `Langevin`", "[`Langevin`](x.md)", "`Langevin`", "`Langevin(1)`"):
        assert reference.linked(text, names, own="Langevin" if text == "`Langevin`" else "") == text


def test_front_page_and_readme_share_one_text(assembled: Path) -> None:
    front = (assembled / "index.md").read_text()
    readme = (ROOT / "README.md").read_text()
    first = pages.lead().split("\n\n")
    assert len(first) > 5 and all(part in readme for part in first)
    assert all(part in front for part in first if "](" not in part)
    assert "make demo\nmake test" in front and "policy = cebm.fit" in front
    for number, _, page in numbers.front():
        assert f"**{number}**" in front and (assembled / page).exists()
    assert numbers.front()[0][0] in readme


def test_every_page_has_its_own_title(assembled: Path) -> None:
    titles = [re.search(r"^# (.*)$", page.read_text(), re.M) for page in assembled.glob("*.md")]
    found = [title[1] for title in titles if title]
    assert len(found) == len(titles) > 20 and len({title.lower() for title in found}) == len(found)


def test_the_numbers_of_pages_are_those_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    for page in pages.PAGES:
        text = (ROOT / page).read_text()
        assert not re.search(r"^<!-- =", text, re.M), f"{page}: a mark at the start of a line ends the paragraph"
        assert numbers.refreshed(text) == text, f"{page}: run python -m docs.site --records"
    marked = "<!-- = act ms -->0.5<!-- / -->"
    assert numbers.refreshed(marked) not in (marked, "")
    with pytest.raises(ValueError, match="no record gives the number 'nothing'"):
        numbers.refreshed("<!-- = nothing -->0.5<!-- / -->")
    text = (ROOT / "docs/choose.md").read_text()
    monkeypatch.setattr(numbers, "_stability", lambda case, way="as-trained": "12.3 %")
    assert "12.3 %" in numbers.refreshed(text) != text


def test_tables_of_tasks_say_what_was_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(studies, "ROOT", tmp_path)
    (tmp_path / "docs/tasks").mkdir(parents=True)
    assert studies.other_tasks() == {"forks": studies.NOT_YET, "metaworld": studies.NOT_YET}

    def record(label: str, seed: int, successes: list[int], **overall: float) -> dict[str, Any]:
        way = {"success": successes, "action_ms": 1.0, **overall}
        return {"label": label, "seed": seed, "result": {"seconds": 1.0, "ways": {"as trained": way}}}

    forks = [record("steady", seed, [1, 1, 1, 0], entropy=0.75) for seed in (0, 1)]
    written = {"table": results(forks, "success"), "experts": {"": {"success": 1.0, "entropy": 0.98}}}
    (tmp_path / "docs/tasks/forks.json").write_text(json.dumps(written))
    lines = studies.other_tasks()["forks"].splitlines()
    assert lines[2] == "| the expert |  |  | 1.000 | 0.980 |  |  |"
    assert lines[3].startswith(
        "| `steady` | as the recipe says | 2 | 0.750 (0.750 to 0.750) | 0.750 (0.750 to 0.750) |"
    )

    runs = [record(f"push, mixed: {recipe}", 0, found) for recipe, found in (("steady", [1, 1]), ("mse", [1, 0]))]
    runs += [record("push, scripted: steady", seed, [1, 1]) for seed in (0, 1)]
    written = {"table": results(runs, "success"), "experts": {"push, mixed": {"success": 0.9}}}
    (tmp_path / "docs/tasks/metaworld.json").write_text(json.dumps(written))
    assert studies.metaworld()["metaworld"].splitlines()[2:] == [
        "| mean of 1 tasks, two styles, shuffled | 0.900 | 1.000 | 0.500 |  |",
        "| push, mixed | 0.900 | 1.000 | 0.500 | 1 / 1 |",
        "| push, scripted |  | 1.000 (1.000 to 1.000) |  | 2 / 0 |",
    ]


def test_how_to_pages_name_real_settings() -> None:
    text = "".join((ROOT / f"docs/{name}.md").read_text() for name in ("choose", "report", "troubles"))
    settings = set(re.findall(r"--([a-z]+)\.([a-z-]+)", text))
    assert len(settings) > 5
    for part, setting in settings:
        assert any(hasattr(getattr(trial, part), setting.replace("-", "_")) for trial in TRIALS.values()), setting
    recipes = set(re.findall(r"^\| `([a-z-]+)`(?:, `([a-z-]+)`)? \|", text, re.M)) | {
        ("mcmc-loss", "conditional-maxent")
    }
    assert {name for pair in recipes for name in pair if name} <= set(TRIALS)


def test_the_page_about_reports_names_its_charts_and_parts() -> None:
    text = (ROOT / "docs/report.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "src/cebm/report").iterdir() if path.is_file())
    named = re.findall(r"\*([A-Z][\w ]+)\*", text) + re.findall(r"^## (?!The head)(.*?):", text, re.M)
    assert len(named) > 10
    assert [name for name in named if name not in source] == []


def test_troubles_names_real_warnings_and_messages() -> None:
    """And all of the library's own warnings: a new one needs its row."""
    text = (ROOT / "docs/troubles.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "src/cebm").rglob("*.py"))
    named = set(re.findall(r"`(\w+(?:Warning|Error))`", text))
    assert named >= set(re.findall(r"^class (\w+Warning)\(", source, re.M)) and len(named) > 5
    assert named <= set(re.findall(r"^class (\w+)\(", source, re.M))
    quoted = [part for said in re.findall(r"^\|[^|]*?\"([^\"|]+)\"", text, re.M) for part in said.split("…")]
    wanted = [part.strip(" ,") for part in quoted if len(part.strip(" ,")) > 8]
    assert len(wanted) >= 5
    for part in wanted:
        assert part in source, part


@pytest.mark.parametrize("page", sorted(pages.RUN))
def test_tutorials_run(page: str, tmp_path: Path, unchecked_shapes: None) -> None:
    """With little training; a build runs them as they are."""
    pytest.importorskip("matplotlib", reason="the tutorial draws")
    text = (ROOT / page).read_text()
    pictures = [name for name, _ in running.PICTURE.findall(text)]
    for pattern, few in ((r"\bsteps([= ])\d{3,}", "3"), (r"\bepisodes([= ])\d+", "4"), ("4([_,])000", "100")):
        text = re.sub(pattern, lambda found, few=few: found[0].partition(found[1])[0] + found[1] + few, text)
    shown = running.ran(text, page, tmp_path)
    assert ":class: output" in shown and all(f"]({name})" in shown for name in pictures)
    assert {path.name for path in tmp_path.iterdir()} == set(pictures)


def test_an_example_that_does_not_run_stops_the_build(tmp_path: Path) -> None:
    for block in ("python\n1 / 0", "shell\ncebm nothing", "shell\nrm -r x"):
        with pytest.raises(RuntimeError, match="page: this example does not run"):
            running.ran(f"```{block}\n```", "page", tmp_path)
    with pytest.raises(RuntimeError, match=r"no example saved the picture x\.png"):
        running.ran("<!-- picture: x.png: nothing -->", "page", tmp_path)
    shown = running.ran("```python\nprint(__name__)\n```", "page", tmp_path)
    assert "\n\ntutorial\n" in shown


def test_the_gallery_has_every_example_as_it_is_now() -> None:
    pytest.importorskip("matplotlib", reason="the gallery draws")
    gallery = importlib.import_module("docs.site.gallery")
    examples = ROOT / "examples"
    programs = {str(path.relative_to(examples)) for ending in ("py", "cpp") for path in examples.rglob(f"*.{ending}")}
    assert programs == set(gallery.SOURCES.values())
    page, kept = (ROOT / "docs/gallery.md").read_text(), gallery.records()
    for name, path in gallery.SOURCES.items():
        assert f"](gallery/{name}.png)" in page and f"](../examples/{path})" in page
        assert (ROOT / f"docs/gallery/{name}.png").stat().st_size < 150_000
        assert kept[name]["fingerprint"] == gallery.fingerprint(name), f"run python -m docs.site.gallery {name}"
    # A change of the code counts, one of a docstring does not.
    code = 'def f():\n    """Words."""\n    return 1\n'
    assert gallery.of_python(code) == gallery.of_python(code.replace("Words", "Others"))
    assert gallery.of_python(code) != gallery.of_python(code.replace("1", "2"))


def test_requirements_are_pinned() -> None:
    lines = [line for line in (ROOT / "docs/requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 10 and all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="`make docs` installs Sphinx")
def test_the_site_builds_without_a_warning_and_needs_no_network(assembled: Path, tmp_path: Path) -> None:
    """All but the tutorials' training and MathJax, which `make docs` fetches."""
    out = tmp_path / "html"
    command = [*f"{sys.executable} -m sphinx -b html -W -n --keep-going -q -E".split(), "-c", "docs/site"]
    environment = {"CEBM_SITE_STATIC": str(assembled / "_static"), "PATH": ""}
    built = subprocess.run([*command, assembled, out], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stderr
    assert (out / "searchindex.js").stat().st_size > 10_000
    for page in out.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]*\bsrc=\"([^\"]+)|<link[^>]*\bhref=\"([^\"]+)", page.read_text()
        )
        assert not [link for pair in loaded for link in pair if re.match(r"https?:|//", link)], page
    # A planted fault: a reference that leads nowhere fails the build.
    (assembled / "planted.md").write_text("---\norphan: true\n---\n\n# Planted\n\n{py:obj}`cebm.Nothing`\n")
    built = subprocess.run([*command, assembled, out], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert built.returncode != 0 and "cebm.Nothing" in built.stderr


# ---------------------------------------------------------------------------------------------- in a browser

BUILT = ROOT / "build" / "docs" / "html"
LOOKED_AT = ("index", "gallery", "why", "first-policy", "choose", "studio", "theory", "results", "reference/acting")
"""Pages of every kind: with tiles, pictures, formulas, wide tables, signatures."""


@pytest.mark.slow
@pytest.mark.skipif(not (BUILT / "index.html").exists(), reason="`make docs` builds the site")
def test_the_built_site_in_a_browser() -> None:
    """Nothing overflows at 400 px and more, in light and dark; no console error, and no request but for its own files;
    the search finds what is there."""
    driver = pytest.importorskip("browser", reason="the browser is driven over a websocket: pip install 'cebm[serve]'")
    if driver.chromium() is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with driver.browser() as browser:
        for width, height, dark in ((1024, 700, False), (1440, 900, True), (400, 800, False), (400, 800, True)):
            browser.look(width, height, dark=dark)
            for page in LOOKED_AT:
                browser.open((BUILT / f"{page}.html").as_uri(), "document.readyState === 'complete'")
                browser.until("!window.MathJax || window.MathJax.startup?.promise.then(() => true)")
                assert browser.run("document.documentElement.scrollWidth") <= width, page
                assert browser.run("[...document.images].filter((each) => !each.naturalWidth).length") == 0, page
                assert browser.run("[...document.images].filter((each) => !each.alt).length") == 0, page
                red, green, blue = browser.run(
                    "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).slice(0, 3).map(Number)"
                )
                assert (max(red, green, blue) < 60) is dark, page
                browser.keep(f"site-{page.replace('/', '-')}-{width}-{'dark' if dark else 'light'}")
        browser.open(f"{(BUILT / 'search.html').as_uri()}?q=langevin", "document.readyState === 'complete'")
        browser.until("document.querySelectorAll('#search-results li').length > 3")
        assert browser.errors == []
        assert {url.split(":")[0] for url in browser.requests} <= {"file", "data", "about"}
