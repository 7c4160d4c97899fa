"""Plan of the attention of a micro-batch: which sequences of queries and keys a rank computes in each step of a ring.

A document is a range of tokens. In a step a rank holds its own queries and the keys of one ring rank, so that a document is at
most one sequence: the queries of the document against its keys, all of which are earlier, or the same tokens. A window that is
shorter than a document also depends on the distance between the two chunks; there, each pair of chunks is a sequence.

The plan is made on the host, once for a micro-batch and a window, and serves all layers. Only the borders of the sequences are
copied to the device, together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from weft.compute.sequences import Sequences
from weft.parallel.context_grid import ring_chunks


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
    right: int


@dataclass
class AttentionPlans:
    """Plans of the micro-batches in flight, shared by the attention modules of a model."""

    device_type: str
    """Type of the device whose kernels are used; a dry run sets that of an accelerator that is absent."""
    made: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """By the tensor of documents: plans by their other arguments."""
    positions_on_host: Tensor | None = None
    """Positions of the rows of the next forward in host memory, so that the host does not wait for those on the device."""

    def take_positions(self, positions: Tensor) -> Tensor:
        """Positions of the rows of this forward, in host memory if they have been set."""
        on_host, self.positions_on_host = self.positions_on_host, None
        return positions if on_host is None else on_host

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
    of_rows = _documents(documents, rows, seq_len)
    of_steps: list[dict[tuple[int, int], list[tuple[range, range]]]] = []
    for step in range(ring):
        groups: dict[tuple[int, int], list[tuple[range, range]]] = {}
        for row, own in enumerate(of_rows):
            for document in own:
                for pair in _pairs(document, chunks[rank], chunks[(rank - step) % ring], window):
                    tokens = _move(pair.queries, row * size), _move(pair.keys, row * size)
                    groups.setdefault((pair.left, pair.right), []).append(tokens)
        of_steps.append(groups)
    borders = _copy_borders(of_steps, device)
    return tuple(
        tuple(_call(pairs, *kind, rows * size, next(borders), next(borders)) for kind, pairs in groups.items())
        for groups in of_steps
    )


def _documents(documents: Tensor | None, rows: int, seq_len: int) -> list[list[range]]:
    """Documents of each row."""
    if documents is None:
        return [[range(seq_len)]] * rows
    starts = documents.view(rows, seq_len).diff(dim=1) != 0
    found = [[0] for _ in range(rows)]
    for row, token in starts.nonzero().tolist():
        found[row].append(token + 1)
    return [[range(*ends) for ends in zip(own, (*own[1:], seq_len), strict=True)] for own in found]


def _pairs(document: range, queries: Sequence[range], keys: Sequence[range], window: int | None) -> Iterator[Pair]:
    """Sequences of a document in a step, in the order of the tokens; those in which tokens see themselves come first.

    Args:
        document: positions of its tokens.
        queries: chunks of positions of the rank of the queries, in ascending order.
        keys: chunks of positions of the rank of the keys; the same chunks, or chunks that are disjoint from them.
        window: see `plan_attention`.
    """
    left = -1 if window is None else window - 1
    if window is None or len(document) <= window:
        if queries == keys:
            own = _local(document, queries, queries)
            if own:
                yield Pair(own, own, left, 0)
            return
        later = _local(document, [chunk for chunk in queries if chunk.start > keys[0].start], queries)
        earlier = _local(document, [chunk for chunk in keys if chunk.start < queries[-1].start], keys)
        if later and earlier:
            yield Pair(later, earlier, -1, -1)
        return
    for query_chunk in queries:
        for key_chunk in sorted(keys, key=lambda chunk: chunk != query_chunk):
            query, key = _common(document, query_chunk), _common(document, key_chunk)
            if query_chunk == key_chunk and query:
                own = _local(query, queries, queries)
                yield Pair(own, own, left, 0)
            elif query and key and key.start < query.start:
                key = range(max(key.start, query.start - left), key.stop)
                query = range(query.start, min(query.stop, key.stop + left))
                if query and key:
                    hides = query[-1] - key.start > left
                    shift = left + key.stop - query.stop if hides else -1
                    yield Pair(_local(query, queries, queries), _local(key, keys, keys), shift, -1)


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


def _copy_borders(
    of_steps: list[dict[tuple[int, int], list[tuple[range, range]]]], device: torch.device
) -> Iterator[Tensor]:
    """Borders of queries and keys of each call, int32 on the device, by one copy that the host does not wait for."""
    borders = [
        (0, *accumulate(len(pair[side]) for pair in pairs))
        for groups in of_steps
        for pairs in groups.values()
        for side in (0, 1)
    ]
    joined = torch.tensor([end for ends in borders for end in ends], dtype=torch.int32)
    if device.type == "cuda":
        joined = joined.pin_memory()
    return iter(joined.to(device, non_blocking=True).split([len(ends) for ends in borders]))


def _call(
    pairs: list[tuple[range, range]], left: int, right: int, tokens: int, query_borders: Tensor, key_borders: Tensor
) -> Call:
    queries, keys = zip(*pairs, strict=True)
    sequences = Sequences(
        (0, *accumulate(map(len, queries))),
        (0, *accumulate(map(len, keys))),
        left,
        right,
        query_borders,
        key_borders,
        max(map(len, queries)),
        max(map(len, keys)),
    )
    return Call(_join(queries, tokens), _join(keys, tokens), sequences)


def _join(ranges: Sequence[range], tokens: int) -> tuple[slice, ...] | None:
    """Ranges with adjacent ranges joined; None if they are all tokens in order."""
    joined: list[slice] = []
    for tokens_of_one in ranges:
        if joined and joined[-1].stop == tokens_of_one.start:
            joined[-1] = slice(joined[-1].start, tokens_of_one.stop)
        else:
            joined.append(slice(tokens_of_one.start, tokens_of_one.stop))
    return None if joined == [slice(0, tokens)] else tuple(joined)
