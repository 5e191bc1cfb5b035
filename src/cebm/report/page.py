"""The page itself: which chart goes where, and what its caption says."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from cebm import __version__
from cebm.policy import Policy, load
from cebm.report import records
from cebm.report.charts import BLACK, BLUE, DASHED, DOTTED, GREEN, GREY, SKY, VERMILLION, Chart, Series, number, png_uri
from cebm.report.records import Group, Run, grouped
from cebm.report.scenes import DOTS, episodes_of, landscape, moments_of_data, moments_of_flight
from cebm.storage import write_atomically

WIDE = (556, 270)
"""Size of a chart of which two fill a row."""
MOST_SCENES = 6
"""Settings whose policy is loaded and drawn; the others appear in curves and tables only."""


def write_report(runs: list[Path], out: Path) -> Path:
    """One self-contained HTML page about one or several run directories; it opens offline.

    Runs that differ in their seed alone are drawn as one curve with a band. The page is a function of the files in
    the run directories.
    """
    if not runs:
        raise ValueError("a report needs at least one run directory")
    groups = grouped([Run.read(Path(run)) for run in runs])
    loader = jinja2.PackageLoader("cebm", "report")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = number
    environment.filters["bound"] = lambda text: text.replace(" %", "\u00a0%")  # a line never begins with the sign
    environment.filters["percent"] = records.percent
    text = environment.get_template("template.html").render(**context(groups))
    target = Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, text.encode())
    return target


def context(groups: list[Group]) -> dict[str, Any]:
    """All that the template shows."""
    scenes = [scene(group) for group in groups[:MOST_SCENES]]
    return {
        "title": groups[0].label if len(groups) == 1 else f"{len(groups)} settings",
        "version": __version__,
        "groups": groups,
        "verdict": records.verdict(groups),
        "cautions": [text for group in groups for text in group.cautions()],
        "tiles": tiles(groups[0]) if len(groups) == 1 else [],
        "seeds": any(len(group.runs) > 1 for group in groups),
        "learning": learning_charts(groups),
        "energies": energy_charts(groups),
        "tilted": any(group.first.job.trial.network.kind == "tilted" for group in groups),
        "information": information_charts(groups),
        "saturated": [group.label for group in groups if saturated(group)],
        "scenes": scenes,
        "undrawn": [group.label for group in groups[MOST_SCENES:]],
        "colour_bar": colour_bar(),
        "evaluations": [(group, run) for group in groups for run in group.runs if run.evaluation is not None],
        "unevaluated": [run.path.name for group in groups for run in group.runs if run.evaluation is None],
        "different": records.settings(groups, differing=True),
        "settings": records.settings(groups, differing=False),
    }


def tiles(group: Group) -> list[tuple[str, str]]:
    """The few numbers to read first, of one setting: value and what it is."""
    kind, score = group.standing
    first = group.first
    result = []
    if kind in ("held-out", "validation"):
        result.append((f"{records.percent(score)} %", f"{kind} episodes that succeed"))
    if kind != "none":
        errors = [run.best["validation_action_error"] for run in group.runs if run.best is not None]
        result.append((number(sum(errors) / len(errors)), "action error on validation pairs"))
    if first.best is not None and len(group.runs) == 1:
        result.append((f"{first.best['step']:,}", f"best step of {first.job.steps:,}"))
    if first.metrics:
        seconds = sum(run.metrics[-1]["seconds"] for run in group.runs if run.metrics) / len(group.runs)
        result.append((duration(seconds), "training time" + (" per seed" if len(group.runs) > 1 else "")))
    if first.evaluation is not None and math.isfinite(first.evaluation.get("action_ms_p50", math.nan)):
        result.append((f"{number(first.evaluation['action_ms_p50'])} ms", "median time for an action"))
    return result


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


# ---------------------------------------------------------------------------------------------- the charts


def learning_charts(groups: list[Group]) -> list[Chart]:
    """Success, loss and action error over training."""
    charts = []
    scored = [group for group in groups if group.has("evaluation", "success")]
    if scored:
        episodes = " or ".join(sorted({str(group.first.job.evaluation_episodes) for group in scored}))
        seeds = sorted({len(group.runs) > 1 for group in scored})
        bands = [("95 % interval", "of several seeds, lowest to highest")[several] for several in seeds]
        charts.append(
            Chart(
                "Success",
                [group.series("evaluation", "success") for group in scored],
                f"Share of {episodes} validation episodes that succeed. Band: {'; '.join(bands)}.",
                limits=(0.0, 1.0),
                percent=True,
            )
        )
    contrastive = [group for group in groups if group.has("train", "info_nce")]
    if contrastive:
        counts = sorted({group.first.job.trial.negative_count for group in contrastive})
        against = " or ".join(map(str, counts))
        guess = " or ".join(f"{math.log(n + 1):.2f}" for n in counts)
        charts.append(
            Chart(
                "InfoNCE",
                [group.series("train", "info_nce") for group in contrastive],
                f"Loss of telling the data from {against} negatives, nats; guessing gives {guess}.",
            )
        )
    others = [group for group in groups if not _loss_is_info_nce(group)]
    if others:
        names = sorted({group.first.job.trial.objective for group in others})
        charts.append(
            Chart(
                "Training loss",
                [group.series("train", "loss") for group in others],
                f"Objective: {', '.join(names)}. Only curves of one objective compare.",
                scale="auto",
            )
        )
    parts = [("validation_action_error", "validation", BLUE, ""), ("train_action_error", "training", BLUE, DASHED)]
    charts.append(
        paired(
            groups,
            "evaluation",
            parts,
            title="Action error",
            note="Distance from the demonstrated action, in its units. A widening gap is overfitting.",
            limits=(0.0, None),
        )
    )
    size = (360, 236) if len(charts) == 3 else WIDE
    return [replace(chart, size=size) for chart in charts]


def _loss_is_info_nce(group: Group) -> bool:
    return list(group.series("train", "loss").y) == list(group.series("train", "info_nce").y)


def energy_charts(groups: list[Group]) -> list[Chart]:
    """Energies of data and negatives, their gap, gradients and clipping."""
    explicit = all(group.first.job.trial.network.explicit for group in groups)
    remark = "An explicit policy needs no negatives." if explicit else "For the density only differences count."
    pairs = [("positive_energy", "data", BLUE, ""), ("negative_energy", "negatives", VERMILLION, DASHED)]
    norms = [
        ("parameter_gradient_norm", "parameters", BLACK, ""),
        ("gradient_norm_first", "chain start", SKY, DOTTED),
        ("gradient_norm_last", "chain end", GREEN, DASHED),
    ]
    gaps = [group.series("train", "energy_gap") for group in groups if group.has("train", "energy_gap")]
    clipped = [group.series("train", "clipped") for group in groups if group.has("train", "clipped")]
    norms_note = "Of the loss in the parameters" + (
        ", and of the energy in the action where training chains start and end." if clipped else "."
    )
    charts = [
        paired(groups, "train", pairs, title="Energy of data and negatives", note=f"Means over a batch. {remark}"),
        Chart("Energy gap", gaps, "Negatives minus data. Above zero: the data are the likelier.", limits=(0.0, None)),
        paired(groups, "train", norms, title="Gradient norms", note=norms_note, scale="auto"),
        Chart(
            "Clipped moves",
            clipped,
            "Share of a chain’s coordinates that its step limit or the box cut short.",
            limits=(0.0, 0.05),
            percent=True,
        ),
    ]
    return [replace(chart, size=WIDE) for chart in charts if chart.series]


def paired(groups: list[Group], kind: str, parts: list[tuple[str, str, str, str]], **chart: Any) -> Chart:
    """Several metrics in one chart, each (name, label, colour, dash). Of one setting, each has its colour; of several,
    the colour tells the setting and the dash the metric, without bands, which would cover each other."""
    if len(groups) == 1:
        curves = [groups[0].series(kind, *part) for part in parts if groups[0].has(kind, part[0])]
        return Chart(series=curves, **chart)
    curves, legend = [], [Series(group.label, (), (), group.colour, group.dash) for group in groups]
    for name, label, _, dash in parts:
        found = [group for group in groups if group.has(kind, name)]
        curves += [group.series(kind, name, f"{group.label}, {label}", dash=dash) for group in found]
        legend += [Series(label, (), (), GREY, dash)] if found else []
    return Chart(series=[replace(curve, low=(), high=()) for curve in curves], legend=legend, **chart)


def information_charts(groups: list[Group]) -> list[Chart]:
    """The bound on mutual information, against what it could at most be."""
    bounds = [group.series("evaluation", "mi_bound") for group in groups if group.has("evaluation", "mi_bound")]
    if not bounds:
        return []
    rows = [row for group in groups for run in group.runs for row in run.rows]
    ceilings = sorted({row["mi_ceiling"] for row in rows if "mi_ceiling" in row})
    last = max(step for bound in bounds for step in bound.x)
    levels = [Series(f"ceiling {value:.2f}", [0, last], [value, value], GREY, DOTTED) for value in ceilings]
    if len(groups) == 1:
        bounds = [replace(bounds[0], label="bound")]
    return [Chart("Mutual information, nats", [*bounds, *levels], limits=(0.0, None), size=WIDE)]


def saturated(group: Group) -> bool:
    """Within log 2 of the ceiling at its best (see `information.info_nce_bound`)."""
    rows = [row for run in group.runs for row in run.rows if "mi_bound" in row]
    return any(row["mi_ceiling"] - row["mi_bound"] < min(math.log(2), row["mi_ceiling"] / 2) for row in rows)


# ---------------------------------------------------------------------------------------------- the pictures


def scene(group: Group) -> dict[str, Any]:
    """Landscape and episodes of the best policy of a group's first run; what is missing is said in `why`."""
    run = group.first
    result: dict[str, Any] = {"label": group.label, "run": run.path.name, "why": ""}
    result |= {"landscape": None, "episodes": None}
    if not (run.path / "best").exists():
        result["why"] = f"{run.path.name} holds no policy yet: the first evaluation keeps one."
        return result
    policy: Policy = load(run.path / "best")
    if run.task is None:
        result["why"] = "There are no roll-outs: the run had demonstrations alone, no task to act in."
        result["landscape"] = landscape(policy, moments_of_data(policy, run.job))
        result["landscape"]["caption"] = landscape_caption(result["landscape"], "four validation pairs")
        return result
    result["episodes"], flight = episodes_of(policy, run.task, run.job.evaluation_candidates)
    moments = moments_of_flight(policy, run.task, flight, result["episodes"]["shown"])
    result["landscape"] = landscape(policy, moments)
    where = f"moments of held-out episode {result['episodes']['shown']}"
    result["landscape"]["caption"] = landscape_caption(result["landscape"], where)
    result["episodes"]["caption"] = episodes_caption(result["episodes"])
    return result


