"""Plain copy of a model that trains under a plan, for code that needs full weights, such as generation.

A sharded model would gather its weights for each generated token, and would wait for ranks that generate longer; a model
that is split over tp or cp has no key-value cache. The copy is the unmodified model: weights are gathered once, one tensor
at a time.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.checkpoint.huggingface import full_weights
from weft.integrations.models import core_of
from weft.parallel.data.fsdp import free_gathered_weights
from weft.parallel.runtime import runtime
from weft.precision.dtypes import DTYPES


def structure_of(model: Any) -> Any:
    """Copy of a model without memory: its parameters are on the meta device, its buffers are copied.

    Args:
        model: model of Transformers or of PEFT, before it is parallelized.
    """
    without_memory = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        for parameter in model.parameters()
    }
    structure = copy.deepcopy(model, dict(without_memory))
    for module in structure.modules():  # a forward that a library has set on the object, as TRL does, calls that object
        module.__dict__.pop("forward", None)
    return structure


@contextmanager
def with_full_weights(structure: Any, model: Any) -> Iterator[Any]:
    """Context with the plain model, whose memory is freed at the end. Collective at the start alone.

    Args:
        structure: copy of `model` by `structure_of`.
        model: model of Transformers or of PEFT, parallelized without a pipeline.
    """
    core = core_of(model)
    free_gathered_weights(core)
    dtype = DTYPES[runtime(core).plan.precision.param_dtype]
    before = dict(core_of(structure).named_parameters(remove_duplicate=False))
    buffers = dict(core_of(structure).named_buffers())
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, full in full_weights(core):
        if name in before:
            made[before[name]] = nn.Parameter(_own(full, dtype), requires_grad=False)
        else:
            buffers[name].copy_(full)  # training may have changed it
    _set_parameters(core_of(structure), {name: made[parameter] for name, parameter in before.items()})
    try:
        modes = {name: module.training for name, module in model.named_modules()}
        for name, module in structure.named_modules():
            module.training = modes.get(name, model.training)
        yield structure
    finally:
        _set_parameters(core_of(structure), before)


def _own(full: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy of a full weight in memory of its own, which the next update does not change."""
    return full.detach().to(dtype if full.is_floating_point() else full.dtype, copy=True)


def _set_parameters(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        owner, _, last = name.rpartition(".")
        module.get_submodule(owner).register_parameter(last, parameter)
