"""Optimizer states of few bits: 8 or 4 a number, or bfloat16, where Adam keeps two of 32 (Dettmers et al., 8-bit Optimizers
via Block-wise Quantization, 2022; Li et al., Memory Efficient Optimizers with 4-bit States, 2023).

Numbers go in blocks. Of each block the one of the largest magnitude is kept, sign and all, in float32; the others as codes:
their quotient by it, rounded to the nearest entry of a map. The map of 8 bits is dense near zero, where most are:

    8 bits    seven decades from 1e-7 to 1, each with twice as many steps as the one below
    4 bits    signed: three decades; of a second moment, which is never negative: sixteenths, and no zero to divide by

Since the largest is kept exactly, packing what was unpacked changes nothing: a checkpoint holds float32 numbers, and a run goes
on from it as if it had not stopped. Under another layout blocks are others, and numbers are rounded once more.

An update sees float32, for one part of the parameters at a time (`update.py`), with any optimizer. States of small parameters
stay as they are.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from weft.memory.packed import PackedTensor, copy_parts, with_parts
from weft.memory.storages import local_part, put_local

Format = Literal["bf16", "int8", "int4"]
BITS = {"int8": 8, "int4": 4}
BLOCKS = {"int8": 256, "int4": 128}
"""Numbers that share a scale."""
SMALLEST = 4096
"""Numbers of a state that is packed: those of norms and biases are few, and dear."""
NEVER_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg")
"""Names of second moments, as torch's optimizers have them."""

aten = torch.ops.aten


def build_map(bits: int, *, signed: bool) -> Tensor:
    """The 2^bits numbers that codes stand for, ascending; the last is 1."""
    return torch.tensor(_entries(bits, signed))


@cache
def _entries(bits: int, signed: bool) -> tuple[float, ...]:
    if bits == 4 and not signed:
        return tuple(number / 16 for number in range(1, 17))
    decades = bits - 1 if bits == 8 else 3
    numbers = [0.0, 1.0]
    for decade in range(decades):
        steps, size = 2 ** (decade + (not signed)), 10.0 ** (decade + 1 - decades)
        middles = [(0.1 + 0.9 * (step + 0.5) / steps) * size for step in range(steps)]
        numbers += middles + [-middle for middle in middles if signed]
    return tuple(sorted(numbers))


class BlockState(PackedTensor):
    """A float32 tensor as codes of 8 or 4 bits, with a number for each block."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, shape: Sequence[int], form: Format, signed: bool) -> "BlockState":
        return Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, shape: Sequence[int], form: Format, signed: bool):
        """
        Args:
            codes: [blocks, bytes of a block] uint8.
            scale: [blocks] float32, of either sign.
            shape: of the tensor; its numbers fill the blocks in order, the last one with zeros behind them.
            form: "int8" or "int4".
            signed: whether there may be numbers below zero.
        """
        self.codes, self.scale, self.form, self.signed = codes, scale, form, signed

    @classmethod
    def empty(cls, shape: Sequence[int], device: torch.device, form: Format, *, signed: bool) -> "BlockState":
        """Memory without contents."""
        blocks = -(-torch.Size(shape).numel() // BLOCKS[form])
        codes = torch.empty(blocks, BLOCKS[form] * BITS[form] // 8, dtype=torch.uint8, device=device)
        return cls(codes, torch.empty(blocks, device=device), shape, form, signed)

    def joined(self) -> Tensor:
        codes = self.codes
        if BITS[self.form] == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
        numbers = build_map(BITS[self.form], signed=self.signed).to(codes.device)[codes.int()] * self.scale[:, None]
        return numbers.view(-1)[: self.numel()].view(self.shape)

    def write(self, values: Tensor) -> None:
        numbers = torch.nn.functional.pad(
            values.reshape(-1), (0, self.scale.numel() * BLOCKS[self.form] - self.numel())
        )
        numbers = numbers.view(self.scale.numel(), -1)
        torch.gather(numbers, 1, numbers.abs().argmax(1, keepdim=True), out=self.scale[:, None])
        quotients = numbers / torch.where(self.scale == 0, 1.0, self.scale)[:, None]
        entries = build_map(BITS[self.form], signed=self.signed).to(values.device)
        codes = torch.bucketize(quotients, (entries[1:] + entries[:-1]) / 2, out_int32=True, right=True).to(torch.uint8)
        self.codes.copy_(codes[:, ::2] | codes[:, 1::2] << 4 if BITS[self.form] == 4 else codes)

    def with_parts(self, parts: Sequence[Tensor]) -> "BlockState":
        codes, scale = parts
        return BlockState(codes, scale, self.shape, self.form, self.signed)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None


class HalfState(PackedTensor):
    """A float32 tensor as bfloat16."""

    @staticmethod
    def __new__(cls, half: Tensor) -> "HalfState":
        return Tensor._make_wrapper_subclass(cls, half.shape, dtype=torch.float32, device=half.device)

    def __init__(self, half: Tensor):
        """
        Args:
            half: bfloat16, contiguous.
        """
        self.half_numbers = half

    def joined(self) -> Tensor:
        return self.half_numbers.float()

    def write(self, values: Tensor) -> None:
        self.half_numbers.copy_(values)

    def with_parts(self, parts: Sequence[Tensor]) -> "HalfState":
        return HalfState(*parts)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["half_numbers"], None


def _empty(func: Any, state: PackedTensor, *, device: torch.device | None = None, **_: Any) -> PackedTensor:
    """The same form, elsewhere: for states that wait off the device."""
    return with_parts(state, lambda part: torch.empty_like(part, device=device))  # type: ignore[return-value]


def _copy(func: Any, target: Tensor, source: Tensor, *_: Any) -> Tensor:
    if type(target) is type(source):
        copy_parts(target, source)
    elif isinstance(target, PackedTensor):
        target.write(source.to(target.device, torch.float32).expand(target.shape))
    else:
        func(target, source.joined())  # type: ignore[attr-defined]
    return target


BlockState.OWN = HalfState.OWN = {aten.empty_like.default: _empty, aten.copy_.default: _copy}


def pack(values: Tensor, form: Format, *, signed: bool) -> PackedTensor:
    """Numbers in a form of few bits.

    Args:
        values: float32, local.
        form: of the result.
        signed: whether there may be numbers below zero.
    """
    packed: PackedTensor
    if form == "bf16":
        packed = HalfState(torch.empty_like(values, dtype=torch.bfloat16, memory_format=torch.contiguous_format))
    else:
        packed = BlockState.empty(values.shape, values.device, form, signed=signed)
    packed.write(values)
    return packed


def keep_states_small(optimizer: torch.optim.Optimizer, form: Format) -> Callable[[Tensor], None]:
    """Let an optimizer's states rest in few bits between the updates of their parameter.

    Args:
        optimizer: over local or sharded parameters, before its first step.
        form: of the states.

    Returns:
        What packs the states of a parameter that were made elsewhere, by a checkpoint say.
    """

    def settle(parameter: Tensor) -> None:
        for name, value in optimizer.state.get(parameter, {}).items():
            local = local_part(value)
            if not isinstance(local, PackedTensor) and local.dtype == torch.float32 and local.numel() >= SMALLEST:
                put_local(optimizer.state[parameter], name, pack(local, form, signed=name not in NEVER_NEGATIVE))

    def after_step(*_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    settle(parameter)

    optimizer.register_step_post_hook(after_step)
    return settle
