"""Pages that stand alone: the modules of the studio's page put into one script, with the data beside them. The report
is one, and so is the view that a person takes away."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from cebm import __version__
from cebm.acting import Acting
from cebm.charts import number
from cebm.studio.drawn import drawn_landscape, drawn_moves
from cebm.studio.landscape import landscape
from cebm.studio.observation import columns_of, coordinates_of, marks_of, sketch_of
from cebm.studio.search import search
from cebm.studio.subject import Subject

IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([a-z]+)\.js";$', re.M)
EXPORT = re.compile(r"^export (?:(?:async )?function|const|let|class) ([A-Za-z]+)", re.M)


def page_folder() -> Traversable:
    """Where the page's modules and styles are."""
    return files("cebm.studio").joinpath("page")


def bundled(entry: str, *folders: Traversable) -> str:
    """One script of a module and all that it imports, each in a function of its own that returns what it exports. A
    page from disk may not import files, and one file is what a person can send."""
    places = (page_folder(), *folders)
    done: dict[str, str] = {}

    def add(name: str) -> None:
        found = next((each for folder in places if (each := folder.joinpath(f"{name}.js")).is_file()), None)
        if found is None:
            raise ValueError(f"there is no module {name}.js")
        text = found.read_text("utf-8")
        for _, other in IMPORT.findall(text):
            if other not in done:
                add(other)
        body = IMPORT.sub(lambda each: f"const {{{each[1].replace(' as ', ': ')}}} = modules.{each[2]};", text)
        if re.search(r"^import ", body, re.M):
            raise ValueError(f"{name}.js imports in a way that cannot be put into one file")
        names = ", ".join(EXPORT.findall(text))
        body = re.sub(r"^export ", "", body, flags=re.M)
        done[name] = f"modules.{name} = (() => {{\n{body}return {{ {names} }};\n}})();\n"

    add(entry)
    return f'"use strict";\nconst modules = {{}};\n{"".join(done.values())}'


def view_page(
    subject: Subject,
    obs: Any,
    acting: Acting | None = None,
    seed: int | None = None,
    python: str = "",
    palette: str = "viridis",
    **view: Any,
) -> str:
    """One self-contained page of what the studio shows: the landscape at an observation, the candidates of a search on
    it, the scene, and the lines of Python that make them. `view`: what `landscape` takes."""
    policy = subject.policy
    ground = landscape(policy, obs, **view)
    moves = search(policy, obs, acting, seed)
    level = view.get("level")
    # Candidates count the energy without a noise level.
    plain = ground if level is None else landscape(policy, obs, **{**view, "level": None})
    names = [coordinates_of(subject)[axis] for axis in ground.axes]
    names = names or [f"principal direction {i + 1}" for i in range(len(ground.directions))]
    way = drawn_moves(moves, plain)
    frame = np.asarray(obs, np.float64).ravel()[-policy.columns[0] :].tolist()
    data = {
        "landscape": drawn_landscape(policy, ground, obs, names, marks_of(subject, obs)),
        "moves": way,
        "palette": palette,
        "sketch": sketch_of(subject),
        "obs": frame,
    }
    loader = jinja2.ChoiceLoader([jinja2.PackageLoader("cebm", "studio"), jinja2.PackageLoader("cebm.studio", "page")])
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    columns = [(column.name, number(value)) for column, value in zip(columns_of(subject), frame, strict=False)]
    settings = [(each["path"], each["value"]) for each in map(asdict, _settings(policy.acting, acting))]
    return environment.get_template("leaf.html").render(
        name=subject.name,
        version=__version__,
        energy=number(ground.energy),
        action=[number(value) for value in ground.action],
        level=level,
        words=way["words"],
        columns=columns,
        settings=settings,
        python=python,
        data=data,
        script=bundled("leaf"),
    )


def write_view(subject: Subject, obs: Any, out: str | Path, **view: Any) -> Path:
    """`view_page` to a file."""
    target = Path(out)
    target.write_text(view_page(subject, obs, **view), "utf-8")
    return target


def _settings(own: Acting, acting: Acting | None) -> Sequence[Any]:
    from cebm.studio.controls import controls_of

    return controls_of(own if acting is None else acting)
