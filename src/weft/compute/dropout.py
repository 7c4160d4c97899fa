"""Counter-based dropout: the mask depends on the position of an element, so every layout of a job drops the same elements.

The random bits are a hash of seed and position instead of the output of a stateful generator (Salmon et al., Parallel Random
Numbers, 2011). Backward computes the mask again, so that nothing of the size of the tensor is saved.
"""

import math
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.compute.jit import DTYPES, device_of, has_triton, jit, tl, triton

Bits = TypeVar("Bits", int, Tensor)
CPU_PART = 2**15
"""Elements whose hashes, in int64, stay in the cache of a core."""


def dropout_mask(seed: int, *indices: Tensor, rate: float) -> Tensor:
    """Dropout factors of the elements of a tensor, which may be a shard of a full tensor.

    Args:
        seed: unique per layer and step.
        indices: int64 vector per dim: indices of its entries in the full tensor, from 0 to 2**32 - 1.
        rate: share of dropped elements, below 1.

    Returns:
        float32 tensor with one dim per vector; elements are 0 or 1 / (1 - rate).
    """
    return _factors(_hashes(seed, *indices), rate)


def _hashes(seed: int, *indices: Tensor) -> Tensor:
    mixed = mix(torch.full((), seed % 2**32, device=indices[0].device))  # no copy, for which the host would wait
    for entries in indices:
        mixed = mix(mixed.unsqueeze(-1) ^ entries)
    return mixed


def _factors(hashes: Tensor, rate: float) -> Tensor:
    return (hashes >= rate * 2**32) / (1 - rate)


def mix(x: Bits) -> Bits:
    """Hash of 32-bit integers, held in int64 or in an integer of Python. Products stay below 2**63."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return (x >> 16) ^ x


def layer_seed(seed: int, layer: int) -> int:
    """Seed of a layer from that of a step and a number of the layer, all below 2**32."""
    return mix((seed + layer) % 2**32)


@torch.library.custom_op("weft::dropout", mutates_args=())
def dropout(
    x: Tensor, seed: Tensor, layer: Tensor, rows: Tensor, tokens: Tensor, first_feature: int, rate: float
) -> Tensor:
    """Multiply a tensor by `dropout_mask`.

    Args:
        x: [B, S, H], floating, of any strides; may be a shard of a full tensor.
        seed, layer: arguments of `layer_seed`, int64 scalars in host memory. As integers they would be constants of compiled
            code, which would be compiled again for each layer and step.
        rows, tokens: indices of the rows [B] and tokens [S] in the full tensor, int64, on the device of x.
        first_feature: index of the first feature in the full tensor.
        rate: share of dropped elements, below 1.

    Returns:
        Contiguous tensor with the shape and dtype of x.
    """
    compute = launch if can_launch(x) else reference
    return compute(x, layer_seed(int(seed), int(layer)), rows, tokens, first_feature, rate)


def reference(x: Tensor, seed: int, rows: Tensor, tokens: Tensor, first_feature: int, rate: float) -> Tensor:
    """`dropout` in operations of torch, on a CPU for parts that stay in the cache; `seed` is that of the layer."""
    features = torch.arange(first_feature, first_feature + x.shape[-1], device=x.device)
    out, hashes = torch.empty(x.shape, dtype=x.dtype, device=x.device), _hashes(seed, rows, tokens)
    part = max(CPU_PART // max(x.shape[-1], 1), 1) if x.device.type == "cpu" else max(hashes.numel(), 1)
    sides = (side.flatten(0, 1).split(part) for side in (x, hashes, out))
    for values, before, result in zip(*sides, strict=True):
        keep = _factors(mix(before[:, None] ^ features), rate)
        torch.mul(values, keep.to(x.dtype), out=result)
    return out


@dropout.register_fake
def _(x: Tensor, seed: Tensor, layer: Tensor, rows: Tensor, tokens: Tensor, first_feature: int, rate: float) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    _, *tensors, ctx.first_feature, ctx.rate = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, gradient: Tensor) -> Any:
    return dropout(gradient, *ctx.saved_tensors, ctx.first_feature, ctx.rate), *[None] * 6


dropout.register_autograd(_differentiate, setup_context=_save)


# Triton

TILE = 2048
"""Elements per program."""
COLUMNS = 256
"""Columns of a tile at most; common widths are multiples."""


def can_launch(x: Tensor) -> bool:
    """True if the kernel supports a tensor and its device."""
    return has_triton() and x.is_cuda and x.dtype in DTYPES and x.numel() > 0


def launch(x: Tensor, seed: int, rows: Tensor, tokens: Tensor, first_feature: int, rate: float) -> Tensor:
    """`dropout` in one Triton kernel; `seed` is that of the layer."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    number, length, width = x.shape
    columns = min(COLUMNS, triton.next_power_of_2(width))
    blocks = triton.cdiv(width, columns)
    mixed, (limit, factor) = mix(seed), keep_rule(rate, x.dtype)
    with device_of(x):
        dropout_kernel[(triton.cdiv(number * length, TILE // columns) * blocks,)](
            *(x, rows.contiguous(), tokens.contiguous(), out),
            mixed - 2**32 * (mixed >= 2**31),  # always int32
            *(first_feature, number * length, length, width, blocks, x.stride(0), x.stride(1)),
            LIMIT=limit,
            FACTOR=factor,
            ROWS=TILE // columns,
            COLUMNS=columns,
            num_warps=4,
        )
    return out


@cache
def keep_rule(rate: float, dtype: torch.dtype) -> tuple[int, float]:
    """Smallest hash that `dropout_mask` keeps, which it finds in float32, and its factor in a dtype."""
    limit = torch.tensor(rate * 2**32, dtype=torch.float32)
    below = torch.nextafter(limit, torch.zeros_like(limit))
    least = math.ceil((limit.double() + below.double()) / 2)
    least += int(torch.tensor(least, dtype=torch.float32) < limit)  # midway, float32 rounds to the even one of both
    return least, float((torch.tensor(1, dtype=torch.float32) / (1 - rate)).to(dtype))


@jit
def mix_kernel(x):  # type: ignore[no-untyped-def]
    """`mix` of uint32, whose products wrap around."""
    x = ((x >> 16) ^ x) * 0x45D9F3B
    x = ((x >> 16) ^ x) * 0x45D9F3B
    return (x >> 16) ^ x


@partial(jit, do_not_specialize=["seed"])  # else it would be compiled once more for seeds that 16 divides
def dropout_kernel(  # type: ignore[no-untyped-def]
    x,
    rows,
    tokens,
    out,
    seed,
    first_feature,
    height,
    length,
    width,
    blocks,
    row_stride,
    token_stride,
    LIMIT: tl.constexpr,
    FACTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    index = program // blocks * ROWS + tl.arange(0, ROWS)
    column = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    row, token = index // length, index % length
    exists = index < height
    mixed = mix_kernel(seed.to(tl.uint32) ^ tl.load(rows + row, mask=exists, other=0).to(tl.uint32))
    mixed = mix_kernel(mixed ^ tl.load(tokens + token, mask=exists, other=0).to(tl.uint32))
    mixed = mix_kernel(mixed[:, None] ^ (first_feature + column).to(tl.uint32)[None, :])
    inside = exists[:, None] & (column < width)[None, :]
    start = row.to(tl.int64) * row_stride + token.to(tl.int64) * token_stride
    value = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    value *= tl.where(mixed >= LIMIT, FACTOR, 0.0)
    tl.store(out + index.to(tl.int64)[:, None] * width + column[None, :], value, mask=inside)
