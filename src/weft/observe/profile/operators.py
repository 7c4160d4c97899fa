"""Operators of a step with their place on the roofline (Williams et al., 2009)."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.observe.profile.intervals import union
from weft.observe.profile.ranks import RankProfile, is_collective
from weft.observe.profile.terms import computes

Key = tuple[str, tuple[tuple[int, ...], ...]]


class OperatorTime(NamedTuple):
    """One operator with equal input shapes, per step and rank."""

    name: str
    shapes: str
    calls: float
    seconds: float
    flops: float | None
    """None if the operator was not in the step whose operators were counted."""
    bytes: float | None
    """Bytes of inputs and outputs, each once per call."""
    bound: str
    """"computation" or "memory": the part of the roofline above the operator; "" if it is unknown."""
    share: float | None
    """Time that the roofline allows, as a share of the time; above 1 if data comes from a cache."""


def top_operators(profiles: Sequence[RankProfile]) -> list[OperatorTime]:
    """Operators of all ranks, the one with the most time first."""
    seconds: dict[Key, float] = defaultdict(float)
    calls: dict[Key, float] = defaultdict(float)
    costs: dict[Key, tuple[float, float, float]] = {}
    for profile in profiles:
        weight = 1 / (len(profiles) * max(len(profile.steps), 1))
        for key, duration in _durations(profile):
            seconds[key] += duration * weight
            calls[key] += weight
        for name, shapes, count, flops, size in profile.record["operators"]:
            costs[name, tuple(map(tuple, shapes))] = flops / count, size / count, count
    rates = profiles[0].record["rates"]
    found = [_place(key, calls[key], spent, costs.get(key), rates) for key, spent in seconds.items()]
    return sorted(found, key=lambda operator: -operator.seconds)


def _durations(profile: RankProfile) -> list[tuple[Key, float]]:
    """Time of each operator call inside of the profiled steps: its kernels on a device, else its own time on the host."""
    steps = union((start, end) for _, start, end in profile.steps)
    blocked = _blocked(profile)
    if not profile.kernels:
        return [
            (_key(own.event.name, own.event.args), sum(end - start for start, end in own.spans))
            for own in profile.operators
            if computes(own.event)
            and _contains(steps, own.event.start)
            and not _contains(blocked.get(own.event.thread, []), own.event.start)
        ]
    callers = {e.args.get("External id"): e for e in profile.events if e.category == "cpu_op"}
    found = []
    for kernel in profile.kernels:
        if not is_collective(kernel) and _contains(steps, kernel.start):
            caller = callers.get(kernel.args.get("External id"))
            key = _key(caller.name, caller.args) if caller else (kernel.name, ())
            found.append((key, kernel.end - kernel.start))
    return found


def _blocked(profile: RankProfile) -> dict[int | str, list[tuple[float, float]]]:
    """Time of each thread inside of collectives, whose operators copy messages."""
    by_thread: dict[int | str, list[tuple[float, float]]] = defaultdict(list)
    for collective in profile.collectives:
        by_thread[collective.thread] += collective.blocked
    return {thread: union(spans) for thread, spans in by_thread.items()}


def _contains(intervals: list[tuple[float, float]], moment: float) -> bool:
    index = bisect_right(intervals, moment, key=lambda span: span[1])
    return index < len(intervals) and intervals[index][0] <= moment


def _key(name: str, args: dict[str, Any]) -> Key:
    """Operator and shapes of its input tensors; those of lists of tensors one after the other."""
    shapes: list[tuple[int, ...]] = []
    for dims in args.get("Input Dims", ()):
        nested = dims if dims and isinstance(dims[0], list) else [dims]
        shapes += [tuple(shape) for shape in nested if shape]
    return name, tuple(shapes)


def _place(
    key: Key, calls: float, seconds: float, cost: tuple[float, float, float] | None, rates: dict[str, float | None]
) -> OperatorTime:
    name, shapes = key
    text = " ".join("x".join(map(str, shape)) for shape in shapes)
    if cost is None:
        return OperatorTime(name, text, calls, seconds, None, None, "", None)
    flops, size = cost[0] * calls, cost[1] * calls
    peak, bandwidth = rates["flops"], rates["bandwidth"]
    if not peak or not bandwidth or not seconds:
        return OperatorTime(name, text, calls, seconds, flops, size, "", None)
    arithmetic, moved = flops / peak, size / bandwidth
    bound = "computation" if arithmetic > moved else "memory"
    return OperatorTime(name, text, calls, seconds, flops, size, bound, max(arithmetic, moved) / seconds)
