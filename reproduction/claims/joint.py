"""Claim 8: a joint energy with a replay buffer overfits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cebm.recipes import find_trial
from cebm.tasks import ParticleTask
from reproduction.intervals import Interval, Verdict, all_parts, decide, minus
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.prose import joint as prose
from reproduction.trainings import Scale, bare, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRIALS = ("joint-replay", "ibc")
FREE = "joint-replay-free"
"""`joint-replay` without the squared energies in its loss."""
EARLY = "joint-replay, five epochs"
"""`joint-replay`, stopped after five epochs."""
FITS = 0.1
"""The training data count as fitted if the mean distance to the expert's action is below this."""


def five_epochs(scale: Scale) -> int:
    """Training steps of five epochs, and at most the steps of the scale."""
    pairs = scale.demonstrations * ParticleTask().steps
    return min(scale.steps, 5 * max(1, pairs // scale.trial(find_trial("joint-replay")).optimiser.batch_size))


class Joint(Claim):
    number = 8
    slug = "joint"
    section = "Sec. IV"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        tasks: list[Task] = []
        for seed in seeds:
            tasks += [training(trial, scale, seed) for trial in TRIALS]
            tasks.append(training("joint-replay", scale, seed, EARLY, steps=five_epochs(scale)))
        free = bare("joint-replay")
        return tasks + [training(free, scale, seed, FREE) for seed in seeds[:3]]

    def judge(self, results: Results) -> Finding:
        early = results.values(EARLY, "curve", -1, "train_action_error")
        trials = (*TRIALS, FREE)
        success = {trial: results.values(trial, "last", "success") for trial in trials}
        errors = {
            trial: {
                part: results.values(trial, "curve", -1, f"{part}_action_error") for part in ("train", "validation")
            }
            for trial in trials
        }
        gaps = {trial: minus(errors[trial]["validation"], errors[trial]["train"]) for trial in trials}
        left = Interval.of([FITS - error for error in early])
        gap = Interval.of_difference(gaps["joint-replay"], gaps["ibc"])
        lost = Interval.of_difference(success["ibc"], success["joint-replay"])
        parts: dict[str, Verdict] = {"fits": decide(left), "overfits": decide(gap), "generalises poorly": decide(lost)}
        seeds = len(success[FREE])  # `FREE` was trained on the first seeds only
        kept = Interval.of_difference(success["joint-replay"][:seeds], success[FREE])
        unfit = Interval.of_difference(errors[FREE]["train"], errors["joint-replay"]["train"][:seeds])
        along = Interval.of_difference(results.plateau("ibc"), results.plateau("joint-replay"))
        runs = {
            trial: prose.Run(*map(Interval.of, (success[trial], errors[trial]["train"], errors[trial]["validation"])))
            for trial in trials
        }
        facts = prose.Facts(
            joint=runs["joint-replay"],
            ibc=runs["ibc"],
            free=runs[FREE],
            early=Interval.of(early),
            gap=gap,
            along=along,
            better_along=decide(along),
            kept=kept,
            kept_more=decide(kept),
            seeds=seeds,
            parts=parts,
            energy_gaps=_energy_gaps(results) if decide(unfit) == "holds" else None,
        )
        return Finding(
            all_parts(parts.values()),
            prose.measured(facts),
            {
                "early": early,
                "five epochs": results.by_label[EARLY][0]["steps"],
                "success": success,
                "errors": errors,
                "left to fit": left.to_json(),
                "gap": gap.to_json(),
                "lost success": lost.to_json(),
                "lost success, second half": along.to_json(),
                "kept by squared energies": kept.to_json(),
                "training error without them": unfit.to_json(),
                "parts": parts,
                "curves": results.curves(trials),
                "error curves": {
                    f"{trial}, {name}": curves
                    for part, name in (("train", "training"), ("validation", "validation"))
                    for trial, curves in results.curves(trials, f"{part}_action_error").items()
                },
            },
            prose.comment(facts),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import curves

        left, right = figure.subplots(1, 2)
        curves(left, finding.numbers["error curves"], "action error")
        early = finding.numbers["early"]
        left.plot([finding.numbers["five epochs"]] * len(early), early, "k.", label="after five epochs, training")
        left.legend(frameon=False, fontsize=7)
        curves(right, finding.numbers["curves"], "success")


def _energy_gaps(results: Results) -> tuple[Interval, Interval]:
    """Energies of the negatives minus those of the demonstrations at the end of training, without and with the squared
    energies in the loss."""
    free, joint = (Interval.of(results.at_the_end(trial, "energy_gap")) for trial in (FREE, "joint-replay"))
    return free, joint
