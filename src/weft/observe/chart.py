"""Charts in HTML and SVG without scripts, for any width, print, and light or dark mode.

The SVG of a chart is stretched to its frame, with constant stroke width. All labels are HTML, positioned in percent of the
frame, so that their size does not depend on the width. Values are shown on hover: each vertical strip of the frame has a hidden
label.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, NamedTuple

import numpy as np

TONES = tuple(f"t{index}" for index in range(8))
"""Classes of the style sheet; all colours have enough contrast on white and on black."""
ACCENT, CONTRAST, NEUTRAL = "t0", "t1", "t7"
MOST_POINTS = 800  # maximum points per line: the resolution of a screen; limits the page size of long runs
MOST_STRIPS = 120
MOST_COLUMNS = 60  # maximum columns of a heat map; a column shows the largest value of its steps
FEW = 40  # lines with at most this number of points also mark them: a line through one point is invisible
LABELLED = 2.5  # minimum width of a labelled span in percent of the frame


def format_value(value: float) -> str:
    """Format a value with at most five significant digits, as short as possible: 0, 0.25, 12,000, 3e-4."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


@dataclass(frozen=True)
class Axis:
    """Axis of a chart: range, ticks and value format."""

    low: float
    high: float
    ticks: Sequence[float]
    label: Callable[[float], str] = format_value
    log: bool = False

    def percent(self, values: np.ndarray) -> np.ndarray:
        """Positions of values along the axis, 0 to 100; NaN for values that a logarithmic axis cannot show."""
        if not self.log:
            return (values - self.low) / (self.high - self.low) * 100
        positive = np.where(values > 0, values, np.nan)
        return np.log(positive / self.low) / math.log(self.high / self.low) * 100


def linear_axis(
    values: Iterable[float], label: Callable[[float], str] = format_value, *, zero: bool = False, tight: bool = False
) -> Axis:
    """Linear axis over finite values with about six round ticks.

    Args:
        values: values to show; non-finite values are ignored.
        label: callable that formats a value.
        zero: True to include zero.
        tight: True to end at the extreme values instead of the next ticks.
    """
    known = [value for value in values if math.isfinite(value)] + [0.0] * zero
    low, high = min(known, default=0.0), max(known, default=1.0)
    if low == high:
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low) / 10, low + abs(low) / 10)
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [index * step for index in range(first, last + 1)]
    if tight:
        return Axis(low, high, [tick for tick in ticks if low - 1e-9 <= tick <= high + 1e-9], label)
    return Axis(ticks[0], ticks[-1], ticks, label)


def log_axis(values: Iterable[float]) -> Axis:
    """Logarithmic axis over positive finite values, with ticks at 1, 2 and 5 times powers of ten, or at powers of ten only."""
    known = [value for value in values if math.isfinite(value) and value > 0] or [1.0]
    powers = range(math.floor(math.log10(min(known))) - 1, math.ceil(math.log10(max(known))) + 2)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    low = max(tick for tick in ticks if tick <= min(known) * 1.001)
    high = min(tick for tick in ticks if tick >= max(known) * 0.999 and tick > low)
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) > 9:
        inside = [10.0**power for power in powers if low <= 10.0**power <= high]
    return Axis(low, high, inside, log=True)


