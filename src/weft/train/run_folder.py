"""The folder of a run: checked before anything is computed, held while the run lives, moved aside, removed. Imports no torch.

Two locks lie in it, and in the folder of its checkpoints. The launcher holds the first alone, each rank holds the second shared
with the others; whoever wants to begin needs both. So ranks whose launcher was killed keep their folder.
"""

import errno
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.errors import JobError
from weft.job import Job
from weft.lock import WITHOUT_LOCKS, Lock, read_holder, take_lock

LAUNCHER_LOCK, RANKS_LOCK = ".launcher.lock", ".ranks.lock"
DYING_SECONDS = 5.0  # that ranks may need to go when their launcher was killed
RUN_ID = "run_id"  # file: a random name that the run keeps when it is resumed
RUN_FILES = ("job.toml", "prepared.json")  # every run has both, before its first step
KEYS_OF_PREPARED = {"train", "held_out", "tokenizer", "vocab_size"}
SUMMARY = "run.json"  # file: totals of the run, written when it ends
LARGEST_JSON = 2**24  # bytes read of prepared.json and run.json


def check_writable(job: Job, *, new: bool, leads: bool = True) -> None:
    """Refuse an output or checkpoint folder that cannot be written, and leave nothing behind.

    Args:
        new: True for a new run, which moves an earlier one in its folder aside; False for one that is resumed.
        leads: False on another host than 0, which joins a run.

    Raises:
        JobError: the folder, or the nearest one above it that exists, cannot be written; or another run is in it.
    """
    if leads:
        check_free(job)
    _check_folder(Path(job.out), "out")
    if new and (Path(job.out) / "job.toml").exists():  # it is moved aside
        _check_folder(Path(job.out).absolute().parent, "out")
    if job.checkpoint.folder:
        _check_folder(Path(job.checkpoint.folder), "checkpoint.folder")


def _check_folder(folder: Path, key: str) -> None:
    existing = folder.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        what = (
            f"a folder cannot be made in {existing}" if existing != folder.absolute() else f"{folder} cannot be written"
        )
        raise JobError(
            f"{what}: {error.strerror}",
            where=f"{key} = {str(folder)!r}",
            rule="a run writes its metrics, checkpoints and weights into its folder",
            fix="name a folder that you may write to, with --out FOLDER"
            if key == "out"
            else f"set {key} to a folder that you may write to",
        ) from None


