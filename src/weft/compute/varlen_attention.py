"""Kernels of accelerators for attention over packed sequences, and the choice of the kernel.

The interface is that of `weft.compute.sequences`: a forward with the log-sum-exp of the scores, and a backward that takes
the result of the full softmax, so that the keys of a call may be a part of all keys.
"""

from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.compat import varlen_operators
from weft.compute.sequences import Sequences, VarlenKernel
from weft.compute.varlen_blocks import CPU_BLOCKS, PLAIN_BLOCKS

FLASH_HEAD_DIM = 256  # largest head dim of the flash operator on CUDA
HALF = (torch.bfloat16, torch.float16)
FUSION_SEQUENCES = 2048  # largest number of sequences of a call of the operator for NPUs
FUSION_MASK = 2048  # side of its causal mask, which holds for sequences of any length
FULL, CAUSAL, BAND = 0, 3, 4  # values of its sparse_mode


# CUDA: the variable-length flash operator of torch


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, softcap: None = None, dropout: None = None
) -> tuple[Tensor, Tensor]:
    """Forward of a `VarlenKernel`, by the operator below `torch.nn.attention.varlen.varlen_attn`.

    Values with a smaller head dim than keys are padded with zeros.
    """
    operator, _ = varlen_operators()
    v, size = _pad(v, q), v.shape[-1]
    out, lse, _ = operator(q, k, v, *_flash_lengths(sequences), scale=scale, window_size=_window(sequences))
    return out[..., :size], lse


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: Sequences,
    scale: float,
    softcap: None = None,
    dropout: None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of a `VarlenKernel`."""
    _, operator = varlen_operators()
    size = v.shape[-1]
    grad, v, out = (_pad(x, q) for x in (grad, v, out))
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # unused: dropout is off
    lengths = _flash_lengths(sequences)
    window = {"scale": scale, "window_size": _window(sequences)}
    dq, dk, dv = operator(grad, q, k, v, out, lse.contiguous(), *lengths, seed, **window)
    return dq, dk, dv[..., :size]


def _pad(x: Tensor, q: Tensor) -> Tensor:
    return x if x.shape[-1] == q.shape[-1] else F.pad(x, (0, q.shape[-1] - x.shape[-1]))


def _flash_lengths(sequences: Sequences) -> tuple[Any, ...]:
    borders = sequences.query_borders, sequences.key_borders
    is_causal = (sequences.left, sequences.right) == (-1, 0)
    longest = max(sequences.longest_query, 2)  # for 1, the operator moves query heads to tokens: lse is out of order
    return *borders, longest, sequences.longest_key, is_causal


def _window(sequences: Sequences) -> list[int]:
    return [sequences.left, sequences.right]


# NPU: the fused operator of torch_npu


def fusion_forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, softcap: None = None, dropout: None = None
) -> tuple[Tensor, Tensor]:
    """Forward of a `VarlenKernel`, by `torch_npu.npu_fusion_attention`.

    The operator returns maximum and sum of the softmax, eight times each, with heads before tokens inside of a sequence.
    """
    outs, parts = [], []
    for batch in _fusion_batches(sequences):
        found = import_module("torch_npu").npu_fusion_attention(
            *(x.contiguous() for x in (q[batch.query_tokens], k[batch.key_tokens], v[batch.key_tokens])),
            scale=scale,
            **_fusion_arguments(batch, sequences, q),
        )
        outs.append(found[0])
        logarithm = (found[1] + found[2].log())[..., 0].flatten()
        sizes = [stop - start for start, stop in pairwise((0, *batch.queries))]
        parts += [part.view(q.shape[1], -1) for part in logarithm.split([q.shape[1] * size for size in sizes])]
    return outs[0] if len(outs) == 1 else torch.cat(outs), torch.cat(parts, 1)


def fusion_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: Sequences,
    scale: float,
    softcap: None = None,
    dropout: None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of a `VarlenKernel`: the operator gets lse for the maximum, and a sum of one."""
    gradients = []
    for batch in _fusion_batches(sequences):
        of_queries, of_keys = batch.query_tokens, batch.key_tokens
        sizes = [stop - start for start, stop in pairwise((0, *batch.queries))]
        merged = torch.cat([part.flatten() for part in lse[:, of_queries].split(sizes, 1)])
        maximum = merged.view(-1, q.shape[1], 1).expand(-1, -1, 8).contiguous()
        found = import_module("torch_npu").npu_fusion_attention_grad(
            *(x.contiguous() for x in (q[of_queries], k[of_keys], v[of_keys], grad[of_queries])),
            softmax_max=maximum,
            softmax_sum=torch.ones_like(maximum),
            attention_in=out[of_queries].contiguous(),
            scale_value=scale,
            **_fusion_arguments(batch, sequences, q),
        )
        gradients.append(found[:3])
    if len(gradients) == 1:
        return gradients[0]
    dq, dk, dv = (torch.cat(parts) for parts in zip(*gradients, strict=True))
    return dq, dk, dv


