"""Settings for people: nested pieces as dotted names, in blocks that follow the fields of a trial."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cebm.recipes import Trial
from cebm.runs import Job
from cebm.settings import to_json

if TYPE_CHECKING:
    from cebm.report.records import Group

Block = tuple[str, list[tuple[str, list[str]]]]
"""A title, and rows of a name with its values."""


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Settings as JSON, by dotted path. A piece stands at its own path with the tag of its type, its settings below."""
    if isinstance(value, dict) and value.keys() == {"float"}:
        return {path: float(value["float"])}
    if isinstance(value, dict):
        result = {path: value["type"]} if "type" in value else {}
        parts = [(key, part) for key, part in value.items() if key != "type"]
    elif isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        result, parts = {}, [(str(index), part) for index, part in enumerate(value)]
    else:
        return {path: value}
    for key, part in parts:
        result |= flat(part, f"{path}.{key}" if path else key)
    return result


def settings_of(job: Job) -> dict[str, Any]:
    """All settings of a run by their path, those of the trial under their field's name; of data the name of the file
    alone."""
    found = {key.removeprefix("trial."): value for key, value in flat(to_json(job)).items()}
    for name in ("", "trial", "inputs"):  # types that are always the same
        found.pop(name, None)
    if job.data is not None:
        found["data"] = Path(job.data).name
    return found


def shown(value: Any) -> str:
    """A setting for people; `module:Qualname`, the tag of a type, without its module."""
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    module, colon, name = str(value).rpartition(":")
    tag = colon and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))
    return name if tag else str(value)


def short_name(path: str) -> str:
    """The end of a path, which tells enough in a label; of a piece in a list, with the name of the list."""
    *rest, last = path.split(".")
    return f"{rest[-1]} {last}" if last.isdigit() and rest else last.replace("_", " ")


def settings(groups: "list[Group]", differing: bool) -> list[Block]:
    """The tables at the end of the page: what differs between groups with a value for each, or what all share."""
    columns = []
    for group in groups:
        run = group.first
        column = settings_of(run.job) | {f"made with.{key}": value for key, value in run.made_with.items()}
        columns.append(column | {"seed": ", ".join(str(each.job.seed) for each in group.runs)})
    pieces = [field.name for field in fields(Trial) if not isinstance(field.default, str | bool)]
    blocks: dict[str, list[tuple[str, list[str]]]] = {"Run": [], "Task": []}
    blocks |= {_title(name): [] for name in [*pieces, "made with"]}
    for key in dict.fromkeys(key for column in columns for key in column):
        first, _, rest = key.partition(".")
        title = _title(first) if first in (*pieces, "task", "made with") else "Run"
        values = [shown(column[key]) if key in column else "–" for column in columns]
        raw = [column.get(key) for column in columns]
        if len(set(values)) == 1 and any(value != raw[0] for value in raw):  # the same name in different modules
            values = list(map(str, raw))
        if (len(set(values)) > 1) == differing:
            name = (rest or first) if title != "Run" else key
            blocks[title].append((name.replace("_", " "), values if differing else values[:1]))
    return [(title, rows) for title, rows in blocks.items() if rows]


def _title(name: str) -> str:
    return name[:1].upper() + name[1:].replace("_", " ")
