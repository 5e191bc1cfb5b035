"""How much of the machine other processes take, from Linux's accounts."""

import os
from pathlib import Path
from time import perf_counter


class Others:
    """Cores that processes other than this one and its children took since it was made."""

    def __init__(self) -> None:
        self._began, self._before = perf_counter(), _seconds()

    def cores(self) -> float:
        """NaN where the accounts cannot be read."""
        return (_seconds() - self._before) / (perf_counter() - self._began)


def _seconds() -> float:
    """Time of all processors that was not idle, less that of this process and its children, those that run included."""
    try:
        busy = [int(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]
        children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
        running = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in children]
    except (OSError, ValueError):
        return float("nan")
    ticks = sum(busy) - busy[3] - busy[4] - sum(int(each) for times in running for each in times)
    return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
