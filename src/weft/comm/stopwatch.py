"""Exposed and hidden communication time: of CPU collectives by the clock, of those of accelerators by events.

    with DeviceClock(device) as clock:           # or CollectiveClock() on CPU
        with blocking(group):                    # around a collective that the device waits for
            dist.all_reduce(x, group=group)
        began = mark()                           # before an asynchronous collective
        work = dist.all_reduce(y, group=group, async_op=True)
        wait(work, group, began)                 # in place of work.wait()

The groups of a CPU measure themselves (`backends/instrumented.py`); there, `blocking`, `mark` and `wait` add nothing.
"""

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from weft.backends.instrumented import CollectiveTiming, InstrumentedGroup
from weft.comm.recorder import axis_of
from weft.device.device import Device


class CollectiveClock:
    """Context manager that sums the seconds of this rank's CPU collectives, by axis and link ("dp_shard between").

    Exposed seconds are those in which the rank was blocked by a call or a wait. Hidden seconds are those in which a collective
    overlapped with computation. Collectives of accelerators are not timed.
    """

    def __init__(self) -> None:
        self.exposed: dict[str, float] = defaultdict(float)
        self.hidden: dict[str, float] = defaultdict(float)

    def _add(self, timing: CollectiveTiming) -> None:
        where = _where(timing.group)
        self.exposed[where] += timing.exposed
        self.hidden[where] += timing.hidden

    def __enter__(self) -> "CollectiveClock":
        InstrumentedGroup.timers.append(self._add)
        return self

    def __exit__(self, *exception: Any) -> None:
        InstrumentedGroup.timers.remove(self._add)

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Exposed and hidden seconds since the last call, by axis and link."""
        return _take_sums(self)


class Span(NamedTuple):
    """Events of one wait of the computing stream for a collective."""

    where: str
    arrived: Any
    """On the computing stream, before the wait."""
    resumed: Any
    """On the computing stream after the wait, or on another stream after the collective."""
    began: Any = None
    """On the computing stream, before the collective was issued; None for a blocking collective."""
    done: Any = None
    """On another stream, after the collective."""


class DeviceClock:
    """Context manager that sums the seconds of this rank's collectives on an accelerator, by axis and link, from events.

    Exposed seconds are those in which the computing stream waited: between events before and after the wait. Hidden seconds are
    those in which a collective was in flight while the stream computed: from its issue to its end or to the wait, whichever is
    first. The host does not wait; `take` is called after it has waited for the device anyway.

    Args:
        device: accelerator of this rank.
    """

    active: ClassVar[list["DeviceClock"]] = []

    def __init__(self, device: Device):
        self.device, self.side = device, device.stream()
        self.exposed: dict[str, float] = defaultdict(float)
        self.hidden: dict[str, float] = defaultdict(float)
        self.spans: list[Span] = []

    def __enter__(self) -> "DeviceClock":
        DeviceClock.active.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        DeviceClock.active.remove(self)

    def event(self, stream: Any = None) -> Any:
        """Record an event on a stream; None: the current one."""
        event = self.device.event()
        event.record(stream or self.device.current_stream())
        return event

    def wait(self, work: dist.Work, group: dist.ProcessGroup, began: Any) -> None:
        """Let the current stream wait for a collective, and note the events."""
        arrived = self.event()
        work.wait()
        resumed, done = self.event(), None
        if began is not None:
            with self.side:
                work.wait()
            done = self.event(self.side)
        self.add(group, arrived, resumed, began, done)

    def add(self, group: dist.ProcessGroup, arrived: Any, resumed: Any, began: Any = None, done: Any = None) -> None:
        """Note the events of a wait; see `Span`. Groups of one rank are left out."""
        if group.size() > 1:
            self.spans.append(Span(_where(group), arrived, resumed, began, done))

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Exposed and hidden seconds since the last call, by axis and link, of the waits that the device has completed; the
        others are in the next call."""
        spans, self.spans = self.spans, []
        for span in spans:
            if not (span.resumed.query() and span.arrived.query() and (span.done is None or span.done.query())):
                self.spans.append(span)
                continue
            self.exposed[span.where] += max(span.arrived.elapsed_time(span.resumed), 0.0) / 1e3
            if span.began is not None:
                in_flight = min(span.began.elapsed_time(span.done), span.began.elapsed_time(span.arrived))
                self.hidden[span.where] += max(in_flight, 0.0) / 1e3
        return _take_sums(self)


def _take_sums(clock: CollectiveClock | DeviceClock) -> tuple[dict[str, float], dict[str, float]]:
    taken = dict(clock.exposed), dict(clock.hidden)
    clock.exposed.clear()
    clock.hidden.clear()
    return taken


def collective_clock(device: Device) -> CollectiveClock | DeviceClock:
    """Clock for the collectives of the ranks of a device."""
    return CollectiveClock() if device.type == "cpu" else DeviceClock(device)


class _Blocking:
    def __init__(self, clock: DeviceClock, group: dist.ProcessGroup):
        self.clock, self.group = clock, group

    def __enter__(self) -> None:
        self.arrived = self.clock.event()

    def __exit__(self, *exception: Any) -> None:
        self.clock.add(self.group, self.arrived, self.clock.event())


def blocking(group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
    """Context of a collective for which the current stream waits.

    Args:
        group: None for the default group.
    """
    clock, group = active_clock(), group or dist.group.WORLD
    return nullcontext() if clock is None or group is None else _Blocking(clock, group)


def mark() -> Any:
    """Event before an asynchronous collective, for `wait`; None if nobody measures."""
    clock = active_clock()
    return None if clock is None else clock.event()


def wait(work: dist.Work, group: dist.ProcessGroup | None, began: Any = None) -> None:
    """Wait for a collective.

    Args:
        work: asynchronous collective.
        group: its group; None for the default group.
        began: from `mark`; None if the time in flight is not to be measured.
    """
    clock, group = active_clock(), group or dist.group.WORLD
    if clock is None or group is None:
        work.wait()
    else:
        clock.wait(work, group, began)


def active_clock() -> DeviceClock | None:
    """Clock that measures this rank, if any; none in compiled code, which orders its collectives itself."""
    return None if torch.compiler.is_compiling() or not DeviceClock.active else DeviceClock.active[-1]


def _where(group: dist.ProcessGroup) -> str:
    return " ".join(axis_of(group)).strip()
