"""Profile of one rank, as `weft.training.profiler` wrote it, with all times on the clock of rank 0.

Device events of CUDA, ROCm and Ascend traces are told apart here: their categories and process names are data of the file, so
that the other modules know kernels, streams and collectives alone.
"""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from weft.backends.instrumented import OPERATIONS
from weft.comm.clocks import offset_of
from weft.comm.recorder import RING
from weft.errors import DataError
from weft.observe.profile.intervals import Intervals, subtract, union
from weft.training.profiler import CLOCK

KEYS = frozenset(
    ("rank", "axes", "work", "plan", "steps", "cpu_seconds", "collectives", "clock", "operators", "cache", "rates")
)
"""Some keys of a record, each of a version of this format."""
KERNEL_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
DEVICE_PROCESS, COLLECTIVE_PROCESS = "Ascend Hardware", "Communication"  # processes of a trace of an NPU
COLLECTIVE_KERNEL = re.compile(r"(nccl|rccl|hcom_|hccl)", re.IGNORECASE)
DATA, FORWARD, BACKWARD, UPDATE = "weft: data", "weft: forward", "weft: backward", "weft: update"
SLOT = "PP:"  # prefix of the ranges of torch's pipeline runtime
ITEM_BYTES = {"Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Int": 4, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1}
TRACED_OPERATIONS = OPERATIONS | {"all_to_allv": "all_to_all"}  # by the name of a collective in a trace


class Event(NamedTuple):
    """One span of the trace."""

    name: str
    category: str
    start: float
    end: float
    thread: int | str
    """Thread of the host, or stream of the device."""
    args: dict[str, Any]


class SelfTime(NamedTuple):
    """Own spans of one operator call, without the operators that it calls."""

    event: Event
    spans: Intervals


class Collective(NamedTuple):
    """One collective or message of a rank."""

    axis: str
    operation: str
    bytes: int
    """Bytes that this rank sent, under a ring algorithm; 0 of a receive."""
    size: int
    """Bytes of the full tensor."""
    blocked: tuple[tuple[float, float], ...]
    """Spans in which the rank, or a stream of its device, was in the collective."""
    flight: tuple[float, float]
    """From the call to the end."""
    thread: int | str


@dataclass(frozen=True)
class RankProfile:
    """Profile of one rank."""

    record: dict[str, Any]
    """Contents of rank-N.json."""
    events: list[Event]
    """Spans of torch's profiler, in order of their start."""
    raw: list[dict[str, Any]]
    """All entries of the trace, for the merged trace."""
    shift: float
    """Seconds to subtract from a time of the trace."""

    @property
    def rank(self) -> int:
        return int(self.record["rank"])

    @property
    def steps(self) -> list[tuple[int, float, float]]:
        """(step, start, end) of each profiled step."""
        offset = self.record["clock"]["offset"]
        return [(step, start - offset, end - offset) for step, start, end in self.record["steps"]]

    @cached_property
    def kernels(self) -> list[Event]:
        """Kernels and copies of the device; none on CPU."""
        return [event for event in self.events if event.category == "kernel"]

    @cached_property
    def operators(self) -> list[SelfTime]:
        """Operators of the host with their own spans."""
        return self_times(self.events)

    @cached_property
    def collectives(self) -> list[Collective]:
        """Collectives, from Weft's timers on CPU and from the kernels of the device elsewhere."""
        if self.kernels:
            return [_of_kernel(event) for event in self.kernels if is_collective(event)]
        offset = self.record["clock"]["offset"]
        return [_of_timer(row, offset) for row in self.record["collectives"]]

    def ranges(self, name: str) -> Intervals:
        """Union of the ranges of a name."""
        return union((e.start, e.end) for e in self.events if e.category == "range" and e.name == name)

    @property
    def label(self) -> str:
        """Name of the rank with its coordinates in the mesh."""
        axes = ", ".join(f"{axis} {index}" for axis, index in self.record["axes"].items())
        return f"rank {self.rank}" + (f" ({axes})" if axes else "")


def read_profiles(folder: Path) -> list[RankProfile]:
    """Read all ranks of a profile folder.

    Raises:
        DataError: the folder has no profile, or a file in it is damaged.
    """
    records = sorted(folder.glob("rank-*.json"), key=lambda path: path.name)
    ranks = [path for path in records if re.fullmatch(r"rank-\d+\.json", path.name)]
    if not ranks:
        raise DataError(
            f"there is no profile in {folder}",
            rule="a profiled run writes profile/rank-N.json and profile/rank-N.trace.json",
            fix="set train.profile_steps, or run weft profile",
        )
    return sorted((read_profile(path) for path in ranks), key=lambda profile: profile.rank)


