"""Differentiable collectives along one tensor dim, small reductions and asynchronous collectives.

The backward of each differentiable collective is the transpose of its forward; for example, the gradient of an all-gather is a
reduce-scatter. `x` is any float tensor on the group's device; gradients may be non-contiguous.

    function        forward         backward        use
    copy            identity        all-reduce      input of a tensor-parallel region
    reduce          all-reduce      identity        output of a tensor-parallel region
    gather          all-gather      reduce-scatter  input of a tensor-parallel region, from a sharded sequence
    reduce_scatter  reduce-scatter  all-gather      output of a tensor-parallel region, to a sharded sequence
    split           own part        all-gather      from the same work on all ranks to a part per rank
    unsplit         all-gather      own part        from a part per rank to the same work on all ranks
    all-to-all      all-to-all      all-to-all      exchange of rows

`start_all_to_all` is asynchronous: other work may run before its wait. Autograd runs the backward functions in reverse order,
so that the backward of that work likewise overlaps with the all-to-all of the gradient.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.backends.hierarchical import all_gather_single, reduce_scatter_single
from weft.comm.compression.rows import RowFormat, decode_rows, encode_rows
from weft.comm.stopwatch import blocking, mark, wait
from weft.device.accelerator import sends_float64
from weft.topology.mesh import group_of_all


def all_reduce(tensor: torch.Tensor, mesh: DeviceMesh, axes: tuple[str, ...], op: str = "sum") -> torch.Tensor:
    """Reduce a tensor in place over the ranks of some mesh axes; all of these ranks get the same values.

    This takes one all-reduce if the axes include every axis with more than one rank, and else one per axis.

    Args:
        tensor: any shape, the same on all ranks.
        mesh: mesh with named axes; axes of one rank are skipped.
        axes: names of the axes to reduce over.
        op: "sum" or "max".
    """
    wide = [axis for axis, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True) if size > 1]
    over = [axis for axis in axes if axis in wide]
    groups = [group_of_all(mesh)] if len(over) == len(wide) > 1 else [mesh.get_group(axis) for axis in over]
    for group in groups:
        all_reduce_group(tensor, group, op)
    return tensor


def all_reduce_group(tensor: torch.Tensor, group: dist.ProcessGroup | None, op: str = "sum") -> torch.Tensor:
    """Reduce a tensor in place over the ranks of a group; all of these ranks get the same values.

    On a device whose collectives do not send float64, float64 values are gathered as pairs of int32 and reduced on each rank,
    in rank order: the same precision, for the small tensors that are float64 there.

    Args:
        tensor: any shape, the same on all ranks.
        group: group of ranks; None for all ranks.
        op: "sum" or "max".
    """
    if tensor.dtype == torch.float64 and not sends_float64(tensor.device.type):
        ranks = dist.get_world_size(group)
        bits = tensor.detach().reshape(1, -1).view(torch.int32)
        gathered = bits.new_empty(ranks, bits.shape[1])
        with blocking(group):
            all_gather_single(gathered, bits, group)
        values = gathered.view(torch.float64)
        tensor.copy_((values.sum(0) if op == "sum" else values.amax(0)).view_as(tensor))
    else:
        with blocking(group):
            dist.all_reduce(tensor, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op], group)
    return tensor


def all_gather_rows(row: torch.Tensor, world_size: int) -> torch.Tensor:
    """Gather the rows of all ranks in rank order, [world_size, *row.shape]."""
    gathered = [torch.empty_like(row) for _ in range(world_size)]
    dist.all_gather(gathered, row)
    return torch.stack(gathered)


def gather_dim(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """All-gather along a dim, in rank order. Not differentiable."""
    ranks = group.size()
    parts = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    with blocking(group):
        all_gather_single(parts, x.contiguous(), group)
    dim = dim % x.ndim
    return (
        parts.unflatten(0, (ranks, -1))
        .movedim(0, dim)
        .reshape(*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])
    )


def reduce_scatter_dim(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Reduce-scatter along a dim. Not differentiable."""
    ranks, dim = group.size(), dim % x.ndim
    parts = x.unflatten(dim, (ranks, -1)).movedim(dim, 0).contiguous()
    own = torch.empty_like(parts[0])
    with blocking(group):
        reduce_scatter_single(own, parts.flatten(0, 1), group=group)
    return own


