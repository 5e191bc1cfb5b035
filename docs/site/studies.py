"""Tables that pages show from the committed records of studies: of trust, tasks, samplers and planted faults."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.document import table
from benchmarks.posterior_tables import choices, scores
from docs.site import robots

ROOT = Path(__file__).parents[2]
Table = dict[str, Any]


def _json(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def _lines(path: str) -> list[Table]:
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines()]


def percent(share: float) -> str:
    """With one decimal, as all pages write it."""
    return f"{100 * share:.1f} %"


def tables() -> dict[str, str]:
    """Each table by the name of its marks."""
    return {
        **trust(),
        **push_t(),
        **other_tasks(),
        **samplers(),
        **conformal(),
        **posteriors(),
        **annealed(),
        **robots.tables(),
    }


def trust() -> dict[str, str]:
    """docs/trust.md."""
    found, gallery = _json("docs/trust.json"), _json("docs/gallery/records.json")["obstacle"]["numbers"]
    fixed, free = (found[f"one action of eight is played{more}"] for more in ("", ", goals in any order"))
    moved, guard = found["auroc of shifted observations"], found["guard"]
    return {
        "obstacles": table(
            ("who acts", "success", "set-points in a disc"),
            [
                (f"`{name.split(', ')[0]}`, {name.split(', ')[1]}", gallery[f"{name}, success"], gallery[name])
                for name in WAYS
            ],
        ),
        "chunks": table(
            ("search", "success", "jumps per episode", "success, goals in any order", "jumps"),
            [
                (
                    way,
                    *(
                        text
                        for row in (fixed[way], free[way])
                        for text in (percent(row["success"]), f"{row['jumps']:.2f}")
                    ),
                )
                for way in fixed
            ],
        ),
        "moved": table(
            ("observations moved by, in deviations", "unfamiliar", "unlikely", "the larger of both"),
            [
                (name, *(f"{row[kind]:.3f}" for kind in ("observation", "action", "both")))
                for name, row in moved.items()
            ],
        ),
        "faults": table(
            ("fault", "AUROC of a step", "episodes stopped", "median step of the first alarm"),
            [
                (
                    name,
                    f"{row['auroc of a step']:.3f}",
                    percent(row["episodes stopped"]),
                    f"{row['median step of the alarm']:.0f}",
                )
                for name, row in guard.items()
                if isinstance(row, dict) and "auroc of a step" in row
            ],
        ),
    }


WAYS = tuple(
    f"{trial}, {way}" for trial in ("steady", "mdn") for way in ("no constraint", "first allowed draw", "constrained")
)
WAYS_OF_ACTING = {
    "as trained": "as the recipe says",
    "one draw": "one draw",
    "lowest": "the lowest of all 32",
    "without f": "its mixture alone",
    "without the denoising step": "without the denoising step",
    "drawn": "a draw of its mixture",
    **{f"executing {n}": f"executing {n} action{'s' * (n > 1)}" for n in (1, 4, 16)},
    "executing 1, from the last plan": "executing 1, searching from the last plan",
    "executing 1, near the last plan": "executing 1, drawing near the last plan",
}
"""The ways to act, in words."""
NOT_YET = "*Not measured yet.*"


def push_t() -> dict[str, str]:
    """docs/tasks.md: Push-T, and what each part of `steady` brings there."""
    return {"push-t": _results("docs/tasks/push-t.json", "reward"), "parts": _results(PARTS, "reward")}


PARTS = "docs/tasks/push-t-parts.json"


def _results(path: str, metric: str, *more: str) -> str:
    """A row for each recipe and way to act; `more` are columns of all episodes together."""
    if not (ROOT / path).exists():
        return NOT_YET
    rows = []
    found = _json(path)
    compared = any(row.get("to the reference") for row in found["table"].values())
    columns = list(dict.fromkeys([metric, "success"])) + list(more)
    for name, told in found.get("experts", {}).items():
        cells = [f"{told[column]:.3f}" if column in told else "" for column in columns]
        rows.append((" ".join(["the expert", name]).strip(), "", "", *cells, *[""] * (2 + compared)))
    for row in found["table"].values():
        differences = [row["to as trained"], *([row["to the reference"]] if compared else [])]
        rows.append(
            (
                f"`{row['recipe']}`",
                WAYS_OF_ACTING.get(row["way"], row["way"]),
                len(row["seeds"]),
                *(_interval(row[column]) for column in columns),
                *("" if each is None else "{:+.3f} ({:+.3f} to {:+.3f})".format(*each) for each in differences),
                f"{row['action_ms']:.1f} ms",
            )
        )
    against = [f"{metric}, against as the recipe says", *([f"{metric}, against the first row"] if compared else [])]
    return table(("recipe", "way to act", "seeds", *columns, *against, "one action"), rows)


def other_tasks() -> dict[str, str]:
    """docs/tasks.md: Forks and Meta-World."""
    return {"forks": _results("docs/tasks/forks.json", "success", "entropy"), **metaworld()}


METAWORLD = "docs/tasks/metaworld.json"
STYLES = {"mixed": "two styles, shuffled", "scripted": "one scripted expert"}


def metaworld() -> dict[str, str]:
    """A row for each task and style, with the success of each recipe, and a last one with the means over tasks."""
    if not (ROOT / METAWORLD).exists():
        return {"metaworld": NOT_YET}
    found = _json(METAWORLD)
    rows = [row for row in found["table"].values() if row["way"] == "as trained"]
    by_case: Table = {}
    for row in rows:
        case, _, recipe = row["recipe"].partition(": ")
        by_case.setdefault(case, {})[recipe] = row
    recipes = list(dict.fromkeys(recipe for case in by_case.values() for recipe in case))
    shown, means = [], []
    for style, words in STYLES.items():
        cases = {case: row for case, row in by_case.items() if case.endswith(f", {style}")}
        for case, row in cases.items():
            cells = [_interval(row[recipe]["success"]) if recipe in row else "" for recipe in recipes]
            seeds = " / ".join(str(len(row[recipe]["seeds"])) if recipe in row else "0" for recipe in recipes)
            expert = found.get("experts", {}).get(case, {}).get("success")
            shown.append((case, "" if expert is None else f"{expert:.3f}", *cells, seeds))
        # Only over the tasks that every recipe has: a mean over other tasks is no comparison.
        complete = [case for case, row in cases.items() if len(row) == len(recipes)]
        if complete:
            known = [found["experts"][case]["success"] for case in complete if case in found.get("experts", {})]
            averages = [f"{mean(cases[case][recipe]['success'][0] for case in complete):.3f}" for recipe in recipes]
            expert_mean = f"{mean(known):.3f}" if len(known) == len(complete) else ""
            means.append((f"mean of {len(complete)} tasks, {words}", expert_mean, *averages, ""))
    head = ("task, demonstrations", "expert", *(f"`{recipe}`" for recipe in recipes), f"seeds ({' / '.join(recipes)})")
    return {"metaworld": table(head, [*means, *shown])}


def _interval(values: list[float | None]) -> str:
    middle, low, high = values
    return f"{middle:.3f}" + ("" if low is None else f" ({low:.3f} to {high:.3f})")


def samplers() -> dict[str, str]:
    """docs/sampling.md."""
    rows, found = _lines("docs/samplers.jsonl"), _lines("docs/certificate.jsonl")
    names = list(dict.fromkeys(row["sampler"] for row in rows))
    targets = dict.fromkeys(row["target"] for row in rows)
    shown = (name.split(",")[0].upper() + ", ".join(["", *name.split(", ")[1:]]) for name in names)
    ratios = [name for name in names if name.startswith("hmc")]
    head = ("target", *shown, *(f"HMC {name.split(', ')[1]} / NUTS" for name in ratios))

    def value(target: str, name: str) -> float:
        return mean(row["ess_per_gradient"] for row in rows if (row["target"], row["sampler"]) == (target, name))

    def cells(target: str) -> list[str]:
        values = {name: value(target, name) for name in names}
        return [*(f"{each:.3f}" for each in values.values()), *(f"{values[n] / values['nuts']:.1f}" for n in ratios)]

    faults = [row for row in found if "fault" in row]
    right = [row for row in found if "right" in row]
    caught, tried = (sum(row[what] for row in faults) for what in ("caught", "repetitions"))
    planted = [
        (f"{len(faults)} with one fault each", f"{faults[0]['repetitions']} each", f"{caught} of {tried} caught"),
        *(
            (
                f"`{row['right']}`, which is right{RUNS[row['run']]}",
                row["repetitions"],
                f"{row['false_alarms']} false alarms in {row['verdicts']} verdicts",
            )
            for row in right
        ),
    ]
    return {
        "nuts": table(head, [(target, *cells(target)) for target in targets]),
        "planted": table(("sampler", "repetitions", "result"), planted),
    }


def banana() -> dict[str, str]:
    """The lowest and the highest group of HMC's single chains on the banana."""
    rows = [row for row in _lines("docs/samplers.jsonl") if (row["target"], row["sampler"]) == ("banana", "hmc, alone")]
    found = [row["ess_per_gradient"] for row in rows]
    return {"banana alone low": f"{min(found):.3f}", "banana alone high": f"{max(found):.3f}"}


