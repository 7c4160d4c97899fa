"""HTML pages of a profile, and of two profiles side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.files import replace_file
from weft.observe import page
from weft.observe.chart import (
    NEUTRAL,
    TONES,
    BarRow,
    Dot,
    GanttBar,
    Series,
    bar_chart,
    gantt_chart,
    line_chart,
    linear_axis,
    log_axis,
    scatter_chart,
)
from weft.observe.figures import KINDS, MOST_SLOTS, format_bytes, unit_of_bytes, unit_of_seconds
from weft.observe.profile.summary import verdicts
from weft.observe.profile.terms import COMPUTATION, DATA_TERM, HOST, PIPELINE
from weft.parallel.pipeline.schedule import ACTION
from weft.plan import DEGREES
from weft.training.metrics import format_count

NO_BREAK_SPACE = "\u00a0"
PAGE, COMPARISON = "profile.html", "compare.html"
SHOWN_OPERATORS, SHOWN_DOTS, SHOWN_SHAPES = 20, 40, 2
BUSY_SHARE = 0.9  # processor time of computation below which other processes slowed the ranks down


def describe_plan(plan: Mapping[str, Any]) -> str:
    """Degrees above one, ZeRO stage and schedule of a resolved plan."""
    parallel = plan["parallel"]
    degrees = [f"{axis} {parallel[axis]}" for axis in DEGREES if parallel.get(axis, 1) > 1]
    schedule = [str(plan["pipeline"]["schedule"])] if parallel.get("pp", 1) > 1 else []
    return ", ".join([*(degrees or ["one rank"]), f"zero {parallel['zero']}", *schedule])


def describe_work(work: Mapping[str, Any]) -> str:
    """Model and tokens of a step."""
    size = format_count(work["parameters"])
    return f"{work['family']}, {size} parameters; {work['rows']} rows of {work['seq_len']} tokens a step"


def seconds_text(seconds: float) -> str:
    """Format seconds with three digits and a unit."""
    unit, size = unit_of_seconds(abs(seconds))
    return f"{seconds / size:.3g}{NO_BREAK_SPACE}{unit}"


def write_profile_page(summary: Mapping[str, Any], folder: Path) -> Path:
    """Write the page of a profile.

    Raises:
        OSError: the page cannot be written.
    """
    work, steps = summary["work"], summary["steps"]
    title = f"{work['family']} · {format_count(work['parameters'])} parameters · {summary['world_size']} ranks"
    measured = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    line = f"{describe_plan(summary['plan'])}; {measured} on {summary['device']}"
    content = [
        page.header("Weft profile", title, line),
        page.key_figures(_cards(summary)),
        page.notice("Below the goals", findings(summary)),
        page.section("Where the time went", _terms(summary)),
        page.section("Collectives", _collectives(summary)),
        *_pipeline(summary),
        *_operators(summary),
        page.section("Memory", _memory(summary)),
        page.section("Gaps", _gaps(summary)),
        page.section("About this profile", page.table(("What", "How"), _about(summary))),
    ]
    return _write(folder / PAGE, f"{title} · profile", content)


def _write(path: Path, title: str, content: Sequence[str]) -> Path:
    replace_file(path, page.document(f"{title} · Weft", content))
    return path


def _cards(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    cards = [
        (found.name, "–" if found.value is None else f"{found.value:.1%}", found.text)
        for found in verdicts(dict(summary))
    ]
    cards.append(("Step", seconds_text(summary["seconds"]), "profiled, mean"))
    if cost := summary["cost"]:
        note = f"profiled {seconds_text(cost['profiled'])}, plain {seconds_text(cost['plain'])}, medians"
        cards.append(("Cost of profiling", f"{cost['profiled'] / cost['plain'] - 1:+.1%}", note))
    return cards


def findings(summary: Mapping[str, Any]) -> list[str]:
    """Sentences about the verdicts that missed their goal, with the evidence."""
    kernel, exposed, traffic = verdicts(dict(summary))
    seconds, terms, found = summary["seconds"], summary["terms"], []
    if kernel.passed is False:
        rest = sorted(((value, term) for term, value in terms.items() if term != COMPUTATION), reverse=True)
        shares = ", ".join(f"{term} {value / seconds:.1%}" for value, term in rest[:3])
        found.append(f"Kernel use is {kernel.value:.1%}; the rest of the step: {shares}.")
    if exposed.passed is False and summary["collectives"]:
        row = next(row for row in summary["collectives"] if row["operation"] != "receive")
        found.append(
            f"Exposed communication is {exposed.value:.1%}, most of it in {row['operation']} over {row['axis']}: "
            f"{row['calls']:g} calls, {format_bytes(row['bytes'])}, {seconds_text(row['exposed'])} a step."
        )
    if traffic.passed is False:
        found.append(
            f"Only {traffic.value:.1%} of the bytes from memory are compulsory: fused operators "
            "(plan.compute) or smaller micro-batches keep more in the cache."
        )
    if terms[DATA_TERM] > 0.05 * seconds:
        found.append(f"The step waits {terms[DATA_TERM] / seconds:.1%} of its time for its micro-batches.")
    for rank in summary["ranks"]:
        if not summary["rates"]["measured"]:
            break
        busy = rank["cpu_seconds"] / (rank["terms"][COMPUTATION] + rank["terms"][HOST])
        if busy < BUSY_SHARE:
            found.append(
                f"Rank {rank['rank']} had the processor for {busy:.0%} of the time of its operators and of the host: "
                "other processes ran on it, or the host slept."
            )
    if summary["pipeline"] and not summary["pipeline"]["equals_schedule"]:
        found.append("The slots that ran are not those of the schedule.")
    return found


def _terms(summary: Mapping[str, Any]) -> str:
    unit, size = unit_of_seconds(summary["seconds"])
    rows = [
        BarRow(rank["label"], [[(term, value / size) for term, value in rank["terms"].items()]])
        for rank in summary["ranks"]
    ]
    caption = "Mean over the profiled steps. Overlapped communication is part of the computation."
    return page.plot("plot-terms", bar_chart(rows, f"{unit} per step", "{:.3g}".format), "Terms of a step", caption)


def _collectives(summary: Mapping[str, Any]) -> str:
    rows = [
        (
            row["axis"],
            row["operation"],
            f"{row['calls']:g}",
            format_bytes(row["bytes"]) if row["bytes"] else "–",
            seconds_text(row["exposed"]),
            seconds_text(row["hidden"]),
            f"{row['exposed'] / summary['seconds']:.1%}",
        )
        for row in summary["collectives"]
    ]
    columns = ("axis", "operation", "calls per step", "sent", "exposed", "overlapped", "exposed share of step")
    return page.table(columns, rows) if rows else page.absent("The steps had no communication.")


def _pipeline(summary: Mapping[str, Any]) -> list[str]:
    found = summary["pipeline"]
    if not found:
        return []
    slots = [slot for lane in found["slots"].values() for slot in lane]
    if not slots or len(slots) > MOST_SLOTS:
        return [page.section("Pipeline", page.absent(f"{len(slots):,} slots are not drawn; they are in the trace."))]
    unit, size = unit_of_seconds(max(end for _, _, end in slots))
    lanes = {
        label: [GanttBar(start / size, end / size, text, _kind(text)) for text, start, end in lane]
        for label, lane in found["slots"].items()
    }
    same = "as in" if found["equals_schedule"] else "other than in"
    caption = f"Measured slots of step {summary['steps'][0]}, {same} the schedule; waits for messages are left blank."
    return [page.section("Pipeline", page.plot("plot-pipeline", gantt_chart(lanes, unit), "Slots", caption))]


def _kind(slot: str) -> str:
    return KINDS["".join(kind for _, kind, _ in ACTION.findall(slot))]


def _operators(summary: Mapping[str, Any]) -> list[str]:
    operators, rates, seconds = summary["operators"], summary["rates"], summary["seconds"]
    rows = [
        (
            short_name(operator["name"]),
            short_shapes(operator["shapes"]),
            f"{operator['calls']:.3g}",
            seconds_text(operator["seconds"]),
            f"{operator['seconds'] / seconds:.1%}",
            "–" if operator["flops"] is None else f"{operator['flops'] / operator['seconds'] / 1e9:.3g}",
            "–" if operator["bytes"] is None else f"{operator['bytes'] / operator['seconds'] / 1e9:.3g}",
            operator["bound"] or "–",
            "–" if operator["share"] is None else f"{operator['share']:.0%}",
        )
        for operator in operators[:SHOWN_OPERATORS]
    ]
    columns = ("operator", "input shapes", "calls", "time", "of step", "GFLOP/s", "GB/s", "bound by", "of roofline")
    lead = (
        "Time per step and rank. Of roofline: time that the peak rate or the bandwidth allows, as a share of the time."
    )
    found = [page.section("Operators", page.lead(lead), page.table(columns, rows))]
    if rates["flops"] and rates["bandwidth"] and any(operator["flops"] for operator in operators):
        found.append(page.section("Roofline", _roofline(summary)))
    return found


def short_name(name: str) -> str:
    """Operator without the namespace of torch, and without the prefix of long names."""
    return name.removeprefix("aten::").removeprefix("_scaled_dot_product_")


def short_shapes(shapes: str) -> str:
    """The first shapes, and the number of the others."""
    parts = shapes.split(" ")
    more = [f"+ {len(parts) - SHOWN_SHAPES} more"] if len(parts) > SHOWN_SHAPES + 1 else []
    return ", ".join([*(parts[:SHOWN_SHAPES] if more else parts), *more])


def _roofline(summary: Mapping[str, Any]) -> str:
    rates = summary["rates"]
    known = [o for o in summary["operators"][:SHOWN_DOTS] if o["flops"] and o["bytes"] and o["seconds"]]
    groups: dict[str, list[Dot]] = {}
    for o in known:
        intensity, rate = o["flops"] / o["bytes"], o["flops"] / o["seconds"] / 1e9
        text = f"{o['name']} {o['shapes']}: {rate:.3g} GFLOP/s, {o['share']:.0%} of the roofline"
        groups.setdefault(short_name(o["name"]), []).append(Dot(intensity, rate, text))
    ridge = rates["flops"] / rates["bandwidth"]
    intensities = [dot.x for dots in groups.values() for dot in dots]
    x = log_axis([min([*intensities, ridge]) / 2, max([*intensities, ridge]) * 2])
    roof = [min(rates["flops"], at * rates["bandwidth"]) / 1e9 for at in (x.low, ridge, x.high)]
    y = log_axis([*roof, *(dot.y for dots in groups.values() for dot in dots)])
    line = Series("roofline", np.array([x.low, ridge, x.high]), np.array(roof), NEUTRAL, "dash")
    chart = scatter_chart(groups, x, y, ("FLOPs per byte of inputs and outputs", "GFLOP/s"), [line])
    source = "measured on a rank while all ranks measured" if rates["measured"] else "published"
    caption = (
        f"Operators with FLOPs; {rates['flops'] / 1e9:.3g} GFLOP/s and {rates['bandwidth'] / 1e9:.3g} GB/s, {source}."
    )
    return page.plot("plot-roofline", chart, "Rate and intensity", caption, tall=True)


def _memory(summary: Mapping[str, Any]) -> str:
    samples = summary["memory"]
    if not samples:
        return page.absent("The memory of the second step was not recorded.")
    kinds = list(dict.fromkeys(kind for _, sizes in samples for kind in sizes))
    unit, size = unit_of_bytes(max(sum(sizes.values()) for _, sizes in samples))
    x = np.array([index for index, _ in samples], dtype=np.float64)
    series = [
        Series(kind, x, np.array([sizes.get(kind, 0) / size for _, sizes in samples]), TONES[index % len(TONES)])
        for index, kind in enumerate(kinds)
    ]
    total = Series("total", x, np.sum([one.y for one in series], axis=0), NEUTRAL, "dash")
    values = [float(value) for value in total.y]
    chart = line_chart([total, *series], linear_axis(x, tight=True), linear_axis(values, zero=True), ("operator", unit))
    peak_at, peak = max(samples, key=lambda sample: sum(sample[1].values()))
    parts = ", ".join(
        f"{kind} {format_bytes(amount)}" for kind, amount in sorted(peak.items(), key=lambda p: -p[1])[:3]
    )
    caption = (
        f"Live tensors after each operator of the second step of the process, on the first profiled rank. Peak "
        f"{format_bytes(sum(peak.values()))} at operator {peak_at}: {parts}. Activations include temporaries."
    )
    return page.plot("plot-memory", chart, "Memory by kind", caption, tall=True)


def _gaps(summary: Mapping[str, Any]) -> str:
    rows = [
        (
            seconds_text(gap["seconds"]),
            f"{gap['rank']}",
            f"{gap['step']}, {seconds_text(gap['start'])}",
            gap["phase"],
            gap["after"],
            gap["before"],
        )
        for gap in summary["gaps"]
    ]
    lead = "Longest times in which a rank neither computed nor communicated nor took its data."
    columns = ("time", "rank", "step, at", "phase", "after", "before")
    return page.lead(lead) + (page.table(columns, rows) if rows else page.absent("No gap of 0.1 ms or more."))


def _about(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    cache, error = summary["cache"], summary["clock_error"]
    rows = [
        ("Trace", "trace.json.gz beside this page; open it in https://ui.perfetto.dev or chrome://tracing"),
        ("Clocks", "one clock for all ranks" if not error else f"aligned to rank 0 within {seconds_text(error)}"),
    ]
    if cost := summary["cost"]:
        rows.append(("Cost", f"compared with {cost['plain_steps']} unprofiled steps of the same run, without warm-up"))
    if cache["compulsory"]:
        capacity = format_bytes(cache["capacity"])
        rows.append(
            (
                "Memory traffic",
                f"LRU model of a cache of {capacity} per rank, by tensor: {format_bytes(cache['accessed'])} accessed, "
                f"{format_bytes(cache['fetched'])} from memory, {format_bytes(cache['compulsory'])} compulsory",
            )
        )
    if cache["no_counters"]:
        rows.append(("Counters of the processor", f"not available: {cache['no_counters']}"))
    return rows


def write_comparison_page(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str], folder: Path) -> Path:
    """Write the page of two profiles of the same work.

    Args:
        a, b: summaries.
        names: names of the sides.
        folder: existing folder.

    Raises:
        OSError: the page cannot be written.
    """
    ratio = a["seconds"] / b["seconds"]
    unit, size = unit_of_seconds(max(a["seconds"], b["seconds"]))
    terms = _terms_of_both(a, b)
    bars = [
        BarRow(name, [[(term, side["terms"].get(term, 0.0) / size) for term in terms]], describe_plan(side["plan"]))
        for name, side in zip(names, (a, b), strict=True)
    ]
    cards = [
        ("Step of A", seconds_text(a["seconds"]), names[0]),
        ("Step of B", seconds_text(b["seconds"]), names[1]),
        ("B is", f"{ratio:.3g} x", "as fast as A; profiled steps"),
    ]
    if a["cost"] and b["cost"]:
        plain = a["cost"]["plain"] / b["cost"]["plain"]
        cards.append(("Without profiling", f"{plain:.3g} x", "B against A; median steps"))
    content = [
        page.header("Weft profile", "Two plans", describe_work(a["work"])),
        page.key_figures(cards),
        page.section(
            "Where the time went",
            page.plot("plot-terms", bar_chart(bars, f"{unit} per step", "{:.3g}".format), "Terms of a step", ""),
        ),
        page.section(
            "Terms",
            page.table(("term", "A", "B", "B - A", "A / B"), comparison_rows(a, b)),
        ),
        page.section("Verdicts", page.table(("number", "A", "B", "goal"), _verdict_rows(a, b))),
        page.section("Collectives of A", _collectives(a)),
        page.section("Collectives of B", _collectives(b)),
    ]
    return _write(folder / COMPARISON, "Two plans · profile", content)


def _terms_of_both(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Terms of two profiles, in order of precedence."""
    terms = dict.fromkeys([*a["terms"], *b["terms"]])
    order = {COMPUTATION: 0, PIPELINE: 2, DATA_TERM: 3, HOST: 4}
    return sorted(terms, key=lambda term: order.get(term, 1))


def comparison_rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Table of the terms of two profiles, the step in the last row."""
    pairs = [(term, a["terms"].get(term, 0.0), b["terms"].get(term, 0.0)) for term in _terms_of_both(a, b)]
    return [
        (
            term,
            seconds_text(of_a),
            seconds_text(of_b),
            f"{'+' if of_b >= of_a else ''}{seconds_text(of_b - of_a)}",
            f"{of_a / of_b:.3g}" if of_b else "–",
        )
        for term, of_a, of_b in [*pairs, ("step", a["seconds"], b["seconds"])]
    ]


def _verdict_rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    def text(value: float | None) -> str:
        return "–" if value is None else f"{value:.1%}"

    pairs = zip(verdicts(dict(a)), verdicts(dict(b)), strict=True)
    return [(of_a.name, text(of_a.value), text(of_b.value), of_a.text) for of_a, of_b in pairs]
