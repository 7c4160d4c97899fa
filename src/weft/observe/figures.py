"""The plots of a report, as plotly figures: data and axes. Text and grid follow the page's light or dark style."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from weft.parallel.pipeline.gantt import Bar
from weft.train.metrics import Evaluation, StepMetrics, format_count

# Middle tones that stand out on white and on near-black alike.
ACCENT, CONTRAST, NEUTRAL = "#2b84d6", "#e0732f", "#8b93a1"


def column(rows: Sequence[StepMetrics], name: str) -> np.ndarray:
    """One field over all steps as float64 [num_steps]; None, NaN and infinity become NaN, which plots omit."""
    values = np.array([getattr(row, name) for row in rows], dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def smooth(values: np.ndarray) -> np.ndarray:
    """Mean under a bell of about a twentieth of the steps, centred so that it does not lag. [num_steps] float64."""
    window = np.hanning(2 * (len(values) // 40) + 3)
    known = np.isfinite(values)
    total = np.convolve(np.where(known, values, 0), window)
    weight = np.convolve(known, window)
    half = len(window) // 2
    with np.errstate(invalid="ignore"):  # no known value near: 0 / 0, which plots omit
        return (total / weight)[half : half + len(values)]


def loss_figure(
    rows: Sequence[StepMetrics], evaluations: Sequence[Evaluation], baselines: Mapping[str, float]
) -> go.Figure:
    """Training loss, raw and smoothed, and held-out loss, against the losses of models that only count."""
    loss = column(rows, "loss")
    held_out = go.Scatter(
        x=[evaluation.step for evaluation in evaluations],
        y=np.array([evaluation.held_out_loss for evaluation in evaluations], dtype=np.float64),
        name="held-out",
        mode="lines+markers",
        line={"color": CONTRAST, "width": 2},
        marker={"size": 8},
    )
    figure = go.Figure([_line(rows, loss, "each step", faint=True), _line(rows, smooth(loss), "smoothed"), held_out])
    for name, value in baselines.items():
        line = {"color": NEUTRAL, "width": 1.5, "dash": "dash"}
        figure.add_hline(value, line=line, annotation_text=f"{name} {value:.3f}", annotation_position="top right")
    return _style(figure, "loss (nats per token)")


def grad_norm_figure(rows: Sequence[StepMetrics], clip_norm: float) -> go.Figure:
    """Gradient norm before clipping, the norm it is clipped to (0: none), and the steps that were skipped."""
    figure = go.Figure(_line(rows, column(rows, "grad_norm"), "gradient norm"))
    skipped = [row.step for row in rows if row.skipped]
    if skipped:
        # One trace of vertical strokes, on an axis of its own because the norm of a skipped step is seldom finite.
        strokes = [(step, height) for step in skipped for height in (0, 1, None)]
        x, y = zip(*strokes, strict=True)
        line = {"color": CONTRAST, "width": 1.5, "dash": "dot"}
        figure.add_scatter(x=x, y=y, name="skipped step", mode="lines", line=line, yaxis="y2", hoverinfo="x+name")
        figure.update_layout(yaxis2={"overlaying": "y", "range": [0, 1], "visible": False})
    if clip_norm > 0:
        figure.add_trace(_level(rows, clip_norm, f"clipped to {clip_norm:g}", NEUTRAL))
    ticks = [digit * 10.0**exponent for exponent in range(-12, 13) for digit in (1, 2, 5)]
    _style(figure, "gradient norm")
    return figure.update_layout(yaxis={"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]})


def throughput_figure(rows: Sequence[StepMetrics]) -> go.Figure:
    """Target tokens a second over all ranks, and their median."""
    return _with_median(rows, column(rows, "tokens_per_second"), "tokens per second", format_count)


def step_time_figure(rows: Sequence[StepMetrics]) -> go.Figure:
    """Seconds a step took, and their median."""
    return _with_median(rows, column(rows, "step_seconds"), "seconds per step", "{:.3g} s".format)


def learning_rate_figure(rows: Sequence[StepMetrics]) -> go.Figure:
    """Learning rate above, loss scale below, over the same steps."""
    figure = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.1, row_heights=[0.62, 0.38])
    figure.add_trace(_line(rows, column(rows, "learning_rate"), "learning rate"), row=1, col=1)
    figure.add_trace(_line(rows, column(rows, "loss_scale"), "loss scale"), row=2, col=1)
    _style(figure, "learning rate", showlegend=False)
    figure.update_layout(xaxis_title=None, xaxis2_title="step", yaxis2_title="loss scale")
    figure.update_yaxes(rangemode="tozero")
    return figure.update_layout(yaxis_tickformat="~e")


def memory_figure(memory: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Bytes by kind, as measured beside as predicted: {"measured": {kind: bytes}, "predicted": {kind: bytes}}."""
    most = max((size for sizes in memory.values() for size in sizes.values()), default=0)
    unit, divisor = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    figure = go.Figure()
    for source, color in ("measured", ACCENT), ("predicted", NEUTRAL):
        sizes = {kind: size / divisor for kind, size in memory.get(source, {}).items()}
        label = {"texttemplate": "%{x:.3g}", "textposition": "outside", "constraintext": "none", "cliponaxis": False}
        figure.add_bar(y=list(sizes), x=list(sizes.values()), name=source, orientation="h", marker_color=color, **label)
    _style(figure, "")
    figure.update_yaxes(autorange="reversed", showgrid=False).update_xaxes(showgrid=True, showline=False)
    return figure.update_layout(xaxis_title=f"{unit} per rank", hovermode="closest", bargap=0.3, bargroupgap=0.06)


