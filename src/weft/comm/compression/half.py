"""16 bits a number: bfloat16, or float16 in blocks with a power of two each, so that nothing overflows.

Float16 keeps 11 bits of what is above 2^-29 of the largest of its block, and nothing below 2^-40 of it; bfloat16 keeps 8 bits
of everything.
"""

import torch
from torch import Tensor

from weft.comm.compression.codec import Codec, as_bytes, from_bytes, in_blocks

BLOCK = 4096
HIGHEST = 15  # the largest number of a block is scaled to below 2^15: float16 ends just below 2^16


def float16_reference(numbers: Tensor) -> Tensor:
    """What numbers, float32 of one dim, are after their way through float16."""
    found = []
    for block in numbers.split(BLOCK):
        largest = block.abs().max()
        scale = 2.0 ** min(HIGHEST - int(torch.frexp(largest).exponent), 126) if largest.isfinite() else 1.0
        found.append((block * scale).half().float() / scale)
    return torch.cat(found)


def _encode_bfloat16(numbers: Tensor) -> Tensor:
    return as_bytes(numbers.bfloat16())


def _decode_bfloat16(messages: Tensor, length: int) -> Tensor:
    return from_bytes(messages, torch.bfloat16).float()


def _encode_float16(numbers: Tensor) -> Tensor:
    blocks = in_blocks(numbers, BLOCK)
    largest = blocks.abs().amax(2)
    shift = (HIGHEST - torch.frexp(largest).exponent).clamp(max=126)
    shift = torch.where(largest.isfinite(), shift, 0)  # what is not finite is so in float16
    halves = (blocks * _power(shift)[..., None]).half()
    return torch.cat([as_bytes(shift), as_bytes(halves.flatten(1)[:, : numbers.shape[1]])], 1)


def _decode_float16(messages: Tensor, length: int) -> Tensor:
    blocks = -(-length // BLOCK)
    shift = from_bytes(messages[:, : 4 * blocks], torch.int32)
    halves = in_blocks(from_bytes(messages[:, 4 * blocks :], torch.float16).float(), BLOCK)
    return (halves * _power(-shift)[..., None]).flatten(1)[:, :length]


def _power(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


BFLOAT16 = Codec("bf16", lambda length: 2 * length, _encode_bfloat16, _decode_bfloat16)
FLOAT16 = Codec("fp16", lambda length: 4 * -(-length // BLOCK) + 2 * length, _encode_float16, _decode_float16)
