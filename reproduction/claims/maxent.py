"""Claim 7: maximum conditional entropy makes the correct step usable, and no better than IBC's."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cebm.trials import Trial, find_trial
from reproduction.claims.mcmc_loss import no_better
from reproduction.claims.noise import label, with_noise
from reproduction.intervals import Interval, Verdict, all_parts, decide
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.prose.shared import PLATEAU
from reproduction.trainings import Scale, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LITTLE = label(0.01)
"""`ibc` with little noise, as the paper means it: typically 0.01."""
PENALISED = "conditional-maxent-penalty"
CONTRASTIVE = "info-nce-maxent"
TRIALS = ("conditional-maxent", "correct", "ibc", LITTLE)
BESIDE = (PENALISED, CONTRASTIVE)
USABLE = 0.5
"""Of the success of `ibc`."""


class MaxEnt(Claim):
    number = 7
    slug = "maxent"
    section = "Sec. IV"
    statement = (
        "With the maximum-entropy regulariser on p(y|x), chains of the correct Langevin step give a usable policy, "
        "but not a better one than IBC's chains with little noise."
    )
    protocol = (
        "`conditional-maxent` trains with the maximum-entropy loss of appendix A and negatives of the correct step. "
        "`ibc` has InfoNCE and IBC's step with σ = 0.1, and is trained with σ = 0.01 too, the paper's little noise. "
        "`correct`, with InfoNCE and the correct step, is reported beside them. All are trained on the same "
        "demonstrations of the 2-D particle task, for the same number of steps, and act with the same search. Added "
        "when two runs of `conditional-maxent` had been seen to fail, to look for the reason, with three seeds each, "
        f"and deciding nothing: `{PENALISED}`, the same with IBC's gradient penalty (weight 1, margin 10); and "
        f"`{CONTRASTIVE}`, `correct` with the regulariser alone added to InfoNCE, another reading of the section."
    )
    metric = (
        f"{PLATEAU} Differences are paired by seed. Usable is at "
        "least half the success of `ibc`. The last policy on held-out episodes is reported beside it."
    )
    rule = (
        "By 95 % intervals. Usable: holds where success(conditional-maxent) − ½ success(ibc) lies above 0, does not "
        "hold where it lies below, else inconclusive. Not better: does not hold where success(conditional-maxent) − "
        "success(ibc with σ = 0.01) lies above 0, holds where it does not and its upper end is below 10 points, else "
        "inconclusive. The claim holds where both do, does not hold where one does not, else it is inconclusive. The "
        "difference to `correct` is reported and decides nothing, as the loss differs too."
    )

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        tasks: list[Task] = [training(trial, scale, seed) for seed in seeds for trial in TRIALS if trial != LITTLE]
        tasks += [with_noise(0.01, scale, seed) for seed in seeds]
        return tasks + [training(trial, scale, seed, name) for seed in seeds[:3] for name, trial in beside().items()]

    def judge(self, results: Results) -> Finding:
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
        parts: dict[str, Verdict] = {"usable": decide(over_half), "not better": no_better(over_little)}
        found = ", ".join(f"{part}: {verdict}" for part, verdict in parts.items())
        without = decide(Interval.of_difference(correct, [USABLE * value for value in ibc]))
        return Finding(
            all_parts(parts.values()),
            f"Success {Interval.of(maxent).percent()} with `conditional-maxent`, {Interval.of(ibc).percent()} with "
            f"`ibc` and {Interval.of(little).percent()} with `ibc` and σ = 0.01: {over_half.points()} over half of "
            f"`ibc`, {over_little.points()} over `ibc` with σ = 0.01 ({found}). `correct` has "
            f"{Interval.of(correct).percent()}, {over_correct.points()} from there to `conditional-maxent`. With the "
            f"gradient penalty `conditional-maxent` has {Interval.of(success[PENALISED]).percent()}; `{CONTRASTIVE}` "
            f"has {Interval.of(success[CONTRASTIVE]).percent()}.",
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
                "curves": results.curves(trials),
                "gaps": results.curves(trials, "energy_gap", of="training"),
            },
            f"{_COMMENTS[parts['usable']]} In the second half of training the negatives of `conditional-maxent` are "
            f"{away['conditional-maxent'].number()} away from the demonstrated action, those of `correct` "
            f"{away['correct'].number()}, and at the end their energies lie {gap['conditional-maxent'].number()} "
            f"above its own, those of `correct` {gap['correct'].number()}; with the gradient penalty it is "
            f"{gap[PENALISED].number()}, with `{CONTRASTIVE}` {gap[CONTRASTIVE].number()}."
            + "".join(
                f" With `{trial}` H(y|x) is {sharp[trial].number()} nats and the gradient at the negatives has the "
                f"norm {steep[trial].number()}" + _landscape(sharp, steep, known, trial)
                for trial in ("correct", "conditional-maxent", *BESIDE)
            )
            + (_RUNS_AWAY if gap["conditional-maxent"].low > gap["correct"].high else "")
            + (" The correct step is usable without the regulariser too, with InfoNCE." if without == "holds" else ""),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import success_and_gaps

        figure.set_size_inches(9.0, 4.2)
        success_and_gaps(figure, finding.numbers)


def beside() -> dict[str, Trial]:
    """What was added to find the reason."""
    return {
        PENALISED: replace(find_trial("conditional-maxent"), gradient_penalty=1.0, gradient_margin=10.0),
        CONTRASTIVE: replace(find_trial("correct"), entropy_weight=1.0),
    }


def _landscape(sharp: dict[str, Interval], steep: dict[str, Interval], known: dict[str, Interval], trial: str) -> str:
    """What an energy looks like beside that of `correct`, where the intervals tell."""
    if known[trial].high < 0:
        return ": sharp in the wrong place, as held-out pairs tell (a bound on their information below 0)."
    if sharp[trial].low > sharp["correct"].high and steep[trial].high < steep["correct"].low:
        return ": flatter, so that a search has less to follow."
    return "."


_RUNS_AWAY = (
    " Like the MCMC loss of claim 6, which it contains, this loss has no minimum where the chains miss the "
    "demonstrated action: the variance is that of the negatives' energies, and does not see how deep its valley grows."
)
# By the first part: what the regulariser does to the policy.
_COMMENTS: dict[Verdict, str] = {
    "holds": (
        "The loss asks for a small variance of the negatives' energies, and leaves enough of the landscape for the "
        "demonstrated action to stand out."
    ),
    "does not hold": (
        "The loss asks for a small variance of the negatives' energies, and the policy is not usable. The weight of "
        f"the regulariser is that of the appendix, 1; as it falls, `{CONTRASTIVE}` becomes `correct`."
    ),
    "inconclusive": (
        "The loss asks for a small variance of the negatives' energies; what that does to the policy, these seeds do "
        "not tell."
    ),
}
