"""Claim 2: IBC's Langevin step does not sample its target, the correct one does."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from cebm.certificate import (
    SINGLE_STEPS,
    Gaussian,
    RunName,
    Target,
    analytic_targets,
    certify,
    named_sampler,
)
from cebm.samplers import Collect, run
from reproduction.intervals import Interval, Verdict
from reproduction.ledger import Claim, Computation, Finding, Results, Task
from reproduction.prose import langevin as prose
from reproduction.trainings import Result, Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SAMPLERS = {"ibc": "langevin-ibc", "correct": "langevin-correct"}
"""The samplers of the certificate, by our labels."""
COLDEST, WARMEST = 0.8, 1.2
"""Temperatures in this range count as 1. It is the certificate's tolerance for a finite step size and the start."""
COLD = 0.5
"""A temperature below this is wrong beyond any tolerance."""


def unbounded_targets() -> list[Target]:
    """The certificate's targets without a border, as clipping at a border would add an error of its own."""
    return [target for target in analytic_targets() if target.margin is None]


class LangevinStep(Claim):
    number = 2
    slug = "langevin"
    section = "Sec. III, Fig. 1 and appendix B"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        return [Computation(self, seed, scale) for seed in seeds]

    def compute(self, scale: Scale, seed: int) -> Result:
        generator = torch.Generator().manual_seed(seed)
        runs: tuple[RunName, ...] = ("chains",) if scale.small else ("chains", "single")
        result: Result = {}
        for label, name in SAMPLERS.items():
            rows = certify(partial(named_sampler, name), unbounded_targets(), runs, generator, name)
            result[label] = {
                "temperature": {row.target: row.temperature for row in rows if row.run == "chains"},
                "verdicts": {f"{row.target}, {row.run}": row.verdict for row in rows},
                "states": single_chain(name, SINGLE_STEPS // (10 if scale.small else 1), generator),
            }
        return result

    def judge(self, results: Results) -> Finding:
        computed = results.by_label["computation"]
        targets = list(computed[0]["ibc"]["temperature"])
        temperatures = {
            label: {target: results.values("computation", label, "temperature", target) for target in targets}
            for label in SAMPLERS
        }
        intervals = {
            label: {target: Interval.of(values) for target, values in by_target.items()}
            for label, by_target in temperatures.items()
        }
        passed = {label: _share(computed, label, ("samples the target",)) for label in SAMPLERS}
        failed = {label: _share(computed, label, ("biased", "does not sample")) for label in SAMPLERS}
        ibc, correct = intervals["ibc"].values(), intervals["correct"].values()
        verdict: Verdict
        if (
            min(passed["correct"].values()) == 1
            and min(failed["ibc"].values()) == 1
            and all(interval.high < COLD for interval in ibc)
            and all(interval.high >= COLDEST and interval.low <= WARMEST for interval in correct)
        ):
            verdict = "holds"
        elif (
            max(failed["correct"].values()) > 0.5
            or max(passed["ibc"].values()) > 0.5
            or any(interval.high < COLDEST or interval.low > WARMEST for interval in correct)
            or any(interval.low > COLD for interval in ibc)
        ):
            verdict = "does not hold"
        else:
            verdict = "inconclusive"
        facts = prose.Facts(intervals, [*passed["correct"].values()], [*failed["ibc"].values()])
        return Finding(
            verdict,
            prose.measured(facts),
            {
                "temperature": temperatures,
                "intervals": {
                    label: {target: interval.to_json() for target, interval in by_target.items()}
                    for label, by_target in intervals.items()
                },
                "passed": passed,
                "failed": failed,
                "states": {label: computed[0][label]["states"] for label in SAMPLERS},
            },
            prose.comment(verdict),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import COLOURS, bar

        panels = figure.subplots(1, 3, width_ratios=[1, 1, 1.1])
        for axes, label, title, colour in (
            (panels[0], "ibc", "IBC's step", COLOURS[3]),
            (panels[1], "correct", "correct step", COLOURS[0]),
        ):
            _scatter(axes, np.array(finding.numbers["states"][label]), title, colour)
        temperatures = finding.numbers["temperature"]
        for i, target in enumerate(temperatures["ibc"]):
            for label, shift, colour in (("ibc", -0.2, COLOURS[3]), ("correct", 0.2, COLOURS[0])):
                bar(panels[2], i + shift, temperatures[label][target], colour, 0.38)
        panels[2].set_xticks(range(len(temperatures["ibc"])), list(temperatures["ibc"]), fontsize=8)
        panels[2].axhline(1, color="black", linewidth=0.8)
        panels[2].set_ylabel("effective temperature")
        for title, colour in (("IBC's step", COLOURS[3]), ("correct step", COLOURS[0])):
            panels[2].bar(0, 0, color=colour, alpha=0.6, label=title)
        panels[2].legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=2)


def single_chain(name: str, steps: int, generator: torch.Generator) -> list[list[float]]:
    """The paper's figure: the last quarter of the states of one chain on its Gaussian."""
    target = Gaussian()
    start = target.starts(1, 1, generator)
    sampler = named_sampler(name, target, steps)
    chain = run(sampler, target, target.encode(start[:, 0]), start, generator, Collect(3 * steps // 4))
    return [[round(value, 4) for value in state] for state in chain.actions[0].tolist()]


def _share(computed: Sequence[Result], label: str, verdicts: tuple[str, ...]) -> dict[str, float]:
    """The share of seeds whose certificate says one of `verdicts`, by target and run."""
    runs = computed[0][label]["verdicts"]
    return {run: sum(result[label]["verdicts"][run] in verdicts for result in computed) / len(computed) for run in runs}


def _scatter(axes: "Axes", states: np.ndarray, title: str, colour: str) -> None:
    """States over the ellipses of 1, 2 and 3 standard deviations of the Gaussian."""
    target = Gaussian()
    angle = np.linspace(0, 2 * np.pi, 200)
    for radius in (1, 2, 3):
        ellipse = [m + radius * s * f(angle) for m, s, f in zip(target.mean, target.std, (np.cos, np.sin), strict=True)]
        axes.plot(*ellipse, color="0.6", linewidth=0.8)
    axes.scatter(states[:, 0], states[:, 1], s=5, color=colour, alpha=0.5, linewidths=0, zorder=3)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("y₁")
    axes.set_ylabel("y₂")
    axes.set_aspect("equal")
    axes.set_xlim(target.mean[0] - 4.5 * target.std[0], target.mean[0] + 4.5 * target.std[0])
    axes.set_ylim(target.mean[1] - 4 * target.std[1], target.mean[1] + 4 * target.std[1])
