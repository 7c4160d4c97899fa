"""Parts of a model that compute in float32 whatever the format of forward: routers, norms, the head.

A router compares numbers that are close to each other; rounded, it chooses other experts (Fedus et al., Switch Transformers,
2021, selective precision). The loss is in float32 anyway.
"""

from collections.abc import Iterable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from weft.anatomy.roles import Anatomy


def compute_in_float32(model: nn.Module, anatomy: Anatomy, roles: Iterable[str]) -> None:
    """Let modules take bfloat16 or float16, compute in float32, and give back the format they were given.

    Their weights are those of forward, cast for as long as the module runs.

    Args:
        model: not yet split over data ranks; a pipeline may have left some of it.
        anatomy: of the whole model.
        roles: "router", "norm" or "head".
    """
    found = {
        "router": [name for block in anatomy.blocks for name in block.router],
        "norm": [name for block in anatomy.blocks for name in block.norms] + [anatomy.final_norm or ""],
        "head": [anatomy.head],
    }
    modules: dict[str, Any] = dict(model.named_modules())
    for name in {name for role in roles for name in found[role] if name}:
        if name in modules:
            module = modules[name]
            module.forward = wraps(module.forward)(partial(_run_wide, module, module.forward))


def _run_wide(module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    given = {value.dtype for value in (*args, *kwargs.values()) if _is_short(value)}
    if not given:
        return forward(*args, **kwargs)
    (dtype,) = given
    tables = [part._parameters for part in module.modules()]
    weights = [(table, name, weight) for table in tables for name, weight in table.items() if _is_short(weight)]
    for table, name, weight in weights:
        table[name] = weight.float()  # type: ignore[assignment, union-attr]
    try:
        found = forward(*tree_map_only(Tensor, _widen, args), **tree_map_only(Tensor, _widen, kwargs))
    finally:
        for table, name, weight in weights:
            table[name] = weight
    return tree_map_only(Tensor, lambda value: value.to(dtype) if value.dtype == torch.float32 else value, found)


def _is_short(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _widen(value: Tensor) -> Tensor:
    return value.float() if _is_short(value) else value
