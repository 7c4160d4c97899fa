"""Rows of activations and of their gradients in 8 bits, for the all-to-alls of experts.

    fp8     e4m3 (Micikevicius et al., FP8 Formats for Deep Learning, 2022)
    int8    integers -127 to 127, rounded to the nearest, ties to even

Each block of 128 elements of a row has a power of two as scale, the smallest with which no element overflows (DeepSeek-V3
Technical Report, 2024, sections 3.3.2 and 3.3.3). Its exponent is one byte (E8M0; OCP Microscaling Formats, 2023) after the
elements of the row, so that values and scales are one message.

Scaling by a power of two is exact. Decoded elements are exact in bfloat16 and float32, and encoding them once more changes
nothing: rows that are forwarded over several hops are rounded once.
"""

from typing import Literal

import torch
from torch import Tensor

from weft.comm.compression.codec import in_blocks, piece_size

RowFormat = Literal["int8", "fp8"]
BLOCK = 128
"""Elements of a row that share a scale."""
DTYPES: dict[RowFormat, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST: dict[RowFormat, float] = {"int8": 127.0, "fp8": 448.0}
"""Largest magnitude of an encoded element."""


def row_bytes(length: int) -> int:
    """Message size in bytes of a row with `length` elements."""
    return length + -(-length // BLOCK)


def encode_rows(rows: Tensor, row_format: RowFormat) -> Tensor:
    """Round rows to 8 bits.

    Args:
        rows: [R, H] float, any strides; R may be 0. A block with a non-finite element decodes to non-finite elements only.
        row_format: format of the elements.

    Returns:
        [R, row_bytes(H)] uint8: elements, then the exponents of their scales.
    """
    messages = rows.new_empty(len(rows), row_bytes(rows.shape[1]), dtype=torch.uint8)
    at_once = _rows_at_once(rows)
    for part, message in zip(rows.split(at_once), messages.split(at_once), strict=True):
        message.copy_(_encode(part, row_format))
    return messages


def decode_rows(messages: Tensor, rows: Tensor, row_format: RowFormat) -> None:
    """Decode messages into rows.

    Args:
        messages: [R, row_bytes(H)] uint8.
        rows: [R, H] float, contiguous; overwritten.
        row_format: format of the elements.
    """
    length, at_once = rows.shape[1], _rows_at_once(rows)
    for message, part in zip(messages.split(at_once), rows.split(at_once), strict=True):
        elements = in_blocks(message[:, :length].view(DTYPES[row_format]).float(), BLOCK)
        scale = (message[:, length:].int() << 23).view(torch.float32)  # exponent 255 is infinity
        part.copy_((elements * scale[..., None]).flatten(1)[:, :length])


def _encode(rows: Tensor, row_format: RowFormat) -> Tensor:
    blocks = in_blocks(rows.float().contiguous(), BLOCK)
    largest = blocks.abs().amax(2).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    # Exponent of the quotient's float32 bits, rounded up; 0 for a block of zeros, 255 for a non-finite block.
    exponents = ((largest / LARGEST[row_format]).view(torch.int32) + 0x7FFFFF) >> 23
    scaled = blocks * ((254 - exponents) << 23).view(torch.float32)[..., None]
    if row_format == "int8":
        scaled = scaled.round_().clamp_(-LARGEST["int8"], LARGEST["int8"]).nan_to_num_(0.0)
    elements = scaled.to(DTYPES[row_format]).view(torch.uint8).flatten(1)[:, : rows.shape[1]]
    return torch.cat([elements, exponents.to(torch.uint8)], 1)


def _rows_at_once(rows: Tensor) -> int:
    """Rows whose float32 copies are made at once."""
    return max(1, piece_size(rows.device) // max(1, rows.shape[1]))
