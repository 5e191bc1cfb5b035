"""The worker: takes whatever is queued as one batch, acts, and hands the rows back. A thread of its own, so that a
watchdog can replace it where the policy hangs. Clients are the business of another process (`front`).
"""

import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import inf
from time import perf_counter
from typing import Any

import numpy as np
import torch

from cebm.chunks import KNOWN
from cebm.decisions import Abstention
from cebm.serving.draws import CannotSplit, DrawnDirectly, drawing_by_client
from cebm.serving.effort import Effort, milliseconds
from cebm.serving.metrics import log
from cebm.serving.protocol import Refused, new_id
from cebm.serving.requests import Limits
from cebm.spaces import Part, Specification

Answer = dict[str, np.ndarray]
BROKEN = "too many workers hang: the server cannot act now"


@dataclass(eq=False)
class Work:
    """One request that waits for the worker."""

    number: int
    """The front's, by which it knows who asked."""
    call: str
    """'act' or 'propose'."""
    inputs: np.ndarray
    """[rows, obs_dim]."""
    known: dict[str, np.ndarray]
    """What the policy is told of the episode, by its own words: `previous` [rows, act_dim], where the search starts;
    for one under constraints `last` [rows, action], what was played last, and `plan` [rows, act_dim]."""
    seed: int | None
    """Of its random numbers; None: those that the policy takes without a generator, the same for every row. Such
    a request is a call by itself."""
    arrived: float
    """By `perf_counter`, which is the same in both processes."""
    weight: float
    """Its rows, times how much larger its effort is than the policy's own."""
    asked: int | None
    """Candidates that it asks for."""
    steps: int | None
    """Steps that it asks for."""
    budget_ms: float | None
    """Time that the search may take."""
    deadline_ms: float | None
    """Time from its arrival after which the answer is of no use."""
    gone: bool = False
    """Nobody waits for it any more."""
    candidates: int | None = None
    """What the request asks for, or what fits its time."""
    like: tuple = ()
    """The same for all requests that may share a call."""

    def __post_init__(self) -> None:
        self.candidates = self.asked
        self.like = (self.call, self.asked, self.steps, self.budget_ms, *sorted(self.known))

    @property
    def left_ms(self) -> float:
        """Time until the answer is of no use."""
        if self.deadline_ms is None:
            return inf
        return self.deadline_ms - (perf_counter() - self.arrived) * 1e3


