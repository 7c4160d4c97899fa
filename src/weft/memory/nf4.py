"""Frozen weights in 4 bits: NormalFloat (NF4) of QLoRA (Dettmers et al., 2023), in the layout of bitsandbytes.

The last dim of a weight is divided into blocks of 64. A block has one float32 scale, the largest magnitude of its values, and
each value is the nearest of 16 numbers, the quantiles of a normal distribution between -1 and 1. Two values are in a byte, the
first one in the upper half: 4.5 bits a weight.

To every operation such a weight is one of its dtype: it is unpacked for the operation, and the result is freed after it.
Autograd saves the packed weight, and backward unpacks it again. FSDP2 gathers it in 4 bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.memory.packed import PackedTensor, has_values
from weft.memory.storages import plain_parts

BLOCK = 64
"""Values that share a scale."""
CODE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Values of a block relative to its scale, as bitsandbytes rounds them (Dettmers et al., 2023, appendix E)."""
CELLS = 256
"""Parts of the range of numbers, each shorter than a third of the smallest distance of two middles."""
SMALLEST = 1e-38
"""Divisor of a block of zeros."""

aten = torch.ops.aten


def pack(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Round values to the nearest number of their block.

    Args:
        values: [..., columns] float, columns a multiple of 64.
        codes: uint8 [..., columns / 2], which is filled.
        scales: float32 [..., columns / 64], which is filled.
    """
    code = torch.tensor(CODE, device=values.device)
    middles = torch.cat([(code[1:] + code[:-1]) / 2, code.new_tensor([2.0])])
    # A search among all middles takes several times as long: of a cell, one middle is left to compare with.
    starts = torch.linspace(-1, 1, CELLS + 1, device=values.device) - 2 / CELLS
    below = torch.bucketize(starts, middles).int()
    for block, own, scale in _chunks(values, codes, scales):
        block = block.reshape(-1, BLOCK).float()
        largest = block.abs().amax(1)
        scale.copy_(largest)
        # NaN and infinity are seen in the scales, by whoever checks weights.
        block = (block * (1 / largest.clamp(min=SMALLEST))[:, None]).nan_to_num_(0).clamp_(-1, 1).view(-1)
        nearest = below.index_select(0, ((block + 1) * (CELLS / 2)).int())
        nearest += block > middles.index_select(0, nearest)
        pairs = nearest.view(-1, 2)
        own.copy_(pairs[:, 0] << 4 | pairs[:, 1])


@torch.library.custom_op("weft::unpack_nf4", mutates_args=())
def unpack(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of packed weights.

    Args:
        codes: uint8 [..., columns / 2].
        scales: float32 [..., columns / 64].
        dtype: dtype of the result; the products of numbers and scales are computed in float32, and rounded once.

    Returns:
        [..., columns].
    """
    values = torch.empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype, device=codes.device)
    code = torch.tensor(CODE, device=codes.device)
    # Both numbers of each byte as one integer: to look up one is three times as fast as to look up a row of two.
    pairs = torch.stack([code.repeat_interleave(16), code.repeat(16)], 1).view(torch.int64).view(-1)
    for block, own, scale in _chunks(values, codes, scales):
        numbers = pairs.index_select(0, own.int()).view(torch.float32).view(-1, BLOCK)
        block.view(-1, BLOCK).copy_(numbers.mul_(scale[:, None]))
    return values


@unpack.register_fake
def _(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype)


