"""Split weights: master weight and bfloat16 weight in 32 bits per parameter, as two planes of 16 bits.

Mixed precision keeps a float32 master weight for the update and a bfloat16 weight for forward and backward: 6 bytes. But
a bfloat16 is the upper half of a float32. Stored as two planes, with the upper plane rounded, both fit in 4 bytes (MindSpeed,
reuse-fp32-param):

    bits of the master weight     s eeeeeeee mmmmmmm|mmmmmmmm mmmmmmmm       u
    u + 0x8000                    s eeeeeeee mmmmmmm|mmmmmmmm mmmmmmmm
    planes                        high: bfloat16    |low: int16

The carry rounds the upper half to the nearest bfloat16, with ties away from zero. Subtracting 0x8000 from the joined planes
restores u exactly.

A cast rounds ties to even instead. An even bfloat16 is then the rounding of 65537 float32 values, one more than 16 bits can
distinguish: the two ties have the same low half, 0x8000. With `even`, one more bit per weight, in a third plane, distinguishes
them, and the upper plane is bit-equal to a cast of u.

Infinities, zeros and subnormals are also exact. A NaN stays a NaN, without its payload. Requires a little-endian machine.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.memory.nf4 import is_nf4
from weft.memory.packed import PackedTensor, has_values
from weft.memory.storages import map_local

HALF = 0x8000
TIE = -0x8000  # a low half of 0x8000, as int16

aten = torch.ops.aten


def split(values: Tensor, high: Tensor, low: Tensor, *, even: bool = False) -> None:
    """Split float32 values into two planes.

    Args:
        values: contiguous float32 tensor.
        high: contiguous bfloat16 tensor of the same size.
        low: contiguous int16 tensor of the same size.
        even: round ties to even instead of away from zero.
    """
    values = _plain_nan(values)
    for bits, upper, lower in _blocks(values.view(torch.int32), high.view(torch.int16), low):
        rounding: Tensor | int = ((bits >> 16) & 1).add_(HALF - 1) if even else HALF
        rounded = bits + rounding
        upper.copy_(rounded.view(torch.int16)[1::2])
        lower.copy_((bits if even else rounded).view(torch.int16)[0::2])


def join(high: Tensor, low: Tensor, *, even: bool = False) -> Tensor:
    """Join two planes to contiguous float32 values of the shape of `high`; with `even`, all ties as if rounded up."""
    values = torch.empty(high.shape, dtype=torch.float32, device=high.device)
    for bits, upper, lower in _blocks(values.view(torch.int32), high.view(torch.int16), low):
        bits.view(torch.int16)[1::2] = upper
        bits.view(torch.int16)[0::2] = lower
        bits.sub_((lower < 0).to(torch.int32) << 16 if even else HALF)
    return values


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split flat tensors into blocks that fit the cache of a CPU core, or that saturate an accelerator."""
    size = 2**17 if tensors[0].device.type == "cpu" and has_values(tensors[0]) else 2**26
    return zip(*(tensor.reshape(-1).split(size) for tensor in tensors), strict=True)


def _plain_nan(values: Tensor) -> Tensor:
    """Drop the payload of NaNs: rounding could overflow it into the sign, or turn the NaN into infinity."""
    if has_values(values) and values.sum().isnan():
        return torch.where(values.isnan(), torch.nan, values)
    return values


