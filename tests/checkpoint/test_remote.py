"""Copies of checkpoints on object stores: what is sent, read back, removed, moved and fetched, on file systems of fsspec."""

import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.lab.commands import weft
from tests.lab.remote_copies import local_checkpoint, send_all
from weft import object_store
from weft.checkpoint.manifest import NAME, verify_folder
from weft.checkpoint.remote import RemoteFolder, copy_name, locate, require_local
from weft.errors import CheckpointError, JobError, UnreadableError
from weft.job import Checkpoint, Job, Model
from weft.object_store import FileEntry, entry_of, is_url, retrying
from weft.training.remote_source import open_remote

SHARD = "shard-00000.safetensors"
HOUR = 3600.0


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(object_store, "START_SECONDS", 0.1)


@pytest.fixture
def remote(tmp_path: Path) -> RemoteFolder:
    return RemoteFolder(f"file://{tmp_path}/store/first")


def job_with(url: str, out: Path, **checkpoint: Any) -> Job:
    return Job(model=Model(path="model"), out=str(out), checkpoint=Checkpoint(remote=url, **checkpoint))


def file_at(path: Path, content: bytes) -> FileEntry:
    path.write_bytes(content)
    return entry_of(path)


@pytest.mark.parametrize("url", ["file://{}/store/first", "memory://{}/first"])
def test_a_file_is_read_back_and_not_sent_twice(url: str, tmp_path: Path) -> None:
    remote = RemoteFolder(url.format(tmp_path))
    file = file_at(tmp_path / SHARD, os.urandom(20_000))
    with mock.patch.object(remote.fs, "put_file", wraps=remote.fs.put_file) as put:
        for _ in range(2):
            remote.send(tmp_path / SHARD, SHARD, file)
        assert put.call_count == 1
        changed = file_at(tmp_path / SHARD, os.urandom(20_000))
        assert not remote.has(SHARD, changed)
        remote.send(tmp_path / SHARD, SHARD, changed)
        assert put.call_count == 2
    assert remote.has(SHARD, changed)


def damage(data: bytes, how: str) -> bytes:
    return {"truncated": data[:-1], "corrupted": data[:-1] + bytes([data[-1] ^ 1]), "empty": b""}[how]


@pytest.mark.parametrize("how", ["truncated", "corrupted", "empty", "missing", "not read back", "upload gone"])
def test_a_damaged_upload_is_found_and_repeated(how: str, remote: RemoteFolder, tmp_path: Path) -> None:
    file = file_at(tmp_path / SHARD, os.urandom(20_000))
    put, opened, attempts = remote.fs.put_file, remote.fs.open, []

    def put_damaged(source: str, target: str) -> None:
        attempts.append(target)
        if len(attempts) > 2:
            return put(source, target)
        if how == "upload gone":
            raise FileNotFoundError("The specified upload does not exist")
        if how in ("missing", "not read back"):
            return put(source, target) if how == "not read back" else None
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_bytes(damage(Path(source).read_bytes(), how))

    def open_failing(*args: Any, **kwargs: Any) -> Any:
        if how == "not read back" and len(attempts) < 3:
            raise TimeoutError
        return opened(*args, **kwargs)

    with mock.patch.object(remote.fs, "put_file", put_damaged), mock.patch.object(remote.fs, "open", open_failing):
        remote.send(tmp_path / SHARD, SHARD, file)
    assert len(attempts) == 3
    assert remote.has(SHARD, file)
    (tmp_path / SHARD).unlink()
    with pytest.raises(FileNotFoundError, match=SHARD):
        remote.send(tmp_path / SHARD, "other", file)


def test_repetitions_are_bounded_and_permanent_errors_are_raised_at_once() -> None:
    calls: list[int] = []

    def fail(error: Exception) -> None:
        calls.append(1)
        raise error

    with pytest.raises(ValueError, match="throttled"):
        retrying(lambda: fail(ValueError("throttled")), 0.05)
    assert len(calls) > 3
    for error in (PermissionError("no"), FileNotFoundError("no")):
        calls.clear()
        with pytest.raises(type(error)):
            retrying(lambda error=error: fail(error), 60)
        assert len(calls) == 1


# Complete copies, and their removal