def _chunks(values: Tensor, codes: Tensor, scales: Tensor) -> Any:
    """Flat pieces of all three, that fit the cache of a CPU core, or that saturate an accelerator."""
    size = 2**16 if values.device.type == "cpu" and has_values(values) else 2**26
    flat = (t.reshape(-1).split(size // each) for t, each in ((values, 1), (codes, 2), (scales, BLOCK)))
    return zip(*flat, strict=True)


class NF4Weight(PackedTensor):
    """Weight in 4 bits.

    Attributes:
        codes: uint8 [..., columns / 2], two numbers in a byte.
        scales: float32 [..., columns / 64].
        transposed: True for a view whose last two dims are swapped.
    """

    codes: Tensor
    scales: Tensor
    transposed: bool

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype, transposed: bool = False) -> "NF4Weight":
        like = torch.empty((*codes.shape[:-1], 2 * codes.shape[-1]), device="meta")
        like = like.mT if transposed else like
        return Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype, transposed: bool = False):
        self.codes, self.scales, self.transposed = codes, scales, transposed

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> "NF4Weight":
        """Uninitialized weight. The last size is a multiple of 64."""
        *rows, columns = shape
        codes = torch.empty((*rows, columns // 2), dtype=torch.uint8, device=device)
        return cls(codes, torch.empty((*rows, columns // BLOCK), device=device), dtype)

    def unpack(self) -> Tensor:
        values = unpack(self.codes, self.scales, self.dtype)
        return values.mT if self.transposed else values

    def pack_(self, values: Tensor) -> None:
        codes, scales = self.codes.contiguous(), self.scales.contiguous()
        pack(values.mT if self.transposed else values, codes, scales)
        if codes is not self.codes or scales is not self.scales:  # a view of a part
            self.codes.copy_(codes)
            self.scales.copy_(scales)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, bool]]:
        return ["codes", "scales"], (self.dtype, self.transposed)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], metadata: tuple[torch.dtype, bool], *_: object) -> "NF4Weight":
        return NF4Weight(inner["codes"], inner["scales"], *metadata)

    def with_parts(self, parts: Sequence[Tensor]) -> "NF4Weight":
        return NF4Weight(parts[0], parts[1], self.dtype, self.transposed)

    # FSDP2's hooks for a custom all-gather

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Inputs of the all-gather: both parts as float32, padded where the last ranks have fewer rows."""
        parts: tuple[Tensor, ...] = self.codes.view(torch.float32), self.scales
        missing = -(-outer_size[0] // mesh.size()) - self.shape[0]
        if missing:
            parts = tuple(torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) for part in parts)
        return parts, None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Weight for forward: over the gather buffers."""
        return None if out is not None else (NF4Weight(gathered[0].view(torch.uint8), gathered[1], dtype), ())


# Operations that keep the format


def _each(func: Any, weight: NF4Weight, *args: Any, **kwargs: Any) -> NF4Weight:
    """Operations that are the same for both parts."""
    return weight.with_parts([func(weight.codes, *args, **kwargs), func(weight.scales, *args, **kwargs)])


def _along(func: Any, weight: NF4Weight, *args: Any, **kwargs: Any) -> Any:
    """Split, select or slice along a dim: of the last two, of which one has the blocks, the values are unpacked."""
    position = int(func in _SPLITS)
    dim = (args[position] if len(args) > position else kwargs.get("dim", 0)) % weight.ndim
    if dim == weight.ndim - 1 or (weight.transposed and dim == weight.ndim - 2):
        return weight.view_by(lambda values: func(values, *args, **kwargs))
    codes, scales = func(weight.codes, *args, **kwargs), func(weight.scales, *args, **kwargs)
    if isinstance(codes, Tensor):
        return weight.with_parts([codes, scales])
    return [weight.with_parts(parts) for parts in zip(codes, scales, strict=True)]


def _transpose(func: Any, weight: NF4Weight, *dims: int) -> Any:
    if weight.ndim > 1 and {dim % weight.ndim for dim in dims or (0, 1)} == {weight.ndim - 1, weight.ndim - 2}:
        return NF4Weight(weight.codes, weight.scales, weight.dtype, not weight.transposed)
    return weight.view_by(lambda values: func(values, *dims))


def _view(func: Any, weight: NF4Weight, shape: Sequence[int]) -> Any:
    """View whose last dim consists of whole blocks."""
    shape = list(torch.empty(weight.shape, device="meta").view(shape).shape)
    if weight.transposed or shape[-1] % BLOCK or not (weight.codes.is_contiguous() and weight.scales.is_contiguous()):
        return weight.view_by(lambda values: func(values, shape))
    return weight.with_parts([part.view(*shape[:-1], shape[-1] // each) for part, each in _parts(weight)])


def _as_strided(func: Any, weight: NF4Weight, size: Sequence[int], stride: Any, offset: int | None = None) -> Any:
    """The first rows, contiguous, as FSDP2 takes them from a gathered weight with padding."""
    contiguous = torch.empty(size, device="meta").stride()
    if weight.transposed or tuple(stride) != contiguous or offset or size[-1] % BLOCK:
        return weight.view_by(lambda values: func(values, size, stride, offset))
    parts = []
    for part, each in _parts(weight):
        own = torch.empty((*size[:-1], size[-1] // each), device="meta")
        parts.append(part.as_strided(own.shape, own.stride(), part.storage_offset()))
    return weight.with_parts(parts)


def _parts(weight: NF4Weight) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
    """Parts, and the weights of an element of each."""
    return (weight.codes, 2), (weight.scales, BLOCK)


def _cast(func: Any, weight: NF4Weight, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    """Another device or dtype: the same packed values, unpacked to that dtype."""
    dtype, device = dtype or weight.dtype, torch.device(device or weight.device)
    if not dtype.is_floating_point:
        return weight.unpack().to(device, dtype)
    return NF4Weight(weight.codes.to(device), weight.scales.to(device), dtype, weight.transposed)


def _empty(func: Any, weight: NF4Weight, shape: Any = None, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    """empty_like (used by Module.to_empty), and new_empty and new_zeros (used by FSDP2 for shards)."""
    shape, device = weight.shape if shape is None else shape, torch.device(device or weight.device)
    if (dtype is not None and not dtype.is_floating_point) or not shape or shape[-1] % BLOCK:
        return torch.zeros(shape, dtype=dtype or weight.dtype, device=device)
    empty = NF4Weight.empty(shape, dtype or weight.dtype, device)
    if func is aten.new_zeros.default:
        empty.codes.zero_()
        empty.scales.zero_()
    return empty


def _copy(func: Any, target: Any, source: Tensor, *_: Any) -> Tensor:
    if not isinstance(target, NF4Weight):
        assert isinstance(source, PackedTensor)
        return func(target, source.unpack())
    if isinstance(source, NF4Weight) and (source.shape, source.transposed) == (target.shape, target.transposed):
        target.codes.copy_(source.codes)
        target.scales.copy_(source.scales)
        return target
    values = source.unpack() if isinstance(source, PackedTensor) else source
    target.pack_(values.to(target.device).expand(target.shape))
    return target


_SPLITS = aten.split.Tensor, aten.split_with_sizes.default
NF4Weight.OWN = {
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.clone.default), _each),
    **dict.fromkeys((aten.select.int, aten.slice.Tensor, aten.unbind.int, *_SPLITS), _along),
    **dict.fromkeys((aten.t.default, aten.transpose.int), _transpose),
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.as_strided.default: _as_strided,
    aten._to_copy.default: _cast,
    aten.empty_like.default: _empty,
    aten.new_empty.default: _empty,
    aten.new_zeros.default: _empty,
    aten.copy_.default: _copy,
}


def packed(values: Tensor, dtype: torch.dtype) -> NF4Weight:
    """Weight of the same shape in 4 bits; on the meta device without values.

    Args:
        values: float [..., columns], columns a multiple of 64.
        dtype: dtype in which operations read it.
    """
    weight = NF4Weight.empty(values.shape, dtype, values.device)
    if has_values(values):
        weight.pack_(values)
    return weight


def is_nf4(tensor: Any) -> bool:
    """True for a weight in 4 bits, or a DTensor of such weights."""
    return isinstance(getattr(tensor, "_local_tensor", tensor), NF4Weight)


def nf4_bytes(model: nn.Module) -> int:
    """Bytes of the weights in 4 bits that this rank holds."""
    return sum(part.nbytes for weight in model.parameters() if is_nf4(weight) for part in plain_parts(weight))