class SplitWeight(PackedTensor):
    """Float32 tensor stored in two planes. Created by `split_weights`.

    Views are views of the planes. A cast to bfloat16 returns the upper plane without a copy, and FSDP2 gathers only that
    plane.
    """

    high: Tensor
    low: Tensor
    ties: Tensor | None
    """With `even`: one bit per element of the storage of `low`, eight per byte, set for a tie that was rounded down."""

    @staticmethod
    def __new__(cls, high: Tensor, low: Tensor, ties: Tensor | None = None) -> "SplitWeight":
        return Tensor._make_wrapper_subclass(
            cls,
            high.shape,
            strides=high.stride(),
            storage_offset=high.storage_offset(),
            dtype=torch.float32,
            device=high.device,
        )

    def __init__(self, high: Tensor, low: Tensor, ties: Tensor | None = None):
        self.high, self.low, self.ties = high, low, ties

    @classmethod
    def empty(cls, shape: Any, device: torch.device, *, even: bool) -> "SplitWeight":
        """Uninitialized weight."""
        high, low = (torch.empty(shape, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.int16))
        ties = torch.zeros(-(-low.numel() // 8), dtype=torch.uint8, device=device) if even else None
        return cls(high, low, ties)

    def unpack(self) -> Tensor:
        high, low = self.high.contiguous(), self.low.contiguous()
        values = join(high, low, even=self.ties is not None)
        if self.ties is not None and has_values(low):
            index, byte, bit = self._ties()
            values.view(-1).view(torch.int32)[index] += ((self.ties[byte] >> bit) & 1).to(torch.int32) << 16
        return values

    def pack_(self, values: Tensor) -> None:
        high, low = self.high.contiguous(), self.low.contiguous()
        split(values.contiguous(), high, low, even=self.ties is not None)
        if high is not self.high:  # a non-contiguous view; both planes have the same strides
            self.high.copy_(high)
            self.low.copy_(low)
        if self.ties is not None and has_values(low):
            index, byte, bit = self._ties()
            down = (values.reshape(-1).view(torch.int32)[index] >> 16) & 1 ^ 1
            touched, inverse = byte.unique(return_inverse=True)
            shifts = torch.arange(8, dtype=torch.uint8, device=byte.device)
            bits = (self.ties[touched, None] >> shifts) & 1
            bits[inverse, bit.long()] = down.to(torch.uint8)
            self.ties[touched] = (bits << shifts).sum(1, dtype=torch.uint8)

    def _ties(self) -> tuple[Tensor, Tensor, Tensor]:
        """Positions of the ties: flat index in this view, and byte and bit in `ties`."""
        index = rest = (self.low == TIE).reshape(-1).nonzero()[:, 0]
        offset = torch.full_like(index, int(self.low.storage_offset()))
        for size, stride in zip(reversed(self.low.shape), reversed(self.low.stride()), strict=True):
            offset += rest % size * stride
            rest = rest // size
        return index, offset >> 3, (offset & 7).to(torch.uint8)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high", "low"] + ["ties"] * (self.ties is not None), None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: object) -> "SplitWeight":
        return SplitWeight(inner["high"], inner["low"], inner.get("ties"))

    def with_parts(self, parts: Sequence[Tensor]) -> "SplitWeight":
        return SplitWeight(*parts)

    def view_by(self, view: Callable[[Tensor], Any]) -> Any:
        """Apply a view operation to each plane."""
        high, low = view(self.high), view(self.low)
        if isinstance(high, Tensor):
            return SplitWeight(high, low, self.ties)
        return [SplitWeight(*planes, self.ties) for planes in zip(high, low, strict=True)]

    # FSDP2's hooks for a custom all-gather

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Input of the all-gather: the upper plane, padded where the last ranks have fewer rows."""
        rows = self.high.shape[0]
        if self.high.shape[1:] != outer_size[1:]:  # sharded along another dim, evenly
            return (self.high,), None
        missing = -(-outer_size[0] // mesh.size()) - rows
        return (torch.cat([self.high, self.high.new_zeros(missing, *outer_size[1:])]) if missing else self.high,), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Weight for forward: the gathered upper plane, in the gather buffer."""
        return None if out is not None else (gathered[0], ())


def split_weights(model: nn.Module, *, even: bool) -> None:
    """Convert a model's float32 parameters to split weights, in place, with their values.

    Args:
        model: model, sharded over all axes but data; on any device, including meta.
        even: round ties to even.
    """
    done: dict[nn.Parameter, nn.Parameter] = {}  # keeps tied weights tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype == torch.float32 and not is_nf4(parameter):
                if parameter not in done:
                    split_local = map_local(parameter.detach(), partial(_split, even=even))
                    done[parameter] = nn.Parameter(split_local, parameter.requires_grad)
                module._parameters[name] = done[parameter]


def _split(tensor: Tensor, *, even: bool) -> Tensor:
    weight = SplitWeight.empty(tensor.shape, tensor.device, even=even)
    if not tensor.is_meta:
        weight.pack_(tensor)
    return weight


# Operations that do not need joined planes, or whose result is a split weight


def _cast(func: Any, weight: SplitWeight, **kwargs: Any) -> Tensor:
    device = kwargs.get("device") or weight.device
    if kwargs.get("dtype") == torch.bfloat16 and device == weight.device:
        return weight.high.detach()
    if kwargs.get("dtype") in (None, torch.float32):
        return _copy_of(weight, device)
    return func(weight.unpack(), **kwargs)


def _clone(func: Any, weight: SplitWeight, **_: Any) -> Tensor:
    return _copy_of(weight, weight.device)


def _copy_of(weight: SplitWeight, device: torch.device) -> SplitWeight:
    copy = SplitWeight.empty(weight.shape, device, even=weight.ties is not None)
    if not copy.is_meta:
        copy.pack_(weight.unpack().to(device))
    return copy


def _empty(func: Any, weight: SplitWeight, shape: Any = None, **kwargs: Any) -> Tensor:
    """empty_like (used by Module.to), and new_empty and new_zeros (used by FSDP2 for shards)."""
    shape, device = weight.shape if shape is None else shape, kwargs.get("device") or weight.device
    if kwargs.get("dtype") not in (None, torch.float32):
        return torch.empty(shape, dtype=kwargs["dtype"], device=device)
    return SplitWeight.empty(shape, device, even=weight.ties is not None)


def _zeros(func: Any, weight: SplitWeight, shape: Any, **kwargs: Any) -> Tensor:
    return _empty(func, weight, shape, **kwargs).zero_()


def _plain_zeros(func: Any, weight: SplitWeight, **kwargs: Any) -> Tensor:
    """zeros_like (used by optimizers for their states): a plain tensor."""
    return func(weight.high, **{**kwargs, "dtype": kwargs.get("dtype") or torch.float32})


def _copy(func: Any, target: Any, source: Tensor, *_: Any) -> Tensor:
    if not isinstance(target, SplitWeight):
        assert isinstance(source, SplitWeight)
        return func(target, source.unpack())
    values = source.unpack() if isinstance(source, SplitWeight) else source
    target.pack_(values.to(target.device, torch.float32).expand(target.shape))
    return target


SplitWeight.OWN = {
    aten._to_copy.default: _cast,
    aten.clone.default: _clone,
    aten.empty_like.default: _empty,
    aten.new_empty.default: _empty,
    aten.new_zeros.default: _zeros,
    aten.zeros_like.default: _plain_zeros,
    aten.copy_.default: _copy,
}
