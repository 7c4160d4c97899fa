"""Model folders in 4 bits, as bitsandbytes writes them: weights of linear layers as NF4, beside their scales.

    NAME                                  uint8: two numbers in a byte, row after row
    NAME.absmax                           scale of each 64 weights: float32, or uint8 if they are quantized too
    NAME.quant_map                        the 16 numbers
    NAME.nested_absmax, .nested_quant_map of scales that are quantized: a scale of each 256, and the 256 numbers
    NAME.quant_state.bitsandbytes__nf4    JSON: sizes, and the offset of scales that are quantized

A rank reads the rows of its slice as float32. To pack them again (`weft.memory.nf4`) gives the same numbers and scales, because
the largest number of a block is 1 or -1.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from weft.checkpoint.weight_files import PACKED, StoredTensor
from weft.errors import CheckpointError
from weft.memory.nf4 import BLOCK, CODE, unpack

NESTED_BLOCK = 256
"""Scales that share a scale."""
STATE_BYTES = 2**12
"""Bytes of a table of sizes, at most."""


def is_packed(settings: Any) -> bool:
    """True for a `quantization_config` of a folder in 4 bits that can be read."""
    return (
        isinstance(settings, dict)
        and settings.get("quant_method") == "bitsandbytes"
        and bool(settings.get("load_in_4bit"))
        and settings.get("bnb_4bit_quant_type") == "nf4"
    )


def unpacked(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors of a folder, of which packed weights have the shape of the weight, and float32 as their dtype.

    Raises:
        CheckpointError: a packed weight has other blocks, or parts of other sizes.
    """
    found = dict(stored)
    for name in (key.removesuffix(PACKED) for key in stored if key.endswith(PACKED)):
        state = _read_state(stored, name)
        shape, parts = tuple(state["shape"]), _sizes_of_parts(name, state, nested=f"{name}.nested_absmax" in stored)
        if missing := [key for key in parts if key not in stored]:
            raise _damaged(name, stored[f"{name}{PACKED}"], f"the folder has no {missing[0]}")
        expected = "nf4", BLOCK, NESTED_BLOCK if len(parts) > 3 else None
        if (
            len(shape) != 2
            or shape[1] % BLOCK
            or tuple(state.get(key) for key in ("quant_type", "blocksize", "nested_blocksize")) != expected
            or not isinstance(state.get("nested_offset", 0.0), float)
            or any((stored[key].dtype, math.prod(stored[key].shape)) != part for key, part in parts.items())
            or not torch.allclose(_read(stored, f"{name}.quant_map"), torch.tensor(CODE), atol=1e-6)
        ):
            raise _damaged(name, stored[name], f"its sizes are {state}")
        found[name] = StoredTensor(stored[name].file, "F32", shape)
    return found


def _sizes_of_parts(name: str, state: dict[str, Any], *, nested: bool) -> dict[str, tuple[str, int]]:
    """Dtype and number of elements of each part of a weight."""
    weights = math.prod(state["shape"])
    scales = weights // BLOCK
    parts = {name: ("U8", weights // 2), f"{name}.quant_map": ("F32", len(CODE))}
    if not nested:
        return parts | {f"{name}.absmax": ("F32", scales)}
    outer = {f"{name}.nested_absmax": ("F32", -(-scales // NESTED_BLOCK)), f"{name}.nested_quant_map": ("F32", 256)}
    return parts | {f"{name}.absmax": ("U8", scales)} | outer


def _read_state(stored: Mapping[str, StoredTensor], name: str) -> dict[str, Any]:
    """Sizes of a packed weight.

    Raises:
        CheckpointError: they are damaged.
    """
    table = stored[f"{name}{PACKED}"]
    if math.prod(table.shape) > STATE_BYTES:
        raise _damaged(name, table, "its table is too long")
    try:
        state = json.loads(bytes(_read(stored, f"{name}{PACKED}").tolist()))
        if not all(isinstance(size, int) and size > 0 for size in state["shape"]):
            raise ValueError(f"its shape is {state['shape']}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(name, table, str(error)) from None
    return dict(state)


def read_rows(part: Callable[[str], Any], name: str, first: int, last: int) -> Tensor:
    """Rows of a packed weight, float32 [last - first, columns].

    Args:
        part: slice of safetensors of a tensor of the folder, by its name.
        name: name of the weight.
        first, last: first row, and row after the last.
    """
    state = json.loads(bytes(part(f"{name}{PACKED}")[:].tolist()))
    columns = state["shape"][1]
    begin, end = (row * columns // BLOCK for row in (first, last))
    scales: Tensor = part(f"{name}.absmax")[begin:end]
    if scales.dtype == torch.uint8:
        outer = part(f"{name}.nested_absmax")[:].float()[torch.arange(begin, end) // NESTED_BLOCK]
        scales = part(f"{name}.nested_quant_map")[:].float()[scales.int()] * outer + state["nested_offset"]
    codes: Tensor = part(name)[begin * BLOCK // 2 : end * BLOCK // 2]
    return unpack(codes.view(last - first, -1), scales.float().view(last - first, -1), torch.float32)


def _read(stored: Mapping[str, StoredTensor], name: str) -> Tensor:
    with safe_open(stored[name].file, "pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _damaged(name: str, stored: StoredTensor, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{name} in 4 bits cannot be read: {problem}",
        where=str(stored.file),
        rule=f"weights in 4 bits are matrices of bitsandbytes in nf4, in blocks of {BLOCK}, whose columns are whole blocks",
        fix='name the folder of the unquantized model: adapter.kind = "qlora" packs it when it is read',
    )
