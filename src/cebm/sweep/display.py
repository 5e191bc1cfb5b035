"""One progress display over many tasks: a bar on a terminal; in a log a line per finished task, and one every five
minutes in which none ends."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

PAUSE = 300.0
"""Seconds between two lines of a log in which no task ends."""


class Display:
    """Shows how far tasks are and how much time is left, by the mean speed since the start; the speed of a moment
    jumps, as evaluations log nothing."""

    def __init__(
        self,
        title: str,
        costs: Mapping[str, float],
        of: int,
        share: Callable[[str], float],
        shown: bool = True,
    ) -> None:
        """`costs` has the work of each task that is to run, `of` counts those that were finished before, too, and
        `share` tells how much of a task is done, between 0 and 1."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._costs, self._of, self._share = costs, of, share
        self._done: set[str] = set()
        self._failed = 0
        self._console = Console(stderr=True, quiet=not shown)
        self._live = shown and self._console.is_interactive and not self._console.no_color
        columns = (TextColumn(f"[bold]{title}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console)
        self._total = sum(costs.values())
        self._earlier, self._began = self._work(), time.monotonic()
        self._task = self._bar.add_task("", total=self._total, text="")
        self._looked = 0.0 if self._live else self._began

    def _work(self) -> float:
        return sum(cost * (1.0 if key in self._done else self._share(key)) for key, cost in self._costs.items())

    def left(self, done: float) -> str:
        """The time left in words, empty before anything is done."""
        if done <= self._earlier:
            return ""
        pace = (time.monotonic() - self._began) / (done - self._earlier)
        minutes = math.ceil(pace * (self._total - done) / 60)
        return f"about {minutes // 60} h {minutes % 60:02d} min left" if minutes >= 60 else f"about {minutes} min left"

    def finished(self, key: str, error: str) -> None:
        """Counts a task that is over."""
        self._done.add(key)
        self._failed += bool(error)
        if not self._live:
            self._looked = time.monotonic()
            count = self._of - len(self._costs) + len(self._done)
            words = f"failed: {error}" if error else self.left(self._work())
            self._console.print(f"{count} of {self._of}: {key}  {words}", highlight=False, markup=False, soft_wrap=True)

    def update(self) -> None:
        """Shows how far all tasks are, at most once a second, or in a log once in a while."""
        if time.monotonic() - self._looked < (1 if self._live else PAUSE):
            return
        self._looked, done = time.monotonic(), self._work()
        text = f"{self._of - len(self._costs) + len(self._done)} of {self._of} runs  {self.left(done)}"
        text += f"  {self._failed} failed" if self._failed else ""
        if self._live:
            self._bar.update(self._task, completed=done, text=text)
            return
        share = done / self._total if self._total else 1.0
        self._console.print(f"{text}, {share:.0%} of the steps", highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> "Display":
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bar.stop()


def share_of_steps(metrics: Sequence[Mapping[str, object]], steps: int) -> float:
    """How much of a training is done, by its rows of metrics."""
    last = metrics[-1]["step"] if metrics else 0
    return min(1.0, last / steps) if isinstance(last, int) else 0.0
