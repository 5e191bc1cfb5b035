"""Plays chunks while the next one is computed, so that a control loop never waits for its policy."""

import inspect
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cebm.chunks import KNOWN, remaining
from cebm.named import flat_observation
from cebm.policy import Policy


@dataclass
class Played:
    """What an `AsynchronousRunner` did since it was made: changes are the largest of a column, averaged over rows."""

    seams: list[float] = field(default_factory=list)
    """Change of the action at each seam, where one chunk follows another."""
    within: list[float] = field(default_factory=list)
    """Change of the action at every other tick."""
    fresh: list[int] = field(default_factory=list)
    """Ticks at which a new chunk began."""
    held: int = 0
    """Ticks at which the chunk was over and no answer was there: its last action was held."""
    failed: int = 0
    """Answers that were errors; the chunk played on."""
    ticks: int = 0
    """All ticks."""


class AsynchronousRunner:
    """Steps a policy through a batch of episodes as a `Runner` does, but asks for the next chunk in a thread while this
    one plays. The answer to the observation of tick t that comes at tick t + d begins with its action d: the first d
    are for ticks that are over. A late or failed answer lets the chunk play on, and then hold its last action. Only the
    first chunk of an episode is waited for.

    `ask_after` actions of a chunk are played before the next one is asked for (by default half the horizon). `joined`
    tells the policy what will be left of this chunk, as `previous`, or as `plan` and `last` where it takes those: a
    search that starts there, or a term of closeness, makes the seam small. With `late_by` an answer is taken
    that many ticks after it was asked for, however long it took: so latency is measured without a clock.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        ask_after: int | None = None,
        joined: bool = False,
        late_by: int | None = None,
        generator: torch.Generator | None = None,
        **effort: Any,
    ) -> None:
        self.policy, self.joined, self.late_by = policy, joined, late_by
        self._history, self._horizon = getattr(policy, "history", 1), getattr(policy, "horizon", 1)
        self.ask_after = max(1, self._horizon // 2) if ask_after is None else ask_after
        if not 1 <= self.ask_after <= self._horizon:
            raise ValueError(f"ask_after must be between 1 and the policy's horizon {self._horizon}, got {ask_after}")
        if late_by is not None and late_by < 0:
            raise ValueError(f"late_by must be at least 0, got {late_by}")
        known = inspect.signature(policy.act).parameters
        unknown = [name for name in effort if name not in known]
        if unknown:
            raise ValueError(f"{type(policy).__name__}.act does not take {', '.join(unknown)}")
        self._takes = frozenset(getattr(policy, "takes", frozenset(known))).intersection(KNOWN)
        if joined and not self._takes:
            raise ValueError(f"joined: {type(policy).__name__}.act takes none of {', '.join(KNOWN)}")
        self._effort = effort if generator is None or "generator" not in known else {**effort, "generator": generator}
        self.played = Played()
        """What it did so far."""
        self._pool = ThreadPoolExecutor(1, "cebm-asynchronous")
        self._past: list[np.ndarray]
        self._chunk: np.ndarray | None
        self._asked: Future[np.ndarray] | None
        self._last: np.ndarray | None
        self._tick: int
        self._asked_at: int
        self._place: int
        self._count: int
        self._forget()

    def reset(self) -> None:
        """Forget: a new batch of episodes begins. An answer that is under way is thrown away."""
        self._forget()
        self.policy.reset()

    def close(self) -> None:
        """Ends the thread, after the answer that it waits for."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> "AsynchronousRunner":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def act(self, obs: Any) -> np.ndarray:
        """The next action of every episode [batch, act], or of one, for one observation [obs] or the dictionary of its
        parts."""
        obs = flat_observation(obs, getattr(self.policy, "parts", ()))
        seen = obs.detach().cpu().numpy().copy() if isinstance(obs, Tensor) else np.array(obs)
        single = seen.ndim == 1
        seen = seen[None] if single else seen
        if self._past and seen.shape != self._past[0].shape:
            raise ValueError(
                f"obs has shape {seen.shape}, the episodes under way have {self._past[0].shape}; reset first"
            )
        self._past = ([seen] * self._history if not self._past else [*self._past, seen])[-self._history :]
        fresh = self._arrived()
        if self._asked is None and (self._chunk is None or self._count >= self.ask_after):
            self._ask()
            fresh = self._arrived() or fresh
        action = self._playing()[:, min(self._place, self._horizon - 1)]
        self._note(action, fresh)
        return action[0].copy() if single else action.copy()

    def _playing(self) -> np.ndarray:
        """The chunk that plays; there is one as soon as the first answer has been waited for."""
        if self._chunk is None:
            raise RuntimeError("no chunk has been computed yet")
        return self._chunk

    def _forget(self) -> None:
        self._past, self._chunk, self._asked, self._last = [], None, None, None
        self._tick = self._asked_at = self._place = self._count = 0

    def _ask(self) -> None:
        """For the next chunk, in the thread."""
        told = {} if self._chunk is None or not self.joined else remaining(self._chunk, self._place, self._takes)
        window = np.concatenate(self._past, 1)

        def answer() -> np.ndarray:
            chunks = np.asarray(self.policy.act(window, **told, **self._effort))
            return chunks.reshape(len(window), self._horizon, -1)

        self._asked, self._asked_at = self._pool.submit(answer), self._tick

    def _arrived(self) -> bool:
        """Takes the answer if it is there, and waits for it where there is nothing to play; whether a chunk begins."""
        asked, over = self._asked, self._tick - self._asked_at
        if asked is None:
            return False
        there = asked.done() if self.late_by is None else over >= self.late_by
        if not there and self._chunk is not None:
            return False
        self._asked = None
        if asked.exception() is not None and self._chunk is not None:
            self.played.failed += 1
            return False
        self._chunk, self._place, self._count = asked.result(), over, 0
        return True

    def _note(self, action: np.ndarray, fresh: bool) -> None:
        """Counts the tick that is played now."""
        if self._last is not None:
            change = float(np.abs(action - self._last).max(1).mean())
            (self.played.seams if fresh else self.played.within).append(change)
            if fresh:
                self.played.fresh.append(self.played.ticks)
        self.played.held += self._place >= self._horizon
        self.played.ticks += 1
        self._last = action
        self._tick, self._place, self._count = self._tick + 1, self._place + 1, self._count + 1
