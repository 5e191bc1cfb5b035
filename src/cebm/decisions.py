"""What a policy that may abstain gives back: an action, or the reason why it asks."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Abstention(ValueError):
    """There is no action to give; the message names the observation and the reason. `decide` says the same without an
    exception."""


@dataclass(frozen=True)
class Decision:
    """For each observation an action, or "ask" with the reason. Actions are in the user's units."""

    action: Float[Tensor, "batch act"]
    """The action; NaN where the policy asks, so that nobody plays it by accident."""
    acts: Bool[Tensor, " batch"]
    """Whether there is an action."""
    reasons: tuple[str, ...]
    """Why the policy asks; empty where it acts."""

    @classmethod
    def of(cls, action: Float[Tensor, "batch act"], reasons: tuple[str, ...]) -> "Decision":
        """The actions of those observations that have no reason against them."""
        acts = torch.tensor([not reason for reason in reasons], device=action.device)
        return cls(action.masked_fill(~acts.unsqueeze(1), torch.nan), acts, reasons)

    def required(self) -> Float[Tensor, "batch act"]:
        """The actions; an Abstention where one is missing."""
        for row, reason in enumerate(self.reasons):
            if reason:
                raise Abstention(f"observation {row}: {reason}")
        return self.action
