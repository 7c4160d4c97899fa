"""What every codec has in common: rows of numbers become messages of a size that follows from their length alone."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Codec(NamedTuple):
    """Encodes and decodes several rows of numbers at once, each for itself.

    A number that is not finite is never hidden: of what is decoded from its block, something is not finite either.
    """

    name: str
    bytes: Callable[[int], int]
    """Of the message of so many numbers."""
    encode: Callable[[Tensor], Tensor]
    """[rows, length] float32 -> [rows, bytes(length)] uint8."""
    decode: Callable[[Tensor, int], Tensor]
    """[rows, bytes(length)] uint8 and length -> [rows, length] float32."""

    @property
    def bytes_per_number(self) -> float:
        """Of a long row."""
        return self.bytes(2**20) / 2**20


def encode(codec: Codec, numbers: Tensor) -> Tensor:
    """The messages of some rows of numbers, a piece of each at a time.

    Args:
        codec: how.
        numbers: [rows, length] float32, of any length from 1.

    Returns:
        [rows, codec.bytes(length)] uint8, contiguous: what `decode` reads on a device of the same type.
    """
    rows, length = numbers.shape
    piece = _piece(numbers.device)
    if length <= piece:
        return codec.encode(numbers)
    messages = numbers.new_empty(rows, codec.bytes(length), dtype=torch.uint8)
    parts = messages.split(_piece_bytes(codec, length, piece), 1)
    for part, message in zip(numbers.split(piece, 1), parts, strict=True):
        message.copy_(codec.encode(part))
    return messages


def decode(codec: Codec, messages: Tensor, length: int) -> Tensor:
    """The numbers of some messages.

    Args:
        codec: that encoded them.
        messages: [rows, codec.bytes(length)] uint8.
        length: of each row.

    Returns:
        [rows, length] float32.
    """
    piece = _piece(messages.device)
    if length <= piece:
        return codec.decode(messages, length)
    numbers = messages.new_empty(len(messages), length, dtype=torch.float32)
    parts = messages.split(_piece_bytes(codec, length, piece), 1)
    for part, message in zip(numbers.split(piece, 1), parts, strict=True):
        part.copy_(codec.decode(message, part.shape[1]))
    return numbers


def _piece(device: torch.device) -> int:
    """Numbers that are encoded at once: a multiple of all blocks that stays in a CPU's cache, or keeps an accelerator busy."""
    return 2**18 if device.type == "cpu" else 2**24


def _piece_bytes(codec: Codec, length: int, piece: int) -> list[int]:
    whole, rest = divmod(length, piece)
    return [codec.bytes(piece)] * whole + ([codec.bytes(rest)] if rest else [])


# For the codecs


def in_blocks(numbers: Tensor, size: int) -> Tensor:
    """Rows in blocks, with zeros behind the last number: [rows, length] -> [rows, blocks, size]."""
    rows, length = numbers.shape
    return pad(numbers, (0, -length % size)).view(rows, -1, size) if length % size else numbers.view(rows, -1, size)


def as_bytes(values: Tensor) -> Tensor:
    """The bytes of some rows: [rows, count] of any format -> [rows, count * itemsize] uint8."""
    return values.contiguous().view(torch.uint8)


def from_bytes(part: Tensor, dtype: torch.dtype) -> Tensor:
    """The values whose bytes are a part of some messages: [rows, bytes] uint8 -> [rows, bytes / itemsize]."""
    flat = part.reshape(-1)
    aligned = flat.storage_offset() % dtype.itemsize == 0
    return (flat if aligned else flat.clone()).view(dtype).view(len(part), -1)
