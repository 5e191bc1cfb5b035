"""Length: the paper's trials for a thousand epochs, over which its decay of the learning rate means something.

cebm sweep reproduction/studies/long.py --workers 1 --out runs/long
"""

from pathlib import Path
from typing import Any

from cebm.composition import vary
from cebm.recipes import find_trial
from cebm.runs import load_job, load_metrics, restored
from reproduction.anchoring import AVERAGE
from reproduction.claims.marginal import DESCRIBED, PAPERS, on_par
from reproduction.studies.measuring import curve, marginal_fit, success
from reproduction.studies.reading import Arm, Comparison, Swept

STEPS = 30_000
CANDIDATES = 512
DECIDES = "raw, 512 candidates"


class Long(Swept):
    slug = "long"
    title = "A thousand epochs"
    claims = (11,)
    rule = (
        "The paper's four trials for 30,000 steps (about 1,000 epochs of 300 demonstrations), with averaged weights "
        "beside the raw ones, followed by 100 validation episodes every 3,000 steps. The last weights act on 200 "
        "held-out episodes with 512 candidates, as the reference code acts. A trial is on par with `ibc` if the 95 % "
        "interval of its paired difference in success, over five seeds, lies within ±10 points, and is not if it lies "
        "outside; raw weights decide. Of the samplers, the mean log-density of validation actions by the learned "
        "marginal is told beside that of a histogram of the training actions (the best of 1 to 16 cells a "
        "side) and of the uniform density, in nats: the marginal counts as learned if it comes within 0.1 "
        "nats of the histogram or above it, by the same interval."
    )
    shown = (DECIDES, "averaged, 512 candidates", "log p, learnt marginal", "log p, histogram", "log p, uniform")
    measure = "reproduction.studies.long:measured"

    def arms(self) -> list[Arm]:
        # The sampler as the paper describes it first, as it decides; it costs a third of `ibc`, too.
        names = (DESCRIBED, *(name for name in PAPERS if name != DESCRIBED))
        return [
            Arm(name, vary(find_trial(name), **{"optimiser.average": AVERAGE}), STEPS, evaluations=10) for name in names
        ]

    def comparisons(self) -> list[Comparison]:
        samplers = [name for name in PAPERS if name != "ibc"]
        known = "log p, learnt marginal"
        return [
            *(Comparison(name, "ibc", DECIDES, on_par, decides=name == DESCRIBED) for name in samplers),
            *(Comparison(name, "ibc", "averaged, 512 candidates", on_par) for name in samplers),
            *(Comparison(name, name, known, learnt, other_metric="log p, histogram") for name in samplers),
        ]


def learnt(difference: Any) -> Any:
    """Whether a marginal knows p(y), by the interval of its log-density minus the histogram's."""
    if difference.low > -0.1:
        return "holds"
    return "does not hold" if difference.high < -0.1 else "inconclusive"


study = Long()


def measured(directory: Path) -> dict[str, Any]:
    """Success of the last weights, and how well a marginal sampler knows p(y)."""
    job = load_job(directory)
    trainer, _ = restored(job, directory)
    found: dict[str, Any] = {
        f"{name}, {CANDIDATES} candidates": success(trainer.policy(averaged=averaged), job.task, CANDIDATES)
        for name, averaged in (("raw", False), ("averaged", True))
    }
    return found | marginal_fit(trainer, job) | {"curve": curve(load_metrics(directory)), "metric": "success"}