class Series(NamedTuple):
    """One line or set of points: `y` over `x`, both float64 [num_points]."""

    name: str
    x: np.ndarray
    y: np.ndarray
    tone: str = ACCENT
    style: Literal["line", "faint", "dash", "points"] = "line"


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    titles: tuple[str, str],
    *,
    levels: Mapping[str, float] | None = None,
    strokes: tuple[str, Sequence[float]] = ("", ()),
) -> str:
    """Line chart.

    Args:
        series: lines in drawing order; the first one is at the bottom.
        x, y: axes.
        titles: titles of x and y, with units.
        levels: values of dashed horizontal lines, by label.
        strokes: name and x values of vertical strokes.
    """
    levels = levels or {}
    drawn = [
        f'<path class="grid" d="{"".join(f"M0 {_coordinate(1000 - 10 * at)}h1000" for at in y.percent(_array(y.ticks)))}"/>'
    ]
    drawn += [_level(y, value) for value in levels.values()]
    name, places = strokes
    if len(places):
        ups = "".join(f"M{_coordinate(10 * at)} 0v1000" for at in x.percent(_array(places)))
        drawn.append(f'<path class="stroke {CONTRAST}" d="{ups}"/>')
    drawn += [_path(one, x, y) for one in series]
    legend = [(one.name, f"{one.tone} {one.style}") for one in series if len(one.x)]
    legend += [(name, f"{CONTRAST} dash")] * bool(len(places))
    svg = f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{"".join(drawn)}</svg>'
    labels = [_level_label(series, x, y, text, value, levels) for text, value in levels.items()]
    gutter = max(len(y.label(tick)) for tick in y.ticks)
    return (
        f'<div class="chart" style="--gutter:{gutter}ch">{_head(titles[1], legend if len(legend) > 1 else [])}'
        f'<div class="frame">{svg}{_ticks(y, "y")}{_ticks(x, "x")}{"".join(labels)}{_strips(series, x, y, titles[0])}</div>'
        f"{_foot(titles[0])}</div>"
    )


class BarRow(NamedTuple):
    """One category of a bar chart: name, note, and stacked bars of (part, value)."""

    name: str
    bars: Sequence[Sequence[tuple[str, float]]]
    note: str = ""


def bar_chart(rows: Sequence[BarRow], title: str, label: Callable[[float], str] = format_value) -> str:
    """Horizontal stacked bar chart with an axis from zero; the total is shown at the end of each bar.

    Args:
        rows: categories from top to bottom.
        title: title of the value axis, with the unit.
        label: callable that formats a value.
    """
    sums: dict[str, float] = {}
    for part, value in (pair for row in rows for bar in row.bars for pair in bar):
        sums[part] = sums.get(part, 0.0) + value
    tones = _tones(part for part, total in sums.items() if total)
    x = linear_axis((sum(value for _, value in bar) for row in rows for bar in row.bars), label, zero=True)

    def track(bar: Sequence[tuple[str, float]]) -> str:
        total = sum(value for _, value in bar)
        parts = "".join(
            f'<i class="{tones[part]}" style="width:{_coordinate(value / x.high * 100)}%" '
            f'title="{escape(f"{part}: {label(value)}")}"></i>'
            for part, value in bar
            if value
        )
        return f'<div class="track">{parts}<span>{escape(label(total))}</span></div>'

    body = "".join(
        f'<div class="row"><p>{escape(row.name)}{f" <em>{escape(row.note)}</em>" if row.note else ""}</p>'
        f"<div>{''.join(map(track, row.bars))}</div></div>"
        for row in rows
    )
    legend = [(part, f"{tone} bar") for part, tone in tones.items()]
    return (
        f'<div class="chart bars">{_head("", legend if len(legend) > 1 else [])}{body}'
        f'<div class="scale">{_ticks(x, "x")}</div>{_foot(title)}</div>'
    )


class GanttBar(NamedTuple):
    """One bar of a Gantt chart."""

    start: float
    end: float
    label: str
    part: str


def gantt_chart(lanes: Mapping[str, Sequence[GanttBar]], title: str) -> str:
    """Gantt chart with one lane per name; `title` is the title of the time axis."""
    tones = _tones(span.part for lane in lanes.values() for span in lane)
    x = linear_axis((span.end for lane in lanes.values() for span in lane), zero=True, tight=True)

    def block(span: GanttBar) -> str:
        width = (span.end - span.start) / x.high * 100
        text = escape(span.label) if width >= LABELLED else ""
        position = f"left:{_coordinate(span.start / x.high * 100)}%;width:{_coordinate(width)}%"
        return f'<i class="{tones[span.part]}" style="{position}" title="{escape(span.label)}">{text}</i>'

    body = "".join(
        f'<div class="lane"><span>{escape(name)}</span>{"".join(map(block, lane))}</div>'
        for name, lane in lanes.items()
    )
    gutter = max(map(len, lanes), default=0)
    return (
        f'<div class="chart gantt" style="--gutter:{gutter}ch">'
        f"{_head('', [(part, f'{tone} bar') for part, tone in tones.items()])}"
        f'<div class="lanes">{body}</div><div class="scale">{_ticks(x, "x")}</div>{_foot(title)}</div>'
    )


