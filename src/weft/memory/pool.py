"""Memory pool for offloaded tensors.

Pinned memory is slow to allocate, and file-backed memory is slower, so a released block is reused for the next request of
about its size.
"""

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from weft.comm.objects import all_gather_json, any_rank
from weft.errors import Refusal

STEPS = 8  # block sizes per power of two: a block is at most an eighth larger than the request
SMALLEST = 4096  # bytes


class Pool:
    """Pool of memory blocks of one kind. Not thread-safe.

    Counters, in bytes:

        requested   sum of all requests since the beginning
        reused      part of `requested` that was served from released blocks
        live        currently allocated
        peak        maximum of `live`
        held        size of all blocks of the pool; `held - live` is free
    """

    def __init__(self, make: Callable[[int], Tensor], *, is_off_device: bool = True):
        """
        Args:
            make: size in bytes -> new block, [bytes] uint8.
            is_off_device: True if the blocks are not in the device's own memory, and do not count for it.
        """
        self.make, self.is_off_device = make, is_off_device
        self.blocks: list[Tensor] = []
        self.free_blocks: dict[int, list[Tensor]] = defaultdict(list)
        self.requested = self.reused = self.live = self.peak = self.held = 0

    def allocate(self, size: int) -> Tensor:
        """Return a block of at least `size` bytes, [bytes] uint8, uninitialized."""
        step = block_size(size)
        self.requested += size
        if self.free_blocks[step]:
            self.reused += size
            block = self.free_blocks[step].pop()
        else:
            block = self.make(step)
            self.blocks.append(block)
            self.held += step
        self.live += step
        self.peak = max(self.peak, self.live)
        return block

    def release(self, block: Tensor) -> None:
        """Return a block to the pool."""
        self.live -= block.numel()
        self.free_blocks[block.numel()].append(block)

    def counters(self) -> dict[str, int]:
        """Counters by name."""
        return {name: getattr(self, name) for name in ("requested", "reused", "live", "peak", "held")}


def typed_view(block: Tensor, like: Tensor) -> Tensor:
    """Start of a block as a contiguous tensor with the shape and dtype of another tensor."""
    return block[: like.nbytes].view(like.dtype).view(like.shape)


def block_size(size: int) -> int:
    """Size of the block for a request of `size` bytes."""
    size = max(size, SMALLEST)
    step = (1 << (size - 1).bit_length()) // 2 // STEPS
    return -(-size // step) * step


def mapped_files(folder: Path) -> Callable[[int], Tensor]:
    """Allocator of memory-mapped unnamed files, whose pages the system may write back to disk.

    Args:
        folder: directory on a disk. The files disappear when the process ends, however it ends.

    Raises (at allocation):
        OSError: the disk has not enough space.
    """

    def make(size: int) -> Tensor:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".weft-")
        try:
            os.posix_fallocate(descriptor, 0, size)  # without it, a full disk causes a bus error much later
            return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
        finally:
            os.close(descriptor)
            os.unlink(name)

    return make


def reason_against_disk(folder: Path, size: int, what: str, or_else: str = "") -> Refusal | None:
    """Reason against a folder without space. Collective: reserves the space of all ranks once, since they may share a disk.

    Args:
        folder: folder of the files.
        size: bytes of this rank.
        what: what the files hold.
        or_else: another fix.
    """
    problem, held = "", []
    try:
        held.append(mapped_files(folder)(max(size, 1)))  # held until all ranks have allocated their files
    except OSError as error:
        problem = error.strerror or str(error)
    if any_rank(bool(problem)):
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(all_gather_json(problem)) if text]
        return Refusal(
            f"{folder} has no space for {what}: {problems[0]} ({size / 2**20:.1f} MiB per rank are needed)",
            where="plan.memory.offload_dir",
            rule="each rank of the host needs files of this size",
            fix=f"free space, or set a directory on another disk{or_else}",
        )
    return None
