"""Synthetic profiles: records and traces of ranks, written by hand."""

from typing import Any

from weft.observe.profile.ranks import RankProfile, profile_of

TRACE_SHIFT = 1000.0
"""Seconds by which the clock of the trace is ahead of the clock of the rank."""


def span(name: str, category: str, start: float, end: float, thread: Any = 7, **args: Any) -> dict[str, Any]:
    """Entry of a trace; times in seconds of the clock of the rank."""
    times = {"ts": (start + TRACE_SHIFT) * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "name": name, "cat": category, "pid": 99, "tid": thread, **times, "args": args}


def operator(name: str, start: float, end: float, thread: Any = 7, **args: Any) -> dict[str, Any]:
    return span(f"aten::{name}", "cpu_op", start, end, thread, **args)


def collective(
    axis: str, operation: str, issued: float, returned: float, size: int = 64, **times: Any
) -> dict[str, Any]:
    """Collective in a record; without further times it blocks from its call to its return."""
    known = {
        "done": returned,
        "waited": returned,
        "ended": returned,
        "thread": 7,
        "link": "",
        "bytes": size,
        "size": size,
    }
    return {"axis": axis, "operation": operation, "issued": issued, "returned": returned, **known, **times}


def record(rank: int = 0, steps: Any = ((5, 0.0, 10.0),), **changes: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "world_size": 2,
        "axes": {"dp_shard": rank},
        "device": "test",
        "device_type": "cpu",
        "work": {"family": "llama", "parameters": 1000, "blocks": 2, "rows": 4, "seq_len": 8},
        "flops_per_token": 6000.0,
        "plan": {"parallel": {"zero": 3, "dp_shard": 2, "pp": 1}, "pipeline": {"schedule": "1f1b"}},
        "steps": [list(step) for step in steps],
        "cpu_seconds": [step[2] - step[1] for step in steps],
        "first_plain_step": 3,
        "collectives": [],
        "clock": {"marks": [[-2.0, -1.0]], "offset": 0.0, "error": 0.0},
        "slots": [],
        "operators": [],
        "memory": [],
        "cache": {
            **dict.fromkeys(("capacity", "accessed", "fetched", "compulsory"), 100),
            **dict.fromkeys(("references", "misses", "counted_bytes")),
            "no_counters": "a test",
        },
        "rates": {"flops": 100.0, "bandwidth": 10.0, "measured": True},
        **changes,
    }


def profile(entries: list[dict[str, Any]], **changes: Any) -> RankProfile:
    """Profile of one rank from entries of its trace and changes of its record."""
    return profile_of(record(**changes), [span("weft: clock", "user_annotation", -2.0, -1.0), *entries])
