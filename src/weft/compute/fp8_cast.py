"""Rounding to FP8: each tensor once, into the row-major and the transposed layout that its matmuls need.

FP8 matmuls of H100 take a row-major matrix and a column-major one, that is, both with the summed dim contiguous. An activation,
a gradient and a weight are each in two matmuls that sum over different dims, so that each needs both layouts. Bytes moved per
element of a 16-bit tensor, for both layouts:

    torch, op by op      33    to float32, absolute value, maximum, quotient, cast; transposed copy
    Triton                6    maximum: 2 read; cast: 2 read, 1 + 1 written
    Triton, blocks        4    the maxima of a block are inside of a tile: one pass

In compiled blocks the maximum is computed in operations of torch, which Inductor fuses with the operation that writes the
tensor, so that 4 bytes per element remain.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from weft.compute.jit import DTYPES, device_of, has_triton, jit, num_multiprocessors, tl, triton

BLOCK = 128
"""Values along the sum of a matmul that share a scale with "fp8_block"."""
TENSOR = (0, 0)
"""Shape of a scaled block that means the whole tensor."""

MANTISSA, EXPONENT = 0x7FFFFF, 0x7F800000
"""Bits of a float32."""


class Rounded(NamedTuple):
    """Matrix in FP8, with its scales as in `quantize`."""

    values: Tensor
    scale: Tensor


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    block: tuple[int, int],
    largest: Tensor | None = None,
    *,
    power_of_two: bool = False,
) -> Rounded:
    """Round a matrix to FP8 with a scale for each block, in operations of torch.

    Args:
        x: [R, C]; any strides.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        block: rows and columns of a block, which divide R and C; `TENSOR` for one block.
        largest: float32 scalar: the largest absolute value, if it is known, of `TENSOR`.
        power_of_two: round scales up to powers of two. Rounded values are then exact in 16 bits, and rounding them again with a
            scale of their own changes nothing: ZeRO 3 gathers weights in FP8.

    Returns:
        Contiguous values [R, C] in `dtype`, and float32 scales [R / rows, C / columns] (a scalar for `TENSOR`): the product of
        both is about x.
    """
    parts = x.float()
    if block != TENSOR:
        parts = parts.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    dims = (0, 1) if block == TENSOR else (1, 3)
    if largest is None:
        largest = parts.abs().amax(dims, keepdim=True)
    # The quotient of the largest value is the largest of the dtype, or rounds to it: nothing overflows.
    scale = torch.where(largest > 0, largest / torch.finfo(dtype).max, 1.0)
    if power_of_two:
        scale = round_up(scale)
    values = (parts / scale).to(dtype).reshape(x.shape).contiguous()
    return Rounded(values, scale.squeeze(dims) if scale.ndim else scale)


def round_up(scale: Tensor) -> Tensor:
    """The next power of two of positive float32 numbers; infinity stays."""
    return ((scale.view(torch.int32) + MANTISSA) & EXPONENT).view(torch.float32)


def dequantize(values: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Matrix in float32 from its values and scales; arguments as the results of `quantize`."""
    if block == TENSOR:
        return values.float() * scale
    return values.float() * scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)


def largest_of(x: Tensor) -> Tensor:
    """Largest absolute value of a tensor, as a float32 scalar; NaN if there is one."""
    # Compiled blocks fuse operations of torch with those that write the tensor; a custom operator reads it once more.
    return _largest(x) if torch.compiler.is_compiling() else torch.ops.weft.fp8_largest(x)


def quantize_layouts(
    x: Tensor,
    dtype: torch.dtype,
    block: tuple[int, int],
    largest: Tensor | None = None,
    *,
    power_of_two: bool = False,
    rows: bool = True,
    columns: bool = True,
    after: Tensor | None = None,
) -> tuple[Rounded, Rounded]:
    """Round a matrix to FP8 in two layouts, with one pass over it once the largest value is known.

    Args:
        x: [R, C].
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        block: rows and columns of a scaled block: `TENSOR`, (1, 128), or (128, 128). Blocks divide R and C.
        largest: `largest_of(x)`, for `TENSOR` only.
        power_of_two: as for `quantize`, for `TENSOR` only.
        rows, columns: whether the layout is needed; the values of a layout that is not needed are empty.
        after: tensor that is computed before, and not used. With a gradient here, compiled blocks do not round a weight for
            backward in forward already, and keep it until then, where ZeRO 3 frees the weight.

    Returns:
        `quantize(x, dtype, block)` and `quantize(x.T, dtype, block)`, with the same bits if all values are finite. Blocks of
        tokens, (1, 128), are along the rows of x in the first and along its columns in the second.
    """
    if block == TENSOR:
        top = largest_of(x) if largest is None else largest
        values, transposed, scale = torch.ops.weft.fp8_cast(x, top, dtype, power_of_two, rows, columns, after)
        return Rounded(values, scale), Rounded(transposed, scale)
    results = torch.ops.weft.fp8_cast_blocks(x, dtype, block[0], rows, columns, after)
    return Rounded(*results[:2]), Rounded(*results[2:])


