"""What `weft plan` had predicted of a run beside what the run measured: time, memory and messages, and which term is off."""

import statistics
from dataclasses import dataclass

from weft.observe.record import RunRecord
from weft.plan import Prediction

WARM_UP = 2  # steps that are not counted: the first makes caches and states, the second is watched
TOLERANCE = {"time": 0.15, "memory": 0.05, "bytes": 0.01}


@dataclass(frozen=True)
class Compared:
    """One figure, predicted and measured."""

    name: str
    kind: str
    """time (seconds), memory or bytes."""
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        """Measured over predicted, less one."""
        return self.measured / self.predicted - 1 if self.predicted else float("inf") * bool(self.measured)

    @property
    def is_off(self) -> bool:
        """Whether it is beyond the tolerance of its kind."""
        return abs(self.off) > TOLERANCE[self.kind]


def compare(run: RunRecord) -> list[Compared]:
    """Predicted beside measured figures; empty where the plan has no prediction for its micro-batch or no step was measured."""
    found: Prediction | None = run.job.plan.prediction if run.job else None
    rows = run.rows[WARM_UP:] or run.rows
    if run.job is None or found is None or not rows or found.micro_batch != run.job.train.micro_batch_size:
        return []
    lines = [Compared("step", "time", found.step_seconds, statistics.median(row.step_seconds for row in rows))]
    watched = next((row for row in run.rows if row.peak), None)
    if watched is not None and watched.peak and "parameters" in found.memory:  # counted by a dry run, of the same rank
        measured: dict[str, int] = {}
        for name, size in watched.peak.items():
            kind = name.partition(":")[0]
            measured[kind] = measured.get(kind, 0) + size
        lines.append(Compared("memory", "memory", sum(found.memory.values()), sum(measured.values())))
        lines += [
            Compared(f"memory: {kind}", "memory", found.memory.get(kind, 0), size) for kind, size in measured.items()
        ]
    sent: dict[str, float] = {}
    for where, counts in (rows[-1].comm or {}).items():
        axis = where.partition(" ")[0]
        sent[axis] = sent.get(axis, 0) + counts["bytes"]
    lines += [
        Compared(f"sent over {axis}", "bytes", size, sent.get(axis, 0)) for axis, size in found.sent_bytes.items()
    ]
    return lines


def in_words(lines: list[Compared]) -> list[tuple[str, ...]]:
    """Rows of a table: name, predicted, measured, how far off, marked where beyond tolerance."""
    rows = []
    for line in lines:
        unit, scale = ("s", 1.0) if line.kind == "time" else ("MB", 1e6)
        figures = (f"{value / scale:,.4g} {unit}" for value in (line.predicted, line.measured))
        rows.append((line.name, *figures, f"{line.off:+.1%}{' (off)' if line.is_off else ''}"))
    return rows
