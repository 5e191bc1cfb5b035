"""Claim 17: the conclusion's conjecture, that explicit functions improve implicit ones. Reads records that exist."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reproduction.intervals import Interval, Verdict
from reproduction.ledger import Claim, Computation, Finding, Results, Task
from reproduction.prose import explicit_parts as prose
from reproduction.trainings import Result, Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[2] / "docs"
NEEDED = 5
"""Seeds of a task; fewer decide nothing."""
COUNTS = 0.05
"""A gain that counts: 5 points of success, or as much of a reward between 0 and 1."""


@dataclass(frozen=True)
class Case:
    """A task on which a trained policy acted as a whole and by its explicit part alone, in the same episodes."""

    name: str
    of: str
    """'stability' or 'push-t': where its records are."""
    key: str
    """The case of the stability study, or the label of the Push-T study."""
    whole: str
    part: str
    """Names of the two ways to act, in the record."""


_STEADY = ("as-trained", "proposal-only")
CASES = (
    Case("particle, 2-D, 300 demonstrations", "stability", "steady-2d-300", *_STEADY),
    Case("particle, 2-D, 2,000 demonstrations", "stability", "steady-2d-2000", *_STEADY),
    Case("particle, 16-D", "stability", "steady-16d", *_STEADY),
    Case("particle, 32-D", "stability", "steady-32d", *_STEADY),
    Case("particle, random order", "stability", "steady-random-order", *_STEADY),
    Case("Push-T, `steady`", "push-t", "steady", "as trained", "without f"),
    Case("Push-T, `annealed`", "push-t", "annealed", "as trained", "one draw"),
)


class ExplicitParts(Claim):
    number = 17
    slug = "explicit-parts"
    section = "Conclusion"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        return [Computation(self, seed, scale, cost=0.1) for seed in seeds]

    def compute(self, scale: Scale, seed: int) -> Result:
        return collected(seed, DOCS)

    def judge(self, results: Results) -> Finding:
        by_case: dict[str, dict[str, list[float]]] = {}
        for run in results.by_label["computation"]:
            for name, both in run["cases"].items():
                rows = by_case.setdefault(name, {"whole": [], "part": []})
                for way, value in both.items():
                    rows[way].append(value)
        gains = {name: Interval.of_difference(rows["whole"], rows["part"]) for name, rows in by_case.items()}
        seeds = {case.name: len(by_case.get(case.name, {"whole": []})["whole"]) for case in CASES}
        enough = {name: gain for name, gain in gains.items() if seeds[name] >= NEEDED}
        verdict = conclusion(enough, len(CASES))
        facts = prose.Facts(
            rows={name: (Interval.of(by_case[name]["whole"]), gain, seeds[name]) for name, gain in gains.items()},
            needed=NEEDED,
            lacking=[name for name, count in seeds.items() if count < NEEDED],
        )
        numbers = {
            "values": by_case,
            "gains": {name: gain.to_json() for name, gain in gains.items()},
            "seeds": seeds,
        }
        return Finding(verdict, prose.measured(facts), numbers, prose.comment(facts, verdict))

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import COLOURS, bar

        figure.set_size_inches(8.6, 3.8)
        axes = figure.subplots()
        values: Mapping[str, Any] = finding.numbers["values"]
        for i, rows in enumerate(values.values()):
            for j, way in enumerate(("whole", "part")):
                bar(axes, i + 0.4 * j - 0.2, rows[way], COLOURS[j], 0.36)
        axes.set_xticks(range(len(values)), [name.replace(", ", ",\n") for name in values], fontsize=7)
        axes.set_ylabel("success; reward of Push-T")
        axes.set_title("blue: the whole policy, orange: its explicit part alone", fontsize=9)


def collected(seed: int, docs: Path) -> Result:
    """What the records in a folder of documents tell of a seed, by the name of a case."""
    push_t = docs / "tasks" / "push-t.json"
    runs = json.loads(push_t.read_bytes())["records"] if push_t.exists() else []
    found: dict[str, dict[str, float]] = {}
    for case in CASES:
        if case.of == "stability":
            path = docs / "stability" / f"{case.key}-{seed}.json"
            ways = json.loads(path.read_bytes())["last"] if path.exists() else {}
            told = {way: float(numbers["success"]) for way, numbers in ways.items()}
        else:
            rows = [run["result"]["ways"] for run in runs if run["label"] == case.key and run["seed"] == seed]
            told = {way: float(np.mean(numbers["reward"])) for way, numbers in rows[0].items()} if rows else {}
        if case.whole in told and case.part in told:
            found[case.name] = {"whole": told[case.whole], "part": told[case.part]}
    return {"cases": found}


def conclusion(gains: Mapping[str, Interval], cases: int) -> Verdict:
    """The rule, by the gains on the tasks that have enough seeds."""
    better = any(gain.low > 0 for gain in gains.values())
    worse = any(gain.high < 0 for gain in gains.values())
    if len(gains) < cases:
        return "inconclusive"
    if better and not worse:
        return "holds"
    return "does not hold" if all(gain.high < COUNTS for gain in gains.values()) else "inconclusive"
