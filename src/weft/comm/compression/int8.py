"""8 bits a number: blocks with a scale each, rounded to the nearest, ties to even (Dettmers et al., 8-bit Optimizers via
Block-wise Quantization, 2022). The largest of a block becomes 127 or -127.
"""

import torch
from torch import Tensor

from weft.comm.compression.codec import Codec, as_bytes, from_bytes, in_blocks

BLOCK = 256
LARGEST = 127


def int8_reference(numbers: Tensor) -> Tensor:
    """What numbers, float32 of one dim, are after their way."""
    found = []
    for block in numbers.split(BLOCK):
        scale = block.abs().max() / LARGEST
        found.append(block if scale == 0 else (block / scale).round() * scale)
    return torch.cat(found)


def _encode(numbers: Tensor) -> Tensor:
    blocks = in_blocks(numbers, BLOCK)
    scale = blocks.abs().amax(2) / LARGEST  # not finite where a number is not
    steps = (blocks / torch.where(scale == 0, 1.0, scale)[..., None]).round_().clamp_(-LARGEST, LARGEST)
    codes = steps.nan_to_num_(0.0).to(torch.int8).flatten(1)[:, : numbers.shape[1]]
    return torch.cat([as_bytes(scale), as_bytes(codes)], 1)


def _decode(messages: Tensor, length: int) -> Tensor:
    blocks = -(-length // BLOCK)
    scale = from_bytes(messages[:, : 4 * blocks], torch.float32)
    steps = in_blocks(from_bytes(messages[:, 4 * blocks :], torch.int8).float(), BLOCK)
    # Of a scale that is not finite all numbers are NaN: zero times infinity too.
    return (steps * torch.where(scale.isfinite(), scale, torch.nan)[..., None]).flatten(1)[:, :length]


INT8 = Codec("int8", lambda length: 4 * -(-length // BLOCK) + length, _encode, _decode)
