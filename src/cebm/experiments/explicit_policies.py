"""Claim 14: implicit policies cope with multimodal demonstrations, an explicit mean does not."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cebm.envs.particle import ParticleTask
from cebm.experiments.ledger import Claim, Finding, Interval, Results, Scale, Task, Verdict, decide, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRIALS = ("mse", "mdn", "ibc")
RANDOM_ORDER = ParticleTask(random_order=True)


class ExplicitPolicies(Claim):
    number = 14
    slug = "explicit"
    section = "Sec. I"
    statement = (
        "An implicit policy deals with multimodal demonstrations, on which an explicit policy that regresses the "
        "action fails."
    )
    protocol = (
        "`mse` (regression), `mdn` (a mixture density, explicit and multimodal) and `ibc` on the same demonstrations "
        "of the 2-D particle task, for the same number of steps, all with one observation. Twice: with an expert that "
        "visits the goals in their order, and with one that flips a coin for the order, where success counts in "
        "either order and the mean of the demonstrated actions lies between the goals."
    )
    metric = (
        "Success of the last policy on held-out episodes, per seed: the lead success(ibc) − success(mse) with the "
        "random order, and how much it grows from the fixed order to the random one; both paired by seed."
    )
    rule = (
        "Holds where the 95 % intervals of both, the lead of `ibc` with the random order and its growth, lie above 0; "
        "does not hold where one of them lies below 0; else inconclusive. `mdn` is reported and decides nothing."
    )

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        fixed: list[Task] = [training(trial, scale, seed) for seed in seeds for trial in TRIALS]
        return fixed + [
            training(trial, scale, seed, f"{trial}, random order", task=RANDOM_ORDER)
            for seed in seeds
            for trial in TRIALS
        ]

    def judge(self, results: Results) -> Finding:
        fixed = {trial: results.values(trial, "last", "success") for trial in TRIALS}
        mixed = {trial: results.values(f"{trial}, random order", "last", "success") for trial in TRIALS}
        leads = {
            "fixed": [ibc - mse for ibc, mse in zip(fixed["ibc"], fixed["mse"], strict=True)],
            "random": [ibc - mse for ibc, mse in zip(mixed["ibc"], mixed["mse"], strict=True)],
        }
        lead, growth = Interval.of(leads["random"]), Interval.of_difference(leads["random"], leads["fixed"])
        parts = {decide(lead), decide(growth)}
        verdict: Verdict = "inconclusive"
        if "does not hold" in parts:
            verdict = "does not hold"
        elif parts == {"holds"}:
            verdict = "holds"
        rates = {
            name: ", ".join(f"{Interval.of(values).percent()} with `{trial}`" for trial, values in group.items())
            for name, group in (("fixed", fixed), ("random", mixed))
        }
        return Finding(
            verdict,
            f"Success with the fixed order {rates['fixed']}; with the random order {rates['random']}. The lead of "
            f"`ibc` over `mse` is {Interval.of(leads['fixed']).points()} with the fixed order and {lead.points()} with "
            f"the random order, a growth of {growth.points()}.",
            {
                "fixed": fixed,
                "random": mixed,
                "lead": lead.to_json(),
                "growth": growth.to_json(),
                "mdn_lead": Interval.of_difference(mixed["mdn"], mixed["ibc"]).to_json(),
            },
            "A regression fits the mean of the demonstrated actions, which with two orders is a place between the "
            "goals. An energy can have a minimum at each goal, of which acting picks one; so can a mixture density, "
            "which needs neither a search nor negatives. With the random order everyone also has to tell, from "
            "position and velocity alone, whether the goal just reached is the first or the last, which bounds what "
            "any of them can reach.",
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from cebm.experiments.drawing import bars

        left, right = figure.subplots(1, 2, sharey=True)
        for axes, name, title in ((left, "fixed", "goals in order"), (right, "random", "goals in random order")):
            bars(axes, finding.numbers[name], "success" if axes is left else "")
            axes.set_title(title, fontsize=10)
            axes.set_ylim(0, 1)
