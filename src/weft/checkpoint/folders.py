"""Checkpoint folders of a run: naming, listing, atomic commit, retention, and cleanup after a killed run."""

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from weft.checkpoint.manifest import FOLDER_NAME, sync_folder
from weft.errors import CheckpointError


def folder_of(run: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return run / f"step-{step:08d}"


def part_of(run: Path, step: int) -> Path:
    """Temporary folder of the checkpoint of a step while it is being written."""
    return run / f".step-{step:08d}.part"


def list_checkpoints(run: Path) -> list[Path]:
    """Folders of a run that are named like checkpoints, newest first. Their content is not verified."""
    folders = (
        [path for path in run.iterdir() if FOLDER_NAME.fullmatch(path.name) and path.is_dir()] if run.is_dir() else []
    )
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
    """Create an empty temporary folder for a checkpoint, and remove the remains of an unfinished attempt."""
    part = part_of(run, step)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def commit_folder(run: Path, step: int) -> Path:
    """Rename the temporary folder, whose files are all on the disk, to its final name. The checkpoint then exists.

    Raises:
        FileExistsError: a checkpoint of this step exists; it is not changed.
    """
    target = folder_of(run, step)
    if target.exists():  # rename would replace an empty folder
        raise FileExistsError(f"{target} exists")
    part_of(run, step).rename(target)
    sync_folder(run)
    return target


def clean(run: Path) -> None:
    """Remove checkpoints that were never finished, and checkpoints whose removal was interrupted."""
    for path in [*run.glob(".step-*.part"), *run.glob(".step-*.gone")]:
        shutil.rmtree(path, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint whose step will be trained again, so that the new checkpoint can take its name."""
    count = 1
    while (aside := folder.with_name(f"{folder.name}.aside-{count}")).exists():
        count += 1
    folder.rename(aside)
    return aside


def retire(run: Path, keep: int, keep_hours: float, now: float | None = None) -> list[Path]:
    """Remove checkpoints that are neither among the newest nor the first of their time interval.

    Args:
        run: run folder.
        keep: number of newest checkpoints to keep; 0 keeps all.
        keep_hours: interval in hours; the first checkpoint of each interval is also kept. 0: no older checkpoint is kept.
        now: current time, in seconds since the epoch; by default the system clock.

    Returns:
        Former paths of the removed checkpoints.
    """
    if keep == 0:
        return []
    interval, kept, removed = keep_hours * 3600, set(), []
    now = time.time() if now is None else now
    older: Sequence[Path] = list_checkpoints(run)[keep:]
    for folder in reversed(older):
        written = folder.stat().st_mtime
        if interval and written <= now and written // interval not in kept:
            kept.add(written // interval)
            continue
        hidden = folder.with_name(f".{folder.name}.gone")
        os.rename(folder, hidden)  # a half-removed folder must not look like a checkpoint
        shutil.rmtree(hidden, ignore_errors=True)
        removed.append(folder)
    return removed
