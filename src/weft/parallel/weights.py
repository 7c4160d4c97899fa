"""Stored weights and local weights: DTensors between steps, plain local tensors during forward.

A parameter that tensor parallelism splits is stored as a DTensor over the tp axis, so that FSDP2 and checkpoints know its
layout. While its unit (a block, the embedding, the head) runs forward, the modules of the unit see plain local tensors instead.
Differentiable functions compute them, so that gradients flow back to the stored parameters.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from weft.comm import collectives


@dataclass(frozen=True)
class TensorLayout:
    """Layout of one parameter over the ranks of the tp axis."""

    kind: Literal["shard", "copy", "narrow", "once"]
    """shard: each rank holds a part. copy: every rank holds the full parameter, and gradients are summed over ranks.
    narrow: like copy, but a rank computes with a slice. once: like copy, but only rank 0 uses it (bias of a row-parallel
    layer)."""
    dim: int = 0
    """Split tensor dim of shard and narrow."""
    parts: tuple[tuple[int, int], ...] = ()
    """Start and length of the slices of this rank, for narrow; one for each projection that the parameter packs."""


@dataclass(frozen=True)
class PackedLayout:
    """Row order of a parameter that packs several projections; each rank needs its part of every projection.

    The stored parameter is ordered by rank, so that one contiguous shard has the rows of one rank.
    """

    dim: dict[str, int]
    """Split tensor dim by parameter name."""
    sizes: tuple[int, ...]
    """Rows of each projection; each is divisible by the number of ranks."""
    ranks: int

    def to_rank_order(self, tensor: Tensor, name: str) -> Tensor:
        """Reorder rows from the original order, by projection, to the stored order, by rank."""
        pieces = [part.chunk(self.ranks, self.dim[name]) for part in tensor.split(self.sizes, self.dim[name])]
        return torch.cat([piece for rank in zip(*pieces, strict=True) for piece in rank], self.dim[name])

    def to_projection_order(self, tensor: Tensor, name: str) -> Tensor:
        """Reorder rows from the stored order, by rank, to the original order, by projection."""
        dim, own = self.dim[name], [size // self.ranks for size in self.sizes]
        pieces = [rank.split(own, dim) for rank in tensor.chunk(self.ranks, dim)]
        return torch.cat([piece for part in zip(*pieces, strict=True) for piece in part], dim)


@dataclass
class TensorSplit:
    """Changes that tensor parallelism has made to a model."""

    packed: dict[nn.Module, PackedLayout] = field(default_factory=dict)
    """Row orders of the linear layers that pack several projections."""
    copied: set[nn.Module] = field(default_factory=set)
    """Modules with a parameter that several ranks hold, and whose gradients are summed over these ranks in backward."""
    split_inputs: set[nn.Module] = field(default_factory=set)
    """Dropout modules whose input features are split."""
    chunked: set[nn.Module] = field(default_factory=set)
    """Linear layers whose matmul overlaps with its collective in chunks (`async_tp.py`)."""


def shard_parameter(
    module: nn.Module,
    name: str,
    dims: int | tuple[int | None, ...],
    mesh: DeviceMesh,
    packed: PackedLayout | None = None,
) -> None:
    """Replace a parameter, equal on all ranks or on the meta device, by a DTensor.

    Args:
        module: owner of the parameter.
        name: its name in the module.
        dims: tensor dim to shard over each axis of the mesh; None: each rank of the axis has the full parameter.
        mesh: mesh of the ranks.
        packed: row order of the stored parameter; None to keep the original order.
    """
    parameter = module._parameters[name]
    assert parameter is not None
    full = packed.to_rank_order(parameter.data, name) if packed else parameter.data
    of_axes = (dims,) if isinstance(dims, int) else dims
    placements = [Replicate() if dim is None else Shard(dim) for dim in of_axes]
    shard = distribute_tensor(full, mesh, placements, src_data_rank=None)
    module._parameters[name] = nn.Parameter(shard, requires_grad=parameter.requires_grad)


class LocalWeights:
    """Forward hooks that replace the stored parameters of a unit by local weights during its forward."""

    def __init__(
        self,
        unit: nn.Module,
        layouts: dict[str, TensorLayout],
        group: dist.ProcessGroup,
        gradient_factor: float = 1.0,
        sums_gradients: bool = True,
    ):
        """
        Args:
            unit: module whose parameters are gathered before its forward.
            layouts: layouts by parameter name within the unit; a parameter without a layout is not changed.
            group: ranks over which gradients of `copy` parameters are summed.
            gradient_factor: factor on all gradients of the unit.
            sums_gradients: False if the gradients of copies are averaged over the group later, as those of other ranks.
        """
        self.gradient_factor, self.sums_gradients = gradient_factor, sums_gradients
        owners = {name: unit.get_submodule(name.rpartition(".")[0]) for name in layouts}
        self.slots = [(owners[name], name.rpartition(".")[2], layout) for name, layout in layouts.items()]
        self.group = group
        self.stored: list[list[tuple[nn.Module, str, Any]]] = []
        """Stored parameters of each forward of the unit that is running: a recompute may run inside of one."""
        unit.register_forward_pre_hook(self._enter)
        unit.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: object) -> None:
        parameters: list[tuple[nn.Module, str, Any]] = [
            (owner, name, _tensors(owner, name)[name]) for owner, name, _ in self.slots
        ]
        self.stored.append([entry for entry in parameters if entry[2] is not None])
        values: list[Any] = [to_local(value) for _, _, value in parameters]
        copied = [
            i
            for i, (owner, name, layout) in enumerate(self.slots)
            if layout.kind != "shard" and self.sums_gradients and name not in owner._buffers
        ]
        # One all-reduce for the gradients of all copies, at the end of the backward of the unit.
        copies = collectives.copy(self.group, *(values[i] for i in copied)) if copied else ()
        for i, value in zip(copied, copies, strict=True):
            values[i] = value
        for (owner, name, layout), stored in zip(self.slots, values, strict=True):
            own: Any = stored
            if layout.kind == "narrow":
                slices = [own.narrow(layout.dim, start, length) for start, length in layout.parts]
                own = slices[0] if len(slices) == 1 else torch.cat(slices, layout.dim)
            elif layout.kind == "once" and self.group.rank() > 0:
                own = own * 0
            is_scaled = self.gradient_factor != 1
            _tensors(owner, name)[name] = _ScaleGradient.apply(own, self.gradient_factor) if is_scaled else own

    def _leave(self, *_: object) -> None:
        for owner, name, value in self.stored.pop():
            _tensors(owner, name)[name] = value


def _tensors(owner: nn.Module, name: str) -> dict[str, Any]:
    """Table of a module that has a parameter or a buffer of a name."""
    return owner._buffers if name in owner._buffers else owner._parameters


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


def to_local(parameter: Any) -> Any:
    """Local part of a DTensor, differentiable; any other tensor unchanged."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def part_bounds(size: int, parts: int, part: int) -> tuple[int, int]:
    """Start and length of one of `parts` nearly equal parts of `size`; the first parts are longer by one."""
    lengths = [size // parts + (i < size % parts) for i in range(parts)]
    return [0, *accumulate(lengths)][part], lengths[part]


def use_local_weights(
    unit: nn.Module, layouts: dict[str, TensorLayout], group: dist.ProcessGroup, split: TensorSplit
) -> None:
    """Let a unit compute with local weights, and record the modules whose gradients are summed over ranks."""
    LocalWeights(unit, layouts, group)
    copied = [name for name, layout in layouts.items() if layout.kind != "shard"]
    split.copied.update(unit.get_submodule(name.rpartition(".")[0]) for name in copied)
