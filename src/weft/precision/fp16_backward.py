"""Backward in float16 behind a forward in bfloat16, from what forward saved in bfloat16.

bfloat16 has float32's range and 8 bits of precision, float16 11 bits and a small range. Activations need the range; gradients,
scaled into float16's range, gain the bits (dynamic loss scaling: `scaling.py`).

Autograd insists that a gradient has the format of its tensor. So a gradient here says that it is bfloat16, and is held in
float16: an operation of backward that meets one gets float16, cast from what forward saved, and its results are held the same
way. Forward, and what is computed again in backward, never meets one. It ends where gradients are added up for the update.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

SAYS, HELD = torch.bfloat16, torch.float16


class Fp16Grad(Tensor):
    """A gradient: float16 that says it is bfloat16, or float32 that says so.

    What an operation makes of it is carried too, where it is float16 or wider; so are its views.
    """

    carried: Tensor

    @staticmethod
    def __new__(cls, carried: Tensor) -> "Fp16Grad":
        return Tensor._make_wrapper_subclass(
            cls,
            carried.shape,
            strides=carried.stride(),
            storage_offset=carried.storage_offset(),
            dtype=SAYS if carried.dtype == HELD else carried.dtype,
            device=carried.device,
        )

    def __init__(self, carried: Tensor):
        self.carried = carried

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["carried"], None

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Fp16Grad({self.carried})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        known: dict[int, Tensor] = {}
        """What was given, by id of what the operation gets for it."""

        def enter(value: Any) -> Any:
            if isinstance(value, Tensor):
                taken = (
                    value.carried if isinstance(value, Fp16Grad) else value.to(HELD) if value.dtype == SAYS else value
                )
                known[id(taken)] = value
                return taken
            return HELD if value is SAYS else value

        def leave(result: Tensor) -> Tensor:
            if id(result) in known:
                return known[id(result)]
            return Fp16Grad(result) if result.is_floating_point() else result

        taken, named = tree_map(enter, args), tree_map(enter, kwargs or {})
        found = func(*taken, **named)
        if func._schema.is_mutable:  # a plain bfloat16 tensor was cast: what was written goes into itself
            for argument, value, own in zip(func._schema.arguments, args, taken, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    tree_map(_write_back, value, own)
        return tree_map_only(Tensor, leave, found)


def _write_back(value: Any, own: Any) -> None:
    if isinstance(value, Tensor) and not isinstance(value, Fp16Grad) and value is not own:
        value.copy_(own)


class _CarryGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if isinstance(gradient, Fp16Grad):
            return gradient
        return Fp16Grad(gradient.to(HELD) if gradient.dtype == SAYS else gradient)


def carry_gradient(x: Tensor) -> Tensor:
    """The same; in front of it, backward is in float16 wherever forward was in bfloat16. Of float32, nothing is lost here."""
    return _CarryGradient.apply(x)


def carry_from(head: nn.Module) -> None:
    """Carry the gradient of a module's output, whatever loss is made of it."""
    head.register_forward_hook(lambda module, args, output: carry_gradient(output))


def to_message(gradient: Tensor) -> Tensor:
    """A gradient as another rank can receive it: the bits of a carried one, which are as many as it says. Else itself."""
    return gradient.carried.view(SAYS) if isinstance(gradient, Fp16Grad) and gradient.dtype == SAYS else gradient


def from_message(message: Tensor) -> Tensor:
    """What `to_message` was given, if that was carried."""
    return Fp16Grad(message.view(HELD)) if message.dtype == SAYS else message
