"""One request: what a client's map means for a policy of this specification, and what a client's session adds."""

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np

from cebm.chunks import KNOWN, remaining
from cebm.parts import Part, Specification, parts_to_json
from cebm.serving.protocol import Refused, quoted

ONE_HOUR_MS = 3_600_000.0


@dataclass(frozen=True)
class Limits:
    """What one client, and all of them together, may ask for."""

    frame: int = 2**20
    """Bytes of a request."""
    connections: int = 128
    """Clients at a time."""
    queue: int = 1024
    """Observations that wait for the worker."""
    rows: int = 256
    """Observations of one request; with twice the policy's own candidates, one counts as two."""
    batch: int = 32
    """Observations of several requests that are computed together, counted likewise. The answers to one batch are sent
    while the next is computed: a batch of all that wait would leave the two processes waiting for each other."""
    effort: int = 16
    """Candidates and steps of a request, as a multiple of the policy's own; at least 1,024 candidates are allowed."""
    rate: float = 2000.0
    """Requests per second and client, on average."""
    strikes: int = 16
    """Bad requests in a row after which a client is disconnected."""
    idle_s: float = 600.0
    """A client that asks nothing for so long is disconnected."""
    open_s: float = 5.0
    """Time for a client's opening handshake."""
    send_s: float = 5.0
    """Time for a client to read a reply."""
    hang_s: float = 10.0
    """A policy that takes longer for one batch hangs: its worker is replaced."""
    hung: int = 4
    """Workers that may hang at a time; the server refuses requests while there are so many."""
    grace_s: float = 10.0
    """Time for the requests under way when the server shuts down."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {value}")


@dataclass(frozen=True)
class Request:
    """What a client asks for, checked."""

    call: str
    """'act', 'propose' or 'reset'."""
    obs: np.ndarray
    """[rows, obs_dim] whole inputs, or [rows, frame] newest observations; empty for 'reset'."""
    single: bool
    """One observation without a batch axis."""
    whole: bool
    """Whether `obs` has the history in it."""
    number: int | None = None
    """The client's own number of this request."""
    seed: int | None = None
    """Of this request's random numbers; None: the session decides."""
    drawn: bool = True
    """Whether to draw at all; False: the same call gives the same action."""
    candidates: int | None = None
    """As `policy.act` takes it."""
    steps: int | None = None
    """As `policy.act` takes it."""
    budget_ms: float | None = None
    """Time that the search may take."""
    deadline_ms: float | None = None
    """Time from the request's arrival after which the answer is of no use."""
    known: dict[str, np.ndarray] = field(default_factory=dict)
    """What the client itself tells of the episode: `previous` and `plan` [rows, act_dim], `last` [rows, action]."""
    played: int | None = None
    """Actions of the last chunk that were played: the search starts at the rest of it, or stays near it."""
    history: np.ndarray | None = None
    """[observations, rows, frame]: what a session is to remember, after a reconnection."""
    weight: float = 1.0
    """Its rows, times how much larger its effort is than the policy's own."""


