"""Grouped matmul: rows in groups, one matrix for each group, as the experts of a layer compute them.

torch has `grouped_mm`. In 16 bits on a CPU it calls oneDNN once for each group, which compiles a kernel for each number of
rows that it has not seen (4 to 9 ms and 0.8 MB on an AVX512 core with AMX, many times the matmul). A router sends each expert
other numbers of rows at each step. Here they are rounded up to four sizes per power of two, and few kernels serve all steps.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SIZES = 4
"""Sizes of groups per power of two: at most a quarter of the rows, and an eighth in the mean, are computed in vain."""


def grouped_mm(a: Tensor, b: Tensor, borders: Tensor) -> Tensor:
    """Multiply the rows of each group by its matrix, or sum products over the rows of each group. Differentiable.

    Args:
        a: [R, K], sorted by group; or [M, R].
        b: [groups, K, N]: the result is [R, N], undefined after the last group. Or [R, N]: it is [groups, M, N].
        borders: int32 [groups]: end of each group in R.
    """
    if a.device.type == "cpu" and a.dtype in (torch.bfloat16, torch.float16):
        return few_sizes_grouped_mm(a, b, borders)
    return F.grouped_mm(a, b, offs=borders)


@torch.library.custom_op("weft::grouped_mm", mutates_args=())
def few_sizes_grouped_mm(a: Tensor, b: Tensor, borders: Tensor) -> Tensor:
    """`grouped_mm` by matmuls of few sizes."""
    ends = pairwise([0, *borders.tolist()])
    if b.ndim == 2:
        out = a.new_zeros(len(borders), len(a), b.shape[1])
        for product, (start, end) in zip(out, ends, strict=True):
            if end > start:
                torch.mm(_with_zeros(a.T[start:end]).T, _with_zeros(b[start:end]), out=product)
        return out
    out = a.new_empty(len(a), b.shape[2])
    for matrix, (start, end) in zip(b, ends, strict=True):
        stop = start + rounded_size(end - start)
        if stop <= len(a):  # the rows of later groups get their own products afterwards
            torch.mm(a[start:stop], matrix, out=out[start:stop])
        else:
            out[start:end] = (_with_zeros(a[start:end]) @ matrix)[: end - start]
    return out


def rounded_size(rows: int) -> int:
    """Number of rows rounded up to one of few sizes: multiples of 16, the rows of a tile, and `SIZES` per power of two."""
    step = max(16, (1 << max(rows - 1, 0).bit_length()) // 2 // SIZES)
    return -(-rows // step) * step


def _with_zeros(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, 0, 0, rounded_size(len(rows)) - len(rows)))


@few_sizes_grouped_mm.register_fake
def _(a: Tensor, b: Tensor, borders: Tensor) -> Tensor:
    return a.new_empty(len(borders), len(a), b.shape[1]) if b.ndim == 2 else a.new_empty(len(a), b.shape[2])


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> Any:
    a, b, borders = ctx.saved_tensors
    needs_a, needs_b, _ = ctx.needs_input_grad
    of_a = grouped_mm(gradient, b.mT, borders) if needs_a else None
    return of_a, grouped_mm(a.T, gradient, borders) if needs_b else None, None


few_sizes_grouped_mm.register_autograd(_differentiate, setup_context=_save)
