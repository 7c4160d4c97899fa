"""Host memory for what leaves the device: rooms that are handed out, come back, and are handed out again.

Pinned memory is slow to get, and a file's is slower: a room that was given back serves the next who asks for about its size.
"""

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STEPS = 8  # sizes of rooms to each doubling: a room is at most an eighth larger than what is asked for
SMALLEST = 4096


class Pool:
    """Rooms of memory of one kind. Not for several threads at once.

    Counters, in bytes: `requested` since the beginning, of which `reused` came from rooms that were there; `live` is handed
    out now, at most `peak` so far; `held` is what the pool has in all, so that `held - live` lies idle.
    """

    def __init__(self, make: Callable[[int], Tensor], *, is_off_device: bool = True):
        """
        Args:
            make: gives so many bytes, [bytes] uint8.
            is_off_device: whether that is other memory than the device's own, for which it is not counted.
        """
        self.make, self.is_off_device = make, is_off_device
        self.rooms: list[Tensor] = []
        self.free: dict[int, list[Tensor]] = defaultdict(list)
        self.requested = self.reused = self.live = self.peak = self.held = 0

    def take(self, size: int) -> Tensor:
        """A room of at least `size` bytes, [bytes] uint8, with anything in it."""
        step = room_size(size)
        self.requested += size
        if self.free[step]:
            self.reused += size
            room = self.free[step].pop()
        else:
            room = self.make(step)
            self.rooms.append(room)
            self.held += step
        self.live += step
        self.peak = max(self.peak, self.live)
        return room

    def give(self, room: Tensor) -> None:
        """Take back what `take` handed out."""
        self.live -= room.numel()
        self.free[room.numel()].append(room)

    def counters(self) -> dict[str, int]:
        """The counters, by name."""
        return {name: getattr(self, name) for name in ("requested", "reused", "live", "peak", "held")}


def pools_of(model: Any, optimizer: Any) -> dict[str, Pool]:
    """The pools that are in use in a training, by what waits in them."""
    users = {"activations": getattr(model, "offload", None), "optimizer": getattr(optimizer, "away_states", None)}
    return {name: user.pool for name, user in users.items() if user and user.pool.requested}


def shaped(room: Tensor, like: Tensor) -> Tensor:
    """The beginning of a room, as a contiguous tensor of the shape and format of another."""
    return room[: like.nbytes].view(like.dtype).view(like.shape)


def room_size(size: int) -> int:
    """The size of the room for so many bytes."""
    size = max(size, SMALLEST)
    step = (1 << (size - 1).bit_length()) // 2 // STEPS
    return -(-size // step) * step


def pinned_memory(device_type: str) -> Callable[[int], Tensor]:
    """Host memory that a device of this type copies to and from while it computes."""
    return lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=device_type != "cpu")


def mapped_files(folder: Path) -> Callable[[int], Tensor]:
    """Memory that the system keeps in files without a name, and in main memory only as long as there is room.

    Args:
        folder: on a disk. What is in it goes when the process ends, however it ends.

    Raises (when memory is made):
        OSError: the disk has not that much room.
    """

    def make(size: int) -> Tensor:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".weft-")
        try:
            os.posix_fallocate(descriptor, 0, size)  # else a full disk would be a bus error, much later
            return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
        finally:
            os.close(descriptor)
            os.unlink(name)

    return make
