"""Asynchronous snapshots: consistency, waiting or skipping when busy, and retention."""

import json
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
from weft.checkpoint.layouts import digest_of
from weft.checkpoint.manifest import NAME, FileEntry, verify_folder
from weft.checkpoint.restore import Reader

HOUR = 3600.0


def slowly(lock: threading.Event) -> object:
    """Patch for a disk that blocks writes until an event is set."""
    write = snapshot.write_bytes

    def wait_and_write(buffer: torch.Tensor, path: Path) -> FileEntry:
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


def test_a_snapshot_has_the_state_at_the_call(tmp_path: Path) -> None:
    before, after = run_ranks(2, change_while_it_is_written, tmp_path)[0]
    manifest = verify_folder(folder_of(tmp_path, 1))
    with Reader(folder_of(tmp_path, 1), manifest) as reader:
        saved = reader.read("weights/lm_head.weight")
    assert torch.equal(saved, before)
    assert not torch.equal(saved, after)


def report_nonsense(rank: int, world_size: int, run: Path, key: str, text: str) -> list[str]:
    trainer = Trainer(world_size)
    reports = trainer.snapshots.reports
    if rank == 1:  # replace what it sends
        own = json.dumps({"index": 1, "table": digest_of(text if key == "table/1" else "")}) if key != "1" else text
        reports.store.set(f"{reports.prefix}/{key}", text)
        reports.store.set(f"{reports.prefix}/1", own)
        reports.store.add(f"{reports.prefix}/1/count", 1)
        reports.store = dist.HashStore()  # its own report goes to a store that is not read
    trainer.take(run, 1)
    trainer.snapshots.finish()
    return trainer.snapshots.take_messages()


@pytest.mark.must("fault: Another user of the host looks for the job's stores", case="1-no report")
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("1", "no report"),
        ("1", '{"index": 7, "table": ""}'),
        ("1", '{"index": 1, "table": "another"}'),
        ("table/1", "[]"),
        ("table/1", json.dumps([digest_of("[]"), [], "eJwDAAAAAAE=", [["rng/1", "U8", [-5]]]])),
    ],
)
def test_an_invalid_report_fails_the_checkpoint_with_a_message(key: str, text: str, tmp_path: Path) -> None:
    messages = run_ranks(2, report_nonsense, tmp_path, key, text)[0]
    assert len(messages) == 1
    assert messages[0].startswith("no checkpoint of step ")
    assert "training continues" in messages[0]
    assert list_checkpoints(tmp_path) == []


def changing_states(rank: int, world_size: int, run: Path) -> list[str]:
    trainer = Trainer(world_size)
    sent: list[str] = []
    store = trainer.snapshots.reports.store
    add = store.set

    class Counted:
        """The store, with the keys that are set."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def set(self, key: str, value: str) -> None:
            sent.append(key.split("/", 2)[2])
            add(key, value)

    trainer.snapshots.reports.store = Counted()  # type: ignore[assignment]
    for step in range(1, 5):
        trainer.take(run, step)  # the states of the optimizer exist from the second on
        trainer.snapshots.finish()
        trainer.step()
    return sent


def test_what_a_rank_writes_is_sent_only_when_it_has_changed(tmp_path: Path) -> None:
    for rank, sent in enumerate(run_ranks(2, changing_states, tmp_path)):
        assert sent.count(f"table/{rank}") == 2
        assert sent.count(str(rank)) == 4
        assert sum(key.startswith("names/") for key in sent) <= 2
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [4, 3]
    for path in list_checkpoints(tmp_path):
        verify_folder(path)


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
    return trainer.snapshots.take_messages(), blocked


def test_a_second_snapshot_waits_for_the_first(tmp_path: Path) -> None:
    for messages, blocked in run_ranks(2, two_at_once, tmp_path, "wait"):
        assert blocked > 0.3
        assert len(messages) in (0, 2)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [2, 1]


def test_a_second_snapshot_is_skipped_when_busy(tmp_path: Path) -> None:
    (messages, blocked), _ = run_ranks(2, two_at_once, tmp_path, "skip")
    assert blocked < 0.3
    assert messages[0] == "no checkpoint: the previous checkpoint is still being written; training continues"
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [1]


def make(run: Path, *steps: int) -> None:
    for step in steps:
        (begin_folder(run, step) / NAME).touch()
        commit_folder(run, step)


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5)
    assert retire(tmp_path, keep=0, keep_hours=0) == []
    assert [step_of(path) for path in retire(tmp_path, keep=2, keep_hours=0)] == [1, 2, 3]
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [5, 4]


def test_the_first_checkpoint_of_each_interval_is_kept(tmp_path: Path) -> None:
    make(tmp_path, *range(10))
    for step in range(10):  # one every twenty minutes
        at = 1_000_000 * HOUR + step * HOUR / 3
        os.utime(folder_of(tmp_path, step), (at, at))
    retire(tmp_path, keep=2, keep_hours=1, now=2_000_000 * HOUR)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [9, 8, 6, 3, 0]
    retire(tmp_path, keep=2, keep_hours=1, now=2_000_000 * HOUR)  # a second call removes nothing
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [9, 8, 6, 3, 0]


def test_a_checkpoint_that_was_set_aside_is_not_listed(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    set_aside(folder_of(tmp_path, 2))
    make(tmp_path, 2)
    assert set_aside(folder_of(tmp_path, 2)).name == "step-00000002.aside-2"
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [1]


def test_unfinished_checkpoints_are_removed(tmp_path: Path) -> None:
    make(tmp_path, 1)
    begin_folder(tmp_path, 2)
    clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_steps_beyond_eight_digits_sort_by_number(tmp_path: Path) -> None:
    make(tmp_path, 99_999_999, 100_000_000)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [100_000_000, 99_999_999]


def test_a_missing_run_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "nothing") == []
    with pytest.raises(FileExistsError):
        make(tmp_path, 1, 1)
