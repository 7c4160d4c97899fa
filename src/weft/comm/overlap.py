"""Tensor-parallel matmuls overlapped with their collectives, chunk by chunk (MindSpeed's CoC; PyTorch's async TP).

    function               forward                                    backward
    all_gather_matmul      all-gather x: own rows first, then the     all-gather x again, overlapped with dX; reduce-scatter
                           chunks of other ranks as they arrive       dX, overlapped with dW
    matmul_reduce_scatter  rows of other ranks first, each chunk      all-gather dY: own rows first, then dX and dW of the
                           sent during the next; own rows last        rows of other ranks as they arrive
    copy_matmul            no communication                           all-reduce dX, overlapped with dW
    matmul_all_reduce      each chunk all-reduced during the next     no communication

all_gather_matmul and copy_matmul take several matrices that share one input: queries, keys and values, or gate and up.
all_gather_matmul saves only this rank's shard of the input for backward. Chunks are slices of the rows of a rank. Matmuls write
directly into slices of their result, so that rows stay in order. Sums over ranks are computed by the group, except in
matmul_reduce_scatter, which adds them up itself. The gradient of a matrix is accumulated over chunks in float32 for 16-bit
dtypes.
"""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.comm.chunks import GatherMatmul, MatmulReduce, MatmulScatter, RepeatTimer, choose_count, split_rows
from weft.comm.collectives import start_all_reduce, start_exchange, start_gather
from weft.comm.overlap_parts import (
    DeferGrad,
    GradAccumulator,
    MatricesBackward,
    fold,
    fold_full,
    join,
    multiply,
    multiply_back,
    scatter_into,
    stored,
    without,
    wrapper,
)
from weft.comm.symmetric import FusedMatmuls
from weft.errors import Refusal, raise_if_refused


