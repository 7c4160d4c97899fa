"""What each way to hold less would save, and what it would cost: dry runs of a job with one switch more each."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from weft.errors import PlanError
from weft.job import Job
from weft.plan import Plan
from weft.planner.dryrun.trace import Trace, trace, trace_all

GIB = 2**30
CHEAP: dict[str, Any] = {"recompute": ("activation", "norm")}
SWITCHES: dict[str, dict[str, dict[str, Any]]] = {
    "as written": {},
    "split weights": {"precision": {"weights": "split"}},
    "recompute activation, norm": {"memory": CHEAP},
    "recompute mlp": {"memory": {"recompute": ("mlp",)}},
    "recompute attention": {"memory": {"recompute": ("attention",)}},
    "recompute block": {"memory": {"recompute": ("block",)}},
    "offload attention": {"memory": {"offload": ("attention",)}},
    "offload block": {"memory": {"offload": ("block",)}},
    "states of 8 bits": {"precision": {"optimizer_state_dtype": "int8"}},
    "optimizer on the host": {"memory": {"optimizer_device": "host"}},
    "split, recompute activation and norm, offload block, optimizer on the host": {
        "precision": {"weights": "split"},
        "memory": {**CHEAP, "offload": ("block",), "optimizer_device": "host"},
    },
    "split, recompute block, offload block, optimizer on the host": {
        "precision": {"weights": "split"},
        "memory": {"recompute": ("block",), "offload": ("block",), "optimizer_device": "host"},
    },
}


@dataclass(frozen=True)
class Option:
    """A job with a switch more."""

    name: str
    found: Trace | None
    """None where the plan refuses it."""
    refused: str = ""


def compare_options(job: Job, world_size: int, rank: int | None = None, device_type: str = "cpu") -> list[Option]:
    """Dry runs of one rank with each of `SWITCHES`.

    Args:
        job: its plan is the first rung.
        world_size: ranks of the job.
        rank: one of them; None for the fuller of the first and the last.
        device_type: what the ranks run on.

    Raises:
        PlanError, ModelError, JobError: as of `trace`, for the job as it is written.
    """
    ends = trace(job, world_size, sorted({0, world_size - 1}) if rank is None else [rank], device_type)
    fullest = max(ends, key=lambda found: found.count.peak)
    rungs = [Option("as written", fullest)]
    tasks: dict[str, tuple[Job, int, int, str]] = {}
    refused: dict[str, str] = {}
    for name, tables in list(SWITCHES.items())[1:]:
        plan = switch(job.plan, tables)
        try:
            plan.resolve(world_size)
        except PlanError as error:
            refused[name] = error.what
        else:
            tasks[name] = job.model_copy(update={"plan": plan}), world_size, fullest.rank, device_type
    found = dict(zip(tasks, trace_all(list(tasks.values())), strict=True))
    rungs += [Option(name, found.get(name), refused.get(name, "")) for name in list(SWITCHES)[1:]]
    return rungs


def switch(plan: Plan, tables: dict[str, dict[str, Any]]) -> Plan:
    """A plan with other settings in some of its tables."""
    changed = {name: getattr(plan, name).model_copy(update=settings) for name, settings in tables.items()}
    return plan.model_copy(update=changed)


FIGURES = ("peak GiB", "saves", "held elsewhere, GiB", "to it and back, GB a step", "TFLOP", "more")


def figures(found: Trace, base: Trace) -> tuple[str, ...]:
    """`FIGURES` of a rung, in words; `base` is the first one's."""
    return (
        f"{found.count.peak / GIB:,.3f}",
        f"{1 - found.count.peak / base.count.peak:.1%}",
        f"{sum(found.elsewhere.values()) / GIB:,.3f}",
        f"{found.moved / 1e9:,.3f}",
        f"{found.count.flops / 1e12:,.3f}",
        f"{found.count.flops / base.count.flops - 1:.1%}",
    )


def print_rungs(rungs: list[Option]) -> None:
    """Print where the memory of the first rung is, and what each switch does to it."""
    base = rungs[0].found
    assert base is not None
    console = Console(highlight=False, soft_wrap=True)
    peak = base.count.peak
    console.print(f"Rank {base.rank} of {base.world_size}, {base.parameters / 1e6:,.1f} million parameters of its own")
    where = Table("at the peak, as written", Column("GiB", justify="right"), Column("share", justify="right"))
    lines = dict(base.count.peak_bytes)
    roles = {f"  made in {role}": size for role, size in base.count.peak_roles.items()}
    for name, size in {**lines, **roles}.items():
        where.add_row(name, f"{size / GIB:,.3f}", f"{size / peak:.1%}")
    console.print(where)
    operation, shapes, role = base.count.peak_maker
    console.print(f"The peak, {peak / GIB:,.3f} GiB, is made by {operation} in {role}: {shapes}")
    table = Table("switch", *(Column(name, justify="right") for name in FIGURES))
    for rung in rungs:
        if rung.found is not None:
            table.add_row(rung.name, *figures(rung.found, base))
    console.print(table)
    for rung in rungs:
        if rung.found is None:
            console.print(f"{rung.name}: refused: {rung.refused}", markup=False)


def write_rungs(rungs: list[Option], path: Path) -> None:
    """Write all figures but messages and operations, as JSON."""
    table = [
        {"switch": rung.name, "refused": rung.refused, **(_to_dict(rung.found) if rung.found else {})} for rung in rungs
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
        "elsewhere": found.elsewhere,
        "moved": found.moved,
    }
