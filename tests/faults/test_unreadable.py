"""Checkpoints that cannot be read for a moment: the run stops and says so, and continues when they can be read."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.lab.commands import weft
from tests.lab.jobs import write_job
from weft.checkpoint import manifest
from weft.checkpoint.folders import list_checkpoints
from weft.training.metrics import read_metrics

ERRORS = {"ESTALE": errno.ESTALE, "EACCES": errno.EACCES, "EIO": errno.EIO}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a job, and its run of four steps with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "disk").mkdir()
    (folder / "key").write_text("ab" * 32)
    (folder / "key").chmod(0o600)
    settings = {"every": 2, "folder": str(folder / "disk"), "key_file": str(folder / "key")}
    job = write_job(folder, train={"steps": 4}, checkpoint=settings)
    done = weft("train", job, "--nproc-per-node", "1")
    assert done.returncode == 0, done.stderr
    return folder


@contextmanager
def failing_reads(name: str, code: int) -> Iterator[None]:
    """Context in which files of checkpoints with this name cannot be read, in this process and its forks."""
    opened = os.open

    def fail(path: Any, *args: Any, **kwargs: Any) -> int:
        if os.path.basename(os.fspath(path)) == name and "step-" in os.fspath(path):
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, *args, **kwargs)

    with mock.patch.object(manifest.os, "open", fail):
        yield


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def resume(folder: Path, *options: str) -> Any:
    more = ("--resume", "auto", "--accept-changes", "--set", "train.steps=6")
    return weft("train", folder / "job.toml", "--nproc-per-node", "1", *more, *options)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(
            name, marks=[pytest.mark.must("fault: Checkpoints cannot be read for a moment")] * (name == "ESTALE")
        )
        for name in ERRORS
    ],
)
def test_a_run_stops_while_its_manifests_cannot_be_read(error: str, saved: Path) -> None:
    before = contents(saved / "disk")
    with failing_reads("manifest.json", ERRORS[error]):
        done = resume(saved)
    assert done.returncode == 1
    assert f"a checkpoint cannot be read: {os.strerror(ERRORS[error])}" in done.stderr
    assert "Traceback" not in done.stderr
    assert contents(saved / "disk") == before
    assert [row.step for row in read_metrics(saved / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_run_stops_while_its_disk_is_not_mounted(saved: Path) -> None:
    (saved / "disk").rename(saved / "elsewhere")
    (saved / "disk").mkdir()
    try:
        done = resume(saved)
        assert done.returncode == 1
        assert "no identity of a run" in done.stderr
        assert "mount the disk of checkpoint.folder" in done.stderr
        assert not list_checkpoints(saved / "disk")
    finally:
        shutil.rmtree(saved / "disk")
        (saved / "elsewhere").rename(saved / "disk")


@pytest.mark.parametrize("key", ["missing", "left out", "another"])
def test_a_run_stops_without_its_key(key: str, saved: Path) -> None:
    before, other = contents(saved / "disk"), saved / "other"
    other.write_text("cd" * 32)
    other.chmod(0o600)
    value = {"missing": str(saved / "nowhere"), "left out": "", "another": str(other)}[key]
    done = resume(saved, "--set", f"checkpoint.key_file={value}")
    assert done.returncode in (1, 2)
    expected = {
        "missing": "the key file cannot be read",
        "left out": "it was written with a key",
        "another": "none of 2 checkpoints can be used",
    }[key]
    assert expected in done.stderr
    assert contents(saved / "disk") == before


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_anew(saved: Path) -> None:
    """A run starts anew only without --resume, which moves the earlier run aside."""
    files = [path / "shard-00000.safetensors" for path in list_checkpoints(saved / "disk")]
    kept = [path.read_bytes() for path in files]
    for path in files:
        os.truncate(path, 100)
    try:
        done = resume(saved)
        assert done.returncode == 2
        assert "none of 2 checkpoints can be used, the newest is step-00000004" in done.stderr
        assert [path.parent.name for path in files] == [path.name for path in list_checkpoints(saved / "disk")]
    finally:
        for path, content in zip(files, kept, strict=True):
            path.write_bytes(content)


def test_the_run_continues_when_its_checkpoints_can_be_read_again(saved: Path) -> None:
    done = resume(saved)
    assert done.returncode == 0, done.stderr
    assert "resuming after step 4" in done.stdout
