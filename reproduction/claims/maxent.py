"""Claim 7: maximum conditional entropy makes the correct step usable, and no better than IBC's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from cebm.objectives import EntropyRegulariser, GradientPenalty
from cebm.recipes import Trial, find_trial
from reproduction.anchoring import SEEDS, Reading, planned, tasks_of
from reproduction.claims.mcmc_loss import no_better
from reproduction.claims.noise import label, with_noise
from reproduction.intervals import Interval, Verdict, all_parts, decide
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.prose import maxent as prose
from reproduction.trainings import Result, Scale, bare, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LITTLE = label(0.01)
"""`ibc` with little noise; the paper's typical value is σ = 0.01."""
PENALISED = "conditional-maxent-penalty"
CONTRASTIVE = "info-nce-maxent"
TRIALS = ("conditional-maxent", "correct", "ibc", LITTLE)
BESIDE = (PENALISED, CONTRASTIVE)
ANCHORED = "conditional-maxent-anchored"
"""The arms whose chosen weight decides: `conditional-maxent` with an anchor on the energies of the data."""
READINGS = ("conditional-maxent-both", "info-nce-maxent")
"""Arms beside them: both energies anchored; InfoNCE with the regulariser, by the weight of the regulariser."""
USABLE = 0.5
"""A policy is usable if it has at least this share of the success of `ibc`."""


class MaxEnt(Claim):
    number = 7
    slug = "maxent"
    section = "Sec. IV"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        tasks: list[Task] = [training(trial, scale, seed) for seed in seeds for trial in ("correct", "ibc")]
        tasks += [training(bare("conditional-maxent"), scale, seed, "conditional-maxent") for seed in seeds]
        tasks += [with_noise(0.01, scale, seed) for seed in seeds]
        return tasks + [training(trial, scale, seed, name) for seed in seeds[:3] for name, trial in beside().items()]

    def further(self, scale: Scale, seeds: Sequence[int], known: Mapping[str, Result]) -> Sequence[Task]:
        return planned(ANCHORED, scale, seeds, known)

    def beside(self, scale: Scale, seeds: Sequence[int]) -> Sequence[Task]:
        return tasks_of((ANCHORED, *READINGS), scale, seeds)

    def judge(self, results: Results) -> Finding:
        anchored = Reading.of(ANCHORED, results)
        trials = TRIALS + BESIDE
        success = {trial: results.plateau(trial) for trial in trials}
        last = {trial: results.values(trial, "last", "success") for trial in trials}
        away = {trial: Interval.of(results.distances(trial)) for trial in trials}
        gap = {trial: Interval.of(results.at_the_end(trial, "energy_gap")) for trial in trials}
        sharp = {trial: Interval.of(results.values(trial, "conditional_entropy")) for trial in trials}
        steep = {trial: Interval.of(results.at_the_end(trial, "gradient_norm_last")) for trial in trials}
        known = {trial: Interval.of(results.values(trial, "curve", -1, "mi_bound")) for trial in trials}
        maxent, correct, ibc, little = (success[trial] for trial in TRIALS)
        over_half = Interval.of_difference(maxent, [USABLE * value for value in ibc])
        over_correct = Interval.of_difference(maxent, correct)
        over_little = Interval.of_difference(maxent, little)
        bare_parts: dict[str, Verdict] = {"usable": decide(over_half), "not better": no_better(over_little)}
        mine, theirs = anchored.against("ibc", results)
        half = Interval.of_difference(mine, [USABLE * value for value in theirs]) if mine else None
        beyond = Interval.of_difference(*anchored.against(LITTLE, results)) if mine else None
        parts: dict[str, Verdict] = {"usable": "inconclusive", "not better": "inconclusive"}
        if half is not None and beyond is not None and len(mine) >= SEEDS:
            parts = {"usable": decide(half), "not better": no_better(beyond)}
        runs = {
            trial: prose.Run(
                name=trial,
                success=Interval.of(success[trial]),
                distance=away[trial],
                gap=gap[trial],
                entropy=sharp[trial],
                norm=steep[trial],
                landscape=_landscape(sharp, steep, known, trial),
            )
            for trial in trials
        }
        facts = prose.Facts(
            maxent=runs["conditional-maxent"],
            correct=runs["correct"],
            ibc=runs["ibc"],
            little=runs[LITTLE],
            penalised=runs[PENALISED],
            contrastive=runs[CONTRASTIVE],
            over_half=over_half,
            over_correct=over_correct,
            over_little=over_little,
            parts=parts,
            bare_parts=bare_parts,
            anchored=anchored,
            readings=[Reading.of(family, results) for family in READINGS],
            anchored_over_half=half,
            anchored_over_little=beyond,
            anchored_seeds=len(mine),
            runs_away=gap["conditional-maxent"].low > gap["correct"].high,
            usable_without=decide(Interval.of_difference(correct, [USABLE * value for value in ibc])) == "holds",
        )
        return Finding(
            all_parts(parts.values()),
            prose.measured(facts),
            {
                "success": success,
                "last": last,
                "negative_distance": {trial: interval.to_json() for trial, interval in away.items()},
                "energy_gap": {trial: interval.to_json() for trial, interval in gap.items()},
                "conditional_entropy": {trial: interval.to_json() for trial, interval in sharp.items()},
                "gradient_norm": {trial: interval.to_json() for trial, interval in steep.items()},
                "mi_bound": {trial: interval.to_json() for trial, interval in known.items()},
                "over half of ibc": over_half.to_json(),
                "over correct": over_correct.to_json(),
                "over little noise": over_little.to_json(),
                "parts": parts,
                "parts without an anchor": bare_parts,
                "anchored": {each.family: each.to_json() for each in (anchored, *facts.readings)},
                "anchored over half of ibc": half.to_json() if half is not None else None,
                "anchored over little noise": beyond.to_json() if beyond is not None else None,
                "curves": results.curves(trials),
                "gaps": results.curves(trials, "energy_gap", of="training"),
            },
            prose.comment(facts),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import success_and_gaps

        figure.set_size_inches(9.0, 4.2)
        success_and_gaps(figure, finding.numbers)


def beside() -> dict[str, Trial]:
    """The trials that were added to look for the reason of the failure, by label."""
    return {
        PENALISED: replace(bare("conditional-maxent"), penalties=(GradientPenalty(1.0, margin=10.0),)),
        CONTRASTIVE: replace(find_trial("correct"), penalties=(EntropyRegulariser(1.0),)),
    }


def _landscape(
    sharp: dict[str, Interval], steep: dict[str, Interval], known: dict[str, Interval], trial: str
) -> Literal["wrong", "flatter", "similar"]:
    """What an energy looks like beside that of `correct`: by entropy H(y|x), norm of the gradient, and the bound on the
    information of held-out pairs."""
    if known[trial].high < 0:
        return "wrong"
    if sharp[trial].low > sharp["correct"].high and steep[trial].high < steep["correct"].low:
        return "flatter"
    return "similar"
