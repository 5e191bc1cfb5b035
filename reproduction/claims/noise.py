"""Claim 4: a small noise scale in IBC's chains gives deep valleys and with them more information."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cebm.recipes import find_trial, vary
from reproduction.intervals import Interval, all_parts, decide
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.prose import noise as prose
from reproduction.trainings import Scale, Training, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIGMAS = (1.0, 0.3, 0.1, 0.03, 0.01)
"""Noise scales of the training chains."""
LEAST = {"distance": 0.01, "entropy": 0.05, "information": 0.05}
"""The smallest change per factor of ten in σ that counts: in units of the action box (side 2), and in nats."""
CEILING = math.log(64)
"""The largest mutual information, in nats, that 64 observations can show."""
ROOM = 0.3
"""Information that is nearer to the ceiling than this does not decide, as a change could not be seen."""
EARLY = 0.2
"""The first share of training, in which the energy is still flat."""
WHAT = {
    "distance": "distance of negatives",
    "entropy": "H(y|x), nats",
    "information": "I(x; y), nats",
    "success": "success",
}


def label(sigma: float) -> str:
    return f"ibc-noise-{sigma:g}"


def with_noise(sigma: float, scale: Scale, seed: int) -> Training:
    """The training of `ibc` with this σ. With the trial's own σ it is the run that other claims share."""
    plain = find_trial("ibc")
    changed = vary(plain, **{"objective.source.sampler.noise": sigma})
    return training("ibc" if changed == plain else changed, scale, seed, label(sigma))


class Noise(Claim):
    number = 4
    slug = "noise"
    section = "Sec. III and V"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE
    most_seeds = 3

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        return [with_noise(sigma, scale, seed) for seed in seeds for sigma in SIGMAS]

    def judge(self, results: Results) -> Finding:
        values = {
            "distance": {sigma: results.distances(label(sigma)) for sigma in SIGMAS},
            "entropy": {sigma: results.values(label(sigma), "conditional_entropy") for sigma in SIGMAS},
            "information": {sigma: results.values(label(sigma), "mutual_information") for sigma in SIGMAS},
            "success": {sigma: results.values(label(sigma), "last", "success") for sigma in SIGMAS},
        }
        signs = {"distance": 1.0, "entropy": 1.0, "information": -1.0, "success": -1.0}
        slopes = {name: Interval.of([signs[name] * s for s in _slopes(values[name])]) for name in values}
        parts = {name: decide(slopes[name], least) for name, least in LEAST.items()}
        early = {sigma: results.distances(label(sigma), 0.0, EARLY) for sigma in SIGMAS}
        early_slope = Interval.of(_slopes(early))
        coarse = [share for sigma in SIGMAS for share in results.values(label(sigma), "coarse")]
        saturated = Interval.of(values["information"][SIGMAS[0]]).mean > CEILING - ROOM
        if saturated:
            del parts["information"]
        first, last = (
            {name: Interval.of(values[name][sigma]).mean for name in values} for sigma in (SIGMAS[0], SIGMAS[-1])
        )
        grows = parts["distance"] != "holds" and decide(early_slope, LEAST["distance"]) == "holds"
        facts = prose.Facts(
            first=first,
            last=last,
            slopes=slopes,
            parts=parts,
            saturated=saturated,
            early_slope=early_slope,
            growth=_growth(results, early) if grows else None,
            coarse=max(coarse),
        )
        return Finding(
            all_parts(parts.values()),
            prose.measured(facts),
            {
                "sigmas": list(SIGMAS),
                "values": {name: [found[sigma] for sigma in SIGMAS] for name, found in values.items()},
                "slopes": {name: interval.to_json() for name, interval in slopes.items()},
                "early distance": [early[sigma] for sigma in SIGMAS],
                "early slope": early_slope.to_json(),
                "parts": parts,
            },
            prose.comment(facts),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import COLOURS, mean_and_band

        panels = figure.subplots(2, 2, sharex=True)
        for axes, colour, (name, what) in zip(panels.flat, COLOURS, WHAT.items(), strict=False):
            sigmas, values = finding.numbers["sigmas"], finding.numbers["values"][name]
            mean_and_band(axes, sigmas, values, colour, "second half of training")
            axes.plot(sigmas, values, "k.", markersize=4)
            axes.set_xscale("log")
            axes.set_ylabel(what, fontsize=8)
        first = panels[0, 0]
        mean_and_band(first, sigmas, finding.numbers["early distance"], COLOURS[-2], "first fifth", "--")
        first.legend(frameon=False, fontsize=7)
        for axes in panels[1]:
            axes.set_xlabel("σ of the training chains")


def _growth(results: Results, early: dict[float, list[float]]) -> prose.Growth:
    """The energies' growth in training: the reason why the distances depend on σ early, and not later."""
    below = Interval.of_difference(early[0.1], early[0.01])  # per factor of ten, as the slopes are
    return prose.Growth(
        away={sigma: Interval.of(early[sigma]).mean for sigma in (1.0, 0.1, 0.01)},
        flat=below.mean < LEAST["distance"],
        norm=Interval.of(results.at_the_end(label(SIGMAS[0]), "gradient_norm_last")),
        clipped=results.at_the_end(label(SIGMAS[0]), "clipped"),
    )


def _slopes(values: dict[float, list[float]]) -> list[float]:
    """The least-squares slope over log10 σ, one per seed."""
    x = np.log10(list(values))
    return [float(slope) for slope in np.polyfit(x, np.array(list(values.values())), 1)[0]]
