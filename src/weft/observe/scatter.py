"""A page with predicted step times of published runs against measured ones."""

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from weft.observe import page
from weft.observe.figures import ACCENT, CONTRAST, NEUTRAL
from weft.planner.step_time import CALIBRATED
from weft.planner.validate import Outcome, score

TONES = (ACCENT, CONTRAST, "#3aa675", "#b05cc8", "#c9a227", "#d64b6a", "#5f7d95", "#7a9b2e")
SIGNS = ("circle", "square", "diamond", "cross", "triangle-up")


def write_scatter(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write one page that needs no network: every judged run, by source, with what it is when pointed at."""
    figure = scatter_figure(outcomes)
    errors = score(outcomes)
    low, high = CALIBRATED
    caption = (
        f"On the line predictions are right; nine of ten times measured are {low} to {high} of them: dashed lines."
    )
    content = [
        page.header("Weft planner", "Predicted and measured step times", f"{errors.runs} runs, MAPE {errors.mape:.1%}"),
        page.section("By source", page.plot("scatter", figure, "Seconds of a step", caption, wide=True, tall=True)),
    ]
    path.write_text(page.document("Predicted and measured · Weft", content), encoding="utf-8")


def scatter_figure(outcomes: Sequence[Outcome]) -> go.Figure:
    """Predicted against measured seconds, both axes logarithmic, with the diagonal and the interval beside it."""
    figure = go.Figure()
    ends = [min(outcome.measured for outcome in outcomes), max(outcome.measured for outcome in outcomes)]
    for factor, dash in ((1.0, "solid"), (1 / CALIBRATED[0], "dash"), (1 / CALIBRATED[1], "dash")):
        y, line = [end * factor for end in ends], {"color": NEUTRAL, "width": 1, "dash": dash}
        figure.add_scatter(x=ends, y=y, mode="lines", line=line, showlegend=False, hoverinfo="skip")
    for i, family in enumerate(dict.fromkeys(outcome.run.family for outcome in outcomes)):
        some = [outcome for outcome in outcomes if outcome.run.family == family]
        figure.add_scatter(
            x=[outcome.measured for outcome in some],
            y=[outcome.planner for outcome in some],
            mode="markers",
            name=family,
            marker={"color": TONES[i % len(TONES)], "symbol": SIGNS[i // len(TONES) % len(SIGNS)], "size": 7},
            text=[describe(outcome) for outcome in some],
            hovertemplate="%{text}<br>measured %{x:.3g} s, predicted %{y:.3g} s<extra></extra>",
        )
    figure.update_xaxes(type="log", title="measured (s)")
    figure.update_yaxes(type="log", title="predicted (s)")
    clear, margin = "rgba(0,0,0,0)", {"l": 60, "r": 16, "t": 8, "b": 44}
    figure.update_layout(template="none", paper_bgcolor=clear, plot_bgcolor=clear, margin=margin)
    return figure


def describe(outcome: Outcome) -> str:
    """A run in a line."""
    run, layout = outcome.run, outcome.run.layout
    degrees = f"tp {layout.tp}, pp {layout.pp}, cp {layout.cp}, ep {layout.ep}, dp {layout.dp}"
    return f"{run.id}: {run.model} on {run.num_devices} {run.cluster.device.name}, {degrees}"