@dataclass(eq=False)
class Served:
    """A policy with what the server has to know of it."""

    policy: Any
    """Has `act` and a `specification`; perhaps `propose`."""
    spec: Specification
    """What one observation and one action are."""
    takes: frozenset[str]
    """Keywords that its `act` takes."""
    effort: Effort
    """How long it takes."""
    device: torch.device
    """Where it acts."""
    name: str
    """Where it comes from, for logs and clients."""
    alone: bool = False
    """Whether each request is a call by itself: of a policy under constraints, whose `act` names a `plan`. It searches
    longer where one row of its batch needs it, so that the others' answers would depend on that row."""
    direct: bool = False
    """Whether a piece of it draws with torch's own functions, which a batch found out."""

    @classmethod
    def of(cls, policy: Any, name: str) -> "Served":
        """Looks at a policy and times it; a ValueError where it cannot be served."""
        if not callable(getattr(policy, "act", None)):
            raise ValueError(f"policy: a {type(policy).__name__} has no act()")
        spec = getattr(policy, "specification", None)
        if not isinstance(spec, Specification):
            raise ValueError(f"policy: a {type(policy).__name__} has no `specification`, so its sizes are not known")
        spec = _wire(policy, spec)
        if "cebm" in [part.name for part in spec.parts]:
            raise ValueError("policy: a part of the observation is called cebm, the server's own word")
        known = inspect.signature(policy.act).parameters
        anything = any(each.kind is each.VAR_KEYWORD for each in known.values())
        names = ("candidates", "steps", *KNOWN, "generator")
        takes = frozenset(name for name in names if anything or name in known)
        device = torch.device(getattr(policy, "device", "cpu"))
        candidates = getattr(getattr(policy, "acting", None), "candidates", None) if "candidates" in takes else None
        steps = getattr(getattr(getattr(policy, "acting", None), "sampler", None), "steps", None)
        middle = getattr(getattr(policy, "units", None), "middle", torch.zeros(spec.obs_dim)).cpu().double().numpy()

        def timed(rows: int, count: int | None) -> float:
            effort = {} if count is None else {"candidates": count}

            def act() -> None:
                with suppress(Abstention):  # takes its time, too
                    policy.act(np.repeat(middle[None], rows, 0), **effort)

            return milliseconds(act)

        return cls(policy, spec, takes, Effort(candidates, steps, timed), device, name, alone="plan" in known)

    def answers(self, batch: Sequence[Work]) -> list[Answer]:
        """The batch's answers, in order. All works ask for the same call and effort."""
        first = batch[0]
        obs = np.concatenate([work.inputs for work in batch])
        wishes: dict[str, Any] = {"candidates": first.candidates, "steps": first.steps}
        wishes |= {name: np.concatenate([work.known[name] for work in batch]) for name in first.known}
        wishes = {name: value for name, value in wishes.items() if value is not None}
        refused = [name for name in wishes if name not in self.takes]
        if refused:
            raise ValueError(f"the policy does not take {', '.join(refused)}")
        rows = [len(work.inputs) for work in batch]
        try:
            with ExitStack() as stack:
                if first.seed is not None and "generator" in self.takes:
                    seeds = [work.seed for work in batch if work.seed is not None]
                    draws = drawing_by_client(seeds, rows, self.device, self.direct)
                    wishes["generator"] = stack.enter_context(draws)
                found = self._acted(obs, first.call, wishes)
        except DrawnDirectly:
            self.direct = True
            return self.answers(batch)
        bounds = pairwise(accumulate(rows, initial=0))
        return [{name: values[begin:end] for name, values in found.items()} for begin, end in bounds]

    def _acted(self, obs: np.ndarray, call: str, wishes: dict[str, Any]) -> Answer:
        if call == "propose":
            found = self.policy.propose(obs, **wishes)
            names = ("score", "candidates", "energies")
            answer = {"actions": found.action, **{name: getattr(found, name) for name in names}}
        else:
            answer = {"actions": self.policy.act(obs, **wishes)}
        arrays = {name: _array(value) for name, value in answer.items()}
        actions = arrays["actions"]
        if actions.shape != (len(obs), self.spec.act_dim) or not np.isfinite(actions).all():
            raise TypeError(f"the policy gave {actions.shape} for {len(obs)} observations, or NaN or infinity")
        return arrays


def _wire(policy: Any, spec: Specification) -> Specification:
    """What clients send and get: raw observations and actions, which the policy converts to what its energy sees."""
    columns, parts = getattr(policy, "columns", None), tuple(getattr(policy, "parts", ()))
    if columns is None:
        return spec
    if sum(part.size for part in parts) != columns[0]:
        parts = (Part("obs", (columns[0],)),)
    return replace(spec, parts=parts, action=columns[1])


def _array(values: Any) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


@dataclass(eq=False)
class Worker:
    """One thread that acts, and what it is doing."""

    thread: threading.Thread | None = None
    batch: list[Work] = field(default_factory=list)
    began: float = 0.0
    replaced: bool = False


