"""Codec with one bit per element: signs, and the mean magnitude of each block (Seide et al., 1-Bit Stochastic Gradient Descent,
2014).

Blocks are short, with bfloat16 scales: the rows of a matrix differ in magnitude (those of an embedding by the frequency of the
token), so that a common scale would fit none of them. The rounding error of the scale is part of the error feedback.

A block of zeros has the scale zero and is decoded exactly. In any other block, a zero is decoded as plus or minus the scale.
The optimizer must exclude parameters that such values must not move (`weft.optimizers.one_bit_adam`).
"""

import torch
from torch import Tensor

from weft.comm.compression.codec import Codec, as_bytes, from_bytes, in_blocks

BLOCK = 64
GATHER = sum(1 << (56 - 7 * bit) for bit in range(8))
"""Multiplier that collects eight bytes of 0 or 1, viewed as one int64, into the eight bits of the highest byte."""


def _encode(elements: Tensor) -> Tensor:
    blocks, length = in_blocks(elements, BLOCK), elements.shape[1]
    scale = blocks.abs().sum(2) / BLOCK
    if length % BLOCK:
        scale[:, -1] *= BLOCK / (length % BLOCK)
    negative = (blocks < 0).flatten(1).view(torch.int64)  # eight elements per int64
    signs = (negative * GATHER >> 56).to(torch.uint8)
    return torch.cat([as_bytes(scale.bfloat16()), signs[:, : -(-length // 8)]], 1)


def _decode(messages: Tensor, length: int) -> Tensor:
    blocks = -(-length // BLOCK)
    scale = from_bytes(messages[:, : 2 * blocks], torch.bfloat16)
    bits = torch.arange(256, device=messages.device)[:, None] >> torch.arange(8, device=messages.device)
    eight_signs = (1 - 2 * (bits & 1)).to(torch.int8).view(torch.int64).flatten()  # by byte value
    signs = eight_signs.take(messages[:, 2 * blocks :].long()).view(torch.int8)
    return (in_blocks(signs, BLOCK) * scale.float()[..., None]).flatten(1)[:, :length]


ONE_BIT = Codec("1-bit", lambda length: 2 * -(-length // BLOCK) + -(-length // 8), _encode, _decode)