def test_a_copy_without_its_manifest_is_none_and_is_removed_when_a_newer_one_is_complete(
    remote: RemoteFolder, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        send_all(remote, local_checkpoint(tmp_path / "run", step))
    for step in (1, 3):
        remote.withdraw(step)
    assert list(remote.copies()) == [2]
    remote.tidy(keep=0, keep_hours=0)
    assert remote._folders() == [3, 2]  # that of step 3 may be on its way


def test_retention_is_that_of_the_disk(remote: RemoteFolder, tmp_path: Path) -> None:
    for step in range(1, 7):
        send_all(remote, local_checkpoint(tmp_path / "run", step))
        written = (1000 + step // 2) * HOUR
        os.utime(remote.path(copy_name(step, NAME)), (written, written))
    remote.tidy(keep=0, keep_hours=0)
    assert list(remote.copies()) == [6, 5, 4, 3, 2, 1]
    remote.tidy(keep=2, keep_hours=1)
    assert remote._folders() == [6, 5, 4, 2, 1]  # the first of each hour, and the newest two
    remote.tidy(keep=1, keep_hours=0)
    assert remote._folders() == [6]


@pytest.mark.parametrize("failing", ["rm_file", "rm", "cp_file"])
def test_an_interrupted_removal_leaves_no_copy_in_part(failing: str, remote: RemoteFolder, tmp_path: Path) -> None:
    for step in (1, 2):
        send_all(remote, local_checkpoint(tmp_path / "run", step))
    with mock.patch.object(remote.fs, failing, side_effect=OSError("killed")):
        with pytest.raises(OSError, match="killed") if failing != "cp_file" else nullcontext():
            remote.tidy(1, 0)
        with pytest.raises(OSError, match="killed"):
            remote.set_aside_after(0)
    check_copies(remote, tmp_path)


def check_copies(remote: RemoteFolder, scratch: Path) -> None:
    """Each copy that the store shows as complete verifies."""
    for step in remote.copies():
        target = scratch / "fetched" / f"step-{step:08d}"
        shutil.rmtree(target.parent, ignore_errors=True)
        remote.fs.get(remote.path(copy_name(step)), str(target), recursive=True)
        verify_folder(target)


def test_later_copies_are_moved_aside_whole(remote: RemoteFolder, tmp_path: Path) -> None:
    for _ in range(2):
        for step in (1, 2, 3):
            send_all(remote, local_checkpoint(tmp_path / "run", step))
        moved = remote.set_aside_after(1)
    assert moved == ["step-00000003.aside-2", "step-00000002.aside-2"]
    assert list(remote.copies()) == [1]
    store = Path(remote.root)
    for name in ("step-00000002.aside-1", "step-00000002.aside-2", "step-00000003.aside-1"):
        verify_folder(store / name)


# Refusals


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("first", "is no URL"),
        ("nowhere://bucket/first", "Protocol not known"),
        ("az://bucket/first", r'pip install "weft-train\[az\]"'),
    ],
)
def test_urls_that_cannot_be_opened_are_refused(url: str, expected: str, tmp_path: Path) -> None:
    with mock.patch.dict("sys.modules", {"adlfs": None}), pytest.raises(JobError) as caught:
        open_remote(job_with(url, tmp_path), None, "")
    assert re.search(expected, str(caught.value))
    assert not list(tmp_path.iterdir())


def test_hosts_with_own_disks_have_no_store(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"checkpoint\.per_host with file://"):
        open_remote(job_with(f"file://{tmp_path}/store", tmp_path, per_host=True), None, "")


def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(UnreadableError, match="the store cannot be used"):
        open_remote(job_with(f"file://{tmp_path}/store/first", tmp_path), "auto", "")


def test_a_url_belongs_to_one_run(remote: RemoteFolder, tmp_path: Path) -> None:
    job, run = job_with(remote.url, tmp_path / "run"), tmp_path / "run"
    assert open_remote(job, None, "") is not None
    assert [path.name for path in Path(remote.root).iterdir()] == []  # of the probe
    send_all(remote, local_checkpoint(run, 1))
    remote.claim("first")
    for resume, run_id in (
        (None, "first"),
        ("auto", "other"),
        (str(run / "step-00000001"), "other"),
        (f"{remote.url}-2", ""),
    ):
        with pytest.raises(JobError, match="has checkpoints of run first, the newest of step 1"):
            open_remote(job, resume, run_id)
    assert open_remote(job, "auto", "first")
    assert open_remote(job, f"{remote.url}/step-00000001", "other")
    shutil.rmtree(run)
    assert open_remote(job, "auto", "")  # a new machine


def test_urls_are_told_from_paths() -> None:
    assert [is_url(text) for text in ("s3://b/x", Path("s3://b/x"), "gs://b", "/a/b", "a:b/c", "runs/1")] == [
        *[True] * 3,
        *[False] * 3,
    ]
    with pytest.raises(CheckpointError, match="s3://b/x is on an object store") as caught:
        require_local(Path("runs/1"), Path("s3://b/x"))
    assert "weft checkpoint fetch s3://b/x FOLDER" in str(caught.value)


# weft checkpoint fetch


@pytest.mark.must("command: checkpoint fetch")
def test_fetch_copies_and_verifies_the_newest_or_a_named_copy(remote: RemoteFolder, tmp_path: Path) -> None:
    for step in (1, 2):
        send_all(remote, local_checkpoint(tmp_path / "run", step))
    for url, step in ((remote.url, 2), (remote.url_of(1), 1)):
        assert locate(url)[1] == step
        done = weft("checkpoint", "fetch", url, tmp_path / f"got-{step}")
        assert done.returncode == 0, done.stderr
        assert verify_folder(tmp_path / f"got-{step}").position.step == step
    assert "exists" in weft("checkpoint", "fetch", remote.url, tmp_path / "got-2").stderr
    Path(remote.path(copy_name(2, SHARD))).write_bytes(b"damaged")
    done = weft("checkpoint", "fetch", remote.url, tmp_path / "damaged")
    assert done.returncode == 2
    assert f"{SHARD} has 7 bytes" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["got-1", "got-2", "run", "store"]


@pytest.mark.parametrize("command", ["ls", "verify", "diff", "convert", "export"])
def test_commands_that_read_folders_refuse_urls(command: str, remote: RemoteFolder, tmp_path: Path) -> None:
    arguments = {"diff": [remote.url], "convert": [tmp_path / "x", "--to", "hf"], "export": [tmp_path / "x"]}
    names = ["export"] if command == "export" else ["checkpoint", command]
    done = weft(*names, remote.url, *arguments.get(command, []))
    assert done.returncode == 2
    assert f"weft checkpoint fetch {remote.url} FOLDER" in " ".join(done.stderr.split())
