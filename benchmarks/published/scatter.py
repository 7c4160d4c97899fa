"""HTML page with a scatter chart of predicted over measured step times of published runs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weft.observe import page
from weft.observe.chart import NEUTRAL, Dot, Series, log_axis, scatter_chart
from weft.planner.costmodel.step_time import CALIBRATED

from .validate import ScoredRun, score


def write_scatter(outcomes: Sequence[ScoredRun], path: Path) -> None:
    """Write one self-contained page: one point per scored run, coloured by source, with a hover text."""
    figure = scatter_figure(outcomes)
    errors = score(outcomes)
    low, high = CALIBRATED
    caption = (
        f"Solid line: predicted = measured. Dashed lines: 90 % interval, measured = {low} to {high} times predicted."
    )
    content = [
        page.header("Weft planner", "Predicted and measured step times", f"{errors.runs} runs, MAPE {errors.mape:.1%}"),
        page.section("By source", page.plot("scatter", figure, "Step time", caption, tall=True)),
    ]
    path.write_text(page.document("Predicted and measured · Weft", content), encoding="utf-8")


def scatter_figure(outcomes: Sequence[ScoredRun]) -> str:
    """Scatter chart of predicted over measured seconds on logarithmic axes, with the diagonal and the 90 % interval."""
    ends = np.array(sorted(outcome.measured for outcome in outcomes)[:: max(len(outcomes) - 1, 1)])
    x, y = (log_axis([getattr(one, name) for one in outcomes]) for name in ("measured", "planner"))
    lines = [Series("", ends, ends, NEUTRAL)]
    lines += [Series("", ends, ends / factor, NEUTRAL, "dash") for factor in CALIBRATED]
    groups: dict[str, list[Dot]] = {}
    for one in outcomes:
        text = f"{describe(one)}\nmeasured {one.measured:.3g} s, predicted {one.planner:.3g} s"
        groups.setdefault(one.run.family, []).append(Dot(one.measured, one.planner, text))
    return scatter_chart(groups, x, y, ("measured (seconds)", "predicted (seconds)"), lines)


def describe(outcome: ScoredRun) -> str:
    """Run and layout as one line of text."""
    run, layout = outcome.run, outcome.run.layout
    degrees = f"tp {layout.tp}, pp {layout.pp}, cp {layout.cp}, ep {layout.ep}, dp {layout.dp}"
    return f"{run.id}: {run.model} on {run.num_devices} {run.cluster.device.name}, {degrees}"
