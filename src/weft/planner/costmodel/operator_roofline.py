"""Seconds of an operator call on a device by its roofline, from the shapes of its arguments alone."""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from weft.planner.costmodel import roofline
from weft.planner.costmodel.hardware import DeviceSpec
from weft.planner.costmodel.operators import KeywordArguments, Operation, TensorSpec

BACKWARD_ATTENTION = 2.5
"""FLOPs of the backward of fused attention relative to its forward: five matmuls instead of two."""


def roofline_seconds(operation: Operation, device: DeviceSpec) -> float:
    """Seconds of one call: a matmul, a convolution, fused attention, or an operator that reads and writes memory.

    Args:
        operation: call that a dry run has recorded.
        device: specification of the accelerator.
    """
    tensors = list(_tensors(operation.arguments))
    floats = [tensor for tensor in tensors if tensor.dtype.is_floating_point]
    name = operation.name.removeprefix("aten.")
    if name.startswith(("mm.", "addmm.", "bmm.", "baddbmm.")) and len(floats) >= 2:
        first, second = floats[-2:]
        *batch, m, k = first.shape
        return roofline.matmul(device, m, second.shape[-1], k, _dtype(first), prod(batch))
    if "attention" in name and len(floats) >= 3 and all(len(tensor.shape) == 4 for tensor in floats[:3]):
        is_backward = "backward" in name
        query, key = floats[1:3] if is_backward else floats[:2]
        rows, heads, tokens, width = query.shape
        flops = 4.0 * rows * heads * tokens * key.shape[2] * width * (BACKWARD_ATTENTION if is_backward else 1)
        return roofline.flash_attention(device, flops, width, tokens)
    if name.startswith("convolution") and len(floats) >= 2:
        return _convolution(name, floats, device)
    moved = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
    written = max((prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors), default=0)
    return max(roofline.stream(device, moved + written), device.launch)


def _convolution(name: str, floats: list[TensorSpec], device: DeviceSpec) -> float:
    """Convolution as a matmul over its patches, which do not overlap in the models planned here."""
    inputs, weight = floats[1:3] if "backward" in name else floats[:2]
    out, channels, *kernel = weight.shape
    patches = inputs.shape[0] * prod(inputs.shape[2:]) / max(1, prod(kernel))
    times = 2 if "backward" in name else 1
    return times * roofline.matmul(device, patches, out, channels * prod(kernel), _dtype(inputs))


def _dtype(tensor: TensorSpec) -> str:
    return "fp32" if tensor.dtype in (torch.float32, torch.float64) else "bf16"


def _tensors(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, KeywordArguments):
        for _, item in value.items:
            yield from _tensors(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