# Operators


@torch.library.custom_op("weft::fp8_largest", mutates_args=())
def fp8_largest(x: Tensor) -> Tensor:
    """Largest absolute value; see `largest_of`."""
    return (launch_largest if can_launch(x) else _largest)(x)


@torch.library.custom_op("weft::fp8_cast", mutates_args=())
def fp8_cast(
    x: Tensor, largest: Tensor, dtype: torch.dtype, power_of_two: bool, rows: bool, columns: bool, after: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Values [R, C], transposed values [C, R] (each empty if it is not needed), and the scale of a matrix."""
    return (launch if can_launch(x) else reference)(x, largest, dtype, power_of_two, rows, columns)


@torch.library.custom_op("weft::fp8_cast_blocks", mutates_args=())
def fp8_cast_blocks(
    x: Tensor, dtype: torch.dtype, block_rows: int, rows: bool, columns: bool, after: Tensor | None
) -> list[Tensor]:
    """Values [R, C], their scales, transposed values [C, R], their scales; blocks of 128 columns and 1 or 128 rows."""
    return (launch_blocks if can_launch(x) else reference_blocks)(x, dtype, block_rows, rows, columns)


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax().float()


def reference(
    x: Tensor, largest: Tensor, dtype: torch.dtype, power_of_two: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`fp8_cast` in operations of torch."""
    values, scale = quantize(x, dtype, TENSOR, largest, power_of_two=power_of_two)
    empty = values.new_empty(0)
    return values if rows else empty, values.T.contiguous() if columns else empty, scale


def reference_blocks(x: Tensor, dtype: torch.dtype, block_rows: int, rows: bool, columns: bool) -> list[Tensor]:
    """`fp8_cast_blocks` in operations of torch."""
    empty = [x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=torch.float32)]
    sides = ((x, rows), (x.T, columns))
    return [
        part for side, needed in sides for part in (quantize(side, dtype, (block_rows, BLOCK)) if needed else empty)
    ]


