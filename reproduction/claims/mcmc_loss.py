"""Claim 6: the MCMC loss is no improvement over InfoNCE. Its energies are anchored; the bare loss stands beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cebm.objectives import GradientPenalty
from reproduction.anchoring import SEEDS, Reading, planned, tasks_of
from reproduction.intervals import Interval, Verdict
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.prose import mcmc_loss as prose
from reproduction.trainings import Result, Scale, bare, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTICED = 0.1
"""The smallest gain in success that two single runs can show: 1.96·√2 standard errors of 200 episodes at 50 %."""

PENALISED = "mcmc-loss-penalty"
"""`mcmc-loss` with a gradient penalty, which bounds the slope of its energy."""
TRIALS = ("ibc", "mcmc-loss", PENALISED)
ANCHORED = "mcmc-loss-anchored"
"""The arms whose chosen weight decides: `mcmc-loss` with an anchor on the energies of the data."""
BOTH = "mcmc-loss-both"
"""The arms with an anchor on the energies of data and negatives, as Du and Mordatch (2019) have it."""


def no_better(difference: Interval) -> Verdict:
    """The rule for "no improvement", by the interval of a difference in success. If the whole interval lies
    above 0, there is an improvement and the rule does not hold. Otherwise it holds if the interval ends below
    `NOTICED`, and is inconclusive if it does not."""
    if difference.low > 0:
        return "does not hold"
    return "holds" if difference.high < NOTICED else "inconclusive"


class McmcLoss(Claim):
    number = 6
    slug = "mcmc-loss"
    section = "Sec. III"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        penalised = replace(bare("mcmc-loss"), penalties=(GradientPenalty(1.0, margin=10.0),))
        tasks: list[Task] = [training("ibc", scale, seed) for seed in seeds]
        tasks += [training(bare("mcmc-loss"), scale, seed, "mcmc-loss") for seed in seeds]
        return tasks + [training(penalised, scale, seed, PENALISED) for seed in seeds[:3]]

    def further(self, scale: Scale, seeds: Sequence[int], known: Mapping[str, Result]) -> Sequence[Task]:
        return planned(ANCHORED, scale, seeds, known)

    def beside(self, scale: Scale, seeds: Sequence[int]) -> Sequence[Task]:
        return tasks_of((ANCHORED, BOTH), scale, seeds)

    def judge(self, results: Results) -> Finding:
        anchored = Reading.of(ANCHORED, results)
        mine, theirs = anchored.against("ibc", results)
        decisive = Interval.of_difference(mine, theirs) if mine else None
        verdict: Verdict = no_better(decisive) if decisive is not None and len(mine) >= SEEDS else "inconclusive"
        success = {trial: results.plateau(trial) for trial in TRIALS}
        last = {trial: results.values(trial, "last", "success") for trial in TRIALS}
        gap = {trial: results.at_the_end(trial, "energy_gap") for trial in TRIALS}
        clipped = {trial: results.at_the_end(trial, "clipped") for trial in TRIALS}
        difference = Interval.of_difference(success["mcmc-loss"], success["ibc"])
        runs = {
            trial: prose.Run(Interval.of(success[trial]), Interval.of(gap[trial]), clipped[trial]) for trial in TRIALS
        }
        facts = prose.Facts(
            mcmc_loss=runs["mcmc-loss"],
            ibc=runs["ibc"],
            penalised=runs[PENALISED],
            difference=difference,
            last_difference=Interval.of_difference(last["mcmc-loss"], last["ibc"]),
            fails=difference.high < -NOTICED,
            anchored=anchored,
            both=Reading.of(BOTH, results),
            decisive=decisive,
            seeds=len(mine),
            theirs=Interval.of(theirs) if theirs else None,
        )
        return Finding(
            verdict,
            prose.measured(facts),
            {
                "anchored": anchored.to_json(),
                "anchored, both": facts.both.to_json(),
                "decisive": decisive.to_json() if decisive is not None else None,
                "success": success,
                "last": last,
                "difference": difference.to_json(),
                "energy_gap": gap,
                "clipped": clipped,
                "curves": results.curves(TRIALS),
                "gaps": results.curves(TRIALS, "energy_gap", of="training"),
            },
            prose.comment(facts, verdict),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import success_and_gaps

        success_and_gaps(figure, finding.numbers)
