"""The page itself: which chart goes where, and what its caption says."""

import math
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from cebm import __version__
from cebm.charts import (
    BLACK,
    BLUE,
    DASHED,
    DOTTED,
    GREEN,
    GREY,
    SKY,
    VERMILLION,
    WIDE,
    Chart,
    Series,
    duration,
    number,
)
from cebm.loading import load
from cebm.report import records, tables
from cebm.report.records import SUCCESS, Group, Run, grouped, in_words, interval_of, value_of
from cebm.report.scenes import DOTS, episodes_of, film_of, landscapes, moments_of_data, moments_of_scene
from cebm.storage import write_atomically
from cebm.studio.leaf import bundled

MOST_SCENES = 6
"""Settings whose policy is loaded and drawn; the others appear in curves and tables only."""
MOST_COLUMNS = 4
"""Columns of an evaluation to show beside success and the task's metric; the others are named."""


def write_report(runs: list[Path], out: Path) -> Path:
    """One self-contained HTML page about one or several run directories; it opens offline.

    Runs that differ in their seed alone are drawn as one curve with a band. The page is a function of the files in
    the run directories.
    """
    if not runs:
        raise ValueError("a report needs at least one run directory")
    groups = grouped([Run.read(Path(run)) for run in runs])
    # The colours, and the looks of charts, are the studio's.
    loader = jinja2.ChoiceLoader([jinja2.PackageLoader("cebm", "report"), jinja2.PackageLoader("cebm.studio", "page")])
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = number
    environment.filters["bound"] = lambda text: text.replace(" %", "\u00a0%")  # a line never begins with the sign
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
        "added": energy_words(groups),
        "remarks": guesses(groups),
        "learning": learning_charts(groups),
        "energies": energy_charts(groups),
        "proposes": any(group.proposes for group in groups),
        "information": information_charts(groups),
        "information_words": information_words(groups),
        "scenes": scenes,
        "undrawn": [group.label for group in groups[MOST_SCENES:]],
        "script": bundled("report", files("cebm.report")),
        "evaluations": evaluations(groups),
        "unevaluated": [run.path.name for group in groups for run in group.runs if run.evaluation is None],
        "different": tables.settings(groups, differing=True),
        "settings": tables.settings(groups, differing=False),
    }


def tiles(group: Group) -> list[tuple[str, str]]:
    """The few numbers to read first, of one setting: value and what it is."""
    standing, first = group.standing, group.first
    result = []
    if standing.kind in ("held-out", "validation"):
        value = records.amount(standing.metric, standing.score)
        of_mean = f"mean {in_words(standing.metric)} of {standing.kind} episodes"
        result.append((value, f"{standing.kind} episodes that succeed" if standing.metric == SUCCESS else of_mean))
    if standing.kind != "none":
        errors = [run.best["validation_action_error"] for run in group.runs if run.best is not None]
        if errors:
            result.append((number(sum(errors) / len(errors)), "action error on validation pairs"))
    if first.best is not None and len(group.runs) == 1:
        result.append((f"{first.best['step']:,}", f"best step of {first.job.steps:,}"))
    if first.metrics:
        seconds = sum(run.seconds for run in group.runs) / len(group.runs)
        result.append((duration(seconds), "training time" + (" per seed" if len(group.runs) > 1 else "")))
    if (latency := value_of(first.evaluation, "action_ms_p50")) is not None:
        result.append((f"{number(latency)} ms", "median time for an action"))
    return result


# ---------------------------------------------------------------------------------------------- the charts


def learning_charts(groups: list[Group]) -> list[Chart]:
    """How good the policy is, loss and action error over training."""
    measures = dict.fromkeys(name for group in groups for name in group.first.measures)
    charts = [chart for name in measures if (chart := measure_chart(groups, name)).series]
    contrastive = [group for group in groups if group.has("train", "info_nce")]
    if contrastive:
        counts = sorted({group.count for group in contrastive if group.count is not None})
        against = " or ".join(map(str, counts))
        guess = " or ".join(f"{math.log(n + 1):.2f}" for n in counts)
        note = f"Loss of telling the data from {against} negatives, nats; guessing gives {guess}."
        charts.append(
            Chart(
                "InfoNCE",
                [group.series("train", "info_nce") for group in contrastive],
                note if counts else "Loss of telling the data from negatives, nats.",
            )
        )
    others = [group for group in groups if not _loss_is_info_nce(group)]
    if others:
        names = sorted({type(group.first.job.trial.objective).__name__ for group in others})
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


def measure_chart(groups: list[Group], name: str) -> Chart:
    """A metric of the episodes that choose the checkpoint: a rate of success, or the mean of any other column."""
    scored = [group for group in groups if name in group.first.measures and group.has("evaluation", name)]
    curves = [group.series("evaluation", name) for group in scored]
    episodes = " or ".join(sorted({str(group.first.job.evaluation_episodes) for group in scored}))
    several = sorted({len(group.runs) > 1 for group, curve in zip(scored, curves, strict=True) if len(curve.low)})
    bands = "; ".join(("95 % interval", "of several seeds, lowest to highest")[each] for each in several)
    band = f" Band: {bands}." if bands else ""
    if name == SUCCESS:
        note = f"Share of {episodes} validation episodes that succeed.{band}"
        return Chart("Success", curves, note, limits=(0.0, 1.0), percent=True)
    title = in_words(name)
    note = f"Mean of {episodes} validation episodes; more is better, and it chooses the checkpoint.{band}"
    return Chart(title[:1].upper() + title[1:], curves, note)


