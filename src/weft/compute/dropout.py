"""Dropout as a function of place, not of a generator with a state: every layout of a job drops the same numbers."""

import torch
from torch import Tensor


def dropout_keep(seed: int, *numbers: Tensor, rate: float) -> Tensor:
    """What dropout leaves of each element of a tensor that may be part of a larger one.

    A counter goes through the finalizer of a hash instead of through a generator with a state (Salmon et al., Parallel
    Random Numbers, 2011).

    Args:
        seed: another one for every layer and step.
        numbers: for each dim an int64 vector: the numbers of its entries in the whole tensor.
        rate: share of elements that is dropped, below 1.

    Returns:
        float32, of the shape of the vectors' lengths, of 0 and 1 / (1 - rate).
    """
    mixed = mix(torch.tensor(seed % 2**32, device=numbers[0].device))
    for entries in numbers:
        mixed = mix(mixed.unsqueeze(-1) ^ entries)
    return (mixed >= rate * 2**32) / (1 - rate)


def mix(x: Tensor) -> Tensor:
    """32 bits, held in int64, to 32 bits that look random. Products stay below 2**63."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return (x >> 16) ^ x
