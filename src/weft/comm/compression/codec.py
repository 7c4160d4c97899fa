"""Codec interface: rows of elements are encoded into messages whose size depends on the row length alone."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Codec(NamedTuple):
    """Encoder and decoder of rows of elements; the rows are independent.

    Non-finite elements stay visible: if a block has one, at least one element decoded from the block is non-finite.
    """

    name: str
    bytes: Callable[[int], int]
    """Row length -> message size in bytes."""
    encode: Callable[[Tensor], Tensor]
    """[rows, length] float32 -> [rows, bytes(length)] uint8."""
    decode: Callable[[Tensor, int], Tensor]
    """[rows, bytes(length)] uint8 and length -> [rows, length] float32."""
    owner: "Codec | None" = None
    """Codec of the mean that owners send back; None: this one. A sum of sparse messages is not sparse."""

    @property
    def bytes_per_element(self) -> float:
        """Bytes per element of a long row."""
        return self.bytes(2**20) / 2**20


def encode(codec: Codec, elements: Tensor) -> Tensor:
    """Encode rows into messages, piece by piece.

    Args:
        codec: codec of the messages.
        elements: [rows, length] float32; length at least 1.

    Returns:
        [rows, codec.bytes(length)] uint8, contiguous; input of `decode` on a device of the same type.
    """
    rows, length = elements.shape
    piece = piece_size(elements.device)
    if length <= piece:
        return codec.encode(elements)
    messages = elements.new_empty(rows, codec.bytes(length), dtype=torch.uint8)
    parts = messages.split(_piece_bytes(codec, length, piece), 1)
    for part, message in zip(elements.split(piece, 1), parts, strict=True):
        message.copy_(codec.encode(part))
    return messages


def decode(codec: Codec, messages: Tensor, length: int) -> Tensor:
    """Decode messages into rows.

    Args:
        codec: codec of the messages.
        messages: [rows, codec.bytes(length)] uint8.
        length: number of elements of each row.

    Returns:
        [rows, length] float32.
    """
    piece = piece_size(messages.device)
    if length <= piece:
        return codec.decode(messages, length)
    elements = messages.new_empty(len(messages), length, dtype=torch.float32)
    parts = messages.split(_piece_bytes(codec, length, piece), 1)
    for part, message in zip(elements.split(piece, 1), parts, strict=True):
        part.copy_(codec.decode(message, part.shape[1]))
    return elements


def piece_size(device: torch.device) -> int:
    """Elements encoded at once: a multiple of all block sizes that fits the cache of a CPU or saturates an accelerator."""
    return 2**18 if device.type == "cpu" else 2**24


def _piece_bytes(codec: Codec, length: int, piece: int) -> list[int]:
    count, rest = divmod(length, piece)
    return [codec.bytes(piece)] * count + ([codec.bytes(rest)] if rest else [])


# Helpers of the codecs


def in_blocks(elements: Tensor, size: int) -> Tensor:
    """Split rows into blocks, padded with zeros: [rows, length] -> [rows, blocks, size]."""
    missing = -elements.shape[1] % size
    return (pad(elements, (0, missing)) if missing else elements).unflatten(1, (-1, size))


def as_bytes(values: Tensor) -> Tensor:
    """Bytes of rows: [rows, count] of any dtype -> [rows, count * itemsize] uint8."""
    return values.contiguous().view(torch.uint8)


def from_bytes(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Values from a slice of messages: [rows, bytes] uint8 -> [rows, bytes / itemsize] of the dtype."""
    flat = part.reshape(-1)
    aligned = flat.storage_offset() % dtype.itemsize == 0
    return (flat if aligned else flat.clone()).view(dtype).view(len(part), -1)
