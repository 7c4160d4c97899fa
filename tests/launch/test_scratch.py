"""Scratch folders: folders of running processes and existing runs are kept; the next launch removes all other folders."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weft.launch import scratch
from weft.launch.scratch import hold_for_run, part_folder, remove_leftovers, scratch_folder
from weft.lock import take_lock


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of this test that replaces shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(scratch, "SHARED_MEMORY", folder)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path / "tmp"))
    return folder


def run_and_kill(code: str, *arguments: str) -> str:
    """Run code in another process that prints `folder` and then kills itself; returns its output."""
    head = "import os, signal, sys\nfrom pathlib import Path\nfrom weft.launch import scratch\n"
    head += "scratch.SHARED_MEMORY = Path(sys.argv[1])\n"
    tail = "\nprint(folder, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    command = [sys.executable, "-c", head + code + tail, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def test_a_folder_is_removed_at_the_end_or_by_the_next_launch(memory: Path) -> None:
    with scratch_folder() as folder:
        assert folder.parent == memory
        assert folder.stat().st_mode & 0o777 == 0o700
        assert remove_leftovers() == []
    assert not folder.exists()
    left = Path(run_and_kill("block = scratch.scratch_folder()\nfolder = block.__enter__()", str(memory)))
    assert (left / "lock").exists()
    assert remove_leftovers() == [left]
    assert list(memory.iterdir()) == []


def test_foreign_folders_and_files_are_kept(memory: Path, tmp_path: Path) -> None:
    """Folders without a lock, links, files, and folders of other users."""
    (memory / "weft-somebody").mkdir()
    (memory / "weft-file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    (memory / "weft-link").symlink_to(tmp_path / "elsewhere")
    (memory / "weft-of-others").mkdir()
    (memory / "weft-of-others" / "lock").touch()
    if os.geteuid() == 0:
        os.chown(memory / "weft-of-others", 65534, 65534)
    remove_leftovers()
    names = {path.name for path in memory.iterdir()}
    assert {"weft-somebody", "weft-file", "weft-link"} <= names
    assert (tmp_path / "elsewhere" / "lock").exists()
    assert ("weft-of-others" in names) == (os.geteuid() == 0)


def test_a_folder_is_kept_as_long_as_its_run_exists(memory: Path, tmp_path: Path) -> None:
    run, folder = tmp_path / "runs" / "first", memory / "weft-0-1"
    run.mkdir(parents=True)
    (run / "run_id").write_text("abc")
    code = "folder = Path(sys.argv[2])\nheld = scratch.hold_for_run(folder, Path(sys.argv[3]) / 'run_id', 'abc')"
    run_and_kill(code, str(memory), str(folder), str(run))
    (folder / "step-00000001").mkdir()
    assert remove_leftovers() == []
    lock = hold_for_run(folder, run / "run_id", "abc")
    second = hold_for_run(folder, run / "run_id", "abc")  # several hosts that share the memory
    assert (folder / "step-00000001").exists()
    (run / "run_id").write_text("another")
    assert remove_leftovers() == []  # it is locked
    lock.release()
    second.release()
    run.parent.rename(tmp_path / "not mounted")
    assert remove_leftovers() == []
    (tmp_path / "not mounted").rename(run.parent)
    assert remove_leftovers() == [folder]


def test_a_run_does_not_see_files_of_an_earlier_run_with_the_same_path(memory: Path, tmp_path: Path) -> None:
    folder, file = memory / "weft-0-1", tmp_path / "run_id"
    hold_for_run(folder, file, "abc").release()
    (folder / "step-00000001").mkdir()
    (folder / "link").symlink_to(tmp_path)
    lock = hold_for_run(folder, file, "def")
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "run.json"]
    assert json.loads((folder / "run.json").read_text())["id"] == "def"
    lock.release()


def test_a_folder_open_to_other_users_is_refused(memory: Path, tmp_path: Path) -> None:
    (memory / "weft-0-1").mkdir()
    (memory / "weft-0-1").chmod(0o755)
    with pytest.raises(PermissionError, match="open to other users"):
        hold_for_run(memory / "weft-0-1", tmp_path / "run_id", "abc")
    (memory / "weft-0-2").symlink_to(tmp_path)
    with pytest.raises(OSError, match="open to other users"):
        hold_for_run(memory / "weft-0-2", tmp_path / "run_id", "abc")


def test_a_folder_locked_by_another_run_is_refused(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "LOCK_SECONDS", 0.1)
    lock = hold_for_run(memory / "weft-0-1", tmp_path / "run_id", "abc")
    with pytest.raises(OSError, match="locked by processes of another run"):
        hold_for_run(memory / "weft-0-1", tmp_path / "run_id", "def")
    lock.release()


def test_full_memory_is_not_used(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "MIN_FREE_BYTES", 2**62)
    with scratch_folder() as folder:
        assert folder.parent == tmp_path / "tmp"
        assert take_lock(folder / "lock") is None


@pytest.mark.must("fault: A folder of the user has the name of a scratch folder")
def test_folders_of_the_user_are_kept_whatever_their_names_and_files(memory: Path, tmp_path: Path) -> None:
    """Also a copy of a scratch folder, and a folder with all of its files."""
    with scratch_folder() as own:
        shutil.copytree(own, memory / "weft-copy")
        (memory / "weft-copy" / "thesis.txt").write_text("mine")
        mark = (own / "lock").read_bytes()
    for parent in (memory, tmp_path / "tmp"):
        for name, text in (("weft-experiments", b""), ("weft-notes", mark), ("weft-run", b'{"host": "a", "pid": 1}')):
            (parent / name).mkdir(mode=0o700)
            (parent / name / "lock").write_bytes(text)
            (parent / name / "run.json").write_text('{"file": "/nowhere/run_id", "id": "1"}')
            (parent / name / "thesis.txt").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert remove_leftovers() == []
    with pytest.raises(PermissionError, match="has files that are not Weft's"):
        hold_for_run(memory / "weft-experiments", tmp_path / "run_id", "abc")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_part_of_a_killed_process_is_removed_by_the_next_and_a_folder_of_the_user_is_not(tmp_path: Path) -> None:
    result = tmp_path / "export"
    code = "block = scratch.part_folder(Path(sys.argv[2]))\nfolder = block.__enter__()"
    left = Path(run_and_kill(code, str(tmp_path / "shm"), str(result)))
    mine = [tmp_path / ".export.part", tmp_path / ".export.1234.part"]
    for folder in mine:
        folder.mkdir()
        (folder / "lock").touch()
    assert left.parent == tmp_path
    with part_folder(result) as part, part_folder(result) as other:
        assert part != other
        assert not left.exists()
        assert part.exists()
    assert sorted(path for path in tmp_path.iterdir() if path.name.startswith(".export")) == sorted(mine)
