"""Rotary position embedding (Su et al., RoFormer, 2021), rotate-half form: one kernel for a tensor instead of nine.

Only cosines and sines are saved for backward, which is the rotation by the opposite angles. They get no gradient.
"""

from typing import Any

import torch
from torch import Tensor

from weft.compute.jit import DTYPES, device_of, has_triton, jit, tl, triton

TILE = 2048
"""Elements of the heads that one program rotates."""


@torch.library.custom_op("weft::rotary", mutates_args=())
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, as `apply_rotary_pos_emb` of Transformers does.

    Args:
        q: queries [batch, heads, sequence, head_dim], of any strides.
        k: keys, with their own number of heads.
        cos: cosines [batch or 1, sequence, head_dim].
        sin: sines, with the shape and dtype of cos.

    Returns:
        New tensors with the strides of q and k.
    """
    return reference(q, cos, sin), reference(k, cos, sin)


@torch.library.custom_op("weft::rotary_backward", mutates_args=())
def rotary_backward(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of queries and keys."""
    return reference_backward(dq, cos, sin), reference_backward(dk, cos, sin)


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotation in operations of torch."""
    first, second = x.chunk(2, -1)
    rotated = x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)
    return torch.empty_like(x, dtype=rotated.dtype).copy_(rotated)


def reference_backward(gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradient of the rotated tensor in operations of torch."""
    first, second = (gradient * sin.unsqueeze(1)).chunk(2, -1)
    result = gradient * cos.unsqueeze(1) + torch.cat((second, -first), -1)
    return torch.empty_like(gradient, dtype=result.dtype).copy_(result)


def _like(x: Tensor, cos: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, cos.dtype))


@rotary.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _like(q, cos), _like(k, cos)


@rotary_backward.register_fake
def _(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _like(dq, cos), _like(dk, cos)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, cos, sin = inputs
    ctx.dtypes = q.dtype, k.dtype
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
    gradients = torch.ops.weft.rotary_backward(dq, dk, *ctx.saved_tensors)
    return *(gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)), None, None


rotary.register_autograd(_differentiate, setup_context=_save)


# Triton


def can_launch(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """True if the kernel supports tensors of these shapes and dtypes."""
    is_known = x.dtype in DTYPES and cos.dtype in DTYPES and sin.dtype == cos.dtype
    fits = x.ndim == 4 and cos.ndim == 3 and cos.shape == sin.shape and x.shape[-1] % 2 == 0
    return has_triton() and is_known and fits and cos.shape[1:] == x.shape[2:] and x.numel() > 0


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    if can_launch(x, cos, sin):
        return launch(x, cos, sin, backward)
    return (reference_backward if backward else reference)(x, cos, sin)


@rotary.register_kernel("cuda")
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotate(q, cos, sin, backward=False), _rotate(k, cos, sin, backward=False)


@rotary_backward.register_kernel("cuda")
def _(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotate(dq, cos, sin, backward=True), _rotate(dk, cos, sin, backward=True)


def launch(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    """Rotation, or its gradient, in one Triton kernel."""
    y = _like(x, cos)
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, length, width = x.shape
    cos, sin = (table.expand(batch, length, width) for table in (cos, sin))
    cos, sin = (table if table.stride(-1) == 1 else table.contiguous() for table in (cos, sin))
    half, tile = sizes(heads, width)
    blocks = triton.cdiv(heads, tile)
    with device_of(x):
        rotate_kernel[(batch * length * blocks,)](
            *(x, cos, sin, y, heads, length, width // 2, blocks),
            *(*x.stride()[:3], *cos.stride()[:2], *sin.stride()[:2], *y.stride()),
            BACKWARD=backward,
            HEADS=tile,
            HALF=half,
            num_warps=4,
        )
    return y


def sizes(heads: int, width: int) -> tuple[int, int]:
    """Half of the head dim rounded up to a power of two, and heads per program."""
    half = int(triton.next_power_of_2(width // 2))
    return half, min(max(TILE // (2 * half), 1), int(triton.next_power_of_2(heads)))


@jit
def rotate_kernel(  # type: ignore[no-untyped-def]
    x,
    cos,
    sin,
    y,
    heads,
    length,
    half,
    blocks,
    x_batch_stride,
    x_head_stride,
    x_stride,
    cos_batch_stride,
    cos_stride,
    sin_batch_stride,
    sin_stride,
    y_batch_stride,
    y_head_stride,
    y_stride,
    y_element_stride,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    token, block = program // blocks, program % blocks
    batch, position = token // length, token % length
    head = block * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    in_half = column < half
    inside = (head < heads) & in_half
    cos += batch * cos_batch_stride + position * cos_stride
    sin += batch * sin_batch_stride + position * sin_stride
    cos_1 = tl.load(cos + column, mask=in_half, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + half + column, mask=in_half, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + column, mask=in_half, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + half + column, mask=in_half, other=0.0).to(tl.float32)
    x += batch * x_batch_stride + head * x_head_stride + position * x_stride
    first = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + half + column, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        rotated_1 = first * cos_1 + second * sin_2
        rotated_2 = second * cos_2 - first * sin_1
    else:
        rotated_1 = first * cos_1 - second * sin_1
        rotated_2 = second * cos_2 + first * sin_2
    y += batch * y_batch_stride + head * y_head_stride + position * y_stride
    tl.store(y + column * y_element_stride, rotated_1, mask=inside)
    tl.store(y + (half + column) * y_element_stride, rotated_2, mask=inside)
