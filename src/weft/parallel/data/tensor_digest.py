"""Digests of the exact bits of tensors, computed on their device."""

from typing import Any

import torch
from torch import Tensor


def fetch_digests(digests: list[Tensor]) -> Any:
    """Iterator over the values of scalar tensors on any devices, with one synchronisation for each device."""
    values: dict[int, int] = {}
    for device in {digest.device for digest in digests}:
        on_device = [index for index, digest in enumerate(digests) if digest.device == device]
        values.update(zip(on_device, torch.stack([digests[index] for index in on_device]).tolist(), strict=True))
    return iter([values[index] for index in range(len(digests))])


class Digester:
    """64-bit hash of the exact bits of tensors on one device, without device synchronisation or copies of contiguous tensors.

    A tensor is read as 32-bit words x_jk in rows k. Its digest is the sum of w_j r_k x_jk modulo 2^64, with a weight w_j for
    each column and a weight r_k for each row (Lemire and Kaser, Strongly universal string hashing is fast, 2014). The weights
    are odd, so that a single flipped bit always changes the digest. The weights are random, so that any other change, including
    a change of order, is missed with a probability of about 2^-32.
    """

    def __init__(self, device: torch.device, row_bytes: int | None = None):
        """
        Args:
            device: device of the tensors.
            row_bytes: bytes per row, a multiple of 8; None for a size that fits the cache of a CPU or fills an accelerator.
        """
        row_bytes = row_bytes or (2**19 if device.type == "cpu" else 2**23)
        self.low, self.high = (_odd_numbers(row_bytes // 8, seed).to(device) for seed in (0, 1))
        self.words, self.products = torch.empty_like(self.low), torch.empty_like(self.low)

    def __call__(self, tensor: Tensor) -> Tensor:
        """Digest of a tensor of any dtype and shape, in the order of its elements: an int64 scalar on its device."""
        flat = tensor.reshape(-1).view(torch.uint8)  # shards are contiguous; a non-contiguous tensor is copied here
        rows = [self._digest_row(row) for row in flat.split(self.words.nbytes)]
        if len(rows) == 1:
            return rows[0]
        return (torch.stack(rows) * _odd_numbers(len(rows), 2).to(tensor.device)).sum()

    def _digest_row(self, row: Tensor) -> Tensor:
        size = -(-len(row) // 8)
        words, products = self.words[:size], self.products[:size]
        words[-1:] = 0
        words.view(torch.uint8)[: len(row)].copy_(row)
        torch.mul(words, self.low[:size], out=products)
        low = products.sum()
        # With weights w (low) and w' (high), the low half counts w times, the high half 2^32 w + w' times; both are odd.
        words.bitwise_right_shift_(32).mul_(self.high[:size])
        return low + words.sum()


def _odd_numbers(count: int, seed: int) -> Tensor:
    """Random odd 64-bit integers, [count] int64, deterministic for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator) | 1
