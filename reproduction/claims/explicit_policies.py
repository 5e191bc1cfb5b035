"""Claim 14: implicit policies cope with multimodal demonstrations, an explicit mean does not."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cebm.envs.particle import ParticleTask
from reproduction.intervals import Interval, all_parts, decide
from reproduction.ledger import Claim, Finding, Results, Task
from reproduction.trainings import Scale, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRIALS = ("mse", "mdn", "ibc")
TASKS = {
    "plain": ParticleTask(),
    # Without the velocity, which after the first moment would give the chosen goal away.
    "fixed": ParticleTask(hide_velocity=True),
    "random": ParticleTask(random_order=True, hide_velocity=True),
}


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
        "of the 2-D particle task, for the same number of steps, all with one observation. Twice without the velocity: "
        "with an expert that visits the goals in their order, and with one that flips a coin for the order. With the "
        "coin the demonstrated action is one goal or the other, wherever the agent is, and their mean lies between; in "
        "order it can still be either where the ways to the two goals cross, as the velocity tells them apart. So, "
        "added when half of these runs had been seen and deciding nothing, a third time: the plain task, in order and "
        "with the velocity."
    )
    metric = (
        "The share of held-out episodes in which the last policy reaches a goal at all, per seed. The mean of two "
        "goals is neither, though an agent may pass one on its way there; success asks for both goals, which takes a "
        "memory of the first one or the velocity, and is reported. The lead is share(ibc) − share(mse) with the random "
        "order, the loss share(mse) with the fixed order minus that with the random one; both paired by seed."
    )
    rule = (
        "Holds where the 95 % intervals of both, the lead of `ibc` and the loss of `mse`, lie above 0; does not hold "
        "where one of them lies below 0; else inconclusive. `mdn` is reported and decides nothing."
    )

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

        def told(group: dict[str, list[float]]) -> str:
            return ", ".join(f"{Interval.of(values).percent()} with `{trial}`" for trial, values in group.items())

        return Finding(
            verdict,
            f"A goal is reached with the fixed order in {told(reached['fixed'])}; with the random order in "
            f"{told(reached['random'])}: a lead of {lead.points()} for `ibc` over `mse`, which loses {loss.points()} "
            f"from one order to the other. Success with the fixed order {told(success['fixed'])}; with the random "
            f"order {told(success['random'])}; on the plain task {told(success['plain'])}.",
            {
                "reached": reached,
                "success": success,
                "lead": lead.to_json(),
                "loss": loss.to_json(),
                "mdn_lead": mixture.to_json(),
            },
            "A regression fits the mean of the demonstrated actions, which with two orders is a place between the "
            "goals. An energy can have a minimum at each goal, of which acting picks one. "
            + {
                "holds": "That is what is seen here.",
                "does not hold": "That is not what decides here.",
                "inconclusive": "Whether that decides here, these seeds do not tell.",
            }[verdict]
            + (
                " A mixture density copes as well, and needs neither a search nor negatives: being explicit is not "
                "what makes a policy fail, being a mean is."
                if decide(mixture) == decide(lead) == "holds"
                else ""
            ),
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