def landscape_caption(data: dict[str, Any], where: str) -> str:
    """What to see in it."""
    over = "the action" if data["flat"] else "the action plane (dark: low, likely)"
    text = f"Energy over {over} for {where}, best checkpoint. "
    if data["moves"]:
        shown = min(DOTS, data["candidates"])
        text += (
            f"Dots: {shown} of the {data['candidates']} candidates of the search, in the very states it passes "
            f"through when the policy acts. The ringed one {data['choice']} and becomes the action."
        )
    else:
        text += "The policy is explicit: it computes its action (ring), nothing is searched."
    if data["act_dim"] > 2:
        text += (
            f" Of the {data['act_dim']} dimensions the first two are shown: a slice through the chosen action. "
            "Dots are projected onto it, so they need not lie in its valleys."
        )
    return text


def episodes_caption(data: dict[str, Any]) -> str:
    """What to see in it."""
    effort = f" ({data['candidates']} candidates per action)" if data["candidates"] else ""
    text = (
        f"The best checkpoint succeeds in {data['successes']} of the first {len(data['episodes'])} held-out "
        f"episodes{effort}, the expert in {data['expert_successes']}. Success: within {data['radius']:g} of goal 1, "
        "then of goal 2, and there at the end. The cross is the set-point that pulls the particle."
    )
    if data["dim"] == 1:
        text += " Across: time. Up: the one dimension."
    elif data["dim"] > 2:
        text += f" Paths show the first two of {data['dim']} dimensions; distances count all, so judge by them."
    return text


def colour_bar() -> str:
    """Dark to bright."""
    return png_uri(np.arange(256, dtype=np.uint8)[None])
