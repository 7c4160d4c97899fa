"""Training report: one self-contained page, `report.html`, generated from the files of a run folder."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic.fields import FieldInfo

from weft.data import RowSplit
from weft.errors import PlanError
from weft.job import Job, resolve_job
from weft.observe import figures, page
from weft.observe.evaluation import evaluation_section
from weft.observe.figures import format_bytes
from weft.observe.goodput import COUNTED, bill, bill_lines, divide_time
from weft.observe.prediction import compare, table_rows
from weft.observe.record import RunRecord, missing, read_run
from weft.observe.use_model import picture, usage
from weft.parallel.pipeline.gantt import bars
from weft.parallel.pipeline.plan_schedule import plan_timeline
from weft.plan import Table, min_ranks
from weft.training.metrics import StepMetrics, format_count, format_seconds


def write_report(run: Path) -> Path:
    """Write `report.html` into a run folder: one offline page with key figures, plots, plan, job and environment.

    Args:
        run: run folder; an aborted run is supported.

    Returns:
        The path of the page.

    Raises:
        DataError: the folder does not exist, or a file in it is damaged.
        JobError: `job.toml` is not a job of this version.
        OSError: the page cannot be written; an existing page is kept.
    """
    record = read_run(run)
    title = " · ".join([_family(record), *_size(record.facts)])
    rows, facts = record.rows, record.facts
    content = [
        page.header("Weft training run", title, _summary(record)),
        page.notice("This run is not complete", missing(record)),
        page.key_figures(key_figures(record)),
        page.section("Training", _loss_plot(record)),
        *evaluation_section(record.model_results, record.task_evaluations),
        page.group(
            "columns",
            [
                page.section(
                    "Sample", _text(facts.get("sample"), "No sample text was recorded."), *picture(run, facts)
                ),
                page.section("Use this model", usage(run, facts)),
            ],
        ),
        *([page.section("Optimization", _optimization_plots(record))] if rows else []),
        page.section("Speed and memory", _resource_plots(record)),
        *([page.section("Communication", _communication(rows))] if rows else []),
        *(
            [page.section("Pipeline", _pipeline_plot(record.job))]
            if record.job and record.job.plan.parallel.pp > 1
            else []
        ),
        *_time_and_cost(record),
        *_prediction(record),
        page.section("Plan", *_plan_tables(record.job)),
        page.group("columns", _about(facts)),
    ]
    return page.write_report_page(run, title, content)


def key_figures(run: RunRecord) -> list[tuple[str, str, str]]:
    """Key figures of the run as (name, value, note); without MFU if it is not known."""
    rows, unknown = run.rows, "–"
    cards = [
        ("Final loss", f"{rows[-1].loss:.4f}", f"from {rows[0].loss:.4f}") if rows else ("Final loss", unknown, "")
    ]
    task, accuracy = run.facts.get("task"), run.facts.get("accuracy")
    held_out = run.evaluations[-1].held_out_loss if run.evaluations else None
    if held_out is None:
        cards.append(("Held-out loss", unknown, "not evaluated"))
    else:
        of_words = task not in ("classification", "diffusion")
        cards.append(
            ("Held-out loss", f"{held_out:.4f}", f"perplexity {math.exp(held_out):.4g}" * (of_words and held_out < 100))
        )
    if task is None:
        beaten = "–", "not evaluated"
        if held_out is not None:
            beaten = best_baseline_beaten(held_out, run.facts.get("baselines", {}))
        cards.append(("Baseline beaten", *beaten))
    if accuracy is not None:
        cards.append(("Accuracy", f"{accuracy:.1%}", "of held-out answers"))
    cards += [(name, f"{value:.4g}", "held-out records") for name, value in run.facts.get("metrics", {}).items()]
    speed, mfu = _median(rows, "tokens_per_second"), _median(rows, "mfu")
    cards.append(
        (
            "Throughput",
            unknown if speed is None else format_count(speed),
            f"{'tokens' if task is None else 'targets'}/s, median",
        )
    )
    if mfu is not None:
        cards.append(("MFU", f"{mfu:.1%}", "of peak, median"))
    peak = max((row.peak_memory_bytes for row in rows), default=None)
    cards.append(("Peak memory", unknown if peak is None else format_bytes(peak), "largest rank"))
    if found := divide_time(run.attempts, run.history):
        cards.append(("Goodput", f"{found.share:.1%}", f"of {format_seconds(found.total)}"))
    if (regions := next((row.compiled_regions for row in reversed(rows)), None)) is not None:
        cards.append(("Compiled regions", str(regions), "in the last step, rank 0"))
    cards.append(("Skipped steps", str(sum(row.skipped for row in rows)), f"of {len(rows)}"))
    return cards


def best_baseline_beaten(held_out_loss: float, baselines: Mapping[str, float]) -> tuple[str, str]:
    """Lowest baseline above the held-out loss, and the model's margin in nats."""
    if not baselines:
        return "–", "not measured"
    beaten = {loss: name for name, loss in baselines.items() if held_out_loss < loss}
    if not beaten:
        return "none", f"lowest is {min(baselines.values()):.4f}"
    return beaten[min(beaten)], f"by {min(beaten) - held_out_loss:.3f} nats"


