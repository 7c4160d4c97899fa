"""Plan of the attention of a micro-batch: which sequences of queries and keys a rank computes in each step of a ring.

A document is a range of tokens. In a step a rank holds its own queries and the keys of one ring rank, so that a document is at
most one sequence: the queries of the document against its keys, all of which are earlier, or the same tokens. A window that is
shorter than a document also depends on the distance between the two chunks; there, each pair of chunks is a sequence.

The plan is made on the host, once for a micro-batch and a window, and serves all layers. Only the borders of the sequences are
copied to the device, together.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from weft.compute.sequences import Sequences
from weft.parallel.sequence.context_grid import ring_chunks


class Call(NamedTuple):
    """One call of a kernel. Slices are in the tokens of a ring rank, counted over all rows."""

    queries: tuple[slice, ...] | None
    """Queries of the sequences; None: all queries of the rank."""
    keys: tuple[slice, ...] | None
    """Keys of the sequences; None: all keys that the rank holds in this step."""
    sequences: Sequences


Steps = tuple[tuple[Call, ...], ...]
"""Calls of each step of the ring. In the first call, every token sees itself."""


class Pair(NamedTuple):
    """A sequence: ranges of the tokens of a row that the rank of the queries, and the rank of the keys, holds."""

    queries: range
    keys: range
    left: int
    """Number of keys before the aligned one that a query sees; -1 for all."""


@dataclass
class AttentionPlans:
    """Plans of the micro-batches in flight, shared by the attention modules of a model."""

    device_type: str
    """Type of the device whose kernels are used; a dry run sets that of an accelerator that is absent."""
    made: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """By the tensor of documents: plans by their other arguments."""

    def steps(self, documents: Tensor | None, *arguments: Any) -> Steps:
        """`plan_attention` with the same arguments, once for each tensor of documents."""
        if documents is None:
            return plan_attention(None, *arguments)
        plans = self.made.setdefault(documents, {})
        if arguments not in plans:
            plans[arguments] = plan_attention(documents, *arguments)
        return plans[arguments]


def plan_attention(
    documents: Tensor | None,
    rows: int,
    seq_len: int,
    ring: int,
    rank: int,
    window: int | None,
    device: torch.device,
) -> Steps:
    """Calls of a ring rank for causal attention inside of each document.

    Args:
        documents: integers [rows, seq_len] or [rows, 1, 1, seq_len], the document of every token, read on the host; a run of
            equal values is one document. None: each row is one document.
        rows: rows of the micro-batch.
        seq_len: tokens of a row.
        ring: ring ranks.
        rank: this ring rank.
        window: maximum number of keys that a token attends to, including itself; None for all.
        device: device of the attention.
    """
    chunks = [ring_chunks(seq_len, ring, holder) for holder in range(ring)]
    size = seq_len // ring
    is_start = torch.zeros(rows, seq_len, dtype=torch.bool)
    if documents is not None:
        is_start[:, 1:] = documents.view(rows, seq_len).diff(dim=1) != 0
    is_start[:, 0] = True
    crossing = _crossing(is_start, chunks)
    calls = [[_diagonal(is_start, crossing, chunks[rank], window)], *([] for _ in range(ring - 1))]
    for step, own in enumerate(calls):
        pairs: dict[int, list[tuple[range, range]]] = {}
        for row, of_row in enumerate(crossing):
            for document in of_row:
                for pair in _pairs(document, chunks[rank], chunks[(rank - step) % ring], window):
                    tokens = _move(pair.queries, row * size), _move(pair.keys, row * size)
                    pairs.setdefault(pair.left, []).append(tokens)
        own += [_draft(tokens, hidden, rows * size) for hidden, tokens in pairs.items()]
    return _copy_borders(calls, device)


class Draft(NamedTuple):
    """A call without the tensors of its borders."""

    queries: tuple[slice, ...] | None
    keys: tuple[slice, ...] | None
    query_borders: list[int]
    key_borders: list[int]
    left: int
    right: int


def _crossing(is_start: Tensor, chunks: Sequence[tuple[range, ...]]) -> list[list[range]]:
    """Documents of each row that lie in several chunks; all others are seen by their own chunk only.

    Args:
        is_start: bool [rows, seq_len], true at the first token of each document.
        chunks: chunks of positions of each ring rank.
    """
    found: list[list[range]] = []
    borders = sorted(chunk.start for own in chunks for chunk in own)[1:]
    for row in is_start if borders else ():
        starts = [*row.nonzero().flatten().tolist(), len(row)]
        indices = {bisect_left(starts, border) - 1 for border in borders if border not in starts}
        found.append([range(starts[index], starts[index + 1]) for index in sorted(indices)])
    return found


def _diagonal(is_start: Tensor, crossing: list[list[range]], own: tuple[range, ...], window: int | None) -> Draft:
    """Call in which every token of a rank sees itself: its own part of each document, causal.

    The chunks of the rank are adjacent in its tokens. A document in both is one sequence, unless the window hides pairs of it.
    """
    run = is_start.cumsum(1)[:, torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in own])]
    starts = torch.ones_like(run, dtype=torch.bool)
    starts[:, 1:] = run.diff(dim=1) != 0
    for row, documents in enumerate(crossing):
        if window is not None and any(own[-1].start in document and len(document) > window for document in documents):
            starts[row, len(own[0])] = True
    borders = [*starts.flatten().nonzero().flatten().tolist(), starts.numel()]
    return Draft(None, None, borders, borders, -1 if window is None else window - 1, 0)


def _pairs(document: range, queries: Sequence[range], keys: Sequence[range], window: int | None) -> Iterator[Pair]:
    """Sequences of a document in a step, in the order of the tokens, without those of `_diagonal`.

    Args:
        document: positions of its tokens.
        queries: chunks of positions of the rank of the queries, in ascending order.
        keys: chunks of positions of the rank of the keys; the same chunks, or chunks that are disjoint from them.
        window: see `plan_attention`.
    """
    if window is None or len(document) <= window:
        later = _local(document, [chunk for chunk in queries if chunk.start > keys[0].start], queries)
        earlier = _local(document, [chunk for chunk in keys if chunk.start < queries[-1].start], keys)
        if queries != keys and later and earlier:
            yield Pair(later, earlier, -1)
        return
    left = window - 1
    for query_chunk in queries:
        for key_chunk in keys:
            query, key = _common(document, query_chunk), _common(document, key_chunk)
            if query and key and key.start < query.start:
                key = range(max(key.start, query.start - left), key.stop)
                query = range(query.start, min(query.stop, key.stop + left))
                if query and key:
                    hides = query[-1] - key.start > left
                    shift = left + key.stop - query.stop if hides else -1
                    yield Pair(_local(query, queries, queries), _local(key, keys, keys), shift)


def _common(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))


def _local(document: range, chunks: Sequence[range], held: Sequence[range]) -> range:
    """Tokens of a document in adjacent chunks, as a range of the tokens of a rank that holds `held`."""
    parts = []
    for chunk, offset in zip(held, accumulate(map(len, held), initial=0), strict=False):
        if chunk in chunks and (common := _common(document, chunk)):
            parts.append(_move(common, offset - chunk.start))
    return range(parts[0].start, parts[-1].stop) if parts else range(0)


def _move(tokens: range, offset: int) -> range:
    return range(tokens.start + offset, tokens.stop + offset)


def _draft(pairs: list[tuple[range, range]], left: int, tokens: int) -> Draft:
    """Call of sequences, given their queries and keys as ranges of the tokens of all rows."""
    queries, keys = zip(*pairs, strict=True)
    query_borders, key_borders = ([0, *accumulate(map(len, side))] for side in (queries, keys))
    return Draft(_join(queries, tokens), _join(keys, tokens), query_borders, key_borders, left, -1)


def _join(ranges: Sequence[range], tokens: int) -> tuple[slice, ...] | None:
    """Ranges with adjacent ranges joined; None if they are all tokens in order."""
    joined: list[slice] = []
    for part in ranges:
        if joined and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(slice(part.start, part.stop))
    return None if joined == [slice(0, tokens)] else tuple(joined)


def _copy_borders(drafts: list[list[Draft]], device: torch.device) -> Steps:
    """Calls with their borders on the device, by one copy that the host does not wait for."""
    borders = [side for own in drafts for draft in own for side in (draft.query_borders, draft.key_borders)]
    joined = torch.tensor([end for ends in borders for end in ends], dtype=torch.int32)
    if device.type == "cuda":
        joined = joined.pin_memory()
    on_device = iter(joined.to(device, non_blocking=True).split([len(ends) for ends in borders]))
    return tuple(tuple(_call(draft, next(on_device), next(on_device)) for draft in own) for own in drafts)


def _call(draft: Draft, query_borders: Tensor, key_borders: Tensor) -> Call:
    sides = draft.query_borders, draft.key_borders
    longest = (max(stop - start for start, stop in pairwise(side)) for side in sides)
    borders = query_borders, key_borders
    sequences = Sequences(tuple(sides[0]), tuple(sides[1]), draft.left, draft.right, *borders, *longest)
    return Call(draft.queries, draft.keys, sequences)
