"""Profiles of one rank's step: share of communication, bytes sent, and seconds of pipeline actions."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from statistics import median
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from weft.backends.shared_memory import SharedMemoryGroup
from weft.backends.shm_p2p import ReceiveWork
from weft.comm.recorder import Recorder

MARK, STEP = "collective", "step"
# torch's operators that start a collective or wait for one, and the calls marked below.
OPERATORS = ("c10d::", "_c10d_functional", MARK)
# Event names of torch's pipeline runtime: stage and kind of an action, or of the forward of a joint slot.
ACTION = re.compile(r"PP:(\(?)(\d+)([FBIW])\d")


def communication_share(step: Callable[[], object]) -> float:
    """Run a step; return the share of its time that this rank's main thread spends in collectives.

    Starting a collective and waiting for it count, including the wait for a slower rank. Work of another thread while the main
    thread computes does not count.
    """
    events = _events_of(step)
    full_step = next(event for event in events if event.name == STEP)
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.thread == full_step.thread and event.name.startswith(OPERATORS)
    ]
    return _covered(spans) / (full_step.time_range.end - full_step.time_range.start)


def action_seconds(step: Callable[[], object]) -> dict[tuple[str, int], float]:
    """Run a pipeline step; return the median seconds of this rank's actions, without waiting for messages.

    Returns:
        Seconds by kind and stage; a joint slot has the kind "joint" and the stage of its forward.
    """
    events = _events_of(step)
    waits = [event.time_range for event in events if event.name == MARK]
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for event in events:
        action = ACTION.match(event.name)
        if action:
            joint, stage, kind = action.groups()
            start, end = event.time_range.start, event.time_range.end
            inside = _covered((wait.start, wait.end) for wait in waits if start <= wait.start and wait.end <= end)
            seconds["joint" if joint else kind, int(stage)].append((end - start - inside) / 1e6)
    return {key: median(values) for key, values in seconds.items()}


def sent_bytes(step: Callable[[], object]) -> int:
    """Run a step; return the bytes that this rank sends, counted by Weft's recorder."""
    with Recorder() as recorder:
        step()
    return recorder.total_bytes


def _events_of(step: Callable[[], object]) -> Any:
    with _marked_collectives(), profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(STEP):
        step()
    return profiler.events()


@contextmanager
def _marked_collectives() -> Iterator[None]:
    """Make calls visible to the profiler that are not torch operators: shared-memory collectives, and waits from Python."""
    collectives = ("all", "reduce", "broadcast", "barrier")
    names = [name for name in vars(SharedMemoryGroup) if name.strip("_").startswith(collectives)]
    with ExitStack() as patches:
        for owner, name in [(dist.Work, "wait"), (ReceiveWork, "wait"), *((SharedMemoryGroup, name) for name in names)]:
            patches.enter_context(patch.object(owner, name, _marked(getattr(owner, name))))
        yield


def _marked(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(MARK):
            return method(*args, **kwargs)

    return call


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
