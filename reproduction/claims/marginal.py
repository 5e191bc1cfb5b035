"""Claim 11: the Marginal Action Sampler is on par with IBC's Langevin (the paper's learning curves)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cebm.recipes import find_trial, vary
from cebm.tasks import ParticleTask
from reproduction.intervals import Interval, Verdict, decide
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.prose import marginal as prose
from reproduction.trainings import SCALES, Scale, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPERS = ("ibc", "ibc-mas", "correct-mas", "correct-mas-maxent")
"""The paper's four trials."""
DESCRIBED = "correct-mas-maxent"
"""The sampler as Sec. V describes it: correct Langevin, maximum entropy."""
EXACT = "in-batch"
"""A trial whose negatives are exact samples of the marginal p(y): the demonstrated actions of other examples."""
LONG = f"{DESCRIBED}-long"
"""`DESCRIBED`, trained for three times as many steps."""
COUNTS = (8, 32, 64)
"""Numbers of negatives per example; the trial itself has 8."""
MARGIN = 0.1
"""Two trials are on par if their success differs by less than this."""
LEAST = 0.2
"""`ibc` needs at least this success: that two failing policies are on par says nothing."""


class Marginal(Claim):
    number = 11
    slug = "marginal"
    section = "Sec. V, Fig. 2"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        steps = length(scale)
        tasks: list[Task] = [training(trial, scale, seed, steps=steps) for seed in seeds for trial in PAPERS]
        for count in COUNTS[1:]:
            more = vary(find_trial(DESCRIBED), count=count)
            tasks += [training(more, scale, seed, f"{DESCRIBED}-{count}", steps=steps) for seed in seeds[:3]]
        for seed in seeds[:3]:
            tasks.append(training(EXACT, scale, seed, steps=steps))
            tasks.append(training(DESCRIBED, scale, seed, LONG, steps=3 * steps))
        return tasks

    def judge(self, results: Results) -> Finding:
        plateau = {label: results.plateau(label) for label in results.by_label}
        ibc = Interval.of(plateau["ibc"])
        differences = {
            trial: Interval.of_difference(plateau[trial], plateau["ibc"]) for trial in PAPERS if trial != "ibc"
        }
        verdict = on_par(differences[DESCRIBED])
        if ibc.mean < LEAST:
            verdict = "inconclusive"
        few = len(plateau[f"{DESCRIBED}-{COUNTS[-1]}"])  # all numbers of negatives have these seeds
        by_count = {count: plateau[DESCRIBED if count == 8 else f"{DESCRIBED}-{count}"][:few] for count in COUNTS}
        more = Interval.of_difference(by_count[COUNTS[-1]], by_count[COUNTS[0]])
        learnt = Interval.of_difference(by_count[COUNTS[0]], plateau[EXACT])
        exact = Interval.of_difference(plateau[EXACT], plateau["ibc"][:few])
        longer = Interval.of_difference(plateau[LONG], plateau["ibc"][:few])
        most = f"{DESCRIBED}-{COUNTS[-1]}"
        away, sharp = (
            {label: Interval.of(found(label)) for label in ("ibc", DESCRIBED, most)}
            for found in (results.distances, lambda label: results.values(label, "conditional_entropy"))
        )
        facts = prose.Facts(
            described=DESCRIBED,
            exact=EXACT,
            ibc=ibc,
            differences=differences,
            seeds=few,
            by_count={count: Interval.of(values) for count, values in by_count.items()},
            more=more,
            better_with_more=decide(more),
            exact_success=Interval.of(plateau[EXACT]),
            exact_over_ibc=exact,
            exact_on_par=on_par(exact),
            learnt_over_exact=learnt,
            long_success=Interval.of(plateau[LONG]),
            long_over_ibc=longer,
            long_on_par=on_par(longer),
            long_behind=longer.high < 0,
            distance=away,
            entropy=sharp,
            entropy_with_more=sharp[most],
        )
        return Finding(
            verdict,
            prose.measured(facts),
            {
                "success": plateau,
                "differences": {trial: interval.to_json() for trial, interval in differences.items()},
                "by_count": [[count, values] for count, values in by_count.items()],
                "more negatives": more.to_json(),
                "exact over ibc": exact.to_json(),
                "learnt over exact": learnt.to_json(),
                "longer over ibc": longer.to_json(),
                "distances": {label: interval.to_json() for label, interval in away.items()},
                "conditional entropies": {label: interval.to_json() for label, interval in sharp.items()},
                "steps_per_epoch": steps_per_epoch(results.by_label["ibc"][0]["steps"]),
                "curves": {
                    label: [
                        [(float(row["step"]), row["success"]) for row in run["curve"]]
                        for run in runs
                        if "diverged" not in run
                    ]
                    for label, runs in results.by_label.items()
                },
            },
            prose.comment(facts, verdict),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import COLOURS, curves, mean_and_band

        numbers: dict[str, Any] = finding.numbers
        figure.set_size_inches(8.6, 3.6)
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        whole = {trial: numbers["curves"][trial] for trial in (*PAPERS, LONG) if numbers["curves"][trial]}
        curves(left, whole, "success on validation episodes")
        left.set_ylim(0, 1)
        each = numbers["steps_per_epoch"]
        if each is not None:
            top = left.secondary_xaxis("top", functions=(lambda step: step / each, lambda epoch: epoch * each))
            top.set_xlabel("epoch")
        values = [found for _, found in numbers["by_count"]]
        right.plot(range(len(values)), values, "k.", markersize=4)
        mean_and_band(right, range(len(values)), values, COLOURS[3], DESCRIBED)
        right.axhline(float(np.mean(numbers["success"]["ibc"])), color=COLOURS[0], linestyle="--", label="ibc")
        right.set_xticks(range(len(numbers["by_count"])), [str(count) for count, _ in numbers["by_count"]])
        right.set_xlabel("negatives per example")
        right.set_ylabel("success, second half of training")
        right.legend(frameon=False, fontsize=8)


def length(scale: Scale) -> int:
    """Training steps of this claim."""
    return 3 * scale.steps // 2


def on_par(difference: Interval) -> Verdict:
    """Whether two trials are equivalent: holds if the whole interval lies within the margin, does not hold if the whole
    interval lies outside."""
    if difference.low > -MARGIN and difference.high < MARGIN:
        return "holds"
    return "does not hold" if difference.low > MARGIN or difference.high < -MARGIN else "inconclusive"


def steps_per_epoch(steps: int) -> int | None:
    """Steps of an epoch in a run of `steps` steps; None if no scale has runs of that length."""
    for scale in SCALES.values():
        if length(scale) == steps:
            return max(
                1, scale.demonstrations * ParticleTask().steps // scale.trial(find_trial("ibc")).optimiser.batch_size
            )
    return None