RUNS = {"chains": "", "single": ", single chains", "close": ", a close look"}
"""The certificate's runs, in words."""


def conformal() -> dict[str, str]:
    """docs/trust.md."""
    rows = _lines("docs/conformal.jsonl")
    head = ("set", "coverage", "size", "intervals", "coverage of quantile regression", "size")
    keys = ("coverage", "size", "intervals", "coverage of quantile regression", "size of quantile regression")
    shown = [
        (row["set"], *(percent(row[key]) if "coverage" in key else f"{row[key]:.3g}" for key in keys)) for row in rows
    ]
    return {"conformal": table(head, shown)}


def posteriors() -> dict[str, str]:
    """docs/densities.md."""
    rows = _lines("docs/densities.jsonl")
    return {"posteriors": table(*scores(rows)), "choices": table(*choices(rows))}


def annealed() -> dict[str, str]:
    """docs/annealed.md."""
    found = _json("docs/annealed/speed.json")
    rows = [
        (
            name,
            f"{found[name]['median']['step_ms']:.1f} ms",
            f"{found[name]['median']['mm_gigaflops_per_second']:.0f} GFLOP/s",
            f"{found[name]['median']['share_of_mm']:.2f}",
            f"{found[name]['replan_wall_ms_median']:.1f} ms",
        )
        for name in ("float32", "bf16")
    ]
    head = (
        "precision",
        "CPU time of a step",
        "`torch.mm` beside it",
        "share of it",
        "re-plan, 32 candidates, 5 levels",
    )
    return {"annealed speed": table(head, rows)}
