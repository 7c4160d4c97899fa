"""A page with predicted step times of published runs against measured ones."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weft.observe import page
from weft.observe.chart import NEUTRAL, Dot, Series, log_axis, scatter_chart
from weft.planner.costmodel.step_time import CALIBRATED

from .validate import Outcome, score


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
        page.section("By source", page.plot("scatter", figure, "Seconds of a step", caption, tall=True)),
    ]
    path.write_text(page.document("Predicted and measured · Weft", content), encoding="utf-8")


def scatter_figure(outcomes: Sequence[Outcome]) -> str:
    """Predicted against measured seconds, both axes logarithmic, with the diagonal and the interval beside it."""
    ends = np.array(sorted(outcome.measured for outcome in outcomes)[:: max(len(outcomes) - 1, 1)])
    x, y = (log_axis([getattr(one, name) for one in outcomes]) for name in ("measured", "planner"))
    lines = [Series("", ends, ends, NEUTRAL)]
    lines += [Series("", ends, ends / factor, NEUTRAL, "dash") for factor in CALIBRATED]
    groups: dict[str, list[Dot]] = {}
    for one in outcomes:
        text = f"{describe(one)}\nmeasured {one.measured:.3g} s, predicted {one.planner:.3g} s"
        groups.setdefault(one.run.family, []).append(Dot(one.measured, one.planner, text))
    return scatter_chart(groups, x, y, ("measured (seconds)", "predicted (seconds)"), lines)


def describe(outcome: Outcome) -> str:
    """A run in a line."""
    run, layout = outcome.run, outcome.run.layout
    degrees = f"tp {layout.tp}, pp {layout.pp}, cp {layout.cp}, ep {layout.ep}, dp {layout.dp}"
    return f"{run.id}: {run.model} on {run.num_devices} {run.cluster.device.name}, {degrees}"
