"""FP8 matmuls in the linear layers of blocks; the numbers are in `weft.compute.fp8`."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from weft.anatomy.roles import Anatomy
from weft.compute.fp8 import fp8_linear, multiple_of
from weft.errors import PlanError
from weft.memory.quantized_weights import is_quantized
from weft.parallel.weights import to_local
from weft.plan import Plan


def apply_fp8(model: nn.Module, anatomy: Anatomy, plan: Plan) -> list[str]:
    """Replace the forward of linear layers in attention and MLPs of all blocks, in place.

    Layers keep the dtype of forward if a block (16 values with "fp8") does not divide their numbers of features, or if their
    weights are quantized.

    Args:
        model: model after tensor parallelism; a pipeline may have removed parts of it.
        anatomy: anatomy of the blocks on this rank.
        plan: resolved.

    Returns:
        Names of the layers.

    Raises:
        PlanError: there is no such layer.
    """
    in_blocks = plan.precision.matmul == "fp8_block"
    multiple = multiple_of(in_blocks)
    inside = tuple(f"{name}." for block in anatomy.blocks for name in (*block.attention, *block.mlp))
    outside = tuple(f"{name}." for block in anatomy.blocks for name in (*block.router, *block.experts))
    names = []
    modules: dict[str, Any] = dict(model.named_modules())
    for name, module in modules.items():
        if not isinstance(module, nn.Linear) or not name.startswith(inside) or f"{name}.".startswith(outside):
            continue
        if is_quantized(module.weight) or any(size % multiple for size in to_local(module.weight).shape):
            continue
        modules[name].forward = _fp8_forward(module, in_blocks)
        names.append(name)
    if not names:
        raise PlanError(
            f"matmul = {plan.precision.matmul!r} for {anatomy.family}",
            where="plan.precision.matmul",
            rule=f"no nn.Linear in attention and MLPs has, on each tp rank, sizes that {multiple} divides",
            fix='set plan.precision.matmul = "forward"' + (' or "fp8"' if in_blocks else ""),
        )
    return names


def _fp8_forward(module: Any, in_blocks: bool) -> Any:
    """Forward of a linear layer. A function, because torch.compile would compile each block anew for a `partial`."""

    def forward(x: Tensor) -> Tensor:
        # Tensor parallelism may narrow a weight that all its ranks store: key and value heads fewer than ranks.
        if any(size % multiple_of(in_blocks) for size in module.weight.shape):
            return F.linear(x, module.weight, module.bias)
        return fp8_linear(x, module.weight, module.bias, in_blocks)

    return forward