class Reader:
    """Reads the requests for a policy of one specification."""

    def __init__(self, spec: Specification, limits: Limits, candidates: int | None, steps: int | None) -> None:
        self.spec, self.limits = spec, limits
        self.frame, self.wide = spec.frame, spec.obs_dim
        """Columns of one observation, and of one with its history."""
        self.own = {"candidates": candidates or 1, "steps": steps or 1}
        self.most = {
            "candidates": max(1024, limits.effort * (candidates or 1)),
            "steps": max(16, limits.effort * (steps or 1)),
        }

    def request(self, values: Any) -> Request:
        """The request in a client's map."""
        if not isinstance(values, dict):
            raise Refused("bad-request", f"a request is a map, not a {type(values).__name__}")
        wishes = values.get("cebm", {})
        if not isinstance(wishes, dict):
            raise Refused("bad-request", f"cebm: the wishes are a map, not a {type(wishes).__name__}")
        options = self._options(wishes)
        call = options.pop("call", "act")
        if call == "reset":
            return Request("reset", np.empty((0, self.frame)), True, False, **options)
        parts = {name: value for name, value in values.items() if name != "cebm"}
        obs, single = self._whole(parts["obs"]) if "obs" in parts and len(parts) == 1 else self._frames(parts)
        if not 0 < len(obs) <= self.limits.rows:
            raise Refused("too-much-effort", f"a request has 1 to {self.limits.rows} observations, not {len(obs)}")
        whole = obs.shape[1] == self.wide
        rows = len(obs)
        weight = float(rows)
        for name, own in self.own.items():
            weight *= max(1.0, options.get(name, 0) / own)
        if weight > self.limits.rows and rows > 1:
            raise Refused(
                "too-much-effort", f"{rows} rows with this effort count as {weight:g}, {self.limits.rows} are allowed"
            )
        options["weight"] = weight
        options["known"] = known = {}
        for name in KNOWN:
            if name in wishes:
                last = numbers(wishes[name], name)
                wide = self.spec.action if name == "last" else self.spec.act_dim
                known[name] = self._shaped(last[None] if last.ndim == 1 else last, (rows, wide))
        if "history" in wishes:
            past = numbers(wishes["history"], "history")
            count = len(past) if past.ndim else 0
            if whole or not 0 < count < self.spec.history:
                raise Refused("bad-request", f"history: {count} observations do not fit this request")
            options["history"] = self._shaped(past, (count, rows, self.frame))
        if options.get("played") is not None and known:
            raise Refused("bad-request", f"give played or {', '.join(known)}, not both")
        return Request(call, obs, single, whole, **options)

    def _options(self, wishes: dict) -> dict[str, Any]:
        """The wishes that are plain numbers and words."""
        options: dict[str, Any] = {}
        for name, value in wishes.items():
            if name == "call":
                if not isinstance(value, str) or value not in ("act", "propose", "reset"):
                    raise Refused("bad-request", f"call must be act, propose or reset, got {quoted(value)}")
                options["call"] = value
            elif name == "seed":
                options["seed"], options["drawn"] = _whole(name, value, 0, 2**63 - 1, optional=True), value is not None
            elif name == "id":
                options["number"] = _whole(name, value, 0, 2**63 - 1)
            elif name in ("candidates", "steps"):
                options[name] = _whole(name, value, 1, self.most[name], kind="too-much-effort")
            elif name == "played":
                options[name] = _whole(name, value, 1, self.spec.horizon)
            elif name in ("deadline_ms", "budget_ms"):
                options[name] = _milliseconds(name, value)
            elif name not in (*KNOWN, "history"):
                raise Refused("bad-request", f"cebm: there is no wish {quoted(name)}")
        if {"candidates", "budget_ms"} <= options.keys():
            raise Refused("bad-request", "give candidates or budget_ms, not both")
        return options

    def _whole(self, value: Any) -> tuple[np.ndarray, bool]:
        """Flat observations, or inputs with their history: [columns] or [rows, columns]."""
        found = numbers(value, "obs")
        single = found.ndim == 1
        rows = found[None] if single else found
        if rows.ndim != 2 or rows.shape[1] not in (self.wide, self.frame):
            wide = f"{self.frame}"
            if self.spec.history > 1:
                wide += f" (one observation) or {self.wide} (with its history)"
            raise Refused("bad-observation", f"obs has shape {found.shape}, the last axis must be {wide}")
        return rows, single

    def _frames(self, parts: dict) -> tuple[np.ndarray, bool]:
        """The parts of an observation, each of its shape, or with the batch as first axis."""
        names = [part.name for part in self.spec.parts]
        unknown = [name for name in parts if name not in names]
        if unknown:
            raise Refused("bad-observation", f"there is no part {quoted(unknown[0])}; there are {', '.join(names)}")
        columns, single, rows = [], True, 1
        for i, part in enumerate(self.spec.parts):
            if part.name not in parts:
                raise Refused("bad-observation", f"part {part.name} is missing")
            found = numbers(parts[part.name], part.name)
            if i == 0:
                single = found.ndim == len(part.shape)
                rows = 1 if single or not found.ndim else len(found)
            wanted = part.shape if single else (rows, *part.shape)
            if found.shape != wanted:
                raise Refused("bad-observation", f"part {part.name} has shape {found.shape}, expected {wanted}")
            columns.append(found.reshape(rows, part.size))
        return np.concatenate(columns, 1), single

    @staticmethod
    def _shaped(found: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        if found.shape != shape:
            raise Refused("bad-request", f"an array has shape {found.shape}, expected {shape}")
        return found


def described(spec: Specification) -> dict[str, Any]:
    """The specification in plain words, which name no class: clients may be of another version."""
    return {"parts": parts_to_json(spec.parts), "action": spec.action, "history": spec.history, "horizon": spec.horizon}


def specified(described: Any) -> Specification:
    """The specification in a server's metadata; a ValueError where it is none."""
    try:
        given = [(str(part["name"]), part["shape"], part.get("columns", ())) for part in described["parts"]]
        parts = tuple(Part(name, tuple(map(int, shape)), tuple(map(str, columns))) for name, shape, columns in given)
        return Specification(parts, *(int(described[name]) for name in ("action", "history", "horizon")))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"no specification: {type(error).__name__}") from error


