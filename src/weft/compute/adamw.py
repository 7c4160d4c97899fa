"""AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019) in one Triton kernel for all tensors of a step.

The kernel reads weight, gradient and moments of an element once, and writes weight and moments once. Loss scale and
clipping are a factor of the gradient, so that they need no pass of their own:

    weight                       moments             bytes per element with fp32 gradients
    fp32                         fp32                28
    bf16 and 16 remaining bits   fp32                28, where operations of torch move about 72
    fp32, or the two planes      bf16                20
    fp32, or the two planes      int8 in blocks      16, and 1/32 for scales

Weights in planes are those of `weft.memory.weights`, moments in blocks those of `weft.memory.quantized_state`, with the
same bits. All tensors that are stored alike share a launch: a table on the device has their addresses and settings, and
tensor y is updated by the programs (x, y). The table is one copy from the host for which nobody waits.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.compute.jit import device_of, jit, num_multiprocessors, tl

WIDTH = 256
"""Elements per scale of moments in blocks."""
WARPS = 4
PROGRAMS = 8
"""Programs per multiprocessor and tensor, at most; each updates every n-th tile."""
COLUMNS = 16
"""64-bit entries of the table per tensor: elements, 8 addresses, and settings in float64."""
SCALARS = 9
"""Scalars of the kernel per tensor."""
SETTINGS = 9
"""First column of the settings: learning rate, weight decay, two betas, eps."""
FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
SPLIT = (torch.bfloat16, torch.int16)
WEIGHTS = {(dtype,): name for dtype, name in FORMATS.items()} | {SPLIT: "split", (*SPLIT, torch.uint8): "split_even"}
"""Format of a weight by the dtypes of its tensors."""
MOMENTS: dict[tuple[torch.dtype, ...], str] = {
    **{(dtype, dtype): name for dtype, name in FORMATS.items()},
    (torch.uint8, torch.float32, torch.uint8, torch.float32): "int8",
}
"""Format of the moments by the dtypes of the tensors of both."""


class AdamWTensor(NamedTuple):
    """Plain contiguous tensors of a parameter on this rank, and settings of its update."""

    weight: tuple[Tensor, ...]
    """One float32 or bfloat16 tensor; or the planes of a split weight: bfloat16, int16 and, to round ties to even, uint8."""
    gradient: Tensor
    """float32 or bfloat16."""
    first: tuple[Tensor, ...]
    """First moment: one float32 or bfloat16 tensor; or [blocks, 256] uint8 codes and [blocks] float32 scales."""
    second: tuple[Tensor, ...]
    """Second moment, stored like the first."""
    step: Tensor
    """Number of updates so far, float32 scalar on the device; the update adds 1."""
    lr: float | Tensor
    """Learning rate; a tensor is a scalar, on any device."""
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class Format(NamedTuple):
    """Storage of a tensor, for which a launch is compiled."""

    weight: str
    """"fp32", "bf16", "split" or "split_even"."""
    gradient: str
    moments: str
    """"fp32", "bf16" or "int8"."""
    aligned: bool
    """True if all addresses, and the numbers of elements, are multiples of 16."""
    lr_is_tensor: bool


def format_of(tensor: AdamWTensor) -> Format | None:
    """Format of a tensor; None if the kernel does not support it."""
    parts = (*tensor.weight, tensor.gradient, *tensor.first, *tensor.second)
    dtypes = tuple([part.dtype for part in parts])  # of weight, gradient, and the two moments
    planes, end = len(tensor.weight), len(dtypes) - 2 * len(tensor.first)
    weight, gradient = WEIGHTS.get(dtypes[:planes]), FORMATS.get(dtypes[planes])
    moments = MOMENTS.get(dtypes[end:]) if len(tensor.first) == len(tensor.second) else None
    if weight is None or gradient is None or moments is None:
        return None
    if weight == "split_even" and tensor.weight[1].storage_offset():  # from which the bits of ties are counted
        return None
    if moments == "int8" and tensor.first[0].shape[1:] != (WIDTH,):
        return None
    device = tensor.step.device
    if not all(part.is_contiguous() and part.device == device for part in parts):
        return None
    aligned = tensor.gradient.numel() % 16 == 0 and all(part.data_ptr() % 16 == 0 for part in parts)
    return Format(weight, gradient, moments, aligned, isinstance(tensor.lr, Tensor))


def launch(
    tensors: Mapping[Format, Sequence[AdamWTensor]],
    factor: float | Tensor,
    maps: tuple[Tensor, Tensor],
    overflows: Tensor | None = None,
) -> None:
    """Update tensors in place.

    Args:
        tensors: tensors of one device, by their format.
        factor: factor of the gradients, which stay unchanged; a scalar on the device needs no wait for its value.
        maps: [256] float32 values of the codes of first and second moments in blocks, ascending, on any device.
        overflows: float32 scalar on the device: 0, or 1 to leave all tensors as they are; None: 0.
    """
    for kind, group in tensors.items():
        device = group[0].step.device
        steps = [tensor.step for tensor in group]
        torch._foreach_add_(steps, 1)
        if overflows is not None:
            torch._foreach_sub_(steps, [overflows] * len(steps))
        rows, largest = rows_of(kind.moments), max(tensor.gradient.numel() for tensor in group)
        programs = min(-(-largest // (rows * WIDTH)), PROGRAMS * num_multiprocessors(group[0].step))
        if not programs:  # a rank has no elements if there are more ranks than rows
            continue
        table = _table(group).to(device, non_blocking=True)
        with device_of(group[0].step):
            update_kernel[(programs, len(group))](
                table,
                _coefficients(table, group, factor, kind.lr_is_tensor, overflows),
                torch.stack(maps).to(device, non_blocking=True),
                WEIGHT=kind.weight,
                GRADIENT=kind.gradient,
                MOMENTS=kind.moments,
                ALIGNED=kind.aligned,
                ROWS=rows,
                WIDTH=WIDTH,
                COLUMNS=COLUMNS,
                SCALARS=SCALARS,
                num_warps=WARPS,
            )


def rows_of(moments: str) -> int:
    """Blocks of `WIDTH` elements that a program updates at a time: moments in blocks need more registers."""
    return 2 if moments == "int8" else 4


def _table(group: Sequence[AdamWTensor]) -> Tensor:
    """Addresses and settings, [tensors, COLUMNS] int64, whose last columns have the bits of float64; pinned for a GPU."""
    addresses, settings = [], []
    for tensor in group:
        padded = (*tensor.weight, *[tensor.weight[0]] * (3 - len(tensor.weight)))
        moments = [(*moment, moment[0])[:2] for moment in (tensor.first, tensor.second)]
        parts = (tensor.gradient, *padded, *moments[0], *moments[1])
        addresses.append([tensor.gradient.numel(), *(part.data_ptr() for part in parts)])
        lr = 0.0 if isinstance(tensor.lr, Tensor) else tensor.lr
        settings.append([lr, tensor.weight_decay, *tensor.betas, tensor.eps])
    table = torch.zeros(len(group), COLUMNS, dtype=torch.int64, pin_memory=group[0].gradient.is_cuda)
    table[:, :SETTINGS] = torch.tensor(addresses)
    table[:, SETTINGS : SETTINGS + 5] = torch.tensor(settings, dtype=torch.float64).view(torch.int64)
    return table


def _coefficients(
    table: Tensor, group: Sequence[AdamWTensor], factor: float | Tensor, lr_is_tensor: bool, overflows: Tensor | None
) -> Tensor:
    """Scalars of the kernel, [tensors, SCALARS] float32, computed in float64: 1 - beta ** step loses digits otherwise."""
    settings = table[:, SETTINGS : SETTINGS + 5].contiguous().view(torch.float64)
    lr, weight_decay, beta1, beta2, eps = settings.unbind(1)
    if lr_is_tensor:
        rates = torch.stack([tensor.lr.reshape(()) for tensor in group])  # type: ignore[union-attr]
        lr = rates.to(table.device, torch.float64, non_blocking=True)
    steps = torch.stack([tensor.step for tensor in group]).double()
    step_size, second_factor = lr / (1 - beta1**steps), (1 - beta2**steps).rsqrt()
    zeros = torch.zeros_like(lr)
    skips = zeros if overflows is None else zeros + overflows
    columns = (zeros + factor, lr * weight_decay, 1 - beta1, beta2, 1 - beta2, step_size, second_factor, eps, skips)
    return torch.stack(columns, 1).float()


@jit
def update_kernel(  # type: ignore[no-untyped-def]
    table,
    coefficients,
    entries,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    MOMENTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALARS: tl.constexpr,
):
    row = table + tl.program_id(1) * COLUMNS
    scalars = coefficients + tl.program_id(1) * SCALARS
    size = tl.where(tl.load(scalars + 8) == 0, tl.load(row), 0)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    upper: tl.constexpr = "int16" if WEIGHT == "split" or WEIGHT == "split_even" else WEIGHT
    codes: tl.constexpr = "uint8" if MOMENTS == "int8" else MOMENTS
    gradient, weight = _pointer(row + 1, GRADIENT, ALIGNED), _pointer(row + 2, upper, ALIGNED)
    low, ties = _pointer(row + 3, "int16", ALIGNED), _pointer(row + 4, "uint8", ALIGNED)
    first, first_scale = _pointer(row + 5, codes, ALIGNED), _pointer(row + 6, "fp32", ALIGNED)
    second, second_scale = _pointer(row + 7, codes, ALIGNED), _pointer(row + 8, "fp32", ALIGNED)
    factor, decay = tl.load(scalars), tl.load(scalars + 1)
    share1, beta2, share2 = tl.load(scalars + 2), tl.load(scalars + 3), tl.load(scalars + 4)
    step_size, second_factor, eps = tl.load(scalars + 5), tl.load(scalars + 6), tl.load(scalars + 7)
    tile = tl.program_id(0).to(tl.int64)
    while tile * (ROWS * WIDTH) < size:
        block = tile * ROWS + tl.arange(0, ROWS)
        index = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        inside = index < size
        full = block * WIDTH < size
        g = tl.load(gradient + index, mask=inside, other=0.0).to(tl.float32) * factor
        m = _load_moment(first + index, first_scale + block, inside, full, entries, MOMENTS)
        v = _load_moment(second + index, second_scale + block, inside, full, entries + WIDTH, MOMENTS)
        w = _load_weight(weight + index, low + index, ties + (index >> 3), index, inside, WEIGHT)
        m += share1 * (g - m)
        v = beta2 * v + share2 * (g * g)
        w -= decay * w
        w -= tl.div_rn(step_size * m, tl.sqrt_rn(v) * second_factor + eps)
        if WEIGHT == "split" or WEIGHT == "split_even":
            bits = w.to(tl.int32, bitcast=True)
            bits = tl.where(w != w, 0x7FC00000, bits)  # a payload could overflow into the sign
            if WEIGHT == "split":
                bits += 0x8000
                rounded = bits
            else:
                rounded = bits + ((bits >> 16) & 1) + 0x7FFF
                byte = tile * (ROWS * WIDTH // 8) + tl.arange(0, ROWS * WIDTH // 8)
                _store_ties(ties + byte, byte * 8 < size, tl.reshape(bits, (ROWS * WIDTH // 8, 8)))
            tl.store(weight + index, (rounded >> 16).to(tl.int16), mask=inside)
            tl.store(low + index, bits.to(tl.int16), mask=inside)
        else:
            tl.store(weight + index, w.to(weight.dtype.element_ty), mask=inside)
        _store_moment(first + index, first_scale + block, m, inside, full, entries, MOMENTS, WIDTH, True)
        _store_moment(second + index, second_scale + block, v, inside, full, entries + WIDTH, MOMENTS, WIDTH, False)
        tile += tl.num_programs(0)


@jit
def _pointer(entry, KIND: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointer of an address in the table."""
    address = tl.load(entry)
    if KIND == "fp32":
        pointer = address.to(tl.pointer_type(tl.float32))
    elif KIND == "bf16":
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif KIND == "int16":
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit
def _load_weight(weight, low, ties, index, inside, WEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weight in float32; planes are joined."""
    if WEIGHT == "split" or WEIGHT == "split_even":
        lower = tl.load(low, mask=inside, other=0).to(tl.int32)
        bits = (tl.load(weight, mask=inside, other=0).to(tl.int32) << 16) | (lower & 0xFFFF)
        if WEIGHT == "split":
            bits -= 0x8000
        else:
            byte = tl.load(ties, mask=inside, other=0).to(tl.int32)
            is_down = (lower == -0x8000) & (((byte >> (index & 7).to(tl.int32)) & 1) == 1)
            bits += (is_down.to(tl.int32) - (lower < 0).to(tl.int32)) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return tl.load(weight, mask=inside, other=0.0).to(tl.float32)


@jit
def _store_ties(ties, inside, bits):  # type: ignore[no-untyped-def]
    """Replace the bits of the ties, and only these, in bytes of the third plane; `bits` has 8 weights per byte."""
    position = tl.arange(0, 8)[None, :]
    is_tie = (bits & 0xFFFF) == 0x8000
    is_down = is_tie & (((bits >> 16) & 1) == 0)
    replaced = tl.sum(is_tie.to(tl.int32) << position, 1)
    down = tl.sum(is_down.to(tl.int32) << position, 1)
    old = tl.load(ties, mask=inside, other=0).to(tl.int32)
    tl.store(ties, ((old & (replaced ^ 0xFF)) | down).to(tl.uint8), mask=inside)


@jit
def _load_moment(moment, scale, inside, full, entries, MOMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Moment in float32."""
    if MOMENTS == "int8":
        code = tl.load(moment, mask=inside, other=0).to(tl.int32)
        values = tl.load(entries + code) * tl.load(scale, mask=full, other=0.0)[:, None]
        return tl.where(inside, values, 0.0)
    else:
        return tl.load(moment, mask=inside, other=0.0).to(tl.float32)


@jit
def _store_moment(  # type: ignore[no-untyped-def]
    moment, scale, values, inside, full, entries, MOMENTS: tl.constexpr, WIDTH: tl.constexpr, SIGNED: tl.constexpr
):
    """Store a moment; in blocks, the scale is the first of the elements of the largest magnitude."""
    if MOMENTS == "int8":
        largest = tl.argmax(tl.abs(values), 1, tie_break_left=True)
        first = tl.arange(0, WIDTH)[None, :] == largest[:, None]
        size = tl.sum(tl.where(first, values, 0.0), 1)
        tl.store(scale, size, mask=full)
        divisor = tl.where(size == 0, 1.0, size)[:, None]
        code = _nearest_code(tl.div_rn(values, tl.broadcast_to(divisor, values.shape)), entries, SIGNED)
        tl.store(moment, code.to(tl.uint8), mask=tl.broadcast_to(full[:, None], code.shape))
    else:
        tl.store(moment, values.to(moment.dtype.element_ty), mask=inside)


@jit
def _nearest_code(q, entries, SIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Code of the entry nearest to q: guessed from its decade, then compared with the borders of its neighbours."""
    size = tl.abs(q)
    steps = tl.full(q.shape, 1 if SIGNED else 2, tl.int32)  # entries of the decade
    largest = tl.full(q.shape, 1e-6, tl.float32)
    for exponent in tl.static_range(6):
        above = size > 10.0 ** (exponent - 6)
        steps = tl.where(above, (2 if SIGNED else 4) << exponent, steps)
        largest = tl.where(above, 10.0 ** (exponent - 5), largest)
    place = ((tl.div_rn(size, largest) - 0.1) * (1 / 0.9) * steps.to(tl.float32)).to(tl.int32)
    place = tl.minimum(tl.maximum(place, 0), steps - 1)
    code = 127 + tl.where(q < 0, -(steps + place), steps + place) if SIGNED else steps - 1 + place
    return code + (q >= _border(entries, code)).to(tl.int32) - (q < _border(entries, code - 1)).to(tl.int32)


@jit
def _border(entries, code):  # type: ignore[no-untyped-def]
    """Border between the entry of a code and the next one; infinite outside of the map."""
    middle = (tl.load(entries + tl.maximum(code, 0)) + tl.load(entries + tl.minimum(code + 1, 255))) / 2
    return tl.where(code < 0, -float("inf"), tl.where(code > 254, float("inf"), middle))
