"""Clock offsets between the ranks of a job, with a bound of their error."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from weft.backends.hierarchical import host_id
from weft.comm.objects import all_gather_json, any_rank

ROUNDS = 10

Span = Sequence[float]
"""Begin and end of one event, in seconds of one clock."""


class ClockOffset(NamedTuple):
    """Difference of two clocks: the time of one clock minus the time of the reference at the same moment."""

    seconds: float
    error: float
    """Maximum error in seconds."""


def offset_of(own: Sequence[Span], reference: Sequence[Span]) -> ClockOffset:
    """Offset of a clock, from spans in both clocks that share a moment, pair by pair.

    Each pair gives a lower and an upper bound (Cristian, 1989): the span of one clock began before the span of the other ended.

    Args:
        own: spans in the clock.
        reference: the same number of spans in the clock of the reference.
    """
    low = max(start - reference_end for (start, _), (_, reference_end) in zip(own, reference, strict=True))
    high = min(end - reference_start for (_, end), (reference_start, _) in zip(own, reference, strict=True))
    return ClockOffset((low + high) / 2, abs(high - low) / 2)


def measure_offset(rank: int) -> ClockOffset:
    """Offset of the monotonic clock of this rank against rank 0. Collective.

    Ranks of one host share the clock. Between hosts, all ranks are inside the same collective at one moment.
    """
    spans = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        any_rank(False)  # no rank leaves before all ranks have entered
        spans.append((start, time.perf_counter()))
    hosts, of_ranks = zip(*all_gather_json((host_id(), spans)), strict=True)
    return ClockOffset(0.0, 0.0) if hosts[rank] == hosts[0] else offset_of(of_ranks[rank], of_ranks[0])
