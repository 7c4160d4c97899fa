"""Checkpoint folders of a run: naming, listing, atomic commit, retention, and cleanup after a killed run."""

import ctypes
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from weft.checkpoint.manifest import FOLDER_NAME, NAME, SHARD_NAME, sync_folder, unreadable_error
from weft.errors import CheckpointError

HIDDEN_NAME = re.compile(r"\.step-\d{8,}\.(part|gone)")
"""Names of checkpoint folders that are being written or removed."""
T = TypeVar("T")
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux


def folder_of(run: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return run / f"step-{step:08d}"


def part_of(run: Path, step: int) -> Path:
    """Temporary folder of the checkpoint of a step while it is being written."""
    return run / f".step-{step:08d}.part"


def list_checkpoints(run: Path) -> list[Path]:
    """Folders of a run that are named like checkpoints, newest first. Their content is not verified.

    Raises:
        UnreadableError: the folder of the run cannot be read.
    """
    try:
        folders = [path for path in run.iterdir() if FOLDER_NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable_error(run, error) from None
    return sorted(folders, key=step_of, reverse=True)


def newest_checkpoint(run: Path) -> Path:
    """Checkpoint of the last step of a run; not verified.

    Raises:
        CheckpointError: there is none.
    """
    found = list_checkpoints(run)
    if not found:
        raise CheckpointError(
            "there is no complete checkpoint",
            where=str(run),
            rule="a checkpoint appears when all of its files are on the disk",
            fix="resume from an earlier checkpoint",
        )
    return found[0]


def step_of(folder: Path) -> int:
    """Step in the name of a checkpoint folder."""
    name = FOLDER_NAME.fullmatch(folder.name)
    assert name is not None
    return int(name[1])


def begin_folder(run: Path, step: int) -> Path:
    """Create an empty temporary folder for a checkpoint, and remove the remains of an unfinished attempt.

    Raises:
        OSError: the folder cannot be created, or has files that are not those of a checkpoint.
    """
    part = part_of(run, step)
    if part.exists():
        _remove(part)
    part.mkdir(parents=True)
    return part


def commit_folder(run: Path, step: int, *, replace: bool = False) -> Path:
    """Rename the temporary folder, whose files are all on the disk, to its final name. The checkpoint then exists.

    Args:
        run: folder of the checkpoints.
        step: step of the checkpoint.
        replace: replace a checkpoint of this step.

    Raises:
        FileExistsError: a checkpoint of this step exists, and is not replaced.
    """
    target = folder_of(run, step)
    if target.exists() and not replace:  # rename would replace an empty folder
        raise FileExistsError(f"{target} exists")
    replace_folder(part_of(run, step), target)
    return target


def replace_folder(part: Path, target: Path) -> None:
    """Give a new folder, whose files are on the disk, its final name; a folder of this name is removed afterwards.

    There is a complete folder at every moment: the two exchange their names. On a file system that cannot exchange names, the
    earlier folder is renamed first; it has the name of `set_aside` if the process is killed then.

    Args:
        part: new folder, next to `target`.
        target: final name.
    """
    earlier = part
    if not os.path.lexists(target):
        part.rename(target)
    elif not _exchange(part, target):
        earlier = set_aside(target)
        part.rename(target)
    sync_folder(target.parent)
    if earlier.is_symlink():
        earlier.unlink()
    elif earlier.exists():
        shutil.rmtree(earlier, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Flush all files of a folder, and the names in it, to the disk. Links are not followed."""
    for root, _, names in os.walk(folder):
        for path in (Path(root, name) for name in names):
            if path.is_file() and not path.is_symlink():
                with path.open("rb") as content:
                    os.fsync(content.fileno())
        sync_folder(Path(root))


def _exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Python has no function for it
    if rename is None:
        return False
    return rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0


def clean(run: Path) -> None:
    """Remove checkpoints that were never finished, and checkpoints whose removal was interrupted.

    Only files with the names of those of a checkpoint are removed: the folder may be one of the user.
    """
    for path in run.iterdir() if run.is_dir() else ():
        if HIDDEN_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with suppress(OSError):
                _remove(path)


def _remove(folder: Path) -> None:
    """Remove the files of a checkpoint, and their folder.

    Raises:
        OSError: the folder has other files, which are kept.
    """
    for path in folder.iterdir():
        if path.name == NAME or SHARD_NAME.fullmatch(path.name):
            path.unlink()
    folder.rmdir()


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint whose step will be trained again, so that the new checkpoint can take its name."""
    count = 1
    while os.path.lexists(aside := folder.with_name(f"{folder.name}.aside-{count}")):
        count += 1
    folder.rename(aside)
    return aside


def retire(run: Path, keep: int, keep_hours: float, now: float | None = None, spared: Path | None = None) -> list[Path]:
    """Remove checkpoints that are neither among the newest nor the first of their time interval.

    Folders without a manifest are no checkpoints of Weft, and are kept.

    Args:
        run: run folder.
        keep, keep_hours, now: see `expired`.
        spared: checkpoint that is still in use, and is left to a later call.

    Returns:
        Former paths of the removed checkpoints.
    """
    written = {folder: folder.stat().st_mtime for folder in list_checkpoints(run) if (folder / NAME).is_file()}
    removed = [folder for folder in expired(written, keep, keep_hours, now) if folder != spared]
    for folder in removed:
        hidden = folder.with_name(f".{folder.name}.gone")
        os.rename(folder, hidden)  # a half-removed folder must not look like a checkpoint
        with suppress(OSError):
            _remove(hidden)
    return removed


def expired(written: Mapping[T, float], keep: int, keep_hours: float, now: float | None = None) -> list[T]:
    """Checkpoints that retention removes, oldest first.

    Args:
        written: times at which checkpoints were written, in seconds since the epoch, newest checkpoint first.
        keep: number of newest checkpoints to keep; 0 keeps all.
        keep_hours: interval in hours; the first checkpoint of each interval is also kept. 0: no older checkpoint is kept.
        now: current time, in seconds since the epoch; by default the system clock.
    """
    if keep == 0:
        return []
    interval, kept, found = keep_hours * 3600, set(), []
    now = time.time() if now is None else now
    for each in reversed(list(written)[keep:]):
        if interval and written[each] <= now and written[each] // interval not in kept:
            kept.add(written[each] // interval)
        else:
            found.append(each)
    return found
