"""One set of a marginal's chains for the whole batch: success over the number of negatives, at equal steps and time.

cebm sweep reproduction/studies/shared.py --workers 1 --out runs/shared
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cebm.composition import vary
from cebm.recipes import find_trial
from cebm.runs import load_job, load_metrics, restored
from reproduction.anchoring import AVERAGE
from reproduction.claims.marginal import DESCRIBED
from reproduction.claims.mcmc_loss import no_better
from reproduction.intervals import Interval, Verdict, decide
from reproduction.studies.measuring import curve, marginal_fit, seconds_per_step, success
from reproduction.studies.reading import Arm, Comparison, Swept

STEPS = 3000
SHARED = (8, 64, 512)
OWN = "8 of its own"
"""The trial as the paper has it: each example has chains of its own."""
END, TIMED = "success, equal steps", "success, equal time"


def name(count: int) -> str:
    return f"{count} shared"


class Shared(Swept):
    slug = "shared"
    title = "Shared negatives of the marginal"
    claims = (11,)
    rule = (
        "`correct-mas-maxent` for 3,000 steps with 8 chains for each example (512 × 8 of them, as in the paper), and "
        "with 8, 64 and 512 chains that serve the whole batch. Equal steps: success of the last averaged weights on "
        "200 held-out episodes, 512 candidates. Equal time: success on 100 validation episodes at the last evaluation "
        "(one every 250 steps) that is within the CPU time that the variant with 8 shared chains takes for 3,000 "
        "steps, by the CPU seconds of a step that are measured after each run. More shared negatives help if the 95 % "
        "interval of success(64 or 512) − success(8 of its own) at equal steps, over five seeds, lies above 0. Sharing "
        "is free if success(8 shared) − success(8 of its own) does not end below −10 points."
    )
    shown = (END, TIMED, "CPU seconds per step", "log p, learnt marginal", "log p, histogram")
    measure = "reproduction.studies.shared:measured"

    def arms(self) -> list[Arm]:
        own = vary(find_trial(DESCRIBED), **{"optimiser.average": AVERAGE})
        shared = {name(count): vary(own, **{"source.shared": True, "count": count}) for count in SHARED}
        return [Arm(label, trial, STEPS, evaluations=12) for label, trial in {OWN: own, **shared}.items()]

    def comparisons(self) -> list[Comparison]:
        more = [Comparison(name(count), OWN, END, decide, decides=True) for count in SHARED[1:]]
        timed = [Comparison(name(count), OWN, TIMED, decide) for count in SHARED]
        return [Comparison(name(SHARED[0]), OWN, END, free), *more, *timed]


def free(difference: Interval) -> Verdict:
    """Whether sharing costs less than what counts: the rule of "no better", the other way round."""
    return no_better(Interval(-difference.mean, -difference.high, -difference.low))


def at_time(rows: Sequence[Sequence[float]], step_seconds: float, budget: float) -> float | None:
    """Success at the last evaluation within a budget of seconds; None if there is none."""
    within = [value for step, value in rows if step * step_seconds <= budget]
    return within[-1] if within else None


study = Shared()


def measured(directory: Path) -> dict[str, Any]:
    """Success at the end and at equal time, the time of a step, and how well the marginal knows p(y)."""
    job = load_job(directory)
    trainer, _ = restored(job, directory)
    cheapest = next(arm for arm in study.arms() if arm.label == name(SHARED[0])).planned(study.scale, job.seed).job
    took = seconds_per_step(job)
    points = curve(load_metrics(directory))
    return {
        END: success(trainer.policy(), job.task),
        TIMED: at_time(points, took, STEPS * seconds_per_step(cheapest)),
        "CPU seconds per step": took,
        **marginal_fit(trainer, job),
        "curve": points,
        "metric": "success",
    }