def heat_map(lanes: Mapping[str, np.ndarray], steps: np.ndarray, low: float, title: str) -> str:
    """Heat map with one lane per name: the darker a cell, the larger its value.

    Args:
        lanes: values of each lane, float64 [num_steps].
        steps: step of each value, float64 [num_steps].
        low: value of an empty cell.
        title: title of the step axis.
    """
    x = linear_axis(steps, tight=True)
    high = max((float(np.nanmax(values)) for values in lanes.values()), default=low)
    columns = np.array_split(np.arange(len(steps)), min(len(steps), MOST_COLUMNS))
    width = 100 / max(len(columns), 1)

    def cell(index: int, column: np.ndarray, values: np.ndarray) -> str:
        value = float(np.nanmax(values[column]))
        shade = (value - low) / (high - low) if high > low else 0.0
        style = (
            f"left:{_coordinate(index * width)}%;width:{_coordinate(width)}%;opacity:{_coordinate(max(shade, 0.02))}"
        )
        first, last = (format_value(float(steps[at])) for at in (column[0], column[-1]))
        when = f"step {first}" if first == last else f"steps {first} to {last}"
        return f'<i class="{ACCENT}" style="{style}" title="{escape(f"{when}: {format_value(value)}")}"></i>'

    body = "".join(
        f'<div class="lane"><span>{escape(name)}</span>'
        f"{''.join(cell(index, column, values) for index, column in enumerate(columns))}</div>"
        for name, values in lanes.items()
    )
    gutter = max(map(len, lanes), default=0)
    legend = [(f"{format_value(low)} to {format_value(high)}", f"{ACCENT} bar")]
    return (
        f'<div class="chart gantt" style="--gutter:{gutter}ch">{_head("", legend)}'
        f'<div class="lanes">{body}</div><div class="scale">{_ticks(x, "x")}</div>{_foot(title)}</div>'
    )


class Dot(NamedTuple):
    """One point of a scatter chart, with its hover text."""

    x: float
    y: float
    text: str


def scatter_chart(
    groups: Mapping[str, Sequence[Dot]], x: Axis, y: Axis, titles: tuple[str, str], lines: Sequence[Series]
) -> str:
    """Scatter chart of points by group, with hover texts; `lines` are drawn below the points and are not in the legend."""
    tones = {name: TONES[index % len(TONES)] + " hollow" * (index >= len(TONES)) for index, name in enumerate(groups)}

    def mark(dot: Dot, tone: str) -> str:
        left, bottom = _position(x, dot.x), _position(y, dot.y)
        position = f"left:{_coordinate(left)}%;bottom:{_coordinate(bottom)}%"
        return f'<i class="dot {tone}" style="{position}" title="{escape(dot.text)}"></i>'

    drawn = "".join(_path(one, x, y) for one in lines)
    svg = f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'
    marks = "".join(mark(dot, tones[name]) for name, dots in groups.items() for dot in dots)
    gutter = max(len(y.label(tick)) for tick in y.ticks)
    return (
        f'<div class="chart" style="--gutter:{gutter}ch">{_head(titles[1], [(n, f"{t} dot") for n, t in tones.items()])}'
        f'<div class="frame">{svg}{_ticks(y, "y")}{_ticks(x, "x")}{marks}</div>{_foot(titles[0])}</div>'
    )


def _position(axis: Axis, value: float) -> float:
    return float(axis.percent(_array([value]))[0])


def _array(values: Iterable[float]) -> np.ndarray:
    return np.array(list(values), dtype=np.float64)


