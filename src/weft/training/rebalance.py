"""Rows of data ranks that follow their measured speed, with plan.parallel.rebalance = "auto".

Each rank measures the seconds of a step without those in which it was blocked by collectives. When a checkpoint is due, rank 0
divides the global batch anew, and the checkpoint has the new rows: a resumed run continues with them.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from weft.checkpoint.manifest import Position
from weft.comm.objects import all_gather_json
from weft.data import RowSplit
from weft.data.row_split import proportional
from weft.topology.mesh import data_rank
from weft.training.session import Session, row_split

LEAST_STEPS = 3
"""Fewest measured steps for a decision."""
LEAST_GAIN = 0.05
"""Least relative gain of the slowest rank's time for which rows change."""


class Rebalance:
    """Measured seconds of this rank since the last decision."""

    def __init__(self, session: Session):
        self.session, self.seconds = session, list[float]()
        self.is_on = session.job.plan.parallel.rebalance == "auto"

    def add(self, seconds: float, exposed: float) -> None:
        """Add a step.

        Args:
            seconds: duration of the step on this rank.
            exposed: seconds of it in which this rank was blocked by collectives.
        """
        if self.is_on:
            self.seconds.append(max(seconds - exposed, 1e-9))

    def decide(self, position: Position) -> tuple[int, ...] | None:
        """Rows of each data rank from now on; None if they stay. Collective; the same on all ranks.

        Args:
            position: position of the checkpoint that is due.
        """
        if not self.is_on:
            return None
        own = statistics.median(self.seconds) if len(self.seconds) >= LEAST_STEPS else 0.0
        measured = all_gather_json([data_rank(self.session.mesh), own])
        if not all(seconds for _, seconds in measured):
            return None
        self.seconds = []
        split = row_split(self.session, position)
        seconds = [max(time for part, time in measured if part == index) for index in range(split.data_ranks)]
        return new_rows(split, seconds)


def new_rows(split: RowSplit, seconds: Sequence[float]) -> tuple[int, ...] | None:
    """Rows in proportion to measured speeds; None if the slowest rank would gain too little.

    Args:
        split: current split, with rows of each data rank.
        seconds: seconds of computation of each data rank in a step.
    """
    each = [time / rows for time, rows in zip(seconds, split.rows_per_rank, strict=True)]
    rows, least = split.rows_per_rank, 0
    while not least or min(rows) < replace(split, rows_per_rank=rows).num_micro_batches:  # a row for each micro-batch
        least += 1
        rows = proportional(split.global_batch, [1 / time for time in each], least)
    after = max(time * count for time, count in zip(each, rows, strict=True))
    return rows if after < (1 - LEAST_GAIN) * max(seconds) else None
