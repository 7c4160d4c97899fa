"""HTML page of `weft plan`: charts of the best layouts, and the reasons against alternatives."""

import re
from pathlib import Path

from weft.observe import figures, page
from weft.observe.chart import BarRow, bar_chart
from weft.observe.expert_reasons import expert_reasons
from weft.observe.figures import format_bytes, unit_of_bytes, unit_of_seconds
from weft.observe.proposal import MEMORY, compared, parameters_in_words
from weft.parallel.pipeline.gantt import bars
from weft.planner.costmodel.timeline import timeline_of
from weft.planner.search.alternatives import EQUAL, TERMS, reason, setting_in_words
from weft.planner.search.propose import Proposal, describe
from weft.planner.search.strategy import cluster_text

NO_BREAK_SPACE = "\u00a0"


def write_page(found: Proposal, path: Path) -> None:
    """Write one self-contained page: time and memory of the best layouts by term, and the reasons against alternatives."""
    first = found.best[0]
    title = f"{parameters_in_words(found.space.shape.parameters)} on {cluster_text(found.space.cluster)}"
    rows = [
        (
            setting_in_words(d.setting, d.value),
            describe(d.choice) if d.choice else "–",
            re.sub(r"(?<=\d) s\b", f"{NO_BREAK_SPACE}s", reason(d, first, found.space.cluster).partition(": ")[2]),
        )
        for d in found.alternatives
    ]
    experts = expert_reasons(found.space, first.layout, found.scalar)
    lead = (
        f"Step times that differ by less than {EQUAL:.0%} count as equal: the planner rarely knows which of two such layouts "
        "is faster, and its error of each step time is larger. "
        "Among equal layouts, the one with the fewest techniques is chosen; it is listed first."
    )
    plots = [
        page.plot("plot-time", _time_chart(found), "Step time by term", f"Chosen: {describe(first)}.", wide=True),
        page.plot(
            "plot-memory", _memory_chart(found), "Peak memory by term", "The same layouts, fullest rank.", wide=True
        ),
    ]
    content = [
        page.header("Weft plan", title, describe(first)),
        page.key_figures(_cards(found)),
        page.section("Best layouts", page.lead(lead), page.group("plots", plots)),
        page.section(
            "Why not another layout",
            page.table(("Setting", "Best layout with it", "Compared with the chosen one"), rows),
        ),
        *([page.section("Experts", *map(page.lead, experts))] if experts else []),
        *_pipeline(found),
    ]
    path.write_text(page.document(f"{title} · Weft", content), encoding="utf-8")


def _cards(found: Proposal) -> list[tuple[str, str, str]]:
    """Key figures of the chosen layout as (name, value, note)."""
    first, cost = found.best[0], found.costs[0]
    seconds = first.time.seconds * found.scalar
    unit, size = unit_of_seconds(seconds)
    cards = [
        ("Step", f"{seconds / size:.3g} {unit}", "predicted"),
        ("Throughput", f"{cost.tokens_per_second:,.0f}", "tokens/s"),
    ]
    if cost.mfu is not None:
        cards.append(("MFU", f"{cost.mfu:.1%}", "causal attention, without recomputation"))
    cards.append(("Peak memory", format_bytes(first.memory.total), "fullest rank"))
    cards.append(("Layouts", f"{found.size:,}", "in the search space"))
    return cards


def _time_chart(found: Proposal) -> str:
    unit, size = unit_of_seconds(max(choice.time.seconds for choice in found.best) * found.scalar)
    parts = [
        [(name, getattr(choice.time, term) * found.scalar / size) for term, name in TERMS.items()]
        for choice in found.best
    ]
    notes = ["chosen", *map(compared, found.slower[1:])]
    rows = [BarRow(describe(choice), [bar], note) for choice, bar, note in zip(found.best, parts, notes, strict=True)]
    return bar_chart(rows, f"{unit} per step", "{:.3g}".format)


def _memory_chart(found: Proposal) -> str:
    unit, size = unit_of_bytes(max(choice.memory.total for choice in found.best))
    rows = [
        BarRow(describe(choice), [[(part, getattr(choice.memory, part) / size) for part in MEMORY]])
        for choice in found.best
    ]
    return bar_chart(rows, f"{unit} per rank", "{:.3g}".format)


def _pipeline(found: Proposal) -> list[str]:
    layout = found.best[0].layout
    if layout.pp == 1:
        return []
    timeline = timeline_of(found.space, layout)
    drawn = bars(timeline)
    unit, size = unit_of_seconds(timeline.makespan * found.scalar)
    if len(drawn) > figures.MOST_SLOTS:
        plot = page.absent(
            f"The schedule has {len(drawn):,} slots, too many to draw; weft plan --timeline writes them to a file."
        )
    else:
        chart = figures.pipeline_figure(drawn, unit, size / found.scalar)
        plot = page.plot("plot-pipeline", chart, "Pipeline", "Forward and backward of one step, by pp rank.")
    return [page.section("Pipeline", plot)]
