"""Rows: fixed places in mapped tokens, numbered by global sample position, in an order that is a pure function."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from weft.data.shards import ROW_TYPES, STREAM_TYPES, Span, open_array

MASK = 2**64 - 1
ROUNDS = 4


class Row(NamedTuple):
    """One row, cut from the map without a copy."""

    tokens: torch.Tensor
    """[seq_len + 1], fewer at the end of a document that is not packed; int32, or the dtype of the .npy of a job."""
    starts: np.ndarray
    """int64 [n]: places 1 ... seq_len of the row at which a new document starts."""


class Rows:
    """The rows of one split.

    Packed rows are cut from the stream of documents with a stride of seq_len, so that every token but the first is a
    target once; what is left at the end of a shard (less than a row) is not used. Without packing a row is one piece
    of one document. A file of ready rows is taken as it is.

    Args:
        spans: where the split lies, `Prepared.train` or `Prepared.held_out`.
        seq_len: tokens that a row feeds to the model.
        packing: fill rows with several documents.
        shuffle: visit rows of each epoch in an order drawn from seed, else as they lie.
        seed: seed of the order.

    Raises:
        DataError: a file is missing, truncated or of another kind.
    """

    def __init__(self, spans: Sequence[Span], *, seq_len: int, packing: bool, shuffle: bool, seed: int):
        self.seq_len, self.shuffle, self.seed = seq_len, shuffle, seed
        self.maps = [_open(span) for span in spans]
        # A run is a stretch of tokens that rows are cut from, one after the other: a whole span, or one document.
        runs = [_runs(i, span, self.maps[i][1], packing) for i, span in enumerate(spans)]
        self._runs = np.concatenate([np.empty((0, 3), np.int64), *runs])
        lengths = self._runs[:, 2] - self._runs[:, 1]
        has_documents = all(span.starts for span in spans)
        self._stride = seq_len if has_documents else seq_len + 1
        pieces = -(-(lengths - 1) // seq_len)
        whole = np.maximum(lengths - (seq_len + 1), -self._stride) // self._stride + 1
        self._row_ends = np.cumsum(whole if packing or not has_documents else pieces)

    def __len__(self) -> int:
        """Rows of one epoch."""
        return int(self._row_ends[-1]) if len(self._row_ends) else 0

    def __getitem__(self, position: int) -> Row:
        """The row at a global sample position, for any position >= 0: epoch `position // len(rows)` and so on.

        Raises:
            IndexError: the position is negative, or the split has no rows.
        """
        if position < 0 or not len(self):
            raise IndexError(f"no row at position {position}; an epoch has {len(self)} rows")
        epoch, index = divmod(position, len(self))
        if self.shuffle:
            index = shuffled(index, len(self), self.seed, epoch)
        run = int(np.searchsorted(self._row_ends, index, side="right"))
        map_index, run_begin, run_end = self._runs[run].tolist()
        begin = run_begin + (index - (int(self._row_ends[run - 1]) if run else 0)) * self._stride
        end = min(begin + self.seq_len + 1, run_end)
        tokens, starts = self.maps[map_index]
        low, high = np.searchsorted(starts, (begin + 1, end))
        return Row(tokens[begin:end], starts[low:high] - begin)


def shuffled(index: int, count: int, seed: int, epoch: int) -> int:
    """Where `index` of [0, count) goes in the order of an epoch: a permutation for each (seed, epoch), in O(1).

    A Feistel network permutes the next larger power of four; values outside of the range walk on along their cycle
    until they are inside.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    key = _mix(_mix(seed & MASK) ^ epoch)
    while True:
        left, right = index >> half, index & low
        for number in range(ROUNDS):
            left, right = right, left ^ (_mix(key + (number << 60) ^ right) & low)
        index = left << half | right
        if index < count:
            return index


def _mix(value: int) -> int:
    """The finaliser of splitmix64: each bit of the value moves about half of the bits of the result."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def _open(span: Span) -> tuple[torch.Tensor, np.ndarray]:
    """The tokens of a span's file, flat, and the document starts in it."""
    if span.starts is None:
        rows = open_array(span.tokens, ndim=2, dtypes=ROW_TYPES)
        return torch.from_numpy(rows.reshape(-1)), np.empty(0, np.int64)
    tokens = open_array(span.tokens, ndim=1, dtypes=STREAM_TYPES)
    starts = open_array(span.starts, ndim=1, dtypes=["int64"])
    return torch.from_numpy(tokens), np.asarray(starts)


def _runs(map_index: int, span: Span, starts: np.ndarray, packing: bool) -> np.ndarray:
    """int64 [runs, 3]: map, begin and end of each stretch of a span that rows are cut from."""
    low, high = (0, 0) if packing else np.searchsorted(starts, (span.first + 1, span.last))
    edges = np.concatenate([[span.first], starts[low:high], [span.last]]).astype(np.int64)
    return np.stack([np.full(len(edges) - 1, map_index), edges[:-1], edges[1:]], axis=1)
