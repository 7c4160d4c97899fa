"""Smallest honest forms of the codecs: round trips of one-dimensional float32 tensors."""

import torch
from torch import Tensor

from weft.comm.compression import half, int8, one_bit, structured


def float16_reference(elements: Tensor) -> Tensor:
    """Reference of a float16 round trip of a one-dimensional float32 tensor."""
    decoded = []
    for block in elements.split(half.BLOCK):
        largest = block.abs().max()
        scale = 2.0 ** min(half.HIGHEST - int(torch.frexp(largest).exponent), 126) if largest.isfinite() else 1.0
        decoded.append((block * scale).half().float() / scale)
    return torch.cat(decoded)


def int8_reference(elements: Tensor) -> Tensor:
    """Reference of an int8 round trip of a one-dimensional float32 tensor."""
    decoded = []
    for block in elements.split(int8.BLOCK):
        scale = block.abs().max() / int8.LARGEST
        decoded.append(block if scale == 0 else (block / scale).round() * scale)
    return torch.cat(decoded)


def one_bit_reference(elements: Tensor) -> Tensor:
    """Reference of a one-bit round trip of a one-dimensional float32 tensor."""
    return torch.cat(
        [torch.where(block < 0, -1.0, 1.0) * block.abs().mean().bfloat16() for block in elements.split(one_bit.BLOCK)]
    )


def structured_reference(elements: Tensor) -> Tensor:
    """Reference of a 2:4 round trip of a one-dimensional float32 tensor; ties keep the elements that come first."""
    kept = torch.zeros_like(elements)
    groups = -(-len(elements) // structured.GROUP)
    for start in range(groups):
        indices = range(start, len(elements), groups)
        magnitudes = elements[start::groups].abs().nan_to_num(torch.inf, torch.inf).tolist()
        for index in sorted(range(len(indices)), key=lambda index: -magnitudes[index])[:2]:
            kept[indices[index]] = elements[indices[index]].bfloat16()
    return kept
