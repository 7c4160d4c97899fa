"""Gantt chart of a timeline, as bars of a plot. Imports no torch."""

from typing import NamedTuple

from weft.parallel.pipeline.schedule import Slot
from weft.parallel.pipeline.simulate import Timeline


class Bar(NamedTuple):
    """One slot of a Gantt chart."""

    rank: int
    start: float
    end: float
    label: str
    kind: str
    """F, B, I or W; FB or FI for a joint slot."""


def bars(timeline: Timeline) -> list[Bar]:
    """All slots as bars, rank by rank, in order, with labels in the longest form (`2F3`, `[2F3|0B1]`)."""
    return [
        Bar(rank, start, end, label(slot, 0), "".join(action.kind for action in slot))
        for rank, slots in enumerate(timeline.schedule.slots)
        for slot, start, end in zip(slots, timeline.start[rank], timeline.end[rank], strict=True)
    ]


def label(slot: Slot, form: int) -> str:
    """Label of a slot. Form 0: stage, kind, micro-batch; form 1: kind, micro-batch; form 2: kind."""
    texts = [(f"{stage}{kind}{batch}", f"{kind}{batch}", kind)[form] for stage, kind, batch in slot]
    return texts[0] if len(texts) == 1 else f"[{'|'.join(texts)}]"
