"""Comparison of memory options by dry runs: memory saved and work added by each option, on top of a job's own plan."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from weft.errors import PlanError
from weft.job import Job
from weft.plan import Plan, check_plan
from weft.planner.dryrun.trace import Trace, trace, trace_all

GIB = 2**30
CHEAP: dict[str, Any] = {"recompute": ("activation", "norm")}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "base plan": {},
    "split weights": {"precision": {"weights": "split"}},
    "recompute activation, norm": {"memory": CHEAP},
    "recompute mlp": {"memory": {"recompute": ("mlp",)}},
    "recompute attention": {"memory": {"recompute": ("attention",)}},
    "recompute block": {"memory": {"recompute": ("block",)}},
    "offload attention": {"memory": {"offload": ("attention",)}},
    "offload block": {"memory": {"offload": ("block",)}},
    "8-bit optimizer states": {"precision": {"optimizer_state_dtype": "int8"}},
    "optimizer on the host": {"memory": {"optimizer_device": "host"}},
    "split weights, recompute activation and norm, offload block, optimizer on the host": {
        "precision": {"weights": "split"},
        "memory": {**CHEAP, "offload": ("block",), "optimizer_device": "host"},
    },
    "split weights, recompute block, offload block, optimizer on the host": {
        "precision": {"weights": "split"},
        "memory": {"recompute": ("block",), "offload": ("block",), "optimizer_device": "host"},
    },
}


@dataclass(frozen=True)
class Option:
    """Result of one memory option."""

    name: str
    found: Trace | None
    """Dry run with the option; None if the plan refuses it."""
    refused: str = ""
    """Reason of a refusal."""


def compare_options(job: Job, world_size: int, rank: int | None = None, device_type: str = "cpu") -> list[Option]:
    """Dry-run one rank with each option of `OPTIONS`.

    Args:
        job: job whose plan is the base; its own dry run is the first result.
        world_size: number of ranks of the job.
        rank: rank to run; None: the first or the last, whichever has the higher peak.
        device_type: device type of the ranks.

    Raises:
        PlanError, ModelError, JobError: as raised by `trace` for the unchanged job.
    """
    ends = trace(job, world_size, sorted({0, world_size - 1}) if rank is None else [rank], device_type)
    fullest = max(ends, key=lambda found: found.count.peak)
    options = [Option("base plan", fullest)]
    tasks: dict[str, tuple[Job, int, int, str]] = {}
    refused: dict[str, str] = {}
    for name, tables in list(OPTIONS.items())[1:]:
        plan = with_settings(job.plan, tables)
        try:
            check_plan(plan, world_size)
        except PlanError as error:
            refused[name] = error.what
        else:
            tasks[name] = job.model_copy(update={"plan": plan}), world_size, fullest.rank, device_type
    found = dict(zip(tasks, trace_all(list(tasks.values())), strict=True))
    options += [Option(name, found.get(name), refused.get(name, "")) for name in list(OPTIONS)[1:]]
    return options


def with_settings(plan: Plan, tables: dict[str, dict[str, Any]]) -> Plan:
    """Copy of a plan with other settings in some of its tables."""
    changed = {name: getattr(plan, name).model_copy(update=settings) for name, settings in tables.items()}
    return plan.model_copy(update=changed)


FIGURES = ("peak GiB", "saved", "offloaded GiB", "offload traffic, GB per step", "TFLOP", "more TFLOP")


def figures(found: Trace, base: Trace) -> tuple[str, ...]:
    """Values of the columns `FIGURES` for one option, relative to the dry run of the base."""
    return (
        f"{found.count.peak / GIB:,.3f}",
        f"{1 - found.count.peak / base.count.peak:.1%}",
        f"{sum(found.offloaded.values()) / GIB:,.3f}",
        f"{found.offload_traffic / 1e9:,.3f}",
        f"{found.count.flops / 1e12:,.3f}",
        f"{found.count.flops / base.count.flops - 1:.1%}",
    )


def print_options(options: list[Option]) -> None:
    """Print the memory of the base at its peak by kind, and a table with the effect of each option."""
    base = options[0].found
    assert base is not None
    console = Console(highlight=False, soft_wrap=True)
    peak = base.count.peak
    console.print(
        f"Rank {base.rank} of {base.world_size}, {base.parameters / 1e6:,.1f} million parameters on this rank"
    )
    where = Table("at the peak, base plan", Column("GiB", justify="right"), Column("share", justify="right"))
    lines = dict(base.count.peak_bytes)
    roles = {f"  from {role}": size for role, size in base.count.peak_roles.items()}
    for name, size in {**lines, **roles}.items():
        where.add_row(name, f"{size / GIB:,.3f}", f"{size / peak:.1%}")
    console.print(where)
    operation, shapes, role = base.count.peak_operation
    console.print(f"The peak of {peak / GIB:,.3f} GiB is reached by {operation} in {role}: {shapes}")
    table = Table("option", *(Column(name, justify="right") for name in FIGURES))
    for option in options:
        if option.found is not None:
            table.add_row(option.name, *figures(option.found, base))
    console.print(table)
    for option in options:
        if option.found is None:
            console.print(f"{option.name}: refused: {option.refused}", markup=False)


def write_options(options: list[Option], path: Path) -> None:
    """Write all figures except communication records and operations as JSON."""
    table = [
        {"option": option.name, "refused": option.refused, **(_to_dict(option.found) if option.found else {})}
        for option in options
    ]
    path.write_text(json.dumps(table, indent=1), encoding="utf-8")


def _to_dict(found: Trace) -> dict[str, Any]:
    count = asdict(replace(found.count, messages=[], operations=Counter(), moments={}))
    del count["messages"], count["operations"], count["moments"]
    return {
        "rank": found.rank,
        "parameters": found.parameters,
        **count,
        "peak_bytes": found.count.peak_bytes,
        "peak": found.count.peak,
        "offloaded": found.offloaded,
        "offload_traffic": found.offload_traffic,
    }