class Overlap:
    """Overlap settings of a tensor-parallel group: the number of chunks, or fused matmuls.

    Args:
        group: tensor-parallel ranks.
        chunks: number of chunks of every matmul; "auto" measures each shape at its first use.
        clock: clock in seconds, for "auto".
        fused: fused matmuls that replace chunks where available; see `weft.comm.symmetric`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        chunks: int | Literal["auto"],
        clock: Callable[[], float] = time.perf_counter,
        fused: FusedMatmuls | None = None,
    ):
        self.group, self.chunks, self.clock, self.fused = group, chunks, clock, fused
        self.ranks, self.rank = group.size(), group.rank()
        self.others = [rank for rank in range(self.ranks) if rank != self.rank]
        self.counts: dict[Hashable, int] = {}
        """Chosen number of chunks, by function, direction, shapes and dtypes."""

    def split(
        self, name: str, schedule: GatherMatmul | MatmulReduce | MatmulScatter, rows: int, *tensors: Tensor
    ) -> list[slice]:
        """Split rows into chunks.

        Args:
            name: function and direction.
            schedule: schedule that runs the chunks.
            rows: number of rows to split.
            tensors: tensors whose shapes and dtypes determine the time.

        Raises:
            PlanError: there are more chunks than rows.
        """
        count = self.chunks
        if count == "auto":
            key = (name, *((tensor.shape, tensor.dtype) for tensor in tensors))
            if key not in self.counts:
                self.counts[key] = choose_count(schedule, rows, self.group, RepeatTimer(tensors[0].device, self.clock))
            count = self.counts[key]
        raise_if_refused(reason_against_chunks(count, rows))
        return split_rows(rows, count)


def reason_against_chunks(chunks: int, rows: int) -> Refusal | None:
    """Reason against more chunks than rows."""
    if chunks <= rows:
        return None
    return Refusal(
        f"{chunks} chunks of {rows} rows",
        where="plan.comm.overlap_chunks",
        rule="a chunk has at least one of the rows of a tp rank",
        fix=f'set plan.comm.overlap_chunks to at most {rows}, or to "auto"',
    )


def can_overlap(group: dist.ProcessGroup) -> bool:
    """True if collectives of the group can overlap with computation."""
    return not getattr(group, "is_blocking", False)


# The four functions


def all_gather_matmul(
    x: Tensor,
    matrices: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    overlap: Overlap,
    dim: int,
    defer: Sequence[DeferGrad | None] = (),
) -> tuple[Tensor, ...]:
    """All-gather the input along a dim and multiply it with several matrices.

    Args:
        x: shard of this rank, [*, part, *, features].
        matrices: matrices, each [outputs, features], with the dtype of `x`.
        biases: bias of each matrix, [outputs] or None.
        overlap: group and chunks.
        dim: sharded dim; not the last one.
        defer: function per matrix that queues its gradient; None (default) computes it in backward.

    Returns:
        One output [*, ranks x part, *, outputs] per matrix.

    Raises:
        PlanError: there are more chunks than rows.
    """
    defer = tuple(defer) or (None,) * len(matrices)
    return _AllGatherMatmul.apply(overlap, dim, defer, x, *matrices, *biases)


def copy_matmul(
    x: Tensor,
    matrices: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    overlap: Overlap,
    defer: Sequence[DeferGrad | None] = (),
) -> tuple[Tensor, ...]:
    """Multiply an input that is equal on all ranks with several matrices; its gradient is all-reduced.

    Arguments and errors are those of `all_gather_matmul`, without `dim`. Returns one output [*, outputs] per matrix.
    """
    if overlap.chunks != "auto":  # chunks are used in backward, but refused here
        raise_if_refused(reason_against_chunks(overlap.chunks, math.prod(x.shape[:-1])))
    defer = tuple(defer) or (None,) * len(matrices)
    return _CopyMatmul.apply(overlap, defer, x, *matrices, *biases)


def matmul_reduce_scatter(
    x: Tensor, matrix: Tensor, bias: Tensor | None, overlap: Overlap, dim: int, defer: DeferGrad | None = None
) -> Tensor:
    """Multiply with a matrix and reduce-scatter the output along a dim.

    Args:
        x: [*, ranks x part, *, features].
        matrix: [outputs, features].
        bias: [outputs] or None; the biases of all ranks are summed.
        overlap: group and chunks.
        dim: dim to scatter, a multiple of the number of ranks; not the last one.
        defer: function that queues the gradient of the matrix; None computes it in backward.

    Returns:
        [*, part, *, outputs].

    Raises:
        PlanError: there are more chunks than rows.
    """
    return _MatmulReduceScatter.apply(overlap, dim, defer, x, matrix, bias)


def matmul_all_reduce(
    x: Tensor, matrix: Tensor, bias: Tensor | None, overlap: Overlap, defer: DeferGrad | None = None
) -> Tensor:
    """Multiply with a matrix and all-reduce the output; all ranks get the same values and the same gradient.

    Arguments and errors are those of `matmul_reduce_scatter`, without `dim`. Returns [*, outputs].
    """
    return _MatmulAllReduce.apply(overlap, defer, x, matrix, bias)


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, overlap: Overlap, dim: int, defer: tuple[DeferGrad | None, ...], x: Tensor, *parameters: Any
    ) -> tuple[Tensor, ...]:
        matrices, biases = parameters[: len(defer)], parameters[len(defer) :]
        ctx.overlap, ctx.dim, ctx.defer = overlap, dim, defer
        ctx.save_for_backward(x, *matrices)
        ctx.set_materialize_grads(False)
        own = fold(x, dim)
        shape = (*x.shape[:dim], overlap.ranks * x.shape[dim], *x.shape[dim + 1 : -1])
        if overlap.fused:
            _, outs = overlap.fused.all_gather_matmul(own, [matrix.T for matrix in matrices], keep=False)
            for out, bias in zip(outs, biases, strict=True):
                if bias is not None:
                    out += bias
            return tuple(out.reshape(*shape, -1) for out in outs)
        outs = [x.new_empty(len(own), overlap.ranks, own.shape[1], len(matrix)) for matrix in matrices]

        def multiply_all(left: Tensor, *index: Any) -> None:
            for matrix, bias, out in zip(matrices, biases, outs, strict=True):
                multiply(left, matrix, bias, out[:, *index])

        def use(rows: slice, parts: Tensor) -> None:
            for rank in overlap.others:
                multiply_all(parts[rank], rank, rows)

        schedule = GatherMatmul(
            start=lambda rows: start_gather(own[:, rows], overlap.group),
            own=lambda: multiply_all(own, overlap.rank),
            use=use,
        )
        schedule.run(overlap.split("all_gather_matmul, forward", schedule, own.shape[1], own, *matrices))
        return tuple(out.view(*shape, -1) for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        overlap, group, (x, *matrices) = ctx.overlap, ctx.overlap.group, ctx.saved_tensors
        grads = MatricesBackward(gradients, matrices, ctx.defer, ctx.needs_input_grad[4:])
        own = fold(x, ctx.dim)
        outer, part, features = own.shape
        grad_outs = [grad_out.view(outer, overlap.ranks, part, -1).transpose(0, 1) for grad_out in grads.grad_outs]
        grad_x = grads.grad_outs[0].new_empty(own.shape)

        def make(rows: slice) -> Tensor:
            partial_sums = grad_x.new_empty(overlap.ranks, outer, rows.stop - rows.start, features)
            for index, (grad_out, matrix) in enumerate(zip(grad_outs, grads.matrices, strict=True)):
                multiply_back(grad_out[:, :, rows], matrix, partial_sums, add=index > 0)
            return partial_sums

        def last(parts: Tensor | None) -> None:
            if parts is not None:
                grads.compute_grads(parts.transpose(0, 1).reshape(-1, features))

        prefetch = partial(start_gather, own, group) if grads.needs_input else None
        schedule = MatmulReduce(make, *scatter_into(grad_x, group), prefetch, last)
        if ctx.needs_input_grad[3]:
            schedule.run(overlap.split("all_gather_matmul, backward", schedule, part, own, *grads.grad_outs))
        elif prefetch is not None:
            last(prefetch().wait())
        grads.queue_grads()
        return None, None, None, grads.wrap(grad_x.view(x.shape)), *grads.grad_matrices, *grads.grad_biases


class _CopyMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, overlap: Overlap, defer: tuple[DeferGrad | None, ...], x: Tensor, *parameters: Any
    ) -> tuple[Tensor, ...]:
        matrices, biases = parameters[: len(defer)], parameters[len(defer) :]
        ctx.overlap, ctx.defer = overlap, defer
        ctx.save_for_backward(x, *matrices)
        ctx.set_materialize_grads(False)
        return tuple(F.linear(x, matrix, bias) for matrix, bias in zip(matrices, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        overlap, (x, *matrices) = ctx.overlap, ctx.saved_tensors
        grads = MatricesBackward(gradients, matrices, ctx.defer, ctx.needs_input_grad[3:])
        tokens = x.flatten(0, -2)
        grad_x = grads.grad_outs[0].new_empty(tokens.shape)

        def make(rows: slice) -> Tensor:
            for index, (grad_out, matrix) in enumerate(zip(grads.grad_outs, grads.matrices, strict=True)):
                multiply_back(grad_out[rows], matrix, grad_x[rows], add=index > 0)
            return grad_x[rows]

        schedule = MatmulReduce(
            make=make,
            start=lambda rows, made: start_all_reduce(made, overlap.group),
            last=lambda _: grads.compute_grads(tokens),
        )
        if ctx.needs_input_grad[2]:
            schedule.run(overlap.split("copy_matmul, backward", schedule, len(tokens), tokens, *grads.grad_outs))
        else:
            grads.compute_grads(tokens)
        grads.queue_grads()
        return None, None, grads.wrap(grad_x.view(x.shape)), *grads.grad_matrices, *grads.grad_biases


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, overlap: Overlap, dim: int, defer: DeferGrad | None, x: Tensor, matrix: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.overlap, ctx.dim, ctx.defer = overlap, dim, defer
        ctx.save_for_backward(x, matrix)
        shape = (*x.shape[:dim], x.shape[dim] // overlap.ranks, *x.shape[dim + 1 : -1])
        if overlap.fused and bias is None:
            return overlap.fused.matmul_reduce_scatter(fold(x, dim), matrix.T).reshape(*shape, -1)
        full = fold_full(x, dim, overlap.ranks).transpose(0, 1)
        _, outer, part, _ = full.shape
        out = x.new_empty(outer, part, len(matrix))

        def make(rows: slice) -> Tensor:
            parts = out.new_empty(len(overlap.others), outer, rows.stop - rows.start, len(matrix))
            for rank, target in zip(overlap.others, parts, strict=True):
                multiply(full[rank][:, rows], matrix, bias, target)
            return parts

        def own(rows: slice, add: bool) -> None:
            own_rows, target = full[overlap.rank][:, rows], out[:, rows]
            if not add:
                multiply(own_rows, matrix, bias, target)
                return
            if bias is not None:
                target += bias
            multiply_back(own_rows, matrix.T, target, add=True)

        def store(rows: slice, received: Tensor) -> None:
            torch.sum(received, 0, out=out[:, rows])

        def add(rows: slice, received: Tensor) -> None:
            out[:, rows] += received.sum(0) if len(received) > 1 else received[0]

        schedule = MatmulScatter(make, lambda parts: start_exchange(parts, overlap.group), store, own, add)
        schedule.run(overlap.split("matmul_reduce_scatter, forward", schedule, part, full, matrix))
        return out.view(*shape, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        overlap, (x, matrix) = ctx.overlap, ctx.saved_tensors
        needs_x, needs_matrix, needs_bias = ctx.needs_input_grad[3:]
        wrap, own = wrapper(gradient), fold(stored(gradient).contiguous(), ctx.dim)
        outer, part, outputs = own.shape
        full, matrix = fold_full(x, ctx.dim, overlap.ranks).to(own.dtype), matrix.to(own.dtype)
        grad_matrix, grad_bias = GradAccumulator(), GradAccumulator()
        grad_x = own.new_empty(full.shape)
        kept = own.new_empty(outer, overlap.ranks, part, outputs) if ctx.defer else None

        def multiply_rows(grad_outs: Tensor, ranks: list[int], rows: slice) -> None:
            """Compute all gradients of rows of some ranks, given grad_outs [ranks, outer, rows, outputs]."""
            for grad_out, rank in zip(grad_outs, ranks, strict=True):
                if needs_x:
                    multiply_back(grad_out, matrix, grad_x[:, rank, rows])
                if kept is not None:
                    kept[:, rank, rows] = grad_out
            flat = grad_outs.reshape(-1, outputs)
            if needs_matrix:
                grad_matrix.add_matmul(flat, join([full[:, rank, rows] for rank in ranks]))
            if needs_bias:
                grad_bias.add(flat)

        def multiply_own() -> None:
            grad_matrix.total = grad_bias.total = None
            multiply_rows(own[None], [overlap.rank], slice(None))

        def use(rows: slice, parts: Tensor) -> None:
            multiply_rows(without(parts, overlap.rank), overlap.others, rows)

        if overlap.fused and needs_x:
            kept, (grad_x,) = overlap.fused.all_gather_matmul(own, [matrix], keep=True)
            assert kept is not None
            if needs_matrix:
                grad_matrix.add_matmul(kept.flatten(0, -2), full.flatten(0, -2))
            if needs_bias:
                grad_bias.add(kept.flatten(0, -2))
        else:
            schedule = GatherMatmul(lambda rows: start_gather(own[:, rows], overlap.group), multiply_own, use)
            schedule.run(overlap.split("matmul_reduce_scatter, backward", schedule, part, own, full))
        if kept is not None and ctx.defer:
            ctx.defer(wrap(kept.flatten(0, -2)), x.flatten(0, -2))
        sums = (wrap(grad.cast(own.dtype)) if grad.total is not None else None for grad in (grad_matrix, grad_bias))
        return None, None, None, (wrap(grad_x.reshape(x.shape)) if needs_x else None), *sums


class _MatmulAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, overlap: Overlap, defer: DeferGrad | None, x: Tensor, matrix: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.defer = defer
        ctx.save_for_backward(x, matrix)
        tokens = x.flatten(0, -2)
        out = x.new_empty(len(tokens), len(matrix))

        def make(rows: slice) -> Tensor:
            multiply(tokens[rows], matrix, bias, out[rows])
            return out[rows]

        schedule = MatmulReduce(make, lambda rows, made: start_all_reduce(made, overlap.group))
        schedule.run(overlap.split("matmul_all_reduce, forward", schedule, len(tokens), tokens, matrix))
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, matrix = ctx.saved_tensors
        grads = MatricesBackward((gradient,), (matrix,), (ctx.defer,), ctx.needs_input_grad[3:])
        grads.compute_grads(x.flatten(0, -2))
        grads.queue_grads()
        grad_x = grads.wrap((grads.grad_outs[0] @ grads.matrices[0]).view(x.shape)) if ctx.needs_input_grad[2] else None
        return None, None, grad_x, *grads.grad_matrices, *grads.grad_biases
