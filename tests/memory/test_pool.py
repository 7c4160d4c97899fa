"""The pool reuses released blocks, and counts its memory."""

import subprocess
from pathlib import Path

import pytest
import torch

from weft.device.pinned import pinned_memory
from weft.memory.pool import STEPS, Pool, block_size, mapped_files, typed_view


def test_released_block_is_reused_for_a_similar_size() -> None:
    pool = Pool(pinned_memory("cpu"))
    first = pool.allocate(1_000_000)
    pool.release(first)
    assert pool.allocate(990_000).data_ptr() == first.data_ptr()
    assert pool.allocate(990_000).data_ptr() != first.data_ptr()
    size = block_size(1_000_000)
    assert (pool.requested, pool.reused) == (2_980_000, 990_000)
    assert pool.held == pool.live == pool.peak == 2 * size
    pool.release(first)
    assert (pool.live, pool.held) == (size, 2 * size)


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 8191, 8193, 10**6, 2**30 + 1])
def test_block_is_little_larger_than_the_request(size: int) -> None:
    assert size <= block_size(size) <= max(4096, size * (1 + 1 / STEPS))


def test_typed_view_has_any_shape_and_dtype() -> None:
    like = torch.randn(3, 5).to(torch.bfloat16).t()
    tensor = typed_view(Pool(pinned_memory("cpu")).allocate(like.nbytes), like)
    tensor.copy_(like)
    assert torch.equal(tensor, like)
    assert tensor.is_contiguous()


def test_mapped_files_are_unnamed_shared_memory(tmp_path: Path) -> None:
    block = Pool(mapped_files(tmp_path / "new")).allocate(10_000)
    block.fill_(7)
    assert list((tmp_path / "new").iterdir()) == []
    assert block.untyped_storage().is_shared()  # memory counters exclude shared memory
    assert int(block.sum()) == 7 * len(block)


def test_full_disk_is_an_error_at_allocation(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("this sandbox cannot mount a tmpfs")
    try:
        with pytest.raises(OSError, match="No space left"):
            mapped_files(tmp_path)(2**20)
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
