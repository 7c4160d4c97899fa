"""Ranks of a compression: each runs the model on its share of the calibration rows, and compresses its share of the matrices.

All ranks read the weights, and hold one block at a time; rank 0 writes. Without a process group there is one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.objects import all_gather_json

BATCH_ROWS = 4  # calibration rows per forward
Matrix = tuple[str, int]
"""Name of a weight in its block, and the index of the matrix in it."""


@dataclass(frozen=True)
class Ranks:
    """This rank and the number of ranks."""

    rank: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        """True on the rank that writes."""
        return self.rank == 0

    def batches(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Calibration rows of this rank, in batches [rows, tokens] of rows of one length."""
        alike = groupby(sorted(rows[self.rank :: self.count], key=len), key=len)
        return [
            torch.stack(group[first : first + BATCH_ROWS])
            for group in (list(found) for _, found in alike)
            for first in range(0, len(group), BATCH_ROWS)
        ]

    def sum(self, tensor: Tensor) -> Tensor:
        """Add a tensor up over all ranks, in place. Collective."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_hessians(self, hessians: dict[Matrix, Tensor]) -> None:
        """Add Hessians up over all ranks, in place. Collective.

        A rank has no Hessian of an expert that none of its tokens chose.
        """
        if self.count == 1:
            return
        own = [(*matrix, len(hessian)) for matrix, hessian in hessians.items()]
        for name, index, width in sorted({tuple(each) for found in all_gather_json(own) for each in found}):
            hessian = hessians.get((name, index))
            hessians[name, index] = self.sum(torch.zeros(width, width) if hessian is None else hessian)

    def send(self, tensor: Tensor, owner: int) -> None:
        """Send a tensor from one rank to all others, in place. Collective."""
        if self.count > 1:
            dist.broadcast(tensor, owner)

    def wait(self) -> None:
        """Wait for all ranks. Collective."""
        if self.count > 1:
            dist.barrier()
