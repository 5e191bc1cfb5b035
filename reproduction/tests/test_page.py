"""The ledger and its page say what the records say; and the command that writes them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cebm.cli import main
from reproduction import anchoring, command, running
from reproduction.claims import CLAIMS
from reproduction.ledger import Claim
from reproduction.page import ledger, prose, write_ledger, write_page
from reproduction.running import ReproductionError, judge_records
from reproduction.tests.test_running import Inline
from reproduction.trainings import PAPER

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "reproduction/results"
PNG = b"\x89PNG\r\n\x1a\n not a real one"


def write_claim(out: Path, number: int, **changes: Any) -> None:
    out.mkdir(exist_ok=True)
    record = {
        "claim": f"Claim {number} of H(y|x) & <b>.",
        "number": number,
        "slug": f"slug-{number}",
        "section": "Sec. V",
        "protocol": "The protocol of `ibc`.",
        "metric": "The metric.",
        "rule": "The rule.",
        "verdict": "holds",
        "measured": f"Success {number} % (1 to 2).",
        "comment": "The comment.",
        "seeds": [0, 1],
        "settings": {"name": "paper", "steps": 2000, "evaluation_episodes": 100},
        "commit": "0123456789abcdef",
        "commits_of_runs": ["fedcba9876543210", "fedcba9876543210", "aaaabbbbccccdddd-dirty"],
        "diverged": [],
        "runs": [],
        "measurements": {},
    } | changes
    (out / f"{number:02d}-{record['slug']}.json").write_text(json.dumps(record))
    (out / f"{number:02d}-{record['slug']}.png").write_bytes(PNG)


def test_the_ledger_says_what_the_records_say(tmp_path: Path) -> None:
    out = tmp_path / "results"
    write_claim(out, 10, verdict="does not hold")
    write_claim(out, 2)
    write_claim(out, 3, verdict="inconclusive", settings={"name": "smoke", "steps": 30, "evaluation_episodes": 10})
    assert write_ledger(out) == tmp_path / "results.md"
    text = (tmp_path / "results.md").read_text()
    assert "Of the paper's 17 claims 3 are measured: 1 holds, 1 does not hold and 1 is inconclusive." in text
    assert text.count("run at aaaabbbbcc-dirty, fedcba9876, judged at 0123456789.") == 3
    assert "Not yet measured: 1 integral, 4 noise, 5 chains" in text and "17 explicit-parts." in text
    assert "Claim 3: measured at the smoke scale" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}  # H(y|x) does not break the table
    assert [row.split("]")[0] for row in rows[2:]] == ["| [2", "| [3", "| [10"]
    assert "**does not hold**" in rows[4] and "Success 10 %" in rows[4]
    headings = {line[3:].lower().replace(" ", "-").replace(":", "") for line in text.splitlines() if line[:3] == "## "}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) == headings
    for link in re.findall(r"\]\(([^#)][^)]*)\)", text):
        assert (tmp_path / link).exists()
    for part in ("The protocol of `ibc`.", "The metric.", "The rule.", "The comment.", "Sec. V", "0123456789"):
        assert text.count(part) == 3
    # And it follows them: another verdict is another ledger.
    write_claim(out, 2, verdict="does not hold")
    assert "Of the paper's 17 claims 3 are measured: 0 hold, 2 do not hold and 1 is inconclusive." in ledger(out)
    for claim in CLAIMS:
        write_claim(out, claim.number, slug=claim.slug)
    for made_up in out.glob("*-slug-*"):
        made_up.unlink()
    assert "Of the paper's 17 claims 17 hold, 0 do not hold" in ledger(out) and "Not yet" not in ledger(out)


def test_the_ledger_says_how_long_its_runs_took(tmp_path: Path) -> None:
    out = tmp_path / "results"
    write_claim(out, 2, runs=["ibc-0a-0", "ibc-0a-1"])
    write_claim(out, 3, runs=["ibc-0a-1", "mas-0b-0"])  # one is shared, and counts once
    assert "hours" not in ledger(out)
    (out / "runs").mkdir()
    for key, hours in {"ibc-0a-0": 4, "ibc-0a-1": 2, "mas-0b-0": 1, "of-no-claim-0": 9}.items():
        (out / "runs" / f"{key}.json").write_text(json.dumps({"seconds": 3600 * hours}))
    assert "The 3 runs took 7 hours of a core" in ledger(out) and "be 5 hours, or 2.5 on two cores." in ledger(out)
    assert "The 3 runs took 7 hours" in write_page(out, tmp_path / "page.html").read_text()


def test_the_page_is_one_file(tmp_path: Path) -> None:
    out = tmp_path / "results"
    write_claim(out, 2)
    write_claim(out, 10, verdict="does not hold")
    page = write_page(out, tmp_path / "deep" / "page.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sum(source.startswith("data:image/png;base64,") for source in sources) == 2
    assert all(source.startswith(("data:", "#")) for source in sources)
    assert all(f'id="{source[1:]}"' in page for source in sources if source.startswith("#"))
    assert "H(y|x) &amp; &lt;b&gt;." in page and "<code>ibc</code>" in page
    assert "--ink:" in page and "max-width: 1176px" in page  # the style of the run report
    assert page.count("does not hold") >= 2 and "smoke scale" not in page
    assert write_page(out, tmp_path / "again.html").read_text() == page
    (out / "02-slug-2.png").unlink()
    with pytest.raises(FileNotFoundError, match="figure of claim 2"):
        write_page(out, tmp_path / "again.html")


def test_prose() -> None:
    assert prose("95 % of `a<b`") == "95\u00a0% of <code>a&lt;b</code>"
    assert prose("a lone ` stays") == "a lone ` stays"


def test_damaged_records_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no results"):
        ledger(tmp_path)
    write_claim(tmp_path, 2)
    record = json.loads((tmp_path / "02-slug-2.json").read_text())
    del record["rule"]
    (tmp_path / "02-slug-2.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"02-slug-2\.json: rule is missing"):
        ledger(tmp_path)
    (tmp_path / "02-slug-2.json").write_text("{")
    with pytest.raises(ValueError, match=r"02-slug-2\.json: damaged"):
        ledger(tmp_path)


def test_studies_stand_beside_the_claims_that_they_are_about(tmp_path: Path) -> None:
    write_claim(tmp_path, 2)
    assert "Further evidence" not in ledger(tmp_path)
    (tmp_path / "studies").mkdir()
    rows = [
        {"what": "a − b (success)", "decides": True, "seeds": 5, "difference": [0.1, 0.05, 0.15], "verdict": "holds"},
        {"what": "c − b (success)", "decides": False, "seeds": 2, "difference": [0.1, -0.5, 0.7], "verdict": None},
    ]
    arms = {"a": {"seeds": [0, 1], "numbers": {"success": [0.5, 0.7]}}, "b": {"seeds": [0], "numbers": {}}}
    study = {"title": "A study", "claims": [2], "rule": "Its rule.", "seeds_needed": 5, "shown": ["success"]}
    study |= {"arms": arms, "comparisons": rows}
    (tmp_path / "studies" / "one.json").write_text(json.dumps(study))
    text = ledger(tmp_path)
    decided = "a − b (success): +0.100 (+0.050 to +0.150), 5 seeds: **holds** (decides)."
    assert f"- **Further evidence:** [A study](#a-study): {decided}\n" in text
    assert "\n### A study\n\nClaim 2. Its rule.\n" in text
    assert "| `a` | 2 | 0.600 (-0.671 to 1.871) |" in text and "| `b` | 1 | – |" in text
    assert "- c − b (success): +0.100 (-0.500 to +0.700): 2 of 5 seeds, no verdict." in text


def test_the_records_that_a_reproduction_resumes_from_are_committed() -> None:
    tracked = subprocess.run(["git", "ls-files", "reproduction/results/runs"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    committed = {Path(line).stem for line in tracked.stdout.splitlines()}
    for path in RESULTS.glob("[0-9][0-9]-*.json"):
        assert set(json.loads(path.read_text())["runs"]) <= committed, path.name


def test_every_record_says_what_was_run() -> None:
    """A record stands for itself: its settings are there, and they are those of the task with its key."""
    tasks = {task.key: task for claim in CLAIMS for task in claim.tasks(PAPER, range(10))}
    tasks |= {task.key: task for task in anchoring.tasks(PAPER, range(10))}
    for path in sorted((ROOT / "reproduction/results/runs").glob("*.json")):
        record = json.loads(path.read_text())
        assert record["key"] == path.stem and record["settings"], path.name
        assert running.differing(running.today(record["settings"]), tasks[path.stem].settings) == "", path.name


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.slug)
def test_the_committed_verdict_is_that_of_the_committed_runs(claim: Claim) -> None:
    """By the code as it is: who changes a rule or a text judges again, which trains nothing."""
    path = RESULTS / f"{claim.number:02d}-{claim.slug}.json"
    if not path.is_file():
        pytest.skip("not measured yet")
    committed = json.loads(path.read_text())
    tasks = claim.tasks(PAPER, committed["seeds"])
    _, record = judge_records(claim, tasks, PAPER, RESULTS)
    told = set(record) - {"commit", "measurements"}
    assert {part: committed[part] for part in told} == {part: record[part] for part in told}
    assert committed["measurements"].keys() == record["measurements"].keys()


def test_the_committed_ledger_is_that_of_the_committed_records() -> None:
    if not RESULTS.is_dir():
        pytest.skip(f"{RESULTS} is not there yet: no claim was measured at the paper's scale")
    assert RESULTS.with_suffix(".md").read_text() == ledger(RESULTS)


# ---------------------------------------------------------------------------------------------- the command


def test_the_command_measures_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "engine_of", lambda *_: Inline())
    monkeypatch.chdir(tmp_path)
    main(["reproduce", "integral", "1", "--scale", "smoke", "--seeds", "2", "--workers", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith(" 1 integral  ") and lines[1] == "results.md"
    verdict = json.loads(Path("results/01-integral.json").read_text())["verdict"]
    assert verdict in lines[0] and f"**{verdict}**" in Path("results.md").read_text()
    main(["reproduce", "--report"])
    assert capsys.readouterr().out == "results.html\n"
    assert "data:image/png;base64,iVBOR" in Path("results.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "there is no claim 'nonsense'; there are 1 integral"),
        (["--report"], "there are no results in results"),
        (["integral", "--report"], "name none with --report"),
        (["integral", "--seeds", "0"], "seeds must be at least 1, got 0"),
        (["integral", "--workers", "0"], "workers must be at least 1, got 0"),
        (["integral", "--out", "."], "out must be a folder with a name"),
    ],
)
def test_a_users_mistake_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["reproduce", *arguments])
    printed = capsys.readouterr()
    assert caught.value.code == 2 and printed.out == ""
    assert message in printed.err and len(printed.err.splitlines()) == 1
    assert not (tmp_path / "results").exists()


def test_a_failed_task_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ReproductionError("loss is nan, at step 3")

    monkeypatch.setattr(command, "engine_of", lambda *_: Inline())
    monkeypatch.setattr(running, "run_task", fail)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["reproduce", "integral", "--scale", "smoke", "--seeds", "1"])
    printed = capsys.readouterr().err.splitlines()
    assert caught.value.code == 1
    assert (
        printed[-1].startswith("cebm: 1 failed")
        and "integral-smoke-0: ReproductionError: loss is nan, at step 3" in printed[-1]
    )
    assert sum(line.startswith("cebm:") for line in printed) == 1 and "Traceback" not in "".join(printed)
    assert "loss is nan, at step 3 (see runs/reproduce/logs)" in Path("results/failures.txt").read_text()


def test_help_is_light() -> None:
    code = (
        "import sys\nfrom cebm.cli import main\n"
        "try:\n    main(['reproduce', '--help'])\nexcept SystemExit:\n    pass\n"
        "print('imported', sorted({'torch', 'matplotlib', 'jinja2', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "imported []", done.stderr
    assert all(flag in done.stdout for flag in ("--scale", "--seeds", "--workers", "--out", "--runs", "--report"))


def test_claims_have_what_the_ledger_needs() -> None:
    assert [claim.number for claim in CLAIMS] == sorted({claim.number for claim in CLAIMS})
    assert len({claim.slug for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert all((claim.statement, claim.section, claim.protocol, claim.metric)), claim.slug
        assert "olds where" in claim.rule and "inconclusive" in claim.rule, claim.slug
