"""Counter-based dropout: the mask depends on the position of an element, so every layout of a job drops the same elements."""

from typing import TypeVar

import torch
from torch import Tensor

Bits = TypeVar("Bits", int, Tensor)


def dropout_mask(seed: int, *indices: Tensor, rate: float) -> Tensor:
    """Dropout factors of the elements of a tensor, which may be a shard of a full tensor.

    The random bits are a hash of seed and position instead of the output of a stateful generator (Salmon et al., Parallel
    Random Numbers, 2011).

    Args:
        seed: unique per layer and step.
        indices: int64 vector per dim: indices of its entries in the full tensor.
        rate: share of dropped elements, below 1.

    Returns:
        float32 tensor with one dim per vector; elements are 0 or 1 / (1 - rate).
    """
    mixed = mix(torch.full((), seed % 2**32, device=indices[0].device))  # no copy, for which the host would wait
    for entries in indices:
        mixed = mix(mixed.unsqueeze(-1) ^ entries)
    return (mixed >= rate * 2**32) / (1 - rate)


def mix(x: Bits) -> Bits:
    """Hash of 32-bit integers, held in int64 or in an integer of Python. Products stay below 2**63."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return (x >> 16) ^ x
