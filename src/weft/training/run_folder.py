"""Run folder: write check, locking, archiving of earlier runs, and removal. Imports no torch.

The run folder and the checkpoint folder hold two lock files each. The launcher holds the first lock exclusively, and all ranks
hold the second lock shared. A new run needs both locks, so that ranks whose launcher was killed still protect their folder.
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
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.errors import DataError, JobError, UnreadableError
from weft.files import read_identities, replace_file
from weft.job import Job
from weft.lock import WITHOUT_LOCKS, Holder, Lock, read_holder, take_lock

LAUNCHER_LOCK, RANKS_LOCK = ".launcher.lock", ".ranks.lock"
RANK_EXIT_SECONDS = 5.0  # time for ranks to exit after their launcher was killed
NONCE_FILE = "rendezvous"  # file with a random word of host 0, see `shared_folders.py`
RUN_ID = "run_id"  # file with a random identity that a run keeps when it is resumed
SUMMARY = "run.json"  # file with totals of the run, written at its end
EXPORT = "export"  # folder with the weights of the run
PICTURE = "sample.png"  # samples of a model of diffusion
MAX_JSON_BYTES = 2**24  # of prepared.json and run.json


def check_run(run: Path) -> None:
    """Refuse a path that is no run folder.

    Raises:
        DataError: there is no such folder, or no run has written into it.
    """
    written = (RUN_ID, "metrics.jsonl", SUMMARY)
    if not any(os.path.lexists(run / name) for name in written):
        raise DataError(
            f"{run} is no run folder" if run.is_dir() else f"there is no folder {run}",
            where=str(run),
            rule=f"a run writes {', '.join(written)} into its folder",
            fix="give the folder named by `out` in the job",
        )


def check_writable(job: Job, *, new: bool, alone: bool = True) -> None:
    """Refuse an output or checkpoint folder that cannot be written. Creates no files.

    Args:
        new: True for a new run, which moves an earlier run aside; False for a resumed run.
        alone: True for a single host. Of several hosts, host 0 alone locks the folder, and waits for a lost host 0.

    Raises:
        JobError: the folder or its nearest existing parent cannot be written, another run uses the folder, or it has files of
            the user that a run would move or replace.
    """
    if alone:
        check_free(job)
    out = Path(job.out)
    found = [name for name in ("job.toml", EXPORT) if os.path.lexists(out / name)]
    if found and not os.path.lexists(out / RUN_ID):
        raise JobError(
            f"{out} has {found[0]}, and is no run folder",
            where=f"out = {str(out)!r}",
            rule=f"the folder of a run has a file {RUN_ID}; a new run replaces only files of earlier runs",
            fix="name another folder, with --out FOLDER",
        )
    _check_folder(out, "out")
    if new and (Path(job.out) / "job.toml").exists():  # the earlier run will be renamed within the parent folder
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
        problem = (
            f"a folder cannot be created in {existing}"
            if existing != folder.absolute()
            else f"{folder} cannot be written"
        )
        raise JobError(
            f"{problem}: {error.strerror}",
            where=f"{key} = {str(folder)!r}",
            rule="a run writes metrics, checkpoints and weights into its folder",
            fix="name a folder that you may write to, with --out FOLDER"
            if key == "out"
            else f"set {key} to a folder that you may write to",
        ) from None


class HeldFolders:
    """Locks of a launcher on the folders of its run; a context manager.

    Args:
        job: job of the run; `out` and `checkpoint.folder` are locked, and created if missing.
        beside_ranks: allow ranks of a run whose launcher has ended: on host 0 of several hosts, which may replace a lost one.
        wait_seconds: maximum wait for the launcher that holds the lock: a file server notices the loss of a host late.
    """

    def __init__(self, job: Job, *, beside_ranks: bool = False, wait_seconds: float = 0.0):
        self.folders = run_folders(job)
        self.beside_ranks, self.wait_seconds = beside_ranks, wait_seconds
        self.in_use = False
        """True if ranks, or launchers of other hosts, still use a folder."""
        self.has_locks = True
        """False on a file system without locks."""
        self.locks: dict[Path, Lock | None] = {}
        self.created: list[Path] = []
        """Folders that did not exist before."""

    def __enter__(self) -> "HeldFolders":
        try:
            for folder, key in self.folders.items():
                self._lock(folder, key)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for folder in self.created:  # a run that was refused before it wrote anything leaves no folder
            _remove_if_unused(folder)
        for lock in self.locks.values():
            if lock:
                lock.release()
        self.locks = {}

    def move_aside(self) -> Path | None:
        """Rename an earlier run in `out` to NAME.1, NAME.2 and so on.

        Returns:
            New path of the earlier run; None if there is none.

        Raises:
            JobError: another run has locked the folder meanwhile.
        """
        out = next(iter(self.folders))
        if not (out / "job.toml").exists():
            return None
        index = 1
        while os.path.lexists(aside := out.with_name(f"{out.name}.{index}")):
            index += 1
        out.rename(aside)
        earlier = self.locks.pop(out)
        for name in (LAUNCHER_LOCK, RANKS_LOCK):
            (aside / name).unlink(missing_ok=True)
        if earlier:
            earlier.release()
        self._lock(out, self.folders[out])
        return aside

    def _lock(self, folder: Path, key: str) -> None:
        if not folder.exists():
            self.created.append(folder)
        folder.mkdir(parents=True, exist_ok=True)
        last_holder = read_holder(folder / LAUNCHER_LOCK)
        lock, in_use = _lock_folder(folder, key, self.wait_seconds)
        if lock and in_use and not self.beside_ranks:
            lock.release()
            raise ranks_alive_error(folder, key, last_holder)
        if lock:
            lock.sign()
        self.in_use, self.has_locks = self.in_use or in_use, lock is not None
        self.locks[folder] = lock


def check_free(job: Job) -> None:
    """Refuse folders that another run has locked. Creates no files.

    Raises:
        JobError: names the process that holds the lock.
    """
    for folder, key in run_folders(job).items():
        if (folder / LAUNCHER_LOCK).exists():
            lock = lock_unused(folder, key)
            if lock:
                lock.release()


def join_folders(job: Job, out: Path) -> list[Lock]:
    """Acquire the shared locks on the folders of a run; called by each rank, and by the launchers of hosts other than 0.

    Args:
        out: run folder.

    Raises:
        JobError: another run has locked a folder exclusively.
    """
    locks = []
    for folder, key in {**run_folders(job), out: "out"}.items():
        try:
            if job.checkpoint.per_host:  # rank 0 has created those of its own host alone
                folder.mkdir(parents=True, exist_ok=True)
            lock = take_lock(folder / RANKS_LOCK, shared=True)
        except OSError as error:
            if error.errno in WITHOUT_LOCKS:
                continue
            raise
        if lock is None:
            raise _in_use_error(folder, key)
        locks.append(lock)
    return locks


def run_folders(job: Job) -> dict[Path, str]:
    """Folders that a run writes to, with the key of each; the run folder is the first."""
    folders = {Path(job.out): "out"}
    if job.checkpoint.folder and Path(job.checkpoint.folder).absolute() != Path(job.out).absolute():
        folders[Path(job.checkpoint.folder)] = "checkpoint.folder"
    return folders


def lock_unused(folder: Path, key: str) -> Lock | None:
    """Acquire the launcher's lock of a folder that no ranks use; None on a file system without locks."""
    last_holder = read_holder(folder / LAUNCHER_LOCK)
    lock, in_use = _lock_folder(folder, key)
    if lock and in_use:
        lock.release()
        raise ranks_alive_error(folder, key, last_holder)
    return lock


