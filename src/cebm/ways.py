"""The ways to compute a training step that a trial allows, and which of them a run takes.

A way is a precision of the hidden layers' products, and whether `torch.compile` makes the step. Where a trial allows
several, they are measured on the run's own steps, once; the choice is a buffer of the learner, so that a run which is
resumed goes on the same way, bit for bit.
"""

import warnings
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from cebm.arithmetic import Precision, check_precision, why_not_half

WORTH = 1.05
"""A later way must be so much faster than an earlier one."""


@dataclass(frozen=True)
class Way:
    """One way to compute a step."""

    half: bool = False
    """Hidden layers multiply in bfloat16."""
    compiled: bool = False
    """By torch.compile."""

    def __str__(self) -> str:
        return ("bf16" if self.half else "float32") + (", compiled" if self.compiled else "")


class Ways(nn.Module):
    """Those of a trial, the plain one first."""

    chosen: Tensor

    def __init__(self, precision: Precision, compiled: bool) -> None:
        super().__init__()
        check_precision(precision)
        halves = {"float32": (False,), "bf16": (True,), "measured": (False, True)}[precision]
        self.all = [Way(half, quick) for half in halves for quick in ((False, True) if compiled else (False,))]
        self._known: int | None = 0 if len(self.all) == 1 else None
        if self._known is None:
            self.register_buffer("chosen", torch.tensor(-1))
            self.register_load_state_dict_post_hook(lambda module, _: module._forget())

    def _forget(self) -> None:
        """The buffer was loaded: it is looked at again."""
        self._known = None

    def taken(self) -> Way | None:
        """The way that the run takes; None before it is measured. Looks at the buffer once."""
        if self._known is None:
            found = int(self.chosen)
            self._known = found if 0 <= found < len(self.all) else None
        return None if self._known is None else self.all[self._known]

    def take(self, index: int) -> None:
        """Keeps to that way from now on."""
        self.chosen.fill_(index)
        self._known = index

    def open_to(self, device: torch.device) -> list[int]:
        """Those that this device can go; a ValueError where there is none."""
        reason = why_not_half(device) if any(way.half for way in self.all) else ""
        found = [index for index, way in enumerate(self.all) if not (way.half and reason)]
        if not found:
            raise ValueError(f"precision 'bf16': {reason}; take 'float32', or 'measured', which takes what is faster")
        return found


def fastest(seconds: dict[int, float]) -> int:
    """The way that takes the least time; a later one must be worth it."""
    best, *others = sorted(seconds)
    for index in others:
        if seconds[index] * WORTH < seconds[best]:
            best = index
    return best


class Compiled:
    """A learner whose loss is computed by torch.compile, until that fails: then as it is, with a warning."""

    def __init__(self, learner: Any) -> None:
        self._learner, self._loss = learner, cast(Any, None)
        self.broken = False
        """Whether compiling has failed here."""

    def loss(self, obs: Tensor, actions: Tensor, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """The learner's loss and log. Random numbers are taken from the generator as they are without compiling."""
        if self.broken:
            return self._learner.loss(obs, actions, generator)
        before = generator.get_state()
        try:
            if self._loss is None:
                self._loss = torch.compile(self._learner.loss, dynamic=False)
            return self._loss(obs, actions, generator)
        except Exception as error:  # of the compiler, or of the learner, which then raises it again
            generator.set_state(before)
            found = self._learner.loss(obs, actions, generator)
            self.broken, self._loss = True, None
            why = " ".join(str(error).split())[:200]
            warnings.warn(f"the step is not compiled, as torch.compile fails here: {why}", stacklevel=2)
            return found
