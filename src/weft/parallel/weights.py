"""Weights at rest and in flight: DTensors between steps, what one rank computes with during forward.

A parameter that tensor parallelism splits is a DTensor over the tp axis, so that FSDP2 and checkpoints know its layout. For as
long as its unit (a block, the embedding, the head) runs forward, the modules of the unit see plain local tensors in its place,
made by differentiable functions, so that gradients find their way back to what is at rest.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from weft.comm import collectives


@dataclass(frozen=True)
class TensorLayout:
    """How one parameter lives on the ranks of the tp axis."""

    kind: Literal["shard", "copy", "narrow", "once"]
    """shard: each rank holds a part. copy: every rank holds it whole, and each adds its share to the gradient. narrow: like
    copy, but a rank computes with a part. once: like copy, but only rank 0 computes with it (the bias behind a sum)."""
    dim: int = 0
    """Of shard and narrow: the tensor dim that is cut."""
    start: int = 0
    length: int = 0
    """Of narrow: the part of this rank."""


@dataclass(frozen=True)
class Packed:
    """Rows of several projections in one parameter: each rank needs its part of every one of them.

    At rest the rows stand in the order of ranks, so that one contiguous cut gives each rank its own.
    """

    dim: dict[str, int]
    """The tensor dim that is cut, by name of the parameter."""
    sizes: tuple[int, ...]
    """Rows of each projection; each divisible by the number of ranks."""
    ranks: int

    def by_rank(self, tensor: Tensor, name: str) -> Tensor:
        """From the order of the model's authors to the order at rest."""
        pieces = [part.chunk(self.ranks, self.dim[name]) for part in tensor.split(self.sizes, self.dim[name])]
        return torch.cat([piece for rank in zip(*pieces, strict=True) for piece in rank], self.dim[name])

    def by_projection(self, tensor: Tensor, name: str) -> Tensor:
        """And back."""
        dim, own = self.dim[name], [size // self.ranks for size in self.sizes]
        pieces = [rank.split(own, dim) for rank in tensor.chunk(self.ranks, dim)]
        return torch.cat([piece for part in zip(*pieces, strict=True) for piece in part], dim)


def shard_parameter(module: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> None:
    """Turn a parameter, equal on all ranks or on the meta device, into a DTensor cut along a dim over a one-axis mesh."""
    parameter = module._parameters[name]
    assert parameter is not None
    packed = getattr(module, "packed", None)
    whole = packed.by_rank(parameter.data, name) if packed else parameter.data
    shard = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
    module._parameters[name] = nn.Parameter(shard, requires_grad=parameter.requires_grad)


class LocalWeights:
    """Hooks that show the modules of a unit their local weights during its forward."""

    def __init__(
        self, unit: nn.Module, layouts: dict[str, TensorLayout], group: dist.ProcessGroup, gradient_factor: float = 1.0
    ):
        """
        Args:
            unit: runs forward as one; its parameters are gathered by then.
            layouts: by name of the parameter inside the unit; those that are not named stay as they are.
            group: ranks that `copy` adds up gradients over.
            gradient_factor: on all gradients of the unit.
        """
        self.gradient_factor = gradient_factor
        owners = {name: unit.get_submodule(name.rpartition(".")[0]) for name in layouts}
        self.slots = [(owners[name], name.rpartition(".")[2], layout) for name, layout in layouts.items()]
        for owner, _, layout in self.slots:
            if layout.kind != "shard":
                owner.shares_gradients = True  # type: ignore[assignment]
        self.group = group
        self.at_rest: list[tuple[nn.Module, str, Any]] = []
        unit.register_forward_pre_hook(self._enter)
        unit.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: object) -> None:
        found: list[tuple[nn.Module, str, Any]] = [
            (owner, name, owner._parameters[name]) for owner, name, _ in self.slots
        ]
        self.at_rest = [entry for entry in found if entry[2] is not None]
        layouts = [layout for _, _, layout in self.slots]
        values: list[Any] = [to_local(value) for _, _, value in found]
        shared = [i for i, layout in enumerate(layouts) if layout.kind != "shard"]
        # One message for all of them, at the end of the unit's backward.
        copies = collectives.copy(self.group, *(values[i] for i in shared)) if shared else ()
        for i, value in zip(shared, copies, strict=True):
            values[i] = value
        for (owner, name, layout), value in zip(self.slots, values, strict=True):
            if layout.kind == "narrow":
                value = value.narrow(layout.dim, layout.start, layout.length)
            elif layout.kind == "once" and self.group.rank() > 0:
                value = value * 0
            scaled = self.gradient_factor != 1
            owner._parameters[name] = _ScaleGradient.apply(value, self.gradient_factor) if scaled else value

    def _leave(self, *_: object) -> None:
        for owner, name, value in self.at_rest:
            owner._parameters[name] = value
        self.at_rest = []


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


def to_local(parameter: Any) -> Any:
    """The local part of a DTensor, differentiably; any other tensor as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def part_bounds(size: int, parts: int, part: int) -> tuple[int, int]:
    """Start and length of one of `parts` nearly equal parts of `size`; the first ones are longer by one."""
    lengths = [size // parts + (i < size % parts) for i in range(parts)]
    return [0, *accumulate(lengths)][part], lengths[part]
