"""Attention primitives over one block of queries and keys, with the log-sum-exp of the scores, so that blocks can be merged.

Shapes: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]. Hq is a multiple of Hkv, and query head h uses key and value
head h // (Hq / Hkv). No dim may be 0. Further arguments and results:

    bias      added to the scaled scores: [B or 1, 1 or Hq, Sq, Sk] in the dtype of q, -inf where a query may not see a key;
              has no gradient
    causal    hides key j from query i if j > i
    lse       log(sum(exp(scores))), [B, Hq, Sq], in float64 for float64, else in float32

A query that sees no key has out = 0 and lse = -inf, and contributes no gradient.

Backward takes out and lse of the full row, of which the block may be a part: the gradients of all blocks add up to the
gradients of the row (Dao et al., FlashAttention, 2022).
"""

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

FLASH_HEAD_DIM = 256  # largest head dim of the flash operator on CUDA
# torch 2.11 shares heads of keys without being asked.
GROUPED_QUERIES = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class Primitive(NamedTuple):
    """Implementation of attention over one block.

    forward(q, k, v, bias, causal, scale) -> (out, lse)
    backward(grad, q, k, v, out, lse, bias, causal, scale) -> (dq, dk, dv)
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which sums are accumulated."""
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
    """Attention from plain matmuls, on any device and in any dtype.

    Args:
        softcap: scores become softcap * tanh(scores / softcap) before the bias is added (Gemma 2, 2024).
        keep: [B, Hq, Sq, Sk], dropout factor of each probability: 0 or 1 / (1 - dropout).
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
    """Gradients of `plain_forward`, with the same arguments."""
    scores, slope = _scores(q, k, bias, causal, scale, softcap)
    probabilities = _exp_difference(scores, lse[..., None])
    grad = grad.to(scores.dtype)
    grad_probabilities = grad @ _per_query_head(v, q).mT
    kept = probabilities
    if keep is not None:
        kept, grad_probabilities = probabilities * keep, grad_probabilities * keep
    mean = (grad * out).sum(-1, keepdim=True)  # expectation of grad_probabilities under the probabilities
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
    """Attention by PyTorch's flash operator for CPU: float64, float32, bf16 and fp16, without materializing the scores."""
    size = v.shape[-1]
    q, k, v = _same_head_dim(q, k, v)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    if bias is not None:  # the operator returns lse = 0 for a query that sees no key
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
    if not flash_applies(q, v, bias):
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
    if not flash_applies(q, v, bias):
        return plain_backward(grad, q, k, v, out, lse, bias, causal, scale)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # unused: dropout is off
    lengths = (None, None, q.shape[2], k.shape[2])  # one length for all rows
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, seed, seed, scale=scale
    )


PLAIN = Primitive(plain_forward, plain_backward)
PRIMITIVES = {"cpu": Primitive(cpu_forward, cpu_backward), "cuda": Primitive(cuda_forward, cuda_backward)}


def primitive(device_type: str) -> Primitive:
    """Fastest implementation without softcap and dropout for a device type ("cpu", "cuda" or any other)."""
    return PRIMITIVES.get(device_type, PLAIN)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """Causal attention inside of each document, by PyTorch's variable-length flash operator for CUDA. Differentiable.

    Args:
        q: [B, Hq, S, D] in bf16 or fp16; `flash_applies` must be true.
        k: [B, Hkv, S, D].
        v: [B, Hkv, S, D].
        borders: int32 [documents + 1] on the device: 0 and the end of each document, counted over the tokens of all rows.
        longest: tokens of the longest document.
        scale: factor on the scores.
        window: maximum number of keys that a token attends to, including itself; None for all.

    Returns:
        [B, S, Hq, D]
    """
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    left = -1 if window is None else window - 1
    kernel: Any = varlen_attn
    out = kernel(*flat, borders, borders, longest, longest, scale=scale, window_size=(left, 0), **GROUPED_QUERIES)
    return out.unflatten(0, (q.shape[0], q.shape[2]))


def merge_attention(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the attention over further keys into a result, in place.

    Args:
        out: [B, Hq, Sq, Dv], attention over the keys so far, in the accumulation dtype.
        lse: [B, Hq, Sq], log-sum-exp over the keys so far.
        part: [B, Hq, Sq, Dv], attention over the further keys.
        part_lse: [B, Hq, Sq], log-sum-exp over the further keys.
    """
    total = torch.logaddexp(lse, part_lse)
    out.mul_(_exp_difference(lse, total)[..., None]).add_(part * _exp_difference(part_lse, total)[..., None])
    lse.copy_(total)


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Scores with softcap, bias and causal mask, in the accumulation dtype; and the derivative of the softcap."""
    scores = q.to(accumulation_dtype(q.dtype)) @ _per_query_head(k, q).mT * scale
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
    """[Sq, Sk], true where the key is after the query."""
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)


