"""Pinned host memory has the requested size, and is unregistered before it is unmapped."""

import ctypes
import mmap

import pytest
import torch

from weft.device.pinned import pinned_memory, register_memory
from weft.errors import DeviceError
from weft.memory.pool import Pool, block_size

SIZE = 5 * 2**20 + mmap.PAGESIZE  # torch's allocator would take 8 MiB


class FakeRuntime:
    """Stand-in for the CUDA runtime; `registered` has the size of each registered block by address."""

    def __init__(self, error: int = 0):
        self.error, self.registered, self.unregistered = error, dict[int, int](), list[bytes]()

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        if not self.error:
            self.registered[pointer] = size
        return self.error

    def cudaHostUnregister(self, pointer: int) -> int:
        self.unregistered.append(ctypes.string_at(pointer, 3))  # a segmentation fault if it is unmapped already
        del self.registered[pointer]
        return 0


def test_registered_memory_has_the_requested_size_while_a_view_of_it_lives() -> None:
    runtime = FakeRuntime()
    block = register_memory(SIZE, runtime)
    assert runtime.registered == {block.data_ptr(): SIZE}
    assert (block.dtype, block.shape) == (torch.uint8, (SIZE,))
    assert block.data_ptr() % mmap.PAGESIZE == 0
    assert not block.any()
    view = block[:400].view(torch.float32)
    block[:3] = torch.tensor([1, 2, 3])
    del block
    assert runtime.unregistered == []
    del view
    assert (runtime.registered, runtime.unregistered) == ({}, [b"\1\2\3"])


def test_a_pool_pins_no_more_than_its_blocks() -> None:
    runtime = FakeRuntime()
    pool = Pool(lambda size: register_memory(size, runtime))
    for _ in range(3):
        pool.allocate(SIZE)
    assert list(runtime.registered.values()) == [block_size(SIZE)] * 3
    assert pool.held <= 3 * SIZE * 9 / 8


def test_memory_that_cannot_be_pinned_is_refused() -> None:
    runtime = FakeRuntime(error=2)
    with pytest.raises(DeviceError, match=r"5\.0 MiB of host memory cannot be pinned: error 2"):
        register_memory(SIZE, runtime)
    assert runtime.unregistered == []


def test_the_cpu_needs_no_pinned_memory() -> None:
    block = pinned_memory("cpu")(SIZE)
    assert (block.dtype, block.shape, block.is_pinned()) == (torch.uint8, (SIZE,), False)
