"""Rows rounded to 8 bits as by the experts of a plan with `comm.expert_compression`; written without Weft's code."""

from typing import Any

import torch
from torch import Tensor

from weft.anatomy.transformers import read_anatomy

LARGEST = {"int8": 127, "fp8": 448}


def rounded(rows: Tensor, kind: str) -> Tensor:
    """Round each block of 128 elements of the last dim to multiples of, or to e4m3 times, a power of two."""
    parts = []
    for block in rows.float().double().split(128, -1):
        largest = block.abs().amax(-1, keepdim=True)
        scale = torch.where(largest > 0, 2.0 ** torch.log2(largest / LARGEST[kind]).ceil(), 1.0)
        scaled, step = block / scale, torch.ones_like(block)
        if kind == "fp8":  # three bits of mantissa; below 2^-6 the steps are equal
            step = 2.0 ** (torch.log2(scaled.abs().clamp_min(2.0**-6)).floor() - 3)
        parts.append((scaled / step).round() * step * scale)
    return torch.cat(parts, -1).to(rows.dtype)


class RoundForward(torch.autograd.Function):
    """Rounding with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        return rounded(x, kind)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class RoundBackward(torch.autograd.Function):
    """Identity with a rounded gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return rounded(gradient, ctx.kind), None


def round_experts(experts: Any, kind: str, levels: int = 1) -> None:
    """Let an experts module of one process compute each copy of a token from rounded rows, with rounded gradients, in place.

    Args:
        experts: untouched experts module.
        kind: "int8" or "fp8".
        levels: 2 if gradients travel between hosts, and then inside of a host.
    """
    forward = experts.forward

    def compute(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        top_k = index.shape[1]
        rows = RoundForward.apply(hidden, kind).repeat_interleave(top_k, 0)
        outputs = forward(rows, index.reshape(-1, 1), weights.new_ones(index.numel(), 1))
        copies = RoundBackward.apply(outputs, kind).view(*index.shape, -1) * weights[..., None]
        total = copies.sum(1).to(hidden.dtype)
        return RoundBackward.apply(total, kind) if levels == 2 else total

    experts.forward = compute


def round_model(model: Any, kind: str, levels: int = 1) -> None:
    """`round_experts` for all experts of a model."""
    for name in (name for block in read_anatomy(model).blocks for name in block.experts):
        round_experts(model.get_submodule(name), kind, levels)
