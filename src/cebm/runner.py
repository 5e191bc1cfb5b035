"""Steps a policy through episodes: a history of observations, chunks of actions, and what to do when a policy asks."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cebm.named import flat_observation
from cebm.policy import Policy


class Runner:
    """Steps a policy through a batch of episodes: remembers the last observations, plays out action chunks and,
    with `warm_start`, hands the last action (of a chunk: what was not played) back to the search. Not shared
    between threads; `reset` forgets. It is a policy itself, and takes any policy. A policy's method `check(obs)`,
    where it has one, refuses observations that come while a chunk is played. A policy whose `act` takes `last` or
    `plan` gets the last action that was played and what is left of the last chunk.

    With `fallback`, a policy that has a method `decide` may abstain: where it asks, `fallback(obs)` [rows, act] is
    played in place of its chunk, and `asked` remembers it. Without one, its exception comes through."""

    def __init__(
        self,
        policy: Policy,
        *,
        execute: int | None = None,
        warm_start: bool = False,
        fallback: Callable[[np.ndarray], Any] | None = None,
        generator: torch.Generator | None = None,
        **effort: Any,
    ) -> None:
        self.policy, self.warm_start, self.fallback = policy, warm_start, fallback
        self._history, self._horizon = getattr(policy, "history", 1), getattr(policy, "horizon", 1)
        self.execute = self._horizon if execute is None else execute
        if not 1 <= self.execute <= self._horizon:
            raise ValueError(f"execute must be between 1 and the policy's horizon {self._horizon}, got {execute}")
        known = inspect.signature(policy.act).parameters
        anything = any(each.kind is each.VAR_KEYWORD for each in known.values())
        unknown = [name for name in effort if name not in known and not anything]
        if warm_start and "previous" not in known and not anything:
            unknown.append("previous")
        if unknown:
            raise ValueError(f"{type(policy).__name__}.act does not take {', '.join(unknown)}")
        if fallback is not None and not callable(getattr(policy, "decide", None)):
            raise ValueError(f"fallback: {type(policy).__name__} has no method `decide`, so it never asks")
        self._remembers = tuple(name for name in ("last", "plan") if name in known)
        self.asked: list[list[np.ndarray]] = []
        """For every batch of episodes, and every step of it, in which episodes the policy asked [batch]."""
        self.effort = effort
        if generator is not None and ("generator" in known or anything):
            self.effort = {**effort, "generator": generator}
        self._forget()

    def reset(self) -> None:
        """Forget: a new batch of episodes begins."""
        self.policy.reset()
        self._forget()

    def _forget(self) -> None:
        self._seen: list[np.ndarray] = []
        self._chunk: list[np.ndarray] = []
        self._last: np.ndarray | None = None
        self._played: np.ndarray | None = None
        self._asks = np.zeros(0, np.bool_)
        if not self.asked or self.asked[-1]:
            self.asked.append([])

    def act(self, obs: Any) -> np.ndarray:
        """The next action of every episode [batch, act], or of one, for one observation [obs], or for the dictionary of
        its parts where the policy knows them. An observation that is refused leaves the runner as it was."""
        parts = getattr(self.policy, "parts", None)
        obs = obs if parts is None else flat_observation(obs, parts)
        # A copy: environments may write the next observation into the same array.
        seen = obs.detach().cpu().numpy().copy() if isinstance(obs, Tensor) else np.array(obs)
        single = seen.ndim == 1
        seen = seen[None] if single else seen
        if seen.ndim != 2:
            raise ValueError(f"obs must be [obs] or [batch, obs], got {np.shape(obs)}")
        if self._seen and seen.shape != self._seen[0].shape:
            raise ValueError(
                f"obs has shape {seen.shape}, the episodes under way have {self._seen[0].shape}; reset first"
            )
        if seen.dtype.kind == "f" and not np.isfinite(seen).all():
            row, column = np.argwhere(~np.isfinite(seen))[0]
            raise ValueError(f"obs has NaN or infinite values: row {row}, dimension {column}")
        past = ([seen] * self._history if not self._seen else [*self._seen, seen])[-self._history :]
        if self._chunk and hasattr(self.policy, "check"):
            self.policy.check(np.concatenate(past, 1))
        if not self._chunk:
            known = {"previous": self._last if self.warm_start else None, "last": self._played, "plan": self._last}
            wanted = ("previous", *self._remembers)
            before = {name: value for name, value in known.items() if name in wanted and value is not None}
            chunk = self._decided(np.concatenate(past, 1), seen, before)
            actions = np.split(chunk, self._horizon, axis=1)
            self._chunk = [action.copy() for action in actions[: self.execute]]
            # What is left of the plan, held at its end, is where the next search starts.
            self._last = np.concatenate([*actions[self.execute :], *[actions[-1]] * self.execute], axis=1)
        self._seen = past
        self.asked[-1].append(self._asks)
        action = self._chunk.pop(0)
        self._played = action.copy()
        return action[0] if single else action

    def _decided(self, past: np.ndarray, seen: np.ndarray, before: dict[str, Any]) -> np.ndarray:
        """The policy's chunks; the fallback's action, held, in the episodes in which it asks."""
        self._asks = np.zeros(len(past), np.bool_)
        if self.fallback is None:
            return np.asarray(self.policy.act(past, **before, **self.effort))
        decision = self.policy.decide(past, **before, **self.effort)  # type: ignore[attr-defined]
        chunk = decision.action.detach().cpu().numpy().copy()
        self._asks = ~decision.acts.cpu().numpy()
        if self._asks.any():
            instead = np.asarray(self.fallback(seen[self._asks]))
            wanted = (int(self._asks.sum()), chunk.shape[1] // self._horizon)
            if instead.shape != wanted:
                raise ValueError(f"fallback must give actions {wanted}, got {instead.shape}")
            chunk[self._asks] = np.tile(instead, (1, self._horizon))
        return chunk
