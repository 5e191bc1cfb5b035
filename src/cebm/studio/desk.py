"""Answers the page's questions: plain data in, plain data out, by way of the panels. It knows no HTTP."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from cebm.acting import Acting
from cebm.charts import DASHED, GREY, VERMILLION, Chart, Series
from cebm.demonstrations import Demonstrations
from cebm.policy import EnergyPolicy
from cebm.studio import search as searching
from cebm.studio.comparison import check_alike, compare, log_densities
from cebm.studio.controls import controls_of, with_values
from cebm.studio.drawn import drawn_landscape, drawn_moves, packed
from cebm.studio.landscape import Landscape, landscape
from cebm.studio.leaf import view_page
from cebm.studio.lines import comparison_lines, landscape_lines, search_lines
from cebm.studio.observation import (
    columns_of,
    coordinates_of,
    first_window,
    marks_of,
    principal,
    rolled,
    sketch_of,
    window_of,
)
from cebm.studio.subject import Subject
from cebm.studio.training import Progress
from cebm.tasks.base import Value

POINTS = 128
"""Points along a side of a landscape that the page may ask for."""
KEPT = 8
"""Roll-outs that are kept, so that a step through one does not play it again."""
SMALL = (290, 190)
"""Size of a chart in a panel at the side."""
Message = Mapping[str, Any]


class Desk:
    """One method per question, each from a message to an answer. A ValueError says what is wrong with a message."""

    slow = ("certificate", "training", "moment", "roll", "densities", "leaf")
    """Questions that may take seconds; the others must not wait for them."""

    def __init__(self, subjects: Sequence[Subject]) -> None:
        if not subjects:
            raise ValueError("the studio needs at least one policy")
        self.subjects = list(subjects)
        self._rolled: dict[tuple[int, int], tuple[Demonstrations, dict[str, Value]]] = {}
        self._principal: dict[int, np.ndarray] = {}
        self.questions: dict[str, Callable[[Message], dict[str, Any]]] = {
            "hello": self.hello,
            "observation": self.observation,
            "roll": self.roll,
            "landscape": self.landscape,
            "search": self.search,
            "certificate": self.certificate,
            "compare": self.compare,
            "densities": self.densities,
            "training": self.training,
            "moment": self.moment,
            "leaf": self.leaf,
        }

    def answer(self, question: str, message: Any) -> dict[str, Any]:
        """The answer to a question of the page."""
        if question not in self.questions:
            raise ValueError(f"there is no question {question!r}; there are {', '.join(self.questions)}")
        if not isinstance(message, dict):
            raise ValueError(f"a message is an object, got a {type(message).__name__}")
        return self.questions[question](message)

    def hello(self, message: Message) -> dict[str, Any]:
        """What there is to look at."""
        return {"subjects": [self._described(subject) for subject in self.subjects]}

    def observation(self, message: Message) -> dict[str, Any]:
        """The observation at a step of an episode, with the demonstrated action; of a roll-out (`source`: "rolled", the
        episode is its seed) with the action that was taken."""
        subject, episode = self._subject(message), _integer(message, "episode")
        if message.get("source") == "rolled":
            obs, action = window_of(subject, 0, _integer(message, "step"), self._played(message, episode)[0])
        else:
            obs, action = window_of(subject, episode, _integer(message, "step"))
        return {"obs": obs.tolist(), "action": action.tolist()}

    def roll(self, message: Message) -> dict[str, Any]:
        """Plays an episode of the task; its steps, and what the task says of it."""
        data, row = self._played(message, _integer(message, "episode"))
        said = {name: value for name, value in row.items() if name != "episode" and value is not None}
        return {"steps": data.steps, "row": {name: _plain(value) for name, value in said.items()}}

    def landscape(self, message: Message) -> dict[str, Any]:
        """The landscape at an observation."""
        subject, obs = self._subject(message), _numbers(message, "obs")
        settings = self._view(message)
        held = None if message.get("held") is None else _numbers(message, "held")
        found = landscape(subject.policy, obs, **settings, held=held)
        return self._drawn(subject, found, obs, message) | {"python": landscape_lines(subject, obs, settings, held)}

    def search(self, message: Message) -> dict[str, Any]:
        """How candidates move at an observation, and where they end."""
        subject, obs = self._subject(message), _numbers(message, "obs")
        acting, seed = self._acting(message, subject.policy), _optional(message, "seed")
        moves = searching.search(subject.policy, obs, acting, seed)
        view = self._view({**message, "points": 64, "level": None, "minimised": False})
        ground = landscape(subject.policy, obs, **view, held=moves.states[-1, moves.chosen])
        found = drawn_moves(moves, ground)
        wanted = searching.standing(moves, ground).exact_excess
        base = float(ground.energies[np.isfinite(ground.energies)].min(initial=np.inf))
        return found | {
            "chart": str(_energy_chart(found, base + wanted).__html__()),
            "python": search_lines(subject, obs, self._base(message), _values(message), seed),
        }

    def certificate(self, message: Message) -> dict[str, Any]:
        """What the certificate says of the sampler as it is set."""
        acting = self._acting(message, self._subject(message).policy)
        return {"words": searching.certificate_words(acting)}

    def compare(self, message: Message) -> dict[str, Any]:
        """Two policies at an observation."""
        subject, other, obs = self._subject(message), self._subject(message, "other"), _numbers(message, "obs")
        view = self._view(message)
        found = compare(subject.policy, other.policy, obs, view["axes"], view["points"], view["directions"])
        second = self._drawn(subject, found.second, obs, message)
        return {
            "first": self._drawn(subject, found.first, obs, message),
            # Its cross is where the first policy's picture has it: their units may differ.
            "second": {**second, "held": found.other.tolist()},
            "difference": packed(found.difference),
            "distance": found.distance,
            "python": comparison_lines(subject, other, obs, view),
        }

    def densities(self, message: Message) -> dict[str, Any]:
        """log p(y|x) of what each of two policies chooses, under both: a row per action."""
        subject, other, obs = self._subject(message), self._subject(message, "other"), _numbers(message, "obs")
        check_alike(subject.policy, other.policy)
        policies = (subject.policy, other.policy)
        return {"rows": [log_densities(policies, obs, policy.act(obs)) for policy in policies]}

    def training(self, message: Message) -> dict[str, Any]:
        """Curves and checkpoints of the run, as the files have them now; one curve is drawn."""
        progress = self._progress(message)
        step, steps = progress.steps()
        curves = progress.curves()
        name = message.get("curve")
        if name not in curves:
            name = "loss" if "loss" in curves else next(iter(curves), None)
        points = curves.get(name, []) if name else []
        title = (name or "curve").replace("_", " ")
        line = Series(title, [at for at, _ in points], [value for _, value in points])
        return {
            "curves": list(curves),
            "curve": name,
            "chart": str(Chart(title[:1].upper() + title[1:], [line], size=SMALL).__html__()),
            "checkpoints": progress.checkpoints(),
            "step": step,
            "steps": steps,
        }

    def moment(self, message: Message) -> dict[str, Any]:
        """The landscape of a checkpoint at an observation."""
        subject, obs = self._subject(message), _numbers(message, "obs")
        policy = self._progress(message).policy_at(_integer(message, "step"))
        found = landscape(policy, obs, **self._view(message))
        names = self._names(subject, message)
        return drawn_landscape(policy, found, obs, names, marks_of(subject, obs))

    def leaf(self, message: Message) -> dict[str, Any]:
        """The present view as a page that stands alone."""
        subject, obs = self._subject(message), _numbers(message, "obs")
        view, seed = self._view(message), _optional(message, "seed")
        acting = self._acting(message, subject.policy)
        lines = landscape_lines(subject, obs, view, None)
        lines += "\n\n" + search_lines(subject, obs, self._base(message), _values(message), seed)
        palette = message.get("palette", "viridis")
        if palette not in ("viridis", "cividis"):
            raise ValueError(f"palette must be viridis or cividis, got {palette!r}"[:200])
        return {"html": view_page(subject, obs, acting, seed, lines, palette, **view)}

    def _described(self, subject: Subject) -> dict[str, Any]:
        policy, data = subject.policy, subject.demonstrations
        ends = [] if data is None else np.diff(data.episode_ends, prepend=0).tolist()
        return {
            "name": subject.name,
            "energy": type(policy.energy).__name__,
            "acting": type(policy.acting).__name__,
            "task": None if subject.task is None else subject.task.name,
            "history": policy.history,
            "horizon": policy.horizon,
            "frame": policy.columns[0],
            "act": policy.columns[1],
            "coordinates": coordinates_of(subject),
            "principal": data is not None and policy.act_box.dim > 2,
            "rolls": subject.task is not None,
            "levels": list(policy.energy.levels),
            "columns": [asdict(column) for column in columns_of(subject)],
            "sketch": sketch_of(subject),
            "obs": first_window(subject).tolist(),
            "episodes": ends,
            "running": subject.progress is not None,
            "comparable": [i for i, other in enumerate(self.subjects) if _alike(policy, other.policy)],
            "ways": self._ways(policy.acting),
        }

    def _ways(self, own: Acting) -> dict[str, list[dict[str, Any]]]:
        """The ways to search that the page offers, each with its settings."""
        ways = {"own": own, **searching.formulations()}
        return {name: [asdict(control) for control in controls_of(way)] for name, way in ways.items()}

    def _drawn(self, subject: Subject, found: Landscape, obs: np.ndarray, message: Message) -> dict[str, Any]:
        marks = [] if message.get("other") is not None else marks_of(subject, obs)
        if message.get("demonstrated") is not None:
            marks.append(("demonstrated", _numbers(message, "demonstrated").tolist(), 0.0))
        return drawn_landscape(subject.policy, found, obs, self._names(subject, message), marks)

    def _names(self, subject: Subject, message: Message) -> list[str]:
        view = self._view(message)
        if view["directions"] is not None:
            return [f"principal direction {i + 1}" for i in range(len(view["directions"]))]
        names = coordinates_of(subject)
        return [names[axis] for axis in view["axes"] if axis < len(names)]

    def _played(self, message: Message, seed: int) -> tuple[Demonstrations, dict[str, Value]]:
        """A roll-out, played once."""
        if not 0 <= seed < 2**31:
            raise ValueError(f"episode must be between 0 and 2^31, got {seed}"[:200])
        subject = self._subject(message)
        key = (self.subjects.index(subject), seed)
        if key not in self._rolled:
            played = rolled(subject, seed)
            while len(self._rolled) >= KEPT:
                self._rolled.pop(next(iter(self._rolled)))
            self._rolled[key] = played
        return self._rolled[key]

    def _directions(self, message: Message) -> np.ndarray:
        subject = self._subject(message)
        index = self.subjects.index(subject)
        if index not in self._principal:
            self._principal[index] = principal(subject)
        return self._principal[index]

    def _subject(self, message: Message, name: str = "subject") -> Subject:
        index = _integer(message, name) if name in message else 0
        if not 0 <= index < len(self.subjects):
            raise ValueError(f"{name} must be between 0 and {len(self.subjects) - 1}, got {index}")
        return self.subjects[index]

    def _progress(self, message: Message) -> Progress:
        subject = self._subject(message)
        if subject.progress is None:
            raise ValueError(f"{subject.name} is no run directory, so there is no training to follow")
        return subject.progress

    def _base(self, message: Message) -> str:
        name = message.get("way", "own")
        if name not in ("own", *searching.formulations()):
            raise ValueError(f"way must be own, {', '.join(searching.formulations())}, got {name!r}")
        return name

    def _acting(self, message: Message, policy: EnergyPolicy) -> Acting:
        base = {"own": policy.acting, **searching.formulations()}[self._base(message)]
        return with_values(base, _values(message))

    def _view(self, message: Message) -> dict[str, Any]:
        axes = message.get("axes", [0, 1])
        if not isinstance(axes, list) or not all(type(axis) is int for axis in axes):
            raise ValueError(f"axes must be a list of whole numbers, got {axes!r}")
        points = _integer(message, "points") if "points" in message else 96
        if not 2 <= points <= POINTS:
            raise ValueError(f"points must be between 2 and {POINTS}, got {points}")
        level = message.get("level")
        if level is not None and (isinstance(level, bool) or not isinstance(level, int | float)):
            raise ValueError(f"level must be a number, got {level!r}")
        minimised = message.get("minimised", False)
        if not isinstance(minimised, bool):
            raise ValueError(f"minimised must be true or false, got {minimised!r}"[:200])
        directions = self._directions(message)[: max(1, len(axes))] if message.get("principal") is True else None
        return {
            "axes": tuple(axes),
            "points": points,
            "level": None if level is None else float(level),
            "minimised": minimised,
            "directions": directions,
        }


def _energy_chart(moves: Mapping[str, Any], wanted: float) -> Chart:
    """Energies over the steps of a search, with what draws of the density would have."""
    steps = moves["steps"]
    series = [
        Series("mean", steps, [np.nan if value is None else value for value in moves["mean"]], VERMILLION),
        Series("lowest", steps, [np.nan if value is None else value for value in moves["lowest"]], dash=DASHED),
    ]
    if np.isfinite(wanted):
        series.append(Series("mean of draws of the density", [steps[0], steps[-1]], [wanted, wanted], GREY, "2 3"))
    return Chart("Energy of the candidates", series, x_label="sampler step", size=SMALL)


def _plain(value: Value) -> Value:
    """The same values without numpy's types."""
    return value.item() if isinstance(value, np.generic) else value


def _alike(first: EnergyPolicy, second: EnergyPolicy) -> bool:
    try:
        check_alike(first, second)
    except ValueError:
        return False
    return True


def _values(message: Message) -> dict[str, Any]:
    values = message.get("values") or {}
    if not isinstance(values, dict):
        raise ValueError(f"values must be an object, got a {type(values).__name__}")
    return values


def _integer(message: Message, name: str) -> int:
    value = message.get(name)
    if type(value) is not int:
        raise ValueError(f"{name} must be a whole number, got {value!r}"[:200])
    return value


def _optional(message: Message, name: str) -> int | None:
    if message.get(name) is None:
        return None
    value = _integer(message, name)
    if not 0 <= value < 2**63:
        raise ValueError(f"{name} must be at least 0 and below 2^63, got {value}"[:200])
    return value


def _numbers(message: Message, name: str) -> np.ndarray:
    values = message.get(name)
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise ValueError(f"{name} must be a list of numbers")
    try:
        return np.array(values, np.float64)
    except OverflowError as error:
        raise ValueError(f"{name} has a number that is too large") from error
