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

Token i attends to key j if both belong to the same document and 0 <= i - j < window. The visible pairs of two chunks are cut
into blocks, most of which need no mask. Blocks without visible pairs are skipped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.collectives import start_all_to_all
from weft.compute.attention import (
    PLAIN,
    AttentionBlock,
    Primitive,
    accumulation_dtype,
    merge_attention,
    primitive,
    read_visibility,
    visible_blocks,
)
from weft.compute.dropout import dropout_mask
from weft.errors import PlanError
from weft.topology.mesh import context_rank, ranks_along

PLAIN_BLOCK = 2048  # max_side side of a block, in tokens, where the score matrix is materialised


@dataclass(frozen=True)
class ContextParallel:
    """Process groups and grid position of one rank for context parallelism."""

    ulysses_group: dist.ProcessGroup | None
    """Ranks of the Ulysses all-to-all, in the order of cp ranks; None if ulysses is 1."""
    ring_group: dist.ProcessGroup | None
    """Ranks of the ring, in the order of cp ranks; None if ring is 1."""
    ulysses: int
    ring: int
    rank: int
    """Rank along cp."""
    tile: int = 512
    """Largest side of a block that is computed with a mask, in tokens; larger blocks are cut further."""
    ulysses_chunks: int = 1
    """Maximum number of head chunks per Ulysses all-to-all. The number used is the max_side common divisor with the KV heads of
    a rank."""

    @property
    def ulysses_rank(self) -> int:
        return self.rank % self.ulysses

    @property
    def ring_rank(self) -> int:
        return self.rank // self.ulysses


def sequence_parts(ulysses: int, ring: int) -> int:
    """Number of parts that a sequence is cut into; the length of the sequence must be a multiple of it."""
    return 2 * ring * ulysses if ring > 1 else ulysses


def check_sequence(seq_len: int, ulysses: int, ring: int) -> None:
    """Raise PlanError unless a sequence can be split over the grid."""
    parts = sequence_parts(ulysses, ring)
    if seq_len % parts:
        raise PlanError(
            f"a sequence of {seq_len} tokens cannot be split for ulysses {ulysses} x ring {ring}",
            where="parallel.cp",
            rule=f"seq_len is a multiple of {parts} (ulysses, or 2 x ring x ulysses if ring is larger than 1)",
            fix=f"pad rows to {seq_len + -seq_len % parts} tokens (data.seq_len of a job, or pad_to_multiple_of={parts} of a "
            "collator), or use fewer ranks of cp",
        )


def check_heads(heads: int, kv_heads: int, ulysses: int) -> None:
    """Raise PlanError unless heads can be split over the ranks of Ulysses."""
    if heads % kv_heads or heads % ulysses:
        fewer = f"set plan.parallel.cp_ulysses to {math.gcd(heads, ulysses)}, for a longer ring"
        raise PlanError(
            f"{heads} query heads with {kv_heads} KV heads cannot be split over ulysses {ulysses}",
            where="plan.parallel.cp, plan.parallel.cp_ulysses",
            rule="ulysses and the number of KV heads both divide the number of query heads that a rank has after tensor "
            "parallelism",
            fix="set plan.parallel.cp to 1" if heads % kv_heads else fewer,
        )


def ring_chunks(seq_len: int, ring: int, rank: int) -> tuple[range, ...]:
    """Natural positions of the tokens of a ring rank, as one or two ranges."""
    if ring == 1:
        return (range(seq_len),)
    size = seq_len // (2 * ring)
    return tuple(range(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * ring - 1 - rank))


def zigzag_indices(seq_len: int, ranks: int, rank: int) -> Tensor:
    """Natural positions of the tokens of a ring rank, int64 [seq_len / ranks]."""
    return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in ring_chunks(seq_len, ranks, rank)])


