"""Step of `parallelize` that packs frozen weights in 4 bits: the bases of QLoRA (Dettmers et al., 2023).

Weights are packed when they have been split over tp, ep and pp ranks, and before FSDP2 shards them. The part of a rank has
whole blocks of the full weight, so that every layout computes with the same values.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from weft.anatomy.roles import Anatomy
from weft.errors import ModelError, PlanError, Refusal
from weft.memory.nf4 import BLOCK, packed
from weft.memory.storages import map_local
from weft.parallel.weights import to_local
from weft.precision.dtypes import DTYPES

if TYPE_CHECKING:
    from weft.parallel.build import Build


def frozen_weights(model: nn.Module, anatomy: Anatomy) -> Iterator[tuple[str, nn.Module, str]]:
    """Frozen weights of linear layers in blocks, but routers, and of experts: full name, module, and name in the module.

    A weight whose rows are not whole blocks is left out: it keeps its dtype.
    """
    routers = tuple(f"{name}." for block in anatomy.blocks for name in block.router)
    experts = {name for block in anatomy.blocks for name in block.experts}
    for block in (*anatomy.blocks, *anatomy.encoder_blocks):
        for name, module in model.get_submodule(block.name).named_modules(prefix=block.name):
            if f"{name}.".startswith(routers):
                continue
            for last, weight in module.named_parameters(recurse=False):
                is_matrix = isinstance(module, nn.Linear | Conv1D) and weight.ndim == 2
                is_stack = name in experts and weight.ndim == 3
                if (is_matrix or is_stack) and not weight.requires_grad and weight.shape[-1] % BLOCK == 0:
                    yield f"{name}.{last}", module, last


def reason_against_frozen_weights(model: nn.Module, anatomy: Anatomy) -> Refusal | None:
    """Reason against frozen weights in 4 bits: the model has none, on any rank.

    Args:
        model: full model, before parallelism.
        anatomy: its anatomy.
    """
    if next(frozen_weights(model, anatomy), None) is not None:
        return None
    return Refusal(
        "plan.precision.frozen_weights = 'nf4' for a model without such weights",
        where="plan.precision.frozen_weights",
        rule=f"frozen weights of linear layers in blocks, and of experts, are packed, with a multiple of {BLOCK} columns",
        fix='freeze the weights (requires_grad_(False)) under adapters, or set plan.precision.frozen_weights = "whole"',
        error=ModelError,
    )


def pack_frozen_weights(build: "Build") -> None:
    """Pack frozen weights in 4 bits, in place.

    Raises:
        PlanError: tensor parallelism divides a block of weights that have one scale.
    """
    build.begin("pack_frozen_weights", "split_tensors", "spread_experts", "run_techniques")
    if build.plan.precision.frozen_weights != "nf4":
        return
    dtype = DTYPES[build.plan.precision.param_dtype]
    done: dict[nn.Parameter, nn.Parameter] = {}  # keeps tied weights tied
    for name, module, last in list(frozen_weights(build.model, build.anatomy)):
        parameter: Any = module._parameters[last]
        if to_local(parameter).shape[-1] % BLOCK:
            raise PlanError(
                f"{name} has {to_local(parameter).shape[-1]} columns on a rank",
                where="plan.precision.frozen_weights",
                rule=f"{BLOCK} weights of a row share a scale, and tensor parallelism does not divide them",
                fix='choose a smaller plan.parallel.tp or plan.parallel.etp, or plan.precision.frozen_weights = "whole"',
            )
        if parameter not in done:
            weight = map_local(parameter.detach(), partial(packed, dtype=dtype))
            done[parameter] = nn.Parameter(weight, requires_grad=False)
        module._parameters[last] = done[parameter]
