"""Merged trace of all ranks in the format of Chrome and Perfetto (https://ui.perfetto.dev).

Each rank is a process with its threads, the streams of its device, and tracks of Weft: steps, phases and pipeline slots, and
one track for the collectives of each axis. All times are on the clock of rank 0; zero is the start of the first step.
"""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from weft.files import replace_file
from weft.observe.profile.ranks import COLLECTIVE_PROCESS, DEVICE_PROCESS, KERNEL_CATEGORIES, SLOT, RankProfile
from weft.training.profiler import CLOCK

FILE = "trace.json.gz"
# First thread numbers of tracks; threads of the host have larger ones.
STEPS, SLOTS, COLLECTIVES, STREAMS = (1, 2, 10, 1000)
HOST_THREADS = 100_000
FLOW_IDS = 2**32  # flow arrows of each rank


def merge(profiles: Sequence[RankProfile]) -> dict[str, Any]:
    """Merged trace of the ranks, as the contents of a JSON file."""
    zero = min(start for profile in profiles for _, start, _ in profile.steps)
    events = [event for profile in profiles for event in _rank_events(profile, zero)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(profiles: Sequence[RankProfile], folder: Path) -> Path:
    """Write the merged trace, compressed, as both viewers read it.

    Raises:
        OSError: the file cannot be written.
    """
    path = folder / FILE
    replace_file(path, gzip.compress(json.dumps(merge(profiles)).encode(), compresslevel=5))
    return path


def _rank_events(profile: RankProfile, zero: float) -> list[dict[str, Any]]:
    """All entries of one rank."""
    pid = profile.rank
    events = [
        _name("process_name", pid, 0, profile.label),
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}},
        _name("thread_name", pid, STEPS, "steps"),
    ]
    for step, start, end in profile.steps:
        events.append(_span(f"step {step}", "step", pid, STEPS, start - zero, end - zero, {"step": step}))
    slots = [event for event in profile.events if event.category == "range" and event.name.startswith(SLOT)]
    if slots:
        events.append(_name("thread_name", pid, SLOTS, "pipeline"))
    for event in slots:
        name = event.name.removeprefix(SLOT)
        events.append(_span(name, "slot", pid, SLOTS, event.start - zero, event.end - zero, {"action": name}))
    return [*events, *_collective_events(profile, zero), *_copied_events(profile, zero)]


def _collective_events(profile: RankProfile, zero: float) -> list[dict[str, Any]]:
    """Collectives by axis; those that overlap with each other are on further tracks."""
    events: list[dict[str, Any]] = []
    by_axis: dict[str, list[Any]] = {}
    for collective in sorted(profile.collectives, key=lambda c: c.flight):
        by_axis.setdefault(collective.axis, []).append(collective)
    tid = COLLECTIVES
    for axis, collectives in by_axis.items():
        lanes = assign_lanes([_reach(c) for c in collectives])
        for lane in range(max(lanes) + 1):
            name = f"collectives {axis}" + (f" ({lane + 1})" if lane else "")
            events.append(_name("thread_name", profile.rank, tid + lane, name))
        for collective, lane in zip(collectives, lanes, strict=True):
            start, end = _reach(collective)
            blocked = sum(high - low for low, high in collective.blocked)
            args = {
                "axis": axis,
                "operation": collective.operation,
                "bytes": collective.bytes,
                "full_bytes": collective.size,
                "blocked_us": round(blocked * 1e6, 3),
            }
            name = f"{collective.operation} {axis}"
            events.append(_span(name, "collective", profile.rank, tid + lane, start - zero, end - zero, args))
        tid += max(lanes) + 1
    return events


def _reach(collective: Any) -> tuple[float, float]:
    """From the call to the end of the wait."""
    spans = [*collective.blocked, collective.flight]
    return min(start for start, _ in spans), max(end for _, end in spans)


def assign_lanes(spans: Iterable[tuple[float, float]]) -> list[int]:
    """Lane of each span, sorted by start, so that spans of one lane do not overlap."""
    ends: list[float] = []
    lanes = []
    for start, end in spans:
        lane = next((lane for lane, last in enumerate(ends) if last <= start), len(ends))
        ends[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes


def _copied_events(profile: RankProfile, zero: float) -> list[dict[str, Any]]:
    """Entries of torch's profiler, with the number of the rank as process, and a track for each thread and stream."""
    entries = profile.raw
    processes = {e["pid"]: e["args"]["name"] for e in entries if e.get("ph") == "M" and e.get("name") == "process_name"}
    tracks: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = []
    shift = profile.shift + zero

    def track(entry: dict[str, Any]) -> int:
        process = str(processes.get(entry["pid"], ""))
        on_device = entry.get("cat") in KERNEL_CATEGORIES or process in (DEVICE_PROCESS, COLLECTIVE_PROCESS)
        on_device = on_device or str(entry.get("cat", "")).startswith("gpu_")
        key = ("stream" if on_device else "thread"), str(entry["tid"])
        if key not in tracks:
            tracks[key] = (STREAMS if on_device else HOST_THREADS) + len(tracks)
            events.append(_name("thread_name", profile.rank, tracks[key], " ".join(key)))
        return tracks[key]

    for entry in entries:
        if entry.get("ph") not in ("X", "s", "f", "t") or entry.get("cat") == "Trace" or entry.get("name") == CLOCK:
            continue
        copied = {**entry, "pid": profile.rank, "tid": track(entry), "ts": round(entry["ts"] - shift * 1e6, 3)}
        if "id" in entry:
            copied["id"] = profile.rank * FLOW_IDS + int(entry["id"]) % FLOW_IDS
        events.append(copied)
    return events


def _span(
    name: str, category: str, pid: int, tid: int, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": round(start * 1e6, 3), "dur": round((end - start) * 1e6, 3)}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times, "args": args}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