@fp8_largest.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@fp8_cast.register_fake
def _(
    x: Tensor,
    largest: Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    rows: bool,
    columns: bool,
    after: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    values = x.new_empty(x.shape if rows else 0, dtype=dtype)
    return values, x.new_empty(x.shape[::-1] if columns else 0, dtype=dtype), torch.empty_like(largest)


@fp8_cast_blocks.register_fake
def _(x: Tensor, dtype: torch.dtype, block_rows: int, rows: bool, columns: bool, after: Tensor | None) -> list[Tensor]:
    return _empty_blocks(x, dtype, block_rows, rows, columns)


def _empty_blocks(x: Tensor, dtype: torch.dtype, block_rows: int, rows: bool, columns: bool) -> list[Tensor]:
    """Uninitialized results of `fp8_cast_blocks`."""
    made = []
    for (height, width), needed in ((x.shape, rows), (x.shape[::-1], columns)):
        made.append(x.new_empty((height, width) if needed else 0, dtype=dtype))
        made.append(x.new_empty((height // block_rows, width // BLOCK) if needed else 0, dtype=torch.float32))
    return made


# Triton

LARGEST_BLOCK = 4096
"""Elements per step of a program that looks for the largest value."""
CAST_TILE = 128
"""Rows and columns of a tile of the cast."""
CAST_WARPS = 8
BLOCKS_WARPS = 16


def can_launch(x: Tensor) -> bool:
    """True if the kernels support a tensor and its device."""
    return has_triton() and computes_fp8(x.device) and x.dtype in DTYPES and x.numel() > 0


def computes_fp8(device: torch.device) -> bool:
    """True if a device has FP8 matmuls and casts: CUDA 8.9 or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def launch_largest(x: Tensor) -> Tensor:
    """`fp8_largest` in one Triton kernel."""
    x, bits = x.contiguous(), torch.zeros((), dtype=torch.int32, device=x.device)
    programs = min(triton.cdiv(x.numel(), LARGEST_BLOCK), 8 * num_multiprocessors(x))
    with device_of(x):
        largest_kernel[(programs,)](x, bits, x.numel(), BLOCK=LARGEST_BLOCK, num_warps=8)
    return bits.view(torch.float32)


def launch(
    x: Tensor, largest: Tensor, dtype: torch.dtype, power_of_two: bool, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`fp8_cast` in one Triton kernel."""
    x, (height, width) = x.contiguous(), x.shape
    values = x.new_empty(x.shape if rows else 0, dtype=dtype)
    transposed = x.new_empty((width, height) if columns else 0, dtype=dtype)
    scale = torch.empty_like(largest)
    with device_of(x):
        cast_kernel[(triton.cdiv(height, CAST_TILE), triton.cdiv(width, CAST_TILE))](
            *(x, largest, values, transposed, scale, height, width),
            TOP=torch.finfo(dtype).max,
            POWER=power_of_two,
            ROWS=rows,
            COLUMNS=columns,
            TILE=CAST_TILE,
            num_warps=CAST_WARPS,
        )
    return values, transposed, scale


def launch_blocks(x: Tensor, dtype: torch.dtype, block_rows: int, rows: bool, columns: bool) -> list[Tensor]:
    """`fp8_cast_blocks` in one Triton kernel."""
    x, (height, width) = x.contiguous(), x.shape
    made = _empty_blocks(x, dtype, block_rows, rows, columns)
    with device_of(x):
        cast_blocks_kernel[(height // BLOCK, width // BLOCK)](
            *(x, *made, height, width),
            TOP=torch.finfo(dtype).max,
            SQUARE=block_rows == BLOCK,
            ROWS=rows,
            COLUMNS=columns,
            TILE=BLOCK,
            num_warps=BLOCKS_WARPS,
        )
    return made


@jit
def magnitude(value):  # type: ignore[no-untyped-def]
    """Bits of the absolute value, which order like it, with NaN above infinity, and whose maximum is the same in any order."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def scale_of(bits, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale of values of which the largest has these bits; exact quotients, as in torch."""
    largest = bits.to(tl.float32, bitcast=True)
    return tl.where(largest > 0, tl.div_rn(largest, TOP), 1.0)


@jit
def largest_kernel(x, bits, num_elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    top = tl.zeros([BLOCK], tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < num_elements:
        index = first + tl.arange(0, BLOCK)
        value = tl.load(x + index, mask=index < num_elements, other=0.0).to(tl.float32)
        top = tl.maximum(top, magnitude(value))
        first += tl.num_programs(0).to(tl.int64) * BLOCK
    tl.atomic_max(bits, tl.max(top, 0))


@jit
def cast_kernel(  # type: ignore[no-untyped-def]
    x,
    largest,
    values,
    transposed,
    scales,
    height,
    width,
    TOP: tl.constexpr,
    POWER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE))[:, None]
    column = (tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE))[None, :]
    inside = (row < height) & (column < width)
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(magnitude(tl.load(largest)), TOP)
    if POWER:  # as `round_up`
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    rounded = tl.div_rn(value, scale).to(values.dtype.element_ty)
    if ROWS:
        tl.store(values + row * width + column, rounded, mask=inside)
    if COLUMNS:
        tl.store(transposed + column * height + row, rounded, mask=inside)
    tl.store(scales, scale)


@jit
def cast_blocks_kernel(  # type: ignore[no-untyped-def]
    x,
    values,
    scales,
    transposed,
    transposed_scales,
    height,
    width,
    TOP: tl.constexpr,
    SQUARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    down, across = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    blocks_down, blocks_across = height // TILE, width // TILE
    row, column = down * TILE + tl.arange(0, TILE), across * TILE + tl.arange(0, TILE)
    value = tl.load(x + row[:, None] * width + column[None, :]).to(tl.float32)
    bits = magnitude(value)
    if SQUARE:
        scale = scale_of(tl.max(tl.max(bits, 1), 0), TOP)
        rounded = tl.div_rn(value, scale).to(values.dtype.element_ty)
        if ROWS:
            tl.store(values + row[:, None] * width + column[None, :], rounded)
            tl.store(scales + down * blocks_across + across, scale)
        if COLUMNS:
            tl.store(transposed + column[None, :] * height + row[:, None], rounded)
            tl.store(transposed_scales + across * blocks_down + down, scale)
    else:
        if ROWS:
            scale = scale_of(tl.max(bits, 1), TOP)
            rounded = tl.div_rn(value, scale[:, None]).to(values.dtype.element_ty)
            tl.store(values + row[:, None] * width + column[None, :], rounded)
            tl.store(scales + row * blocks_across + across, scale)
        if COLUMNS:
            scale = scale_of(tl.max(bits, 0), TOP)
            rounded = tl.div_rn(value, scale[None, :]).to(values.dtype.element_ty)
            tl.store(transposed + column[None, :] * height + row[:, None], rounded)
            tl.store(transposed_scales + column * blocks_down + down, scale)
