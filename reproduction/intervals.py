"""The statistics of a verdict: the rule of all comparisons, by intervals over seeds."""

from collections.abc import Iterable, Sequence
from typing import Literal

from cebm.intervals import Interval as Interval
from cebm.intervals import minus as minus

Verdict = Literal["holds", "does not hold", "inconclusive"]


def percent(shares: Sequence[float]) -> str:
    """The mean of shares between 0 and 1, in per cent."""
    return f"{100 * sum(shares) / len(shares):.0f} %"


def decide(interval: Interval, at_least: float = 0.0) -> Verdict:
    """The rule of all comparisons. The claim that a quantity exceeds `at_least` holds if its whole 95 % interval lies
    above that limit, does not hold if the whole interval lies below, and is inconclusive otherwise."""
    if interval.low > at_least:
        return "holds"
    return "does not hold" if interval.high < at_least else "inconclusive"


def all_parts(parts: Iterable[Verdict]) -> Verdict:
    """The verdict of a claim with several parts: it holds if all parts hold, and does not hold if one part does not."""
    verdicts = list(parts)
    if "does not hold" in verdicts:
        return "does not hold"
    return "inconclusive" if "inconclusive" in verdicts else "holds"
