"""Counters and histograms in Prometheus' text format, and logs of one JSON object per line."""

import json
import logging
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

LOG = logging.getLogger("cebm.serving")

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
SIZES = tuple(float(2**k) for k in range(9))


class Histogram:
    """How often values fell below each bound."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name, self.about, self.bounds = name, about, bounds
        self.counts, self.total = [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Counts one more value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self) -> list[str]:
        """In Prometheus' format: cumulated counts, the sum, the count."""
        so_far, rows = 0, [f"# HELP {self.name} {self.about}", f"# TYPE {self.name} histogram"]
        for bound, count in zip([*(f"{bound:g}" for bound in self.bounds), "+Inf"], self.counts, strict=True):
            so_far += count
            rows.append(f'{self.name}_bucket{{le="{bound}"}} {so_far}')
        return [*rows, f"{self.name}_sum {self.total:.9g}", f"{self.name}_count {so_far}"]


class Metrics:
    """All numbers of one server. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._events: Counter[str] = Counter()
        self._latency = Histogram("cebm_request_seconds", "From a request's arrival to its reply.", SECONDS)
        self._acting = Histogram("cebm_batch_seconds", "Time of the policy for one batch.", SECONDS)
        self._batches = Histogram("cebm_batch_rows", "Observations in a batch.", SIZES)
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        """Numbers that are read when they are asked for: name to explanation and reader."""

    def request(self, call: str, seconds: float) -> None:
        """A request was answered."""
        with self._lock:
            self._requests[call] += 1
            self._latency.add(seconds)

    def error(self, kind: str) -> None:
        """A request or a connection was refused."""
        with self._lock:
            self._errors[kind] += 1

    def event(self, name: str) -> None:
        """Something that is counted: a reload, a worker that was replaced."""
        with self._lock:
            self._events[name] += 1

    def batch(self, rows: int, seconds: float) -> None:
        """The policy acted for so many observations."""
        with self._lock:
            self._batches.add(float(rows))
            self._acting.add(seconds)

    def errors(self) -> dict[str, int]:
        """Refusals so far, by their kind."""
        with self._lock:
            return dict(self._errors)

    def answered(self) -> int:
        """Requests that were answered so far."""
        with self._lock:
            return self._requests.total()

    def text(self) -> str:
        """In Prometheus' text format, version 0.0.4."""
        with self._lock:
            rows = []
            for name, about, label, counts in (
                ("cebm_requests_total", "Requests that were answered.", "call", self._requests),
                ("cebm_errors_total", "Requests and connections that were refused.", "kind", self._errors),
                ("cebm_events_total", "Reloads and replaced workers.", "event", self._events),
            ):
                rows += [f"# HELP {name} {about}", f"# TYPE {name} counter"]
                rows += [f'{name}{{{label}="{key}"}} {counts[key]}' for key in sorted(counts)]
            for histogram in (self._latency, self._acting, self._batches):
                rows += histogram.lines()
        for name, (about, read) in self.gauges.items():
            rows += [f"# HELP {name} {about}", f"# TYPE {name} gauge", f"{name} {read():g}"]
        return "\n".join(rows) + "\n"


class JsonLines(logging.Formatter):
    """A log record as one JSON object: time, level, event, and what came with it as `extra={"with_": {…}}`."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = {"time": stamp, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "with_", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log(level: int, event: str, error: BaseException | None = None, **with_: object) -> None:
    """One line of the server's log."""
    LOG.log(level, event, exc_info=error, extra={"with_": with_})
