"""Quantization-aware training: linear layers of blocks, and experts, compute with weights of few bits.

`weft.compute.fake_quantize` has the arithmetic.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from weft.anatomy.roles import Anatomy
from weft.anatomy.stored_rows import stored_rows
from weft.compute.fake_quantize import quantized_linear, rounded
from weft.errors import ModelError, PlanError, Refusal
from weft.parallel.experts.matrices import split_dims
from weft.parallel.weights import to_local
from weft.plan import ResolvedPlan

if TYPE_CHECKING:
    from weft.parallel.build import Build


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


def expert_weights(model: nn.Module, anatomy: Anatomy) -> dict[str, nn.Parameter]:
    """Weights of all experts of a layer [experts, rows, columns], by full name."""
    return {
        f"{part}.{name}": weight
        for block in anatomy.blocks
        for part in block.experts
        for name, weight in model.get_submodule(part).named_parameters()
        if weight.ndim == 3
    }


def reason_against_quantization(model: nn.Module, anatomy: Anatomy, plan: ResolvedPlan) -> Refusal | None:
    """Reason against weights of few bits: the model has no such layers, or groups do not divide them.

    Args:
        model: full model, before parallelism.
        anatomy: its anatomy.
        plan: plan.
    """
    kind, size = plan.precision.quantize, _group_size(plan) or 1
    layers, experts = quantized_layers(model, anatomy), expert_weights(model, anatomy)
    if not layers:
        return Refusal(
            f"quantize = {kind!r} for {anatomy.family}, which has no nn.Linear in its blocks",
            where="plan.precision.quantize",
            rule="linear layers of blocks are quantized, and experts",
            fix='set plan.precision.quantize = "none"',
            error=ModelError,
        )
    if experts and plan.precision.quantize_inputs != "none":
        return Refusal(
            f"quantize_inputs = {plan.precision.quantize_inputs!r} for {anatomy.family}, which has experts",
            where="plan.precision.quantize_inputs",
            rule="Transformers has no experts that round their inputs, so that the trained model could not be written",
            fix='set plan.precision.quantize_inputs = "none"',
            error=ModelError,
        )
    for name in experts:
        places = stored_rows(model, name)
        if not places or any(rows is None or rows.ndim != 2 for rows in places.values()):
            return Refusal(
                f"{name} is stored as one tensor of all experts",
                where="plan.precision.quantize",
                rule="the format of quantized weights has a matrix for each expert, as most families store them",
                fix='set plan.precision.quantize = "none"',
                error=ModelError,
            )
    widths = {name: layer.in_features for name, layer in layers.items()}
    widths |= {name: weight.shape[-1] for name, weight in experts.items()}
    for name, width in widths.items():
        if width % size:
            return Refusal(
                f"{name} has {width} input channels",
                where="plan.precision.quantize_group_size",
                rule=f"groups of {size} weights do not go over the end of a row",
                fix='choose a smaller group, or plan.precision.quantize = "int8"',
                error=ModelError,
            )
    return None


def apply_quantization(model: nn.Module, anatomy: Anatomy, plan: ResolvedPlan, mesh: DeviceMesh) -> None:
    """Replace the forward of the linear layers of blocks, in place.

    Args:
        model: model after tensor parallelism; a pipeline may have removed parts of it.
        anatomy: anatomy of the blocks on this rank.
        plan: plan.
        mesh: mesh of all ranks.

    Raises:
        PlanError: tensor parallelism divides a group of weights.
    """
    kind, size = plan.precision.quantize, _group_size(plan)
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


def _group_size(plan: ResolvedPlan) -> int:
    """Columns that share a scale; 0: all."""
    return plan.precision.quantize_group_size if plan.precision.quantize == "int4" else 0


def round_expert_weights(
    plan: ResolvedPlan, groups: Mapping[str, dist.ProcessGroup], weights: Mapping[str, Any]
) -> dict[str, Any]:
    """Rounded weights of an experts module, differentiable; for `ExpertPath.rounding`.

    Args:
        plan: plan.
        groups: ranks that have the other columns of a weight, by its name; without it, this rank has all columns.
        weights: exact weights, [experts, out, in], and other parameters, which stay.
    """
    kind, size = plan.precision.quantize, _group_size(plan)
    return {
        name: weight if weight is None or weight.ndim != 3 else rounded(weight, kind, size, groups.get(name))
        for name, weight in weights.items()
    }


def _refuse_divided_groups(name: str, experts: Any, columns: Iterable[str], plan: ResolvedPlan) -> None:
    """Refuse weights whose columns etp divides inside of a group that has one scale."""
    size, ranks = _group_size(plan), plan.parallel.etp
    for key in columns:
        width = getattr(experts, key).shape[-1]
        if size and width // ranks % size:
            raise PlanError(
                f"{name}.{key} has {width} input channels, {width // ranks} on a rank of etp",
                where="plan.precision.quantize_group_size",
                rule=f"etp does not divide a group of {size} weights",
                fix="choose a smaller group, or plan.parallel.etp = 1",
            )


def _quantized_forward(layer: Any, kind: str, group_size: int, group: dist.ProcessGroup | None, inputs: str) -> Any:
    """Forward of a linear layer. A function, because torch.compile would compile each block anew for a `partial`."""

    def forward(x: Tensor) -> Tensor:
        return quantized_linear(x, layer.weight, layer.bias, kind, group_size, group, inputs)

    return forward


def round_experts(build: "Build") -> None:
    """Step of `parallelize`: experts compute with rounded weights."""
    build.begin("round_experts", "replace_operators")
    plan = build.plan
    if plan.precision.quantize == "none":
        return
    for name in dict.fromkeys(weight.rpartition(".")[0] for weight in expert_weights(build.model, build.anatomy)):
        path, groups = build.runtime.experts[name], {}
        if build.expert_mesh is not None and plan.parallel.etp > 1:
            columns = [key for key, dim in split_dims(path.experts).items() if dim == 2]
            _refuse_divided_groups(name, path.experts, columns, plan)
            groups = dict.fromkeys(columns, build.expert_mesh.get_group("etp"))
        path.rounding = partial(round_expert_weights, plan, groups)
