"""Signals that ask a training to stop after its current step."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stop:
    """Set by a signal, read between steps."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked


@contextmanager
def stop_signals(once: bool = True) -> Iterator[Stop]:
    """SIGTERM and Ctrl-C ask to stop after the current step; a second one acts at once. Main thread only. Without
    `once` the second one changes nothing: torchrun passes on a signal that the processes may have got already."""
    stop = Stop()
    previous: dict[int, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        stop.asked = True
        if once:
            signal.signal(number, previous[number])

    try:
        for number in (int(signal.SIGTERM), int(signal.SIGINT)):
            previous[number] = signal.signal(number, ask)
    except ValueError:  # not the main thread: the caller's handlers stay
        pass
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
