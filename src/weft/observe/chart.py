"""Charts in HTML and SVG, without scripts: they fit any width, print, and follow the page's light or dark style.

The SVG of a chart is stretched to its frame, and strokes keep their width. All texts are HTML, placed in percent of the
frame, so that their size does not change with the width. Pointing at a chart shows values: each strip of the frame has a
hidden text.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, NamedTuple

import numpy as np

TONES = (
    "t0",
    "t1",
    "t2",
    "t3",
    "t4",
    "t5",
    "t6",
    "t7",
)  # classes of the style sheet; all stand out on white and on black
ACCENT, CONTRAST, NEUTRAL = "t0", "t1", "t7"
MOST_POINTS = 800  # of a line: a screen shows no more, and a page of a long run stays small
MOST_STRIPS = 120
FEW = 40  # points of a line that are marked: a line through one point shows nothing
LABELLED = 2.5  # percent of a frame's width: narrower spans have no room for their label


def number(value: float) -> str:
    """A number with at most four digits after the first, as short as it can be: 0, 0.25, 12,000, 3e-4."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


@dataclass(frozen=True)
class Axis:
    """Scale of one dimension: range, ticks, and labels of ticks and values."""

    low: float
    high: float
    ticks: Sequence[float]
    label: Callable[[float], str] = number
    log: bool = False

    def percent(self, values: np.ndarray) -> np.ndarray:
        """Positions of values along the axis, 0 to 100; NaN where a logarithmic axis has no position."""
        if not self.log:
            return (values - self.low) / (self.high - self.low) * 100
        positive = np.where(values > 0, values, np.nan)
        return np.log(positive / self.low) / math.log(self.high / self.low) * 100


def linear_axis(
    values: Iterable[float], label: Callable[[float], str] = number, *, zero: bool = False, tight: bool = False
) -> Axis:
    """An axis over finite values with about six round ticks.

    Args:
        values: what is to be shown; others than finite ones are left out.
        label: text of a value.
        zero: begin at zero.
        tight: end at the last value, not at the next tick.
    """
    known = [value for value in values if math.isfinite(value)] + [0.0] * zero
    low, high = min(known, default=0.0), max(known, default=1.0)
    if low == high:
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low) / 10, low + abs(low) / 10)
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [place * step for place in range(first, last + 1)]
    if tight:
        return Axis(low, high, [tick for tick in ticks if low - 1e-9 <= tick <= high + 1e-9], label)
    return Axis(ticks[0], ticks[-1], ticks, label)


def log_axis(values: Iterable[float], label: Callable[[float], str] = number) -> Axis:
    """A logarithmic axis over positive finite values, with ticks at 1, 2 and 5 times powers of ten, or at powers alone."""
    known = [value for value in values if math.isfinite(value) and value > 0] or [1.0]
    powers = range(math.floor(math.log10(min(known))) - 1, math.ceil(math.log10(max(known))) + 2)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    low = max(tick for tick in ticks if tick <= min(known) * 1.001)
    high = min(tick for tick in ticks if tick >= max(known) * 0.999 and tick > low)
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) > 9:
        inside = [10.0**power for power in powers if low <= 10.0**power <= high]
    return Axis(low, high, inside, label, log=True)


class Series(NamedTuple):
    """One line, or points: `y` over `x`, both float64 [num_points]."""

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
    """Lines over a common axis.

    Args:
        series: what is drawn; a faint one lies under those that follow.
        x, y: the axes.
        titles: of x and of y, with units.
        levels: dashed horizontal lines, by their label.
        strokes: a name, and the places of x where a vertical stroke has it.
    """
    levels = levels or {}
    drawn = [
        f'<path class="grid" d="{"".join(f"M0 {_at(1000 - 10 * at)}h1000" for at in y.percent(_array(y.ticks)))}"/>'
    ]
    drawn += [_level(y, value) for value in levels.values()]
    name, places = strokes
    if len(places):
        ups = "".join(f"M{_at(10 * at)} 0v1000" for at in x.percent(_array(places)))
        drawn.append(f'<path class="stroke {CONTRAST}" d="{ups}"/>')
    drawn += [_path(one, x, y) for one in series]
    legend = [(one.name, f"{one.tone} {one.style}") for one in series if len(one.x)]
    legend += [(name, f"{CONTRAST} dash")] * bool(len(places))
    svg = f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{"".join(drawn)}</svg>'
    labels = [_level_label(series, x, y, text, value, levels) for text, value in levels.items()]
    gutter = max(len(y.label(tick)) for tick in y.ticks)
    return (
        f'<div class="chart" style="--gutter:{gutter}ch">{_head(titles[1], legend if len(legend) > 1 else [])}'
        f'<div class="frame">{svg}{_y_ticks(y)}{_x_ticks(x)}{"".join(labels)}{_strips(series, x, y)}</div>'
        f"{_foot(titles[0])}</div>"
    )


