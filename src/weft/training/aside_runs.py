"""Earlier runs that a new run has moved aside: listing and removal, for `weft clean`. Imports no torch."""

import os
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from weft.errors import JobError
from weft.job import has_trainer
from weft.training.run_folder import lock_unused, read_run_id, read_table

RUN_FILES = ("job.toml", "prepared.json")  # written by every run before its first step
PREPARED_KEYS = {"train", "held_out", "tokenizer", "vocab_size"}


@dataclass(frozen=True)
class AsideFolder:
    """Folder with the name of a run that was moved aside."""

    path: Path
    bytes: int
    """Total size of its files; links are not followed."""
    modified: datetime
    """Time of the last write to one of its files."""
    refusal: str
    """Reason why the folder must not be removed; empty for a run of Weft."""


def list_aside(out: Path) -> list[AsideFolder]:
    """Folders and files named NAME.1, NAME.2 and so on next to a run folder, in numerical order.

    Args:
        out: run folder; need not exist.
    """
    out = out.absolute()
    names = [path.name for path in out.parent.iterdir()] if out.parent.is_dir() else []
    indices = sorted(
        int(suffix)
        for name in names
        if name.startswith(f"{out.name}.")
        and (suffix := name.removeprefix(f"{out.name}.")).isdecimal()
        and str(int(suffix)) == suffix
    )
    return [_inspect(out.with_name(f"{out.name}.{index}")) for index in indices]


def remove_aside(folder: AsideFolder) -> None:
    """Remove a run that was moved aside. Links inside it are removed, their targets are not.

    Raises:
        JobError: the folder is not a run of Weft, or processes use it.
        OSError: the folder cannot be removed.
    """
    if refusal := _refusal(folder.path):
        raise JobError(f"{folder.path} is {refusal}", rule="only folders of runs are removed", fix="remove it yourself")
    lock = lock_unused(folder.path, "out")  # the run may have been resumed, or its ranks may not have exited yet
    shutil.rmtree(folder.path)
    if lock:
        lock.release()


def _inspect(path: Path) -> AsideFolder:
    refusal = _refusal(path)
    size, modified = 0, path.lstat().st_mtime
    for root, _, files in os.walk(path) if not refusal else ():
        for status in (os.lstat(os.path.join(root, name)) for name in files):
            size, modified = size + status.st_size, max(modified, status.st_mtime)
    return AsideFolder(path, size, datetime.fromtimestamp(modified), refusal)


def _refusal(path: Path) -> str:
    """Reason why a folder is not a run of Weft; empty for a run of Weft."""
    if path.is_symlink():
        return "a link"
    if not path.is_dir():
        return "not a folder"
    job = path / "job.toml"
    if read_run_id(path) and not job.is_symlink() and has_trainer(job):  # such a run has no prepared.json
        return ""
    missing = [name for name in RUN_FILES if (path / name).is_symlink() or not (path / name).is_file()]
    if missing:
        return f"not a run of Weft: it has no {missing[0]}"
    try:
        keys = set(read_table(path / "prepared.json"))
    except (OSError, ValueError):
        keys = set()
    return "" if keys >= PREPARED_KEYS else "not a run of Weft: its prepared.json has other content"