def natural_positions(seq_len: int, ulysses: int, ring: int, rank: int) -> Tensor:
    """Natural positions of the tokens of a cp rank, int64 [seq_len / (ulysses * ring)].

    Raises:
        PlanError: the sequence cannot be split over this grid.
    """
    check_sequence(seq_len, ulysses, ring)
    return zigzag_indices(seq_len, ring, rank // ulysses).chunk(ulysses)[rank % ulysses]


def own_positions(seq_len: int, mesh: DeviceMesh) -> Tensor:
    """Natural positions of the tokens of this rank, int64 [seq_len / cp]; see `natural_positions`."""
    return natural_positions(seq_len, ranks_along(mesh, "cp_ulysses"), ranks_along(mesh, "cp_ring"), context_rank(mesh))


# Ring attention


@dataclass(frozen=True)
class _RingConfig:
    """Non-tensor arguments of ring attention: the group, and the blocks that this rank computes at each step."""

    group: dist.ProcessGroup | None
    ranks: int
    rank: int
    chunks: list[tuple[range, ...]]
    """Natural positions of the tokens of each ring rank."""
    steps: list[list[AttentionBlock]]
    primitive: Primitive
    scale: float
    softcap: float | None
    dropout: float
    seed: int
    first_head: int
    row_ids: Tensor

    def query_index(self, block: AttentionBlock) -> tuple[slice, slice, slice]:
        """Index of the queries of a block in the queries of this rank."""
        return block.rows, slice(None), _local(block.queries, self.chunks[self.rank])

    def key_index(self, block: AttentionBlock, step: int) -> tuple[slice, slice, slice]:
        """Index of the keys of a block in the keys that this rank holds at a step."""
        return block.rows, slice(None), _local(block.keys, self.chunks[(self.rank - step) % self.ranks])

    def arguments(self, block: AttentionBlock, q: Tensor) -> dict[str, Any]:
        """Keyword arguments of the attention primitive for a block, given the local queries of all rows."""
        arguments: dict[str, Any] = {"bias": None, "causal": block.kind == "causal", "scale": self.scale}
        if block.kind == "masked":
            hidden = ~block.visibility.mask(block.queries, block.keys)
            bias = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -math.inf)
            arguments["bias"] = bias.to(q.device, non_blocking=True)[None, None]
        if self.softcap is not None:
            arguments["softcap"] = self.softcap
        if self.dropout > 0:
            arange = partial(torch.arange, device=q.device)
            rows, heads = self.row_ids[block.rows], arange(self.first_head, self.first_head + q.shape[1])
            queries, keys = (arange(tokens.start, tokens.stop) for tokens in (block.queries, block.keys))
            arguments["keep"] = dropout_mask(self.seed, rows, heads, queries, keys, rate=self.dropout)
        return arguments


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: _RingConfig) -> Tensor:
        own = kv = torch.cat([k, v], -1)
        key_size, value_size = k.shape[-1], v.shape[-1]
        out = q.new_empty((*q.shape[:-1], value_size), dtype=accumulation_dtype(q.dtype))
        lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
        for step, blocks in enumerate(ring.steps):
            last = step == ring.ranks - 1
            if not last:
                next_kv = _send_recv(kv, ring, tag=0)
            keys, values = kv.split([key_size, value_size], -1)
            for block in blocks:
                q_slice, k_slice = ring.query_index(block), ring.key_index(block, step)
                part, part_lse = ring.primitive.forward(
                    q[q_slice], keys[k_slice], values[k_slice], **ring.arguments(block, q)
                )
                if block.queries == block.keys:  # the first block of these queries
                    out[q_slice], lse[q_slice] = part, part_lse
                else:
                    merge_attention(out[q_slice], lse[q_slice], part, part_lse)
            if not last:
                kv = next_kv.wait()
        if sinks is not None:  # an attention sink is one more key for every query, with value zero
            sink = sinks.to(lse.dtype)[None, :, None].expand_as(lse)
            merge_attention(out, lse, torch.zeros((), dtype=out.dtype, device=out.device), sink)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, out, lse, sinks)
        ctx.ring, ctx.sizes = ring, (key_size, value_size)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, kv, out, lse, sinks = ctx.saved_tensors
        ring: _RingConfig = ctx.ring
        dq = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype))
        dkv_transfer: _RingTransfer | None = None
        for step, blocks in enumerate(ring.steps):
            last = step == ring.ranks - 1
            if not last:
                next_kv = _send_recv(kv, ring, tag=0)
            keys, values = kv.split(ctx.sizes, -1)
            dkv = torch.zeros_like(kv, dtype=accumulation_dtype(kv.dtype))
            dk, dv = dkv.split(ctx.sizes, -1)
            for block in blocks:
                q_slice, k_slice = ring.query_index(block), ring.key_index(block, step)
                block_dq, block_dk, block_dv = ring.primitive.backward(
                    grad[q_slice],
                    q[q_slice],
                    keys[k_slice],
                    values[k_slice],
                    out[q_slice],
                    lse[q_slice],
                    **ring.arguments(block, q),
                )
                dq[q_slice] += block_dq
                dk[k_slice] += block_dk
                dv[k_slice] += block_dv
            if dkv_transfer is not None:  # gradients of these keys that earlier ranks computed
                dkv += dkv_transfer.wait()
            if ring.ranks > 1:
                dkv_transfer = _send_recv(dkv, ring, tag=1)
            if not last:
                kv = next_kv.wait()
        if dkv_transfer is not None:  # the last transfer returned the gradients to the rank of their keys
            dkv = dkv_transfer.wait()
        dk, dv = dkv.to(kv.dtype).split(ctx.sizes, -1)
        dsinks = None
        if sinks is not None:
            share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)  # probability of the sink in each softmax
            dsinks = -(share * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), dk, dv, dsinks, None


def _local(tokens: range, chunks: tuple[range, ...]) -> slice:
    """Slice of tokens of one chunk within the tokens of a rank, given its chunks."""
    offset = 0
    for chunk in chunks:
        if tokens.start in chunk:
            break
        offset += len(chunk)
    return slice(offset + tokens.start - chunk.start, offset + tokens.stop - chunk.start)


