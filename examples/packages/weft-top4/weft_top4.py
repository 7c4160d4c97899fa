"""Gradient codec that sends the four largest of every 64 elements: 12 bytes instead of 256 (Aji and Heafield, 2017).

Error feedback, which is on by default, sends what was left out with later messages.
"""

import torch
from torch import Tensor

from weft.comm.compression.codec import Codec, as_bytes, from_bytes, in_blocks
from weft.comm.compression.int8 import INT8

BLOCK, KEPT = 64, 4


def num_bytes(length: int) -> int:
    """Size of the message of a row: a bf16 value and an index of one byte for each kept element."""
    return -(-length // BLOCK) * KEPT * 3


def encode(elements: Tensor) -> Tensor:
    """[rows, length] float32 -> [rows, num_bytes(length)] uint8."""
    blocks = in_blocks(elements, BLOCK)
    indices = blocks.abs().topk(KEPT, dim=2).indices  # NaN and infinity are the largest: they stay visible
    values = blocks.gather(2, indices).to(torch.bfloat16)
    return torch.cat([as_bytes(values.flatten(1)), as_bytes(indices.to(torch.uint8).flatten(1))], dim=1)


def decode(messages: Tensor, length: int) -> Tensor:
    """[rows, num_bytes(length)] uint8 -> [rows, length] float32."""
    rows, blocks = len(messages), -(-length // BLOCK)
    values, indices = messages.split([2 * blocks * KEPT, blocks * KEPT], dim=1)
    elements = torch.zeros(rows, blocks, BLOCK, device=messages.device)
    shape = rows, blocks, KEPT
    elements.scatter_(2, indices.reshape(shape).long(), from_bytes(values, torch.bfloat16).float().reshape(shape))
    return elements.flatten(1)[:, :length]


# The mean of several such messages has more than four elements in a block: owners send it back in 8 bits.
TOP4 = Codec("top4", num_bytes, encode, decode, owner=INT8)
