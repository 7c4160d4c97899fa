"""Gantt chart of a timeline as text, in which a test shows every slot."""

from weft.parallel.pipeline.gantt import label as label_of
from weft.parallel.pipeline.simulate import Timeline

LEGEND = "F forward  B backward  I gradient of inputs  W gradient of weights  [F|B] joint  . idle"


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
    fits = (form for form in (0, 1, 2) if all(len(label_of(slot, form)) < end - start for _, start, end, slot in drawn))
    form = max(longest, next(fits, 2))
    lines = [["."] * width for _ in schedule.slots]
    for rank, start, end, slot in drawn:
        label = label_of(slot, form)
        fill = "=" if len(slot) > 1 else "-"
        text = label[:-1].ljust(end - start - 1, fill) + label[-1] if len(slot) > 1 else label.ljust(end - start, fill)
        lines[rank][start:end] = text[: end - start]
    digits = len(str(max(0, schedule.num_ranks - 1)))
    rows = [
        f"rank {rank:<{digits}} |{''.join(line)}| {100 * float(timeline.bubble_rate[rank]):.1f} % idle"
        for rank, line in enumerate(lines)
    ]
    return "\n".join([*rows, LEGEND]) + "\n"
