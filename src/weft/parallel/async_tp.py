"""Regions whose matrices multiply in chunks beside their communication (`weft.comm.overlap`), in unmodified modules.

In front of a region stands no collective but an `LazyGather`: a tensor that knows the shape of what a collective would give, and
has no memory. The first column-parallel matrix that is called with one computes the products of all that share it, its fan,
from the input that is not gathered; the others find theirs there. Anything else that is done with an `LazyGather` calls for the
collective, and goes on with what it gives: modules that we know nothing of stay correct. A row-parallel matrix multiplies and
reduces at once.
"""

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.pytorch_utils import Conv1D

from weft.comm import collectives
from weft.comm.overlap import (
    Later,
    Overlap,
    multiply_copied,
    multiply_gathered,
    multiply_reduced,
    multiply_scattered,
)
from weft.errors import ModelError
from weft.parallel.pipeline.weight_gradients import Product, WeightGradients

aten = torch.ops.aten


@dataclass(frozen=True)
class RegionBoundary:
    """Of a region: how hidden states enter it, in chunks."""

    overlap: Overlap
    sp: bool
    """Whether ranks hold a part of the sequence each outside of the region."""
    dim: int
    """That is split, if they do."""
    queue: WeightGradients | None
    """Of the gradients of matrices, where backward is split."""

    def enter(self, hidden: Tensor) -> Tensor:
        """What the region sees in the place of its input."""
        return _Await.apply(hidden, self, GatherSource(hidden, self))

    def gather(self, x: Tensor) -> Tensor:
        """What all ranks have, at once."""
        return collectives.gather_dim(x, self.overlap.group, self.dim) if self.sp else x

    def sum_gradients(self, gradient: Tensor) -> Tensor:
        """The transpose of `gather`."""
        if self.sp:
            return collectives.reduce_scatter_dim(gradient, self.overlap.group, self.dim)
        return collectives.start_all_reduce(gradient.contiguous().clone(), self.overlap.group).wait()


@dataclass(eq=False)
class GatherSource:
    """What an `LazyGather` is made from, on demand."""

    x: Tensor
    """The input, as it comes to the border."""
    border: RegionBoundary
    whole: Tensor | None = None
    """What the collective gives, if someone has called for it."""
    products: dict[nn.Module, Tensor] = field(default_factory=dict)
    """Outputs of matrices that have not been asked for yet."""

    def gather(self) -> Tensor:
        """Call for the collective, once."""
        if self.whole is None:
            self.whole = self.border.gather(self.x.detach())
        return self.whole

    def multiply(self, module: nn.Module, fan: list[nn.Module]) -> Tensor:
        """The output of one matrix of a fan; its first call computes all of them, in recompute once more."""
        if module not in self.products:
            overlap, x = self.border.overlap, self.x
            matrices, biases, later = zip(*(_operands(one, x, self.border.queue) for one in fan), strict=True)
            if self.border.sp:
                found = multiply_gathered(x, matrices, biases, overlap, self.border.dim, later)
            else:
                found = multiply_copied(x, matrices, biases, overlap, later)
            self.products = dict(zip(fan, found, strict=True))
        return self.products.pop(module)


