"""Tensor-parallel products whose communication is hidden behind them, chunk by chunk (MindSpeed's CoC; PyTorch's async TP).

    form                                 forward                                    backward
    gathered(x) @ matrices, a fan        gather x: own rows first, then chunks      gather x again, behind dX; dX is
                                         of other ranks' rows as they come          reduce-scattered behind dW
    reduce_scatter(x @ matrix)           rows of other ranks first, each chunk      gather dY: own rows first, dX and dW of
                                         sent behind the next; own rows last        other ranks' rows as they come
    x @ matrices, a fan, x on all ranks  nothing to send                            dX is all-reduced behind dW
    all_reduce(x @ matrix)               each chunk is reduced behind the next      nothing to send

A fan is several matrices that share one input: queries, keys and values; gate and up. The first form keeps this rank's part of
the input alone. Chunks are cut along the rows that a rank has; products go straight into slices of their result, so that rows
stay in order. Sums over ranks are the group's own, but those of the second form; the gradient of a matrix adds up in float32
over chunks of shorter formats.
"""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.comm.chunks import GatherMatmul, MatmulReduce, MatmulScatter, RepeatTimer, choose_count, cut_rows
from weft.comm.collectives import Pending, start_all_reduce, start_gather, start_reduce_scatter, start_trade
from weft.comm.symmetric import Fused
from weft.errors import PlanError

Later = Callable[[Tensor, Tensor], None]
"""Keeps the two sides of a gradient of a matrix, [tokens, rows] and [tokens, columns], to be multiplied later."""


