"""Attention over one block of queries and keys, with the logarithm of its softmax denominators: parts can be put together.

Shapes: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; Hq is a multiple of Hkv, and query head h attends with head
h // (Hq / Hkv) of keys and values. No dim may be 0. `bias` is added to the scaled scores: [B or 1, 1 or Hq, Sq, Sk] of the
format of q, -inf where a query may not see a key; it gets no gradient. `causal` hides key j from query i where j > i. `lse` is
log(sum(exp(scores))), [B, Hq, Sq], in float64 for float64 and else in float32. A query that sees no key has out = 0 and
lse = -inf, and no gradients come from it.

Backward takes the out and lse of the whole row, of which the block may be a part: gradients of all parts add up to those of
the whole (Dao et al., FlashAttention, 2022).
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FLASH_HEAD_DIM = 256  # largest head dim of the flash operator on CUDA


class Primitive(NamedTuple):
    """One implementation, as two functions.

    forward(q, k, v, bias, causal, scale) -> (out, lse)
    backward(grad, q, k, v, out, lse, bias, causal, scale) -> (dq, dk, dv)
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The format in which sums are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def plain_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention from matrix products, on any device and in any format.

    Args:
        softcap: scores become softcap * tanh(scores / softcap) before the bias is added (Gemma 2, 2024).
        keep: [B, Hq, Sq, Sk], what dropout leaves of each probability: 0, or 1 / (1 - dropout).
    """
    scores, _ = _scores(q, k, bias, causal, scale, softcap)
    lse = torch.logsumexp(scores, -1)
    probabilities = _exp_difference(scores, lse[..., None])
    if keep is not None:
        probabilities = probabilities * keep
    return (probabilities @ _per_query_head(v, q)).to(q.dtype), lse


def plain_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `plain_forward`; the same arguments."""
    scores, slope = _scores(q, k, bias, causal, scale, softcap)
    probabilities = _exp_difference(scores, lse[..., None])
    grad = grad.to(scores.dtype)
    grad_probabilities = grad @ _per_query_head(v, q).mT
    kept = probabilities
    if keep is not None:
        kept, grad_probabilities = probabilities * keep, grad_probabilities * keep
    mean = (grad * out).sum(-1, keepdim=True)  # of the probabilities' gradients, under the probabilities
    grad_scores = probabilities * (grad_probabilities - mean) * scale
    if slope is not None:
        grad_scores = grad_scores * slope
    dq = grad_scores @ _per_query_head(k, q)
    dk = _per_key_head(grad_scores.mT @ q.to(scores.dtype), k)
    dv = _per_key_head(kept.mT @ grad, v)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention by PyTorch's flash operator for CPU: float64, float32, bf16 and fp16, without the matrix of scores."""
    size = v.shape[-1]
    q, k, v = _same_head_dim(q, k, v)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    if bias is not None:  # the operator gives lse = 0 to a query that sees nothing
        hidden = bias == -math.inf
        if causal:
            hidden = hidden | _later(q, k)
        lse = lse.masked_fill(hidden.all(-1), -math.inf)
    return out[..., :size], lse


def cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `cpu_forward`."""
    sizes = k.shape[-1], v.shape[-1]
    q, k, v, out, grad = _same_head_dim(q, k, v, out, grad)
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # exp(-inf - inf) = 0, where exp(-inf + inf) is not a number
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )
    return dq[..., : sizes[0]], dk[..., : sizes[0]], dv[..., : sizes[1]]


def cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention by PyTorch's flash operator for CUDA where it applies, else from matrix products."""
    if not _flash_applies(q, v, bias):
        return plain_forward(q, k, v, bias, causal, scale)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def cuda_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `cuda_forward`."""
    if not _flash_applies(q, v, bias):
        return plain_backward(grad, q, k, v, out, lse, bias, causal, scale)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
    lengths = (None, None, q.shape[2], k.shape[2])  # one length for all rows
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, seed, seed, scale=scale
    )


PLAIN = Primitive(plain_forward, plain_backward)
PRIMITIVES = {"cpu": Primitive(cpu_forward, cpu_backward), "cuda": Primitive(cuda_forward, cuda_backward)}


def primitive(device_type: str) -> Primitive:
    """The fastest implementation without softcap and dropout for "cpu", "cuda" or any other type of device."""
    return PRIMITIVES.get(device_type, PLAIN)


def merge_part(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take more keys into account, in place.

    Args:
        out: [B, Hq, Sq, Dv], what the queries got from the keys so far, in a wide format.
        lse: [B, Hq, Sq] of these keys.
        part: [B, Hq, Sq, Dv], what they get from other keys.
        part_lse: [B, Hq, Sq] of the other keys.
    """
    total = torch.logaddexp(lse, part_lse)
    out.mul_(_exp_difference(lse, total)[..., None]).add_(part * _exp_difference(part_lse, total)[..., None])
    lse.copy_(total)


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Scores in a wide format with all that is added, and the derivative of the cap."""
    scores = q.to(wide(q.dtype)) @ _per_query_head(k, q).mT * scale
    slope = None
    if softcap is not None:
        capped = torch.tanh(scores / softcap)
        scores, slope = softcap * capped, 1 - capped.square()
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(_later(q, k), -math.inf)
    return scores, slope


def _later(q: Tensor, k: Tensor) -> Tensor:
    """[Sq, Sk], true where the key comes after the query."""
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)


def _exp_difference(x: Tensor, lse: Tensor) -> Tensor:
    """exp(x - lse), and 0 where both are -inf."""
    return torch.exp(x - lse.clamp(min=torch.finfo(lse.dtype).min))


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values for each head of queries, in a wide format."""
    return x.to(wide(x.dtype)).repeat_interleave(q.shape[1] // x.shape[1], 1)


def _per_key_head(gradient: Tensor, x: Tensor) -> Tensor:
    """The sum of a gradient over the heads of queries that share a head of x."""
    return gradient.unflatten(1, (x.shape[1], -1)).sum(2)


def _same_head_dim(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Zeros behind the shorter heads: they change no score, and the columns of out that they make are cut off."""
    largest = max(tensor.shape[-1] for tensor in tensors)
    return tuple(F.pad(x, (0, largest - x.shape[-1])) if x.shape[-1] < largest else x for x in tensors)


def _flash_applies(q: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    half, size = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
    return half and bias is None and size == v.shape[-1] and size % 8 == 0 and size <= FLASH_HEAD_DIM


# What can be seen, and in which blocks


class Visibility(NamedTuple):
    """What the tokens of a row see."""

    starts: tuple[int, ...]
    """First positions of its documents, from 0 on."""
    window: int | None

    def first(self, token: int) -> int:
        """The first key that a token sees; it sees all from there to itself. It only grows along the row."""
        start = self.starts[bisect_right(self.starts, token) - 1]
        return start if self.window is None else max(start, token - self.window + 1)

    def mask(self, queries: range, keys: range) -> Tensor:
        """Bool [queries, keys], true where a query sees a key."""
        starts = torch.tensor(self.starts)
        query, key = torch.arange(queries.start, queries.stop), torch.arange(keys.start, keys.stop)
        first = starts[torch.searchsorted(starts, query, right=True) - 1]
        if self.window is not None:
            first = torch.maximum(first, query - self.window + 1)
        return (key >= first[:, None]) & (key <= query[:, None])


class AttentionBlock(NamedTuple):
    """One call of the attention primitive. Positions are natural ones."""

    rows: slice
    sight: Visibility
    queries: range
    keys: range
    form: Literal["full", "causal", "masked"]


def read_sights(documents: Tensor | None, window: int | None) -> list[tuple[slice, Visibility]]:
    """Which rows of a batch see what; neighbours that see the same are taken together.

    Args:
        documents: integers [B, S], the document of every token, or None where each row is one. A document is a run of
            equal numbers.
        window: keys that a token sees at most, itself included.
    """
    if documents is None:
        return [(slice(None), Visibility((0,), window))]
    borders = documents[:, 1:] != documents[:, :-1]
    starts = [(0, *(border.nonzero().flatten() + 1).tolist()) for border in borders]
    sights, row = [], 0
    for same, group in groupby(starts):
        count = len(list(group))
        sights.append((slice(row, row + count), Visibility(same, window)))
        row += count
    return sights


def visible_blocks(
    rows: slice, sight: Visibility, queries: Sequence[range], keys: Sequence[range], tile: int, largest: int | None
) -> list[AttentionBlock]:
    """Blocks that together hold every visible pair of a query and a key once; without a mask, all pairs of one are visible.

    Blocks with equal queries and keys come first: there every token sees itself.

    Args:
        rows: of the batch.
        sight: of these rows.
        queries: chunks of tokens; each of them is one of the keys' chunks too, or shares no token with them.
        keys: chunks of tokens.
        tile: tokens on a side up to which a block may be masked; documents that fit a tile together share it.
        largest: tokens on a side that no block exceeds, or None.
    """
    segments = list(_segments(sight.starts, max(chunk.stop for chunk in (*queries, *keys)), tile))
    blocks = []
    for query_chunk in queries:
        for key_chunk in keys:
            if key_chunk.start < query_chunk.stop:
                for segment in segments:
                    q, k = _common(query_chunk, segment), _common(key_chunk, segment)
                    blocks += _cut(rows, sight, q, k, tile, largest)
    return sorted(blocks, key=lambda block: block.queries != block.keys)


def _segments(starts: Sequence[int], end: int, tile: int) -> Iterator[range]:
    """One document each, or several that fit a tile together."""
    begin = 0
    for stop, following in zip(starts[1:], (*starts[2:], end), strict=False):
        if following - begin > tile:
            yield range(begin, stop)
            begin = stop
    yield range(begin, end)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _cut(
    rows: slice, sight: Visibility, queries: range, keys: range, tile: int, largest: int | None
) -> list[AttentionBlock]:
    """Halve both sides until a block is all visible, not visible, the square on the diagonal, or small enough for a mask."""
    if not queries or not keys or keys.start > queries[-1] or keys[-1] < sight.first(queries.start):
        return []
    size = max(len(queries), len(keys))
    if largest is None or size <= largest:
        if sight.first(queries[-1]) <= keys.start:
            if keys[-1] <= queries.start:
                return [AttentionBlock(rows, sight, queries, keys, "full")]
            if queries == keys:
                return [AttentionBlock(rows, sight, queries, keys, "causal")]
        if size <= tile:
            return [AttentionBlock(rows, sight, queries, keys, "masked")]
    return [block for q in _halves(queries) for k in _halves(keys) for block in _cut(rows, sight, q, k, tile, largest)]


def _halves(whole: range) -> tuple[range, range]:
    middle = len(whole) // 2
    return whole[:middle], whole[middle:]
