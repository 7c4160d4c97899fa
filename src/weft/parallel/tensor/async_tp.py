"""Async tensor parallelism: chunked matmuls overlapped with their collectives (`weft.comm.overlap`), in unmodified modules.

The input of a region is a `LazyGather` instead of the result of an all-gather: a tensor with the shape of the gathered input
but without memory. The first column-parallel linear layer that is called with it computes the outputs of all layers that share
this input, overlapped with the gather; the calls of the other layers return outputs that are already computed. Any other
operation on a `LazyGather` runs the all-gather and uses its result, so that unknown modules stay correct. A row-parallel
linear layer computes its matmul and the reduction over ranks together, in chunks.
"""

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.pytorch_utils import Conv1D

from weft.anatomy.roles import standard_name
from weft.comm import collectives
from weft.comm.overlap import (
    Overlap,
    all_gather_matmul,
    can_overlap,
    copy_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from weft.comm.overlap_parts import DeferGrad
from weft.comm.symmetric import find_fused_matmuls
from weft.errors import ModelError
from weft.parallel.pipeline.weight_gradients import DeferredMatmul, WeightGradientQueue
from weft.parallel.weights import TensorSplit
from weft.plan import ResolvedPlan

aten = torch.ops.aten


@dataclass(frozen=True)
class RegionBoundary:
    """Boundary of a tensor-parallel region: the collective that its input needs, computed in chunks."""

    overlap: Overlap
    sp: bool
    """True if each rank holds a part of the sequence outside of the region (sequence parallelism)."""
    dim: int
    """Tensor dim that sequence parallelism splits."""
    queue: WeightGradientQueue | None
    """Queue of deferred weight gradients, if the pipeline schedule splits backward."""
    split: TensorSplit
    """Changes that tensor parallelism makes to the model."""

    def enter(self, hidden: Tensor) -> Tensor:
        """Input of the region: a `LazyGather` of the hidden states."""
        return _LazyGatherFunction.apply(hidden, self, GatherSource(hidden, self))

    def gather(self, x: Tensor) -> Tensor:
        """All-gather over the ranks, without chunks."""
        return collectives.gather_dim(x, self.overlap.group, self.dim) if self.sp else x

    def sum_gradients(self, gradient: Tensor) -> Tensor:
        """Backward of `gather`: reduce-scatter, or all-reduce without sequence parallelism."""
        if self.sp:
            return collectives.reduce_scatter_dim(gradient, self.overlap.group, self.dim)
        return collectives.start_all_reduce(gradient.contiguous().clone(), self.overlap.group).wait()


@dataclass(eq=False)
class GatherSource:
    """Deferred all-gather of a `LazyGather`, and the matmuls computed from it."""

    x: Tensor
    """Input before the all-gather."""
    boundary: RegionBoundary
    gathered: Tensor | None = None
    """Result of the all-gather, if an operation has needed it."""
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    """Outputs that are computed but not yet returned, by linear layer."""

    def gather(self) -> Tensor:
        """Run the all-gather on the first call; later calls return the same tensor."""
        if self.gathered is None:
            self.gathered = self.boundary.gather(self.x.detach())
        return self.gathered

    def multiply(self, module: nn.Module, columns: list[nn.Module]) -> Tensor:
        """Output of one column-parallel linear layer.

        The first call computes the outputs of all `columns`; a call from recompute computes them again.
        """
        if module not in self.outputs:
            overlap, x = self.boundary.overlap, self.x
            matrices, biases, later = zip(*(_operands(column, x, self.boundary) for column in columns), strict=True)
            if self.boundary.sp:
                outputs = all_gather_matmul(x, matrices, biases, overlap, self.boundary.dim, later)
            else:
                outputs = copy_matmul(x, matrices, biases, overlap, later)
            self.outputs = dict(zip(columns, outputs, strict=True))
        return self.outputs.pop(module)


class LazyGather(Tensor):
    """Placeholder with the shape of an all-gathered tensor; any operation on it runs the all-gather and uses the result."""

    source: GatherSource

    @staticmethod
    def __new__(cls, source: GatherSource) -> "LazyGather":
        x, shape = source.x, list(source.x.shape)
        if source.boundary.sp:
            shape[source.boundary.dim] *= source.boundary.overlap.ranks
        return Tensor._make_wrapper_subclass(cls, shape, dtype=x.dtype, device=x.device)

    def __init__(self, source: GatherSource):
        self.source = source

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None  # has no memory

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
                rule="with plan.comm.overlap_chunks > 1, a region must not modify its input in place",
                fix="set plan.comm.overlap_chunks = 1",
            )
        gathered_args, gathered_kwargs = tree_map_only(
            LazyGather, lambda lazy: lazy.source.gather(), (args, kwargs or {})
        )
        return func(*gathered_args, **gathered_kwargs)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


