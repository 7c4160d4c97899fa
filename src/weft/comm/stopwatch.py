"""Exposed and hidden communication time of CPU collectives."""

from collections import defaultdict
from typing import Any

from weft.backends.instrumented import CollectiveTiming, InstrumentedGroup
from weft.comm.recorder import axis_of


class CollectiveClock:
    """Context manager that sums the seconds of this rank's CPU collectives, by axis and link ("dp_shard between").

    Exposed seconds are those in which the rank was blocked by a call or a wait. Hidden seconds are those in which a collective
    overlapped with computation. Collectives of accelerators are not timed.
    """

    def __init__(self) -> None:
        self.exposed: dict[str, float] = defaultdict(float)
        self.hidden: dict[str, float] = defaultdict(float)

    def _add(self, timing: CollectiveTiming) -> None:
        where = " ".join(axis_of(timing.group)).strip()
        self.exposed[where] += timing.exposed
        self.hidden[where] += timing.hidden

    def __enter__(self) -> "CollectiveClock":
        InstrumentedGroup.timers.append(self._add)
        return self

    def __exit__(self, *exception: Any) -> None:
        InstrumentedGroup.timers.remove(self._add)
