"""Charts: round ticks, gaps in lines, downsampling that keeps spikes, bars from zero, escaped texts."""

import math
import re

import numpy as np
import pytest

from weft.observe.chart import (
    MOST_COLUMNS,
    MOST_POINTS,
    BarRow,
    GanttBar,
    Series,
    bar_chart,
    gantt_chart,
    heat_map,
    line_chart,
    linear_axis,
    log_axis,
)
from weft.observe.chart import format_value as text_of


def line(y: list[float]) -> str:
    series = [Series("loss", np.arange(len(y), dtype=np.float64), np.array(y))]
    x, height = linear_axis(range(len(y)), tight=True), linear_axis(y)
    html = line_chart(series, x, height, ("step", "<nats>"))
    return next(found for found in re.findall(r'class="line t0" d="([^"]*)"', html))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (3e-4, "0.0003"), (5e-5, "5e-5"), (12000, "12,000"), (1234567, "1.23e6"), (-2, "-2")],
)
def test_format_value(value: float, text: str) -> None:
    assert text_of(value) == text


def test_ticks_are_round_and_cover_the_values() -> None:
    axis = linear_axis([1.9587, 5.7221])
    assert list(axis.ticks) == pytest.approx([1, 2, 3, 4, 5, 6])
    assert axis.percent(np.array([1.0, 6.0])).tolist() == [0, 100]
    steps = linear_axis([1, 120], zero=True, tight=True)
    assert (steps.low, steps.high, list(steps.ticks)) == (0, 120, [0, 20, 40, 60, 80, 100, 120])
    for odd in ([], [math.nan], [0.0, 0.0], [7.0], [math.inf, 3.0]):
        axis = linear_axis(odd)
        assert axis.low < axis.high
        assert len(axis.ticks) >= 2
    log = log_axis([0.7, 14.0, math.inf, 0.0])
    assert list(log.ticks) == pytest.approx([0.5, 1, 2, 5, 10, 20])
    assert log.percent(np.array([0.5, 20.0])) == pytest.approx([0, 100])
    assert list(log_axis([1e-6, 1e6]).ticks) == pytest.approx([10.0**power for power in range(-6, 7)])


def test_line_has_gaps_at_non_finite_values() -> None:
    assert line([1, 2, 3, 4]).count("M") == 1
    assert line([1, 2, math.nan, 4, 5]).count("M") == 2
    assert line([math.inf, 2, 3, math.nan]).count("M") == 1
    assert "nan" not in line([1, math.nan, 3])


def test_downsampled_line_keeps_its_spikes() -> None:
    values = [1.0] * 100_000
    values[31_415] = 100.0
    values[92_653] = -100.0
    drawn = line(values)
    assert drawn.count("L") <= MOST_POINTS
    heights = [float(height) for height in re.findall(r"[ML]\S+ (\S+?)(?=[ML]|$)", drawn)]
    assert (min(heights), max(heights)) == (0, 1000)


def test_bars_begin_at_zero_and_texts_are_escaped() -> None:
    html = bar_chart(
        [BarRow("<a>", [[("x", 1.0), ("y", 3.0)]], "<note>"), BarRow("b", [[("x", 2.0), ("y", 0.0)]])], "<s>"
    )
    assert [float(width) for width in re.findall(r"width:(\S+?)%", html)] == [25, 75, 50]
    assert "<a>" not in html
    assert "<note>" not in html
    assert html.count("&lt;") == 3
    assert "bar" in bar_chart([BarRow("nothing", [[("x", 0.0)]])], "s")


def test_gantt_bars_are_positioned() -> None:
    html = gantt_chart(
        {"rank 0": [GanttBar(0, 1, "0F0", "forward"), GanttBar(3, 4, "0B0", "backward")], "rank 1": []}, "ms"
    )
    assert re.findall(r"left:(\S+?)%;width:(\S+?)%", html) == [("0", "25"), ("75", "25")]
    assert html.count('class="lane"') == 2


def test_a_heat_map_shows_the_largest_value_of_each_column() -> None:
    steps, even = np.arange(1.0, 301.0), np.ones(300)
    hot = even.copy()
    hot[7] = 3.0
    html = heat_map({"layer 0": even, "layer <1>": hot}, steps, 1.0, "step")
    assert html.count("<i ") == 2 * MOST_COLUMNS
    assert html.count('opacity:1"') == 1
    assert 'title="steps 6 to 10: 3"' in html
    assert "layer &lt;1&gt;" in html
    assert heat_map({"layer 0": even[:1]}, steps[:1], 1.0, "step").count('title="step 1: 1"') == 1
