"""Triton kernels of the linear cross entropy: softmax statistics of rows of logits, and their gradient in place.

Each reads the logits once in the dtype of the head's matmul, and computes in float32. In operations of torch the same takes
about eight passes over float32 logits.
"""

import torch
from torch import Tensor

from weft.compute.jit import DTYPES, device_of, has_triton, jit, tl, triton

BLOCK, WARPS = 4096, 8


def can_launch(logits: Tensor) -> bool:
    """True if the kernels support logits of this dtype on this device."""
    return has_triton() and logits.is_cuda and logits.dtype in DTYPES and logits.stride(-1) == 1


@torch.library.custom_op("weft::softmax_statistics", mutates_args=())
def softmax_statistics(logits: Tensor, targets: Tensor, start: int, scale: float, softcap: float) -> Tensor:
    """Statistics of transformed logits z = softcap * tanh(scale * x / softcap), or scale * x with softcap 0.

    Args:
        logits: x, [tokens, part of the vocabulary] on CUDA.
        targets: [tokens] indices in the full vocabulary.
        start: first index of the part.
        scale: factor of the logits.
        softcap: bound of the logits; 0 for none.

    Returns:
        float32 [3, tokens]: largest z, sum of exp(z - largest), and z of the target, which is 0 outside of the part.
    """
    found = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    with device_of(logits):
        statistics_kernel[(len(logits),)](
            *(logits, targets, found, len(logits), logits.shape[1], logits.stride(0), start, scale, softcap),
            SOFTCAP=softcap > 0,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return found


@softmax_statistics.register_fake
def _(logits: Tensor, targets: Tensor, start: int, scale: float, softcap: float) -> Tensor:
    return torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)


@torch.library.custom_op("weft::softmax_gradient", mutates_args=("logits",))
def softmax_gradient(
    logits: Tensor, targets: Tensor, lse: Tensor, ignored: int, start: int, scale: float, softcap: float
) -> None:
    """Write the gradient of the sum of cross entropies over the logits; arguments as for `softmax_statistics`.

    Args:
        lse: float32 [tokens], log of the sum of exp(z) over the full vocabulary.
        ignored: index of targets that do not count, whose rows become 0.
    """
    with device_of(logits):
        gradient_kernel[(len(logits), triton.cdiv(logits.shape[1], BLOCK))](
            *(logits, targets, lse, logits.shape[1], logits.stride(0), ignored, start, scale, softcap),
            SOFTCAP=softcap > 0,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


@softmax_gradient.register_fake
def _(logits: Tensor, targets: Tensor, lse: Tensor, ignored: int, start: int, scale: float, softcap: float) -> None:
    return None


@jit
def transform(x, scale, softcap, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    z = x.to(tl.float32) * scale
    if SOFTCAP:
        # tanh(y) = 2 sigmoid(2 y) - 1
        z = softcap * (2.0 / (1.0 + tl.exp(-2.0 * z / softcap)) - 1.0)
    return z


@jit
def statistics_kernel(  # type: ignore[no-untyped-def]
    logits, targets, found, tokens, width, stride, start, scale, softcap, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    first = row * 0
    while first < width:
        column = first + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < width, other=float("-inf"))
        z = tl.where(column < width, transform(x, scale, softcap, SOFTCAP), float("-inf"))
        larger = tl.maximum(largest, z)
        # Columns that have seen no logit yet have largest = -inf, and exp(-inf - -inf) is not a number.
        before = tl.where(largest == float("-inf"), 0.0, total * tl.exp(largest - larger))
        total = before + tl.where(z == float("-inf"), 0.0, tl.exp(z - larger))
        largest = larger
        first += BLOCK
    top = tl.max(largest, 0)
    total = tl.sum(tl.where(largest == float("-inf"), 0.0, total * tl.exp(largest - top)), 0)
    target = tl.load(targets + row) - start
    inside = (target >= 0) & (target < width)
    x = tl.load(logits + tl.where(inside, target, 0))
    tl.store(found + row, top)
    tl.store(found + tokens + row, total)
    tl.store(found + 2 * tokens + row, tl.where(inside, transform(x, scale, softcap, SOFTCAP), 0.0))


@jit
def gradient_kernel(  # type: ignore[no-untyped-def]
    logits, targets, lse, width, stride, ignored, start, scale, softcap, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits += row * stride + column
    target = tl.load(targets + row)
    z = transform(tl.load(logits, mask=column < width, other=0.0), scale, softcap, SOFTCAP)
    gradient = tl.exp(z - tl.load(lse + row)) - tl.where(column == target - start, 1.0, 0.0)
    if SOFTCAP:
        gradient *= 1.0 - (z / softcap) * (z / softcap)
    gradient = tl.where(target == ignored, 0.0, gradient * scale)
    tl.store(logits, gradient, mask=column < width)
