"""How long communication takes, and how much of that stands in the way of computation."""

from collections import defaultdict
from typing import Any

from weft.backends.instrumented import CollectiveTiming, InstrumentedGroup
from weft.comm.collectives import axis_of


class CollectiveClock:
    """Inside its context, seconds of this rank's collectives on CPU, by axis and link ("dp_shard between").

    Exposed are those in which the rank did nothing else: it called, or it waited. Hidden are those in which a collective was
    under way behind computation. Groups of accelerators have clocks of their own, and are not seen.
    """

    def __init__(self) -> None:
        self.exposed: dict[str, float] = defaultdict(float)
        self.hidden: dict[str, float] = defaultdict(float)

    def _note(self, passage: CollectiveTiming) -> None:
        where = " ".join(axis_of(passage.group)).strip()
        self.exposed[where] += passage.exposed
        self.hidden[where] += passage.hidden

    def __enter__(self) -> "CollectiveClock":
        InstrumentedGroup.timers.append(self._note)
        return self

    def __exit__(self, *exception: Any) -> None:
        InstrumentedGroup.timers.remove(self._note)
