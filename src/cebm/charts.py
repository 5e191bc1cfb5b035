"""Line charts as SVG text, without a plotting library: in the report, in a study's page and in the studio."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from markupsafe import Markup, escape

Value = float | int
Place = Callable[[Value], Value]

# Variables of the page, which has a light and a dark set. Okabe & Ito (2008): told apart by every kind of colour
# vision; their yellow is too faint for a line on white, and their black is the ink.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK = COLOURS = (
    *("var(--blue)", "var(--vermillion)", "var(--green)", "var(--purple)", "var(--orange)", "var(--sky)"),
    "var(--ink)",
)
GREY = "var(--grey)"
DASHED, DOTTED = "6 4", "2 3"
WIDE = (556, 270)
"""Size of a chart of which two fill a row."""

# ---------------------------------------------------------------------------------------------- numbers


def ticks(low: Value, high: Value, most: int = 6) -> list[Value]:
    """Round numbers (1, 2 or 5 times a power of ten apart) within [low, high], `most` of them or fewer."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    for unit in (1, 2, 5, 10, 20):
        step = unit * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            break
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def tick_labels(values: Sequence[Value]) -> list[str]:
    """As many decimals as tell neighbours apart."""
    step = min((b - a for a, b in pairwise(values)), default=0.0)
    if step <= 0 or max(map(abs, values)) >= 1e6 or step < 1e-4:
        return [number(value) for value in values]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value:,.{decimals}f}".replace("-", "−") if value else "0" for value in values]


def number(value: Value | None) -> str:
    """Three significant digits, thousands grouped; − and not a hyphen."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-4:
        text = f"{value:.2e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    elif size >= 100 or value == int(value):
        text = f"{value:,.0f}"
    else:
        text = f"{value:.3g}"
    return text.replace("-", "−")


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


# ---------------------------------------------------------------------------------------------- line charts


@dataclass(frozen=True)
class Series:
    """One curve, with a band around it where `low` and `high` are given."""

    label: str
    x: Sequence[Value]
    y: Sequence[Value]
    colour: str = BLUE
    dash: str = ""
    low: Sequence[Value] = ()
    high: Sequence[Value] = ()


@dataclass(frozen=True)
class Chart:
    """A figure with title, legend, curves and one sentence on what to see."""

    title: str
    series: Sequence[Series]
    note: str = ""
    x_label: str = "training step"
    scale: Literal["linear", "auto"] = "linear"
    """'auto': logarithmic where all is positive and spans a factor of more than 30."""
    limits: tuple[Value | None, Value | None] = (None, None)
    """What the value axis has to hold; None: what the data say."""
    percent: bool = False
    size: tuple[int, int] = (360, 236)
    legend: Sequence[Series] = ()
    """What the legend shows; nothing: the curves, where there are several."""
    most_points: int = 240
    """Longer curves keep the lowest and highest point of each stretch."""

    def __html__(self) -> str:
        """The figure; jinja2 asks for this."""
        drawn = [thinned(each, self.most_points) for each in self.series if _finite(each.y)]
        if drawn:
            picture = self._svg(drawn)
        else:
            picture = Markup('<p class="empty">Nothing was logged.</p>')
        keys = self.legend or (drawn if len(drawn) > 1 else ())
        return Markup(
            '<figure class="plot"><figcaption><b>{}</b><span class="legend">{}</span></figcaption>{}'
            '<p class="note">{}</p></figure>'
        ).format(self.title, Markup("").join(map(_legend_entry, keys)), picture, self.note.replace(" %", "\u00a0%"))

    def _svg(self, drawn: list[Series]) -> Markup:
        values = _finite([v for each in drawn for v in (*each.y, *each.low, *each.high)])
        low, high = min(values), max(values)
        logarithmic = self.scale == "auto" and low > 0 and high / low > 30
        if logarithmic:
            low, high = math.log10(low), math.log10(high)
        low = low if self.limits[0] is None else min(low, self.limits[0])
        high = high if self.limits[1] is None else max(high, self.limits[1])
        room = 0.06 * (high - low) or 0.5 * (abs(high) or 1.0)
        low -= room if low != self.limits[0] else 0.0
        high += room if high != self.limits[1] else 0.0
        xs = [v for each in drawn for v in each.x]
        left_x, right_x = min([0.0, *xs]), max(xs) or 1.0

        if logarithmic:
            marks = _log_ticks(low, high)
        else:
            factor = 100 if self.percent else 1
            places = ticks(low, high)
            labels = tick_labels([factor * value for value in places])
            marks = [(v, text + " %" * self.percent) for v, text in zip(places, labels, strict=True)]
        width, height = self.size
        left = max(52, 16 + 7 * max(len(text) for _, text in marks))  # charts of a row line up
        right, top, bottom = 16, 8, 42

        def px(x: Value) -> Value:
            return left + (x - left_x) / (right_x - left_x) * (width - left - right)

        def py(y: Value) -> Value:
            y = (math.log10(y) if y > 0 else low) if logarithmic else y
            return top + (high - y) / (high - low) * (height - top - bottom)

        parts = []
        for value, text in marks:
            y = top + (high - value) / (high - low) * (height - top - bottom)
            parts.append(f'<path class="grid" d="M{left} {y:.1f}H{width - right}"/>')
            parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        for value in ticks(left_x, right_x):
            parts.append(f'<path class="tick" d="M{px(value):.1f} {height - bottom}v5"/>')
            parts.append(
                f'<text x="{px(value):.1f}" y="{height - bottom + 19}" text-anchor="middle">{_steps(value)}</text>'
            )
        parts.append(f'<path class="axis" d="M{left} {height - bottom}H{width - right}"/>')
        middle = (left + width - right) / 2
        parts.append(
            f'<text class="label" x="{middle:.1f}" y="{height - 5}" text-anchor="middle">{escape(self.x_label)}</text>'
        )
        for each in drawn:
            if len(each.low):
                parts.append(_band(each, px, py))
        parts += [_curve(each, px, py) for each in drawn]
        parts.append(f'<path class="cursor" d="M0 {top}V{height - bottom}"/>')
        hover = {
            "x": [round(px(x), 1) for x in sorted(set(xs))],
            "at": [_steps(x) for x in sorted(set(xs))],
            "lines": [
                {
                    "label": each.label,
                    "colour": each.colour,
                    "text": {_steps(x): self._hover(each, i) for i, x in enumerate(each.x)},
                }
                for each in drawn
            ],
        }
        return Markup(
            '<svg class="chart" viewBox="0 0 {} {}" width="{}" height="{}" role="img" aria-label="{}" data-hover="{}">'
            "{}</svg>"
        ).format(
            width, height, width, height, self.title, json.dumps(hover, ensure_ascii=False), Markup("".join(parts))
        )

    def _value(self, value: Value) -> str:
        return f"{number(100 * value)} %" if self.percent else number(value)

    def _hover(self, series: Series, index: int) -> str:
        text = self._value(series.y[index])
        if len(series.low) and _finite([series.low[index]]):
            text += f" ({self._value(series.low[index])} to {self._value(series.high[index])})"
        return text


def thinned(series: Series, most: int) -> Series:
    """At most about `most` points; a stretch of many keeps its lowest and its highest, so that spikes stay."""
    count = len(series.x)
    if count <= most:
        return series
    keep = {0, count - 1}
    for stretch in np.array_split(np.arange(count), most // 2):
        y = np.asarray(series.y)[stretch]
        if np.isfinite(y).any():
            keep |= {int(stretch[np.nanargmin(y)]), int(stretch[np.nanargmax(y)])}
    rows = sorted(keep)

    def pick(values: Sequence[Value]) -> list[Value]:
        return [values[i] for i in rows] if len(values) else []

    return Series(
        series.label,
        pick(series.x),
        pick(series.y),
        series.colour,
        series.dash,
        pick(series.low),
        pick(series.high),
    )


def _finite(values: Sequence[Value]) -> list[Value]:
    return [v for v in values if math.isfinite(v)]


def _steps(value: Value) -> str:
    return f"{value / 1000:g}k" if value >= 10_000 and value % 100 == 0 else f"{value:,g}"


def _log_ticks(low: Value, high: Value) -> list[tuple[Value, str]]:
    """Powers of ten, with 2 and 5 between them where they are few; places as exponents."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    units = (1, 2, 5) if high - low < 1.5 else (1, 3) if high - low < 3 else (1,)
    every = max(1, math.ceil((high - low) / 5))
    places = [(d + math.log10(u), u * 10.0**d) for d in decades if d % every == 0 for u in units]
    return [(place, number(value)) for place, value in places if low <= place <= high]


