"""Waiting for what another thread or process does, with room for a busy machine: no test is judged by the clock."""

import time
from collections.abc import Callable

PATIENCE = 300.0
"""Seconds after which nobody waits any longer. What takes five seconds alone has taken a hundred on a machine with
thirty processes on two cores."""


def eventually(condition: Callable[[], object], seconds: float = PATIENCE, pause: float = 0.01) -> None:
    """Waits until the condition is true; an AssertionError where it does not become so."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"it did not happen within {seconds:g} s"
        time.sleep(pause)
