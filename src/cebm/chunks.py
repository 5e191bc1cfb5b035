"""What a policy is told of the chunk of actions that plays. Without torch, as `parts` is."""

from collections.abc import Collection

import numpy as np

KNOWN = ("previous", "last", "plan")
"""What a policy may be told of the episode, by the arguments of its `act`."""


def remaining(chunks: np.ndarray, played: int, takes: Collection[str]) -> dict[str, np.ndarray]:
    """What a policy that takes these arguments is told where `played` actions of the last chunks [rows, horizon,
    action] were played: the rest, held at its end, as its plan (with the last action) or as the start of its search."""
    horizon = chunks.shape[1]
    rest = chunks[:, np.minimum(np.arange(played, played + horizon), horizon - 1)].reshape(len(chunks), -1)
    return {"plan": rest, "last": chunks[:, min(played, horizon) - 1]} if "plan" in takes else {"previous": rest}
