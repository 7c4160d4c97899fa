"""Output of dry runs: a table for the terminal, and JSON."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from weft.job import Job
from weft.planner.dryrun.trace import Trace
from weft.training.compare import describe

GIB = 2**30


def print_traces(job: Job, traces: list[Trace]) -> None:
    """Print a table with one column per rank: parameters, FLOPs, memory between steps and at the peak, communication by axis.

    Args:
        traces: dry runs of the job.
    """
    console = Console(highlight=False, soft_wrap=True)
    console.print(describe(job.model_copy(update={"plan": traces[0].plan}), traces[0].world_size), markup=False)
    table = Table("one step", *(Column(f"rank {trace.rank}", justify="right") for trace in traces))
    for name, cells in rows(traces):
        table.add_row(name, *cells, end_section=name.startswith("total") or name == "TFLOP")
    console.print(table)
    seconds = ", ".join(f"{trace.seconds:.1f}" for trace in traces)
    console.print(
        "Assumptions: even routing, the same number of tokens on all ranks, finite losses and gradients. "
        f"Seconds per dry run: {seconds}."
    )


def rows(traces: list[Trace]) -> list[tuple[str, list[str]]]:
    """Rows of the table: a name, and one cell per rank."""
    counts = [trace.count for trace in traces]
    lines = [
        ("parameters, millions", [f"{trace.parameters / 1e6:,.1f}" for trace in traces]),
        ("TFLOP", [f"{count.flops / 1e12:,.3f}" for count in counts]),
    ]
    for when, found in (
        ("between steps", [count.state_bytes for count in counts]),
        ("at the peak", [count.peak_bytes for count in counts]),
    ):
        kinds = list(dict.fromkeys(kind for kinds in found for kind in kinds))
        lines += [(f"GiB {when}: {kind}", [f"{kinds.get(kind, 0) / GIB:,.3f}" for kinds in found]) for kind in kinds]
        lines.append((f"total GiB {when}", [f"{sum(kinds.values()) / GIB:,.3f}" for kinds in found]))
    traffic = [{(t.axis, t.operation, t.dtype): t for t in count.traffic()} for count in counts]
    for key in dict.fromkeys(key for sums in traffic for key in sums):
        axis, operation, dtype = key
        cells = [
            f"{sums[key].messages:,} x, {sums[key].bytes / 1e6:,.3f} MB" if key in sums else "-" for sums in traffic
        ]
        lines.append((f"{axis} {operation} {str(dtype).removeprefix('torch.')}", cells))
    lines.append(("total MB sent", [f"{sum(m.bytes for m in count.messages) / 1e6:,.3f}" for count in counts]))
    return lines


def write_traces(traces: list[Trace], path: Path) -> None:
    """Write all counts, including each collective and message, as JSON: a list with one object per rank."""
    path.write_text(json.dumps([_to_dict(trace) for trace in traces], indent=1), encoding="utf-8")


def _to_dict(trace: Trace) -> dict[str, Any]:
    count = trace.count
    return {
        "rank": trace.rank,
        "world_size": trace.world_size,
        "plan": trace.plan.model_dump(),
        "parameters": trace.parameters,
        "flops": count.flops,
        "state_bytes": count.state_bytes,
        "peak_bytes": count.peak_bytes,
        "peak": count.peak,
        "traffic": [entry._asdict() | {"dtype": str(entry.dtype)} for entry in count.traffic()],
        "messages": [message._asdict() | {"dtype": str(message.dtype)} for message in count.messages],
        "seconds": trace.seconds,
    }
