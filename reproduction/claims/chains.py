"""Claim 5: many short chains give better negatives than one long chain."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cebm.negatives import ShortChains
from cebm.recipes import find_trial, vary
from reproduction.intervals import Interval, decide
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.prose import chains as prose
from reproduction.trainings import Scale, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRIALS = ("long-chain", "short-chains", "correct", "ibc")


class Chains(Claim):
    number = 5
    slug = "chains"
    section = "Sec. III and V"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        long = find_trial("long-chain")
        short = vary(long, **{"objective.source": ShortChains(long.objective.source.sampler)})
        tasks: list[Task] = [training(short, scale, seed, "short-chains") for seed in seeds]
        return tasks + [training(trial, scale, seed) for seed in seeds for trial in TRIALS if trial != "short-chains"]

    def judge(self, results: Results) -> Finding:
        success = {trial: results.plateau(trial) for trial in TRIALS}
        last = {trial: results.values(trial, "last", "success") for trial in TRIALS}
        away = {trial: results.distances(trial) for trial in TRIALS}
        over = {trial: Interval.of_difference(success[trial], success["long-chain"]) for trial in TRIALS[1:]}
        verdict = decide(over["short-chains"])
        at_the_end = Interval.of_difference(last["short-chains"], last["long-chain"])
        facts = prose.Facts(
            success={trial: Interval.of(values) for trial, values in success.items()},
            over=over,
            at_the_end=at_the_end,
            end=decide(at_the_end),
            distance={trial: Interval.of(values) for trial, values in away.items()},
            nearer=decide(Interval.of_difference(away["long-chain"], away["short-chains"])),
            ibc_better=decide(over["ibc"]),
        )
        return Finding(
            verdict,
            prose.measured(facts),
            {
                "success": success,
                "last": last,
                "negative_distance": away,
                "difference": {trial: difference.to_json() for trial, difference in over.items()},
                "curves": results.curves(TRIALS),
            },
            prose.comment(facts, verdict),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import curves

        curves(figure.subplots(), finding.numbers["curves"], "success")
