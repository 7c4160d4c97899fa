"""Experts of a Mixture-of-Experts layer: one sort, two grouped matmuls, and one pass each to gather and to combine rows.

The forward of Transformers gathers the rows of each expert, multiplies the outputs by the router weights, brings them back to
the order of tokens and sums them, in six passes over tokens x chosen experts x width, and as many in backward. Here the rows
are gathered in one pass and combined in one (as in Megatron-Core's permutation fusion), and so in backward, without atomic
additions: results have the same bits in every run.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.compute.grouped_mm import grouped_mm
from weft.compute.jit import DTYPES, device_of, has_triton, jit, tl, triton


def grouped_linear(rows: Tensor, weight: Tensor, rows_first: bool, borders: Tensor) -> Tensor:
    """Multiply the rows of each expert by its matrix.

    Args:
        rows: [R, inputs], sorted by expert.
        weight: [experts, outputs, inputs] if `rows_first`, else [experts, inputs, outputs].
        rows_first: True if a row of a matrix has the weights of one output.
        borders: int32 [experts]: end of the rows of each expert.

    Returns:
        [R, outputs] in the dtype of the weight.
    """
    if leaves_empty_groups(weight.device) and torch.is_grad_enabled() and weight.requires_grad:
        weight = _ClearEmptyGroups.apply(weight, borders)
    return grouped_mm(rows.to(weight.dtype), weight.transpose(-2, -1) if rows_first else weight, borders)


def grouped_gradient(left: Tensor, right: Tensor, borders: Tensor) -> Tensor:
    """Gradient of the matrices of experts: for each expert, the product over its rows; zeros for one without rows.

    Args:
        left: [R, rows of a matrix], sorted by expert.
        right: [R, columns of a matrix].
        borders: int32 [experts]: end of the rows of each expert.

    Returns:
        [experts, rows, columns].
    """
    return clear_empty_groups(grouped_mm(left.T, right, borders), borders)


def clear_empty_groups(gradient: Tensor, borders: Tensor) -> Tensor:
    """Gradient with zeros for experts without rows, where the device leaves them undefined."""
    if not leaves_empty_groups(gradient.device):
        return gradient
    counts = borders.diff(prepend=borders.new_zeros(1))
    return torch.where(counts[:, None, None] > 0, gradient, 0)


def leaves_empty_groups(device: torch.device) -> bool:
    """True if a product over the rows of each group leaves the result of a group without rows undefined: on data center
    devices of compute capability 10 (issues 172439 and 193633 of pytorch, open in torch 2.13)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


class _ClearEmptyGroups(torch.autograd.Function):
    """Identity of weights, whose gradient is zero for experts without rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, borders: Tensor) -> Tensor:
        ctx.save_for_backward(borders)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return clear_empty_groups(gradient, *ctx.saved_tensors), None


def experts_forward(
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    linear: Callable[[Tensor, Tensor, bool, Tensor], Tensor] = grouped_linear,
) -> Tensor:
    """Forward of gated experts without biases, with the activation of the module.

    Args:
        module: experts module of Transformers with stacked weights.
        hidden_states: [T, H].
        top_k_index: [T, K] integer: experts of each token; a copy for expert `num_experts` contributes zero.
        top_k_weights: [T, K] float.
        linear: `grouped_linear`, or another function with its arguments and result.

    Returns:
        [T, H] in the dtype of hidden_states.
    """
    experts, order = top_k_index.flatten().sort(stable=True)
    position = inverse_permutation(order).view(top_k_index.shape)
    known = torch.arange(module.num_experts, dtype=experts.dtype, device=experts.device)
    borders = torch.searchsorted(experts, known, right=True).to(torch.int32)
    rows = permute(hidden_states, order, position, borders)
    outputs = linear(rows, module.gate_up_proj, not module.is_transposed, borders)
    outputs = linear(module._apply_gate(outputs), module.down_proj, not module.is_transposed, borders)
    return unpermute(outputs, position, top_k_weights, borders).to(hidden_states.dtype)


def inverse_permutation(order: Tensor) -> Tensor:
    """Place of each index in a permutation, int64 [n]; `torch.argsort` would sort.

    Args:
        order: int64 [n], each index below n once.
    """
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device)
    return position


@torch.library.custom_op("weft::permute", mutates_args=())
def permute(hidden: Tensor, order: Tensor, position: Tensor, borders: Tensor) -> Tensor:
    """Gather the row of the token of each copy. Its gradient sums the copies of a token in their order.

    Args:
        hidden: [T, H].
        order: int64 [T K]: the copy (token K + choice) of each row; or its beginning, with all rows that are used.
        position: int64 [T, K]: the row of each copy, the inverse of `order`.
        borders: int32 [experts]: end of the rows of each expert; rows after the last end are not used.

    Returns:
        Rows of the given order, [T K, H] for all.
    """
    return hidden.index_select(0, order // position.shape[1])


@torch.library.custom_op("weft::unpermute", mutates_args=())
def unpermute(rows: Tensor, position: Tensor, weights: Tensor | None, borders: Tensor) -> Tensor:
    """Sum the rows of the copies of each token, multiplied by their weights.

    Args:
        rows: [T K, H]; values of unused rows may be anything. Without weights, they may be left out.
        position: int64 [T, K].
        weights: [T, K] float; None for ones. Products are rounded to the wider dtype of rows and weights, and summed in
            float32.
        borders: int32 [experts].

    Returns:
        [T, H] in the wider dtype of rows and weights.
    """
    compute = launch if can_launch(rows, weights) else reference
    return compute(rows, position, weights, borders)


@torch.library.custom_op("weft::unpermute_backward", mutates_args=())
def unpermute_backward(
    gradient: Tensor, rows: Tensor, position: Tensor, weights: Tensor, borders: Tensor, needs_weights: bool = True
) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weights; those of unused rows may be anything, and that of weights if it is not needed."""
    if can_launch(gradient, rows, weights):
        return launch_backward(gradient, rows, position, weights, borders)
    return reference_backward(gradient, rows, position, weights, borders, needs_weights)