def _exp_difference(x: Tensor, lse: Tensor) -> Tensor:
    """exp(x - lse), and 0 where both are -inf."""
    return torch.exp(x - lse.clamp(min=torch.finfo(lse.dtype).min))


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values repeated for each query head, in the accumulation dtype."""
    return x.to(accumulation_dtype(x.dtype)).repeat_interleave(q.shape[1] // x.shape[1], 1)


def _per_key_head(gradient: Tensor, x: Tensor) -> Tensor:
    """Sum of a gradient over the query heads that share a head of x."""
    return gradient.unflatten(1, (x.shape[1], -1)).sum(2)


def _same_head_dim(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad all tensors with zeros to the largest head dim; zeros change no score, and callers drop the padded output columns."""
    largest = max(tensor.shape[-1] for tensor in tensors)
    return tuple(F.pad(x, (0, largest - x.shape[-1])) if x.shape[-1] < largest else x for x in tensors)


def flash_applies(q: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """True if the flash operators of CUDA take these tensors."""
    half, size = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
    return half and bias is None and size == v.shape[-1] and size % 8 == 0 and size <= FLASH_HEAD_DIM


# Visibility, and blocks of visible pairs


class Visibility(NamedTuple):
    """Keys visible to the tokens of a row."""

    starts: tuple[int, ...]
    """First positions of its documents, starting with 0."""
    window: int | None

    def first(self, token: int) -> int:
        """First key that a token sees; it sees every key from there to itself. Never decreases along the row."""
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
    """One call of the attention primitive. Positions are positions in the sequence."""

    rows: slice
    visibility: Visibility
    queries: range
    keys: range
    kind: Literal["full", "causal", "masked"]


def read_visibility(documents: Tensor | None, window: int | None) -> list[tuple[slice, Visibility]]:
    """Visibility of each row of a batch; consecutive rows with equal visibility are grouped.

    Args:
        documents: integers [B, S], the document of every token; a run of equal values is one document. None: each row is
            one document.
        window: number of keys that a token sees at most, including itself.
    """
    if documents is None:
        return [(slice(None), Visibility((0,), window))]
    borders = documents[:, 1:] != documents[:, :-1]
    starts = [(0, *(border.nonzero().flatten() + 1).tolist()) for border in borders]
    runs, row = [], 0
    for same, group in groupby(starts):
        count = len(list(group))
        runs.append((slice(row, row + count), Visibility(same, window)))
        row += count
    return runs


def visible_blocks(
    rows: slice, visibility: Visibility, queries: Sequence[range], keys: Sequence[range], tile: int, largest: int | None
) -> list[AttentionBlock]:
    """Blocks that cover every visible (query, key) pair exactly once; in a block without a mask, all pairs are visible.

    Blocks with equal queries and keys come first: in these every token sees itself.

    Args:
        rows: rows of the batch.
        visibility: visibility in these rows.
        queries: chunks of tokens; each is either one of the chunks of `keys`, or disjoint from all of them.
        keys: chunks of tokens.
        tile: maximum side of a masked block in tokens; documents that fit a tile together share it.
        largest: maximum side of any block in tokens; None: no maximum.
    """
    segments = list(_segments(visibility.starts, max(chunk.stop for chunk in (*queries, *keys)), tile))
    blocks = []
    for query_chunk in queries:
        for key_chunk in keys:
            if key_chunk.start < query_chunk.stop:
                for segment in segments:
                    q, k = _common(query_chunk, segment), _common(key_chunk, segment)
                    blocks += _cut(rows, visibility, q, k, tile, largest)
    return sorted(blocks, key=lambda block: block.queries != block.keys)


def _segments(starts: Sequence[int], end: int, tile: int) -> Iterator[range]:
    """Ranges of one document each, or of several documents that fit a tile together."""
    begin = 0
    for stop, following in zip(starts[1:], (*starts[2:], end), strict=False):
        if following - begin > tile:
            yield range(begin, stop)
            begin = stop
    yield range(begin, end)


def _common(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))


def _cut(
    rows: slice, visibility: Visibility, queries: range, keys: range, tile: int, largest: int | None
) -> list[AttentionBlock]:
    """Halve both sides until a block is fully visible, invisible, a square on the diagonal, or small enough for a mask."""
    if not queries or not keys or keys.start > queries[-1] or keys[-1] < visibility.first(queries.start):
        return []
    size = max(len(queries), len(keys))
    if largest is None or size <= largest:
        if visibility.first(queries[-1]) <= keys.start:
            if keys[-1] <= queries.start:
                return [AttentionBlock(rows, visibility, queries, keys, "full")]
            if queries == keys:
                return [AttentionBlock(rows, visibility, queries, keys, "causal")]
        if size <= tile:
            return [AttentionBlock(rows, visibility, queries, keys, "masked")]
    return [
        block for q in _halves(queries) for k in _halves(keys) for block in _cut(rows, visibility, q, k, tile, largest)
    ]


def _halves(tokens: range) -> tuple[range, range]:
    middle = len(tokens) // 2
    return tokens[:middle], tokens[middle:]