def _lock_folder(folder: Path, key: str, wait_seconds: float = 0.0) -> tuple[Lock | None, bool]:
    """Acquire the launcher's lock of a folder.

    Returns:
        lock: the lock; None on a file system without locks.
        in_use: True if ranks, or launchers of other hosts, still use the folder.
    """
    deadline = time.monotonic() + wait_seconds
    try:
        while (lock := take_lock(folder / LAUNCHER_LOCK)) is None:
            if time.monotonic() >= deadline:
                raise _in_use_error(folder, key)
            time.sleep(0.1)
        deadline = time.monotonic() + RANK_EXIT_SECONDS
        while (ranks := take_lock(folder / RANKS_LOCK)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
    except OSError as error:
        if error.errno in WITHOUT_LOCKS:
            return None, False
        raise JobError(
            f"{folder} cannot be locked: {error.strerror} ({error.filename})",
            where=f"{key} = {str(folder)!r}",
            rule="a folder belongs to one run at a time",
            fix="name another folder",
        ) from None
    if ranks:
        ranks.release()
    return lock, ranks is None


def ranks_alive_error(folder: Path, key: str, last_holder: Holder | None) -> JobError:
    """Error for a folder that ranks, or launchers of other hosts, still use. `last_holder` was their launcher, or host 0."""
    return JobError(
        f"{folder} is in use by ranks of a run whose launcher has ended: {last_holder or 'unknown'}",
        where=f"{key} = {str(folder)!r}",
        rule="a folder belongs to one run at a time",
        fix="wait until the ranks have exited, stop them, or name another folder",
    )


def _in_use_error(folder: Path, key: str) -> JobError:
    return JobError(
        f"{folder} is in use by {read_holder(folder / LAUNCHER_LOCK) or 'another run'}",
        where=f"{key} = {str(folder)!r}",
        rule="a folder belongs to one run at a time",
        fix="wait until that run has ended, or name another folder"
        + (", with --out FOLDER" if key == "out" else f": set {key}"),
    )


def _remove_if_unused(folder: Path) -> None:
    try:
        if {path.name for path in folder.iterdir()} <= {LAUNCHER_LOCK, RANKS_LOCK, NONCE_FILE}:
            shutil.rmtree(folder)
    except OSError:  # another process has removed or changed the folder
        pass


def read_table(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of at most `MAX_JSON_BYTES` bytes.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: the file holds no JSON object, or is larger.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with path.open("rb") as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES} bytes")
    try:
        table = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(table, dict):
        raise ValueError("it holds no JSON object")
    return table


def write_summary(out: Path, summary: dict[str, Any], log: Callable[[str], None], content: str) -> None:
    """Write run.json. A failure to write it does not fail the run.

    Args:
        out: run folder.
        summary: complete content of the file.
        log: function that prints a message if the file cannot be written.
        content: content that the report lacks in this case, for the message.
    """
    path = out / SUMMARY
    try:
        replace_file(path, json.dumps(summary, indent=1))
    except OSError as error:
        log(f"{path} cannot be written: {error.strerror}; the report lacks {content}")


def make_run_id(out: Path, checkpoint_folder: str = "") -> str:
    """Identity of the run in a folder, created if missing, and also written into its checkpoint folder."""
    run_id = read_run_id(out) or secrets.token_hex(8)
    for folder in [Path(checkpoint_folder)] * bool(checkpoint_folder) + [out]:
        if read_run_id(folder) != run_id:
            replace_file(folder / RUN_ID, run_id)
    return run_id


def check_checkpoint_folder(folder: Path, run_id: str) -> None:
    """Refuse to continue a run in another checkpoint folder than before, such as that of a disk that is not mounted.

    Args:
        folder: checkpoint folder.
        run_id: identity of the run; empty for a run that has not begun.

    Raises:
        UnreadableError: the folder does not have the identity of the run.
    """
    if run_id and (found := read_run_id(folder)) != run_id:
        raise UnreadableError(
            f"{folder} has {f'the identity of run {found}' if found else 'no identity of a run'}, this is run {run_id}",
            where=str(folder / RUN_ID),
            rule="a run with checkpoints is not started anew by --resume auto, and its checkpoint folder has its identity",
            fix="mount the disk of checkpoint.folder, or name the folder of before; "
            "else name a checkpoint with --resume FOLDER, or start a new run without --resume",
        )


def read_run_id(out: Path) -> str:
    """Identity of the run in a folder; empty if missing.

    Raises:
        UnreadableError: the file cannot be read at the moment.
    """
    rule = "a run keeps its identity when it is resumed"
    return read_identities(out / RUN_ID, "the identity of the run cannot be read", rule).strip()