def reference(rows: Tensor, position: Tensor, weights: Tensor | None, borders: Tensor) -> Tensor:
    """`unpermute` in operations of torch."""
    is_plain = rows.dtype == torch.float32 and (weights is None or weights.dtype == rows.dtype)
    if position.shape[1] > 1 and is_plain and _are_all_used(rows, position, borders):
        own = None if weights is None else weights.detach()
        # One pass, without copies of rows.
        return F.embedding_bag(position, rows.detach(), mode="sum", per_sample_weights=own)
    copies = _used_rows(rows, position, borders)
    if weights is not None:
        is_same = _output_dtype(rows, weights) == rows.dtype
        copies = copies.mul_(weights[..., None]) if is_same else copies * weights[..., None]
    return copies[:, 0] if position.shape[1] == 1 else copies.sum(1)


def reference_backward(
    gradient: Tensor, rows: Tensor, position: Tensor, weights: Tensor, borders: Tensor, needs_weights: bool = True
) -> tuple[Tensor, Tensor]:
    """`unpermute_backward` in operations of torch."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    if gradient.dtype == rows.dtype == weights.dtype and _are_all_used(rows, position, borders):
        order = inverse_permutation(position.flatten())
        of_rows, of_weights = gradient.index_select(0, order // position.shape[1]), torch.empty_like(weights)
        if needs_weights:
            of_weights = torch.linalg.vecdot(of_rows.to(wide), rows.to(wide))[position].to(weights.dtype)
        return of_rows.mul_(weights.flatten()[order, None]), of_weights
    of_copies = (gradient[:, None] * weights[..., None]).to(rows.dtype)
    of_rows = torch.zeros_like(rows).index_copy(0, position.flatten(), of_copies.flatten(0, 1))
    of_weights = (gradient[:, None].to(wide) * _used_rows(rows, position, borders).to(wide)).sum(-1)
    return of_rows, of_weights.to(weights.dtype)


def _are_all_used(rows: Tensor, position: Tensor, borders: Tensor) -> bool:
    """True on a CPU, where the host reads the last border, if all rows are used: then some passes over them are not needed."""
    return rows.device.type == "cpu" and len(rows) == position.numel() == int(borders[-1])


def _used_rows(rows: Tensor, position: Tensor, borders: Tensor) -> Tensor:
    """Rows of the copies of each token, [T, K, H]; zeros for unused ones."""
    if _are_all_used(rows, position, borders):
        return rows.index_select(0, position.flatten()).view(*position.shape, rows.shape[1])
    if len(rows) < position.numel():
        rows = F.pad(rows, (0, 0, 0, position.numel() - len(rows)))
    return torch.where((position < borders[-1])[..., None], rows[position], 0)


def _output_dtype(rows: Tensor, weights: Tensor | None) -> torch.dtype:
    return rows.dtype if weights is None else torch.promote_types(rows.dtype, weights.dtype)


@permute.register_fake
def _(hidden: Tensor, order: Tensor, position: Tensor, borders: Tensor) -> Tensor:
    return hidden.new_empty(len(order), hidden.shape[1])


@unpermute.register_fake
def _(rows: Tensor, position: Tensor, weights: Tensor | None, borders: Tensor) -> Tensor:
    return rows.new_empty(len(position), rows.shape[1], dtype=_output_dtype(rows, weights))


@unpermute_backward.register_fake
def _(
    gradient: Tensor, rows: Tensor, position: Tensor, weights: Tensor, borders: Tensor, needs_weights: bool = True
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


def _save_permutation(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[2:])


def _differentiate_permute(ctx: Any, gradient: Tensor) -> Any:
    position, borders = ctx.saved_tensors
    return torch.ops.weft.unpermute(gradient, position, None, borders), None, None, None


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> Any:
    needed = ctx.needs_input_grad[2]
    of_rows, of_weights = torch.ops.weft.unpermute_backward(gradient, *ctx.saved_tensors, needed)
    return of_rows, None, of_weights if needed else None, None


permute.register_autograd(_differentiate_permute, setup_context=_save_permutation)
unpermute.register_autograd(_differentiate, setup_context=_save)


# Triton

BLOCK = 1024
"""Elements of a row per step of a program."""


def can_launch(*tensors: Tensor | None) -> bool:
    """True if the kernels support tensors of these dtypes on their device."""
    given = [tensor for tensor in tensors if tensor is not None]
    return has_triton() and all(tensor.is_cuda and tensor.dtype in DTYPES and tensor.numel() > 0 for tensor in given)


def launch(rows: Tensor, position: Tensor, weights: Tensor | None, borders: Tensor) -> Tensor:
    """`unpermute` in one Triton kernel."""
    rows, width = rows.contiguous(), rows.shape[1]
    dtype = _output_dtype(rows, weights)
    out = torch.empty(len(position), width, dtype=dtype, device=rows.device)
    with device_of(rows):
        unpermute_kernel[(len(position), triton.cdiv(width, BLOCK))](
            *(rows, position, rows if weights is None else weights.contiguous(), borders[-1:], out, width),
            CHOICES=position.shape[1],
            HAS_WEIGHTS=weights is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out


def launch_backward(
    gradient: Tensor, rows: Tensor, position: Tensor, weights: Tensor, borders: Tensor
) -> tuple[Tensor, Tensor]:
    """`unpermute_backward` in one Triton kernel."""
    gradient, rows, weights = gradient.contiguous(), rows.contiguous(), weights.contiguous()
    of_rows, of_weights = torch.empty_like(rows), torch.empty_like(weights)
    with device_of(rows):
        unpermute_backward_kernel[(len(position), position.shape[1])](
            *(gradient, rows, position, weights, borders[-1:], of_rows, of_weights, rows.shape[1]),
            CHOICES=position.shape[1],
            BLOCKS=triton.cdiv(rows.shape[1], BLOCK),
            BLOCK=BLOCK,
            num_warps=4,
        )
    return of_rows, of_weights


@jit
def unpermute_kernel(  # type: ignore[no-untyped-def]
    rows,
    position,
    weights,
    end,
    out,
    width,
    CHOICES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    used = tl.load(end)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(CHOICES):
        row = tl.load(position + token * CHOICES + choice)
        # A comparison of scalars is no mask in the interpreter.
        is_used = row + tl.zeros([BLOCK], tl.int64) < used
        value = tl.load(rows + row * width + column, mask=inside & is_used, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            value = value * tl.load(weights + token * CHOICES + choice).to(tl.float32)
            value = value.to(out.dtype.element_ty).to(tl.float32)
        total += value
    tl.store(out + token * width + column, total, mask=inside)


@jit
def unpermute_backward_kernel(  # type: ignore[no-untyped-def]
    gradient,
    rows,
    position,
    weights,
    end,
    of_rows,
    of_weights,
    width,
    CHOICES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, choice = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(position + token * CHOICES + choice)
    weight = tl.load(weights + token * CHOICES + choice).to(tl.float32)
    is_used = row + tl.zeros([BLOCK], tl.int64) < tl.load(end)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(BLOCKS):
        column = block * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        given = tl.load(gradient + token * width + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(rows + row * width + column, mask=inside & is_used, other=0.0).to(tl.float32)
        tl.store(of_rows + row * width + column, given * weight, mask=inside)
        total += given * value
    tl.store(of_weights + token * CHOICES + choice, tl.sum(total))
