"""FP8 matmuls in the linear layers and experts of blocks; the numbers are in `weft.compute.fp8` and `fp8_experts`."""

from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from weft.anatomy.roles import Anatomy
from weft.compute.experts import experts_forward
from weft.compute.fp8 import fp8_linear, multiple_of
from weft.compute.fp8_experts import ALIGNMENT, fp8_grouped_linear
from weft.compute.variants import Variant, find_experts
from weft.device.device import Device
from weft.errors import PlanError
from weft.parallel.weights import to_local
from weft.plan import ResolvedPlan


def choose_fp8_experts(
    model: nn.Module, anatomy: Anatomy, plan: ResolvedPlan, device: Device | None = None
) -> dict[str, str]:
    """Experts modules that compute by grouped matmuls in FP8, with plan.precision.matmul = "fp8"; the model is not changed.

    Args:
        model: full model.
        anatomy: its anatomy.
        plan: plan.
        device: device that computes; None for one with grouped FP8 matmuls.

    Returns:
        By name of an experts module: "" if it computes in FP8, or the reason why it keeps the dtype of forward.
    """
    lacks_device = device is not None and not device.supports("grouped_matmul") and not plan.precision.emulate_fp8
    reasons = {}
    for name in (name for block in anatomy.blocks for name in block.experts):
        experts: Any = model.get_submodule(name)
        reason = ""
        if plan.precision.matmul != "fp8":
            reason = "grouped matmuls in FP8 have a scale for each row, not for each block"
        elif lacks_device:
            reason = "this device has no grouped FP8 matmuls"
        elif any(size % ALIGNMENT for weight in experts.parameters() for size in weight.shape[1:]):
            reason = f"{ALIGNMENT} does not divide the sizes of their matrices"
        elif not isinstance(variant := find_experts(experts, getattr(model, "config", None)), Variant):
            reason = variant
        reasons[name] = reason
    return reasons


def fp8_experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Forward of gated experts with both grouped matmuls in FP8; arguments and result as in `experts_forward`."""
    return experts_forward(experts, hidden_states, top_k_index, top_k_weights, fp8_grouped_linear)


def find_fp8_layers(
    model: nn.Module, anatomy: Anatomy, plan: ResolvedPlan, *, has_fp8_experts: bool = False
) -> list[str]:
    """Names of the linear layers in attention and MLPs of all blocks whose matmuls are in FP8.

    Layers keep the dtype of forward if a block (16 values with "fp8") does not divide their numbers of features.

    Args:
        model: model; after tensor parallelism, the layers of a rank; a pipeline may have removed parts of it.
        anatomy: anatomy of the blocks on this rank.
        plan: plan.
        has_fp8_experts: True if experts of the model compute in FP8, so that there may be no such layer.

    Raises:
        PlanError: there is no such layer, and no such experts.
    """
    in_blocks = plan.precision.matmul == "fp8_block"
    multiple = multiple_of(in_blocks)
    inside = tuple(f"{name}." for block in anatomy.blocks for name in (*block.attention, *block.mlp))
    outside = tuple(f"{name}." for block in anatomy.blocks for name in (*block.router, *block.experts))
    names = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not name.startswith(inside) or f"{name}.".startswith(outside):
            continue
        if any(size % multiple for size in to_local(module.weight).shape):
            continue
        names.append(name)
    if not names and not has_fp8_experts:
        raise PlanError(
            f"matmul = {plan.precision.matmul!r} for {anatomy.family}",
            where="plan.precision.matmul",
            rule=f"no nn.Linear in attention and MLPs has, on each tp rank, sizes that {multiple} divides",
            fix='set plan.precision.matmul = "forward"' + (' or "fp8"' if in_blocks else ""),
        )
    return names


def apply_fp8(model: nn.Module, names: Iterable[str], plan: ResolvedPlan) -> None:
    """Replace the forward of the linear layers of `find_fp8_layers`, in place."""
    for name in names:
        layer: Any = model.get_submodule(name)
        layer.forward = _fp8_forward(layer, plan.precision.matmul == "fp8_block")


def _fp8_forward(module: Any, in_blocks: bool) -> Any:
    """Forward of a linear layer. A function, because torch.compile would compile each block anew for a `partial`."""

    def forward(x: Tensor) -> Tensor:
        # Tensor parallelism may narrow a weight that all its ranks store: key and value heads fewer than ranks.
        if any(size % multiple_of(in_blocks) for size in module.weight.shape):
            return F.linear(x, module.weight, module.bias)
        return fp8_linear(x, module.weight, module.bias, in_blocks)

    return forward