class Overlap:
    """How the products of one group of tensor-parallel ranks are cut into chunks.

    Args:
        group: ranks that share each matrix.
        chunks: number of chunks of every product; "auto" measures each shape at its first use.
        clock: gives seconds, for that.
        fused: forms that are used in the place of chunks, where there are some; see `weft.comm.symmetric`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        chunks: int | Literal["auto"],
        clock: Callable[[], float] = time.perf_counter,
        fused: Fused | None = None,
    ):
        self.group, self.chunks, self.clock, self.fused = group, chunks, clock, fused
        self.ranks, self.rank = group.size(), group.rank()
        self.others = [rank for rank in range(self.ranks) if rank != self.rank]
        self.counts: dict[Hashable, int] = {}
        """What was chosen, by form and shapes."""

    def cut(
        self, name: str, form: GatherMatmul | MatmulReduce | MatmulScatter, rows: int, *tensors: Tensor
    ) -> list[slice]:
        """The chunks of some rows.

        Args:
            name: of the form.
            form: what is done with them.
            rows: that are cut.
            tensors: whose shapes and formats tell how long everything takes.

        Raises:
            PlanError: there are more chunks than rows.
        """
        count = self.chunks
        if count == "auto":
            key = (name, *((tensor.shape, tensor.dtype) for tensor in tensors))
            if key not in self.counts:
                self.counts[key] = choose_count(form, rows, self.group, RepeatTimer(tensors[0].device, self.clock))
            count = self.counts[key]
        check_chunks(count, rows)
        return cut_rows(rows, count)


def check_chunks(chunks: int, rows: int, where: str = "plan.comm.overlap_chunks") -> None:
    """Refuse more chunks than rows.

    Raises:
        PlanError: with the numbers.
    """
    if chunks > rows:
        raise PlanError(
            f"{chunks} chunks of {rows} rows",
            where=where,
            rule="a chunk has one row at least of those that a tp rank holds",
            fix=f'set plan.comm.overlap_chunks to {rows} at most, or to "auto"',
        )


def can_overlap(group: dist.ProcessGroup) -> bool:
    """Whether something can be computed while a collective of the group is under way."""
    return not getattr(group, "is_blocking", False)


# The four forms


def multiply_gathered(
    x: Tensor,
    matrices: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    overlap: Overlap,
    dim: int,
    later: Sequence[Later | None] = (),
) -> tuple[Tensor, ...]:
    """Gather the parts of all ranks along a dim, and multiply them with each matrix of a fan.

    Args:
        x: this rank's part, [*, part, *, features].
        matrices: each [outputs, features], of the format of `x`.
        biases: of each, [outputs] or None.
        overlap: the group, and its chunks.
        dim: that is split; not the last one.
        later: of each matrix, what keeps its gradient to be computed later; None, and by default: computed in backward.

    Returns:
        Of each matrix [*, ranks x part, *, outputs].

    Raises:
        PlanError: there are more chunks than rows.
    """
    later = tuple(later) or (None,) * len(matrices)
    return _MultiplyGathered.apply(overlap, dim, later, x, *matrices, *biases)


def multiply_copied(
    x: Tensor,
    matrices: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    overlap: Overlap,
    later: Sequence[Later | None] = (),
) -> tuple[Tensor, ...]:
    """Multiply what all ranks have with each matrix of a fan; the gradient of it is summed over ranks.

    Arguments and errors are those of `multiply_gathered`, without a dim; returns [*, outputs] of each matrix.
    """
    if overlap.chunks != "auto":  # they are cut in backward
        check_chunks(overlap.chunks, math.prod(x.shape[:-1]))
    later = tuple(later) or (None,) * len(matrices)
    return _MultiplyCopied.apply(overlap, later, x, *matrices, *biases)


def multiply_scattered(
    x: Tensor, matrix: Tensor, bias: Tensor | None, overlap: Overlap, dim: int, later: Later | None = None
) -> Tensor:
    """Multiply with a matrix, and keep this rank's part, along a dim, of the sum over ranks.

    Args:
        x: [*, ranks x part, *, features].
        matrix: [outputs, features].
        bias: [outputs] or None; of each rank, so that the sum has all of them.
        overlap: the group, and its chunks.
        dim: that is split; not the last one, and the number of ranks divides it.
        later: keeps the gradient of the matrix to be computed later.

    Returns:
        [*, part, *, outputs].

    Raises:
        PlanError: there are more chunks than rows.
    """
    return _MultiplyScattered.apply(overlap, dim, later, x, matrix, bias)


def multiply_reduced(
    x: Tensor, matrix: Tensor, bias: Tensor | None, overlap: Overlap, later: Later | None = None
) -> Tensor:
    """Multiply with a matrix, and sum over ranks; every rank goes on with the same values and has the same gradient.

    Arguments and errors are those of `multiply_scattered`, without a dim; returns [*, outputs].
    """
    return _MultiplyReduced.apply(overlap, later, x, matrix, bias)


class _MultiplyGathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, overlap: Overlap, dim: int, later: tuple[Later | None, ...], x: Tensor, *fan: Any
    ) -> tuple[Tensor, ...]:
        matrices, biases = fan[: len(later)], fan[len(later) :]
        ctx.overlap, ctx.dim, ctx.later = overlap, dim, later
        ctx.save_for_backward(x, *matrices)
        ctx.set_materialize_grads(False)
        own = _fold(x, dim)
        shape = (*x.shape[:dim], overlap.ranks * x.shape[dim], *x.shape[dim + 1 : -1])
        if overlap.fused:
            _, outs = overlap.fused.gather_multiply(own, [matrix.T for matrix in matrices], keep=False)
            for out, bias in zip(outs, biases, strict=True):
                if bias is not None:
                    out += bias
            return tuple(out.reshape(*shape, -1) for out in outs)
        outs = [x.new_empty(len(own), overlap.ranks, own.shape[1], len(matrix)) for matrix in matrices]

        def multiply(left: Tensor, *place: Any) -> None:
            for matrix, bias, out in zip(matrices, biases, outs, strict=True):
                _multiply(left, matrix, bias, out[:, *place])

        def use(rows: slice, parts: Tensor) -> None:
            for rank in overlap.others:
                multiply(parts[rank], rank, rows)

        form = GatherMatmul(
            start=lambda rows: start_gather(own[:, rows], overlap.group),
            own=lambda: multiply(own, overlap.rank),
            use=use,
        )
        form.run(overlap.cut("gathered, forward", form, own.shape[1], own, *matrices))
        return tuple(out.view(*shape, -1) for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        overlap, group, (x, *matrices) = ctx.overlap, ctx.overlap.group, ctx.saved_tensors
        fan = _FanBackward(gradients, matrices, ctx.later, ctx.needs_input_grad[4:])
        own = _fold(x, ctx.dim)
        outer, part, features = own.shape
        sides = [side.view(outer, overlap.ranks, part, -1).transpose(0, 1) for side in fan.sides]
        of_x = fan.sides[0].new_empty(own.shape)

        def make(rows: slice) -> Tensor:
            products = of_x.new_empty(overlap.ranks, outer, rows.stop - rows.start, features)
            for number, (side, matrix) in enumerate(zip(sides, fan.matrices, strict=True)):
                _multiply_back(side[:, :, rows], matrix, products, add=number > 0)
            return products

        def last(parts: Tensor | None) -> None:
            if parts is not None:
                fan.multiply_sides(parts.transpose(0, 1).reshape(-1, features))

        ahead = partial(start_gather, own, group) if fan.needs_input else None
        form = MatmulReduce(make, *_scatter_into(of_x, group), ahead, last)
        if ctx.needs_input_grad[3]:
            form.run(overlap.cut("gathered, backward", form, part, own, *fan.sides))
        elif ahead is not None:
            last(ahead().wait())
        fan.leave_sides()
        return None, None, None, fan.wrap(of_x.view(x.shape)), *fan.of_matrices, *fan.of_biases


class _MultiplyCopied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, overlap: Overlap, later: tuple[Later | None, ...], x: Tensor, *fan: Any
    ) -> tuple[Tensor, ...]:
        matrices, biases = fan[: len(later)], fan[len(later) :]
        ctx.overlap, ctx.later = overlap, later
        ctx.save_for_backward(x, *matrices)
        ctx.set_materialize_grads(False)
        return tuple(F.linear(x, matrix, bias) for matrix, bias in zip(matrices, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        overlap, (x, *matrices) = ctx.overlap, ctx.saved_tensors
        fan = _FanBackward(gradients, matrices, ctx.later, ctx.needs_input_grad[3:])
        tokens = x.flatten(0, -2)
        of_x = fan.sides[0].new_empty(tokens.shape)

        def make(rows: slice) -> Tensor:
            for number, (side, matrix) in enumerate(zip(fan.sides, fan.matrices, strict=True)):
                _multiply_back(side[rows], matrix, of_x[rows], add=number > 0)
            return of_x[rows]

        form = MatmulReduce(
            make=make,
            start=lambda rows, products: start_all_reduce(products, overlap.group),
            last=lambda _: fan.multiply_sides(tokens),
        )
        if ctx.needs_input_grad[2]:
            form.run(overlap.cut("copied, backward", form, len(tokens), tokens, *fan.sides))
        else:
            fan.multiply_sides(tokens)
        fan.leave_sides()
        return None, None, fan.wrap(of_x.view(x.shape)), *fan.of_matrices, *fan.of_biases


class _MultiplyScattered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, overlap: Overlap, dim: int, later: Later | None, x: Tensor, matrix: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.overlap, ctx.dim, ctx.later = overlap, dim, later
        ctx.save_for_backward(x, matrix)
        shape = (*x.shape[:dim], x.shape[dim] // overlap.ranks, *x.shape[dim + 1 : -1])
        if overlap.fused and bias is None:
            return overlap.fused.multiply_scatter(_fold(x, dim), matrix.T).reshape(*shape, -1)
        whole = _fold_whole(x, dim, overlap.ranks).transpose(0, 1)
        _, outer, part, _ = whole.shape
        out = x.new_empty(outer, part, len(matrix))

        def make(rows: slice) -> Tensor:
            products = out.new_empty(len(overlap.others), outer, rows.stop - rows.start, len(matrix))
            for rank, place in zip(overlap.others, products, strict=True):
                _multiply(whole[rank][:, rows], matrix, bias, place)
            return products

        def own(rows: slice, add: bool) -> None:
            mine, place = whole[overlap.rank][:, rows], out[:, rows]
            if not add:
                _multiply(mine, matrix, bias, place)
                return
            if bias is not None:
                place += bias
            _multiply_back(mine, matrix.T, place, add=True)

        def place(rows: slice, theirs: Tensor) -> None:
            torch.sum(theirs, 0, out=out[:, rows])

        def add(rows: slice, theirs: Tensor) -> None:
            out[:, rows] += theirs.sum(0) if len(theirs) > 1 else theirs[0]

        form = MatmulScatter(make, lambda products: start_trade(products, overlap.group), place, own, add)
        form.run(overlap.cut("scattered, forward", form, part, whole, matrix))
        return out.view(*shape, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        overlap, (x, matrix) = ctx.overlap, ctx.saved_tensors
        needs_x, needs_matrix, needs_bias = ctx.needs_input_grad[3:]
        wrap, own = _wrapper(gradient), _fold(_held(gradient).contiguous(), ctx.dim)
        outer, part, outputs = own.shape
        whole, matrix = _fold_whole(x, ctx.dim, overlap.ranks).to(own.dtype), matrix.to(own.dtype)
        of_matrix, of_bias = _Sum(), _Sum()
        of_x = own.new_empty(whole.shape)
        kept = own.new_empty(outer, overlap.ranks, part, outputs) if ctx.later else None

        def multiply(sides: Tensor, ranks: list[int], rows: slice) -> None:
            """Given rows of some ranks, [ranks, outer, rows, outputs]."""
            for side, rank in zip(sides, ranks, strict=True):
                if needs_x:
                    _multiply_back(side, matrix, of_x[:, rank, rows])
                if kept is not None:
                    kept[:, rank, rows] = side
            flat = sides.reshape(-1, outputs)
            if needs_matrix:
                of_matrix.add_product(flat, _join([whole[:, rank, rows] for rank in ranks]))
            if needs_bias:
                of_bias.add(flat)

        def multiply_own() -> None:
            of_matrix.total = of_bias.total = None
            multiply(own[None], [overlap.rank], slice(None))

        def use(rows: slice, parts: Tensor) -> None:
            multiply(_without(parts, overlap.rank), overlap.others, rows)

        if overlap.fused and needs_x:
            kept, (of_x,) = overlap.fused.gather_multiply(own, [matrix], keep=True)
            assert kept is not None
            if needs_matrix:
                of_matrix.add_product(kept.flatten(0, -2), whole.flatten(0, -2))
            if needs_bias:
                of_bias.add(kept.flatten(0, -2))
        else:
            form = GatherMatmul(lambda rows: start_gather(own[:, rows], overlap.group), multiply_own, use)
            form.run(overlap.cut("scattered, backward", form, part, own, whole))
        if kept is not None and ctx.later:
            ctx.later(wrap(kept.flatten(0, -2)), x.flatten(0, -2))
        sums = (wrap(found.take(own.dtype)) if found.total is not None else None for found in (of_matrix, of_bias))
        return None, None, None, (wrap(of_x.reshape(x.shape)) if needs_x else None), *sums


class _MultiplyReduced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, overlap: Overlap, later: Later | None, x: Tensor, matrix: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.later = later
        ctx.save_for_backward(x, matrix)
        tokens = x.flatten(0, -2)
        out = x.new_empty(len(tokens), len(matrix))

        def make(rows: slice) -> Tensor:
            _multiply(tokens[rows], matrix, bias, out[rows])
            return out[rows]

        form = MatmulReduce(make, lambda rows, products: start_all_reduce(products, overlap.group))
        form.run(overlap.cut("reduced, forward", form, len(tokens), tokens, matrix))
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, matrix = ctx.saved_tensors
        fan = _FanBackward((gradient,), (matrix,), (ctx.later,), ctx.needs_input_grad[3:])
        fan.multiply_sides(x.flatten(0, -2))
        fan.leave_sides()
        of_x = fan.wrap((fan.sides[0] @ fan.matrices[0]).view(x.shape)) if ctx.needs_input_grad[2] else None
        return None, None, of_x, *fan.of_matrices, *fan.of_biases


# Their parts


class _FanBackward:
    """Gradients of the outputs of a fan, and those of its matrices and biases.

    Gradients may be held in another format than they say (`precision/fp16_backward.py`): all products are in the held format.
    """

    def __init__(
        self,
        gradients: Sequence[Tensor | None],
        matrices: Sequence[Tensor],
        later: Sequence[Later | None],
        needs_gradient: Sequence[bool],
    ):
        """
        Args:
            gradients: of the outputs, [*, outputs]; None where nobody has used one.
            matrices: as forward had them.
            later: see `multiply_gathered`.
            needs_gradient: of the matrices, then of the biases.
        """
        count = len(matrices)
        used = [number for number, gradient in enumerate(gradients) if gradient is not None]
        self.wrap = _wrapper(gradients[used[0]])
        self.sides = [_held(gradients[number]).contiguous().flatten(0, -2) for number in used]  # type: ignore[arg-type]
        """[tokens, outputs] of each that was used."""
        self.matrices = [matrices[number].to(side.dtype) for number, side in zip(used, self.sides, strict=True)]
        self.later = [later[number] for number in used]
        self.weighed = [number for number in used if needs_gradient[number] or later[number]]
        self.used = used
        self.of_matrices: list[Tensor | None] = [None] * count
        self.of_biases: list[Tensor | None] = [None] * count
        for number, side in zip(used, self.sides, strict=True):
            if needs_gradient[count + number]:
                self.of_biases[number] = self.wrap(side.sum(0))

    @property
    def needs_input(self) -> bool:
        """Whether some gradient of a matrix will be wanted."""
        return bool(self.weighed)

    def multiply_sides(self, x: Tensor) -> None:
        """Make the gradients of the matrices, given the input [tokens, features]; not those that are computed later."""
        self.x = x
        for number, side, later in zip(self.used, self.sides, self.later, strict=True):
            if number in self.weighed and later is None:
                self.of_matrices[number] = self.wrap(side.T @ x.to(side.dtype))

    def leave_sides(self) -> None:
        """Leave what is computed later, once."""
        for side, later in zip(self.sides, self.later, strict=True):
            if later is not None:
                later(self.wrap(side), self.x)


class _Sum:
    """Adds up over chunks, short formats in float32."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left.T @ right."""
        if self.total is None:
            self.total = (left.T @ right).to(_wide(left.dtype))
        elif self.total.dtype == left.dtype:
            self.total.addmm_(left.T, right)
        else:
            self.total += left.T @ right

    def add(self, rows: Tensor) -> None:
        """Add the sum of some rows."""
        found = rows.sum(0, dtype=_wide(rows.dtype))
        self.total = found if self.total is None else self.total + found

    def take(self, dtype: torch.dtype) -> Tensor:
        assert self.total is not None
        return self.total.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _fold(x: Tensor, dim: int) -> Tensor:
    """[*, part, *, features] as [outer, part, features], for the dim of the part."""
    return x.reshape(math.prod(x.shape[:dim]), -1, x.shape[-1])