class Engine:
    """The queue, the worker and its watchdog."""

    def __init__(self, served: Served, limits: Limits, tell: Callable[..., None]) -> None:
        """`tell(kind, …)` sends a message to the front."""
        self.served, self.limits, self._tell = served, limits, tell
        self._works: dict[int, Work] = {}
        self._queue: deque[Work] = deque()
        self._waiting = 0
        self._wake = threading.Condition()
        self._stopped = False
        self._hung: list[Worker] = []
        self._worker = self._started()

    @property
    def broken(self) -> bool:
        """Whether so many workers hang that no further one is started."""
        return self._worker.replaced

    @property
    def waiting(self) -> int:
        """Observations in the queue."""
        return self._waiting

    @property
    def under_way(self) -> int:
        """Requests without an answer."""
        return len(self._works)

    def submit(self, works: Sequence[Work]) -> None:
        """Queues requests; those that cannot be are answered at once."""
        refused: list[tuple[Work, Any]] = []
        with self._wake:
            for work in works:
                rows = len(work.inputs)
                if self.broken:
                    refused.append((work, Refused("no-worker", BROKEN)))
                elif self._waiting + rows > self.limits.queue:
                    refused.append((work, Refused("busy", f"{self._waiting} observations wait already")))
                else:
                    self._works[work.number] = work
                    self._queue.append(work)
                    self._waiting += rows
            self._wake.notify()
        if refused:
            self._give(refused)

    def forget(self, number: int) -> None:
        """Nobody waits for this request any more."""
        work = self._works.pop(number, None)
        if work is not None:
            work.gone = True

    def look(self) -> None:
        """Replaces a worker that hangs. To be called once in a while."""
        worker, limit = self._worker, self.limits.hang_s
        self._hung = [each for each in self._hung if each.thread is not None and each.thread.is_alive()]
        batch = worker.batch
        if batch and not worker.replaced and perf_counter() - worker.began > limit:
            worker.replaced = True
            self._hung.append(worker)
            self._tell("event", "worker_replaced")
            log(logging.ERROR, "the policy hangs: its worker is replaced", requests=len(batch), hung=len(self._hung))
            self._give([(work, Refused("policy-hung", f"the policy took more than {limit:g} s")) for work in batch])
        if worker.replaced and len(self._hung) < self.limits.hung:
            self._worker = self._started()
        elif worker.replaced:
            with self._wake:
                lost, self._waiting = list(self._queue), 0
                self._queue.clear()
            self._give([(work, Refused("no-worker", BROKEN)) for work in lost])

    def stop(self) -> None:
        """The worker ends after the batch that it is at; one that hangs is left alone."""
        with self._wake:
            self._stopped = True
            self._wake.notify_all()
        if self._worker.thread is not None and not self._worker.replaced:
            self._worker.thread.join(self.limits.grace_s)

    def _started(self) -> Worker:
        worker = Worker()
        worker.thread = threading.Thread(target=self._work, args=(worker,), name="cebm-worker", daemon=True)
        worker.thread.start()
        return worker

    def _give(self, results: Sequence[tuple[Work, Any]], timed: dict[str, float] | None = None) -> None:
        """Answers, or the reasons why there are none, to the front."""
        rows: list[tuple[int, Answer | None, tuple | None]] = []
        for work, result in results:
            self._works.pop(work.number, None)
            refused = isinstance(result, Refused)
            error = (result.kind, str(result), result.id) if refused else None
            rows.append((work.number, None if refused else result, error))
        if rows:
            self._tell("answers", rows, timed or {})

    # ------------------------------------------------------------------------------------ in the worker's thread

    def _work(self, worker: Worker) -> None:
        while not worker.replaced:
            batch = self._taken()
            if batch is None:
                return
            worker.began = perf_counter()
            worker.batch = batch
            while batch and not worker.replaced:
                group = _first_group(batch, self.served)
                try:
                    self._act(worker, group)
                except Exception as error:  # a fault of ours: the worker goes on
                    log(logging.ERROR, "the worker failed", error, requests=len(group))
                    self._hand(worker, [(work, Refused("internal", "a fault of the server")) for work in group])
                batch = [] if len(group) == len(batch) else [work for work in batch if work not in group]
            worker.batch = []

    def _taken(self) -> list[Work] | None:
        """Whatever is queued, up to the limit of a batch; None when the engine stops."""
        with self._wake:
            while not self._queue:
                if self._stopped:
                    return None
                self._wake.wait()
            batch: list[Work] = []
            rows = 0
            weight = 0.0
            while self._queue and (not batch or weight + self._queue[0].weight <= self.limits.batch):
                work = self._queue.popleft()
                weight += work.weight
                rows += len(work.inputs)
                if not work.gone:
                    batch.append(work)
            self._waiting -= rows
        return batch

    def _act(self, worker: Worker, group: list[Work]) -> None:
        """Acts for works of one call and effort, and hands the answers over."""
        group, late = _in_time(group, self.served.effort)
        if late:
            self._hand(
                worker, [(work, Refused("deadline", "the time left is too short for any effort")) for work in late]
            )
        if not group:
            return
        served = self.served  # one policy for the whole group, also while it is reloaded
        worker.began = perf_counter()
        try:
            found = served.answers(group)
        except Exception as error:  # whatever the user's policy raises
            if len(group) > 1:  # one client's observation must not fail the others'
                log(logging.WARNING, "a batch failed, its halves are tried", requests=len(group), reason=str(error))
                size = 1 if isinstance(error, CannotSplit) else (len(group) + 1) // 2
                for start in range(0, len(group), size):
                    self._act(worker, group[start : start + size])
                return
            self._hand(worker, [(group[0], _refusal(error))])
            return
        took = perf_counter() - worker.began
        rows = sum(len(work.inputs) for work in group)
        served.effort.measured(took * 1e3, rows, group[0].candidates, group[0].steps)
        self._hand(worker, list(zip(group, found, strict=True)), {"infer_ms": took * 1e3, "batch": rows})

    def _hand(self, worker: Worker, results: Sequence[tuple[Work, Any]], timed: dict[str, float] | None = None) -> None:
        """To the front, unless the worker was replaced: those requests have their answer."""
        if not worker.replaced:
            self._give(results, timed)


