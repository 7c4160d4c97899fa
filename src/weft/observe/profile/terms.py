"""Terms of a step: disjoint shares of its time, whose sum is the step.

At each moment a rank is in the first term of this list that applies, so that overlap is counted once:

    computation                 an operator computes; on an accelerator, a kernel that is no collective
    communication: AXIS         the rank, or a stream of its device, is in a collective of the axis
    pipeline wait               the rank waits for a message of another stage: bubbles, and transfers
    data                        the rank takes the micro-batches of the step
    host                        none of these: Python, dispatch, launches, and time without the processor
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from weft.observe.profile.intervals import Intervals, intersect, subtract, total, union
from weft.observe.profile.ranks import BACKWARD, DATA, FORWARD, SLOT, UPDATE, Event, RankProfile, is_collective

COMPUTATION, PIPELINE, DATA_TERM, HOST = "computation", "pipeline wait", "data", "host"
COMMUNICATION = "communication: "
VIEWS = """
    view t transpose permute expand as_strided slice select unsqueeze squeeze reshape detach detach_ alias unbind split chunk
    split_with_sizes narrow _reshape_alias empty empty_like empty_strided new_empty resize_ resolve_conj resolve_neg item to
    _local_scalar_dense set_ view_as expand_as movedim flatten unflatten is_nonzero lift_fresh result_type
"""
OVERHEAD = frozenset(f"aten::{name}" for name in VIEWS.split())
"""Operators without work of their own: views, allocation, dispatch."""
FRAMEWORK = ("autograd::", "torch::autograd", "c10d::", "profiler::", "weft: ")
COMPILED = "CompiledFxGraph"
PHASES = {DATA: "data", FORWARD: "forward", BACKWARD: "backward", UPDATE: "update"}
FEWEST_SECONDS = 1e-4  # of a gap that is listed
TOLERANCE = 1e-9


class StepTerms(NamedTuple):
    """Time of one step of one rank."""

    step: int
    seconds: float
    terms: dict[str, float]
    """Seconds by term; their sum is `seconds`."""
    hidden: dict[str, float]
    """Seconds of communication while the rank computed, by axis; part of the computation."""


class Gap(NamedTuple):
    """Time of a step in which no term but `host` applies."""

    rank: int
    step: int
    start: float
    """Seconds from the start of the step."""
    seconds: float
    phase: str
    after: str
    """Operator that ended before the gap."""
    before: str
    """Operator that began after it."""


def computes(event: Event) -> bool:
    """True if an operator of the host computes something itself."""
    if COMPILED in event.name:
        return True
    return "::" in event.name and event.name not in OVERHEAD and not event.name.startswith(FRAMEWORK)


def computing(profile: RankProfile) -> Intervals:
    """Time in which a rank computes."""
    if profile.kernels:
        return union((kernel.start, kernel.end) for kernel in profile.kernels if not is_collective(kernel))
    data, busy = profile.ranges(DATA), list[tuple[float, float]]()
    by_thread: dict[int | str, list[tuple[float, float]]] = defaultdict(list)
    for own in profile.operators:
        if computes(own.event):
            by_thread[own.event.thread] += own.spans
    for thread, spans in by_thread.items():  # operators inside a collective copy its message
        blocked = union(span for c in profile.collectives if c.thread == thread for span in c.blocked)
        busy += subtract(union(spans), blocked)
    return subtract(union(busy), data)


def claims(profile: RankProfile) -> list[tuple[str, Intervals]]:
    """Time of each term, in order of precedence; times of later terms may overlap with those of earlier ones."""
    by_term: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for collective in profile.collectives:
        term = PIPELINE if collective.operation == "receive" else COMMUNICATION + collective.axis
        by_term[term] += collective.blocked
    communication = sorted(term for term in by_term if term != PIPELINE)
    ordered = [(term, union(by_term[term])) for term in (*communication, PIPELINE) if term in by_term]
    return [(COMPUTATION, computing(profile)), *ordered, (DATA_TERM, profile.ranges(DATA))]


def step_terms(profile: RankProfile) -> list[StepTerms]:
    """Terms of each profiled step of a rank."""
    claimed, found = claims(profile), []
    flights: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for collective in profile.collectives:
        if collective.operation != "receive":
            flights[collective.axis].append(collective.flight)
    busy = claimed[0][1]
    for step, start, end in profile.steps:
        left, terms = [(start, end)], dict[str, float]()
        for term, intervals in claimed:
            terms[term] = total(intersect(left, intervals))
            left = subtract(left, intervals)
        terms[HOST] = total(left)
        inside = intersect([(start, end)], busy)
        hidden = {axis: total(intersect(inside, union(spans))) for axis, spans in flights.items()}
        found.append(StepTerms(step, end - start, terms, hidden))
    return found


def gaps(profile: RankProfile) -> list[Gap]:
    """Gaps of the profiled steps of a rank, the longest first."""
    used = union(span for _, intervals in claims(profile) for span in intervals)
    work = profile.kernels or [own.event for own in profile.operators if computes(own.event)]
    by_end = sorted(work, key=lambda event: event.end)
    starts, ends = [event.start for event in work], [event.end for event in by_end]
    phases = [(e.start, e.end, e.name) for e in profile.events if e.category == "range"]
    found = []
    for step, start, end in profile.steps:
        for low, high in subtract([(start, end)], used):
            if high - low >= FEWEST_SECONDS:
                before, after = bisect_right(ends, low + TOLERANCE) - 1, bisect_left(starts, high - TOLERANCE)
                ended = by_end[before].name if before >= 0 and ends[before] >= start else "start of the step"
                began = work[after].name if after < len(work) and starts[after] < end else "end of the step"
                phase = phase_at(phases, (low + high) / 2)
                found.append(Gap(profile.rank, step, low - start, high - low, phase, ended, began))
    return sorted(found, key=lambda gap: -gap.seconds)


def phase_at(ranges: Sequence[tuple[float, float, str]], moment: float) -> str:
    """Phase of a moment: the slot of a pipeline, or data, forward, backward or update; "between phases" outside of all."""
    inside = [name for start, end, name in ranges if start <= moment < end]
    slot = next((name.removeprefix(SLOT) for name in inside if name.startswith(SLOT)), None)
    return slot or next((PHASES[name] for name in inside if name in PHASES), "between phases")
