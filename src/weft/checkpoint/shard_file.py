"""Safetensors file as one buffer in host memory, ready to be written to disk or sent to another host."""

import errno
import fcntl
import json
import math
import os
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

from weft.checkpoint.manifest import DTYPE_BYTES, FileEntry
from weft.device.pinned import pinned_memory
from weft.errors import CheckpointError
from weft.object_store import CHUNK

SAFETENSORS_DTYPES = {
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
"""Dtype names of safetensors by torch dtype."""
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


BLOCK = 4096  # bytes; alignment of direct I/O (O_DIRECT), in memory and in the file


class SlotSpec(NamedTuple):
    """Name, shape and dtype of a tensor in a shard."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ShardBuffer:
    """Host buffer for tensors, laid out as a safetensors file with its header.

    Args:
        slots: tensors of the buffer. The widest dtypes come first, so that every tensor is aligned.
        allocate: size in bytes -> memory, [bytes] uint8; pinned memory for asynchronous copies from an accelerator.
    """

    def __init__(self, slots: Sequence[SlotSpec], allocate: Callable[[int], Tensor] = pinned_memory("cpu")):  # noqa: B008
        table, end = {}, 0
        slots = sorted(slots, key=lambda slot: (-slot.dtype.itemsize, slot.key))
        for slot in slots:
            table[slot.key] = {
                "dtype": SAFETENSORS_DTYPES[slot.dtype],
                "shape": list(slot.shape),
                "data_offsets": [end, end + slot.bytes],
            }
            end += slot.bytes
        header = json.dumps(table).encode()
        header += b" " * (-len(header) % 8)
        size = 8 + len(header) + end
        memory = allocate(size + BLOCK)
        self.buffer = memory[-memory.data_ptr() % BLOCK :][:size]
        self.buffer[: 8 + len(header)] = torch.frombuffer(
            bytearray(len(header).to_bytes(8, "little") + header), dtype=torch.uint8
        )
        data = self.buffer[8 + len(header) :]
        self.tensors = {
            slot.key: data[slice(*table[slot.key]["data_offsets"])].view(slot.dtype).view(slot.shape) for slot in slots
        }
        """Views of the buffer, by key."""


def write_bytes(buffer: Tensor, path: Path) -> FileEntry:
    """Write a buffer to a new file, flush it to the disk, and return its size and digest.

    The function can run on a thread next to training: it does not hold the GIL for long, and writes with direct I/O. File
    systems without direct I/O (tmpfs, some network file systems) are written through the page cache.
    """
    digest, view = blake3(), memoryview(buffer.numpy())  # type: ignore[arg-type]
    with path.open("xb", buffering=0) as file:
        direct = _set_direct_io(file, buffer.data_ptr() % BLOCK == 0)
        for start in range(0, len(view), CHUNK):
            piece = view[start : start + CHUNK]
            digest.update(piece)
            if len(piece) % BLOCK:  # the last piece
                direct = _set_direct_io(file, False)
            while piece:  # a write may be partial
                try:
                    piece = piece[file.write(piece) :]
                except OSError as error:
                    if error.errno != errno.EINVAL or not direct:
                        raise
                    direct = _set_direct_io(file, False)
        os.fsync(file.fileno())
    return FileEntry(bytes=len(view), blake3=digest.hexdigest())


def _set_direct_io(file: FileIO, wanted: bool) -> bool:
    """Switch direct I/O on or off for a file. Returns True if direct I/O is now on."""
    flag = getattr(os, "O_DIRECT", 0)  # Linux only
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
    except OSError:  # not supported by this file system
        return False
    return wanted and bool(flag)


def check_free_space(path: Path, size: int) -> None:
    """Raise OSError if the disk at `path` has fewer than `size` bytes free."""
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    if free < size:
        raise OSError(f"{size / 2**20:.0f} MiB are needed, {free / 2**20:.0f} MiB are free")


def torch_dtype(name: str, where: str) -> torch.dtype:
    """Torch dtype by its safetensors name.

    Args:
        name: safetensors name, such as F32.
        where: location for the error message.

    Raises:
        CheckpointError: the name is unknown.
    """
    if name not in DTYPE_BYTES:
        raise CheckpointError(
            f"a tensor has the unknown dtype {name!r}", where=where, rule=f"dtypes are {', '.join(DTYPE_BYTES)}"
        )
    return TORCH_DTYPES[name]