class BarRow(NamedTuple):
    """One category of a bar chart: its name, a note beside it, and bars that consist of (part, value)."""

    name: str
    bars: Sequence[Sequence[tuple[str, float]]]
    note: str = ""


def bar_chart(rows: Sequence[BarRow], title: str, label: Callable[[float], str] = number) -> str:
    """Horizontal bars from zero; the parts of a bar follow each other, and its sum is written at its end.

    Args:
        rows: categories, from above.
        title: of the axis of values, with its unit.
        label: text of a value.
    """
    sums: dict[str, float] = {}
    for part, value in (pair for row in rows for bar in row.bars for pair in bar):
        sums[part] = sums.get(part, 0.0) + value
    tones = _tones(part for part, total in sums.items() if total)
    x = linear_axis((sum(value for _, value in bar) for row in rows for bar in row.bars), label, zero=True)

    def track(bar: Sequence[tuple[str, float]]) -> str:
        total = sum(value for _, value in bar)
        parts = "".join(
            f'<i class="{tones[part]}" style="width:{_at(value / x.high * 100)}%" '
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
        f'<div class="scale">{_x_ticks(x)}</div>{_foot(title)}</div>'
    )


class Span(NamedTuple):
    """One block of a Gantt chart."""

    start: float
    end: float
    label: str
    part: str


def gantt_chart(lanes: Mapping[str, Sequence[Span]], title: str) -> str:
    """Blocks over time, a lane for each name; `title` says the unit of time."""
    tones = _tones(span.part for lane in lanes.values() for span in lane)
    x = linear_axis((span.end for lane in lanes.values() for span in lane), zero=True, tight=True)

    def block(span: Span) -> str:
        width = (span.end - span.start) / x.high * 100
        text = escape(span.label) if width >= LABELLED else ""
        place = f"left:{_at(span.start / x.high * 100)}%;width:{_at(width)}%"
        return f'<i class="{tones[span.part]}" style="{place}" title="{escape(span.label)}">{text}</i>'

    body = "".join(
        f'<div class="lane"><span>{escape(name)}</span>{"".join(map(block, lane))}</div>'
        for name, lane in lanes.items()
    )
    gutter = max(map(len, lanes), default=0)
    return (
        f'<div class="chart gantt" style="--gutter:{gutter}ch">'
        f"{_head('', [(part, f'{tone} bar') for part, tone in tones.items()])}"
        f'<div class="lanes">{body}</div><div class="scale">{_x_ticks(x)}</div>{_foot(title)}</div>'
    )


class Dot(NamedTuple):
    """One point of a scatter chart, and what it is."""

    x: float
    y: float
    text: str


def scatter_chart(
    groups: Mapping[str, Sequence[Dot]], x: Axis, y: Axis, titles: tuple[str, str], lines: Sequence[Series]
) -> str:
    """Points by group, with lines that are not in the legend below them; pointing at a point shows its text."""
    tones = {name: TONES[place % len(TONES)] + " hollow" * (place >= len(TONES)) for place, name in enumerate(groups)}

    def mark(dot: Dot, tone: str) -> str:
        left, bottom = _place(x, dot.x), _place(y, dot.y)
        return f'<i class="dot {tone}" style="left:{_at(left)}%;bottom:{_at(bottom)}%" title="{escape(dot.text)}"></i>'

    drawn = "".join(_path(one, x, y) for one in lines)
    svg = f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'
    marks = "".join(mark(dot, tones[name]) for name, dots in groups.items() for dot in dots)
    gutter = max(len(y.label(tick)) for tick in y.ticks)
    return (
        f'<div class="chart" style="--gutter:{gutter}ch">{_head(titles[1], [(n, f"{t} dot") for n, t in tones.items()])}'
        f'<div class="frame">{svg}{_y_ticks(y)}{_x_ticks(x)}{marks}</div>{_foot(titles[0])}</div>'
    )


def _place(axis: Axis, value: float) -> float:
    return float(axis.percent(_array([value]))[0])


def _array(values: Iterable[float]) -> np.ndarray:
    return np.array(list(values), dtype=np.float64)


def _at(place: float) -> str:
    """A coordinate, as short as a screen can tell it."""
    return f"{place:.2f}".rstrip("0").rstrip(".")


