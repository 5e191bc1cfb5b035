"""How much search fits into the time that is left: a line through measured times, corrected by the latest ones."""

from collections.abc import Callable
from time import perf_counter

CALLS, ROWS = 5, 16


class Effort:
    """Milliseconds of a batch: t(rows, candidates) = load · (fixed + slope · rows · candidates), for the policy's own
    number of steps; `load` follows the ratio of measured to expected times."""

    def __init__(self, candidates: int | None, steps: int | None, timed: Callable[[int, int | None], float]) -> None:
        """`timed(rows, candidates)` are the milliseconds of a call. `candidates` and `steps` are the policy's own, None
        where it has none to choose."""
        self.candidates, self.steps, self.load = candidates, steps, 1.0
        timed(1, None)  # the first call pays for warming up
        small = _median(lambda: timed(1, None if candidates is None else 1))
        large = _median(lambda: timed(ROWS, candidates))
        self.slope = max(0.0, large - small) / (ROWS * (candidates or 1) - 1)
        self.fixed = max(0.0, small - self.slope)

    def expected(self, rows: int, candidates: int | None = None, steps: int | None = None) -> float:
        """Milliseconds of a batch."""
        own = candidates or self.candidates or 1
        longer = (steps or 1) / (self.steps or 1) if steps else 1.0
        return self.load * longer * (self.fixed + self.slope * rows * own)

    def measured(self, took: float, rows: int, candidates: int | None = None, steps: int | None = None) -> None:
        """A batch took so many milliseconds: expect more, or less."""
        ratio = took / max(self.expected(rows, candidates, steps) / self.load, 1e-6)
        self.load = min(20.0, max(0.5, 0.8 * self.load + 0.2 * ratio))

    def fitting(self, left_ms: float, rows: int, steps: int | None = None) -> int | None:
        """The most candidates that fit into 0.8 of the time, 0 where none does; None where there is no choice, and
        the policy's own effort fits."""
        left = 0.8 * left_ms
        if self.candidates is None:
            return None if self.expected(rows, None, steps) <= left else 0
        longer = self.expected(rows, 1, steps) / self.expected(rows, 1)
        room = left / (self.load * longer) - self.fixed
        most = room / (rows * self.slope) if self.slope > 0 else float(room > 0) * self.candidates * 64
        return max(0, int(min(most, 16_384)))


def _median(timed: Callable[[], float]) -> float:
    return sorted(timed() for _ in range(CALLS))[CALLS // 2]


def milliseconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    began = perf_counter()
    call()
    return (perf_counter() - began) * 1e3
