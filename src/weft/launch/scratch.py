"""Folders in shared memory, which outlive the processes that use them, but not their run for longer than until the next launch.

Whoever uses such a folder holds the lock in it. A folder may besides name the run that it belongs to, and stays as long as that
run is there. The next launch removes the others: by the lock and by the run's identity, never by the name of a folder alone.
"""

import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.lock import Lock, take_lock

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "weft-"
LOCK, RUN = "lock", "run.json"  # files in such a folder
LEAST_FREE_BYTES, LEAST_FREE_FILES = 2**24, 2**10  # shared memory is not used where less is left
LOCK_SECONDS = 5.0  # until another process has looked whether a folder may go
MOST_BYTES = 4096  # of the files that say who a folder belongs to


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder that only this user can read, in shared memory where there is room; it goes at the end of the block."""
    parent = SHARED_MEMORY if _has_room(SHARED_MEMORY) else None  # else that of temporary files
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        lock = take_lock(folder / f".{LOCK}")
        assert lock is not None
        (folder / f".{LOCK}").rename(folder / LOCK)  # nobody finds it before it is held
        try:
            yield folder
        finally:
            lock.release()


def _has_room(parent: Path) -> bool:
    try:
        free = os.statvfs(parent)
    except OSError:
        return False
    room = free.f_bavail * free.f_frsize >= LEAST_FREE_BYTES and (not free.f_files or free.f_favail >= LEAST_FREE_FILES)
    return room and os.access(parent, os.W_OK | os.X_OK)


def hold_for_run(folder: Path, id_file: Path, run_id: str) -> Lock:
    """Make a folder that stays as long as its run, and hold it together with other processes of that run.

    What it held for another run is removed.

    Args:
        folder: in shared memory; named after the run.
        id_file: where the run folder says which run it is.
        run_id: what it says.

    Raises:
        OSError: it cannot be made, belongs to another user, or processes of another run hold it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder):
        raise PermissionError(f"{folder} is open to others: what it holds cannot be trusted")
    if not belongs_to(folder, id_file, run_id):
        lock = _wait_for_lock(folder, shared=False)
        for path in folder.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        owner = {"file": str(id_file.resolve()), "id": run_id}
        (folder / f".{RUN}").write_text(json.dumps(owner), encoding="utf-8")
        (folder / f".{RUN}").rename(folder / RUN)
        lock.release()
    return _wait_for_lock(folder, shared=True)


def belongs_to(folder: Path, id_file: Path, run_id: str) -> bool:
    """Whether a folder that only this user can read holds what a run has left there."""
    owner = {"file": str(id_file.resolve()), "id": run_id}
    return os.path.lexists(folder) and _is_private(folder) and _read_owner(folder) == owner


def _is_private(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _wait_for_lock(folder: Path, *, shared: bool) -> Lock:
    end = time.monotonic() + LOCK_SECONDS
    while (lock := take_lock(folder / LOCK, shared=shared)) is None:
        if time.monotonic() > end:
            raise BlockingIOError(f"{folder} is held by processes of another run")
        time.sleep(0.02)
    return lock


def remove_leftovers() -> list[Path]:
    """Remove the folders of this user's dead processes that no run needs any more; which they were."""
    gone = []
    for parent in {SHARED_MEMORY, Path(tempfile.gettempdir())}:
        for folder in parent.glob(f"{PREFIX}*"):
            with suppress(OSError):  # it may go at any moment
                if _is_leftover(folder):
                    gone.append(folder)
    return gone


def _is_leftover(folder: Path) -> bool:
    """Whether a folder was one; it is gone then."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or not (folder / LOCK).exists():
        return False
    lock = take_lock(folder / LOCK)
    if lock is None:
        return False
    try:
        if _is_needed(folder):
            return False
        shutil.rmtree(folder)
        return True
    finally:
        lock.release()


def _is_needed(folder: Path) -> bool:
    """Whether a folder belongs to a run that is there; also where that cannot be known, as on a disk that is not mounted."""
    owner = _read_owner(folder)
    if owner is None:
        return False
    file = Path(owner["file"])
    return not file.parent.parent.is_dir() or _read(file) == owner["id"]


def _read_owner(folder: Path) -> dict[str, str] | None:
    try:
        owner = json.loads(_read(folder / RUN))
        return {"file": str(owner["file"]), "id": str(owner["id"])}
    except (ValueError, TypeError, KeyError):
        return None


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MOST_BYTES).strip()
    except (OSError, ValueError):
        return ""
