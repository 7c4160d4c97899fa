"""Pinned host memory of exact size, for asynchronous copies from and to an accelerator."""

import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.errors import DeviceError


def pinned_memory(device_type: str) -> Callable[[int], Tensor]:
    """Allocator of host memory, size in bytes -> [bytes] uint8, that supports asynchronous copies with a type of device.

    On cuda, memory of the size is allocated and registered. The allocator of torch rounds each size up to a power of two and
    never gives memory back, so that it takes up to twice the memory.

    Args:
        device_type: "cpu", "cuda" or "npu".
    """
    if device_type == "cuda":
        return lambda size: register_memory(size, torch.cuda.cudart())
    return partial(torch.empty, dtype=torch.uint8, pin_memory=device_type != "cpu")


def register_memory(size: int, runtime: Any) -> Tensor:
    """Allocate zeroed memory of a size in bytes and register it for asynchronous copies, until the tensor's storage is freed.

    Args:
        size: bytes, at least 1.
        runtime: `torch.cuda.cudart()`, or a stand-in for it in tests.

    Raises:
        DeviceError: the memory cannot be registered.
    """
    memory = _RegisteredMemory(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    error = int(runtime.cudaHostRegister(tensor.data_ptr(), size, 0))
    if error:
        raise DeviceError(
            f"{size / 2**20:.1f} MiB of host memory cannot be pinned: error {error} of cudaHostRegister",
            where="pinned host memory",
            rule="pinned memory of all ranks of a host fits into its physical memory",
            fix="offload less (plan.memory), or start fewer ranks on this host",
        )
    memory.unregister = partial(runtime.cudaHostUnregister, tensor.data_ptr())
    return tensor


class _RegisteredMemory(mmap.mmap):
    """Memory that is unregistered before it is unmapped; torch keeps it as long as a storage uses it."""

    unregister: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unregister is not None:
            self.unregister()
