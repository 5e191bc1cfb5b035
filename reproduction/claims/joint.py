"""Claim 8: a joint energy with a replay buffer overfits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cebm.envs.particle import ParticleTask
from cebm.trials import find_trial
from reproduction.intervals import Interval, Verdict, all_parts, decide, minus
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.trainings import Scale, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRIALS = ("joint-replay", "ibc")
FREE = "joint-replay-free"
EARLY = "joint-replay, five epochs"
FITS = 0.1
"""The mean distance to the expert's action that counts as fitted."""


def five_epochs(scale: Scale) -> int:
    """In training steps, but no more than the scale has."""
    pairs = scale.demonstrations * ParticleTask().steps
    return min(scale.steps, 5 * max(1, pairs // scale.trial(find_trial("joint-replay")).batch_size))


class Joint(Claim):
    number = 8
    slug = "joint"
    section = "Sec. IV"
    statement = (
        "An energy of the joint p(x, y), trained with a replay buffer, fits its training data within a few epochs and "
        "generalises poorly."
    )
    protocol = (
        "`joint-replay` and `ibc`, trained on the same demonstrations of the 2-D particle task, for the same number of "
        "steps, act with the same search; a second run of `joint-replay` ends after five epochs. Action errors are "
        "taken at 256 pairs each of the training demonstrations and of validation episodes. Added when `joint-replay` "
        "had been seen to generalise, to look for the reason, with three seeds, and deciding nothing: "
        f"`{FREE}`, the same without the squared energies in the loss, of which the paper does not speak there."
    )
    metric = (
        "Action error: the mean distance of the policy's action to the expert's in the unit square (that of always "
        "acting at its centre is 0.38). The gap is validation error minus training error at the end of training. "
        "Success is that of the last policy on held-out episodes. All per seed; differences are paired by seed."
    )
    rule = (
        "By 95 % intervals. Fits: holds where the training error after five epochs lies below 0.1, does not hold where "
        "it lies above. Overfits: holds where gap(joint-replay) − gap(ibc) lies above 0, does not hold where it lies "
        "below. Generalises poorly: the same of success(ibc) − success(joint-replay). A part is else inconclusive. The "
        "claim holds where all three parts do, does not hold where one does not, else it is inconclusive."
    )

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        tasks: list[Task] = []
        for seed in seeds:
            tasks += [training(trial, scale, seed) for trial in TRIALS]
            tasks.append(training("joint-replay", scale, seed, EARLY, steps=five_epochs(scale)))
        free = replace(find_trial("joint-replay"), positive_l2=0.0)
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
        seeds = len(success[FREE])  # the first ones
        kept = Interval.of_difference(success["joint-replay"][:seeds], success[FREE])
        unfit = Interval.of_difference(errors[FREE]["train"], errors["joint-replay"]["train"][:seeds])
        joint, ibc, free = (
            " and ".join(
                f"{Interval.of(errors[trial][part]).number()} in {name}"
                for part, name in (("train", "training"), ("validation", "validation"))
            )
            for trial in trials
        )
        found = ", ".join(f"{part}: {verdict}" for part, verdict in parts.items())
        poorly, overfits = parts["generalises poorly"], parts["overfits"]
        along = Interval.of_difference(results.plateau("ibc"), results.plateau("joint-replay"))
        return Finding(
            all_parts(parts.values()),
            f"Training error of `joint-replay` after five epochs {Interval.of(early).number()}; at the end its errors "
            f"are {joint}, those of `ibc` {ibc}, and its gap is larger by {gap.number()}. Success "
            f"{Interval.of(success['joint-replay']).percent()} and {Interval.of(success['ibc']).percent()} ({found}); "
            f"over the second half of training `ibc` has {along.points()} more of it, on validation episodes. "
            f"`{FREE}` has errors of {free}, and a success of {Interval.of(success[FREE]).percent()}, {kept.points()} "
            f"from there to `joint-replay` on the same {seeds} seeds.",
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
            _COMMENTS[parts["fits"]]
            + (_WORSE[overfits] if poorly == "holds" else _ENDINGS[poorly])
            + (_ALONG[decide(along)] if poorly == "inconclusive" else "")
            + _FREE[decide(kept)]
            + (_run_away(results) if decide(unfit) == "holds" else ""),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import curves

        left, right = figure.subplots(1, 2)
        curves(left, finding.numbers["error curves"], "action error")
        early = finding.numbers["early"]
        left.plot([finding.numbers["five epochs"]] * len(early), early, "k.", label="after five epochs, training")
        left.legend(frameon=False, fontsize=7)
        curves(right, finding.numbers["curves"], "success")


def _run_away(results: Results) -> str:
    """Why it does not even fit without the squared energies: told where it is so."""
    free, joint = (Interval.of(results.at_the_end(trial, "energy_gap")) for trial in (FREE, "joint-replay"))
    return (
        " It then fits its training data worse, too. At the end its negatives' energies lie "
        f"{free.number()} above those of the demonstrations, and {joint.number()} with the squared energies: like the "
        "MCMC loss of claim 6, the loss has no minimum without them."
    )


# By the first part, whether there is anything to overfit with; and by the last.
_COMMENTS: dict[Verdict, str] = {
    "holds": "Every pair that was not demonstrated is a negative of a joint energy, unseen observations with it.",
    "does not hold": (
        "Most of the joint energy's capacity goes into telling which observations occur, and its chains move in ten "
        "dimensions in place of two: five epochs are too few to fit the actions."
    ),
    "inconclusive": (
        "Most of the joint energy's capacity goes into telling which observations occur, which acting does not need; "
        "how well it fits the actions early on differs from seed to seed."
    ),
}
_ENDINGS: dict[Verdict, str] = {
    "does not hold": " Still it acts no worse than `ibc` at unseen observations.",
    "inconclusive": " Whether it acts worse than `ibc` at the end, these seeds do not tell.",
}
# Where the end does not tell: by the second half of training, which scatters less and does not decide.
_ALONG: dict[Verdict, str] = {
    "holds": " Over the second half of training it does, which does not decide.",
    "does not hold": " Over the second half of training it acts better, which does not decide.",
    "inconclusive": "",
}
# Where it acts worse: by the middle part, whether that is overfitting.
_WORSE: dict[Verdict, str] = {
    "holds": " What an action costs at an unseen observation is hardly trained, and it acts worse than `ibc` there.",
    "does not hold": " It acts worse than `ibc`, and not by overfitting: its gap is the smaller one.",
    "inconclusive": " It acts worse than `ibc`; whether by overfitting, the gap does not tell.",
}
# What the squared energies do.
_FREE: dict[Verdict, str] = {
    "holds": " Without the squared energies in its loss it acts worse.",
    "does not hold": " Without the squared energies in its loss it acts better.",
    "inconclusive": " Whether it acts worse without the squared energies in its loss, these seeds do not tell.",
}
