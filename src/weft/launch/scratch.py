"""Scratch folders, in shared memory or beside a result, and their removal after the processes that used them have died.

A process that uses a scratch folder holds a lock in it. A folder may also belong to a run: it then survives the processes, as
long as the folder of the run exists. Each launch removes all other scratch folders of the user. It decides by the mark in the
lock file, which has the number of the folder, by the lock and by the identity of the run. A name decides nothing, as a folder
of the user may have any name and any files.
"""

import glob
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.lock import WITHOUT_LOCKS, Lock, take_lock

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "weft-"
LOCK, RUN = "lock", "run.json"  # files in such a folder
MIN_FREE_BYTES, MIN_FREE_FILES = 2**24, 2**10  # below these limits shared memory is not used
LOCK_SECONDS = 5.0  # maximum wait for another process that checks whether the folder can be removed
MAX_OWNER_BYTES = 4096  # size of the files that identify the run of a folder


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Create a private folder, in shared memory if it has space, and remove it at the end of the block."""
    parent = SHARED_MEMORY if _has_space(SHARED_MEMORY) else None  # None: the folder of temporary files
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        lock = mark_folder(folder)
        try:
            yield folder
        finally:
            lock.release()


@contextmanager
def part_folder(target: Path) -> Iterator[Path]:
    """Create a folder next to a result, and remove it at the end of the block. The result is made inside of it, and renamed.

    Folders that killed processes have left for the same result are removed.

    Args:
        target: path of the result; it need not exist.
    """
    for earlier in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        with suppress(OSError):
            _remove_if_leftover(earlier)
    part, lock = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part"), None
    part.mkdir(parents=True)
    try:
        with suppress_without_locks():
            lock = mark_folder(part)
        yield part
    finally:
        if lock:
            lock.release()
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def suppress_without_locks() -> Iterator[None]:
    """Context that a file system without locks ends without an error."""
    try:
        yield
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise


def mark_folder(folder: Path) -> Lock:
    """Lock a new folder, and mark it as a scratch folder of Weft.

    Raises:
        OSError: the lock file cannot be written, or another process marks the folder.
    """
    lock = take_lock(folder / f".{LOCK}")
    if lock is None:
        raise BlockingIOError(f"{folder} is locked by another process")
    os.pwrite(lock.descriptor, _mark_of(folder).encode(), 0)
    (folder / f".{LOCK}").rename(folder / LOCK)  # becomes visible to other processes when it is already locked
    return lock


def is_marked(folder: Path) -> bool:
    """True for a folder that `mark_folder` has marked; a copy of one has another number."""
    return _read(folder / LOCK) == _mark_of(folder)


def _mark_of(folder: Path) -> str:
    return f"scratch folder {folder.lstat().st_ino} of Weft"


def _has_space(parent: Path) -> bool:
    try:
        free = os.statvfs(parent)
    except OSError:
        return False
    has_space = free.f_bavail * free.f_frsize >= MIN_FREE_BYTES and (
        not free.f_files or free.f_favail >= MIN_FREE_FILES
    )
    return has_space and os.access(parent, os.W_OK | os.X_OK)


def hold_for_run(folder: Path, id_file: Path, run_id: str) -> Lock:
    """Create a folder that exists as long as its run, and hold a shared lock on it. Files of another run are removed.

    Args:
        folder: path in shared memory, named after the run.
        id_file: file in the run folder that contains the identity of the run.
        run_id: identity of the run.

    Raises:
        OSError: the folder cannot be created, belongs to another user, has files of others than Weft, or is locked by processes
            of another run.
    """
    open_marked(folder)
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


def open_marked(folder: Path) -> None:
    """Create and mark a private folder, unless it exists and is marked.

    Raises:
        OSError: the folder cannot be created, belongs to another user, or has files of others than Weft.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(f"{folder} is open to other users: its contents cannot be trusted")
    if not is_marked(folder):
        if {path.name for path in folder.iterdir()} - {f".{LOCK}"}:
            raise PermissionError(f"{folder} has files that are not Weft's")
        mark_folder(folder).release()


def belongs_to(folder: Path, id_file: Path, run_id: str) -> bool:
    """True if only this user can read a folder and the folder belongs to the given run."""
    owner = {"file": str(id_file.resolve()), "id": run_id}
    return os.path.lexists(folder) and is_private(folder) and _read_owner(folder) == owner


def is_private(folder: Path) -> bool:
    """True if a path is a folder of this user that other users cannot open."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _wait_for_lock(folder: Path, *, shared: bool) -> Lock:
    end = time.monotonic() + LOCK_SECONDS
    while (lock := take_lock(folder / LOCK, shared=shared)) is None:
        if time.monotonic() > end:
            raise BlockingIOError(f"{folder} is locked by processes of another run")
        time.sleep(0.02)
    return lock


def remove_leftovers() -> list[Path]:
    """Remove scratch folders of this user whose processes are dead and whose run, if any, no longer exists.

    Returns:
        Paths of the removed folders.
    """
    removed = []
    for parent in {SHARED_MEMORY, Path(tempfile.gettempdir())}:
        for folder in parent.glob(f"{PREFIX}*"):
            with suppress(OSError):  # another process may remove it at the same time
                if _remove_if_leftover(folder):
                    removed.append(folder)
    return removed


def _remove_if_leftover(folder: Path) -> bool:
    """Remove a folder if it is not in use and not needed; True if it was removed."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or not is_marked(folder):
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
    """True if a folder belongs to an existing run, or if this is unknown because the disk of the run is not mounted."""
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
            return file.read(MAX_OWNER_BYTES).strip()
    except (OSError, ValueError):
        return ""
