"""Ring attention: queries stay, keys and values are sent around (Liu et al., Ring Attention, 2023).

Each step is one call of a kernel for packed sequences, or a few with windows. Partial results are merged by log-sum-exp, and
backward passes the merged result to the kernel (`weft.compute.sequences`). One rank is a ring without messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.comm import stopwatch
from weft.compute.attention import accumulation_dtype, merge_attention
from weft.compute.sequences import TokenDropout, VarlenKernel
from weft.parallel.sequence.attention_plan import Call, Steps
from weft.parallel.sequence.context_grid import zigzag_indices


@dataclass(frozen=True)
class RingConfig:
    """Non-tensor arguments of ring attention: the group, the calls of each step, and the kernel."""

    group: dist.ProcessGroup | None
    ranks: int
    rank: int
    seq_len: int
    """Tokens of a full row."""
    steps: Steps
    kernel: VarlenKernel
    scale: float
    softcap: float | None
    dropout: float
    seed: int
    first_head: int
    row_ids: Tensor

    def options(self, call: Call, step: int, q: Tensor) -> tuple[float | None, TokenDropout | None]:
        """Softcap and dropout of a call, given all queries of this rank."""
        if self.dropout == 0:
            return self.softcap, None
        holders = self.rank, (self.rank - step) % self.ranks
        queries, keys = (zigzag_indices(self.seq_len, self.ranks, rank, q.device) for rank in holders)
        rows, tokens = len(self.row_ids), (call.queries, call.queries, call.keys)
        of_tokens = self.row_ids.repeat_interleave(len(queries)), queries.repeat(rows), keys.repeat(rows)
        taken = (take(x, slices) for x, slices in zip(of_tokens, tokens, strict=True))
        heads = torch.arange(self.first_head, self.first_head + q.shape[1], device=q.device)
        return self.softcap, TokenDropout(self.dropout, self.seed, heads, *taken)


class RingAttention(torch.autograd.Function):
    """Attention of the tokens of a ring rank, with the tensors of `weft.compute.sequences`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: RingConfig) -> Tensor:
        keys, values, kv = k, v, _join(k, v, ring)
        merged: tuple[Tensor, Tensor] | None = None
        for step in range(ring.ranks):
            transfer = _send_recv(kv, ring, tag=0) if step < ring.ranks - 1 else None
            merged = attend_step(ring, step, q, keys, values, merged)
            if transfer is not None:
                kv = transfer.wait()
                keys, values = kv.split([k.shape[-1], v.shape[-1]], -1)
        assert merged is not None
        out, lse = merged
        if sinks is not None:  # an attention sink is one more key for every query, with value zero
            sink = sinks.to(lse.dtype)[:, None].expand_as(lse)
            out, lse = _merge(out, lse, None, out.new_zeros(()).expand_as(out), sink)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        ring: RingConfig = ctx.ring
        keys, values, kv = k, v, _join(k, v, ring)
        dq = dk = dv = None
        gradients: _RingTransfer | None = None
        for step in range(ring.ranks):
            transfer = _send_recv(kv, ring, tag=0) if step < ring.ranks - 1 else None
            dq, dk, dv = attend_step_backward(ring, step, grad, q, keys, values, out, lse, dq)
            if ring.ranks > 1:
                dtype = accumulation_dtype(k.dtype)
                pairs = ((dk, k), (dv, v))
                dkv = torch.cat([x.new_zeros(x.shape, dtype=dtype) if d is None else d.to(dtype) for d, x in pairs], -1)
                if gradients is not None:  # of these keys, by the ranks that held them before
                    dkv += gradients.wait()
                gradients = _send_recv(dkv, ring, tag=1)
            if transfer is not None:
                kv = transfer.wait()
                keys, values = kv.split([k.shape[-1], v.shape[-1]], -1)
        if gradients is not None:  # the last transfer returned the gradients to the rank of their keys
            dk, dv = gradients.wait().split([k.shape[-1], v.shape[-1]], -1)
        assert dq is not None
        assert dk is not None
        assert dv is not None
        dsinks = None
        if sinks is not None:
            share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)  # probability of the sink in each softmax
            dsinks = -(share * (grad.to(lse.dtype) * out).sum(-1).T).sum(1).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None


