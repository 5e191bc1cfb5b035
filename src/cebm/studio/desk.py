"""Answers the page's questions: plain data in, plain data out, by way of the panels. It knows no HTTP.

Arrays go out as {"shape": …, "f32": base64 of little-endian float32}, which holds infinity and NaN too.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

import numpy as np

from cebm.acting import Acting
from cebm.policy import EnergyPolicy
from cebm.studio import search as searching
from cebm.studio.comparison import check_alike, compare
from cebm.studio.controls import controls_of, with_values
from cebm.studio.landscape import Landscape, landscape
from cebm.studio.lines import comparison_lines, landscape_lines, search_lines
from cebm.studio.observation import columns_of, coordinates_of, first_window, sketch_of, window_of
from cebm.studio.subject import Subject
from cebm.studio.training import Progress

DOTS = 500
"""Candidates that are sent to the page, at most; numbers are of all of them."""
POINTS = 128
"""Points along a side of a landscape that the page may ask for."""
Message = Mapping[str, Any]


class Desk:
    """One method per question, each from a message to an answer. A ValueError says what is wrong with a message."""

    slow = ("certificate", "training", "moment")
    """Questions that may take seconds; the others must not wait for them."""

    def __init__(self, subjects: Sequence[Subject]) -> None:
        if not subjects:
            raise ValueError("the studio needs at least one policy")
        self.subjects = list(subjects)
        self.questions: dict[str, Callable[[Message], dict[str, Any]]] = {
            "hello": self.hello,
            "observation": self.observation,
            "landscape": self.landscape,
            "search": self.search,
            "certificate": self.certificate,
            "compare": self.compare,
            "training": self.training,
            "moment": self.moment,
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
        """The observation at a step of an episode, with the demonstrated action."""
        subject = self._subject(message)
        obs, action = window_of(subject, _integer(message, "episode"), _integer(message, "step"))
        inside = subject.policy.problem(obs, previous=action[None]).previous
        place = [] if inside is None else inside[0].double().cpu().tolist()
        return {"obs": obs.tolist(), "action": action.tolist(), "inside": place}

    def landscape(self, message: Message) -> dict[str, Any]:
        """The landscape at an observation."""
        subject, obs = self._subject(message), _numbers(message, "obs")
        settings = self._view(message)
        held = None if message.get("held") is None else _numbers(message, "held")
        found = landscape(subject.policy, obs, **settings, held=held)
        return _drawn(found) | {"python": landscape_lines(subject, obs, settings, held)}

    def search(self, message: Message) -> dict[str, Any]:
        """How candidates move at an observation, and where they end."""
        subject, obs = self._subject(message), _numbers(message, "obs")
        acting, seed = self._acting(message, subject.policy), _optional(message, "seed")
        moves = searching.search(subject.policy, obs, acting, seed)
        ground = landscape(
            subject.policy, obs, **self._view({**message, "points": 64}), held=moves.states[-1, moves.chosen]
        )
        places = searching.standing(moves, ground)
        inside = np.stack([moves.states[:, :DOTS, axis] for axis in ground.axes], -1)
        return {
            "steps": moves.steps,
            "states": packed(inside),
            "candidates": moves.states.shape[1],
            "energies": packed(moves.energies[:, :DOTS]),
            "mean": _finite([_mean(each) for each in moves.energies]),
            "lowest": _finite(moves.energies.min(1).tolist()),
            "gradients": _finite(moves.gradients.tolist()),
            "changed": _finite(moves.changed.tolist()),
            "spread": _finite(moves.spread.tolist()),
            "chosen": moves.chosen,
            "action": moves.action.tolist(),
            "edges": places.edges.tolist(),
            "shares": self._shares(moves, ground),
            "exact": [packed(each) for each in places.exact],
            "words": places.words,
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
        found = compare(subject.policy, other.policy, obs, view["axes"], view["points"])
        return {
            "first": _drawn(found.first),
            "second": _drawn(found.second),
            "difference": packed(found.difference),
            "distance": found.distance,
            "python": comparison_lines(subject, other, obs, view),
        }

    def training(self, message: Message) -> dict[str, Any]:
        """Curves and checkpoints of the run, as the files have them now."""
        progress = self._progress(message)
        step, steps = progress.steps()
        return {"curves": progress.curves(), "checkpoints": progress.checkpoints(), "step": step, "steps": steps}

    def moment(self, message: Message) -> dict[str, Any]:
        """The landscape of a checkpoint at an observation."""
        policy = self._progress(message).policy_at(_integer(message, "step"))
        return _drawn(landscape(policy, _numbers(message, "obs"), **self._view(message)))

    def _described(self, subject: Subject) -> dict[str, Any]:
        policy, data = subject.policy, subject.demonstrations
        ends = [] if data is None else np.diff(data.episode_ends, prepend=0).tolist()
        box = policy.act_box
        plain = policy.units.conversion.plain
        bounds = (box.centre - box.limit * box.scale, box.centre + box.limit * box.scale)
        return {
            "name": subject.name,
            "energy": type(policy.energy).__name__,
            "acting": type(policy.acting).__name__,
            "task": None if subject.task is None else subject.task.name,
            "history": policy.history,
            "horizon": policy.horizon,
            "frame": policy.columns[0],
            "act": policy.columns[1],
            "limit": box.limit,
            "coordinates": coordinates_of(subject),
            "bounds": [bound.double().cpu().tolist() for bound in bounds] if plain else None,
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

    def _shares(self, moves: searching.Moves, ground: Landscape) -> list[dict[str, Any]]:
        """Histograms of every frame: per axis [frames, bins]."""
        frames = [searching.standing(moves, ground, frame).shares for frame in range(len(moves.steps))]
        return [packed(np.stack([each[axis] for each in frames])) for axis in range(len(ground.axes))]

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
        return {"axes": tuple(axes), "points": points, "level": level}


def packed(values: np.ndarray) -> dict[str, Any]:
    """An array as the page reads it."""
    array = np.ascontiguousarray(values, dtype="<f4")
    return {"shape": list(array.shape), "f32": base64.b64encode(array.tobytes()).decode("ascii")}


def _drawn(found: Landscape) -> dict[str, Any]:
    return {
        "axes": list(found.axes),
        "places": [float(found.places[0]), float(found.places[-1])],
        "energies": packed(found.energies),
        "density": packed(found.density) if len(found.axes) == 1 else None,
        "held": found.held.tolist(),
        "energy": found.energy if isfinite(found.energy) else None,
        "action": found.action.tolist(),
        "whole": found.whole,
    }


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


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if isfinite(value) else None for value in values]
