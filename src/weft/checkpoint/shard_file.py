"""A safetensors file as one buffer: a snapshot is laid out in memory as it will lie on the disk, or with a neighbour rank."""

import errno
import fcntl
import json
import math
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

from weft.checkpoint.manifest import CHUNK, FORMAT_BYTES, File
from weft.errors import CheckpointError

FORMATS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names that safetensors gives to formats, by torch's."""
TORCH_FORMATS = {name: dtype for dtype, name in FORMATS.items()}


BLOCK = 4096  # bytes; what goes past the page cache begins and ends at a multiple, in memory and in the file


class Slot(NamedTuple):
    """A tensor that a shard has room for."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Shard:
    """Room for some tensors in one buffer on the host, with the header of a safetensors file in front.

    Args:
        slots: what comes in; the widest formats are laid out first, so that every tensor is aligned.
        pinned: let an accelerator copy straight into it.
    """

    def __init__(self, slots: Sequence[Slot], *, pinned: bool = False):
        table, end = {}, 0
        slots = sorted(slots, key=lambda slot: (-slot.dtype.itemsize, slot.key))
        for slot in slots:
            table[slot.key] = {
                "dtype": FORMATS[slot.dtype],
                "shape": list(slot.shape),
                "data_offsets": [end, end + slot.bytes],
            }
            end += slot.bytes
        header = json.dumps(table).encode()
        header += b" " * (-len(header) % 8)
        size = 8 + len(header) + end
        room = torch.zeros(size + BLOCK, dtype=torch.uint8, pin_memory=pinned)
        self.buffer = room[-room.data_ptr() % BLOCK :][:size]
        self.buffer[: 8 + len(header)] = torch.frombuffer(
            bytearray(len(header).to_bytes(8, "little") + header), dtype=torch.uint8
        )
        data = self.buffer[8 + len(header) :]
        self.tensors = {
            slot.key: data[slice(*table[slot.key]["data_offsets"])].view(slot.dtype).view(slot.shape) for slot in slots
        }
        """Views of the buffer, by key."""


def write_bytes(buffer: Tensor, path: Path) -> File:
    """Write a buffer to a new file, wait until it is on the disk, and return its size and digest.

    Nothing in it holds Python's lock for long, and the disk fetches the bytes itself: it runs beside training. A file system
    that cannot write past the page cache (tmpfs, some of networks) writes through it.
    """
    digest, view = blake3(), memoryview(buffer.numpy())  # type: ignore[arg-type]
    with path.open("xb", buffering=0) as file:
        direct = _write_past_cache(file, buffer.data_ptr() % BLOCK == 0)
        for start in range(0, len(view), CHUNK):
            piece = view[start : start + CHUNK]
            digest.update(piece)
            if len(piece) % BLOCK:  # the last
                direct = _write_past_cache(file, False)
            while piece:  # the system may take less than it is given
                try:
                    piece = piece[file.write(piece) :]
                except OSError as error:
                    if error.errno != errno.EINVAL or not direct:
                        raise
                    direct = _write_past_cache(file, False)
        os.fsync(file.fileno())
    return File(bytes=len(view), blake3=digest.hexdigest())


def _write_past_cache(file: FileIO, wanted: bool) -> bool:
    """Let writes go past the page cache, or through it; whether they go past it."""
    flag = getattr(os, "O_DIRECT", 0)  # of Linux
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
    except OSError:  # this file system cannot
        return False
    return wanted and bool(flag)


def check_room(path: Path, size: int) -> None:
    """Raise OSError if a disk has not so many bytes left, before the first of them is written."""
    free = os.statvfs(path)
    if free.f_bavail * free.f_frsize < size:
        raise OSError(f"{size / 2**20:.0f} MiB are needed, {free.f_bavail * free.f_frsize / 2**20:.0f} MiB are free")


def torch_format(name: str, where: str) -> torch.dtype:
    """torch's name of a format.

    Raises:
        CheckpointError: there is no such format.
    """
    if name not in FORMAT_BYTES:
        raise CheckpointError(
            f"a tensor of format {name!r}", where=where, rule=f"formats are {', '.join(FORMAT_BYTES)}"
        )
    return TORCH_FORMATS[name]
