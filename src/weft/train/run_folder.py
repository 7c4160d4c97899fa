"""The folder of a run: checked before anything is computed, moved aside for a later run, and removed. Imports no torch."""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from weft.errors import JobError
from weft.job import Job

RUN_FILES = ("job.toml", "prepared.json")  # every run has both, before its first step
KEYS_OF_PREPARED = {"train", "held_out", "tokenizer", "vocab_size"}


def check_writable(job: Job, *, new: bool) -> None:
    """Refuse an output or checkpoint folder that cannot be written, and leave nothing behind.

    Args:
        new: True for a new run, which moves an earlier one in its folder aside; False for one that is resumed.

    Raises:
        JobError: the folder, or the nearest one above it that exists, cannot be written.
    """
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


def move_aside(out: Path) -> Path | None:
    """Rename an earlier run in a folder to NAME.1, NAME.2 ...; its new path, or None if there is no run."""
    if not (out / "job.toml").exists():
        return None
    number = 1
    while os.path.lexists(aside := out.with_name(f"{out.name}.{number}")):
        number += 1
    out.rename(aside)
    return aside


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
        JobError: it is no run of Weft.
        OSError: it cannot be removed.
    """
    if refusal := _refusal(folder.path):
        raise JobError(f"{folder.path} is {refusal}", rule="only folders of runs are removed", fix="remove it yourself")
    shutil.rmtree(folder.path)


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
        keys = set(json.loads((path / "prepared.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        keys = set()
    return "" if keys >= KEYS_OF_PREPARED else "not a run of Weft: its prepared.json is of something else"