def _refusal(error: Exception) -> Refused:
    """What a client learns about an error of the policy: its message only where the policy refuses a value or asks."""
    if isinstance(error, Abstention):
        return Refused("abstained", str(error))
    if type(error) is ValueError:
        return Refused("policy-refused", str(error))
    refusal = Refused("policy-failed", f"the policy raised {type(error).__name__}")
    refusal.id = new_id()
    log(logging.ERROR, "the policy failed", error, kind=refusal.kind, id=refusal.id)
    return refusal


def _first_group(batch: Sequence[Work], served: Served) -> list[Work]:
    """The works that share the next call: those in a hurry, whose time does not allow the whole batch at full effort,
    go first, with those like them."""
    whole = served.effort.expected(sum(len(work.inputs) for work in batch))
    found: dict[tuple, list[Work]] = {}
    for work in batch:
        hurried = work.budget_ms is not None or (work.deadline_ms is not None and work.left_ms * 0.8 < whole)
        alone = served.alone or work.seed is None
        found.setdefault((hurried, work.like, id(work) if alone else 0), []).append(work)
    if len(found) == 1:
        return list(batch)
    return min(found.values(), key=lambda group: min(work.left_ms for work in group))


def _in_time(group: list[Work], effort: Effort) -> tuple[list[Work], list[Work]]:
    """The works that can be answered in time, with the candidates that fit it; and those that cannot even alone."""
    steps = group[0].steps
    waiting: list[Work] = []
    late: list[Work] = []
    least = group[0].budget_ms or inf
    for work in group:
        if work.gone:
            continue
        if work.deadline_ms is not None:
            left = work.left_ms
            if effort.fitting(left, len(work.inputs), steps) == 0:
                late.append(work)
                continue
            least = min(least, left)
        waiting.append(work)
    if effort.candidates is None or least == inf or not waiting:
        return waiting, late
    most = effort.fitting(least, sum(len(work.inputs) for work in waiting), steps)
    if most is not None:
        for work in waiting:
            wanted = most if work.budget_ms is not None else work.asked or effort.candidates
            work.candidates = max(1, min(most, wanted))
    return waiting, late
