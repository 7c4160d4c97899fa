"""RMSNorm (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019): one kernel in forward and one in backward.

Only the inputs are saved for backward, which computes the root mean square again: a row is read once either way. The gradient
of the weight is a sum of partial sums, one per program, so that every run gives the same bits.
"""

from typing import Any

import torch
from torch import Tensor

from weft.compute.jit import DTYPES, as_rows, capability_of, device_of, has_triton, jit, num_multiprocessors, tl, triton

LONGEST_ROW_BYTES = 32768
"""Longest row of the Triton kernels, which hold a row in registers; longer rows use the reference."""
TILE = 2048
"""Elements of several short rows, such as those of query and key norms, that one program computes together."""


@torch.library.custom_op("weft::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast_first: bool) -> Tensor:
    """RMSNorm over the last dim: x / sqrt(mean(x**2) + eps) * (offset + weight), computed in float32.

    Args:
        x: input of any shape and strides.
        weight: one factor per element of a row; None for no weight.
        eps: added to the mean of the squares.
        offset: 1 for models that store the weight minus one, otherwise 0.
        cast_first: True to round the normalized values to the dtype of x before the weight multiplies them (Llama). The
            output has the dtype of this product then, otherwise the dtype of x.

    Returns:
        Contiguous tensor with the shape of x.
    """
    compute = launch if can_launch(x, weight) else reference
    return compute(x, weight, eps, offset, cast_first)


@torch.library.custom_op("weft::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, weight_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the input and of the weight; the second is empty without `weight_gradient`."""
    compute = launch_backward if can_launch(x, weight) else reference_backward
    return compute(gradient, x, weight, eps, offset, weight_gradient)


def reference(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast_first: bool) -> Tensor:
    """RMSNorm in operations of torch."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype).contiguous()
    if cast_first:
        return ((weight + offset if offset else weight) * y.to(x.dtype)).contiguous()
    return ((offset + weight.float()) * y).to(x.dtype).contiguous()


def reference_backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, weight_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of RMSNorm in operations of torch."""
    y, dy = x.float(), gradient.float()
    scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    y = y * scale
    dw = x.new_empty(0)
    if weight is not None:
        dw = (dy * y).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype) if weight_gradient else weight.new_empty(0)
        dy = dy * (offset + weight.float())
    dx = scale * (dy - y * (dy * y).mean(-1, keepdim=True))
    return dx.to(x.dtype).contiguous(), dw


def _output_dtype(x: Tensor, weight: Tensor | None, cast_first: bool) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if cast_first and weight is not None else x.dtype


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast_first: bool) -> Tensor:
    return torch.empty(x.shape, dtype=_output_dtype(x, weight, cast_first), device=x.device)


@rms_norm_backward.register_fake
def _(
    gradient: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, weight_gradient: bool
) -> tuple[Tensor, Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if weight is None:
        return dx, x.new_empty(0)
    return dx, weight.new_empty(weight.shape if weight_gradient else 0)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, ctx.eps, ctx.offset, _ = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    needs_weight = weight is not None and ctx.needs_input_grad[1]
    dx, dw = torch.ops.weft.rms_norm_backward(gradient, x, weight, ctx.eps, ctx.offset, needs_weight)
    return dx, dw if needs_weight else None, None, None, None


rms_norm.register_autograd(_differentiate, setup_context=_save)


# Triton


def can_launch(x: Tensor, weight: Tensor | None) -> bool:
    """True if the kernels support tensors of these shapes and dtypes on their device."""
    known = x.dtype in DTYPES and (weight is None or weight.dtype in DTYPES)
    return (
        has_triton() and x.is_cuda and known and x.numel() > 0 and x.shape[-1] * x.element_size() <= LONGEST_ROW_BYTES
    )


def launch(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast_first: bool) -> Tensor:
    """RMSNorm in one Triton kernel."""
    rows = as_rows(x)
    y = torch.empty(x.shape, dtype=_output_dtype(x, weight, cast_first), device=x.device)
    block, tile, warps = sizes(x.shape[-1], capability_of(x))
    with device_of(x):
        forward_kernel[(triton.cdiv(len(rows), tile),)](
            *(rows, x if weight is None else weight.contiguous(), y, len(rows), x.shape[-1], rows.stride(0), eps),
            HAS_WEIGHT=weight is not None,
            OFFSET=offset,
            CAST_FIRST=cast_first,
            ROWS=tile,
            BLOCK=block,
            num_warps=warps,
        )
    return y


def launch_backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, weight_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of RMSNorm in one Triton kernel, and a sum over its programs."""
    rows, dy, width = as_rows(x), as_rows(gradient), x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, tile, warps = sizes(width, capability_of(x))
    programs = min(triton.cdiv(len(rows), tile), num_multiprocessors(x) * (32 // warps))
    sums = torch.empty(programs if weight_gradient else 0, width, dtype=torch.float32, device=x.device)
    with device_of(x):
        backward_kernel[(programs,)](
            *(dy, rows, x if weight is None else weight.contiguous(), dx, sums if weight_gradient else dx),
            *(len(rows), width, dy.stride(0), rows.stride(0), eps),
            HAS_WEIGHT=weight is not None,
            WEIGHT_GRADIENT=weight_gradient,
            OFFSET=offset,
            ROWS=tile,
            BLOCK=block,
            num_warps=warps,
        )
    if weight is None:
        return dx, x.new_empty(0)
    return dx, sums.sum(0).to(weight.dtype) if weight_gradient else weight.new_empty(0)


def sizes(width: int, capability: int) -> tuple[int, int, int]:
    """Elements of a row rounded up to a power of two, rows per tile, and warps, for a device of a compute capability."""
    block = triton.next_power_of_2(width)
    rows = max(TILE // block, 1)
    of_long_rows = {8192: 32, 16384: 16 if capability < 100 else 8}  # others spill in the backward
    return block, rows, of_long_rows.get(block, max(rows * block // 512, 4))


@jit
def forward_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    y,
    rows,
    width,
    x_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    value = value * scale[:, None]
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + OFFSET
        if CAST_FIRST:
            value = value.to(x.dtype.element_ty).to(tl.float32)
        value = value * factor
    tl.store(y + row * width + column, value, mask=inside)


@jit
def backward_kernel(  # type: ignore[no-untyped-def]
    dy,
    x,
    weight,
    dx,
    sums,
    rows,
    width,
    dy_stride,
    x_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    first = program * ROWS
    while first < rows:
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < width)
        value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(dy + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
        value = value * scale
        if WEIGHT_GRADIENT:
            total += gradient * value
        if HAS_WEIGHT:
            gradient *= tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + OFFSET
        mean = (tl.sum(gradient * value, 1) / width)[:, None]
        tl.store(dx + row * width + column, scale * (gradient - value * mean), mask=inside)
        first += tl.num_programs(0) * ROWS
    if WEIGHT_GRADIENT:
        tl.store(sums + program * width + column, tl.sum(total, 0)[None, :], mask=column < width)
