"""AdamW update of some parameters (Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from weft.memory.storages import local_part


def adamw_state(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """State of a parameter, with the step count and moments of AdamW."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=local_part(parameter).device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    return state


def update_with_adamw(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
    """Update parameters by the fused AdamW of PyTorch, with states in `optimizer.state`.

    Args:
        optimizer: optimizer of the parameters.
        parameters: parameters with gradients, of a single device and mesh.
        group: settings "lr", "betas", "eps" and "weight_decay".
    """
    if not parameters:
        return
    states = [adamw_state(optimizer.state[parameter], parameter) for parameter in parameters]
    first, second, steps = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
    adamw(
        list(parameters),
        [parameter.grad for parameter in parameters],  # type: ignore[misc]
        first,
        second,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