def _pools(row: StepMetrics) -> str:
    """Offload pools: peak and reserved memory, and the share of requests served by free blocks."""
    return "".join(
        f" Offloaded {name}: peak {format_bytes(counts['peak'])} of {format_bytes(counts['held'])} reserved; "
        f"{counts['reused'] / counts['requested']:.0%} of the requested bytes reused free blocks."
        for name, counts in (row.pools or {}).items()
    )


def _communication(rows: list[StepMetrics]) -> str:
    """Table of the communication over each axis: volume, messages, and exposed and overlapped time."""
    sent, step_seconds = rows[-1].comm or {}, statistics.median(row.step_seconds for row in rows)
    lines = []
    for where, counts in sent.items():
        known = [row.comm[where] for row in rows if row.comm and "exposed_seconds" in row.comm.get(where, {})]
        exposed, hidden = (
            statistics.median(row[f"{kind}_seconds"] for row in known) if known else None
            for kind in ("exposed", "hidden")
        )
        operations = [name.removesuffix("_bytes") for name in counts if name.endswith("_bytes")]
        times = ["", "", "", ""]
        if exposed is not None and hidden is not None:
            speed = f"{counts['bytes'] / (exposed + hidden) / 1e9:.3g} GB/s" if exposed + hidden else ""
            times = [f"{exposed:.3g} s", f"{hidden:.3g} s", f"{exposed / step_seconds:.1%}", speed]
        axis, _, link = where.partition(" ")
        link = {"host": "intra-node", "between": "inter-node"}.get(link, "")
        volume = f"{counts['bytes'] / 1e6:.4g} MB"
        lines.append((axis, link, ", ".join(operations), volume, f"{counts['messages']:g}", *times))
    columns = ["axis", "link", "operations", "sent per step", "messages", "exposed", "overlapped"]
    columns += ["exposed share of step", "bandwidth"]
    if not lines:
        return page.absent("No communication was recorded.")
    if not any(link for _, link, *_ in lines):  # only traffic between hosts is told apart
        columns.remove("link")
        lines = [(axis, *rest) for axis, _, *rest in lines]
    return page.table(columns, lines)


def _overflows(rows: list[StepMetrics]) -> str:
    """Sentence with the number of steps with gradient overflow per pipeline rank; empty without overflow."""
    counts = Counter(stage for row in rows for stage in row.overflowed)
    by_stage = ", ".join(f"{counts[stage]} on pp rank {stage}" for stage in sorted(counts))
    return f" Steps with non-finite gradients: {by_stage}." if counts else ""


def _loss_plot(run: RunRecord) -> str:
    rows, evaluations = run.rows, run.evaluations
    if not rows:
        return page.absent("No step was recorded.")
    baselines = run.facts.get("baselines", {})
    held_out = f" Held-out loss {evaluations[-1].held_out_loss:.4f}." if evaluations else ""
    against = f" Dashed: count-based baselines ({', '.join(baselines)})." if baselines else ""
    return page.plot(
        "plot-loss",
        figures.loss_figure(rows, evaluations, baselines),
        "Loss",
        f"From {rows[0].loss:.4f} to {rows[-1].loss:.4f} in {len(rows)} steps.{held_out}{against}",
        tall=True,
    )


