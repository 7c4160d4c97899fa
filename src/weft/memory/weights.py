"""Weights and master weights in the memory of one: 32 bits a parameter, as two planes of 16.

Mixed precision keeps a float32 master weight for the update and a bfloat16 weight for forward and backward: 6 bytes. But a
bfloat16 is half of a float32. Kept as two planes, the upper one rounded, a parameter is both in 4 bytes (MindSpeed,
reuse-fp32-param):

    bits of the master weight     s eeeeeeee mmmmmmm|mmmmmmmm mmmmmmmm       u
    u + 0x8000                    s eeeeeeee mmmmmmm|mmmmmmmm mmmmmmmm
    planes                        high: bfloat16    |low: int16

The carry into the upper half rounds it to the nearest bfloat16, ties away from zero; taking 0x8000 off the joined planes
gives back u, exactly. A cast rounds ties to even instead, and an even bfloat16 is the rounding of 65537 float32 numbers: one
more than 16 bits can tell apart. With `even` one bit a weight, in a plane of its own, tells the two that are left; only ties
(a low half of 0x8000) ever look at it. Then high is what a cast of u gives, bit for bit.

Infinities, zeros and subnormals are exact too. A NaN stays a NaN, without its payload. Needs a little-endian machine.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.memory.packed import PackedTensor, has_values

HALF = 0x8000
TIE = -0x8000  # a low half of 0x8000, as int16

aten = torch.ops.aten


def split(values: Tensor, high: Tensor, low: Tensor, *, even: bool = False) -> None:
    """Write float32 numbers into two planes.

    Args:
        values: float32, contiguous.
        high: bfloat16, of the same size, contiguous.
        low: int16, of the same size, contiguous.
        even: round ties to even, not away from zero.
    """
    values = _plain_nan(values)
    for bits, upper, lower in _blocks(values.view(torch.int32), high.view(torch.int16), low):
        rounding: Tensor | int = ((bits >> 16) & 1).add_(HALF - 1) if even else HALF
        rounded = bits + rounding
        upper.copy_(rounded.view(torch.int16)[1::2])
        lower.copy_((bits if even else rounded).view(torch.int16)[0::2])


def join(high: Tensor, low: Tensor, *, even: bool = False) -> Tensor:
    """The float32 numbers of two planes, contiguous, of the shape of `high`; with `even`, ties as if they were rounded up."""
    found = torch.empty(high.shape, dtype=torch.float32, device=high.device)
    for bits, upper, lower in _blocks(found.view(torch.int32), high.view(torch.int16), low):
        bits.view(torch.int16)[1::2] = upper
        bits.view(torch.int16)[0::2] = lower
        bits.sub_((lower < 0).to(torch.int32) << 16 if even else HALF)
    return found


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of flat tensors that stay in a core's cache while they are worked on; on an accelerator, what keeps it busy."""
    size = 2**17 if tensors[0].device.type == "cpu" and has_values(tensors[0]) else 2**26
    return zip(*(tensor.reshape(-1).split(size) for tensor in tensors), strict=True)


def _plain_nan(values: Tensor) -> Tensor:
    """NaNs without their payload: rounding could carry it out of the number, or leave infinity."""
    if has_values(values) and values.sum().isnan():
        return torch.where(values.isnan(), torch.nan, values)
    return values


