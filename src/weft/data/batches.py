"""Micro-batches from rows. Global batches are independent of the number of data ranks and of the micro-batch size."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from weft.data.row_split import RowSplit
from weft.data.rows import Rows

IGNORED = -100  # target that cross entropy ignores (ignore_index of PyTorch and Transformers)
PREFETCH_STEPS = 4


@dataclass(frozen=True)
class MicroBatch:
    """Micro-batch of one rank; all tensors are contiguous int64 [rows, seq_len]."""

    input_ids: torch.Tensor
    """Token ids; 0 in padding."""
    position_ids: torch.Tensor
    """Position in the document, or in the part of a document that is in the row; restarts at 0 with each document."""
    targets: torch.Tensor
    """Next token of the same document; -100 if there is none, or if it has no loss, as what a user says in a chat."""
    positions_on_host: torch.Tensor | None = None
    """`position_ids` in host memory, of a micro-batch that was moved from there."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.input_ids)

    def pinned(self) -> "MicroBatch":
        """The micro-batch in pinned host memory."""
        return MicroBatch(self.input_ids.pin_memory(), self.position_ids.pin_memory(), self.targets.pin_memory())

    def to(self, device: torch.device) -> "MicroBatch":
        """The micro-batch on a device; from pinned memory without waiting."""
        input_ids, position_ids, targets = (
            tensor.to(device, non_blocking=True) for tensor in (self.input_ids, self.position_ids, self.targets)
        )
        on_host = self.position_ids if self.position_ids.device.type == "cpu" else self.positions_on_host
        return MicroBatch(input_ids, position_ids, targets, on_host)

    def host_positions(self) -> torch.Tensor:
        """`position_ids` in host memory; waits for the device if the micro-batch was made there."""
        return self.position_ids.cpu() if self.positions_on_host is None else self.positions_on_host


def collate(rows: Rows, positions: Sequence[int], num_rows: int) -> MicroBatch:
    """Collate rows into a micro-batch.

    Args:
        rows: rows of a split.
        positions: global sample positions of at most `num_rows` rows.
        num_rows: rows of the micro-batch; rows beyond the given positions are padding without targets.
    """
    shape = num_rows, rows.seq_len
    input_ids = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, IGNORED)
    picked = [rows[position] for position in positions]
    for line, row in enumerate(picked):
        length = len(row.tokens) - 1
        input_ids[line, :length] = row.tokens[:-1]
        targets[line, :length] = row.tokens[1:]
    targets[targets < 0] = IGNORED  # the complement of an id is no target
    input_ids = torch.where(input_ids < 0, ~input_ids, input_ids)
    lines = np.repeat(np.arange(len(picked)), [len(row.starts) for row in picked])
    starts = np.concatenate([np.empty(0, np.int64), *(row.starts for row in picked)])
    targets[lines, starts - 1] = IGNORED
    document = torch.zeros(num_rows, rows.seq_len + 1, dtype=torch.int64)
    document[lines, starts] = torch.from_numpy(starts)
    position_ids = torch.arange(rows.seq_len) - document[:, :-1].cummax(dim=1).values
    return MicroBatch(input_ids, position_ids, targets)


class RowSource(Protocol):
    """Rows of another task, which make their own micro-batches; see `weft.data.record_batches`."""

    def __len__(self) -> int: ...

    def collate(self, positions: Sequence[int], num_rows: int) -> Any:
        """Micro-batch as that of the function `collate`."""
        ...

    def costs(self, positions: Sequence[int]) -> list[float] | None:
        """Costs of rows; None if all cost the same."""
        ...


def collate_rows(rows: Rows | RowSource, positions: Sequence[int], num_rows: int) -> Any:
    """Micro-batch of rows of any task; arguments as of `collate`."""
    return collate(rows, positions, num_rows) if isinstance(rows, Rows) else rows.collate(positions, num_rows)


def batches(
    rows: Rows | RowSource,
    *,
    steps: int,
    split: RowSplit,
    data_rank: int,
    start_step: int = 0,
    pin: bool = False,
) -> Iterator[list[Any]]:
    """Iterate over the training steps of one data rank; yields the list of micro-batches of each step.

    Step k covers the positions k * global_batch ... (k + 1) * global_batch - 1, of which each data rank has a contiguous
    share; of rows of unequal cost, it has rows of about the same total cost. All ranks have the same number of micro-batches.
    Without `rows_per_rank` these have the same shapes: if global_batch is not a multiple of data_ranks, shorter shares are
    padded with rows without targets. A background thread prefetches a few steps. It ends with the iterator, and its exceptions
    are raised by the iterator.

    Args:
        rows: rows of the train split.
        steps: total number of steps of the run.
        split: split of a global batch over data ranks and micro-batches.
        data_rank: index of this data rank, 0 ... data_ranks - 1.
        start_step: first step to yield, after a resume.
        pin: True to copy each micro-batch into pinned memory, in the background thread.
    """
    micro_batches: Sequence[tuple[Sequence[int], int]] = split.micro_batches(data_rank)

    def prepare_step(step: int) -> list[Any]:
        first = step * split.global_batch
        costs = None if isinstance(rows, Rows) else rows.costs(range(first, first + split.global_batch))
        parts = micro_batches if costs is None else split.balanced(data_rank, costs)
        found = [collate_rows(rows, [first + row for row in indices], size) for indices, size in parts]
        return [batch.pinned() for batch in found] if pin else found

    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-data")
    pending: deque[Future[list[Any]]] = deque()
    try:
        for step in range(start_step, steps + PREFETCH_STEPS):
            if step < steps:
                pending.append(pool.submit(prepare_step, step))
            if step >= start_step + PREFETCH_STEPS and pending:
                yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def evaluation_batches(
    rows: Rows | RowSource, *, micro_batch: int, data_rank: int, data_ranks: int, max_rows: int | None = None
) -> Iterator[Any]:
    """Iterate over the evaluation micro-batches of one data rank; all data ranks together cover each row exactly once.

    All ranks have the same number of micro-batches; the last ones are padded with rows without targets. To get the mean loss,
    sum the losses and the target counts over all ranks, then divide.

    Args:
        rows: rows of the held-out split.
        micro_batch: rows per micro-batch.
        data_rank: index of this data rank, 0 ... data_ranks - 1.
        data_ranks: number of data ranks.
        max_rows: maximum number of rows, taken from the start of the split.
    """
    count = len(rows) if max_rows is None else min(max_rows, len(rows))
    for begin in range(0, count, micro_batch * data_ranks):
        first = begin + data_rank * micro_batch
        yield collate_rows(rows, range(first, min(first + micro_batch, count)), micro_batch)
