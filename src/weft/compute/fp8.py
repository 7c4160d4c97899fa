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

from weft.compute.fp8_cast import BLOCK, TENSOR, computes_fp8, dequantize, largest_of, quantize_layouts


def multiple_of(in_blocks: bool) -> int:
    """Number that must divide all sizes of a matmul: the block, or the alignment of FP8 matmuls on CUDA."""
    return BLOCK if in_blocks else 16


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, in_blocks: bool) -> Tensor:
    """Linear layer with all three matmuls in FP8; saves its input in FP8 for backward.

    Args:
        x: [..., K] in bfloat16 or float32.
        weight: [N, K]; `multiple_of(in_blocks)` divides N and K.
        bias: [N], or None.
        in_blocks: one scale for each block instead of one a tensor.

    Returns:
        [..., N] in the dtype of x.
    """
    keeps_input = torch.is_grad_enabled() and weight.requires_grad
    return Fp8Linear.apply(x, weight, bias, in_blocks, keeps_input)


class Fp8Linear(torch.autograd.Function):
    """Autograd function of `fp8_linear`. Each of the three tensors is rounded once, in the layouts that are needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, in_blocks: bool, keeps_input: bool) -> Tensor:
        of_tokens, of_weight = block_shapes(in_blocks)
        rows = _pad_rows(x.reshape(-1, x.shape[-1]), in_blocks)
        given, kept = quantize_layouts(rows, torch.float8_e4m3fn, of_tokens, columns=keeps_input)
        largest = None if in_blocks else largest_of(weight)
        # Scales of weights are powers of two, so that weights that ZeRO 3 gathers in FP8 stay as they are.
        matrix, _ = quantize_layouts(
            weight, torch.float8_e4m3fn, of_weight, largest, power_of_two=not in_blocks, columns=False
        )
        out = fp8_matmul(*given, *matrix, x.dtype)
        ctx.save_for_backward(*kept, weight, largest)
        ctx.in_blocks = in_blocks
        out = out[: x.shape[:-1].numel()].view(*x.shape[:-1], weight.shape[0])
        return out if bias is None else out + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *kept, weight, largest = ctx.saved_tensors
        of_tokens, of_matrix = block_shapes(ctx.in_blocks)
        of_x = of_weight = of_bias = None
        rows = _pad_rows(gradient.reshape(-1, gradient.shape[-1]), ctx.in_blocks)
        # With a scale for each block, the range of e4m3 is enough for gradients too.
        kind = torch.float8_e4m3fn if ctx.in_blocks else torch.float8_e5m2
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        given, transposed = quantize_layouts(rows, kind, of_tokens, rows=needs_x, columns=needs_weight)
        if needs_x:
            _, matrix = quantize_layouts(
                *(weight, torch.float8_e4m3fn, of_matrix, largest),
                power_of_two=not ctx.in_blocks,
                rows=False,
                after=given.values,
            )
            of_x = fp8_matmul(*given, *matrix, gradient.dtype)
            of_x = of_x[: gradient.shape[:-1].numel()].view(*gradient.shape[:-1], weight.shape[1])
        if needs_weight:
            of_weight = fp8_matmul(*transposed, *kept, weight.dtype)
        if needs_bias:
            of_bias = gradient.flatten(0, -2).sum(0)
        return of_x, of_weight, of_bias, None, None


def block_shapes(in_blocks: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the scaled blocks of tokens and of weights."""
    return ((1, BLOCK), (BLOCK, BLOCK)) if in_blocks else (TENSOR, TENSOR)


def _pad_rows(x: Tensor, in_blocks: bool) -> Tensor:
    """Add rows of zeros up to a multiple of the block, because the gradient of the weight sums over rows."""
    missing = -len(x) % multiple_of(in_blocks)
    return F.pad(x, (0, 0, 0, missing)) if missing else x


@torch.library.custom_op("weft::fp8_matmul", mutates_args=())
def fp8_matmul(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Product a @ b.T of two quantized matrices, summed in float32.

    Args:
        a, b: [M, K] and [N, K], contiguous, from `quantize_layouts`.
        scale_a, scale_b: their scales.
        dtype: dtype of the result.

    Returns:
        [M, N].
    """
    if not computes_fp8(a.device):
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