def _optimization_plots(run: RunRecord) -> str:
    rows = run.rows
    clip_norm = run.job.optimizer.clip_norm if run.job else 0.0
    skipped = sum(row.skipped for row in rows)
    plots = [
        page.plot(
            "plot-grad-norm",
            figures.grad_norm_figure(rows, clip_norm),
            "Gradient norm",
            f"Before clipping, over all parameters and ranks. Skipped steps: {skipped}.{_overflows(rows)}",
        ),
        page.plot(
            "plot-learning-rate",
            figures.step_figure(rows, "learning_rate", "learning rate"),
            "Learning rate",
            f"Maximum: {max(row.learning_rate for row in rows):.3g}.",
        ),
    ]
    if any(row.expert_imbalances for row in rows):
        largest = max(row.expert_imbalance or 0 for row in rows)
        caption = f"Load of the busiest expert over the mean, by block with experts. Largest: {largest:.3g}; 1 is even."
        plots.append(page.plot("plot-experts", figures.expert_load_figure(rows), "Load of experts", caption, wide=True))
    if any(row.loss_scale != 1 for row in rows):
        figure = figures.step_figure(rows, "loss_scale", "loss scale")
        plots.append(
            page.plot("plot-loss-scale", figure, "Loss scale", f"Final value: {rows[-1].loss_scale:g}.", wide=True)
        )
    return page.group("plots", plots)


def _resource_plots(run: RunRecord) -> str:
    rows, memory = run.rows, run.facts.get("memory", {})
    plots = []
    if rows:
        slowest = max(rows, key=lambda row: row.step_seconds)
        plots += [
            page.plot(
                "plot-throughput",
                figures.step_figure(rows, "tokens_per_second", "tokens per second", format_count, with_median=True),
                "Throughput",
                f"Sum over all ranks; {format_count(sum(row.tokens for row in rows))} target tokens in total.",
            ),
            page.plot(
                "plot-step-time",
                figures.step_figure(rows, "step_seconds", "seconds", "{:.3g}".format, with_median=True),
                "Step time",
                f"Slowest: step {slowest.step}, {slowest.step_seconds:.3g} s.",
            ),
        ]
    if memory:
        figure = figures.memory_figure(memory)
        plots.append(page.plot("plot-memory", figure, "Memory by kind", "Measured and predicted.", wide=True))
    else:
        plots.append(page.absent("Memory by kind was not recorded."))
    watched = next((row for row in rows if row.peak), None)
    if watched is not None and watched.peak:
        figure = figures.memory_figure({"measured": watched.peak})
        words = f"Step {watched.step} on rank 0 at its memory peak, reached by {watched.peak_operation}."
        plots.append(page.plot("plot-peak", figure, "Peak memory of a step", words + _pools(rows[-1]), wide=True))
    return page.group("plots", plots)


def _time_and_cost(run: RunRecord) -> list[str]:
    """Section with the goodput of the run, its energy and its cost; empty without a record of its time."""
    found = divide_time(run.attempts, run.history)
    if found is None:
        return []
    times = [(name, format_seconds(span), f"{span / found.total:.1%}") for name, span in found.seconds.items()]
    content = [page.table(("Time", "", "share"), sorted(times, key=lambda row: row[0] != COUNTED))]
    if run.job and (cost := bill(run.attempts, run.history, run.job.cluster)):
        content.append(page.table(("Expense", ""), list(bill_lines(cost).items())))
    return [page.section("Time, energy and cost", *content)]


def _prediction(run: RunRecord) -> list[str]:
    """Section that compares the planner's prediction with the measurement; empty without a prediction."""
    lines = compare(run)
    table = page.table(("weft plan", "predicted", "measured", "error"), table_rows(lines))
    return [page.section("Predicted and measured", table)] if lines else []