def _fold_whole(x: Tensor, dim: int, ranks: int) -> Tensor:
    """[*, ranks x part, *, features] as [outer, ranks, part, features]."""
    return x.reshape(math.prod(x.shape[:dim]), ranks, -1, x.shape[-1])


def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x @ matrix.T + bias, straight into a slice: [*, rows, features], [outputs, features] -> [*, rows, outputs]."""
    for rows, place in _blocks(x, out):
        if bias is None:
            torch.mm(rows, matrix.T, out=place)
        else:
            torch.addmm(bias, rows, matrix.T, out=place)


def _multiply_back(side: Tensor, matrix: Tensor, out: Tensor, *, add: bool = False) -> None:
    """side @ matrix into a slice, or added to it: [*, rows, outputs], [outputs, features] -> [*, rows, features]."""
    for rows, place in _blocks(side, out):
        if add:
            place.addmm_(rows, matrix)
        else:
            torch.mm(rows, matrix, out=place)


def _scatter_into(
    out: Tensor, group: dist.ProcessGroup
) -> tuple[Callable[[slice, Tensor], Pending], Callable[[slice, Tensor], None]]:
    """How chunks of products [ranks, outer, rows, features] are sent, and taken into rows of [outer, part, features]; straight
    into their place where memory allows."""

    def start(rows: slice, products: Tensor) -> Pending:
        place = out[:, rows]
        return start_reduce_scatter(products, place if place.is_contiguous() else torch.empty_like(place), group)

    def keep(rows: slice, received: Tensor) -> None:
        if not out[:, rows].is_contiguous():
            out[:, rows] = received

    return start, keep


def _blocks(x: Tensor, out: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Matrices at the same places of two tensors [*, rows, features]; one where both lie side by side in memory."""
    if x.is_contiguous() and out.is_contiguous():
        return [(x.flatten(0, -2), out.flatten(0, -2))]
    return [(x[place], out[place]) for place in product(*map(range, x.shape[:-2]))]


def _join(parts: list[Tensor]) -> Tensor:
    """Parts [outer, rows, features] one below the other, [tokens, features]; one alone is not copied."""
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).flatten(0, -2)


def _without(parts: Tensor, rank: int) -> Tensor:
    """The parts of all other ranks; no copy where one end is left out."""
    if rank == 0:
        return parts[1:]
    return torch.cat([parts[:rank], parts[rank + 1 :]]) if rank < len(parts) - 1 else parts[:rank]


def _held(gradient: Tensor) -> Tensor:
    return getattr(gradient, "carried", gradient)


def _wrapper(gradient: Any) -> Callable[[Tensor], Tensor]:
    """Gives a gradient the form that another one has."""
    return type(gradient) if hasattr(gradient, "carried") else lambda tensor: tensor