class SplitWeight(PackedTensor):
    """A float32 tensor that lives in two planes. Made by `split_weights`.

    Views are views of the planes. The cast to bfloat16 is the upper plane itself, without a copy; FSDP2
    gathers that plane alone.
    """

    high: Tensor
    low: Tensor
    ties: Tensor | None
    """With ties to even: a bit for each number in the storage of `low`, eight a byte: a tie that was rounded down."""

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
        """Memory without contents."""
        high, low = (torch.empty(shape, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.int16))
        ties = torch.zeros(-(-low.numel() // 8), dtype=torch.uint8, device=device) if even else None
        return cls(high, low, ties)

    def joined(self) -> Tensor:
        high, low = self.high.contiguous(), self.low.contiguous()
        values = join(high, low, even=self.ties is not None)
        if self.ties is not None and has_values(low):
            index, byte, bit = self._ties()
            values.view(-1).view(torch.int32)[index] += ((self.ties[byte] >> bit) & 1).to(torch.int32) << 16
        return values

    def write(self, values: Tensor) -> None:
        high, low = self.high.contiguous(), self.low.contiguous()
        split(values.contiguous(), high, low, even=self.ties is not None)
        if high is not self.high:  # of a view that is not: both planes have the same strides
            self.high.copy_(high)
            self.low.copy_(low)
        if self.ties is not None and has_values(low):
            index, byte, bit = self._ties()
            down = (values.reshape(-1).view(torch.int32)[index] >> 16) & 1 ^ 1
            touched, inverse = byte.unique(return_inverse=True)
            places = torch.arange(8, dtype=torch.uint8, device=byte.device)
            bits = (self.ties[touched, None] >> places) & 1
            bits[inverse, bit.long()] = down.to(torch.uint8)
            self.ties[touched] = (bits << places).sum(1, dtype=torch.uint8)

    def _ties(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where ties are: their numbers in this view, row by row, and their byte and bit in `ties`."""
        index = rest = (self.low == TIE).reshape(-1).nonzero()[:, 0]
        place = torch.full_like(index, int(self.low.storage_offset()))
        for size, stride in zip(reversed(self.low.shape), reversed(self.low.stride()), strict=True):
            place += rest % size * stride
            rest = rest // size
        return index, place >> 3, (place & 7).to(torch.uint8)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high", "low"] + ["ties"] * (self.ties is not None), None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: object) -> "SplitWeight":
        return SplitWeight(inner["high"], inner["low"], inner.get("ties"))

    def with_parts(self, parts: Sequence[Tensor]) -> "SplitWeight":
        return SplitWeight(*parts)

    def view_by(self, view: Callable[[Tensor], Any]) -> Any:
        """A view of each plane."""
        high, low = view(self.high), view(self.low)
        if isinstance(high, Tensor):
            return SplitWeight(high, low, self.ties)
        return [SplitWeight(*planes, self.ties) for planes in zip(high, low, strict=True)]

    # What FSDP2 asks of a parameter that is not gathered as it is.

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """What this rank gives: the upper plane. Where the last ranks have fewer rows, they fill up."""
        rows = self.high.shape[0]
        if self.high.shape[1:] != outer_size[1:]:  # cut along another dim, evenly
            return (self.high,), None
        missing = -(-outer_size[0] // mesh.size()) - rows
        return (torch.cat([self.high, self.high.new_zeros(missing, *outer_size[1:])]) if missing else self.high,), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """What forward computes with: what came, where it came."""
        return None if out is not None else (gathered[0], ())


def split_weights(model: nn.Module, *, even: bool) -> None:
    """Give a model's float32 parameters the form of two planes, in place, with their values.

    Args:
        model: split over all axes but data; on any device, the meta device included.
        even: round ties to even.
    """
    done: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight stays one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype == torch.float32:
                if parameter not in done:
                    done[parameter] = nn.Parameter(_split(parameter.detach(), even), parameter.requires_grad)
                module._parameters[name] = done[parameter]


def _split(tensor: Tensor, even: bool) -> Tensor:
    if isinstance(tensor, DTensor):
        mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        local = _split(tensor.to_local(), even)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    weight = SplitWeight.empty(tensor.shape, tensor.device, even=even)
    if not tensor.is_meta:
        weight.write(tensor)
    return weight


# Operations that need not join the planes, or whose result lives in planes too.


def _cast(func: Any, weight: SplitWeight, **kwargs: Any) -> Tensor:
    device = kwargs.get("device") or weight.device
    if kwargs.get("dtype") == torch.bfloat16 and device == weight.device:
        return weight.high.detach()
    if kwargs.get("dtype") in (None, torch.float32):
        return _copy_of(weight, device)
    return func(weight.joined(), **kwargs)


def _clone(func: Any, weight: SplitWeight, **_: Any) -> Tensor:
    return _copy_of(weight, weight.device)


def _copy_of(weight: SplitWeight, device: torch.device) -> SplitWeight:
    copy = SplitWeight.empty(weight.shape, device, even=weight.ties is not None)
    if not copy.is_meta:
        copy.write(weight.joined().to(device))
    return copy


def _empty(func: Any, weight: SplitWeight, shape: Any = None, **kwargs: Any) -> Tensor:
    """empty_like, which a module moves by, and new_empty and new_zeros, which FSDP2 cuts shards by."""
    shape, device = weight.shape if shape is None else shape, kwargs.get("device") or weight.device
    if kwargs.get("dtype") not in (None, torch.float32):
        return torch.empty(shape, dtype=kwargs["dtype"], device=device)
    return SplitWeight.empty(shape, device, even=weight.ties is not None)


def _zeros(func: Any, weight: SplitWeight, shape: Any, **kwargs: Any) -> Tensor:
    return _empty(func, weight, shape, **kwargs).zero_()


def _plain_zeros(func: Any, weight: SplitWeight, **kwargs: Any) -> Tensor:
    """zeros_like, which an optimizer makes its state by: a plain tensor."""
    return func(weight.high, **{**kwargs, "dtype": kwargs.get("dtype") or torch.float32})


def _write(func: Any, target: Any, source: Tensor, *_: Any) -> Tensor:
    if not isinstance(target, SplitWeight):
        assert isinstance(source, SplitWeight)
        return func(target, source.joined())
    values = source.joined() if isinstance(source, SplitWeight) else source
    target.write(values.to(target.device, torch.float32).expand(target.shape))
    return target


SplitWeight.OWN = {
    aten._to_copy.default: _cast,
    aten.clone.default: _clone,
    aten.empty_like.default: _empty,
    aten.new_empty.default: _empty,
    aten.new_zeros.default: _zeros,
    aten.zeros_like.default: _plain_zeros,
    aten.copy_.default: _write,
}
