"""FP8 matmuls of the linear layers of blocks (Micikevicius et al., FP8 Formats for Deep Learning, 2022).

Weights, activations and gradients are rounded right before each matmul, with scales from their own largest values ("current
scaling"), so that nothing overflows. Sums are in float32, and stored weights are unchanged.

    fp8          one scale a tensor; e4m3, and e5m2 for gradients
    fp8_block    one scale for 128 values of a token, and for 128 x 128 of a weight (DeepSeek-V3 Technical Report, 2024); e4m3

The head, routers, norms, attention and experts keep the dtype of forward. Devices without FP8 can compute the same numbers in
float32, slowly, to see what a training run would lose.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 128
"""Values along the sum of a matmul that share a scale with "fp8_block"."""
TENSOR = (0, 0)
"""Shape of a scaled block that means the whole tensor."""


def multiple_of(in_blocks: bool) -> int:
    """Number that must divide all sizes of a matmul: the block, or the alignment of FP8 matmuls on CUDA."""
    return BLOCK if in_blocks else 16


class Fp8Linear(torch.autograd.Function):
    """Linear layer with all three matmuls in FP8. Saves its input in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, in_blocks: bool) -> Tensor:
        of_tokens, of_weight = block_shapes(in_blocks)
        rows = _pad_rows(x.reshape(-1, x.shape[-1]), in_blocks)
        values, scale = quantize(rows, torch.float8_e4m3fn, of_tokens)
        out = fp8_matmul(values, scale, *quantize(weight, torch.float8_e4m3fn, of_weight), x.dtype)
        ctx.save_for_backward(values, scale, weight)
        ctx.in_blocks = in_blocks
        out = out[: x.shape[:-1].numel()].view(*x.shape[:-1], weight.shape[0])
        return out if bias is None else out + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        values, scale, weight = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        rows = _pad_rows(gradient.reshape(-1, gradient.shape[-1]), ctx.in_blocks)
        of_tokens, of_matrix = block_shapes(ctx.in_blocks)
        # With a scale for each block, the range of e4m3 is enough for gradients too.
        kind = torch.float8_e4m3fn if ctx.in_blocks else torch.float8_e5m2
        given, given_scale = quantize(rows, kind, of_tokens)
        if ctx.needs_input_grad[0]:
            transposed = quantize(weight.T, torch.float8_e4m3fn, of_matrix)
            of_x = fp8_matmul(given, given_scale, *transposed, gradient.dtype)
            of_x = of_x[: gradient.shape[:-1].numel()].view(*gradient.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            if ctx.in_blocks:  # the sum is over tokens now, so that blocks lie along them
                sides = quantize(rows.T, kind, of_tokens)
                inputs = quantize(dequantize(values, scale, of_tokens).T, torch.float8_e4m3fn, of_tokens)
            else:
                sides, inputs = (given.T.contiguous(), given_scale), (values.T.contiguous(), scale)
            of_weight = fp8_matmul(*sides, *inputs, weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.flatten(0, -2).sum(0)
        return of_x, of_weight, of_bias, None


def block_shapes(in_blocks: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the scaled blocks of tokens and of weights."""
    return ((1, BLOCK), (BLOCK, BLOCK)) if in_blocks else (TENSOR, TENSOR)


def _pad_rows(x: Tensor, in_blocks: bool) -> Tensor:
    """Add rows of zeros up to a multiple of the block, because the gradient of the weight sums over rows."""
    missing = -len(x) % multiple_of(in_blocks)
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def quantize(x: Tensor, dtype: torch.dtype, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Round a matrix to FP8 with a scale for each block.

    Args:
        x: [R, C]; any strides.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        block: rows and columns of a block, which divide R and C; `TENSOR` for one block.

    Returns:
        Contiguous values [R, C] in `dtype`, and float32 scales [R / rows, C / columns] (a scalar for `TENSOR`): the product of
        both is about x.
    """
    parts = x.float()
    if block != TENSOR:
        parts = parts.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    dims = (0, 1) if block == TENSOR else (1, 3)
    largest = parts.abs().amax(dims, keepdim=True)
    # The quotient of the largest value is the largest of the dtype, or rounds to it: nothing overflows.
    scale = torch.where(largest > 0, largest / torch.finfo(dtype).max, 1.0)
    values = (parts / scale).to(dtype).reshape(x.shape).contiguous()
    return values, scale.squeeze(dims)


def dequantize(values: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Matrix in float32 from its values and scales; arguments as the results of `quantize`."""
    if block == TENSOR:
        return values.float() * scale
    return values.float() * scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)


@torch.library.custom_op("weft::fp8_matmul", mutates_args=())
def fp8_matmul(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Product a @ b.T of two quantized matrices, summed in float32.

    Args:
        a, b: [M, K] and [N, K], contiguous, from `quantize`.
        scale_a, scale_b: their scales.
        dtype: dtype of the result.

    Returns:
        [M, N].
    """
    if not a.is_cuda:
        sides = (dequantize(x, scale, _block_of(x, scale)) for x, scale in ((a, scale_a), (b, scale_b)))
        return (next(sides) @ next(sides).T).to(dtype)
    recipes, scales = zip(*(_recipe(x, scale) for x, scale in ((a, scale_a), (b, scale_b))), strict=True)
    return F.scaled_mm(a, b.T, scales[0], recipes[0], scales[1], recipes[1], output_dtype=dtype)


@fp8_matmul.register_fake
def _(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=dtype)


def _block_of(x: Tensor, scale: Tensor) -> tuple[int, int]:
    return TENSOR if scale.ndim == 0 else (x.shape[0] // scale.shape[0], x.shape[1] // scale.shape[1])


def _recipe(x: Tensor, scale: Tensor) -> Any:
    """Kind of scaling, and the scales in the memory layout that cuBLAS takes."""
    block = _block_of(x, scale)
    if block == TENSOR:
        return F.ScalingType.TensorWise, scale
    if block[0] == 1:
        return F.ScalingType.BlockWise1x128, scale.T.contiguous().T
    return F.ScalingType.BlockWise128x128, F.pad(scale, (0, -scale.shape[1] % 4)).T
