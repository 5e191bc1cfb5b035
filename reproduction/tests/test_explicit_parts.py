"""Claim 17: what is read of records, and the rule."""

import json
from pathlib import Path

import pytest

from reproduction.claims import explicit_parts
from reproduction.claims.explicit_parts import CASES, DOCS, ExplicitParts, collected, conclusion
from reproduction.intervals import Interval, Verdict
from reproduction.ledger import Results
from reproduction.running import draw
from reproduction.trainings import PAPER


def test_committed_records_are_read_as_they_are() -> None:
    found = collected(0, DOCS)["cases"]
    path = DOCS / "stability" / "steady-2d-300-0.json"
    last = json.loads(path.read_text())["last"]
    assert found["particle, 2-D, 300 demonstrations"] == {
        "whole": last["as-trained"]["success"],
        "part": last["proposal-only"]["success"],
    }
    table = json.loads((DOCS / "tasks" / "push-t.json").read_text())["table"]
    if table["steady, as trained"]["seeds"] == [0]:
        assert found["Push-T, `steady`"]["whole"] == pytest.approx(table["steady, as trained"]["reward"][0])
        assert found["Push-T, `steady`"]["part"] == pytest.approx(table["steady, without f"]["reward"][0])


def test_what_has_no_record_is_left_out(tmp_path: Path) -> None:
    assert collected(0, tmp_path) == {"cases": {}}
    assert collected(77, DOCS)["cases"] == {}


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ([(0.1, 0.05, 0.15)] + [(0.0, -0.01, 0.01)] * 6, "holds"),
        ([(0.1, 0.05, 0.15), (-0.1, -0.15, -0.05)] + [(0.0, -0.01, 0.01)] * 5, "inconclusive"),
        ([(0.0, -0.01, 0.01)] * 7, "does not hold"),
        ([(0.0, -0.1, 0.1)] + [(0.0, -0.01, 0.01)] * 6, "inconclusive"),
        ([(0.1, 0.05, 0.15)] * 6, "inconclusive"),  # a task lacks its seeds
    ],
)
def test_the_rule(gains: list[tuple[float, float, float]], verdict: Verdict) -> None:
    assert conclusion({str(i): Interval(*gain) for i, gain in enumerate(gains)}, 7) == verdict


def test_a_task_with_few_seeds_leaves_it_open_and_is_named(tmp_path: Path) -> None:
    claim = ExplicitParts()
    tasks = claim.tasks(PAPER, range(5))
    both = {"whole": 0.9, "part": 0.7}

    def finding(few: str | None) -> tuple[str, str, str]:
        records = {
            task.key: {
                "cases": {
                    case.name: {**both, "whole": 0.9 + 0.01 * task.seed}
                    for case in CASES
                    if case.name != few or task.seed == 0
                }
            }
            for task in tasks
        }
        found = claim.judge(Results.of(tasks, records))
        draw(claim, found, tmp_path)
        return found.verdict, found.measured, found.comment

    assert finding(None)[0] == "holds"
    verdict, measured, comment = finding("Push-T, `annealed`")
    assert verdict == "inconclusive" and "Push-T, `annealed` +0.200 at 0.900 (one seed, no verdict)" in measured
    assert comment.endswith("Fewer than 5 seeds: Push-T, `annealed`.")
    assert (tmp_path / "17-explicit-parts.png").stat().st_size > 5000
    assert claim.most_seeds == explicit_parts.NEEDED
