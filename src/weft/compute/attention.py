"""Attention primitives over one block of queries and keys, with the log-sum-exp of the scores, so that blocks can be merged.

Documents of any lengths are computed by the kernels of `varlen_attention.py`, some of which call these primitives.

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

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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
    length, size = q.shape[2], v.shape[-1]
    if _hides_padding(q, k, bias, causal):
        q, k, v = _few_lengths(q, k, v)
    q, k, v = _same_head_dim(q, k, v)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    if bias is not None:  # the operator returns lse = 0 for a query that sees no key
        hidden = bias == -math.inf
        if causal:
            hidden = hidden | _later(q, k)
        lse = lse.masked_fill(hidden.all(-1), -math.inf)
    return out[:, :, :length, :size], lse[..., :length]


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
    lengths, sizes = (q.shape[2], k.shape[2]), (k.shape[-1], v.shape[-1])
    if _hides_padding(q, k, bias, causal):
        q, k, v, out, grad = _few_lengths(q, k, v, out, grad)
        lse = F.pad(lse, (0, q.shape[2] - lse.shape[2]), value=math.inf)  # further queries have no gradient
    q, k, v, out, grad = _same_head_dim(q, k, v, out, grad)
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # exp(-inf - inf) = 0, where exp(-inf + inf) is not a number
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )
    of_keys, of_values = dk[:, :, : lengths[1], : sizes[0]], dv[:, :, : lengths[1], : sizes[1]]
    return dq[:, :, : lengths[0], : sizes[0]], of_keys, of_values


def _hides_padding(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool) -> bool:
    """True if zeros after the last key change no result, and save kernels that oneDNN compiles for each length in 16 bits.

    See `grouped_mm.py`.
    """
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return is_half and causal and bias is None and q.shape[2] <= k.shape[2]


def _few_lengths(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Add zeros up to the next multiple of 32 rows, of which tiles of the operator have 32 and more."""
    return tuple(F.pad(x, (0, 0, 0, -x.shape[2] % 32)) for x in tensors)


PLAIN = Primitive(plain_forward, plain_backward)
CPU = Primitive(cpu_forward, cpu_backward)


def merge_attention(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the attention over further keys into a result, in place.

    Args:
        out: [..., Hq, Sq, Dv], attention over the keys so far, in the accumulation dtype.
        lse: [..., Hq, Sq], log-sum-exp over the keys so far.
        part: [..., Hq, Sq, Dv], attention over the further keys.
        part_lse: [..., Hq, Sq], log-sum-exp over the further keys.
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
