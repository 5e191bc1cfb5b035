"""The task on which a marginal should matter: goals from a few clusters, so that p(y) is far from uniform.

cebm sweep reproduction/studies/clusters.py --workers 1 --out runs/clusters
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from cebm.composition import vary
from cebm.energies import Tilted
from cebm.recipes import Trial, find_trial
from cebm.runs import load_job, load_metrics, restored
from cebm.tasks import ParticleTask
from reproduction.anchoring import AVERAGE
from reproduction.claims.marginal import DESCRIBED, on_par
from reproduction.intervals import decide
from reproduction.studies.measuring import curve, marginal_fit, success
from reproduction.studies.reading import Arm, Comparison, Swept

STEPS = 3000
CLUSTERS = 4
SUCCESS = "success, averaged, 512 candidates"
RAW = "success, raw, 512 candidates"
CORRECTED = f"{DESCRIBED}-corrected"


class Clusters(Swept):
    slug = "clusters"
    title = "Goals from a few clusters"
    claims = (11, 10)
    rule = (
        "The 2-D particle task with goals around 4 places (deviation 0.05), 300 demonstrations, 3,000 steps, averaged "
        "weights, 200 held-out episodes, 512 candidates. Expected of theory: negatives of the marginal teach "
        "log p(y|x)/p(y), so that acting by the bare energy undervalues the places where goals lie, and the marginal "
        "correction mends it. The sampler matters here if success(correct-mas-maxent) − success(uniform) lies above 0 "
        "by its 95 % interval over five seeds; it is on par with `ibc` if the interval of that difference lies within "
        "±10 points; the correction helps a trial if the interval of corrected − bare lies above 0. Averaged weights "
        "decide here, as no claim of the paper is about this task."
    )
    shown = (SUCCESS, RAW, "log p, learnt marginal", "log p, histogram", "log p, uniform")
    measure = "reproduction.studies.clusters:measured"

    def arms(self) -> list[Arm]:
        task = ParticleTask(goal_clusters=CLUSTERS)
        names = ("ibc", "uniform", "in-batch", "in-batch-corrected", DESCRIBED)
        trials: dict[str, Trial] = {name: find_trial(name) for name in names}
        trials[CORRECTED] = replace(find_trial(DESCRIBED), energy=Tilted(base_sees="nothing"))
        return [
            Arm(name, vary(trial, **{"optimiser.average": AVERAGE}), STEPS, task, evaluations=6)
            for name, trial in trials.items()
        ]

    def comparisons(self) -> list[Comparison]:
        return [
            Comparison(DESCRIBED, "uniform", SUCCESS, decide, decides=True),
            Comparison(DESCRIBED, "ibc", SUCCESS, on_par, decides=True),
            Comparison(DESCRIBED, "in-batch", SUCCESS, on_par),
            Comparison(CORRECTED, DESCRIBED, SUCCESS, decide, decides=True),
            Comparison("in-batch-corrected", "in-batch", SUCCESS, decide, decides=True),
            Comparison(CORRECTED, "ibc", SUCCESS, on_par),
        ]


study = Clusters()


def measured(directory: Path) -> dict[str, Any]:
    """Success of the last weights, and how well a marginal sampler knows p(y)."""
    job = load_job(directory)
    trainer, _ = restored(job, directory)
    return {
        SUCCESS: success(trainer.policy(), job.task),
        RAW: success(trainer.policy(averaged=False), job.task),
        **marginal_fit(trainer, job),
        "curve": curve(load_metrics(directory)),
        "metric": "success",
    }
