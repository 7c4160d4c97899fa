"""The pool hands rooms out again, and counts what it has."""

import subprocess
from pathlib import Path

import pytest
import torch

from weft.memory.pool import STEPS, Pool, mapped_files, pinned_memory, room_size, shaped


def test_rooms_come_back_for_the_next_of_about_their_size() -> None:
    pool = Pool(pinned_memory("cpu"))
    first = pool.take(1_000_000)
    pool.give(first)
    assert pool.take(990_000).data_ptr() == first.data_ptr()
    assert pool.take(990_000).data_ptr() != first.data_ptr()
    room = room_size(1_000_000)
    assert (pool.requested, pool.reused) == (2_980_000, 990_000)
    assert pool.held == pool.live == pool.peak == 2 * room
    pool.give(first)
    assert (pool.live, pool.held) == (room, 2 * room)


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 8191, 8193, 10**6, 2**30 + 1])
def test_a_room_is_little_larger_than_what_is_asked_for(size: int) -> None:
    assert size <= room_size(size) <= max(4096, size * (1 + 1 / STEPS))


def test_a_room_has_any_shape_and_format() -> None:
    like = torch.randn(3, 5).to(torch.bfloat16).t()
    tensor = shaped(Pool(pinned_memory("cpu")).take(like.nbytes), like)
    tensor.copy_(like)
    assert torch.equal(tensor, like)
    assert tensor.is_contiguous()


def test_files_have_no_names_and_are_shared_memory(tmp_path: Path) -> None:
    room = Pool(mapped_files(tmp_path / "new")).take(10_000)
    room.fill_(7)
    assert list((tmp_path / "new").iterdir()) == []
    assert room.untyped_storage().is_shared()  # which memory counters leave out
    assert int(room.sum()) == 7 * len(room)


def test_a_full_disk_is_an_error_at_once(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("this sandbox cannot mount a tmpfs")
    try:
        with pytest.raises(OSError, match="No space left"):
            mapped_files(tmp_path)(2**20)
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