def guesses(groups: list[Group]) -> list[str]:
    """What it means where InfoNCE ended at the value of a guess; one sentence per setting."""
    result = []
    for group in groups:
        guess = group.at_a_guess()
        if guess is None:
            continue
        whose = "" if len(groups) == 1 else f"{group.label}: "
        meaning = (
            "the energy tells nothing beyond its proposal"
            if group.proposes
            else "the energy does not tell the data from its negatives"
        )
        result.append(f"{whose}InfoNCE ends at the value of a guess, {guess:.2f}: {meaning}.")
    return result


def _loss_is_info_nce(group: Group) -> bool:
    return list(group.series("train", "loss").y) == list(group.series("train", "info_nce").y)


def energy_charts(groups: list[Group]) -> list[Chart]:
    """Energies of data and negatives, their gap, gradients and clipping."""
    alone = all(not hasattr(group.first.job.trial.objective, "source") for group in groups)
    remark = "The objective needs no negatives." if alone else "For the density only differences count."
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
    ceilings = sorted({ceiling for row in rows if (ceiling := value_of(row, "mi_ceiling")) is not None})
    last = max(step for bound in bounds for step in bound.x)
    levels = [Series(f"ceiling {value:.2f}", [0, last], [value, value], GREY, DOTTED) for value in ceilings]
    if len(groups) == 1:
        bounds = [replace(bounds[0], label="bound")]
    return [Chart("Mutual information, nats", [*bounds, *levels], limits=(0.0, None), size=WIDE)]


def information_words(groups: list[Group]) -> list[str]:
    """How to read the bound: it says nothing at 0, and little at its ceiling."""
    single = len(groups) == 1
    silent = [group.label for group in groups if any(bound <= 0 for bound in _last_bounds(group))]
    full = [group.label for group in groups if saturated(group)]
    words = []
    if silent:
        begin = "The bound is 0 at the end" if single else f"The bound is 0 at the end for {', '.join(silent)}"
        words.append(f"{begin}: there it says nothing. A bound below 0 is logged as 0; the information may be more.")
    if full:
        begin = "The value is at its ceiling" if single else f"At the ceiling: {', '.join(full)}"
        words.append(f"{begin}: there it says more about M than about the data.")
    if not silent and not full:
        words.append("The ceiling is not reached, so the value is a property of the energy and the data.")
    return words


def _last_bounds(group: Group) -> list[float]:
    """The bound of the last evaluation of each run that has one."""
    bounds = [[b for row in run.rows if (b := value_of(row, "mi_bound")) is not None] for run in group.runs]
    return [each[-1] for each in bounds if each]


def saturated(group: Group) -> bool:
    """Within log 2 of the ceiling at its best (see `information.info_nce_bound`)."""
    for row in [row for run in group.runs for row in run.rows]:
        bound, ceiling = value_of(row, "mi_bound"), value_of(row, "mi_ceiling")
        if bound is not None and ceiling is not None and ceiling - bound < min(math.log(2), ceiling / 2):
            return True
    return False


# ---------------------------------------------------------------------------------------------- the table of tests


def energy_words(groups: list[Group]) -> list[str]:
    """What the energy adds, where `cebm eval --without-energy` played the same episodes with it ignored; a sentence per
    run."""
    result = []
    for run in [run for group in groups for run in group.runs]:
        bare, name = run.without_energy, run.metric_evaluated
        own, score, difference = value_of(run.evaluation, name), value_of(bare, name), run.energy_difference
        if own is None or score is None or difference is None:
            continue
        middle, low, high = difference
        if low > 0:
            meaning = f"Its energy adds {records.gain(name, middle, (low, high))}"
        elif high < 0:
            meaning = f"Its energy does harm: {records.gain(name, middle, (low, high))}"
        else:
            meaning = f"The energy adds nothing that these episodes can tell: {records.gain(name, middle, (low, high))}"
        whose = "" if len(groups) == len(groups[0].runs) == 1 else f"{run.path.name}: "
        what = "success" if name == SUCCESS else f"the mean {in_words(name)}"
        result.append(
            f"{whose}{meaning}. With the energy ignored, {what} in the same episodes is {records.amount(name, score)}, "
            f"with it {records.amount(name, own)}."
        )
    return result


