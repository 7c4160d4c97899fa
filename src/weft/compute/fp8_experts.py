"""FP8 grouped matmuls of experts: a scale for each row of tokens, and for each output of each expert's weight; e4m3.

All three matmuls of a weight are grouped, with the summed dim of both matrices contiguous:

    forward           rows [R, K]           x  weight [E, N, K]         scales [R] and [E, N]
    input gradient    gradient [R, N]       x  weight [E, K, N]         scales [R] and [E, K]
    weight gradient   gradient.T [N, R']    x  rows.T [K, R']           scales [E, N] and [E, K], over the rows of an expert

R' pads the rows of each expert to a multiple of 16, and at least 16, with zeros: the grouped matmul of CUDA wants groups that
begin at multiples of 16 bytes and are not empty. The kernel that transposes the rows writes this padding, so that no other pass
does, and the host never needs the number of rows of an expert.

Rows of tokens arrive in the dtype of forward, also from other ranks of ep. Every tensor is rounded with its own largest values
(current scaling), so that nothing overflows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.compute.experts import clear_empty_groups
from weft.compute.fp8_cast import Rounded, can_launch, computes_fp8, magnitude, quantize, scale_of
from weft.compute.jit import device_of, jit, tl, triton

ALIGNMENT = 16
"""Number that divides the sizes of matrices, and that rows of an expert are padded to."""
E4M3 = torch.float8_e4m3fn


def fp8_grouped_linear(rows: Tensor, weight: Tensor, rows_first: bool, borders: Tensor) -> Tensor:
    """Multiply the rows of each expert by its matrix, in FP8, as `weft.compute.experts.grouped_linear` does in 16 bits.

    Args:
        rows: [R, inputs], sorted by expert; `ALIGNMENT` divides inputs and outputs.
        weight: [experts, outputs, inputs] if `rows_first`, else [experts, inputs, outputs]; bfloat16 or float32.
        rows_first: True if a row of a matrix has the weights of one output.
        borders: int32 [experts]: end of the rows of each expert; results of rows after the last end may be anything.

    Returns:
        [R, outputs] in the dtype of the weight.
    """
    keeps_input = torch.is_grad_enabled() and weight.requires_grad
    return Fp8GroupedLinear.apply(rows.to(weight.dtype), weight, rows_first, borders, keeps_input)


class Fp8GroupedLinear(torch.autograd.Function):
    """Autograd function of `fp8_grouped_linear`. Saves its input in FP8, transposed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, rows_first: bool, borders: Tensor, keeps_input: bool) -> Tensor:
        kept = _transpose_tokens(rows, borders) if keeps_input else ()
        ctx.save_for_backward(*kept, weight, borders)
        ctx.rows_first = rows_first
        matrix = _as_stored(weight) if rows_first else _transpose_matrices(weight)
        return fp8_grouped_matmul(*_by_row(rows), *matrix, borders, weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *kept, weight, borders = ctx.saved_tensors
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            given = _by_row(gradient)
            matrix = _transpose_matrices(weight, given.values) if ctx.rows_first else _as_stored(weight, given.values)
            of_rows = fp8_grouped_matmul(*given, *matrix, borders, gradient.dtype)
        if ctx.needs_input_grad[1]:
            *inputs, ends = kept
            *outputs, _ = _transpose_tokens(gradient, borders)
            sides = (*outputs, *inputs) if ctx.rows_first else (*inputs, *outputs)
            of_weight = fp8_grouped_matmul(*sides, ends, weight.dtype)
        return of_rows, of_weight, None, None, None


def _by_row(rows: Tensor) -> Rounded:
    """Matrix [R, K] with a scale for each row [R]."""
    return Rounded(*torch.ops.weft.fp8_cast_rows(rows, None))


def _as_stored(weight: Tensor, after: Tensor | None = None) -> Rounded:
    """Matrices [E, A, B] with a scale for each row of each of them [E, A]; `after` as in `quantize_layouts`."""
    values, scale = torch.ops.weft.fp8_cast_rows(weight.flatten(0, 1), after)
    return Rounded(values.view(weight.shape), scale.view(weight.shape[:2]))


def _transpose_matrices(weight: Tensor, after: Tensor | None = None) -> Rounded:
    """Transposed matrices [E, B, A] of [E, A, B], with a scale for each row of each of them [E, B]."""
    experts, height, width = weight.shape
    starts = torch.arange(experts, dtype=torch.int32, device=weight.device) * height
    ends, size = starts + height, experts * height
    values, scale = torch.ops.weft.fp8_transpose(weight.flatten(0, 1), starts, ends, starts, size, after)
    return Rounded(values.view(width, experts, height).transpose(0, 1), scale)


def _transpose_tokens(rows: Tensor, borders: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Transposed rows of each expert [K, R'], with a scale for each column and expert [E, K], and ends of the experts in R'."""
    starts = F.pad(borders[:-1], (1, 0))
    padded = ((borders - starts).clamp(min=1) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends = padded.cumsum(0, dtype=torch.int32)
    size = (-(-len(rows) // ALIGNMENT) + len(borders)) * ALIGNMENT  # an upper bound, without waiting for the device
    return (*torch.ops.weft.fp8_transpose(rows, starts, borders, ends - padded, size, None), ends)


# Operators


@torch.library.custom_op("weft::fp8_cast_rows", mutates_args=())
def fp8_cast_rows(x: Tensor, after: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values [R, K] in e4m3 and float32 scales [R] of the rows of a matrix."""
    return (launch_rows if can_launch(x) and x.shape[1] <= LONGEST_ROW else reference_rows)(x)


@torch.library.custom_op("weft::fp8_transpose", mutates_args=())
def fp8_transpose(
    x: Tensor, starts: Tensor, ends: Tensor, targets: Tensor, size: int, after: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Round groups of rows with a scale for each column of a group, and transpose them.

    Args:
        x: [R, K].
        starts, ends: int32 [E]: first row of each group, and the row after its last; groups do not overlap.
        targets: int32 [E]: column of the result where each group begins. Columns between groups are zero up to the next
            multiple of `ALIGNMENT`, and for an empty group up to `ALIGNMENT`; others may be anything.
        size: number of columns of the result.
        after: see `quantize_layouts`.

    Returns:
        e4m3 [K, size], and float32 [E, K].
    """
    return (launch_transpose if can_launch(x) else reference_transpose)(x, starts, ends, targets, size)


def reference_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8_cast_rows` in operations of torch."""
    values, scale = quantize(x, E4M3, (1, x.shape[1]))
    return values, scale.flatten()


def reference_transpose(x: Tensor, starts: Tensor, ends: Tensor, targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`fp8_transpose` in operations of torch."""
    groups, row = len(ends), torch.arange(len(x), dtype=torch.int32, device=x.device)
    group = torch.searchsorted(ends, row, right=True)  # rows after the last end are in a group that is dropped
    values, index = x.float(), group[:, None].expand(x.shape)
    largest = values.new_zeros(groups + 1, x.shape[1]).scatter_reduce(0, index, values.abs(), "amax")
    scale = torch.where(largest > 0, largest / torch.finfo(E4M3).max, 1.0)
    rounded = (values / scale[group]).to(E4M3).view(torch.uint8)
    target = F.pad(targets - starts, (0, 1))[group] + row
    target = torch.where(group < groups, target, size)
    out = rounded.new_zeros(size + 1, x.shape[1]).index_copy(0, target.long(), rounded)[:size]
    return out.T.contiguous().view(E4M3), scale[:groups].contiguous()


@torch.library.custom_op("weft::fp8_grouped_matmul", mutates_args=())
def fp8_grouped_matmul(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, borders: Tensor, dtype: torch.dtype
) -> Tensor:
    """Grouped matmul of e4m3 matrices with a scale for each row, summed in float32.

    Args:
        a: [R, K], sorted by group; or [N, S].
        b: [E, M, K]: the result is [R, M]. Or [M, S]: it is [E, N, M], and each group sums over its part of S. The last dim
            is contiguous.
        scale_a, scale_b: float32 [R] and [E, M], or [E, N] and [E, M].
        borders: int32 [E]: end of each group in R or S.
        dtype: dtype of the result, which on CUDA is rounded to bfloat16 first.
    """
    if computes_fp8(a.device):
        by_row = F.ScalingType.RowWise
        scales = (scale_a, scale_b) if b.ndim == 3 else (scale_a.flatten(), scale_b.flatten())
        grouped_mm: Any = F.scaled_grouped_mm  # type: ignore[attr-defined]
        found = grouped_mm(a, b.mT, scales[0], by_row, scales[1], by_row, offs=borders).to(dtype)
        return found if b.ndim == 3 else clear_empty_groups(found, borders)
    if b.ndim == 3:
        left, right = a.float() * scale_a[:, None], b.float() * scale_b[..., None]
    else:
        column = torch.arange(a.shape[1], dtype=torch.int32, device=a.device)
        group = torch.searchsorted(borders, column, right=True).clamp(max=len(borders) - 1)
        left, right = a.float() * scale_a.T[:, group], b.float() * scale_b.T[:, group]
    return F.grouped_mm(left, right.mT, offs=borders).to(dtype)


@fp8_cast_rows.register_fake
def _(x: Tensor, after: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(len(x), dtype=torch.float32)


@fp8_transpose.register_fake
def _(
    x: Tensor, starts: Tensor, ends: Tensor, targets: Tensor, size: int, after: Tensor | None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[1], size, dtype=E4M3), x.new_empty(len(ends), x.shape[1], dtype=torch.float32)


@fp8_grouped_matmul.register_fake
def _(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, borders: Tensor, dtype: torch.dtype) -> Tensor:
    groups = () if b.ndim == 3 else (len(borders),)
    return a.new_empty(*groups, len(a), b.shape[-2], dtype=dtype)


# Triton

LONGEST_ROW = 16384
"""Longest row of the kernel that holds a row in registers; longer rows use the reference."""
TRANSPOSE_ROWS, TRANSPOSE_COLUMNS, TRANSPOSE_WARPS = 128, 64, 8
"""Rows and columns of a tile, a multiple of `ALIGNMENT` each, and warps, of the kernel that transposes."""


def launch_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8_cast_rows` in one Triton kernel, which reads a row once."""
    x, width = x.contiguous(), x.shape[1]
    values, scale = x.new_empty(x.shape, dtype=E4M3), x.new_empty(len(x), dtype=torch.float32)
    block, rows, warps = row_sizes(width)
    with device_of(x):
        cast_rows_kernel[(triton.cdiv(len(x), rows),)](
            *(x, values, scale, len(x), width),
            TOP=torch.finfo(E4M3).max,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    return values, scale


def row_sizes(width: int) -> tuple[int, int, int]:
    """Elements of a row rounded up to a power of two, rows per program, and warps."""
    block = triton.next_power_of_2(width)
    rows = max(4096 // block, 1)
    return block, rows, min(max(rows * block // 512, 4), 16)


def launch_transpose(x: Tensor, starts: Tensor, ends: Tensor, targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`fp8_transpose` in one Triton kernel, which reads the rows of a group twice: the second time mostly from cache."""
    x, width = x.contiguous(), x.shape[1]
    values = x.new_empty(width, size, dtype=E4M3)
    scale = x.new_empty(len(ends), width, dtype=torch.float32)
    with device_of(x):
        transpose_kernel[(triton.cdiv(width, TRANSPOSE_COLUMNS), len(ends))](
            *(x, starts, ends, targets, values, scale, size, width),
            TOP=torch.finfo(E4M3).max,
            ALIGNMENT=ALIGNMENT,
            ROWS=TRANSPOSE_ROWS,
            COLUMNS=TRANSPOSE_COLUMNS,
            num_warps=TRANSPOSE_WARPS,
        )
    return values, scale


@jit
def cast_rows_kernel(  # type: ignore[no-untyped-def]
    x,
    values,
    scales,
    height,
    width,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < height) & (column < width)
    value = tl.load(x + row[:, None] * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(magnitude(value), 1), TOP)
    rounded = tl.div_rn(value, scale[:, None]).to(values.dtype.element_ty)
    tl.store(values + row[:, None] * width + column, rounded, mask=inside)
    tl.store(scales + row, scale, mask=row < height)


@jit
def transpose_kernel(  # type: ignore[no-untyped-def]
    x,
    starts,
    ends,
    targets,
    values,
    scales,
    size,
    width,
    TOP: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    start = tl.load(starts + group)
    num_rows = tl.load(ends + group) - start
    x += start.to(tl.int64) * width
    values += tl.load(targets + group)
    top = tl.zeros([ROWS, COLUMNS], tl.int32)
    first = tl.zeros([], tl.int32)
    while first < num_rows:
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < num_rows) & (column < width)
        value = tl.load(x + row.to(tl.int64) * width + column, mask=inside, other=0.0).to(tl.float32)
        top = tl.maximum(top, magnitude(value))
        first += ROWS
    scale = scale_of(tl.max(top, 0), TOP)[None, :]
    tl.store(scales + group.to(tl.int64) * width + column, scale, mask=column < width)
    padded = (tl.maximum(num_rows, 1) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    first = tl.zeros([], tl.int32)
    while first < padded:
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < num_rows) & (column < width)
        value = tl.load(x + row.to(tl.int64) * width + column, mask=inside, other=0.0).to(tl.float32)
        rounded = tl.div_rn(value, scale).to(values.dtype.element_ty)
        tl.store(values + column.to(tl.int64) * size + row, rounded, mask=(row < padded) & (column < width))
        first += ROWS
