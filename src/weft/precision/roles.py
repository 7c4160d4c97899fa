"""Modules that compute in float32 inside a lower-precision forward: routers, norms, the head.

A router compares values that are close to each other; rounding makes it choose other experts (Fedus et al., Switch
Transformers, 2021, selective precision). The loss is always in float32.
"""

from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from weft.anatomy.roles import Anatomy


def compute_in_float32(model: nn.Module, anatomy: Anatomy, roles: Iterable[str]) -> None:
    """Make modules compute in float32 on bfloat16 or float16 inputs, and return outputs in the dtype of the inputs.

    Their weights are the weights of forward, cast while the module runs.

    Args:
        model: model before it is sharded over data ranks; a pipeline may have removed parts of it.
        anatomy: anatomy of the full model.
        roles: any of "router", "norm" and "head".
    """
    names_of = {
        "router": [name for block in anatomy.blocks for name in block.router],
        "norm": [name for block in anatomy.blocks for name in block.norms] + [anatomy.final_norm or ""],
        "head": [anatomy.head],
    }
    modules: dict[str, Any] = dict(model.named_modules())
    for name in {name for role in roles for name in names_of[role] if name}:
        if name in modules:
            module = modules[name]
            module.forward = _in_float32(module)


def _in_float32(module: nn.Module) -> Any:
    """Forward of a module in float32. A function, because torch.compile would compile each block anew for a `partial`."""
    forward = module.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _run_in_float32(module, forward, *args, **kwargs)

    return run


def _run_in_float32(module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    given = {value.dtype for value in (*args, *kwargs.values()) if _is_half(value)}
    if not given:
        return forward(*args, **kwargs)
    (dtype,) = given
    tables = [part._parameters for part in module.modules()]
    weights = [(table, name, weight) for table in tables for name, weight in table.items() if _is_half(weight)]
    for table, name, weight in weights:
        table[name] = weight.float()  # type: ignore[assignment, union-attr]
    try:
        output = forward(*tree_map_only(Tensor, _to_float32, args), **tree_map_only(Tensor, _to_float32, kwargs))
    finally:
        for table, name, weight in weights:
            table[name] = weight
    return tree_map_only(Tensor, lambda value: value.to(dtype) if value.dtype == torch.float32 else value, output)


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _to_float32(value: Tensor) -> Tensor:
    return value.float() if _is_half(value) else value