def read_profile(path: Path) -> RankProfile:
    """Read one rank: its record and the trace beside it, which may be compressed.

    Raises:
        DataError: a file is missing or damaged.
    """
    trace = path.with_suffix(".trace.json")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if missing := KEYS - record.keys():
            raise ValueError(f"{path.name} has no {min(missing)}")
        packed = trace.with_name(trace.name + ".gz")
        text = trace.read_bytes() if trace.exists() else gzip.decompress(packed.read_bytes())
        content = json.loads(text)
        entries = content["traceEvents"] if isinstance(content, dict) else content  # Ascend writes a list
        return profile_of(record, entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the profile of a rank cannot be read: {error!r}",
            where=f"{path} and {trace.name}",
            rule="a profile is written completely before the run goes on",
            fix="profile the job again",
        ) from None


def profile_of(record: dict[str, Any], entries: list[dict[str, Any]]) -> RankProfile:
    """Profile from the contents of its two files."""
    marks = record["clock"]["marks"]
    seen = [
        (e["ts"] * 1e-6, (e["ts"] + e["dur"]) * 1e-6) for e in entries if e.get("name") == CLOCK and e.get("ph") == "X"
    ]
    seen = sorted(set(seen))[: len(marks)]
    shift = offset_of(seen, marks[: len(seen)]).seconds + record["clock"]["offset"]
    processes = {e["pid"]: e["args"]["name"] for e in entries if e.get("ph") == "M" and e.get("name") == "process_name"}
    events = [_event(e, shift, str(processes.get(e.get("pid"), ""))) for e in entries if e.get("ph") == "X"]
    return RankProfile(record, sorted((e for e in events if e), key=lambda e: (e.start, -e.end)), entries, shift)


def _event(entry: dict[str, Any], shift: float, process: str) -> Event | None:
    """Span of a trace; None for entries of the profiler itself."""
    category = entry.get("cat", "")
    args = entry.get("args", {})
    if category in KERNEL_CATEGORIES or process == DEVICE_PROCESS:
        category = "kernel"
    elif process == COLLECTIVE_PROCESS:
        category = "kernel" if COLLECTIVE_KERNEL.match(str(entry["name"])) else ""
    elif category == "user_annotation" or str(entry["name"]).startswith(("weft: ", SLOT)):
        category = "range"
    elif category not in ("cpu_op", "cuda_runtime", "cuda_driver"):
        return None
    start = float(entry["ts"]) * 1e-6 - shift
    return Event(str(entry["name"]), category, start, start + float(entry["dur"]) * 1e-6, entry["tid"], args)


def self_times(events: Sequence[Event]) -> list[SelfTime]:
    """Own spans of each operator of the host. `events` are in order of their start, outer ones first."""
    children: dict[int, list[tuple[float, float]]] = defaultdict(list)
    stacks: dict[int | str, list[Event]] = defaultdict(list)
    operators = [event for event in events if event.category == "cpu_op"]
    for event in operators:
        stack = stacks[event.thread]
        while stack and stack[-1].end <= event.start:
            stack.pop()
        if stack:
            children[id(stack[-1])].append((event.start, event.end))
        stack.append(event)
    return [SelfTime(e, subtract([(e.start, e.end)], union(children.get(id(e), ())))) for e in operators]


def is_collective(kernel: Event) -> bool:
    """True if a kernel of the device is a collective."""
    return "Collective name" in kernel.args or bool(COLLECTIVE_KERNEL.match(kernel.name))


def _of_kernel(event: Event) -> Collective:
    args = event.args
    ranks = int(args.get("Group size", 1))
    elements = max(int(args.get("In msg nelems", 0)), int(args.get("Out msg nelems", 0)))
    size = elements * ITEM_BYTES.get(str(args.get("dtype", "")), 1)
    name = str(args.get("Collective name", event.name))
    operation = TRACED_OPERATIONS.get(name, name)
    description = str(args.get("Process Group Description", "world"))
    ring, span = RING.get(operation), (event.start, event.end)
    sent = ring(size, ranks) if ring else 0
    return Collective(description.removeprefix("mesh_"), operation, sent, size, (span,), span, event.thread)


def _of_timer(row: dict[str, Any], offset: float) -> Collective:
    issued, returned, waited, ended = (row[name] - offset for name in ("issued", "returned", "waited", "ended"))
    done = min(max(row["done"] - offset, returned), ended)
    axis = f"{row['axis']} {row['link']}".strip()
    blocked = ((issued, returned), (waited, ended))
    if row["operation"] == "receive":  # in flight once the peer has sent, which this rank does not know
        return Collective(axis, "receive", 0, row["size"], (blocked[1],), blocked[1], row["thread"])
    flight = (issued, max(done, returned))
    return Collective(axis, row["operation"], row["bytes"], row["size"], blocked, flight, row["thread"])
