"""The results of a study: its records, one table and one page."""

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cebm.intervals import Interval
from cebm.storage import read_document, write_atomically
from cebm.sweep.studies import Record

MOST_CURVES = 7
"""Settings whose learning curve the page draws: the best."""


def records(folder: Path) -> dict[str, Record]:
    """The records of all finished runs, by key."""
    found = [read_document(path, "record") for path in sorted((folder / "records").glob("*.json"))]
    return {record["key"]: record for record in found}


def table(rows: Iterable[Record]) -> list[dict[str, Any]]:
    """One flat row per run: key, label, seed, the settings that the study varies, the numbers that were found."""
    return [
        {
            "key": row["key"],
            "label": row["label"],
            "seed": row["seed"],
            **{name: _plain(value) for name, value in row["values"].items()},
            **{name: value for name, value in row["result"].items() if not isinstance(value, list | dict)},
            "seconds": row["seconds"],
        }
        for row in rows
    ]


def _plain(value: Any) -> Any:
    """A setting for a table: whole pieces become their names with what they were given."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value


def write_results(rows: Sequence[Record], out: Path, metric: str | None = None) -> list[Path]:
    """Writes results.csv and results.html, and results.parquet where pyarrow is installed; returns what was written."""
    flat = table(rows)
    columns = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(flat)
    write_atomically(out / "results.csv", text.getvalue().encode())
    written = [out / "results.csv"]
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        pass
    else:
        buffer = pyarrow.BufferOutputStream()
        columnar = {name: [row.get(name) for row in flat] for name in columns}
        pyarrow.parquet.write_table(pyarrow.table({name: _column(v) for name, v in columnar.items()}), buffer)
        write_atomically(out / "results.parquet", buffer.getvalue().to_pybytes())
        written.append(out / "results.parquet")
    write_atomically(out / "results.html", page(rows, metric).encode())
    return [*written, out / "results.html"]


def _column(values: list[Any]) -> list[Any]:
    """Values of one type: mixed ones become text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or len(kinds) <= 1:
        return [float(value) if kinds == {int, float} and value is not None else value for value in values]
    return [None if value is None else str(value) for value in values]


# ---------------------------------------------------------------------------------------------- the page


def main_metric(rows: Sequence[Record]) -> str:
    """The number that a study is about: the task's metric on held-out episodes, else on validation data."""
    for row in rows:
        metric = row["result"].get("metric")
        for name in (f"test.{metric}", f"validation.{metric}"):
            if metric is not None and name in row["result"]:
                return name
    numbers = [name for row in rows for name, value in row["result"].items() if isinstance(value, int | float)]
    if not numbers:
        raise ValueError("no run of the study has a number to show")
    return numbers[0]


def lower_is_better(metric: str) -> bool:
    return metric.endswith(("error", "loss", "distance"))


def groups(rows: Sequence[Record], metric: str) -> list[tuple[dict[str, Any], Interval, list[Record]]]:
    """Settings with the interval of the metric over their seeds and their runs, the best first."""
    found: dict[str, list[Record]] = defaultdict(list)
    for row in rows:
        found[json.dumps([row["label"], row["values"]], sort_keys=True)].append(row)
    made = []
    for runs in found.values():
        values = numbers(runs, metric)
        if values:
            named = {"trial": runs[0]["label"]} | {name: _plain(value) for name, value in runs[0]["values"].items()}
            made.append((named, Interval.of(values), runs))
    sign = 1 if lower_is_better(metric) else -1
    return sorted(made, key=lambda group: sign * group[1].mean)


def numbers(rows: Iterable[Record], metric: str) -> list[float]:
    """The metric of the runs that have it; a run that diverged has none."""
    values = [row["result"].get(metric) for row in rows]
    return [float(value) for value in values if isinstance(value, int | float)]


def effects(rows: Sequence[Record], metric: str) -> dict[str, list[tuple[Any, Interval, int]]]:
    """What each setting does: by its values, the mean of the metric over all runs that have it."""
    names = list(dict.fromkeys(name for row in rows for name in row["values"]))
    found: dict[str, list[tuple[Any, Interval, int]]] = {}
    for name in names:
        by_value: dict[Any, list[Record]] = defaultdict(list)
        for row in rows:
            if name in row["values"]:
                by_value[_plain(row["values"][name])].append(row)
        if len(by_value) > 1:
            ordered = sorted(by_value.items(), key=lambda item: (isinstance(item[0], str), item[0]))
            measured = [(value, numbers(runs, metric)) for value, runs in ordered]
            found[name] = [(value, Interval.of(those), len(those)) for value, those in measured if those]
    return found


def page(rows: Sequence[Record], metric: str | None = None) -> str:
    """One self-contained page: the best settings with intervals over seeds, what each setting does, learning curves."""
    import jinja2

    from cebm import __version__
    from cebm.charts import COLOURS, WIDE, Chart, Series, duration, number

    named = metric or main_metric(rows)
    best = groups(rows, named)
    curves = []
    for i, (values, _, runs) in enumerate(best[:MOST_CURVES]):
        points: dict[float, list[float]] = defaultdict(list)
        for step, value in (point for run in runs for point in run["result"].get("curve", [])):
            if value is not None:
                points[step].append(value)
        means = {step: Interval.of(found) for step, found in sorted(points.items())}
        if means:
            label = ", ".join(str(value) for value in values.values())
            curves.append(Series(label, list(means), [each.mean for each in means.values()], COLOURS[i % len(COLOURS)]))
    note = "Mean over seeds on validation episodes."
    chart = Chart("While training", curves, note, size=WIDE) if curves else None
    rooms = (("cebm", "sweep"), ("cebm", "report"), ("cebm.studio", "page"))
    loader = jinja2.ChoiceLoader([jinja2.PackageLoader(*room) for room in rooms])
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = number
    return environment.get_template("results.html").render(
        version=__version__,
        metric=named,
        lower=lower_is_better(named),
        runs=len(rows),
        seeds=len({row["seed"] for row in rows}),
        took=duration(float(sum(row["seconds"] for row in rows))),
        diverged=[row["key"] for row in rows if "diverged" in row["result"]],
        columns=list(dict.fromkeys(name for values, _, _ in best for name in values)),
        best=best,
        effects=effects(rows, named),
        chart=chart,
    )
