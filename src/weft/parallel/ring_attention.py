"""Ring attention: queries stay, keys and values are sent around (Liu et al., Ring Attention, 2023)."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.comm import stopwatch
from weft.compute.attention import (
    AttentionBlock,
    Primitive,
    accumulation_dtype,
    merge_attention,
)
from weft.compute.dropout import dropout_mask


@dataclass(frozen=True)
class RingConfig:
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


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: RingConfig) -> Tensor:
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
        ring: RingConfig = ctx.ring
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
    group: dist.ProcessGroup | None
    began: Any
    """Event before its issue, see `weft.comm.stopwatch`."""

    def wait(self) -> Tensor:
        for work in self.works:
            stopwatch.wait(work, self.group, self.began if work is self.works[-1] else None)
        return self.received


def _send_recv(x: Tensor, ring: RingConfig, tag: int) -> _RingTransfer:
    """Start to send a tensor to the next rank of the ring, and to receive one from the previous rank."""
    received = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, group=ring.group, tag=tag, group_peer=(ring.rank + 1) % ring.ranks)
    receive = dist.P2POp(dist.irecv, received, group=ring.group, tag=tag, group_peer=(ring.rank - 1) % ring.ranks)
    began = stopwatch.mark()
    return _RingTransfer(received, dist.batch_isend_irecv([send, receive]), ring.group, began)
