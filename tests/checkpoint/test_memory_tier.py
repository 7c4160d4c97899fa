"""In-memory checkpoints on two emulated hosts with separate tmpfs folders, of two ranks each."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.faults.test_saving import Trainer
from tests.lab.pool import RankError, run_ranks
from weft.checkpoint import memory_tier as memory
from weft.checkpoint.folders import list_checkpoints
from weft.checkpoint.huggingface import gather_weights
from weft.checkpoint.manifest import Position
from weft.checkpoint.memory_tier import HostMemory, ranks_by_host
from weft.checkpoint.restore import Reader, restore
from weft.precision.scaling import LossScale

ID_FILE = Path("run/run_id")


@contextmanager
def on_host(shared: Path, rank: int) -> Iterator[HostMemory]:
    """In-memory checkpoints of the emulated host of a rank."""
    host = rank // 2
    (shared / f"host-{host}").mkdir(exist_ok=True)
    with (
        mock.patch.object(memory, "SHARED_MEMORY", shared / f"host-{host}"),
        mock.patch.object(memory, "host_id", return_value=[f"host-{host}"]),
    ):
        yield HostMemory(ID_FILE, "")


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Full weights on rank 0, and full moments on all ranks."""
    found = gather_weights(trainer.model)
    for name, parameter in trainer.model.named_parameters():
        found[f"exp_avg_sq/{name}"] = trainer.optimizer.state[parameter]["exp_avg_sq"].full_tensor()
    return found


def train_and_copy(rank: int, world_size: int, shared: Path, steps: int) -> dict[str, torch.Tensor]:
    trainer = Trainer(world_size)
    with on_host(shared, rank) as host:
        for step in range(1, steps + 1):
            trainer.step()
            trainer.snapshots.take(Position(step=step, next_batch=step, loss_scale=LossScale()), host.target())
        trainer.snapshots.finish()
        dist.barrier()
    assert trainer.snapshots.take_messages() == []
    return state_of(trainer)


def resume(rank: int, world_size: int, shared: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Step and state restored from the newest in-memory checkpoint; (0, {}) if there is none."""
    trainer = Trainer(world_size)
    with on_host(shared, rank) as host:
        copy = host.newest(2**62)
        if copy is None:
            return 0, {}
        with Reader(host.folder_for(copy), copy.manifest) as reader:
            restore(trainer.model, trainer.optimizer, reader, lambda files: host.fetch(copy, files))
    return copy.step, state_of(trainer)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def folder_of_host(shared: Path, host: int) -> Path:
    (folder,) = (shared / f"host-{host}").iterdir()
    return list_checkpoints(folder)[0]


def files_of(shared: Path, host: int) -> list[int]:
    return [int(path.name[6:11]) for path in sorted(folder_of_host(shared, host).glob("shard-*"))]


def test_each_host_holds_its_own_files_and_those_of_the_other_host(tmp_path: Path) -> None:
    run_ranks(4, train_and_copy, tmp_path, 3)
    assert files_of(tmp_path, 0) == files_of(tmp_path, 1) == [0, 1, 2, 3]
    assert [path.name for path in folder_of_host(tmp_path, 0).parent.glob("step-*")] == ["step-00000003"]


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("ranks", [4, 3])
def test_a_host_that_lost_its_memory_fetches_files_from_the_other_host(lost: int, ranks: int, tmp_path: Path) -> None:
    expected = run_ranks(4, train_and_copy, tmp_path, 2)[0]
    shutil.rmtree(tmp_path / f"host-{lost}")
    results = run_ranks(ranks, resume, tmp_path)
    assert [step for step, _ in results] == [2] * ranks
    assert_same(results[0][1], expected)


def test_a_damaged_file_is_fetched_from_the_other_host(tmp_path: Path) -> None:
    expected = run_ranks(4, train_and_copy, tmp_path, 2)[0]
    damaged = folder_of_host(tmp_path, 1) / "shard-00003.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    results = run_ranks(4, resume, tmp_path)
    assert [step for step, _ in results] == [2] * 4
    assert_same(results[0][1], expected)


def test_a_checkpoint_with_a_file_missing_on_all_hosts_is_not_used(tmp_path: Path) -> None:
    run_ranks(4, train_and_copy, tmp_path, 2)
    for host in (0, 1):
        (folder_of_host(tmp_path, host) / "shard-00002.safetensors").unlink()
    assert run_ranks(4, resume, tmp_path)[0][0] == 0


def test_a_folder_writable_by_other_users_is_refused(tmp_path: Path) -> None:
    run_ranks(2, train_and_copy, tmp_path, 1)
    folder_of_host(tmp_path, 0).parent.chmod(0o777)
    with pytest.raises(RankError, match="is open to other users: its contents cannot be trusted"):
        run_ranks(2, resume, tmp_path)


def test_ranks_of_a_host_need_not_be_consecutive() -> None:
    assert ranks_by_host([["a", "1"], ["b", "1"], ["a", "1"], ["a", "2"]]) == [[0, 2], [1], [3]]