def _pipeline_plot(job: Job) -> str:
    """Chart of the planned pipeline schedule; forward and each part of a backward take 1 unit of time on every stage."""
    plan = job.plan
    try:
        resolved = resolve_job(job, min_ranks(plan), native_bf16=False)
        micro_batches = RowSplit.of_job(resolved).num_micro_batches
        timeline = plan_timeline(resolved.plan, micro_batches)
    except PlanError as error:  # the file of a custom schedule no longer exists
        return page.absent(error.what)
    idle = sum(timeline.bubble_rate) / len(timeline.bubble_rate)
    held = ", ".join(map(str, timeline.peak_in_flight))
    caption = (
        f"{plan.pipeline.schedule} with {micro_batches} micro-batches, assuming equal stages: the ranks idle for {idle:.1%} "
        f"of a step; maximum micro-batches in flight by rank: {held}."
    )
    drawn = bars(timeline)
    if len(drawn) > figures.MOST_SLOTS:
        return page.absent(f"{caption} The schedule has {len(drawn):,} slots, too many to draw.")
    figure = figures.pipeline_figure(drawn, "time, in units of one stage's forward")
    return page.plot("plot-pipeline", figure, "Pipeline", caption)


def _settings(table: Table, prefix: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
    """Dotted key, value and field of every setting; the planner's prediction has a separate section."""
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if name == "prediction":
            continue
        if isinstance(value, Table):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value, field


def _plan_tables(job: Job | None) -> list[str]:
    """Plan settings that differ from their defaults; collapsed below: all other settings, and the full job."""
    if job is None:
        return [page.absent("job.toml is missing.")]
    changed, defaults = [], []
    for key, value, field in _settings(job.plan):
        default, meaning = field.get_default(call_default_factory=True), field.description or ""
        if value == default:
            defaults.append((key, _setting(value), meaning))
        else:
            changed.append((key, _setting(value), _setting(default), meaning))
    return [
        page.table(["Setting", "Value", "Default", "Meaning"], changed)
        if changed
        else page.absent("All settings have their default values."),
        page.folded(
            f"{len(defaults)} settings with default values", page.table(["Setting", "Value", "Meaning"], defaults)
        ),
        page.folded("Full job (job.toml)", page.preformatted(job.to_toml())),
    ]


def _setting(value: Any) -> str:
    """Plan value as text."""
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _about(facts: Mapping[str, Any]) -> list[str]:
    environment = [(name, str(value)) for name, value in facts.get("environment", {}).items()]
    anatomy = [(role, _names(value)) for role, value in facts.get("anatomy", {}).items()]
    return [
        page.section("Environment", page.table(["Name", "Value"], environment)),
        page.section("Anatomy", page.table(["Role", "Modules"], anatomy)),
    ]


def _names(value: Any) -> str:
    """Module names or their number as text; more than three names are shortened to first, last and count."""
    names = value if isinstance(value, list) else [value]
    return ", ".join(map(str, names)) if len(names) <= 3 else f"{names[0]} … {names[-1]} ({len(names)})"


def _text(text: str | None, absent: str) -> str:
    return page.preformatted(text) if text else page.absent(absent)


def _family(run: RunRecord) -> str:
    """Model family as recorded, otherwise from the job's model config or path."""
    if "model_type" in run.facts or run.job is None:
        return run.facts.get("model_type", "A model")
    model = run.job.model
    if isinstance(model.config, dict):
        return str(model.config.get("model_type", "A model"))
    path = Path(model.path or model.config or "")
    return (path.parent if path.name == "config.json" else path).name.removesuffix(".json") or "A model"


def _size(facts: Mapping[str, Any]) -> Iterable[str]:
    """Number of parameters, and of active parameters if it differs."""
    count = facts.get("parameters")
    if count is None:
        return
    yield f"{format_count(count)} parameters"
    active = facts.get("active_parameters", count)
    if active != count:
        yield f"{format_count(active)} active"


def _summary(run: RunRecord) -> str:
    facts, tokens = run.facts, sum(row.tokens for row in run.rows)
    parts = [f"{len(run.rows)} steps", f"{format_count(tokens)} target tokens"]
    if "world_size" in facts:
        parts.append(f"{facts['world_size']} rank{'s' * (facts['world_size'] != 1)}")
    if "device" in facts:
        parts.append(str(facts["device"]))
    if "seconds" in facts:
        parts.append(f"{format_seconds(facts['seconds'])} in total")
    return " · ".join(parts)


def _median(rows: list[StepMetrics], name: str) -> float | None:
    """Median of a field over the steps with a finite value; None if there are none."""
    values = figures.column(rows, name)
    return float(np.nanmedian(values)) if np.isfinite(values).any() else None