def _runs(*columns: Sequence[Value]) -> list[list[int]]:
    """Stretches of points at which all columns are finite; a gap interrupts the curve."""
    result: list[list[int]] = [[]]
    for i, values in enumerate(zip(*columns, strict=True)):
        if all(map(math.isfinite, values)):
            result[-1].append(i)
        elif result[-1]:
            result.append([])
    return [stretch for stretch in result if stretch]


def _curve(series: Series, px: Place, py: Place) -> str:
    path = "".join(
        "M" + "L".join(f"{px(series.x[i]):.1f} {py(series.y[i]):.1f}" for i in stretch) for stretch in _runs(series.y)
    )
    dash = f' stroke-dasharray="{series.dash}"' if series.dash else ""
    line = f'<path class="curve" stroke="{series.colour}"{dash} d="{path}"/>'
    points = [i for stretch in _runs(series.y) for i in stretch]
    if len(points) > 14 or series.dash == DOTTED:
        return line
    return line + "".join(
        f'<circle cx="{px(series.x[i]):.1f}" cy="{py(series.y[i]):.1f}" r="2.6" fill="{series.colour}"/>'
        for i in points
    )


def _band(series: Series, px: Place, py: Place) -> str:
    parts = []
    for stretch in _runs(series.y, series.low, series.high):
        upper = [f"{px(series.x[i]):.1f} {py(series.high[i]):.1f}" for i in stretch]
        lower = [f"{px(series.x[i]):.1f} {py(series.low[i]):.1f}" for i in reversed(stretch)]
        parts.append("M" + "L".join(upper + lower) + "Z")
    return f'<path class="band" fill="{series.colour}" d="{"".join(parts)}"/>'


def _legend_entry(series: Series) -> Markup:
    dash = Markup(' stroke-dasharray="{}"').format(series.dash) if series.dash else Markup("")
    return Markup(
        '<span class="key"><svg width="26" height="10" aria-hidden="true">'
        '<path d="M1 5H25" stroke="{}" stroke-width="2.2"{}/></svg>{}</span>'
    ).format(series.colour, dash, series.label)
