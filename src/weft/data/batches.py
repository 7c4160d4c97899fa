"""Rows become micro-batches: the same global batches for any number of data ranks and any micro-batch."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from weft.data.rows import Rows

IGNORED = -100  # the target that cross entropy leaves out, in PyTorch and in Transformers
STEPS_AHEAD = 4


@dataclass(frozen=True)
class MicroBatch:
    """What a rank takes through forward and backward at once; each tensor int64 [rows, seq_len], contiguous."""

    input_ids: torch.Tensor
    """Tokens; 0 where a row is padded."""
    position_ids: torch.Tensor
    """Place in the document (or in the part of it that lies in the row): 0 again at each document start."""
    targets: torch.Tensor
    """The next token of the same document; -100 where there is none."""


def assemble(rows: Rows, positions: Sequence[int], num_rows: int) -> MicroBatch:
    """Copy the rows at some positions, each once, into a micro-batch.

    Args:
        rows: a split.
        positions: global sample positions, `num_rows` at most.
        num_rows: rows of the micro-batch; those without a position have no targets.
    """
    shape = num_rows, rows.seq_len
    input_ids = torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, IGNORED)
    picked = [rows[position] for position in positions]
    for line, row in enumerate(picked):
        length = len(row.tokens) - 1
        input_ids[line, :length] = row.tokens[:-1]
        targets[line, :length] = row.tokens[1:]
    lines = np.repeat(np.arange(len(picked)), [len(row.starts) for row in picked])
    starts = np.concatenate([np.empty(0, np.int64), *(row.starts for row in picked)])
    targets[lines, starts - 1] = IGNORED
    document = torch.zeros(num_rows, rows.seq_len + 1, dtype=torch.int64)
    document[lines, starts] = torch.from_numpy(starts)
    position_ids = torch.arange(rows.seq_len) - document[:, :-1].cummax(dim=1).values
    return MicroBatch(input_ids, position_ids, targets)


def count_micro_batches(global_batch: int, micro_batch: int, data_ranks: int) -> int:
    """Micro-batches that each data rank has in a step of `batches`."""
    return -(-_share(global_batch, data_ranks) // micro_batch)


def _share(global_batch: int, data_ranks: int) -> int:
    """Rows of a data rank, those without targets among them."""
    return -(-global_batch // data_ranks)


def batches(
    rows: Rows,
    *,
    steps: int,
    global_batch: int,
    micro_batch: int,
    data_rank: int,
    data_ranks: int,
    start_step: int = 0,
) -> Iterator[list[MicroBatch]]:
    """The micro-batches of one data rank, a list for each step `start_step` ... `steps - 1`.

    Step k takes the positions k * global_batch ... (k + 1) * global_batch - 1, and a data rank its contiguous share of
    them. All ranks have equally many micro-batches of equal shapes: where global_batch is no multiple of data_ranks,
    the shorter shares are filled with rows without targets. One background thread prepares a few steps ahead; it ends
    with the iterator, and its errors are raised here.

    Args:
        rows: the train split.
        steps: steps of the whole run.
        global_batch: rows of a step over all data ranks.
        micro_batch: rows of a micro-batch; the last one of a step has fewer if the share is no multiple of it.
        data_rank: which share, 0 ... data_ranks - 1.
        data_ranks: number of shares.
        start_step: first step, after a resume.
    """
    low, high = data_rank * global_batch // data_ranks, (data_rank + 1) * global_batch // data_ranks
    share = _share(global_batch, data_ranks)

    def prepare_step(step: int) -> list[MicroBatch]:
        mine = range(step * global_batch + low, step * global_batch + high)
        return [
            assemble(rows, mine[begin : begin + micro_batch], min(micro_batch, share - begin))
            for begin in range(0, share, micro_batch)
        ]

    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-data")
    pending: deque[Future[list[MicroBatch]]] = deque()
    try:
        for step in range(start_step, steps + STEPS_AHEAD):
            if step < steps:
                pending.append(pool.submit(prepare_step, step))
            if step >= start_step + STEPS_AHEAD and pending:
                yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def evaluation_batches(
    rows: Rows, *, micro_batch: int, data_rank: int, data_ranks: int, max_rows: int | None = None
) -> Iterator[MicroBatch]:
    """Every row of a split exactly once over all data ranks, in equally many micro-batches on each.

    Rows without targets fill up the last ones: add up losses and numbers of targets over all ranks, then divide.

    Args:
        rows: the held-out split.
        micro_batch: rows of each micro-batch.
        data_rank: which share, 0 ... data_ranks - 1.
        data_ranks: number of shares.
        max_rows: look at the first rows only.
    """
    count = len(rows) if max_rows is None else min(max_rows, len(rows))
    for begin in range(0, count, micro_batch * data_ranks):
        first = begin + data_rank * micro_batch
        yield assemble(rows, range(first, min(first + micro_batch, count)), micro_batch)
