"""Claim 14: implicit policies cope with multimodal demonstrations, an explicit mean does not."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cebm.tasks import ParticleTask
from reproduction.intervals import Interval, all_parts, decide
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.prose import explicit_policies as prose
from reproduction.trainings import Scale, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRIALS = ("mse", "mdn", "ibc")
TASKS = {
    "plain": ParticleTask(),
    # Without the velocity: after the first step it would tell which goal the expert chose.
    "fixed": ParticleTask(hide_velocity=True),
    "random": ParticleTask(random_order=True, hide_velocity=True),
}


class ExplicitPolicies(Claim):
    number = 14
    slug = "explicit"
    section = "Sec. I"
    statement, protocol, metric, rule = prose.STATEMENT, prose.PROTOCOL, prose.METRIC, prose.RULE

    def tasks(self, scale: Scale, seeds: Sequence[int]) -> list[Task]:
        return [
            training(trial, scale, seed, f"{trial}, {order}", task=task)
            for seed in seeds
            for order, task in TASKS.items()
            for trial in TRIALS
        ]

    def judge(self, results: Results) -> Finding:
        def of(what: str, orders: Iterable[str]) -> dict[str, dict[str, list[float]]]:
            return {
                order: {trial: results.values(f"{trial}, {order}", "last", what) for trial in TRIALS}
                for order in orders
            }

        reached, success = of("reached_a_goal", ("fixed", "random")), of("success", TASKS)
        lead = Interval.of_difference(reached["random"]["ibc"], reached["random"]["mse"])
        loss = Interval.of_difference(reached["fixed"]["mse"], reached["random"]["mse"])
        mixture = Interval.of_difference(reached["random"]["mdn"], reached["random"]["mse"])
        verdict = all_parts([decide(lead), decide(loss)])

        def intervals(shares: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, Interval]]:
            return {
                order: {trial: Interval.of(values) for trial, values in group.items()}
                for order, group in shares.items()
            }

        facts = prose.Facts(
            reached=intervals(reached),
            success=intervals(success),
            lead=lead,
            loss=loss,
            mixture_copes=decide(mixture) == decide(lead) == "holds",
        )
        return Finding(
            verdict,
            prose.measured(facts),
            {
                "reached": reached,
                "success": success,
                "lead": lead.to_json(),
                "loss": loss.to_json(),
                "mdn_lead": mixture.to_json(),
            },
            prose.comment(facts, verdict),
        )

    def draw(self, finding: Finding, figure: "Figure") -> None:
        from reproduction.drawing import bars

        panels = (
            ("reached", "fixed", "velocity hidden: reaches a goal"),
            ("reached", "random", "and in random order: reaches a goal"),
            ("success", "plain", "plain task: success"),
        )
        for axes, (what, order, title) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
            bars(axes, finding.numbers[what][order], "share of episodes" if order == "fixed" else "")
            axes.set_title(title, fontsize=8)
            axes.set_ylim(0, 1)
