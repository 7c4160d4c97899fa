"""Quantization-aware training: linear layers of blocks compute with weights of few bits; see `weft.compute.fake_quantize`."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from weft.anatomy.roles import Anatomy
from weft.compute.fake_quantize import quantized_linear
from weft.errors import ModelError, PlanError
from weft.parallel.weights import to_local
from weft.plan import Plan


def quantized_layers(model: nn.Module, anatomy: Anatomy) -> dict[str, nn.Linear]:
    """Linear layers whose weights are quantized, by full name: all in blocks but routers and those with a custom forward."""
    routers = tuple(f"{name}." for block in anatomy.blocks for name in block.router)
    return {
        name: layer
        for block in anatomy.blocks
        for name, layer in model.get_submodule(block.name).named_modules(prefix=block.name)
        if isinstance(layer, nn.Linear)
        and type(layer).forward is nn.Linear.forward
        and not f"{name}.".startswith(routers)
    }


def check_quantization(model: nn.Module, anatomy: Anatomy, plan: Plan) -> None:
    """Refuse weights of few bits for a model without such layers, or whose layers groups do not divide.

    Args:
        model: full model, before parallelism.
        anatomy: its anatomy.
        plan: resolved.

    Raises:
        ModelError: names the layer.
        PlanError: tensor parallelism divides a group.
    """
    kind, size = plan.precision.quantize, plan.precision.quantize_group_size if plan.precision.quantize == "int4" else 1
    layers = quantized_layers(model, anatomy)
    if not layers or anatomy.has_experts:
        raise ModelError(
            f"quantize = {kind!r} for {anatomy.family}, which has {'experts' if layers else 'no nn.Linear in its blocks'}",
            where="plan.precision.quantize",
            rule="linear layers of blocks are quantized, and experts are none",
            fix='set plan.precision.quantize = "none"',
        )
    for name, layer in layers.items():
        if layer.in_features % size:
            raise ModelError(
                f"{name} has {layer.in_features} input channels",
                where="plan.precision.quantize_group_size",
                rule=f"groups of {size} weights do not go over the end of a row",
                fix='choose a smaller group, or plan.precision.quantize = "int8"',
            )


def apply_quantization(model: nn.Module, anatomy: Anatomy, plan: Plan, mesh: DeviceMesh) -> None:
    """Replace the forward of the linear layers of blocks, in place.

    Args:
        model: model after tensor parallelism; a pipeline may have removed parts of it.
        anatomy: anatomy of the blocks on this rank.
        plan: resolved.
        mesh: mesh of all ranks.

    Raises:
        PlanError: tensor parallelism divides a group of weights.
    """
    kind = plan.precision.quantize
    size = plan.precision.quantize_group_size if kind == "int4" else 0
    for name, layer in quantized_layers(model, anatomy).items():
        weight: Any = layer.weight
        by_columns = isinstance(weight, DTensor) and any(isinstance(p, Shard) and p.dim == 1 for p in weight.placements)
        if size and to_local(weight).shape[1] % size:
            raise PlanError(
                f"{name} has {to_local(weight).shape[1]} input channels on a rank of tp",
                where="plan.precision.quantize_group_size",
                rule=f"tensor parallelism does not divide a group of {size} weights",
                fix="choose a smaller group, or a smaller plan.parallel.tp",
            )
        group = mesh.get_group("tp") if by_columns else None
        inputs = plan.precision.quantize_inputs
        layer.forward = _quantized_forward(layer, kind, size, group, inputs)  # type: ignore[method-assign]


def _quantized_forward(layer: Any, kind: str, group_size: int, group: dist.ProcessGroup | None, inputs: str) -> Any:
    """Forward of a linear layer. A function, because torch.compile would compile each block anew for a `partial`."""

    def forward(x: Tensor) -> Tensor:
        return quantized_linear(x, layer.weight, layer.bias, kind, group_size, group, inputs)

    return forward
