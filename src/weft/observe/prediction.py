"""Comparison of the prediction of `weft plan` with the measurements of a run: step time, memory and communication."""

import statistics
from dataclasses import dataclass

from weft.observe.record import RunRecord
from weft.plan import Prediction

WARM_UP = 2  # excluded steps: the first one creates caches and optimizer states, the second one records memory
TOLERANCE = {"time": 0.15, "memory": 0.05, "bytes": 0.01}


@dataclass(frozen=True)
class Comparison:
    """One quantity, predicted and measured."""

    name: str
    kind: str
    """Kind of quantity: "time" (seconds), "memory" (bytes) or "bytes" (communication volume)."""
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        """Relative error: measured / predicted - 1."""
        return self.measured / self.predicted - 1 if self.predicted else float("inf") * bool(self.measured)

    @property
    def is_off(self) -> bool:
        """True if the error exceeds the tolerance of the kind."""
        return abs(self.off) > TOLERANCE[self.kind]


def compare(run: RunRecord) -> list[Comparison]:
    """Compare predicted and measured quantities.

    Empty if no step was measured, or if the plan has no prediction for the job's micro-batch size.
    """
    found: Prediction | None = run.job.plan.prediction if run.job else None
    rows = run.rows[WARM_UP:] or run.rows
    if run.job is None or found is None or not rows or found.micro_batch != run.job.train.micro_batch_size:
        return []
    lines = [Comparison("step", "time", found.step_seconds, statistics.median(row.step_seconds for row in rows))]
    watched = next((row for row in run.rows if row.peak), None)
    # "parameters" is a key if the memory was counted by a dry run of the same rank, not by formula.
    if watched is not None and watched.peak and "parameters" in found.memory:
        measured: dict[str, int] = {}
        for name, size in watched.peak.items():
            kind = name.partition(":")[0]
            measured[kind] = measured.get(kind, 0) + size
        lines.append(Comparison("memory", "memory", sum(found.memory.values()), sum(measured.values())))
        lines += [
            Comparison(f"memory: {kind}", "memory", found.memory.get(kind, 0), size) for kind, size in measured.items()
        ]
    sent: dict[str, float] = {}
    for where, counts in (rows[-1].comm or {}).items():
        axis = where.partition(" ")[0]
        sent[axis] = sent.get(axis, 0) + counts["bytes"]
    lines += [
        Comparison(f"sent over {axis}", "bytes", size, sent.get(axis, 0)) for axis, size in found.sent_bytes.items()
    ]
    return lines


def table_rows(lines: list[Comparison]) -> list[tuple[str, ...]]:
    """Table rows: name, predicted, measured, relative error; errors beyond the tolerance are marked "(off)"."""
    rows = []
    for line in lines:
        unit, scale = ("s", 1.0) if line.kind == "time" else ("MB", 1e6)
        figures = (f"{value / scale:,.4g} {unit}" for value in (line.predicted, line.measured))
        rows.append((line.name, *figures, f"{line.off:+.1%}{' (off)' if line.is_off else ''}"))
    return rows
