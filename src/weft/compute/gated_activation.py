"""Gated activations of MLPs: SwiGLU and GeGLU (Shazeer, GLU Variants Improve Transformer, 2020), act(gate) * up.

One kernel in forward and one in backward. Only the inputs are saved for backward, which computes the activation again.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.compute.jit import DTYPES, as_rows, device_of, has_triton, jit, tl, triton

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
BLOCK = 2048
"""Elements per program."""


@torch.library.custom_op("weft::gated_activation", mutates_args=())
def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Compute act(gate) * up, rounded twice as in two operations of torch.

    Args:
        gate: input of the activation, of any shape and strides.
        up: factor with the shape and dtype of gate.
        activation: one of `ACTIVATIONS`.

    Returns:
        Contiguous tensor with the shape of gate.
    """
    return (launch if can_launch(gate, up) else reference)(gate, up, activation)


@torch.library.custom_op("weft::gated_activation_backward", mutates_args=())
def gated_activation_backward(gradient: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    compute = launch_backward if can_launch(gate, up) else reference_backward
    return compute(gradient, gate, up, activation)


@torch.library.custom_op("weft::packed_gated_activation", mutates_args=())
def packed_gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """Like `gated_activation`, of one tensor whose last dim has gate and then up: the gradient needs no concatenation."""
    halves = _halves(gate_up)
    return (launch if can_launch(*halves) else reference)(*halves, activation)


@torch.library.custom_op("weft::packed_gated_activation_backward", mutates_args=())
def packed_gated_activation_backward(gradient: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    """Gradient of gate and up in one tensor."""
    if can_launch(*_halves(gate_up)):
        return launch_packed_backward(gradient, gate_up, activation)
    return torch.cat(reference_backward(gradient, *_halves(gate_up), activation), -1)


def _halves(packed: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = packed.chunk(2, -1)
    return gate, up


def activate(x: Tensor, activation: str) -> Tensor:
    """Activation function in operations of torch."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Gated activation in operations of torch."""
    return (activate(gate, activation) * up).contiguous()


def reference_backward(gradient: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of a gated activation in operations of torch."""
    x, dy = (gate, gradient) if gate.dtype == torch.float64 else (gate.float(), gradient.float())
    if activation == "silu":
        share = torch.sigmoid(x)
        slope = share * (1 + x * (1 - share))
    elif activation == "gelu":
        share = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        slope = share + x * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    else:
        share = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        slope = share + x * share * (1 - share) * 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return (dy * up * slope).to(gate.dtype).contiguous(), (dy * x * share).to(up.dtype).contiguous()


@gated_activation.register_fake
def _(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)


@gated_activation_backward.register_fake
def _(gradient: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@packed_gated_activation.register_fake
def _(gate_up: Tensor, activation: str) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@packed_gated_activation_backward.register_fake
def _(gradient: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, gradient: Tensor) -> Any:
    return *torch.ops.weft.gated_activation_backward(gradient, *ctx.saved_tensors, ctx.activation), None


def _differentiate_packed(ctx: Any, gradient: Tensor) -> Any:
    return torch.ops.weft.packed_gated_activation_backward(gradient, *ctx.saved_tensors, ctx.activation), None


gated_activation.register_autograd(_differentiate, setup_context=_save)
packed_gated_activation.register_autograd(_differentiate_packed, setup_context=_save)


# Triton


def can_launch(gate: Tensor, up: Tensor) -> bool:
    """True if the kernels support tensors of these shapes and dtypes on their device."""
    is_known = gate.dtype == up.dtype and gate.dtype in DTYPES
    return has_triton() and gate.is_cuda and is_known and gate.shape == up.shape and gate.numel() > 0


def launch(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Gated activation in one Triton kernel."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _run(forward_kernel, activation, gate, up, out)
    return out


def launch_backward(gradient: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of a gated activation in one Triton kernel."""
    d_gate, d_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    _run(backward_kernel, activation, gradient, gate, up, d_gate, d_up)
    return d_gate, d_up


def launch_packed_backward(gradient: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    """Gradient of gate and up in one tensor, which the kernel fills."""
    result = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    _run(backward_kernel, activation, gradient, *_halves(gate_up), *_halves(result))
    return result


def _run(kernel: Any, activation: str, *tensors: Tensor) -> None:
    """Launch a kernel on tensors of one shape, as one long row if all are contiguous."""
    one_row = all(tensor.is_contiguous() for tensor in tensors)
    matrices = [tensor.view(1, -1) if one_row else as_rows(tensor) for tensor in tensors]
    rows, width = matrices[0].shape
    blocks = triton.cdiv(width, BLOCK)
    block = min(BLOCK, triton.next_power_of_2(width))
    with device_of(tensors[0]):
        kernel[(rows * blocks,)](
            *(*matrices, width, blocks, *(matrix.stride(0) for matrix in matrices)),
            ACTIVATION=activation,
            SIZE=block,
            num_warps=4,
        )


@jit
def share_and_slope(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Factor of x in the activation, and the derivative of the activation."""
    if ACTIVATION == "silu":
        share = tl.sigmoid(x)
        slope = share * (1 + x * (1 - share))
    elif ACTIVATION == "gelu":
        share = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        slope = share + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:  # tanh(z) = 2 * sigmoid(2 * z) - 1
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = share + x * share * (1 - share) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    return share, slope


@jit
def forward_kernel(  # type: ignore[no-untyped-def]
    gate,
    up,
    out,
    width,
    blocks,
    gate_stride,
    up_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    SIZE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row, column = program // blocks, program % blocks * SIZE + tl.arange(0, SIZE)
    inside = column < width
    x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    share, _ = share_and_slope(x, ACTIVATION)
    activated = (x * share).to(gate.dtype.element_ty).to(tl.float32)  # rounded as the output of the activation function
    tl.store(out + row * out_stride + column, activated * factor, mask=inside)


@jit
def backward_kernel(  # type: ignore[no-untyped-def]
    dy,
    gate,
    up,
    d_gate,
    d_up,
    width,
    blocks,
    dy_stride,
    gate_stride,
    up_stride,
    d_gate_stride,
    d_up_stride,
    ACTIVATION: tl.constexpr,
    SIZE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row, column = program // blocks, program % blocks * SIZE + tl.arange(0, SIZE)
    inside = column < width
    gradient = tl.load(dy + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    share, slope = share_and_slope(x, ACTIVATION)
    tl.store(d_gate + row * d_gate_stride + column, gradient * factor * slope, mask=inside)
    tl.store(d_up + row * d_up_stride + column, gradient * x * share, mask=inside)