def _tones(parts: Iterable[str]) -> dict[str, str]:
    return {part: TONES[place % len(TONES)] for place, part in enumerate(dict.fromkeys(parts))}


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest point of each bucket of a line with many points, so that no spike is lost."""
    if len(x) <= MOST_POINTS:
        return x, y
    kept: list[int] = []
    for bucket in np.array_split(np.arange(len(x)), MOST_POINTS // 2):
        known = bucket[np.isfinite(y[bucket])]
        ends = {known[np.argmin(y[known])], known[np.argmax(y[known])]} if len(known) else {bucket[0]}
        kept += sorted(map(int, ends))
    return x[kept], y[kept]


def _path(series: Series, x: Axis, y: Axis) -> str:
    """The line of a series, broken where a value is not finite; and its points, if these are few."""
    xs, ys = _thin(series.x, series.y)
    places = [(a, b) for a, b in zip(10 * x.percent(xs), 1000 - 10 * y.percent(ys), strict=True)]
    known = [math.isfinite(b) for _, b in places]
    line = "".join(
        f"{'L' if place and known[place - 1] else 'M'}{_at(a)} {_at(b)}"
        for place, (a, b) in enumerate(places)
        if known[place]
    )
    dots = "".join(f"M{_at(a)} {_at(b)}h0" for (a, b), finite in zip(places, known, strict=True) if finite)
    found = f'<path class="{series.style} {series.tone}" d="{line}"/>' if series.style != "points" else ""
    if series.style in ("points", "line") and len(places) <= FEW:
        found += f'<path class="points {series.tone}" d="{dots}"/>'
    return found


def _level(y: Axis, value: float) -> str:
    return f'<path class="dash {NEUTRAL}" d="M0 {_at(1000 - 10 * _place(y, value))}h1000"/>'


def _level_label(
    series: Sequence[Series], x: Axis, y: Axis, text: str, value: float, levels: Mapping[str, float]
) -> str:
    """The label of a level at the end where lines are further away: above it, or below where another level is near above."""

    def clearance(low: float, high: float) -> float:
        inside = [one.y[(x.percent(one.x) >= low) & (x.percent(one.x) <= high)] for one in series]
        distances = np.abs(np.concatenate(inside) - value)
        return float(np.min(distances[np.isfinite(distances)], initial=math.inf))

    mine = _place(y, value)
    near = any(0 < other - mine < 9 for other in y.percent(_array(levels.values())))
    kind = "level" + " below" * near + " left" * (clearance(0, 15) > clearance(85, 100))
    return f'<span class="{kind}" style="bottom:{_at(mine)}%">{escape(text)}</span>'


def _strips(series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Invisible columns over the frame that show the values of their steps when pointed at; dashed lines have no values."""
    series = [one for one in series if one.style != "dash"]
    places = np.unique(np.concatenate([one.x for one in series]))
    edges = [bucket[0] for bucket in np.array_split(places, min(MOST_STRIPS, len(places)))] if len(places) else []
    found = []
    for number_of, start in enumerate(edges):
        end = edges[number_of + 1] if number_of + 1 < len(edges) else math.inf
        texts = [f"step {start:g}"]
        for one in series:
            inside = one.y[(one.x >= start) & (one.x < end) & np.isfinite(one.y)]
            texts += [f"{one.name}: {y.label(float(inside[0]))}"] if len(inside) else []
        left = _place(x, float(start))
        late = " late" * (left > 50)
        width = 100 / max(len(edges) - 1, 1)
        body = "<br>".join(map(escape, texts))
        found.append(
            f'<i class="strip{late}" style="left:{_at(left - width / 2)}%;width:{_at(width)}%"><b>{body}</b></i>'
        )
    return f'<div class="strips" aria-hidden="true">{"".join(found)}</div>'


def _x_ticks(axis: Axis) -> str:
    places = axis.percent(_array(axis.ticks))
    return "".join(
        f'<span class="x" style="left:{_at(at)}%">{escape(axis.label(tick))}</span>'
        for tick, at in zip(axis.ticks, places, strict=True)
    )


def _y_ticks(axis: Axis) -> str:
    places = axis.percent(_array(axis.ticks))
    return "".join(
        f'<span class="y" style="bottom:{_at(at)}%">{escape(axis.label(tick))}</span>'
        for tick, at in zip(axis.ticks, places, strict=True)
    )


def _head(title: str, legend: Sequence[tuple[str, str]]) -> str:
    """The title of the vertical axis, and what the marks mean."""
    items = "".join(f'<li class="{kind}">{escape(name)}</li>' for name, kind in legend)
    return f'<div class="head"><span>{escape(title)}</span>{f"<ul>{items}</ul>" if items else ""}</div>'


def _foot(title: str) -> str:
    return f'<p class="foot">{escape(title)}</p>'