class _LazyGatherFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: RegionBoundary, source: GatherSource) -> Tensor:
        ctx.boundary = boundary
        return LazyGather(source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.boundary.sum_gradients(gradient), None, None


def share_gather(
    region: nn.Module,
    config: Any,
    own_name: str,
    column_names: tuple[re.Pattern[str], ...],
    row_names: re.Pattern[str],
    split: TensorSplit,
) -> bool:
    """Let the column-parallel linear layers of a region share one chunked all-gather of their input, in place.

    Args:
        region: module with this rank's part of each weight.
        config: configuration of the model.
        own_name: name of the region itself.
        column_names: names of the column-parallel layers whose input is the input of the region.
        row_names: names of the row-parallel layers.
        split: record of what tensor parallelism changes; the layers are added to it.

    Returns:
        True if the region was changed. It is left as it is if one of its first layers is not split (the latent queries of
        DeepSeek), if another library has wrapped one of these layers, or if their numbers of inputs differ.
    """
    column_modules: list[Any] = []
    for name, module in region.named_modules():
        last = standard_name(config, f"{own_name}.{name}" if name else own_name)
        if isinstance(module, nn.Linear | Conv1D) and not row_names.fullmatch(last):
            if not any(pattern.fullmatch(last) for pattern in column_names) or not is_plain(module):
                return False
            column_modules.append(module)
    if len({in_features(module) for module in column_modules}) != 1:
        return False
    split.chunked.update(column_modules)
    for module in column_modules:
        module.forward = partial(_column_forward, module, column_modules)
    return True


def fuse_reduction(module: Any, boundary: RegionBoundary) -> None:
    """Overlap the matmul of a row-parallel linear layer with the reduction of its output over ranks, in place.

    The output is this rank's part of the sequence with sequence parallelism, and the full sequence without it.
    """
    boundary.split.chunked.add(module)
    module.forward = partial(_row_forward, module, boundary)


def is_plain(module: nn.Module) -> bool:
    """True if a linear layer runs the unmodified forward of its class."""
    return type(module) in (nn.Linear, Conv1D) and "forward" not in vars(module)


def in_features(module: Any) -> int:
    """Number of input features of a linear layer."""
    return int(module.nx if isinstance(module, Conv1D) else module.in_features)


def _column_forward(module: Any, columns: list[nn.Module], x: Tensor) -> Tensor:
    if isinstance(x, LazyGather):
        return x.source.multiply(module, columns)
    return F.linear(x, _rows_first(module, module.weight), module.bias)


def _row_forward(module: Any, boundary: RegionBoundary, x: Tensor) -> Tensor:
    matrix, bias, later = _operands(module, x, boundary)
    if boundary.sp:
        return matmul_reduce_scatter(x, matrix, bias, boundary.overlap, boundary.dim, later)
    return matmul_all_reduce(x, matrix, bias, boundary.overlap, later)


def _operands(module: Any, x: Tensor, boundary: RegionBoundary) -> tuple[Tensor, Tensor | None, DeferGrad | None]:
    """Weight [outputs, inputs], bias, and the callback that defers the weight gradient.

    There is no callback, and the weight gradient is computed in backward, if the input `x` needs no gradient: the deferred
    gradient is queued by the backward of `x`.
    """
    weight, later, queue = module.weight, None, boundary.queue
    is_copied = module in boundary.split.copied
    if queue is not None and torch.is_grad_enabled() and weight.requires_grad and x.requires_grad and not is_copied:
        later = partial(_defer_matmul, queue, weight, isinstance(module, Conv1D))
        weight = weight.detach()
    return _rows_first(module, weight), module.bias, later


def _defer_matmul(queue: WeightGradientQueue, weight: Tensor, transposed: bool, left: Tensor, right: Tensor) -> None:
    queue.pending.append(DeferredMatmul(weight, right, left) if transposed else DeferredMatmul(weight, left, right))


def _rows_first(module: nn.Module, weight: Tensor) -> Tensor:
    return weight.T if isinstance(module, Conv1D) else weight


def build_overlap(plan: ResolvedPlan, group: dist.ProcessGroup, device_type: str) -> Overlap | None:
    """Chunking of the matmuls; None if they do not overlap with collectives."""
    chunks = plan.comm.overlap_chunks
    if chunks == "auto" and dist.get_backend(group) == "fake":  # a dry run cannot measure whether overlap helps
        return None if device_type == "cpu" else Overlap(group, 1)
    if chunks == 1 or (chunks == "auto" and not can_overlap(group)):
        return None
    return Overlap(group, chunks, fused=find_fused_matmuls(group, device_type) if chunks == "auto" else None)
