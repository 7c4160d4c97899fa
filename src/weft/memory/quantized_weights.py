"""Frozen weights that torchao has quantized: each rank holds them in full, beside the parameters that Weft shards."""

from typing import Any

import torch
from torch import Tensor, nn

from weft.memory.storages import plain_parts


def is_quantized(tensor: Tensor | None) -> bool:
    """True for a weight in a format of torchao, whether or not torchao is installed."""
    return type(tensor).__module__.partition(".")[0] == "torchao"


def quantized_weights(model: nn.Module) -> list[nn.Parameter]:
    """Quantized weights of a model."""
    return [parameter for parameter in model.parameters() if is_quantized(parameter)]


def quantized_bytes(model: nn.Module) -> int:
    """Bytes of the quantized weights of a model, with their scales."""
    return sum(part.nbytes for parameter in quantized_weights(model) for part in plain_parts(parameter))


def to_empty(model: nn.Module, device: torch.device) -> None:
    """Allocate uninitialized memory for all parameters and buffers, as `nn.Module.to_empty`, which torchao does not support."""
    slots = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and is_quantized(parameter)
    ]
    for module, name, _ in slots:
        module._parameters[name] = None
    model.to_empty(device=device)
    for module, name, parameter in slots:
        module._parameters[name] = nn.Parameter(_empty_like(parameter, device), requires_grad=False)


def _empty_like(tensor: Any, device: torch.device) -> Any:
    """Uninitialized tensor of the same format and shape."""
    names, context = tensor.__tensor_flatten__()
    parts = {name: torch.empty_like(getattr(tensor, name), device=device) for name in names}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
