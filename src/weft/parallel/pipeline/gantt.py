"""Gantt chart of a timeline: bars for a plot, or text for a terminal. Imports no torch."""

from typing import NamedTuple

from weft.parallel.pipeline.schedule import Slot
from weft.parallel.pipeline.simulate import Timeline

LEGEND = "F forward  B backward  I gradient of inputs  W gradient of weights  [F|B] joint  . idle"


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
        Bar(rank, start, end, _label(slot, 0), "".join(action.kind for action in slot))
        for rank, slots in enumerate(timeline.schedule.slots)
        for slot, start, end in zip(slots, timeline.start[rank], timeline.end[rank], strict=True)
    ]


def _label(slot: Slot, form: int) -> str:
    """Label of a slot. Form 0: stage, kind, micro-batch; form 1: kind, micro-batch; form 2: kind."""
    texts = [(f"{stage}{kind}{batch}", f"{kind}{batch}", kind)[form] for stage, kind, batch in slot]
    return texts[0] if len(texts) == 1 else f"[{'|'.join(texts)}]"


def gantt_text(timeline: Timeline, width: int = 120) -> str:
    """Draw a timeline as text: one line per rank, time to the right, and the idle share of each rank.

    Labels are `2F3` (stage, kind, micro-batch), `F3` if each rank holds one stage or the bars are narrow, or the kind alone;
    the whole chart uses the same form. A joint slot is in brackets and filled with `=`, other slots are filled with `-`, idle
    time with `.`.

    Args:
        timeline: result of `simulate`.
        width: columns of the time axis.
    """
    schedule = timeline.schedule
    scale = width / timeline.makespan if timeline.makespan else 0

    def column(seconds: float) -> int:
        return int(seconds * scale + 0.5)

    drawn = [
        (rank, column(start), column(end), slot)
        for rank, slots in enumerate(schedule.slots)
        for slot, start, end in zip(slots, timeline.start[rank], timeline.end[rank], strict=True)
    ]
    longest = 1 if schedule.num_stages == schedule.num_ranks else 0
    fits = (form for form in (0, 1, 2) if all(len(_label(slot, form)) < end - start for _, start, end, slot in drawn))
    form = max(longest, next(fits, 2))
    lines = [["."] * width for _ in schedule.slots]
    for rank, start, end, slot in drawn:
        label = _label(slot, form)
        fill = "=" if len(slot) > 1 else "-"
        text = label[:-1].ljust(end - start - 1, fill) + label[-1] if len(slot) > 1 else label.ljust(end - start, fill)
        lines[rank][start:end] = text[: end - start]
    digits = len(str(max(0, schedule.num_ranks - 1)))
    rows = [
        f"rank {rank:<{digits}} |{''.join(line)}| {100 * float(timeline.bubble_rate[rank]):.1f} % idle"
        for rank, line in enumerate(lines)
    ]
    return "\n".join([*rows, LEGEND]) + "\n"