class FusionBatch(NamedTuple):
    """Sequences of one call of the operator for NPUs."""

    query_tokens: slice
    key_tokens: slice
    queries: list[int]
    """End of each sequence in the queries of the batch."""
    keys: list[int]
    """End of each sequence in the keys of the batch."""


def _fusion_batches(sequences: Sequences) -> list[FusionBatch]:
    batches = []
    for first in range(0, len(sequences.queries) - 1, FUSION_SEQUENCES):
        own = slice(first, first + FUSION_SEQUENCES + 1)
        (query, *queries), (key, *keys) = sequences.queries[own], sequences.keys[own]
        tokens = slice(query, queries[-1]), slice(key, keys[-1])
        batches.append(FusionBatch(*tokens, [end - query for end in queries], [end - key for end in keys]))
    return batches


def _fusion_arguments(batch: FusionBatch, sequences: Sequences, q: Tensor) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "head_num": q.shape[1],
        "input_layout": "TND",
        "actual_seq_qlen": batch.queries,
        "actual_seq_kvlen": batch.keys,
        "keep_prob": 1.0,
        "sparse_mode": FULL,
    }
    if (sequences.left, sequences.right) != (-1, -1):
        mask = torch.ones(FUSION_MASK, FUSION_MASK, dtype=torch.bool, device=q.device).triu_(1)
        arguments |= {"atten_mask": mask, "sparse_mode": CAUSAL}
        if sequences.left >= 0:
            arguments |= {"pre_tockens": sequences.left, "next_tockens": 0, "sparse_mode": BAND}
    return arguments


# Choice


FLASH = VarlenKernel("flash", flash_forward, flash_backward)
FUSION = VarlenKernel("npu_fusion_attention", fusion_forward, fusion_backward)


def choose_kernel(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    *,
    window: int | None = None,
    ring: int = 1,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> tuple[VarlenKernel, str]:
    """Fastest kernel for an attention.

    Args:
        device_type: "cpu", "cuda", "npu" or any other.
        dtype: dtype of queries, keys and values.
        head_dim: head dim of queries and keys.
        value_dim: head dim of values.
        window: maximum number of keys that a token attends to, including itself; None for all.
        ring: ranks of ring attention.
        softcap: cap of the scores.
        dropout: fraction of the probabilities to drop.

    Returns:
        The kernel, and the reason why it is not the fast one of the device; "" if it is.
    """
    if dropout > 0 or softcap is not None:
        return PLAIN_BLOCKS, "attention dropout" if dropout > 0 else "a softcap of the scores"
    if device_type == "cpu":
        return CPU_BLOCKS, ""
    if device_type not in ("cuda", "npu"):
        return PLAIN_BLOCKS, f"no kernel for {device_type}"
    kernel = FLASH if device_type == "cuda" else FUSION
    name = str(dtype).removeprefix("torch.")
    multiple, largest = (8, FLASH_HEAD_DIM) if kernel is FLASH else (16, 768)
    if dtype not in (HALF if kernel is FLASH else (*HALF, torch.float32)):
        return PLAIN_BLOCKS, f"{kernel.name} does not take {name}"
    equal = head_dim == value_dim or (kernel is FLASH and value_dim < head_dim)
    if not equal or head_dim % multiple or head_dim > largest:
        return PLAIN_BLOCKS, f"{kernel.name} does not take keys of {head_dim} and values of {value_dim} elements a head"
    if kernel is FUSION and window is not None and ring > 1:
        return PLAIN_BLOCKS, f"{kernel.name} does not take windows over a ring"
    return kernel, ""
