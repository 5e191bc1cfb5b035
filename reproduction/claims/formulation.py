"""Claim 3: in training, IBC's Langevin formulation beats the correct one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reproduction.intervals import Interval, decide
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.prose import formulation as prose
from reproduction.trainings import Scale, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure


TRIALS = ("ibc", "correct")


class Formulation(Claim):
    number = 3
    slug = "formulation"
    section = "Sec. III"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        return [training(trial, scale, seed) for seed in seeds for trial in TRIALS]

    def judge(self, results: Results) -> Finding:
        success = {trial: results.values(trial, "last", "success") for trial in TRIALS}
        away = {trial: results.distances(trial) for trial in TRIALS}
        difference = Interval.of_difference(success["ibc"], success["correct"])
        verdict = decide(difference)
        facts = prose.Facts(
            success={trial: Interval.of(values) for trial, values in success.items()},
            difference=difference,
            distance={trial: Interval.of(values) for trial, values in away.items()},
            further=decide(Interval.of_difference(away["correct"], away["ibc"])),
            entropy={trial: Interval.of(results.values(trial, "conditional_entropy")) for trial in TRIALS},
        )
        return Finding(
            verdict,
            prose.measured(facts),
            {
                "success": success,
                "difference": difference.to_json(),
                "curves": results.curves(TRIALS),
                "negative_distance": away,
                "conditional_entropy": {trial: interval.to_json() for trial, interval in facts.entropy.items()},
            },
            prose.comment(facts, verdict),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import bars, curves

        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[2, 1])
        curves(left, finding.numbers["curves"], "success")
        bars(right, finding.numbers["success"], "")
        left.set_title("validation episodes", fontsize=9)
        right.set_title("held out, at the end", fontsize=9)