class LazyGather(Tensor):
    """The shape of what a collective would give; any operation on it calls for that, and takes it."""

    source: GatherSource

    @staticmethod
    def __new__(cls, source: GatherSource) -> "LazyGather":
        x, shape = source.x, list(source.x.shape)
        if source.border.sp:
            shape[source.border.dim] *= source.border.overlap.ranks
        return Tensor._make_wrapper_subclass(cls, shape, dtype=x.dtype, device=x.device)

    def __init__(self, source: GatherSource):
        self.source = source

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None  # holds no memory of its own

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyGather({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (aten.detach.default, aten.alias.default):
            return LazyGather(args[0].source)
        written = [
            value for value, argument in zip(args, func._schema.arguments, strict=False) if _is_written(argument)
        ]
        if any(isinstance(value, LazyGather) for value in written):
            raise ModelError(
                f"{func} changes the hidden states of a region in place",
                rule="with plan.comm.overlap_chunks > 1, a region does not write into its input",
                fix="set plan.comm.overlap_chunks = 1",
            )
        taken, named = tree_map_only(LazyGather, lambda awaited: awaited.source.gather(), (args, kwargs or {}))
        return func(*taken, **named)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


class _Await(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, border: RegionBoundary, source: GatherSource) -> Tensor:
        ctx.border = border
        return LazyGather(source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.border.sum_gradients(gradient), None, None


def share_gather(region: nn.Module, own_name: str, columns: tuple[re.Pattern[str], ...], rows: re.Pattern[str]) -> bool:
    """Let the column-parallel matrices of a region take their products from an `LazyGather`, if it has no other first matrices.

    Args:
        region: with its own part of each matrix.
        own_name: of the region itself, where it is a matrix.
        columns: names of column-parallel matrices whose input is the region's.
        rows: names of row-parallel matrices.

    Returns:
        Whether it was done. Not for a region with a matrix that keeps all its outputs (the latent queries of DeepSeek), nor
        where another library has wrapped a matrix.
    """
    fan: list[Any] = []
    for name, module in region.named_modules():
        last = (name or own_name).rpartition(".")[2]
        if isinstance(module, nn.Linear | Conv1D) and not rows.fullmatch(last):
            if not any(pattern.fullmatch(last) for pattern in columns) or not is_plain(module):
                return False
            fan.append(module)
    if len({in_features(module) for module in fan}) != 1:
        return False
    for module in fan:
        module.multiplies_in_chunks = True
        module.forward = partial(_take_product, module, fan)
    return True


def reduce_at_once(module: Any, border: RegionBoundary) -> None:
    """Let a row-parallel matrix give sums over ranks, in place: this rank's part of the sequence, or all of it."""
    module.multiplies_in_chunks = True
    module.forward = partial(_multiply_and_reduce, module, border)


def is_plain(module: nn.Module) -> bool:
    """Whether a matrix runs its class's own forward."""
    return type(module) in (nn.Linear, Conv1D) and "forward" not in vars(module)


def in_features(module: Any) -> int:
    """Inputs of a column-parallel matrix."""
    return int(module.nx if isinstance(module, Conv1D) else module.in_features)


def _take_product(module: Any, fan: list[nn.Module], x: Tensor) -> Tensor:
    if isinstance(x, LazyGather):
        return x.source.multiply(module, fan)
    return F.linear(x, _rows_first(module, module.weight), module.bias)


def _multiply_and_reduce(module: Any, border: RegionBoundary, x: Tensor) -> Tensor:
    matrix, bias, later = _operands(module, x, border.queue)
    if border.sp:
        return multiply_scattered(x, matrix, bias, border.overlap, border.dim, later)
    return multiply_reduced(x, matrix, bias, border.overlap, later)


def _operands(module: Any, x: Tensor, queue: WeightGradients | None) -> tuple[Tensor, Tensor | None, Later | None]:
    """Matrix with its outputs as rows, bias, and where the gradient of the matrix goes if it is computed later: behind that of
    the input `x`, so not where that has none."""
    weight, later = module.weight, None
    shares = getattr(module, "shares_gradients", False)
    if queue is not None and torch.is_grad_enabled() and weight.requires_grad and x.requires_grad and not shares:
        later = partial(_leave_product, queue, weight, isinstance(module, Conv1D))
        weight = weight.detach()
    return _rows_first(module, weight), module.bias, later


def _leave_product(queue: WeightGradients, weight: Tensor, transposed: bool, left: Tensor, right: Tensor) -> None:
    queue.products.append(Product(weight, right, left) if transposed else Product(weight, left, right))


def _rows_first(module: nn.Module, weight: Tensor) -> Tensor:
    return weight.T if isinstance(module, Conv1D) else weight
