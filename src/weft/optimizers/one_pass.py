"""Update of torch's Adam and AdamW with the factor of the gradients inside, so that clipping needs no pass of its own.

    torch      the fused update of torch takes a divisor of the gradients, as for `torch.amp.GradScaler`
    Triton     one kernel (`weft.compute.adamw`), which also reads and writes split weights and quantized states

Both run inside of `optimizer.step`, so that hooks of the optimizer and schedulers see a step. Step hooks of others may read
clipped gradients: with these, gradients are scaled in a separate pass, with the same bits, because only some of the ranks that
hold a copy of a weight may have such hooks.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.compat import step_hooks
from weft.compute.adamw import AdamWTensor, Format, format_of, launch
from weft.memory.quantized_state import BlockState, HalfState, build_map
from weft.memory.storages import local_part
from weft.memory.weights import SplitWeight
from weft.optimizers.adamw import adamw_state

LARGEST_DIVISOR = 1e38
"""Larger divisors are not float32."""


def takes_factor(optimizer: torch.optim.Optimizer) -> bool:
    """True if the update of a fused Adam may multiply the gradients itself: in float32, without step hooks of others.

    A separate pass would round other gradients to their dtype first.
    """
    is_exact = all(
        p.grad is None or local_part(p.grad).dtype == torch.float32
        for group in optimizer.param_groups
        for p in group["params"]
    )
    return is_exact and all(
        (getattr(hook, "__module__", None) or "").startswith("weft.") for hook in step_hooks(optimizer)
    )


def is_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """True for Adam and AdamW of torch, but no subclasses, with fused=True."""
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return is_adam and all(group["fused"] for group in optimizer.param_groups)


def divides(optimizer: torch.optim.Optimizer, factor: float) -> bool:
    """True if torch's fused update can divide all gradients by 1 / factor: the divisor is float32."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    known = all(p.dtype == torch.float32 and p.device.type in ("cpu", "cuda") for p in parameters)
    return known and factor * LARGEST_DIVISOR > 1


def inverse(factor: float | Tensor) -> Tensor:
    """Divisor of the gradients for a factor, a scalar in float32."""
    return (1 / factor).float() if isinstance(factor, Tensor) else torch.tensor(1 / factor, dtype=torch.float32)


@contextmanager
def divisor(
    optimizer: torch.optim.Optimizer, factor: float | Tensor, overflows: Tensor | None = None
) -> Iterator[None]:
    """Let torch's fused update divide the gradients by 1 / factor, in place, as `torch.amp.GradScaler` does.

    Args:
        optimizer: fused Adam or AdamW.
        factor: factor of the gradients; a tensor is a scalar on the device.
        overflows: float32 scalar on the device, 1 to leave all parameters and states as they are; None: 0.
    """
    if not isinstance(factor, Tensor) and factor == 1:
        yield
        return
    optimizer.grad_scale = inverse(factor)  # type: ignore[attr-defined]
    optimizer.found_inf = overflows  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


@torch.no_grad()
def update_in_one_pass(
    optimizer: torch.optim.Optimizer,
    factor: float | Tensor,
    quantize: Callable[[Tensor], None] | None,
    overflows: Tensor | None = None,
) -> dict[Tensor, Tensor]:
    """Update by one kernel the parameters with gradients that it supports; the gradients of the others stay.

    Args:
        optimizer: fused Adam or AdamW; missing states are made.
        factor: factor of the gradients, which are not changed; a scalar on the device needs no wait for its value.
        quantize: quantizes the states of a parameter that have just been made; None to keep them in float32.
        overflows: float32 scalar on the device, 1 to leave all parameters and states as they are; None: 0.

    Returns:
        Gradients of the updated parameters, which are detached from them: `optimizer.step` then updates the others.
    """
    tensors: dict[Format, list[AdamWTensor]] = defaultdict(list)
    gradients: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"] if _supports_group(group) else ():
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            if not state:
                adamw_state(state, parameter)
                if quantize is not None:
                    quantize(parameter)
            tensor = _tensor_of(parameter, state, group)
            kind = format_of(tensor) if tensor is not None else None
            if tensor is not None and kind is not None:
                tensors[kind].append(tensor)
                gradients[parameter] = parameter.grad
    launch(tensors, factor, (build_map(8, signed=True), build_map(8, signed=False)), overflows)
    for parameter in gradients:
        parameter.grad = None
    return gradients


def _supports_group(group: dict[str, Any]) -> bool:
    """True if the kernel computes the update of a parameter group."""
    decoupled = group["decoupled_weight_decay"] or group["weight_decay"] == 0
    return decoupled and not (group["amsgrad"] or group["maximize"] or group["differentiable"])


def _tensor_of(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> AdamWTensor | None:
    """Plain tensors of a parameter and its state on this rank; None if one is stored in another way than the kernel reads."""
    weight, gradient = local_part(parameter), local_part(parameter.grad)  # type: ignore[arg-type]
    planes: tuple[Tensor, ...] = (weight,)
    if isinstance(weight, SplitWeight):
        planes = (weight.high, weight.low) if weight.ties is None else (weight.high, weight.low, weight.ties)
    elif type(weight) not in (Tensor, torch.nn.Parameter):
        return None
    first, second = _moment(state["exp_avg"], signed=True), _moment(state["exp_avg_sq"], signed=False)
    same = parameter.shape == parameter.grad.shape and weight.shape == gradient.shape  # type: ignore[union-attr]
    is_plain = type(gradient) is Tensor and gradient.layout is torch.strided
    if first is None or second is None or not is_plain or not same:
        return None
    settings = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    return AdamWTensor(planes, gradient, first, second, state["step"], *settings)


def _moment(moment: Tensor, *, signed: bool) -> tuple[Tensor, ...] | None:
    local = local_part(moment)
    if isinstance(local, HalfState):
        return (local.half_values,)
    if isinstance(local, BlockState):
        known = local.state_dtype == "int8" and local.signed == signed
        return (local.codes, local.scale) if known else None
    return (local,) if type(local) is Tensor else None