def part_of_dim(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Slice of this rank along a dim. Not differentiable."""
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


AlongDim = Callable[[torch.Tensor, dist.ProcessGroup, int], torch.Tensor]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.like = group, [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Sum gradients over ranks; a tensor that no rank has used gets no gradient, as without the copy."""
        found = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(gradients, ctx.like, strict=True)
        ]
        flat = torch.cat([gradient.flatten() for gradient in found])
        with blocking(ctx.group):
            dist.all_reduce(flat, group=ctx.group)
        pieces = flat.split([gradient.numel() for gradient in found])
        sums: list[Any] = [piece.view_as(g).to(g.dtype) for piece, g in zip(pieces, found, strict=True)]
        is_fake = dist.get_backend(ctx.group) == "fake"
        unused = [g is None and (is_fake or not bool(total.any())) for g, total in zip(gradients, sums, strict=True)]
        return None, *(None if none else total for none, total in zip(unused, sums, strict=True))


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        with blocking(group):
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _AlongDim(torch.autograd.Function):
    """Change of layout along a dim; the backward is the transposed change."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int, change: AlongDim, transpose: AlongDim
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.transpose = group, dim, transpose
        return change(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.transpose(gradient, ctx.group, ctx.dim), None, None, None, None


def _no_op() -> None: ...


class AsyncAllToAll:
    """Asynchronous all-to-all of rows; in backward, the all-to-all of the gradient."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        output_splits: list[int] | None,
        input_splits: list[int] | None,
        begin: Callable[[], Callable[[], object]] = lambda: _no_op,
        waits_in_backward: bool = True,
        forward_format: RowFormat | None = None,
        backward_format: RowFormat | None = None,
    ):
        """
        Args:
            group, output_splits, input_splits, begin, forward_format, backward_format: see `start_all_to_all`.
            waits_in_backward: False if the caller calls `wait` in backward, before it uses the gradient.
        """
        self.group, self.output_splits, self.input_splits = group, output_splits, input_splits
        self.begin, self.waits_in_backward = begin, waits_in_backward
        self.forward_format, self.backward_format = forward_format, backward_format
        self.before_wait: Callable[[], object] = _no_op
        self.input: torch.Tensor | None = None
        """Input of the all-to-all in flight; kept alive until completion."""
        self.work: dist.Work | None = None
        self.began: Any = None
        self.decode = _no_op

    def start_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Start the all-to-all of rows and return its output, which is valid after `wait`."""
        return self.start(x, self.output_splits, self.input_splits, self.forward_format)

    def start_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Start the all-to-all of the gradient of the output and return its output, which is valid after `wait`."""
        return self.start(gradient, self.input_splits, self.output_splits, self.backward_format)

    def start(
        self,
        x: torch.Tensor,
        output_splits: list[int] | None,
        input_splits: list[int] | None,
        row_format: RowFormat | None,
    ) -> torch.Tensor:
        """Start an all-to-all and return its output, which is valid after `wait`."""
        out = x.new_empty((sum(output_splits) if output_splits is not None else len(x), *x.shape[1:]))
        received, self.decode = out, _no_op
        if row_format is None:
            self.input = x.contiguous()
        else:
            self.input = encode_rows(x, row_format)
            received = self.input.new_empty(len(out), self.input.shape[1])
            self.decode = partial(decode_rows, received, out, row_format)
        self.began = mark()
        self.work = dist.all_to_all_single(received, self.input, output_splits, input_splits, self.group, async_op=True)
        self.before_wait = self.begin()
        return out

    def send(self, x: torch.Tensor) -> "Wait":
        """Start the all-to-all, differentiably; returns a function that waits for it and returns its output."""
        outputs = list[torch.Tensor]()
        started = _Start.apply(x, self, outputs)
        return lambda: _Wait.apply(started, self, outputs)

    def wait(self) -> None:
        """Wait for the all-to-all in flight, if any."""
        if self.work is not None:
            self.before_wait()
            wait(self.work, self.group, self.began)
            self.decode()
        self.input, self.work, self.began, self.decode = None, None, None, _no_op


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, collective: AsyncAllToAll, outputs: list[torch.Tensor]) -> torch.Tensor:
        ctx.collective = collective
        outputs.append(collective.start_forward(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.collective.waits_in_backward:
            ctx.collective.wait()
        return gradient, None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, started: torch.Tensor, collective: AsyncAllToAll, outputs: list[torch.Tensor]
    ) -> torch.Tensor:
        ctx.collective = collective
        collective.wait()
        return outputs.pop()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.collective.start_backward(gradient), None, None


def exchange(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    output_splits: list[int] | None = None,
    input_splits: list[int] | None = None,
) -> torch.Tensor:
    """All-to-all of rows (dim 0). Not differentiable; arguments as for `start_all_to_all`."""
    out = x.new_empty((sum(output_splits) if output_splits is not None else len(x), *x.shape[1:]))
    with blocking(group):
        dist.all_to_all_single(out, x.contiguous(), output_splits, input_splits, group)
    return out


def copy(group: dist.ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Identity in forward; in backward, one all-reduce of the gradients of all tensors."""
    return _Copy.apply(group, *tensors)


def reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduce in forward, identity in backward: all ranks continue with the same values and the same gradient."""
    return _Reduce.apply(x, group)


def gather(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """All-gather along a dim; the ranks continue with different work, so that backward sums their gradients."""
    return _AlongDim.apply(x, group, dim, gather_dim, reduce_scatter_dim)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Reduce-scatter along a dim whose size is a multiple of the number of ranks."""
    return _AlongDim.apply(x, group, dim, reduce_scatter_dim, gather_dim)


def split(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Slice of this rank, along a dim whose size is a multiple of the number of ranks, of a tensor equal on all ranks."""
    return _AlongDim.apply(x, group, dim, part_of_dim, gather_dim)


def unsplit(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """All-gather along a dim; all ranks continue with the same work, so that each keeps its part of the gradient."""
    return _AlongDim.apply(x, group, dim, gather_dim, part_of_dim)


Wait = Callable[[], torch.Tensor]


def start_all_to_all(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    output_splits: list[int] | None = None,
    input_splits: list[int] | None = None,
    begin: Callable[[], Callable[[], object]] = lambda: _no_op,
    forward_format: RowFormat | None = None,
    backward_format: RowFormat | None = None,
) -> Wait:
    """Start an all-to-all of rows (dim 0) and return a function that waits for it and returns its output. Differentiable.

    The function is called once. All ranks wait for their collectives in the same order.

    Args:
        x: rows for all ranks, in rank order.
        group: group of the ranks.
        output_splits: number of rows from each rank; None: equal numbers.
        input_splits: number of rows to each rank; None: equal numbers.
        begin: called at each start, in forward and in backward; returns a function that is called before the wait.
        forward_format: format in which rows, [R, H], are sent; None: their dtype. Backward ignores the rounding
            (straight-through gradient; Bengio et al., 2013).
        backward_format: format in which gradients of the output are sent; None: their dtype.
    """
    collective = AsyncAllToAll(
        group,
        output_splits,
        input_splits,
        begin,
        forward_format=forward_format,
        backward_format=backward_format,
    )
    return collective.send(x)


# Asynchronous collectives that overlap with computation. Not differentiable; see `weft.comm.overlap`.


class Pending(NamedTuple):
    """Collective in flight."""

    work: dist.Work
    result: torch.Tensor
    input: torch.Tensor
    """Input; keep alive until completion."""
    group: dist.ProcessGroup
    began: Any
    """Event before its issue, see `mark`."""

    def wait(self) -> torch.Tensor:
        """Wait for the collective and return its result."""
        wait(self.work, self.group, self.began)
        return self.result


def start_gather(x: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Start an all-gather, [ranks, *x.shape]."""
    input = x.contiguous()
    result, began = x.new_empty((group.size(), *x.shape)), mark()
    work = all_gather_single(result.flatten(0, 1), input, group, async_op=True)
    return Pending(work, result, input, group, began)


def start_reduce_scatter(parts: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Start a reduce-scatter of contiguous parts, [ranks, *out.shape], into `out`."""
    began = mark()
    work = reduce_scatter_single(out, parts.flatten(0, 1), group=group, async_op=True)
    return Pending(work, out, parts, group, began)


def start_exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Start an all-to-all with the other ranks; input and result are contiguous [ranks - 1, *], in rank order."""
    result, splits = torch.empty_like(parts), [int(rank != group.rank()) for rank in range(group.size())]
    began = mark()
    work = dist.all_to_all_single(result, parts, splits, splits, group, async_op=True)
    return Pending(work, result, parts, group, began)


def start_all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Start an in-place all-reduce of a contiguous tensor."""
    began = mark()
    return Pending(dist.all_reduce(x, group=group, async_op=True), x, x, group, began)
