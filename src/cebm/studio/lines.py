"""The lines of Python that reproduce a picture of the studio."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from cebm.studio.subject import Subject

LONGEST = 256
"""Numbers of an observation that are written out; longer ones are left to the reader."""


def landscape_lines(subject: Subject, obs: np.ndarray, view: Mapping[str, Any], held: np.ndarray | None) -> str:
    """Those of a landscape."""
    arguments = _arguments({**view, "held": None if held is None else held.tolist()})
    line = f"picture = landscape(policy, obs{arguments})"
    return _lines(["landscape"], [subject], obs, view, line, "picture.energies")


def search_lines(subject: Subject, obs: np.ndarray, way: str, values: Mapping[str, Any], seed: int | None) -> str:
    """Those of a search."""
    acting = "policy.acting" if way == "own" else f"formulations()[{way!r}]"
    if values:
        acting = f"with_values({acting}, {dict(values)!r})"
    names = ["search", *(["formulations"] if way != "own" else []), *(["with_values"] if values else [])]
    line = f"moves = search(policy, obs, {acting}, seed={seed})"
    return _lines(names, [subject], obs, {}, line, "moves.states, moves.energies, moves.chosen")


def comparison_lines(subject: Subject, other: Subject, obs: np.ndarray, view: Mapping[str, Any]) -> str:
    """Those of a comparison."""
    shown = {name: value for name, value in view.items() if name in ("axes", "points", "directions")}
    line = f"both = compare(policy, other, obs{_arguments(shown)})"
    return _lines(["compare"], [subject, other], obs, view, line, "both.difference")


def _lines(
    names: list[str], subjects: list[Subject], obs: np.ndarray, view: Mapping[str, Any], body: str, result: str
) -> str:
    path = str(subjects[0].path or subjects[0].name)
    loads = [
        f"{name} = cebm.load({str(subject.path or subject.name)!r})"
        for name, subject in zip(("policy", "other"), subjects, strict=False)
    ]
    if view.get("directions") is not None:
        names = [*names, "open_subject", "principal"]
        data = "" if subjects[0].data is None else f", {str(subjects[0].data)!r}"
        loads.append(f"directions = principal(open_subject({path!r}{data}))")
    seen = repr(obs.tolist()) if len(obs) <= LONGEST else "...  # the observation, too long to write out"
    start = ["import cebm", f"from cebm.studio import {', '.join(sorted(names))}", "", *loads]
    return "\n".join([*start, f"obs = {seen}", body, f"print({result})"])


def _arguments(values: Mapping[str, Any]) -> str:
    """What is not as it is by default; the directions by their name."""
    found = ""
    for name, value in values.items():
        if name == "axes" and values.get("directions") is not None:
            continue
        if value is not None and value is not False:
            found += f", {name}={'directions' if name == 'directions' else repr(value)}"
    return found
