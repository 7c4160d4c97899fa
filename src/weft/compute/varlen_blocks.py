"""Attention over packed sequences by a primitive of `attention.py`, on any device.

Consecutive sequences of equal lengths are one call of the primitive. A sequence with a window is cut into strips of queries,
each with the keys that its queries see, so that the work is that of the window.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.compute.attention import CPU, PLAIN, Primitive, accumulation_dtype
from weft.compute.dropout import dropout_mask
from weft.compute.sequences import Sequences, TokenDropout, VarlenKernel

STRIP = 256  # queries of a strip of a sequence with a window
LARGEST_SCORES = 2048**2  # scores of a head that are materialized at a time


class Strip(NamedTuple):
    """Queries of consecutive sequences of equal lengths, and the keys that they see."""

    number: int
    """Number of sequences."""
    query_tokens: slice
    """Tokens of all queries of the sequences."""
    key_tokens: slice
    """Tokens of all keys of the sequences."""
    queries: slice
    """Queries of the strip in each sequence."""
    keys: slice
    """Keys of the strip in each sequence."""
    shift: int
    """Key that is aligned with the first query, both counted from the start of the strip."""

    def of_queries(self, x: Tensor) -> Tensor:
        """View [number, H, queries, D] of the queries in a tensor [T, H, D]."""
        return x[self.query_tokens].unflatten(0, (self.number, -1))[:, self.queries].transpose(1, 2)

    def of_keys(self, x: Tensor) -> Tensor:
        """View [number, H, keys, D] of the keys in a tensor [T, H, D]."""
        return x[self.key_tokens].unflatten(0, (self.number, -1))[:, self.keys].transpose(1, 2)

    def of_lse(self, lse: Tensor) -> Tensor:
        """View [number, H, queries] of the queries in a tensor [H, T]."""
        return lse[:, self.query_tokens].unflatten(1, (self.number, -1))[:, :, self.queries].transpose(0, 1)


def blocks_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    scale: float,
    softcap: float | None = None,
    dropout: TokenDropout | None = None,
    *,
    primitive: Primitive,
    strip: int,
    largest: int | None,
) -> tuple[Tensor, Tensor]:
    """Forward of a `VarlenKernel`.

    Args:
        q: see `weft.compute.sequences`.
        k: see `weft.compute.sequences`.
        v: see `weft.compute.sequences`.
        sequences: sequences of the call.
        scale: factor on the scores.
        softcap: cap of the scores; the primitive must take it.
        dropout: dropout of the probabilities; the primitive must take it.
        primitive: attention over one block.
        strip: queries of a strip of a sequence with a window.
        largest: maximum number of scores of a call of the primitive for one head; None: no maximum.
    """
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=accumulation_dtype(q.dtype))
    for part in _strips(sequences, strip, largest):
        options = _options(part, sequences, q, softcap, dropout)
        found, found_lse = primitive.forward(
            part.of_queries(q), part.of_keys(k), part.of_keys(v), scale=scale, **options
        )
        part.of_queries(out).copy_(found)
        part.of_lse(lse).copy_(found_lse)
    return out, lse


def blocks_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: Sequences,
    scale: float,
    softcap: float | None = None,
    dropout: TokenDropout | None = None,
    *,
    primitive: Primitive,
    strip: int,
    largest: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of a `VarlenKernel`; arguments as for `blocks_forward`."""
    dtype = accumulation_dtype(q.dtype)
    dq, dk, dv = q.new_empty(q.shape), *(torch.zeros_like(x, dtype=dtype) for x in (k, v))
    for part in _strips(sequences, strip, largest):
        options = _options(part, sequences, q, softcap, dropout)
        rows = [part.of_queries(grad), part.of_queries(q), part.of_keys(k), part.of_keys(v), part.of_queries(out)]
        found_dq, found_dk, found_dv = primitive.backward(*rows, part.of_lse(lse), scale=scale, **options)
        part.of_queries(dq).copy_(found_dq)
        part.of_keys(dk).add_(found_dk)
        part.of_keys(dv).add_(found_dv)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _strips(sequences: Sequences, strip: int, largest: int | None) -> Iterator[Strip]:
    """Strips that cover all queries of all sequences once."""
    lengths = (
        (stop - start, last - first)
        for (start, stop), (first, last) in zip(pairwise(sequences.queries), pairwise(sequences.keys), strict=True)
    )
    query, key = 0, 0
    for (size, key_size), group in groupby(lengths):
        count = len(list(group))
        hides = -1 < sequences.left < key_size - 1
        rows = strip if hides else size if largest is None else max(1, min(size, largest // key_size))
        together = count if largest is None else max(1, largest // (rows * key_size))
        for first in range(0, count, together):
            number = min(together, count - first)
            query_tokens = slice(query + first * size, query + (first + number) * size)
            key_tokens = slice(key + first * key_size, key + (first + number) * key_size)
            for start in range(0, size, rows):
                stop, shift = min(start + rows, size), key_size - size
                low = max(0, start + shift - sequences.left) if sequences.left >= 0 else 0
                high = min(key_size, stop + shift + sequences.right) if sequences.right >= 0 else key_size
                yield Strip(number, query_tokens, key_tokens, slice(start, stop), slice(low, high), start + shift - low)
        query, key = query + count * size, key + count * key_size


def _options(
    part: Strip, sequences: Sequences, q: Tensor, softcap: float | None, dropout: TokenDropout | None
) -> dict[str, Any]:
    """Mask, softcap and dropout of a strip, as arguments of the primitive."""
    rows, columns = part.queries.stop - part.queries.start, part.keys.stop - part.keys.start
    later = sequences.right >= 0 and columns > part.shift + sequences.right + 1
    earlier = sequences.left >= 0 and part.shift + rows - 1 > sequences.left
    causal = later and not earlier and part.shift == 0 and sequences.right == 0
    options: dict[str, Any] = {"bias": None, "causal": causal}
    if earlier or (later and not causal):
        aligned = torch.arange(part.shift, part.shift + rows, device=q.device)[:, None]
        distance = torch.arange(columns, device=q.device) - aligned
        hidden = distance > sequences.right if later else torch.zeros_like(distance, dtype=torch.bool)
        if earlier:
            hidden = hidden | (distance < -sequences.left)
        options["bias"] = torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, -math.inf)[None, None]
    if softcap is not None:
        options["softcap"] = softcap
    if dropout is not None:
        by_sequence = [x[part.query_tokens].view(part.number, -1) for x in (dropout.rows, dropout.queries)]
        keys = dropout.keys[part.key_tokens].view(part.number, -1)[:, part.keys]
        positions = by_sequence[1][:, None, part.queries], keys[:, None, None]
        options["keep"] = dropout_mask(dropout.seed, by_sequence[0][:, 0], dropout.heads, *positions, rate=dropout.rate)
    return options


def blocks_kernel(name: str, primitive: Primitive, strip: int = STRIP, largest: int | None = None) -> VarlenKernel:
    """Kernel by a primitive; arguments as for `blocks_forward`."""
    settings: dict[str, Any] = {"primitive": primitive, "strip": strip, "largest": largest}
    return VarlenKernel(name, partial(blocks_forward, **settings), partial(blocks_backward, **settings))


CPU_BLOCKS = blocks_kernel("flash on CPU", CPU)
PLAIN_BLOCKS = blocks_kernel("matmuls", PLAIN, largest=LARGEST_SCORES)
