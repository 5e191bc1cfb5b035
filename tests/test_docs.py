"""What the documents say is true: code runs, commands and links exist, and theory.md names real functions and tests."""

import ast
import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from cebm.runs import train

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "reproduction/results.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
]


def _blocks(text: str, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    return [block for name, block in fenced if name == language]


def _run(*arguments: str) -> str:
    """Output of a Python process, one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    process = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_readme_opens_with_the_two_commands() -> None:
    assert _blocks((ROOT / "README.md").read_text(), "")[0] == "make demo\nmake test\n"


def test_readme_code_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block, on arrays that a reader would bring; only the number of training steps is cut."""
    monkeypatch.chdir(tmp_path)
    x = np.linspace(0, 1, 40, dtype=np.float32)[:, None]
    names: dict[str, object] = {"obs": x, "actions": x**2, "episode_ends": [20, 40], "X": x, "y": x[:, 0]}
    for block in _blocks((ROOT / "README.md").read_text(), "python"):
        exec(re.sub(r"steps=\d+", "steps=5", block), names)
    assert (tmp_path / "my-policy/header.json").exists()
    assert "does not sample" in capsys.readouterr().out


def test_readme_commands_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z]+)", text)) <= targets
    lines = [line for block in _blocks(text, "") for line in block.splitlines() if line.startswith("cebm ")]
    assert lines
    helps: dict[tuple[str, ...], str] = {}
    for line in lines:
        words = line.split()[1:]
        flags = [word for word in words if word.startswith("--")]
        command = tuple(words[: words.index(flags[0])] if flags else words)
        if command not in helps:
            helps[command] = _run("-c", "from cebm.cli import main; main()", *command, "--help")
        assert all(flag in helps[command] for flag in flags), line


def test_the_code_about_data_runs() -> None:
    names: dict[str, object] = {}
    for block in _blocks((ROOT / "docs/data.md").read_text(), "python"):
        exec(block, names)
    assert np.shape(names["action"]) == (2,)


@pytest.mark.slow
def test_compose_example_learns() -> None:
    lines = _run("examples/compose.py").splitlines()
    uniform, mixture, chains = (float(re.search(r"NLL (\S+) nats", line)[1]) for line in lines)  # type: ignore[index]
    # The entropy is -0.88; an energy that learned nothing has log 2.2 = 0.79.
    assert -0.95 < uniform < -0.4 and -0.95 < mixture < -0.4 < chains


def test_the_example_of_a_new_trial_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its job as it is, but for the length."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("new_trial")
    job = replace(example.job, episodes=5, steps=4, evaluate_every=4, evaluation_episodes=2)
    outcome = train(job, tmp_path / "mine")
    assert outcome.best_step == 4 and outcome.policy.act(outcome.policy.obs_box.centre.numpy()).shape == (1,)
    assert (job.trial.optimiser.average, job.trial.energy.width) == (0.99, 64)


def test_the_example_of_an_obstacle_never_aims_into_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With policies that learned almost nothing: the constraint does not depend on what they know."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    found = importlib.import_module("obstacle").main(steps=2, episodes=5)
    assert found["mdn, no constraint"][1] > 0
    assert [found[name][1] for name in ("steady, constrained", "mdn, constrained", "mdn, first allowed draw")] == [
        0
    ] * 3


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    document = ROOT / name
    text = document.read_text()
    headings = [re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)]
    for link in re.findall(r"\]\(([^)]+)\)", text):
        inside = link.startswith("#") and link[1:] in headings
        file = link.partition("#")[0]  # tests/test_site.py looks for the heading
        assert inside or link.startswith("https://") or (file and (document.parent / file).exists()), link


def test_theory_names_real_functions() -> None:
    names = set(re.findall(r"`(cebm(?:\.\w+)+)`", (ROOT / "docs/theory.md").read_text()))
    assert len(names) > 20
    for name in names:
        _, module, *attributes = name.split(".")
        reduce(getattr, attributes, importlib.import_module(f"cebm.{module}"))


def test_documents_name_real_tests() -> None:
    names = {
        name for page in DOCUMENTS for name in re.findall(r"`tests/(\w+\.py)(?:::(\w+))?`", (ROOT / page).read_text())
    }
    assert len(names) > 20
    for file, test in names:
        assert f"def {test}" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


def test_theory_tables_survive_their_formulas() -> None:
    """A bare | or a backslash before punctuation inside $…$ breaks a table or is eaten by Markdown."""
    text = (ROOT / "docs/theory.md").read_text()
    for formula in re.findall(r"(?<!\$)\$(?!\$)([^$]+)\$", text):
        assert "|" not in formula and not re.search(r"\\[^a-zA-Z]", formula), formula
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({row.count("|") for row in table.splitlines()}) == 1, table.splitlines()[0]


def test_the_stability_study_shows_what_was_measured() -> None:
    """The committed tables are those of the committed records."""
    document = importlib.import_module("benchmarks.stability_document")
    text = (ROOT / "docs/stability.md").read_text()
    found = document.read(ROOT / "docs/stability")
    assert document.documented(text, found) == text
    # The README quotes the same.
    readme = (ROOT / "README.md").read_text()
    for case in document.TARGETS:
        assert document._percent([record["last"]["as-trained"]["success"] for record in found[case]]) in readme
    # And they follow the records: other numbers make another table.
    found["steady-2d-2000"][0]["last"]["as-trained"]["success"] = 0.123
    assert "12.3" in document.documented(text, found)


def test_docstrings_are_sentences() -> None:
    """Of four words at least, private ones too."""
    short = []
    for path in (ROOT / "src" / "cebm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text.split()) < 4:
                    short.append(f"{path.name}: {text}")
    assert not short


def test_modules_import_only_from_those_above_them() -> None:
    """In the order of CONTRIBUTING.md's layout, which has them all but those that everything or nothing imports."""
    layout = next(block for block in _blocks((ROOT / "CONTRIBUTING.md").read_text(), "") if "spaces.py" in block)
    order = [re.split(r"[./]", line.split()[0])[0] for line in layout.splitlines()]
    sources = ROOT / "src" / "cebm"
    listed = {path.relative_to(sources).parts[0].removesuffix(".py") for path in sources.rglob("*.py")}
    assert listed - {*order} == {"__init__", "__main__", "commands", "progress"}
    for path in sources.rglob("*.py"):
        module, text = path.relative_to(sources).parts[0].removesuffix(".py"), path.read_text()
        imported = {*re.findall(r"^from cebm\.(\w+)", text, re.M)}
        for names in re.findall(r"^from cebm import (.+)$", text, re.M):
            imported |= {*re.findall(r"\w+", names)}
        if module in order:
            below = order[order.index(module) + 1 :]
            assert not imported & {*below}, f"{path} imports {imported & {*below}}"
