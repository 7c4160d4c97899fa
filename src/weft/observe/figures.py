"""Charts of training reports and plans: data series and axes."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from weft.observe.chart import (
    ACCENT,
    CONTRAST,
    NEUTRAL,
    Axis,
    BarRow,
    GanttBar,
    Series,
    bar_chart,
    format_value,
    gantt_chart,
    heat_map,
    line_chart,
    linear_axis,
    log_axis,
)
from weft.parallel.pipeline.gantt import Bar
from weft.training.metrics import Evaluation, StepMetrics

FEWEST_SMOOTHED = 50  # minimum number of steps for a smoothed line
MOST_SLOTS = 4000  # maximum number of pipeline slots to draw
KINDS = {  # kinds of pipeline slots
    "F": "forward",
    "B": "backward",
    "I": "gradient of inputs",
    "W": "gradient of weights",
    "FB": "forward and backward",
    "FI": "forward and gradient of inputs",
}


def column(rows: Sequence[StepMetrics], name: str) -> np.ndarray:
    """One field over all steps as float64 [num_steps]; None and infinity become NaN, which charts omit."""
    values = np.array([getattr(row, name) for row in rows], dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def smooth(values: np.ndarray) -> np.ndarray:
    """Smooth with a centred Hann window of about a twentieth of the steps; float64 [num_steps]."""
    window = np.hanning(2 * (len(values) // 40) + 3)
    known = np.isfinite(values)
    total = np.convolve(np.where(known, values, 0), window)
    weight = np.convolve(known, window)
    half = len(window) // 2
    with np.errstate(invalid="ignore"):  # 0 / 0 = NaN without finite values in the window; charts omit it
        return (total / weight)[half : half + len(values)]


def loss_figure(rows: Sequence[StepMetrics], evaluations: Sequence[Evaluation], baselines: Mapping[str, float]) -> str:
    """Chart of training loss (for long runs also smoothed) and held-out loss, with the losses of the count-based baselines."""
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


def history_figure(points: Mapping[str, Sequence[tuple[int, float]]], title: str) -> str:
    """Chart of one metric over the steps.

    Args:
        points: (step, value) by the name of their source; the first source is drawn first.
        title: title of the vertical axis.
    """
    series = []
    for (name, own), tone in zip(points.items(), (ACCENT, CONTRAST), strict=True):
        if own:
            steps, values = np.array(own, dtype=np.float64).T
            series.append(Series(name, steps, values, tone, "line" if len(own) > 1 else "points"))
    return line_chart(
        series, _step_axis(series), linear_axis(np.concatenate([one.y for one in series])), ("step", title)
    )


def grad_norm_figure(rows: Sequence[StepMetrics], clip_norm: float) -> str:
    """Chart of the gradient norm before clipping, with the clipping threshold (0: none) and the skipped steps."""
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
    label: Callable[[float], str] = format_value,
    *,
    with_median: bool = False,
) -> str:
    """Chart of one field over the steps, with an axis from zero.

    Args:
        rows: metrics of all steps.
        name: name of the field.
        title: title of the vertical axis, with the unit.
        label: callable that formats a value.
        with_median: True to draw a line at the median.
    """
    steps, values = _steps(rows), column(rows, name)
    series, known = [Series(title, steps, values)], values[np.isfinite(values)]
    if with_median and len(known):
        median = float(np.median(known))
        series = [Series("each step", steps, values), _across(f"median {label(median)}", steps, median)]
    return line_chart(series, _step_axis(series), linear_axis(values, label, zero=True), ("step", title))


def expert_load_figure(rows: Sequence[StepMetrics]) -> str:
    """Heat map of the load of the busiest expert over the mean, by layer and step."""
    known = [row for row in rows if row.expert_imbalances]
    table = np.array([row.expert_imbalances for row in known], dtype=np.float64)
    lanes = {f"layer {layer}": table[:, layer] for layer in range(table.shape[1]) if table[:, layer].any()}
    return heat_map(lanes, _steps(known), 1.0, "step")


def memory_figure(memory: Mapping[str, Mapping[str, float]]) -> str:
    """Bar chart of bytes by kind, for sources such as {"measured": {kind: bytes}, "predicted": {kind: bytes}}."""
    unit, divisor = unit_of_bytes(max((size for sizes in memory.values() for size in sizes.values()), default=0))
    kinds = dict.fromkeys(kind for sizes in memory.values() for kind in sizes)
    rows = [
        BarRow(kind, [[(source, sizes[kind] / divisor)] for source, sizes in memory.items() if kind in sizes])
        for kind in kinds
    ]
    return bar_chart(rows, f"{unit} per rank", "{:.3g}".format)


def unit_of_bytes(most: float) -> tuple[str, int]:
    """Suitable unit for sizes up to `most` bytes, and its size in bytes."""
    units = ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)
    return next((unit for unit in units if most >= unit[1]), ("bytes", 1))


def unit_of_seconds(most: float) -> tuple[str, float]:
    """Suitable unit for times up to `most` seconds, and its size in seconds."""
    units = ("s", 1.0), ("ms", 1e-3)
    return next((unit for unit in units if most >= unit[1]), ("μs", 1e-6))


def format_bytes(size: float) -> str:
    """Format bytes with four digits and a unit."""
    unit, divisor = unit_of_bytes(size)
    return f"{size / divisor:.4g} {unit}"


def pipeline_figure(timeline: Sequence[Bar], title: str, unit: float = 1.0) -> str:
    """Gantt chart of a pipeline schedule: one lane per rank.

    Args:
        timeline: slots of all ranks.
        title: title of the time axis.
        unit: unit of the time axis, in units of the timeline.
    """
    lanes: dict[str, list[GanttBar]] = {}
    for bar in sorted(timeline, key=lambda bar: bar.rank):
        span = GanttBar(bar.start / unit, bar.end / unit, bar.label, KINDS[bar.kind])
        lanes.setdefault(f"rank {bar.rank}", []).append(span)
    return gantt_chart(lanes, title)


def _steps(rows: Sequence[StepMetrics]) -> np.ndarray:
    return np.array([row.step for row in rows], dtype=np.float64)


def _across(name: str, steps: np.ndarray, value: float) -> Series:
    """Dashed horizontal line over all steps."""
    return Series(name, steps[[0, -1]], np.array([value, value]), NEUTRAL, "dash")


def _step_axis(series: Sequence[Series]) -> Axis:
    """Axis of the steps of all series; starts at zero if the first step is at most a tenth of the last one."""
    steps = np.concatenate([one.x for one in series])
    return linear_axis(steps, zero=bool(steps.min() <= steps.max() / 10), tight=True)
