"""What `weft plan` found, as a page with charts."""

from pathlib import Path

import plotly.graph_objects as go

from weft.observe import figures, page
from weft.parallel.pipeline.gantt import bars
from weft.planner.hardware import GIB
from weft.planner.propose import Proposal, describe
from weft.planner.search import TERMS, reason, setting_in_words
from weft.planner.strategy import in_words
from weft.planner.timeline import timeline_of

BARS = 4000  # of a pipeline that a page draws at most


def write_page(found: Proposal, path: Path) -> None:
    """Write one page that opens anywhere: the best layouts by what their time and memory consist of, and why not others."""
    first, cost = found.best[0], found.costs[0]
    title = f"{found.space.shape.parameters / 1e9:,.1f} billion parameters on {in_words(found.space.cluster)}"
    cards = [
        ("Step", f"{first.time.seconds * found.scalar:.3g} s", "predicted"),
        ("Throughput", f"{cost.tokens_per_second:,.0f}", "tokens/s"),
        ("MFU", f"{cost.mfu:.1%}", "causal attention, nothing counted twice"),
        ("Memory", f"{first.memory.total / GIB:,.1f} GiB", "fullest rank"),
        ("Layouts", f"{found.size:,}", "in the space"),
    ]
    best = [
        page.plot("plot-time", _time_figure(found), "Seconds of a step", f"The best: {describe(first)}.", wide=True),
        page.plot(
            "plot-memory", _memory_figure(found), "Memory of the fullest rank", "Of the same layouts.", wide=True
        ),
    ]
    rows = [
        (
            setting_in_words(d.setting, d.value),
            describe(d.choice) if d.choice else "–",
            reason(d, first, found.space.cluster),
        )
        for d in found.directions
    ]
    content = [
        page.header("Weft plan", title, describe(first)),
        page.key_figures(cards),
        page.section("The best layouts", page.group("plots", best)),
        page.section("Why not another", page.table(("setting", "best with it", "compared"), rows)),
        *_pipeline(found),
    ]
    path.write_text(page.document(f"{title} · Weft", content), encoding="utf-8")


def _names(found: Proposal) -> list[str]:
    return [f"{number}. {describe(choice)}" for number, choice in enumerate(found.best, 1)]


def _time_figure(found: Proposal) -> go.Figure:
    return _stacked(
        _names(found),
        {name: [getattr(choice.time, term) * found.scalar for choice in found.best] for term, name in TERMS.items()},
        "s",
    )


def _memory_figure(found: Proposal) -> go.Figure:
    parts = ("states", "activations", "transient", "reserve", "framework")
    return _stacked(
        _names(found), {part: [getattr(choice.memory, part) / GIB for choice in found.best] for part in parts}, "GiB"
    )


def _stacked(names: list[str], parts: dict[str, list[float]], unit: str) -> go.Figure:
    figure = go.Figure(
        [go.Bar(y=names, x=values, name=name, orientation="h") for name, values in parts.items() if any(values)]
    )
    figure.update_layout(barmode="stack", xaxis_title=unit, yaxis={"autorange": "reversed"}, template="plotly_white")
    return figure


def _pipeline(found: Proposal) -> list[str]:
    layout = found.best[0].layout
    if layout.pp == 1:
        return []
    drawn = bars(timeline_of(found.space, layout))
    if len(drawn) > BARS:
        return []
    plot = page.plot("plot-pipeline", figures.pipeline_figure(drawn), "Pipeline", "One step, by rank of pp.", wide=True)
    return [page.section("Pipeline", plot)]
