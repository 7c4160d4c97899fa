"""Context parallelism: attention over sequences that are split over the ranks of `cp`, as Ulysses x ring on any grid.

cp = ulysses x ring, and ranks of one Ulysses group are neighbours: cp rank = ring rank * ulysses + Ulysses rank. The sequence
is cut into 2 x ring chunks, and ring rank r holds chunks r and 2 ring - 1 - r, so that all have equal causal work (zigzag;
Brandon et al., Striped Attention, 2023, for the problem). Such a part is cut once more over its Ulysses ranks. Attention then
goes in three moves:

    all-to-all      a part of the sequence with all heads -> all tokens of the ring part, a share of the heads
                    (Jacobs et al., DeepSpeed Ulysses, 2023)
    ring            queries stay, keys and values travel; partial results merge by their softmax denominators
                    (Liu et al., Ring Attention, 2023)
    all-to-all      back

Token i sees key j if both are of one document and 0 <= i - j < window. The visible pairs of two chunks are cut into blocks
that need no mask wherever that is possible, and what nobody sees is not computed.
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
    merge_part,
    primitive,
    read_sights,
    visible_blocks,
    wide,
)
from weft.compute.dropout import dropout_keep
from weft.errors import ModelError, PlanError
from weft.topology.mesh import context_rank, ranks_along

PLAIN_BLOCK = 2048  # tokens on a side of a block where the matrix of scores is really made
# Arguments of attention functions in Transformers 5.17 to 5.23 that change the result and are not known here.
UNKNOWN_ARGUMENTS = ("position_bias", "indices", "block_indices", "sinks")


@dataclass(frozen=True)
class ContextParallel:
    """How one rank takes part in context parallelism."""

    ulysses_group: dist.ProcessGroup | None
    """Ranks that trade heads for tokens, in the order of cp ranks; None if ulysses is 1."""
    ring_group: dist.ProcessGroup | None
    """Ranks among which keys and values travel, in the order of cp ranks; None if ring is 1."""
    ulysses: int
    ring: int
    rank: int
    """Of cp."""
    tile: int = 512
    """Tokens on a side up to which a block may be computed under a mask instead of being cut further."""
    ulysses_chunks: int = 1
    """Groups in which the heads of a rank travel, at most: as many as divide those of its keys and values."""

    @property
    def ulysses_rank(self) -> int:
        return self.rank % self.ulysses

    @property
    def ring_rank(self) -> int:
        return self.rank // self.ulysses


def sequence_parts(ulysses: int, ring: int) -> int:
    """Number of parts that a sequence is cut into: its length is a multiple of it."""
    return 2 * ring * ulysses if ring > 1 else ulysses


def check_sequence(seq_len: int, ulysses: int, ring: int) -> None:
    """Raises PlanError unless a sequence can be split over the grid."""
    parts = sequence_parts(ulysses, ring)
    if seq_len % parts:
        raise PlanError(
            f"a sequence of {seq_len} tokens cannot be split for ulysses {ulysses} x ring {ring}",
            where="parallel.cp",
            rule=f"seq_len is a multiple of {parts}: of ulysses, or of 2 x ring x ulysses if ring is larger than 1",
            fix=f"pad rows to {seq_len + -seq_len % parts} tokens (data.seq_len of a job, or pad_to_multiple_of={parts} of a "
            "collator), or use fewer ranks of cp",
        )


def check_heads(heads: int, kv_heads: int, ulysses: int) -> None:
    """Raises PlanError unless heads can be split over the ranks of Ulysses."""
    if heads % kv_heads or heads % ulysses:
        fewer = f"set plan.parallel.cp_ulysses to {math.gcd(heads, ulysses)}, for a longer ring"
        raise PlanError(
            f"{heads} query heads with {kv_heads} heads of keys and values cannot be split over ulysses {ulysses}",
            where="plan.parallel.cp, plan.parallel.cp_ulysses",
            rule="ulysses, and the heads of keys and values, divide the query heads that a rank has after tensor parallelism",
            fix="set plan.parallel.cp to 1" if heads % kv_heads else fewer,
        )


def ring_chunks(seq_len: int, ring: int, rank: int) -> tuple[range, ...]:
    """The natural positions of the tokens that a ring rank holds, as one range or two."""
    if ring == 1:
        return (range(seq_len),)
    size = seq_len // (2 * ring)
    return tuple(range(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * ring - 1 - rank))


def zigzag_indices(seq_len: int, ranks: int, rank: int) -> Tensor:
    """The natural positions of the tokens that a rank of a ring holds, int64 [seq_len / ranks]."""
    return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in ring_chunks(seq_len, ranks, rank)])


def natural_positions(seq_len: int, ulysses: int, ring: int, rank: int) -> Tensor:
    """The natural positions of the tokens that a cp rank holds, int64 [seq_len / (ulysses * ring)].

    Raises:
        PlanError: the sequence cannot be split over this grid.
    """
    check_sequence(seq_len, ulysses, ring)
    return zigzag_indices(seq_len, ring, rank // ulysses).chunk(ulysses)[rank % ulysses]


def own_positions(seq_len: int, mesh: DeviceMesh) -> Tensor:
    """The natural positions of this rank's tokens, int64 [seq_len / cp]; see `natural_positions`."""
    return natural_positions(seq_len, ranks_along(mesh, "cp_ulysses"), ranks_along(mesh, "cp_ring"), context_rank(mesh))


