"""One bit a number: its sign, and the mean magnitude of its block (Seide et al., 1-Bit Stochastic Gradient Descent, 2014).

Blocks are short, their scales bfloat16: rows of a matrix differ in magnitude, an embedding's by how often a token comes, and a
scale for several of them is wrong for each. What it rounds off is left for the next message, as all else is.

A block of zeros has the scale zero and comes back as it was. In a block that is not all zeros, a zero comes back as plus or
minus the scale: what must not move on that is for the optimizer to say (`weft.train.one_bit_adam`).
"""

import torch
from torch import Tensor

from weft.comm.compression.codec import Codec, as_bytes, from_bytes, in_blocks

BLOCK = 64
GATHER = sum(1 << (56 - 7 * bit) for bit in range(8))
"""Times eight bytes of 0 or 1, seen as one number, this has them as the eight bits of its highest byte."""


def one_bit_reference(numbers: Tensor) -> Tensor:
    """What numbers, float32 of one dim, are after their way."""
    return torch.cat(
        [torch.where(block < 0, -1.0, 1.0) * block.abs().mean().bfloat16() for block in numbers.split(BLOCK)]
    )


def _encode(numbers: Tensor) -> Tensor:
    blocks, length = in_blocks(numbers, BLOCK), numbers.shape[1]
    scale = blocks.abs().sum(2) / BLOCK
    if length % BLOCK:
        scale[:, -1] *= BLOCK / (length % BLOCK)
    negative = (blocks < 0).flatten(1).view(torch.int64)  # eight numbers each
    signs = (negative * GATHER >> 56).to(torch.uint8)
    return torch.cat([as_bytes(scale.bfloat16()), signs[:, : -(-length // 8)]], 1)


def _decode(messages: Tensor, length: int) -> Tensor:
    blocks = -(-length // BLOCK)
    scale = from_bytes(messages[:, : 2 * blocks], torch.bfloat16)
    bits = torch.arange(256, device=messages.device)[:, None] >> torch.arange(8, device=messages.device)
    eight_signs = (1 - 2 * (bits & 1)).to(torch.int8).view(torch.int64).flatten()  # of each byte
    signs = eight_signs.take(messages[:, 2 * blocks :].long()).view(torch.int8)
    return (in_blocks(signs, BLOCK) * scale.float()[..., None]).flatten(1)[:, :length]


ONE_BIT = Codec("1-bit", lambda length: 2 * -(-length // BLOCK) + -(-length // 8), _encode, _decode)
