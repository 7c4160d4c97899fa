"""Backward in float16 after a forward in bfloat16.

bfloat16 has the range of float32 and 8 bits of precision; float16 has 11 bits and a small range. Activations need the range.
Gradients are scaled into the range of float16 (dynamic loss scaling: `scaling.py`), and gain the precision.

Autograd requires a gradient to have the dtype of its tensor. `Fp16Grad` therefore reports bfloat16 and stores float16. A
backward operation with such an argument computes in float16: its other bfloat16 arguments, saved by forward, are cast, and its
results are wrapped again. Forward and recomputed forward never see this class. It ends where gradients are accumulated for the
update.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

NOMINAL_DTYPE, STORED_DTYPE = torch.bfloat16, torch.float16


class Fp16Grad(Tensor):
    """Gradient stored in float16 that reports bfloat16; a float32 gradient may be wrapped too.

    Floating-point results and views of a wrapped gradient are wrapped too.
    """

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor) -> "Fp16Grad":
        return Tensor._make_wrapper_subclass(
            cls,
            stored.shape,
            strides=stored.stride(),
            storage_offset=stored.storage_offset(),
            dtype=NOMINAL_DTYPE if stored.dtype == STORED_DTYPE else stored.dtype,
            device=stored.device,
        )

    def __init__(self, stored: Tensor):
        self.stored = stored

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["stored"], None

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Fp16Grad({self.stored})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        known: dict[int, Tensor] = {}
        """Original arguments, by id of the tensor that the operation gets instead."""

        def unwrap(value: Any) -> Any:
            if isinstance(value, Tensor):
                if isinstance(value, Fp16Grad):
                    plain = value.stored
                else:
                    plain = value.to(STORED_DTYPE) if value.dtype == NOMINAL_DTYPE else value
                known[id(plain)] = value
                return plain
            return STORED_DTYPE if value is NOMINAL_DTYPE else value

        def wrap(result: Tensor) -> Tensor:
            if id(result) in known:
                return known[id(result)]
            return Fp16Grad(result) if result.is_floating_point() else result

        plain_args, plain_kwargs = tree_map(unwrap, args), tree_map(unwrap, kwargs or {})
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:  # a plain bfloat16 argument was cast, so the result is copied back into it
            for argument, value, plain in zip(func._schema.arguments, args, plain_args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    tree_map(_write_back, value, plain)
        return tree_map_only(Tensor, wrap, result)


def _write_back(value: Any, plain: Any) -> None:
    if isinstance(value, Tensor) and not isinstance(value, Fp16Grad) and value is not plain:
        value.copy_(plain)


class _BeginFp16Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if isinstance(gradient, Fp16Grad):
            return gradient
        return Fp16Grad(gradient.to(STORED_DTYPE) if gradient.dtype == NOMINAL_DTYPE else gradient)


def begin_fp16_backward(x: Tensor) -> Tensor:
    """Identity in forward; from here on, backward computes in float16 wherever forward computed in bfloat16."""
    return _BeginFp16Backward.apply(x)


def begin_fp16_backward_at(head: nn.Module) -> None:
    """Begin fp16 backward at the output of a module, for any loss computed from it."""
    head.register_forward_hook(lambda module, args, output: begin_fp16_backward(output))


def to_message(gradient: Tensor) -> Tensor:
    """Gradient as a tensor that can be sent: the bits of a wrapped float16 gradient as bfloat16; any other gradient itself."""
    is_fp16 = isinstance(gradient, Fp16Grad) and gradient.dtype == NOMINAL_DTYPE
    return gradient.stored.view(NOMINAL_DTYPE) if is_fp16 else gradient  # type: ignore[attr-defined]


def from_message(message: Tensor) -> Tensor:
    """Inverse of `to_message`, for a wrapped gradient."""
    return Fp16Grad(message.view(STORED_DTYPE)) if message.dtype == NOMINAL_DTYPE else message