class HeldFolders:
    """The folders of a run, held by its launcher; a context manager.

    Args:
        job: of which `out` and `checkpoint.folder` are held. They are made if they are missing.
    """

    def __init__(self, job: Job):
        self.folders = _folders(job)
        self.locks: dict[Path, Lock | None] = {}
        self.made: list[Path] = []
        """Folders that were not there before."""

    def __enter__(self) -> "HeldFolders":
        try:
            for folder, key in self.folders.items():
                self._take(folder, key)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for folder in self.made:  # nothing is left behind where a run was refused before it wrote anything
            _remove_if_unused(folder)
        for lock in self.locks.values():
            if lock:
                lock.release()
        self.locks = {}

    def move_aside(self) -> Path | None:
        """Rename an earlier run in `out` to NAME.1, NAME.2 ...; its new path, or None if there is no run.

        Raises:
            JobError: another run has taken the name meanwhile.
        """
        out = next(iter(self.folders))
        if not (out / "job.toml").exists():
            return None
        number = 1
        while os.path.lexists(aside := out.with_name(f"{out.name}.{number}")):
            number += 1
        out.rename(aside)
        earlier = self.locks.pop(out)
        for name in (LAUNCHER_LOCK, RANKS_LOCK):
            (aside / name).unlink(missing_ok=True)
        if earlier:
            earlier.release()
        self._take(out, self.folders[out])
        return aside

    def _take(self, folder: Path, key: str) -> None:
        if not folder.exists():
            self.made.append(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lock = _take_folder(folder, key)
        if lock:
            lock.sign()
        self.locks[folder] = lock


def check_free(job: Job) -> None:
    """Refuse folders that another run holds; nothing is made.

    Raises:
        JobError: it says which process holds them.
    """
    for folder, key in _folders(job).items():
        if (folder / LAUNCHER_LOCK).exists():
            lock = _take_folder(folder, key)
            if lock:
                lock.release()


def join_folders(job: Job, out: Path) -> list[Lock]:
    """Hold the folders of a run together with its other ranks, and its launchers on other hosts; each of them calls this.

    Args:
        job: of the run.
        out: its folder.

    Raises:
        JobError: another run is taking them over.
    """
    locks = []
    for folder, key in {**_folders(job), out: "out"}.items():
        try:
            lock = take_lock(folder / RANKS_LOCK, shared=True)
        except OSError as error:
            if error.errno in WITHOUT_LOCKS:
                continue
            raise
        if lock is None:
            raise _held(folder, key)
        locks.append(lock)
    return locks


def _folders(job: Job) -> dict[Path, str]:
    """Folders that a run writes into, the one of the run first, and the keys that name them."""
    folders = {Path(job.out): "out"}
    if job.checkpoint.folder and Path(job.checkpoint.folder).absolute() != Path(job.out).absolute():
        folders[Path(job.checkpoint.folder)] = "checkpoint.folder"
    return folders


def _take_folder(folder: Path, key: str) -> Lock | None:
    """The launcher's lock of a folder; None on a file system that has no locks."""
    before = read_holder(folder / LAUNCHER_LOCK)
    try:
        if (lock := take_lock(folder / LAUNCHER_LOCK)) is None:
            raise _held(folder, key)
        end = time.monotonic() + DYING_SECONDS
        while (ranks := take_lock(folder / RANKS_LOCK)) is None and time.monotonic() < end:
            time.sleep(0.05)
    except OSError as error:
        if error.errno in WITHOUT_LOCKS:
            return None
        raise JobError(
            f"{folder} cannot be locked: {error.strerror} ({error.filename})",
            where=f"{key} = {str(folder)!r}",
            rule="a folder belongs to one run at a time",
            fix="name a folder of your own",
        ) from None
    if ranks is None:
        lock.release()
        raise JobError(
            f"{folder} is in use by ranks of a run whose launcher has ended: {before or 'unknown'}",
            where=f"{key} = {str(folder)!r}",
            rule="a folder belongs to one run at a time",
            fix="wait until they have ended, or end them, or name another folder",
        )
    ranks.release()
    return lock


def _held(folder: Path, key: str) -> JobError:
    return JobError(
        f"{folder} is in use by {read_holder(folder / LAUNCHER_LOCK) or 'another run'}",
        where=f"{key} = {str(folder)!r}",
        rule="a folder belongs to one run at a time",
        fix="wait until that run has ended, or name another folder"
        + (", with --out FOLDER" if key == "out" else f": set {key}"),
    )


def _remove_if_unused(folder: Path) -> None:
    try:
        if {path.name for path in folder.iterdir()} <= {LAUNCHER_LOCK, RANKS_LOCK}:
            shutil.rmtree(folder)
    except OSError:  # somebody else was quicker
        pass


def read_table(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most `LARGEST_JSON` bytes.

    Raises:
        OSError: the file cannot be read, or is no regular file.
        ValueError: it holds no JSON object, or is larger.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with path.open("rb") as file:
        text = file.read(LARGEST_JSON + 1)
    if len(text) > LARGEST_JSON:
        raise ValueError(f"it has more than {LARGEST_JSON} bytes")
    try:
        table = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(table, dict):
        raise ValueError("it holds no JSON object")
    return table


def write_summary(out: Path, summary: dict[str, Any], say: Callable[[str], None], content: str) -> None:
    """Write run.json. Where it cannot be written the report is poorer, and the run ends as well as before.

    Args:
        out: the run folder.
        summary: the whole of the file.
        say: told that it could not be written.
        content: what the report lacks then.
    """
    draft, path = out / f".{SUMMARY}", out / SUMMARY
    try:
        draft.write_text(json.dumps(summary, indent=1), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        say(f"{path} cannot be written: {error.strerror}; the report lacks {content}")


def make_run_id(out: Path) -> str:
    """The identity of the run in a folder, made if it has none."""
    if not (found := read_run_id(out)):
        found = secrets.token_hex(8)
        (out / RUN_ID).write_text(found, encoding="utf-8")
    return found


def read_run_id(out: Path) -> str:
    """The identity of the run in a folder; empty if it has none, as a folder of an earlier version."""
    try:
        with (out / RUN_ID).open(encoding="utf-8") as file:
            return file.read(64).strip()
    except (OSError, ValueError):
        return ""


@dataclass(frozen=True)
class AsideFolder:
    """A folder named like a run that was moved aside."""

    path: Path
    bytes: int
    """Of its files; links are not followed."""
    modified: datetime
    """When a file in it was last written."""
    refusal: str
    """Why it must not be removed; empty if it is a run of Weft."""


def list_aside(out: Path) -> list[AsideFolder]:
    """Everything beside a run folder that is named NAME.1, NAME.2 ..., by number.

    Args:
        out: the run folder; it need not exist.
    """
    out = out.absolute()
    names = [path.name for path in out.parent.iterdir()] if out.parent.is_dir() else []
    numbers = sorted(
        int(number)
        for name in names
        if name.startswith(f"{out.name}.")
        and (number := name.removeprefix(f"{out.name}.")).isdecimal()
        and str(int(number)) == number
    )
    return [_look_at(out.with_name(f"{out.name}.{number}")) for number in numbers]


def remove_aside(folder: AsideFolder) -> None:
    """Remove a run that was moved aside. Links inside it are removed, what they point to is not.

    Raises:
        JobError: it is no run of Weft, or processes hold it.
        OSError: it cannot be removed.
    """
    if refusal := _refusal(folder.path):
        raise JobError(f"{folder.path} is {refusal}", rule="only folders of runs are removed", fix="remove it yourself")
    lock = _take_folder(folder.path, "out")  # a run may have been resumed in it, or its ranks may not have ended yet
    shutil.rmtree(folder.path)
    if lock:
        lock.release()


def _look_at(path: Path) -> AsideFolder:
    refusal = _refusal(path)
    size, modified = 0, path.lstat().st_mtime
    for root, _, files in os.walk(path) if not refusal else ():
        for status in (os.lstat(os.path.join(root, name)) for name in files):
            size, modified = size + status.st_size, max(modified, status.st_mtime)
    return AsideFolder(path, size, datetime.fromtimestamp(modified), refusal)


def _refusal(path: Path) -> str:
    """Why a folder is no run of Weft; empty if it is one."""
    if path.is_symlink():
        return "a link"
    if not path.is_dir():
        return "not a folder"
    missing = [name for name in RUN_FILES if (path / name).is_symlink() or not (path / name).is_file()]
    if missing:
        return f"not a run of Weft: it has no {missing[0]}"
    try:
        keys = set(read_table(path / "prepared.json"))
    except (OSError, ValueError):
        keys = set()
    return "" if keys >= KEYS_OF_PREPARED else "not a run of Weft: its prepared.json is of something else"
