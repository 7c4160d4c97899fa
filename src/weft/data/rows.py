"""Rows of memory-mapped tokens, indexed by global sample position; the shuffled order is a pure function of the seed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from weft.data.shards import ROW_TYPES, STREAM_TYPES, TokenSpan, open_array

MASK = 2**64 - 1
ROUNDS = 4


class Row(NamedTuple):
    """One row, a view of the memory map."""

    tokens: torch.Tensor
    """[seq_len + 1], shorter at the end of a document without packing, and in rows of chats; int32, or the dtype of the .npy
    file of a job. A token of a chat that is no target is stored as the bitwise complement of its id."""
    starts: np.ndarray
    """int64 [n]: indices in the row, 1 ... seq_len, at which a new document starts."""


class Rows:
    """Rows of one split.

    Packed rows are cut from the stream of documents with a stride of seq_len, so that every token except the first is a
    target exactly once; the remainder at the end of a shard (less than a row) is dropped. Without packing, each row is a part
    of a single document. Chats are never cut: a packed row has as many consecutive chats as fit. A file of ready rows
    (source "tokens") is used unchanged.

    Args:
        spans: token ranges of the split, `Prepared.train` or `Prepared.held_out`.
        seq_len: input tokens per row.
        packing: fill rows with several documents.
        shuffle: shuffle the rows of each epoch; otherwise rows come in file order.
        seed: seed of the shuffled order.

    Raises:
        DataError: a file is missing, truncated or has another type.
    """

    def __init__(self, spans: Sequence[TokenSpan], *, seq_len: int, packing: bool, shuffle: bool, seed: int):
        self.seq_len, self.shuffle, self.seed = seq_len, shuffle, seed
        self.maps = [_open(span) for span in spans]
        # A segment is a range of consecutive tokens that is cut into rows: a full span, or one document without packing. Of
        # chats, it is one row.
        segments = [_segments(i, span, self.maps[i][1], packing, seq_len + 1) for i, span in enumerate(spans)]
        self._segments = np.concatenate([np.empty((0, 3), np.int64), *segments])
        lengths = self._segments[:, 2] - self._segments[:, 1]
        has_documents, whole = all(span.starts for span in spans), any(span.whole for span in spans)
        self._stride = seq_len if has_documents else seq_len + 1
        unpacked_rows = -(-(lengths - 1) // seq_len)
        full_rows = np.maximum(lengths - (seq_len + 1), -self._stride) // self._stride + 1
        self._row_ends = np.cumsum(full_rows if (packing and not whole) or not has_documents else unpacked_rows)

    def __len__(self) -> int:
        """Number of rows per epoch."""
        return int(self._row_ends[-1]) if len(self._row_ends) else 0

    def __getitem__(self, position: int) -> Row:
        """Row at a global sample position, for any position >= 0; the epoch is `position // len(rows)`.

        Raises:
            IndexError: the position is negative, or the split has no rows.
        """
        if position < 0 or not len(self):
            raise IndexError(f"no row at position {position}; an epoch has {len(self)} rows")
        epoch, index = divmod(position, len(self))
        if self.shuffle:
            index = shuffled(index, len(self), self.seed, epoch)
        segment = int(np.searchsorted(self._row_ends, index, side="right"))
        map_index, segment_begin, segment_end = self._segments[segment].tolist()
        begin = segment_begin + (index - (int(self._row_ends[segment - 1]) if segment else 0)) * self._stride
        end = min(begin + self.seq_len + 1, segment_end)
        tokens, starts = self.maps[map_index]
        low, high = np.searchsorted(starts, (begin + 1, end))
        return Row(tokens[begin:end], starts[low:high] - begin)


def shuffled(index: int, count: int, seed: int, epoch: int) -> int:
    """Random permutation of [0, count) for each (seed, epoch), evaluated at `index` in O(1).

    A Feistel network permutes the range up to the next power of four. A result outside [0, count) is permuted again until it
    is inside (cycle walking).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    key = _mix(_mix(seed & MASK) ^ epoch)
    while True:
        left, right = index >> half, index & low
        for round_index in range(ROUNDS):
            left, right = right, left ^ (_mix(key + (round_index << 60) ^ right) & low)
        index = left << half | right
        if index < count:
            return index


def row_seed(seed: int, position: int) -> int:
    """Seed of the random numbers of a row, below 2**63."""
    return _mix(_mix(seed & MASK) ^ position) >> 1


def _mix(value: int) -> int:
    """Finalizer of splitmix64: each input bit affects about half of the output bits."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def _open(span: TokenSpan) -> tuple[torch.Tensor, np.ndarray]:
    """Flat tokens of the span's file, and the document starts in the file."""
    if span.starts is None:
        rows = open_array(span.tokens, ndim=2, dtypes=ROW_TYPES)
        return torch.from_numpy(rows.reshape(-1)), np.empty(0, np.int64)
    tokens = open_array(span.tokens, ndim=1, dtypes=STREAM_TYPES)
    starts = open_array(span.starts, ndim=1, dtypes=["int64"])
    return torch.from_numpy(tokens), np.asarray(starts)


def _segments(map_index: int, span: TokenSpan, starts: np.ndarray, packing: bool, capacity: int) -> np.ndarray:
    """Segments of a span that are cut into rows: map index, begin and end, int64 [segments, 3]."""
    low, high = (0, 0) if packing and not span.whole else np.searchsorted(starts, (span.first + 1, span.last))
    edges = np.concatenate([[span.first], starts[low:high], [span.last]]).astype(np.int64)
    if packing and span.whole:
        edges = edges[_fill(edges, capacity)]
    return np.stack([np.full(len(edges) - 1, map_index), edges[:-1], edges[1:]], axis=1)


def _fill(edges: np.ndarray, capacity: int) -> list[int]:
    """Indices of the edges at which rows begin, if each row takes the next documents that fit (next fit), and of the end."""
    begins = [0]
    while begins[-1] < len(edges) - 1:
        fit = int(np.searchsorted(edges, edges[begins[-1]] + capacity, side="right")) - 1
        begins.append(max(fit, begins[-1] + 1))
    return begins
