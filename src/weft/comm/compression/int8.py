"""Codec with 8 bits per element: block-wise quantization with a scale per block (Dettmers et al., 8-bit Optimizers via
Block-wise Quantization, 2022). Rounds to nearest, ties to even; the block maximum maps to 127 or -127.
"""

import torch
from torch import Tensor

from weft.comm.compression.codec import Codec, as_bytes, from_bytes, in_blocks

BLOCK = 256
LARGEST = 127


def _encode(elements: Tensor) -> Tensor:
    blocks = in_blocks(elements, BLOCK)
    scale = blocks.abs().amax(2) / LARGEST  # non-finite if an element is non-finite
    steps = (blocks / torch.where(scale == 0, 1.0, scale)[..., None]).round_().clamp_(-LARGEST, LARGEST)
    codes = steps.nan_to_num_(0.0).to(torch.int8).flatten(1)[:, : elements.shape[1]]
    return torch.cat([as_bytes(scale), as_bytes(codes)], 1)


def _decode(messages: Tensor, length: int) -> Tensor:
    blocks = -(-length // BLOCK)
    scale = from_bytes(messages[:, : 4 * blocks], torch.float32)
    steps = in_blocks(from_bytes(messages[:, 4 * blocks :], torch.int8).float(), BLOCK)
    # A non-finite scale decodes to NaN for all elements of its block, also for zeros.
    return (steps * torch.where(scale.isfinite(), scale, torch.nan)[..., None]).flatten(1)[:, :length]


INT8 = Codec("int8", lambda length: 4 * -(-length // BLOCK) + length, _encode, _decode)
