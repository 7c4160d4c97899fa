"""Quantization in training: a linear layer computes with rounded weights, and its gradient updates the exact ones.

Rounding has no slope; backward treats it as the identity (straight-through: Bengio et al., 2013; Jacob et al., Quantization and
Training of Neural Networks, 2018). The grid spans the whole range of each group, so that nothing is clipped.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.comm.stopwatch import blocking

LEVELS = {"int8": (-128.0, 127.0), "int4": (-8.0, 7.0), "fp8": (-448.0, 448.0)}
"""Lowest and highest level of a format."""


def to_level(values: Tensor, kind: str) -> Tensor:
    """Round float32 numbers to the nearest level of a format; they are in its range."""
    return values.to(torch.float8_e4m3fn).float() if kind == "fp8" else values.round()


def full_range_scales(weight: Tensor, kind: str, group_size: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Scales with which the levels span the range of each group of weights.

    Args:
        weight: [out, in].
        kind: int8, int4 or fp8.
        group_size: columns that share a scale; 0: all.
        group: ranks that have the other columns of the same rows; None: this rank has all.

    Returns:
        [out, groups], float32, with values of the dtype of the weight; 1 for groups of zeros.
    """
    lowest, highest = LEVELS[kind]
    groups = weight.float().unflatten(1, (-1, group_size or weight.shape[1]))
    scales = torch.maximum(groups.amin(2).clamp(max=0) / lowest, groups.amax(2).clamp(min=0) / highest)
    if group is not None and not group_size:
        with blocking(group):
            dist.all_reduce(scales, dist.ReduceOp.MAX, group)
    scales = scales.to(weight.dtype).float()
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def round_to_grid(weight: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Nearest values of the grid.

    Args:
        weight: [out, in].
        scales: [out, groups], float32.
        kind: int8, int4 or fp8.

    Returns:
        [out, in], in the dtype of the weight.
    """
    lowest, highest = LEVELS[kind]
    groups = weight.float().unflatten(1, (scales.shape[1], -1))
    levels = to_level((groups / scales[..., None]).clamp(lowest, highest), kind)
    return (levels * scales[..., None]).flatten(1).to(weight.dtype)


def token_scales(x: Tensor, kind: str, group: dist.ProcessGroup | None = None) -> Tensor:
    """Scales with which the levels span the range of each token, as compressed-tensors computes them for a served model.

    Args:
        x: inputs of a layer [..., in].
        kind: int8 or fp8.
        group: ranks that have the other channels of the same tokens; None: this rank has all.

    Returns:
        [..., 1], in the dtype of x; 1 for tokens of zeros.
    """
    lowest, highest = LEVELS[kind]
    largest = x.detach().abs().amax(-1, keepdim=True)
    if group is not None:
        with blocking(group):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return torch.where(largest > 0, largest / ((highest - lowest) / 2), 1.0)


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kind: str,
    group_size: int,
    group: dist.ProcessGroup | None = None,
    inputs: str = "none",
) -> Tensor:
    """Linear layer with rounded weights, and perhaps rounded inputs, neither of which are kept for backward.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out], or None.
        kind: int8, int4 or fp8.
        group_size: columns that share a scale; 0: all.
        group: ranks that have the other columns of the same rows; None: this rank has all.
        inputs: int8 or fp8, to which each token is rounded; none: not rounded.
    """
    return _QuantizedLinear.apply(x, weight, bias, kind, group_size, group, inputs)


def rounded(weight: Tensor, kind: str, group_size: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Weights rounded to their grids; backward is the identity. They stay in memory until backward.

    Args:
        weight: [..., out, in]: the weights of a layer, or of all experts of a layer.
        kind: int8, int4 or fp8.
        group_size: columns that share a scale; 0: all.
        group: ranks that have the other columns of the same rows; None: this rank has all.
    """
    return _Rounded.apply(weight, kind, group_size, group)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, kind: str, group_size: int, group: dist.ProcessGroup | None) -> Tensor:
        rows = weight.flatten(0, -2)
        return round_to_grid(rows, full_range_scales(rows, kind, group_size, group), kind).view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None, None, None


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kind: str,
        group_size: int,
        group: dist.ProcessGroup | None,
        inputs: str,
    ) -> Tensor:
        scales = full_range_scales(weight, kind, group_size, group)
        of_tokens = None if inputs == "none" else token_scales(x, inputs, group)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, of_tokens, weight, scales)
        ctx.kind, ctx.inputs = kind, inputs
        return F.linear(_round_tokens(x, of_tokens, inputs), round_to_grid(weight, scales, kind), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, of_tokens, weight, scales = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if needs_x:
            of_x = gradient @ round_to_grid(weight, scales, ctx.kind)
        if needs_weight:
            of_weight = gradient.flatten(0, -2).T @ _round_tokens(x, of_tokens, ctx.inputs).flatten(0, -2)
        if needs_bias:
            of_bias = gradient.flatten(0, -2).sum(0)
        return of_x, of_weight, of_bias, None, None, None, None


def _round_tokens(x: Tensor, scales: Tensor | None, kind: str) -> Tensor:
    """Nearest values of the grid of each token [..., in]."""
    if scales is None:
        return x
    lowest, highest = LEVELS[kind]
    return (to_level((x / scales).float().clamp(lowest, highest), kind) * scales).to(x.dtype)