def attend_step(
    ring: RingConfig, step: int, q: Tensor, keys: Tensor, values: Tensor, merged: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor] | None:
    """Merge the attention over the keys of a step into the result of the steps before it.

    Args:
        ring: the plan and the kernel; no message is sent.
        step: number of the step, from 0.
        q: queries of this rank.
        keys: keys that this rank holds in this step.
        values: values that this rank holds in this step.
        merged: out and lse of the steps before; None in the first step.
    """
    for call in ring.steps[step]:
        part = ring.kernel.forward(
            take(q, call.queries),
            take(keys, call.keys),
            take(values, call.keys),
            call.sequences,
            ring.scale,
            *ring.options(call, step, q),
        )
        merged = part if merged is None else _merge(*merged, call.queries, *part)
    return merged


def attend_step_backward(
    ring: RingConfig,
    step: int,
    grad: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Sum of the gradients of the queries so far, and gradients of the keys and values of a step; None for zero.

    Args:
        ring: see `attend_step`.
        step: see `attend_step`.
        grad: gradient of the output.
        q: queries of this rank.
        keys: keys that this rank holds in this step.
        values: values that this rank holds in this step.
        out: output of all steps.
        lse: log-sum-exp of all steps.
        dq: gradient of the queries in the steps before.
    """
    dk = dv = None
    for call in ring.steps[step]:
        of_queries = [take(x, call.queries) for x in (grad, q)]
        of_keys = [take(x, call.keys) for x in (keys, values)]
        results = take(out, call.queries), take(lse, call.queries, 1)
        options = ring.options(call, step, q)
        parts = ring.kernel.backward(*of_queries, *of_keys, *results, call.sequences, ring.scale, *options)
        dq = _add(dq, q, call.queries, parts[0])
        dk = _add(dk, keys, call.keys, parts[1])
        dv = _add(dv, values, call.keys, parts[2])
    return dq, dk, dv


def take(x: Tensor, tokens: tuple[slice, ...] | None, dim: int = 0) -> Tensor:
    """Tokens of a tensor; a view if they are all tokens or one slice."""
    if tokens is None:
        return x
    parts = [x.narrow(dim, own.start, own.stop - own.start) for own in tokens]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _slices(tokens: tuple[slice, ...] | None, count: int) -> Sequence[slice]:
    return (slice(0, count),) if tokens is None else tokens


def _merge(
    out: Tensor, lse: Tensor, tokens: tuple[slice, ...] | None, part: Tensor, part_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention of some queries over further keys into a result, which is then in the accumulation dtype."""
    out, start = out.to(accumulation_dtype(out.dtype)), 0
    for own in _slices(tokens, len(out)):
        stop = start + own.stop - own.start
        merge_attention(
            out[own].transpose(0, 1), lse[:, own], part[start:stop].transpose(0, 1), part_lse[:, start:stop]
        )
        start = stop
    return out, lse


def _add(total: Tensor | None, like: Tensor, tokens: tuple[slice, ...] | None, part: Tensor) -> Tensor:
    """Add the gradient of some tokens to a sum in the accumulation dtype; a gradient of all tokens alone stays as it is."""
    if total is None and tokens is None:
        return part
    dtype, start = accumulation_dtype(like.dtype), 0
    total = like.new_zeros(like.shape, dtype=dtype) if total is None else total.to(dtype)
    for own in _slices(tokens, len(like)):
        stop = start + own.stop - own.start
        total[own] += part[start:stop]
        start = stop
    return total


def _join(k: Tensor, v: Tensor, ring: RingConfig) -> Tensor:
    """Keys and values in one message; empty without a ring."""
    return torch.cat([k, v], -1) if ring.ranks > 1 else k.new_empty(0)


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