def numbers(value: Any, name: str) -> np.ndarray:
    """An array, a number or lists of numbers, as finite float64."""
    try:
        found = value if isinstance(value, np.ndarray) else np.array(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise Refused("bad-observation", f"{name} is no array of numbers") from error
    if found.dtype.kind not in "biuf":
        raise Refused("bad-observation", f"{name} is no array of numbers")
    found = found.astype(np.float64)
    if not np.isfinite(found).all():
        raise Refused("not-finite", f"{name} has NaN or infinite values")
    return found


def _whole(
    name: str, value: Any, least: int, most: int, optional: bool = False, kind: str = "bad-request"
) -> int | None:
    if optional and value is None:
        return None
    if type(value) is not int or value < least:
        raise Refused("bad-request", f"{name} must be a whole number of at least {least}")
    if value > most:
        raise Refused(kind, f"{name} must be at most {most}")
    return value


def _milliseconds(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not isfinite(value) or not 0 < value <= ONE_HOUR_MS:
        raise Refused("bad-request", f"{name} must be a number of milliseconds, above 0 and at most one hour")
    return float(value)


class Session:
    """What the server keeps of one client: its last observations, its last chunk, its seed."""

    def __init__(self, spec: Specification, seed: int) -> None:
        self.spec = spec
        self._random = random.Random(seed)
        self.forget()

    def forget(self) -> None:
        """Forgets all frames: new episodes begin."""
        self._seen: list[np.ndarray] = []
        self._chunk: np.ndarray | None = None

    def reset(self, seed: int | None) -> None:
        """New episodes begin, their random numbers from this seed where there is one."""
        if seed is not None:
            self._random = random.Random(seed)
        self.forget()

    def inputs(self, request: Request) -> np.ndarray:
        """[rows, obs_dim]: the request's observations with their history. `answered` remembers them."""
        if request.whole:
            return request.obs
        return np.concatenate(self._past(request), 1)

    def known(self, request: Request, takes: Collection[str]) -> dict[str, np.ndarray]:
        """What a policy that takes these arguments is told: what the request says, or what follows from `played`."""
        if request.played is None:
            return request.known
        if self._chunk is None or len(self._chunk) != len(request.obs):
            raise Refused("bad-request", "played: there is no last chunk of so many observations")
        actions = self._chunk.reshape(len(self._chunk), self.spec.horizon, self.spec.action)
        return remaining(actions, request.played, takes)

    def seed(self, request: Request) -> int | None:
        """Of the request's random numbers; None: those that the policy takes without a generator."""
        if not request.drawn:  # what `policy.act` draws without a generator; for several rows it does that itself
            return 0 if len(request.obs) == 1 else None
        if request.seed is not None:
            return request.seed
        return self._random.getrandbits(62)

    def answered(self, request: Request, actions: np.ndarray) -> None:
        """Remembers what was seen and given; a request that was refused leaves the session as it was."""
        if not request.whole:
            self._seen = self._past(request)
        self._chunk = actions

    def _past(self, request: Request) -> list[np.ndarray]:
        """The last observations, the current one last, the first repeated where there are fewer."""
        seen = self._seen if request.history is None else list(request.history)
        if seen and seen[0].shape != request.obs.shape:
            raise Refused(
                "bad-observation",
                f"obs has {len(request.obs)} rows, the episodes under way have {len(seen[0])}; reset first",
            )
        past = [*seen, request.obs]
        return ([past[0]] * (self.spec.history - len(past)) + past)[-self.spec.history :]
