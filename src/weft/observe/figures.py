"""The charts of a report and of a plan: data and axes."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from weft.observe.chart import (
    ACCENT,
    CONTRAST,
    NEUTRAL,
    Axis,
    BarRow,
    Series,
    Span,
    bar_chart,
    gantt_chart,
    line_chart,
    linear_axis,
    log_axis,
    number,
)
from weft.parallel.pipeline.gantt import Bar
from weft.train.metrics import Evaluation, StepMetrics

FEWEST_SMOOTHED = 50  # steps: a mean over fewer says nothing that the line itself does not
MOST_SLOTS = 4000  # of a pipeline that is drawn
KINDS = {  # of a pipeline's slots
    "F": "forward",
    "B": "backward",
    "I": "gradient of inputs",
    "W": "gradient of weights",
    "FB": "forward and backward",
    "FI": "forward and gradient of inputs",
}


def column(rows: Sequence[StepMetrics], name: str) -> np.ndarray:
    """One field over all steps as float64 [num_steps]; None, NaN and infinity become NaN, which charts omit."""
    values = np.array([getattr(row, name) for row in rows], dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def smooth(values: np.ndarray) -> np.ndarray:
    """Mean under a bell of about a twentieth of the steps, centred so that it does not lag. [num_steps] float64."""
    window = np.hanning(2 * (len(values) // 40) + 3)
    known = np.isfinite(values)
    total = np.convolve(np.where(known, values, 0), window)
    weight = np.convolve(known, window)
    half = len(window) // 2
    with np.errstate(invalid="ignore"):  # no known value near: 0 / 0, which charts omit
        return (total / weight)[half : half + len(values)]


def loss_figure(rows: Sequence[StepMetrics], evaluations: Sequence[Evaluation], baselines: Mapping[str, float]) -> str:
    """Training loss, of many steps smoothed too, and held-out loss, against the losses of models that only count."""
    steps, loss = _steps(rows), column(rows, "loss")
    series = [Series("each step", steps, loss)]
    if len(rows) >= FEWEST_SMOOTHED:
        series = [Series("each step", steps, loss, ACCENT, "faint"), Series("smoothed", steps, smooth(loss))]
    if evaluations:
        x = np.array([evaluation.step for evaluation in evaluations], dtype=np.float64)
        held_out = np.array([evaluation.held_out_loss for evaluation in evaluations], dtype=np.float64)
        series.append(Series("held-out", x, held_out, CONTRAST))
    y = linear_axis([*np.concatenate([one.y for one in series]), *baselines.values()])
    levels = {f"{name} {value:.3f}": value for name, value in baselines.items()}
    return line_chart(series, _step_axis(series), y, ("step", "loss (nats per token)"), levels=levels)


def grad_norm_figure(rows: Sequence[StepMetrics], clip_norm: float) -> str:
    """Gradient norm before clipping, the norm it is clipped to (0: none), and the steps that were skipped."""
    steps = _steps(rows)
    series = [Series("gradient norm", steps, column(rows, "grad_norm"))]
    if clip_norm > 0:
        series.append(_across(f"clipped to {clip_norm:g}", steps, clip_norm))
    y = log_axis(np.concatenate([one.y for one in series]))
    skipped = "skipped step", [row.step for row in rows if row.skipped]
    return line_chart(series, _step_axis(series), y, ("step", "gradient norm"), strokes=skipped)


def step_figure(
    rows: Sequence[StepMetrics],
    name: str,
    title: str,
    label: Callable[[float], str] = number,
    *,
    with_median: bool = False,
) -> str:
    """One field over the steps, from zero, and its median.

    Args:
        rows: the steps.
        name: of the field.
        title: of its axis, with its unit.
        label: text of a value.
        with_median: whether a line marks the median.
    """
    steps, values = _steps(rows), column(rows, name)
    series, known = [Series(title, steps, values)], values[np.isfinite(values)]
    if with_median and len(known):
        median = float(np.median(known))
        series = [Series("each step", steps, values), _across(f"median {label(median)}", steps, median)]
    return line_chart(series, _step_axis(series), linear_axis(values, label, zero=True), ("step", title))


def memory_figure(memory: Mapping[str, Mapping[str, float]]) -> str:
    """Bytes by kind, as measured beside as predicted: {"measured": {kind: bytes}, "predicted": {kind: bytes}}."""
    unit, divisor = unit_of_bytes(max((size for sizes in memory.values() for size in sizes.values()), default=0))
    kinds = dict.fromkeys(kind for sizes in memory.values() for kind in sizes)
    rows = [
        BarRow(kind, [[(source, sizes[kind] / divisor)] for source, sizes in memory.items() if kind in sizes])
        for kind in kinds
    ]
    return bar_chart(rows, f"{unit} per rank", "{:.3g}".format)


def unit_of_bytes(most: float) -> tuple[str, int]:
    """The unit in which sizes up to `most` bytes are read best, and its bytes."""
    units = ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)
    return next((unit for unit in units if most >= unit[1]), ("bytes", 1))


def unit_of_seconds(most: float) -> tuple[str, float]:
    """The unit in which times up to `most` seconds are read best, and its seconds."""
    units = ("s", 1.0), ("ms", 1e-3)
    return next((unit for unit in units if most >= unit[1]), ("μs", 1e-6))


def format_bytes(size: float) -> str:
    """Bytes with four digits and their unit."""
    unit, divisor = unit_of_bytes(size)
    return f"{size / divisor:.4g} {unit}"


def pipeline_figure(timeline: Sequence[Bar], title: str, unit: float = 1.0) -> str:
    """A pipeline's schedule: one lane a rank, its slots over time.

    Args:
        timeline: the slots.
        title: of the axis of time.
        unit: of it, in that of the timeline.
    """
    lanes: dict[str, list[Span]] = {}
    for bar in sorted(timeline, key=lambda bar: bar.rank):
        span = Span(bar.start / unit, bar.end / unit, bar.label, KINDS[bar.kind])
        lanes.setdefault(f"rank {bar.rank}", []).append(span)
    return gantt_chart(lanes, title)


def _steps(rows: Sequence[StepMetrics]) -> np.ndarray:
    return np.array([row.step for row in rows], dtype=np.float64)


def _across(name: str, steps: np.ndarray, value: float) -> Series:
    """A dashed line over all steps."""
    return Series(name, steps[[0, -1]], np.array([value, value]), NEUTRAL, "dash")


def _step_axis(series: Sequence[Series]) -> Axis:
    """The steps of all lines, from zero unless they begin far from it."""
    steps = np.concatenate([one.x for one in series])
    return linear_axis(steps, zero=bool(steps.min() <= steps.max() / 10), tight=True)