# Attention over a ring


@dataclass(frozen=True)
class _Ring:
    """All that is not a tensor: who takes part, and what this rank computes at each step."""

    group: dist.ProcessGroup | None
    ranks: int
    rank: int
    chunks: list[tuple[range, ...]]
    """Of each ring rank."""
    steps: list[list[AttentionBlock]]
    primitive: Primitive
    scale: float
    softcap: float | None
    dropout: float
    seed: int
    first_head: int
    row_numbers: Tensor

    def query_place(self, block: AttentionBlock) -> tuple[slice, slice, slice]:
        return block.rows, slice(None), _local(block.queries, self.chunks[self.rank])

    def key_place(self, block: AttentionBlock, step: int) -> tuple[slice, slice, slice]:
        """Where a block's keys are in the part that is here at a step."""
        return block.rows, slice(None), _local(block.keys, self.chunks[(self.rank - step) % self.ranks])

    def arguments(self, block: AttentionBlock, q: Tensor) -> dict[str, Any]:
        """What the primitive is told about a block, for the local queries of all rows."""
        arguments: dict[str, Any] = {"bias": None, "causal": block.form == "causal", "scale": self.scale}
        if block.form == "masked":
            hidden = ~block.sight.mask(block.queries, block.keys)
            bias = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -math.inf)
            arguments["bias"] = bias.to(q.device, non_blocking=True)[None, None]
        if self.softcap is not None:
            arguments["softcap"] = self.softcap
        if self.dropout > 0:
            arange = partial(torch.arange, device=q.device)
            rows, heads = self.row_numbers[block.rows], arange(self.first_head, self.first_head + q.shape[1])
            queries, keys = (arange(tokens.start, tokens.stop) for tokens in (block.queries, block.keys))
            arguments["keep"] = dropout_keep(self.seed, rows, heads, queries, keys, rate=self.dropout)
        return arguments


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: _Ring) -> Tensor:
        own = kv = torch.cat([k, v], -1)
        key_size, value_size = k.shape[-1], v.shape[-1]
        out = q.new_empty((*q.shape[:-1], value_size), dtype=wide(q.dtype))
        lse = q.new_empty(q.shape[:-1], dtype=wide(q.dtype))
        for step, blocks in enumerate(ring.steps):
            last = step == ring.ranks - 1
            if not last:
                following = _send_on(kv, ring, tag=0)
            keys, values = kv.split([key_size, value_size], -1)
            for block in blocks:
                here, there = ring.query_place(block), ring.key_place(block, step)
                part, part_lse = ring.primitive.forward(q[here], keys[there], values[there], **ring.arguments(block, q))
                if block.queries == block.keys:  # the first of its queries
                    out[here], lse[here] = part, part_lse
                else:
                    merge_part(out[here], lse[here], part, part_lse)
            if not last:
                kv = following.wait()
        if sinks is not None:  # one more key for every query, with a value of zero
            sink = sinks.to(lse.dtype)[None, :, None].expand_as(lse)
            merge_part(out, lse, torch.zeros((), dtype=out.dtype, device=out.device), sink)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, out, lse, sinks)
        ctx.ring, ctx.sizes = ring, (key_size, value_size)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, kv, out, lse, sinks = ctx.saved_tensors
        ring: _Ring = ctx.ring
        dq = torch.zeros_like(q, dtype=wide(q.dtype))
        sums: _Transfer | None = None
        for step, blocks in enumerate(ring.steps):
            last = step == ring.ranks - 1
            if not last:
                following = _send_on(kv, ring, tag=0)
            keys, values = kv.split(ctx.sizes, -1)
            dkv = torch.zeros_like(kv, dtype=wide(kv.dtype))
            dk, dv = dkv.split(ctx.sizes, -1)
            for block in blocks:
                here, there = ring.query_place(block), ring.key_place(block, step)
                block_dq, block_dk, block_dv = ring.primitive.backward(
                    grad[here], q[here], keys[there], values[there], out[here], lse[here], **ring.arguments(block, q)
                )
                dq[here] += block_dq
                dk[there] += block_dk
                dv[there] += block_dv
            if sums is not None:  # what earlier ranks found for these keys comes behind them
                dkv += sums.wait()
            if ring.ranks > 1:
                sums = _send_on(dkv, ring, tag=1)
            if not last:
                kv = following.wait()
        if sums is not None:  # the last hop went home
            dkv = sums.wait()
        dk, dv = dkv.to(kv.dtype).split(ctx.sizes, -1)
        dsinks = None
        if sinks is not None:
            share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)  # of the sink in each softmax
            dsinks = -(share * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), dk, dv, dsinks, None


