"""Quantized optimizer states: 8-bit, 4-bit or bfloat16 instead of float32 (Dettmers et al., 8-bit Optimizers via Block-wise
Quantization, 2022; Li et al., Memory Efficient Optimizers with 4-bit States, 2023).

Quantization is block-wise. Each block has a float32 scale: its element of the largest magnitude, with its sign. Each element
is stored as the code of the map entry nearest to its quotient by the scale. The 8-bit map is dense near zero, where most
elements are:

    8 bits    seven decades from 1e-7 to 1, each with twice as many steps as the decade below
    4 bits    signed: three decades; unsigned (second moments): multiples of 1/16 without zero, which would be a divisor

The scale is exact, so packing what was unpacked changes nothing: a checkpoint holds float32 values, and resuming from it is
bit-equal to not stopping. Under another layout the blocks differ, and values are rounded once more.

Any optimizer works: an update sees float32 states, of one chunk of parameters at a time (`chunked_step.py`). States of small
parameters are not quantized.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from weft.memory.packed import PackedTensor, copy_parts, with_parts
from weft.memory.storages import local_part, put_local

StateDtype = Literal["bf16", "int8", "int4"]
BITS = {"int8": 8, "int4": 4}
BLOCKS = {"int8": 256, "int4": 128}
"""Elements per scale."""
SMALLEST = 4096
"""Minimum number of elements of a quantized state: states of norms and biases are small and sensitive."""
NEVER_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "variance", "row_var", "col_var")
"""Names of second moments."""

aten = torch.ops.aten


def build_map(bits: int, *, signed: bool) -> Tensor:
    """The 2^bits values of the codes, ascending; the last value is 1."""
    return torch.tensor(_entries(bits, signed))


@cache
def _entries(bits: int, signed: bool) -> tuple[float, ...]:
    if bits == 4 and not signed:
        return tuple(step / 16 for step in range(1, 17))
    decades = bits - 1 if bits == 8 else 3
    entries = [0.0, 1.0]
    for decade in range(decades):
        steps, size = 2 ** (decade + (not signed)), 10.0 ** (decade + 1 - decades)
        middles = [(0.1 + 0.9 * (step + 0.5) / steps) * size for step in range(steps)]
        entries += middles + [-middle for middle in middles if signed]
    return tuple(sorted(entries))


class BlockState(PackedTensor):
    """Float32 tensor stored as 8-bit or 4-bit codes, with a scale per block."""

    @staticmethod
    def __new__(
        cls, codes: Tensor, scale: Tensor, shape: Sequence[int], state_dtype: StateDtype, signed: bool
    ) -> "BlockState":
        return Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, shape: Sequence[int], state_dtype: StateDtype, signed: bool):
        """
        Args:
            codes: [blocks, bytes per block] uint8.
            scale: [blocks] float32, of either sign.
            shape: shape of the tensor; its elements fill the blocks in order, and zeros pad the last block.
            state_dtype: "int8" or "int4".
            signed: True if values may be negative.
        """
        self.codes, self.scale, self.state_dtype, self.signed = codes, scale, state_dtype, signed

    @classmethod
    def empty(
        cls, shape: Sequence[int], device: torch.device, state_dtype: StateDtype, *, signed: bool
    ) -> "BlockState":
        """Uninitialized state."""
        blocks = -(-torch.Size(shape).numel() // BLOCKS[state_dtype])
        codes = torch.empty(blocks, BLOCKS[state_dtype] * BITS[state_dtype] // 8, dtype=torch.uint8, device=device)
        return cls(codes, torch.empty(blocks, device=device), shape, state_dtype, signed)

    def unpack(self) -> Tensor:
        codes = self.codes
        if BITS[self.state_dtype] == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
        values = (
            build_map(BITS[self.state_dtype], signed=self.signed).to(codes.device)[codes.int()] * self.scale[:, None]
        )
        return values.view(-1)[: self.numel()].view(self.shape)

    def pack_(self, values: Tensor) -> None:
        padded = torch.nn.functional.pad(
            values.reshape(-1), (0, self.scale.numel() * BLOCKS[self.state_dtype] - self.numel())
        )
        blocks = padded.view(self.scale.numel(), -1)
        torch.gather(blocks, 1, blocks.abs().argmax(1, keepdim=True), out=self.scale[:, None])
        quotients = blocks / torch.where(self.scale == 0, 1.0, self.scale)[:, None]
        entries = build_map(BITS[self.state_dtype], signed=self.signed).to(values.device)
        codes = torch.bucketize(quotients, (entries[1:] + entries[:-1]) / 2, out_int32=True, right=True).to(torch.uint8)
        self.codes.copy_(codes[:, ::2] | codes[:, 1::2] << 4 if BITS[self.state_dtype] == 4 else codes)

    def with_parts(self, parts: Sequence[Tensor]) -> "BlockState":
        codes, scale = parts
        return BlockState(codes, scale, self.shape, self.state_dtype, self.signed)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None


class HalfState(PackedTensor):
    """Float32 tensor stored as bfloat16."""

    @staticmethod
    def __new__(cls, half: Tensor) -> "HalfState":
        return Tensor._make_wrapper_subclass(cls, half.shape, dtype=torch.float32, device=half.device)

    def __init__(self, half: Tensor):
        """
        Args:
            half: contiguous bfloat16 tensor.
        """
        self.half_values = half

    def unpack(self) -> Tensor:
        return self.half_values.float()

    def pack_(self, values: Tensor) -> None:
        self.half_values.copy_(values)

    def with_parts(self, parts: Sequence[Tensor]) -> "HalfState":
        return HalfState(*parts)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["half_values"], None


def _empty(func: Any, state: PackedTensor, *, device: torch.device | None = None, **_: Any) -> PackedTensor:
    """Uninitialized state of the same format, possibly on another device, for offload."""
    return with_parts(state, lambda part: torch.empty_like(part, device=device))  # type: ignore[return-value]


def _copy(func: Any, target: Tensor, source: Tensor, *_: Any) -> Tensor:
    if type(target) is type(source):
        copy_parts(target, source)
    elif isinstance(target, PackedTensor):
        target.pack_(source.to(target.device, torch.float32).expand(target.shape))
    else:
        func(target, source.unpack())  # type: ignore[attr-defined]
    return target


BlockState.OWN = HalfState.OWN = {aten.empty_like.default: _empty, aten.copy_.default: _copy}


def pack(values: Tensor, state_dtype: StateDtype, *, signed: bool) -> PackedTensor:
    """Quantize a tensor.

    Args:
        values: local float32 tensor.
        state_dtype: dtype of the result.
        signed: True if values may be negative.
    """
    packed: PackedTensor
    if state_dtype == "bf16":
        packed = HalfState(torch.empty_like(values, dtype=torch.bfloat16, memory_format=torch.contiguous_format))
    else:
        packed = BlockState.empty(values.shape, values.device, state_dtype, signed=signed)
    packed.pack_(values)
    return packed


def quantize_states(optimizer: torch.optim.Optimizer, state_dtype: StateDtype) -> Callable[[Tensor], None]:
    """Keep an optimizer's states quantized between the updates of their parameter.

    Args:
        optimizer: optimizer over local or sharded parameters, before its first step.
        state_dtype: dtype of the states.

    Returns:
        Function that quantizes the states of one parameter, for states that a checkpoint has loaded.
    """

    def place_state(parameter: Tensor) -> None:
        for name, value in optimizer.state.get(parameter, {}).items():
            local = local_part(value)
            if not isinstance(local, PackedTensor) and local.dtype == torch.float32 and local.numel() >= SMALLEST:
                put_local(optimizer.state[parameter], name, pack(local, state_dtype, signed=name not in NEVER_NEGATIVE))

    def after_step(*_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    place_state(parameter)

    optimizer.register_step_post_hook(after_step)
    return place_state