KINDS = {  # of a pipeline's slots: name and colour
    "F": ("forward", ACCENT),
    "B": ("backward", CONTRAST),
    "I": ("gradient of inputs", "#d9a13b"),
    "W": ("gradient of weights", "#4aa36c"),
    "FB": ("forward and backward", "#8a63c9"),
    "FI": ("forward and gradient of inputs", "#8a63c9"),
}


def pipeline_figure(timeline: Sequence[Bar]) -> go.Figure:
    """A pipeline's schedule: one line a rank, its slots as bars over time."""
    figure = go.Figure()
    for kind, (name, color) in KINDS.items():
        found = [bar for bar in timeline if bar.kind == kind]
        if found:
            figure.add_bar(
                y=[f"rank {bar.rank}" for bar in found],
                x=[bar.end - bar.start for bar in found],
                base=[bar.start for bar in found],
                text=[bar.label for bar in found],
                name=name,
                orientation="h",
                marker={"color": color, "line": {"width": 1, "color": "rgba(255,255,255,0.6)"}},
                textposition="inside",
                insidetextanchor="middle",
                hovertemplate="%{text}<extra></extra>",
            )
    _style(figure, "")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure.update_layout(
        barmode="overlay", bargap=0.15, hovermode="closest", xaxis_title="forward of a stage = 1"
    )


def _with_median(
    rows: Sequence[StepMetrics], values: np.ndarray, title: str, label: Callable[[float], str]
) -> go.Figure:
    figure = go.Figure(_line(rows, values, "each step"))
    if np.isfinite(values).any():
        median = float(np.nanmedian(values))
        figure.add_trace(_level(rows, median, f"median {label(median)}", CONTRAST))
    return _style(figure, title).update_layout(yaxis_rangemode="tozero")


def _line(rows: Sequence[StepMetrics], values: np.ndarray, name: str, *, faint: bool = False) -> go.Scatter:
    """One value over the steps; few points are marked, for a line through one point shows nothing."""
    line = {"color": ACCENT, "width": 1 if faint else 2}
    mode = "lines+markers" if len(rows) <= 40 else "lines"
    return go.Scatter(
        x=[row.step for row in rows], y=values, name=name, mode=mode, line=line, opacity=0.6 if faint else 1
    )


def _level(rows: Sequence[StepMetrics], value: float, name: str, color: str) -> go.Scatter:
    """A dashed horizontal line over all steps."""
    x, line = [rows[0].step, rows[-1].step], {"color": color, "width": 1.5, "dash": "dash"}
    return go.Scatter(x=x, y=[value, value], name=name, mode="lines", line=line, hoverinfo="skip")


def _style(figure: go.Figure, y_title: str, *, showlegend: bool = True) -> go.Figure:
    """The common look. Colours of text and grid come from the page's style sheet."""
    clear = "rgba(0,0,0,0)"
    hover = {"bgcolor": "#1d2433", "bordercolor": "#1d2433", "font": {"color": "#ffffff", "size": 12}}
    figure.update_layout(
        template="none",
        font={"family": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif", "size": 12},
        paper_bgcolor=clear,
        plot_bgcolor=clear,
        margin={"l": 60, "r": 16, "t": 28, "b": 44},
        showlegend=showlegend,
        legend={"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom", "bgcolor": clear},
        hovermode="x unified",
        hoverlabel=hover,
        xaxis_title="step",
        yaxis_title=y_title,
    )
    figure.update_xaxes(showgrid=False, zeroline=False, showline=True, linewidth=1, automargin=True)
    return figure.update_yaxes(zeroline=False, automargin=True, title_standoff=8)
