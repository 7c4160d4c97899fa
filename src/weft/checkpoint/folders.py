"""The checkpoints of a run folder: which there are, which may go, and what a killed run left behind."""

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from weft.checkpoint.manifest import FOLDER_NAME, sync_folder


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / f"step-{step:08d}"


def part_of(run: Path, step: int) -> Path:
    """Where it is written, until it is whole."""
    return run / f".step-{step:08d}.part"


def list_checkpoints(run: Path) -> list[Path]:
    """The folders of a run that are named like checkpoints, newest first; whether they are good is not looked at."""
    found = (
        [path for path in run.iterdir() if FOLDER_NAME.fullmatch(path.name) and path.is_dir()] if run.is_dir() else []
    )
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint."""
    name = FOLDER_NAME.fullmatch(folder.name)
    assert name is not None
    return int(name[1])


def begin_folder(run: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into; what an unfinished attempt left there goes."""
    part = part_of(run, step)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def commit_folder(run: Path, step: int) -> Path:
    """Give a folder whose files are all on the disk its name: from now on the checkpoint exists.

    Raises:
        FileExistsError: there is one of that name; it stays.
    """
    target = folder_of(run, step)
    if target.exists():  # rename would replace an empty folder
        raise FileExistsError(f"{target} exists")
    part_of(run, step).rename(target)
    sync_folder(run)
    return target


def clean(run: Path) -> None:
    """Remove what was never finished, and what was about to be removed."""
    for path in [*run.glob(".step-*.part"), *run.glob(".step-*.gone")]:
        shutil.rmtree(path, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint that training goes back before, so that a later one may have its name; nothing is lost."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.aside-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


def retire(run: Path, keep: int, keep_hours: float, now: float | None = None) -> list[Path]:
    """Remove checkpoints that are neither among the newest nor the first of their stretch of time.

    Args:
        run: the run folder.
        keep: how many of the newest stay; 0: all stay.
        keep_hours: of the older ones the first of every so many hours stays; 0: none.
        now: seconds of the clock.

    Returns:
        Their former names.
    """
    if keep == 0:
        return []
    stretch, kept, gone = keep_hours * 3600, set(), []
    now = time.time() if now is None else now
    older: Sequence[Path] = list_checkpoints(run)[keep:]
    for folder in reversed(older):
        written = folder.stat().st_mtime
        if stretch and written <= now and written // stretch not in kept:
            kept.add(written // stretch)
            continue
        hidden = folder.with_name(f".{folder.name}.gone")
        os.rename(folder, hidden)  # half removed, it must not look like a checkpoint
        shutil.rmtree(hidden, ignore_errors=True)
        gone.append(folder)
    return gone