def evaluations(groups: list[Group]) -> dict[str, Any] | None:
    """What `cebm eval` found: headings, a row per run and one below it where the energy was also ignored, and the names
    of columns that are left out; None where no run was evaluated."""
    tested = [
        (group, name, row, run.measures)
        for group in groups
        for run in group.runs
        for name, row in (
            (run.path.name, run.evaluation),
            (f"{run.path.name}, energy ignored", run.without_energy),
        )
        if row is not None
    ]
    if not tested:
        return None
    about = {"episodes", "seed", "successes", "length", "seconds", "action_ms_p50", "action_ms_p99"}
    about |= {"success_low", "success_high"}
    found = list(dict.fromkeys(name for _, _, row, _ in tested for name in row if value_of(row, name) is not None))
    columns = [name for name in found if name not in about and not name.endswith("_se")]
    first = [name for name in dict.fromkeys(n for *_, measures in tested for n in measures) if name in columns]
    rest = [name for name in columns if name not in first]
    shown = first + rest[:MOST_COLUMNS]
    rows = []
    for group, label, row, _ in tested:
        cells = [number(row["episodes"])]
        for name in shown:
            value, ends = value_of(row, name), interval_of(row, name) if name in first else None
            cells.append("–" if value is None else records.amount(name, value))
            if name in first:
                cells.append("–" if ends is None else records.span(name, ends))
        times = [number(value_of(row, f"action_ms_{which}")) for which in ("p50", "p99")]
        seed = value_of(row, "seed")
        cells += [f"{' / '.join(times)} ms", "–" if seed is None else str(int(seed))]
        rows.append({"colour": group.colour, "run": label, "cells": cells})
    headings = ["Episodes"]
    for name in shown:
        text = in_words(name)
        headings += [text[:1].upper() + text[1:], *(["95 % interval"] if name in first else [])]
    left_out = [in_words(name) for name in rest[MOST_COLUMNS:]]
    return {"headings": [*headings, "Action time p50 / p99", "Seed"], "rows": rows, "left_out": left_out}


# ---------------------------------------------------------------------------------------------- the pictures


def scene(group: Group) -> dict[str, Any]:
    """Landscape and episodes of the best policy of a group's first run; what is missing is said in `why`."""
    run = group.first
    result: dict[str, Any] = {"label": group.label, "run": run.path.name, "why": ""}
    result |= {"landscape": None, "episodes": None, "film": None}
    if not (run.path / "best").exists():
        result["why"] = f"{run.path.name} holds no policy yet: the first evaluation keeps one."
        return result
    policy = load(run.path / "best")
    moments, where = [], ""
    if run.task is None:
        result["why"] = "There are no roll-outs: the run had demonstrations alone, no task to act in."
    else:
        try:
            effort = run.job.evaluation_candidates, run.job.evaluation_execute
            result["episodes"] = episodes_of(policy, run.task, *effort)
            if result["episodes"] is None:
                result["film"] = film_of(policy, run.task, *effort)
                result["why"] = result["film"]["caption"]
        except (ImportError, OSError, ValueError) as error:  # an environment that is not installed here, for one
            result["why"] = f"There is no picture of the roll-outs: {run.task.name} could not play them ({error})."
    if result["episodes"] is not None:
        moments = moments_of_scene(policy, result["episodes"])
        where = f"moments of held-out episode {result['episodes']['shown']}"
        result["episodes"] = {key: value for key, value in result["episodes"].items() if key != "moments"}
        result["episodes"]["caption"] = episodes_caption(result["episodes"])
    if not moments:
        moments = moments_of_data(policy, run)
        where = "one observation" if len(moments) == 1 else f"{len(moments)} validation pairs"
    result["landscape"] = landscapes(policy, moments)
    result["landscape"]["caption"] = landscape_caption(result["landscape"], where)
    return result


def landscape_caption(data: dict[str, Any], where: str) -> str:
    """What to see in it."""
    over = "the action" if data["flat"] else "the action plane (dark: low, likely)"
    text = f"Energy over {over} for {where}, best checkpoint. "
    count, shown = data["candidates"], min(DOTS, data["candidates"])
    if data["explicit"]:
        text += "The policy is explicit: it computes its action (ring), nothing is searched."
    elif count == 1 and not data["moves"]:
        text += "The way to act has one candidate, which becomes the action (ring)."
    else:
        some = f"{shown} of the {count}" if shown < count else f"the {count}"
        text += f"Dots: {some} candidates of the search"
        text += ", in the very states it passes through when the policy acts. " if data["moves"] else ". "
        text += f"The ringed one {'ends lowest' if data['lowest'] else 'is chosen'} and becomes the action."
    if data["levels"]:
        text += (
            f" The candidates fall through noise levels from {number(data['levels'][0])} (normalised units) to 0: each "
            f"frame shows the energy at the level they have reached, and the last one that at "
            f"{number(data['levels'][-1])}, where they are compared. Play it to see modes appear."
        )
    if data["act_dim"] > 2:
        text += (
            f" Of the {data['act_dim']} dimensions the first two are shown: a slice through the chosen action. "
            "Dots are projected onto it, so they need not lie in its valleys."
        )
    return text


def episodes_caption(data: dict[str, Any]) -> str:
    """What to see in it: the count, and the task's own words."""
    effort = f" ({data['candidates']} candidates per action)" if data["candidates"] else ""
    return (
        f"The best checkpoint succeeds in {data['successes']} of the first {len(data['episodes'])} held-out "
        f"episodes{effort}, the expert in {data['expert_successes']}. {data['note']}"
    )
