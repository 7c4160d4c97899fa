"""Context parallelism: attention over sequences split over the ranks of `cp`, as a grid of Ulysses x ring.

cp = ulysses x ring, and the ranks of one Ulysses group are consecutive: cp rank = ring rank * ulysses + Ulysses rank. The
sequence is cut into 2 x ring chunks, and ring rank r holds chunks r and 2 ring - 1 - r, so that all ranks have equal causal
work (zigzag; the imbalance is described by Brandon et al., Striped Attention, 2023). The tokens of a ring rank are split again
over its Ulysses ranks. Attention then takes three steps:

    all-to-all      from a part of the tokens with all heads to all tokens of the ring rank with a part of the heads
                    (Jacobs et al., DeepSpeed Ulysses, 2023)
    ring            queries stay, keys and values are sent around; partial results are merged by log-sum-exp
                    (Liu et al., Ring Attention, 2023)
    all-to-all      inverse of the first step

Token i attends to key j if both belong to the same document and 0 <= i - j < window. Each document is a sequence of a kernel
for packed sequences (`weft.compute.varlen_attention`), also without a ring; `attention_plan.py` plans the calls.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.collectives import start_all_to_all
from weft.compute.sequences import VarlenKernel
from weft.compute.varlen_attention import choose_kernel
from weft.errors import PlanError, raise_if_refused
from weft.parallel.sequence.attention_plan import AttentionPlans
from weft.parallel.sequence.context_grid import ContextParallel, reason_against_heads, reason_against_length
from weft.parallel.sequence.ring_attention import RingAttention, RingConfig


def _gather_tokens(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Callable[[], list[Tensor]]:
    """Start one all-to-all that gathers tokens and splits heads.

    Args:
        tensors: [ranks, B, H / ranks, S, *] each.
        group: ranks of Ulysses.

    Returns:
        A function that waits for the all-to-all and returns [B * ranks * S, H / ranks, *] for each tensor.
    """
    wait = start_all_to_all(torch.cat([x.flatten(1) for x in tensors], 1), group)

    def wait_for_tokens() -> list[Tensor]:
        pieces = wait().split([x[0].numel() for x in tensors], 1)
        parts = [piece.view(x.shape) for piece, x in zip(pieces, tensors, strict=True)]
        return [part.permute(1, 0, 3, 2, 4).flatten(0, 2) for part in parts]

    return wait_for_tokens


def _gather_heads(x: Tensor, group: dist.ProcessGroup, ranks: int) -> Callable[[], Tensor]:
    """Start the inverse all-to-all, [B, H, S, D] -> [B, ranks, H, S / ranks, D]; returns a function that waits for it."""
    wait = start_all_to_all(x.unflatten(2, (ranks, -1)).movedim(2, 0), group)
    return lambda: wait().movedim(0, 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    context: ContextParallel,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    rows: Tensor | None = None,
    first_head: int = 0,
    plans: AttentionPlans | None = None,
    kernel: VarlenKernel | None = None,
) -> Tensor:
    """Differentiable causal attention of the tokens of this rank over the full sequence.

    Args:
        q: [B, Hq, S / cp, D], tokens in the order of `natural_positions`.
        k: [B, Hkv, S / cp, D]; Hq is a multiple of Hkv.
        v: [B, Hkv, S / cp, Dv].
        documents: integers [B, S] or [B, 1, 1, S], document index of every token of the full rows in natural order, the same
            on all ranks; None if every row is one document. A document is a run of equal indices. The tensor is read on the
            host: keep it in host memory, otherwise the host waits for the device.
        context: groups and position of this rank.
        scale: factor on the scores.
        window: maximum number of keys that a token attends to, including itself; None for all.
        softcap: cap of the scores as in Gemma 2; computed by matmuls.
        sinks: [Hq], one more score per head in the denominator of the softmax (GPT-OSS). Its gradient is a partial sum: add
            the gradients of all cp ranks.
        dropout: fraction of the probabilities to drop; computed by matmuls.
        seed: seed of the dropout; use another one for each layer and step. With the same seed on all ranks, every grid drops
            the same probabilities.
        rows: int64 [B], identifiers of the rows for dropout; 0, 1, ... by default.
        first_head: index of the first local query head, if tensor parallelism has split the heads.
        plans: plans of the model, to read a tensor of documents once for all layers; None: plan this call.
        kernel: kernel to use; None: `choose_kernel`.

    Returns:
        [B, Hq, S / cp, Dv]

    Raises:
        PlanError: the sequence or the heads cannot be split over the grid, or the shape of `documents` is wrong.
    """
    heads, kv_heads, seq_len = q.shape[1], k.shape[1], q.shape[2] * context.ulysses * context.ring
    raise_if_refused(reason_against_length(seq_len, context.ulysses, context.ring))
    raise_if_refused(reason_against_heads(heads, kv_heads, context.ulysses))
    if documents is not None and (documents.numel() != len(q) * seq_len or documents.shape[-1] != seq_len):
        raise PlanError(
            f"documents of shape {tuple(documents.shape)} for {len(q)} rows of {seq_len} tokens",
            where="context parallelism",
            rule="documents has an index for every token of the full rows, on all ranks of cp",
            fix="pass the documents of the full rows, before the rows are split",
        )
    plans = AttentionPlans(q.device.type) if plans is None else plans
    steps = plans.steps(documents, len(q), seq_len, context.ring, context.ring_rank, window, q.device)
    if kernel is None:
        kernel, _ = choose_kernel(
            plans.device_type,
            q.dtype,
            q.shape[-1],
            v.shape[-1],
            window=window,
            ring=context.ring,
            softcap=softcap,
            dropout=dropout,
        )
    ring = RingConfig(
        context.ring_group,
        context.ring,
        context.ring_rank,
        seq_len,
        steps,
        kernel,
        scale,
        softcap,
        dropout,
        seed,
        first_head,
        torch.arange(len(q), device=q.device) if rows is None else rows,
    )
    if context.ulysses_group is None:
        tokens = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        return RingAttention.apply(*tokens, sinks, ring).unflatten(0, (len(q), -1)).transpose(1, 2)
    return _attend_ulysses(q, k, v, sinks, ring, context, context.ulysses_group)


def _attend_ulysses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ring: RingConfig,
    context: ContextParallel,
    group: dist.ProcessGroup,
) -> Tensor:
    """Ulysses around ring attention, in chunks of heads.

    The all-to-all of a chunk overlaps with the attention of the chunk before it.
    """
    ranks, heads, kv_heads = context.ulysses, q.shape[1], k.shape[1]
    repeats = math.lcm(kv_heads, ranks) // kv_heads  # so that ulysses divides the number of KV heads
    k, v = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (k, v))
    num_chunks = math.gcd(context.ulysses_chunks, k.shape[1] // ranks)
    # [chunks, ranks, B, heads of a rank in a chunk, S / cp, D]
    parts = [x.unflatten(1, (ranks, num_chunks, -1)).movedim((1, 2), (1, 0)) for x in (q, k, v)]
    inputs = [_gather_tokens(tensors, group) for tensors in zip(*parts, strict=True)]
    size, outputs = heads // ranks // num_chunks, []
    for index, wait_for_tokens in enumerate(inputs):
        first = context.ulysses_rank * size * num_chunks + index * size
        own_sinks = None if sinks is None else sinks[first : first + size]
        out = RingAttention.apply(*wait_for_tokens(), own_sinks, replace(ring, first_head=ring.first_head + first))
        outputs.append(_gather_heads(out.unflatten(0, (len(q), -1)).transpose(1, 2), group, ranks))
    return torch.cat([wait() for wait in outputs], 2).flatten(1, 2)
