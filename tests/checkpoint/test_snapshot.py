"""Snapshots go on beside training: one buffer, waiting or leaving out, and which of them stay."""

import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.faults.test_saving import Trainer
from tests.lab.pool import run_ranks
from weft.checkpoint import snapshot
from weft.checkpoint.folders import (
    begin_folder,
    clean,
    commit_folder,
    folder_of,
    list_checkpoints,
    retire,
    set_aside,
    step_of,
)
from weft.checkpoint.manifest import File, verify_folder
from weft.checkpoint.restore import Reader

HOUR = 3600.0


def slowly(lock: threading.Event) -> object:
    """A disk that does not write before it is told to."""
    write = snapshot.write_bytes

    def wait_and_write(buffer: torch.Tensor, path: Path) -> File:
        assert lock.wait(30)
        return write(buffer, path)

    return mock.patch.object(snapshot, "write_bytes", wait_and_write)


def weight_of(trainer: Trainer) -> torch.Tensor:
    weight: Any = trainer.model.get_parameter("lm_head.weight").detach()
    return weight.full_tensor().clone()


def change_while_it_is_written(rank: int, world_size: int, run: Path) -> tuple[torch.Tensor, torch.Tensor]:
    trainer, lock = Trainer(world_size), threading.Event()
    trainer.step()
    with slowly(lock):  # type: ignore[attr-defined]
        before = weight_of(trainer)
        trainer.take(run, 1)
        trainer.step()
        after = weight_of(trainer)
        assert list_checkpoints(run) == []
        lock.set()
        trainer.snapshots.finish()
    return before, after


def test_what_is_written_is_the_state_at_the_call(tmp_path: Path) -> None:
    before, after = run_ranks(2, change_while_it_is_written, tmp_path)[0]
    manifest = verify_folder(folder_of(tmp_path, 1))
    with Reader(folder_of(tmp_path, 1), manifest) as reader:
        saved = reader.read("weights/lm_head.weight")
    assert torch.equal(saved, before)
    assert not torch.equal(saved, after)


def report_nonsense(rank: int, world_size: int, run: Path) -> list[str]:
    trainer = Trainer(world_size)
    if rank == 1:  # instead of its report
        store, prefix = trainer.snapshots.store, trainer.snapshots.prefix
        store.set(f"{prefix}/1", "no report")
        store.set(f"{prefix}/1/number", "nonsense")
        trainer.snapshots.store = dist.HashStore()  # where nobody reads
    trainer.take(run, 1)
    trainer.snapshots.finish()
    return trainer.snapshots.take_news()


def test_a_report_that_makes_no_sense_is_a_lost_checkpoint_and_said(tmp_path: Path) -> None:
    news = run_ranks(2, report_nonsense, tmp_path)[0]
    assert len(news) == 1
    assert news[0].startswith("no checkpoint of step ")
    assert "training goes on" in news[0]


def two_at_once(rank: int, world_size: int, run: Path, when_busy: str) -> tuple[list[str], float]:
    trainer, lock = Trainer(world_size), threading.Event()
    job = trainer.snapshots.job
    settings = job.checkpoint.model_copy(update={"when_busy": when_busy})
    trainer.snapshots.job = job.model_copy(update={"checkpoint": settings})
    trainer.step()
    with slowly(lock):  # type: ignore[attr-defined]
        trainer.take(run, 1)
        shard = trainer.snapshots.shard
        threading.Timer(0.5, lock.set).start()
        begin = time.perf_counter()
        trainer.take(run, 2)
        blocked = time.perf_counter() - begin
        trainer.snapshots.finish()
    assert trainer.snapshots.shard is shard  # one buffer for both
    return trainer.snapshots.take_news(), blocked


def test_a_second_snapshot_waits(tmp_path: Path) -> None:
    for news, blocked in run_ranks(2, two_at_once, tmp_path, "wait"):
        assert blocked > 0.3
        assert len(news) in (0, 2)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [2, 1]


def test_or_is_left_out(tmp_path: Path) -> None:
    (news, blocked), _ = run_ranks(2, two_at_once, tmp_path, "skip")
    assert blocked < 0.3
    assert news[0] == "no checkpoint: the one before is still being written; training goes on"
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [1]


def make(run: Path, *steps: int) -> None:
    for step in steps:
        begin_folder(run, step)
        commit_folder(run, step)


def test_the_newest_stay(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5)
    assert retire(tmp_path, keep=0, keep_hours=0) == []
    assert [step_of(path) for path in retire(tmp_path, keep=2, keep_hours=0)] == [1, 2, 3]
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [5, 4]


def test_the_first_of_each_stretch_stays_too(tmp_path: Path) -> None:
    make(tmp_path, *range(10))
    for step in range(10):  # one each twenty minutes
        at = 1_000_000 * HOUR + step * HOUR / 3
        os.utime(folder_of(tmp_path, step), (at, at))
    retire(tmp_path, keep=2, keep_hours=1, now=2_000_000 * HOUR)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [9, 8, 6, 3, 0]
    retire(tmp_path, keep=2, keep_hours=1, now=2_000_000 * HOUR)  # again: nothing more goes
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [9, 8, 6, 3, 0]


def test_what_was_set_aside_is_no_checkpoint_any_more(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    set_aside(folder_of(tmp_path, 2))
    make(tmp_path, 2)
    assert set_aside(folder_of(tmp_path, 2)).name == "step-00000002.aside-2"
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [1]


def test_unfinished_ones_are_cleaned(tmp_path: Path) -> None:
    make(tmp_path, 1)
    begin_folder(tmp_path, 2)
    clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_steps_beyond_eight_digits_sort_by_number(tmp_path: Path) -> None:
    make(tmp_path, 99_999_999, 100_000_000)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [100_000_000, 99_999_999]


def test_a_missing_run_has_none(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "nothing") == []
    with pytest.raises(FileExistsError):
        make(tmp_path, 1, 1)
