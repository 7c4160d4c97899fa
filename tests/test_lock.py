"""File locks: holders, release at process exit, and moved folders."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from weft.lock import read_holder, take_lock

HOLD = """
import sys, time
from pathlib import Path
from weft.lock import take_lock

take_lock(Path(sys.argv[1]))
print(flush=True)
time.sleep(60)
"""


def test_exclusive_lock_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = take_lock(path)
    assert lock is not None
    lock.sign()
    assert take_lock(path) is None
    assert take_lock(path, shared=True) is None
    holder = read_holder(path)
    assert holder is not None
    assert holder.pid == os.getpid()
    lock.release()
    assert take_lock(path) is not None


def test_shared_locks_exclude_an_exclusive_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = take_lock(path, shared=True), take_lock(path, shared=True)
    assert first is not None
    assert second is not None
    first.release()
    assert take_lock(path) is None
    second.release()
    assert take_lock(path) is not None


def test_lock_is_released_when_its_holder_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert take_lock(path) is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert take_lock(path) is not None


def test_fork_keeps_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = take_lock(path)
    assert lock is not None
    if not (fork := os.fork()):
        time.sleep(60)
        os._exit(0)
    lock.release()
    assert take_lock(path) is None
    os.kill(fork, signal.SIGKILL)
    os.waitpid(fork, 0)
    assert take_lock(path) is not None


def test_lock_moves_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert take_lock(tmp_path / "run" / "lock") is not None
    (tmp_path / "run").rename(tmp_path / "aside")
    (tmp_path / "run").mkdir()
    assert take_lock(tmp_path / "run" / "lock") is not None
    assert take_lock(tmp_path / "aside" / "lock") is None


def test_file_without_a_holder(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"\xff" * 10_000)
    assert read_holder(tmp_path / "lock") is None
    assert read_holder(tmp_path / "missing") is None
