"""Codecs with 16 bits per element: bfloat16, and float16 with a power-of-two scale per block, which prevents overflow.

Float16 keeps 11 bits of elements above 2^-29 of the block maximum, and rounds elements below 2^-40 of it to zero. Bfloat16
keeps 8 bits of every element.
"""

import torch
from torch import Tensor

from weft.comm.compression.codec import Codec, as_bytes, from_bytes, in_blocks

BLOCK = 4096
HIGHEST = 15  # the block maximum is scaled to below 2^15; the largest float16 is just below 2^16


def _encode_bfloat16(elements: Tensor) -> Tensor:
    return as_bytes(elements.bfloat16())


def _decode_bfloat16(messages: Tensor, length: int) -> Tensor:
    return from_bytes(messages, torch.bfloat16).float()


def _encode_float16(elements: Tensor) -> Tensor:
    blocks = in_blocks(elements, BLOCK)
    largest = blocks.abs().amax(2)
    shift = (HIGHEST - torch.frexp(largest).exponent).clamp(max=126)
    shift = torch.where(largest.isfinite(), shift, 0)  # non-finite elements stay non-finite in float16
    halves = (blocks * _power(shift)[..., None]).half()
    return torch.cat([as_bytes(shift), as_bytes(halves.flatten(1)[:, : elements.shape[1]])], 1)


def _decode_float16(messages: Tensor, length: int) -> Tensor:
    blocks = -(-length // BLOCK)
    shift = from_bytes(messages[:, : 4 * blocks], torch.int32)
    halves = in_blocks(from_bytes(messages[:, 4 * blocks :], torch.float16).float(), BLOCK)
    return (halves * _power(-shift)[..., None]).flatten(1)[:, :length]


def _power(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


BFLOAT16 = Codec("bf16", lambda length: 2 * length, _encode_bfloat16, _decode_bfloat16)
FLOAT16 = Codec("fp16", lambda length: 4 * -(-length // BLOCK) + 2 * length, _encode_float16, _decode_float16)