def _local(tokens: range, chunks: tuple[range, ...]) -> slice:
    """Where tokens of one chunk stand in a rank's part."""
    offset = 0
    for chunk in chunks:
        if tokens.start in chunk:
            break
        offset += len(chunk)
    return slice(offset + tokens.start - chunk.start, offset + tokens.stop - chunk.start)


class _Transfer(NamedTuple):
    """A tensor on its way from the rank before."""

    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def _send_on(x: Tensor, ring: _Ring, tag: int) -> _Transfer:
    """Start to send a tensor to the next rank, and to take the one of the rank before."""
    received = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, group=ring.group, tag=tag, group_peer=(ring.rank + 1) % ring.ranks)
    take = dist.P2POp(dist.irecv, received, group=ring.group, tag=tag, group_peer=(ring.rank - 1) % ring.ranks)
    return _Transfer(received, dist.batch_isend_irecv([send, take]))


# Heads for tokens, and back


def _trade_tokens(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Callable[[], list[Tensor]]:
    """[ranks, B, H / ranks, S, *] -> [B, H / ranks, S * ranks, *]: all tokens of the group for a share of the heads, in one
    message, which is awaited by the call of what is returned."""
    wait = start_all_to_all(torch.cat([x.flatten(1) for x in tensors], 1), group)

    def take() -> list[Tensor]:
        pieces = wait().split([x[0].numel() for x in tensors], 1)
        return [piece.view(x.shape).movedim(0, 2).flatten(2, 3) for piece, x in zip(pieces, tensors, strict=True)]

    return take


def _trade_heads(x: Tensor, group: dist.ProcessGroup, ranks: int) -> Callable[[], Tensor]:
    """[B, H, S, D] -> [B, ranks, H, S / ranks, D], the way back."""
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
    """Causal attention of this rank's tokens over the whole sequence, with gradients.

    Args:
        q: [B, Hq, S / cp, D], the tokens of `natural_positions`, in that order.
        k: [B, Hkv, S / cp, D]; Hq is a multiple of Hkv.
        v: [B, Hkv, S / cp, Dv].
        documents: integers [B, S], the document of every token of the whole rows in natural order, the same on all ranks;
            None if every row is one document. A document is a run of equal numbers. It is read on the host: on an
            accelerator, keep it in host memory, or every call waits for the device.
        context: who takes part.
        scale: factor on the scores.
        window: keys that a token sees at most, itself included; all by default.
        softcap: cap of the scores as in Gemma 2; computed without the fast operators.
        sinks: [Hq], one more score per head in the denominator of the softmax (GPT-OSS). Its gradient is this rank's part:
            the sum over the ranks of cp is the gradient.
        dropout: share of the probabilities to drop; computed without the fast operators.
        seed: of the dropout, another one for each layer and step. With one seed on all ranks, every grid drops the same.
        rows: int64 [B], numbers of the rows that tell the dropout them apart; by default 0, 1, ...
        first_head: number of the first query head here, where tensor parallelism has split them.

    Returns:
        [B, Hq, S / cp, Dv]

    Raises:
        PlanError: the sequence or the heads cannot be split over the grid, or `documents` has another shape.
    """
    heads, kv_heads, seq_len = q.shape[1], k.shape[1], q.shape[2] * context.ulysses * context.ring
    check_sequence(seq_len, context.ulysses, context.ring)
    check_heads(heads, kv_heads, context.ulysses)
    if documents is not None:
        if documents.shape != (len(q), seq_len):
            raise PlanError(
                f"documents of shape {tuple(documents.shape)} for {len(q)} rows of {seq_len} tokens",
                where="context parallelism",
                rule="documents name every token of the whole rows, on all ranks of cp",
                fix="give the rows' documents before they are split",
            )
        documents = documents.cpu()
    rows = torch.arange(len(q), device=q.device) if rows is None else rows
    plain = softcap is not None or dropout > 0 or primitive(q.device.type) is PLAIN
    chunks = [ring_chunks(seq_len, context.ring, rank) for rank in range(context.ring)]
    mine, largest = chunks[context.ring_rank], PLAIN_BLOCK if plain else None
    steps = [
        [
            block
            for rows, sight in read_sights(documents, window)
            for block in visible_blocks(rows, sight, mine, chunks[context.ring_rank - step], context.tile, largest)
        ]
        for step in range(context.ring)
    ]
    ring = _Ring(
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
    return _attend_in_groups(q, k, v, sinks, ring, context, context.ulysses_group)


def _attend_in_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ring: _Ring,
    context: ContextParallel,
    group: dist.ProcessGroup,
) -> Tensor:
    """Ulysses around the ring, some heads at a time: those of a group travel while those before them are attended to."""
    ranks, heads, kv_heads = context.ulysses, q.shape[1], k.shape[1]
    repeats = math.lcm(kv_heads, ranks) // kv_heads  # until every rank can have whole heads
    k, v = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (k, v))
    groups = math.gcd(context.ulysses_chunks, k.shape[1] // ranks)
    # [groups, ranks, B, heads of a rank in a group, S / cp, D]
    parts = [x.unflatten(1, (ranks, groups, -1)).movedim((1, 2), (1, 0)) for x in (q, k, v)]
    coming = [_trade_tokens(tensors, group) for tensors in zip(*parts, strict=True)]
    size, going = heads // ranks // groups, []
    for number, take in enumerate(coming):
        first = context.ulysses_rank * size * groups + number * size
        own_sinks = None if sinks is None else sinks[first : first + size]
        out = _RingAttention.apply(*take(), own_sinks, replace(ring, first_head=ring.first_head + first))
        going.append(_trade_heads(out, group, ranks))
    return torch.cat([wait() for wait in going], 2).flatten(1, 2)


def context_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`attend` as an attention function of Transformers' AttentionInterface, whose name it is registered under by the caller.

    Args:
        module: an attention module, with a `ContextParallel` as `module.context`.
        query, key, value: this rank's tokens, [B, H, S / cp, D].
        attention_mask: no mask, but the documents of the whole rows: integers [B, 1, 1, S], best in host memory, or None.
            Transformers passes masks of four dims on as they are.
        scaling: factor on the scores; 1 / sqrt(D) by default.
        dropout: by the place that `weft.parallel.dropout` set on the module; without one, by the place in this batch and a
            seed from torch's default generator of the host.
        kwargs: `sliding_window`, `softcap` and `s_aux` (sinks) are honoured; see `refuse_unknown_attention` for others.

    Returns:
        [B, S / cp, Hq, Dv], and None for the probabilities, which are never all in one place.

    Raises:
        ModelError: the model attends in a way that this function does not know.
        PlanError: see `attend`.
    """
    refuse_unknown_attention(module, kwargs)
    drop: dict[str, Any] = {}
    if dropout > 0:
        place = getattr(module, "place", None)
        drop = place.of_attention(module) if place else {"seed": int(torch.randint(2**31, (), device="cpu"))}
    out = attend(
        query,
        key,
        value,
        None if attention_mask is None else attention_mask[:, 0, 0],
        module.context,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window") or None,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        dropout=dropout,
        **drop,
    )
    return out.transpose(1, 2).contiguous(), None


def refuse_unknown_attention(module: Any, kwargs: dict[str, Any]) -> None:
    """Raises ModelError if what a family passes to its attention function, or keeps in its mask alone, would be lost."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    causal = kwargs.get("is_causal")
    layer_types = getattr(config, "layer_types", None)
    kind = layer_types[layer] if layer_types and layer is not None else None
    window_is_lost = not kwargs.get("sliding_window") and (
        kind == "sliding_attention" or ("sliding_window" not in kwargs and kind is None and _has_window(config))
    )
    problems = {
        "attention that is not causal": not (getattr(module, "is_causal", True) if causal is None else causal),
        "a sliding window that only its mask knows": window_is_lost,
        f"{kind} layers": kind not in (None, "full_attention", "sliding_attention"),
        **{f"the argument {name}": kwargs.get(name) is not None for name in UNKNOWN_ARGUMENTS},
        "probabilities as an output": bool(kwargs.get("output_attentions")),
    }
    found = [name for name, is_there in problems.items() if is_there]
    if found:
        raise ModelError(
            f"{type(module).__name__} uses {' and '.join(found)}",
            where="context parallelism",
            rule="attention over a split sequence knows causality, documents, sliding windows, caps and sinks",
            fix="run this model with cp = 1",
        )


def _has_window(config: Any) -> bool:
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)