def _coordinate(value: float) -> str:
    """Format a coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _tones(parts: Iterable[str]) -> dict[str, str]:
    return {part: TONES[index % len(TONES)] for index, part in enumerate(dict.fromkeys(parts))}


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Downsample a long line to the minimum and the maximum of each bucket, so that no spike is lost."""
    if len(x) <= MOST_POINTS:
        return x, y
    kept: list[int] = []
    for bucket in np.array_split(np.arange(len(x)), MOST_POINTS // 2):
        known = bucket[np.isfinite(y[bucket])]
        ends = {known[np.argmin(y[known])], known[np.argmax(y[known])]} if len(known) else {bucket[0]}
        kept += sorted(map(int, ends))
    return x[kept], y[kept]


def _path(series: Series, x: Axis, y: Axis) -> str:
    """SVG path of a series, with gaps at non-finite values, and point markers if there are few points."""
    xs, ys = _thin(series.x, series.y)
    points = [(a, b) for a, b in zip(10 * x.percent(xs), 1000 - 10 * y.percent(ys), strict=True)]
    known = [math.isfinite(b) for _, b in points]
    line = "".join(
        f"{'L' if index and known[index - 1] else 'M'}{_coordinate(a)} {_coordinate(b)}"
        for index, (a, b) in enumerate(points)
        if known[index]
    )
    dots = "".join(
        f"M{_coordinate(a)} {_coordinate(b)}h0" for (a, b), finite in zip(points, known, strict=True) if finite
    )
    found = f'<path class="{series.style} {series.tone}" d="{line}"/>' if series.style != "points" else ""
    if series.style in ("points", "line") and len(points) <= FEW:
        found += f'<path class="points {series.tone}" d="{dots}"/>'
    return found


def _level(y: Axis, value: float) -> str:
    return f'<path class="dash {NEUTRAL}" d="M0 {_coordinate(1000 - 10 * _position(y, value))}h1000"/>'


def _level_label(
    series: Sequence[Series], x: Axis, y: Axis, text: str, value: float, levels: Mapping[str, float]
) -> str:
    """Label of a level, at the left or right end where the lines are further away; below the level if another is just above."""

    def clearance(low: float, high: float) -> float:
        inside = [one.y[(x.percent(one.x) >= low) & (x.percent(one.x) <= high)] for one in series]
        distances = np.abs(np.concatenate(inside) - value)
        return float(np.min(distances[np.isfinite(distances)], initial=math.inf))

    mine = _position(y, value)
    near = any(0 < other - mine < 9 for other in y.percent(_array(levels.values())))
    kind = "level" + " below" * near + " left" * (clearance(0, 15) > clearance(85, 100))
    return f'<span class="{kind}" style="bottom:{_coordinate(mine)}%">{escape(text)}</span>'


def _strips(series: Sequence[Series], x: Axis, y: Axis, unit: str) -> str:
    """Invisible columns over the frame that show the values at their x on hover, without those of dashed lines."""
    series = [one for one in series if one.style != "dash"]
    places = np.unique(np.concatenate([one.x for one in series]))
    edges = [bucket[0] for bucket in np.array_split(places, min(MOST_STRIPS, len(places)))] if len(places) else []
    found = []
    for index, start in enumerate(edges):
        end = edges[index + 1] if index + 1 < len(edges) else math.inf
        texts = [f"{unit} {start:g}"]
        for one in series:
            inside = one.y[(one.x >= start) & (one.x < end) & np.isfinite(one.y)]
            texts += [f"{one.name}: {y.label(float(inside[0]))}"] if len(inside) else []
        left = _position(x, float(start))
        late = " late" * (left > 50)
        width = 100 / max(len(edges) - 1, 1)
        body = "<br>".join(map(escape, texts))
        found.append(
            f'<i class="strip{late}" style="left:{_coordinate(left - width / 2)}%;width:{_coordinate(width)}%">'
            f"<b>{body}</b></i>"
        )
    return f'<div class="strips" aria-hidden="true">{"".join(found)}</div>'


def _ticks(axis: Axis, kind: Literal["x", "y"]) -> str:
    places, side = axis.percent(_array(axis.ticks)), {"x": "left", "y": "bottom"}[kind]
    return "".join(
        f'<span class="{kind}" style="{side}:{_coordinate(at)}%">{escape(axis.label(tick))}</span>'
        for tick, at in zip(axis.ticks, places, strict=True)
    )


def _head(title: str, legend: Sequence[tuple[str, str]]) -> str:
    """Title of the vertical axis, and the legend."""
    items = "".join(f'<li class="{kind}">{escape(name)}</li>' for name, kind in legend)
    return f'<div class="head"><span>{escape(title)}</span>{f"<ul>{items}</ul>" if items else ""}</div>'


def _foot(title: str) -> str:
    return f'<p class="foot">{escape(title)}</p>'