class _RingTransfer(NamedTuple):
    """Receive in flight from the previous rank of the ring."""

    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def _send_recv(x: Tensor, ring: _RingConfig, tag: int) -> _RingTransfer:
    """Start to send a tensor to the next rank of the ring, and to receive one from the previous rank."""
    received = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, group=ring.group, tag=tag, group_peer=(ring.rank + 1) % ring.ranks)
    receive = dist.P2POp(dist.irecv, received, group=ring.group, tag=tag, group_peer=(ring.rank - 1) % ring.ranks)
    return _RingTransfer(received, dist.batch_isend_irecv([send, receive]))


# Ulysses all-to-all


def _gather_tokens(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Callable[[], list[Tensor]]:
    """Start one all-to-all that gathers tokens and splits heads.

    Args:
        tensors: [ranks, B, H / ranks, S, *] each.
        group: ranks of Ulysses.

    Returns:
        A function that waits for the all-to-all and returns [B, H / ranks, S * ranks, *] for each tensor.
    """
    wait = start_all_to_all(torch.cat([x.flatten(1) for x in tensors], 1), group)

    def wait_for_tokens() -> list[Tensor]:
        pieces = wait().split([x[0].numel() for x in tensors], 1)
        return [piece.view(x.shape).movedim(0, 2).flatten(2, 3) for piece, x in zip(pieces, tensors, strict=True)]

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
) -> Tensor:
    """Differentiable causal attention of the tokens of this rank over the full sequence.

    Args:
        q: [B, Hq, S / cp, D], tokens in the order of `natural_positions`.
        k: [B, Hkv, S / cp, D]; Hq is a multiple of Hkv.
        v: [B, Hkv, S / cp, Dv].
        documents: integers [B, S], document index of every token of the full rows in natural order, the same on all ranks;
            None if every row is one document. A document is a run of equal indices. The tensor is read on the host: keep it
            in host memory, otherwise every call synchronises with the device.
        context: groups and position of this rank.
        scale: factor on the scores.
        window: maximum number of keys that a token attends to, including itself; None for all.
        softcap: cap of the scores as in Gemma 2; disables the fused operators.
        sinks: [Hq], one more score per head in the denominator of the softmax (GPT-OSS). Its gradient is a partial sum: add
            the gradients of all cp ranks.
        dropout: fraction of the probabilities to drop; disables the fused operators.
        seed: seed of the dropout; use another one for each layer and step. With the same seed on all ranks, every grid drops
            the same probabilities.
        rows: int64 [B], identifiers of the rows for dropout; 0, 1, ... by default.
        first_head: index of the first local query head, if tensor parallelism has split the heads.

    Returns:
        [B, Hq, S / cp, Dv]

    Raises:
        PlanError: the sequence or the heads cannot be split over the grid, or the shape of `documents` is wrong.
    """
    heads, kv_heads, seq_len = q.shape[1], k.shape[1], q.shape[2] * context.ulysses * context.ring
    check_sequence(seq_len, context.ulysses, context.ring)
    check_heads(heads, kv_heads, context.ulysses)
    if documents is not None:
        if documents.shape != (len(q), seq_len):
            raise PlanError(
                f"documents of shape {tuple(documents.shape)} for {len(q)} rows of {seq_len} tokens",
                where="context parallelism",
                rule="documents has an index for every token of the full rows, on all ranks of cp",
                fix="pass the documents of the full rows, before the rows are split",
            )
        documents = documents.cpu()
    rows = torch.arange(len(q), device=q.device) if rows is None else rows
    plain = softcap is not None or dropout > 0 or primitive(q.device.type) is PLAIN
    chunks = [ring_chunks(seq_len, context.ring, rank) for rank in range(context.ring)]
    own_chunks, max_side = chunks[context.ring_rank], PLAIN_BLOCK if plain else None
    steps = [
        [
            block
            for rows, visibility in read_visibility(documents, window)
            for block in visible_blocks(
                rows, visibility, own_chunks, chunks[context.ring_rank - step], context.tile, max_side
            )
        ]
        for step in range(context.ring)
    ]
    ring = _RingConfig(
        context.ring_group,
        context.ring,
        context.ring_rank,
        chunks,
        steps,
        PLAIN if plain else primitive(q.device.type),
        scale,
        softcap,
        dropout,
        seed,
        first_head,
        rows,
    )
    if context.ulysses_group is None:
        return _RingAttention.apply(q, k, v, sinks, ring)
    return _attend_ulysses(q, k, v, sinks, ring, context, context.ulysses_group)


def _attend_ulysses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ring: _RingConfig,
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
        out = _RingAttention.apply(*wait_for_tokens(), own_sinks, replace(ring, first_head=ring.first_head + first))
        outputs.append(_gather_heads(out, group, ranks))
    return torch.cat([wait() for wait in outputs], 2).flatten(1, 2)
