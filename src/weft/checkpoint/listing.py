"""What lies in a run folder, and whether it is as it was written: for the eyes of a user, in one process."""

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from weft.checkpoint.folders import list_checkpoints
from weft.checkpoint.manifest import NAME, Manifest, read_manifest, verify_folder
from weft.errors import CheckpointError

STEP = re.compile(r"\.?step-(\d{8,})(\.part|\.gone|\.aside-\d+)?")
"""Names that training gives: to checkpoints, and to what will be, is no longer or was set aside as one."""


class ListingRow(NamedTuple):
    """One folder of a run."""

    name: str
    step: int
    bytes: int
    """On the disk."""
    written: datetime
    layout: str
    """Degrees of the plan that wrote it; empty where no manifest says so."""
    state: str
    """good, complete (its manifest reads, its files were not looked at), set aside, unfinished, or damaged and why."""


def list_run(run: Path, *, verify: bool, key: bytes | None = None) -> list[ListingRow]:
    """All folders of a run that are, were or would have become checkpoints, by step. A damaged one is a row, not an error.

    A folder of another name is a checkpoint if it has a manifest.

    Args:
        run: the run folder.
        verify: check every byte.
        key: that its manifests were written with.

    Raises:
        CheckpointError: there is no such folder.
    """
    if not run.is_dir():
        rule, fix = "checkpoints are folders below that of their run", "name the output folder of a run"
        raise CheckpointError(f"there is no folder {run}", rule=rule, fix=fix)
    rows = []
    for folder in run.iterdir():
        if folder.is_dir() and _is_listed(folder):
            with suppress(FileNotFoundError):  # a run that goes on removes old ones meanwhile
                rows.append(_row(folder, verify, key))
    return sorted(rows, key=lambda row: (row.step, row.name))


def _is_listed(folder: Path) -> bool:
    return STEP.fullmatch(folder.name) is not None or (folder / NAME).is_file()


def _row(folder: Path, verify: bool, key: bytes | None) -> ListingRow:
    named = STEP.fullmatch(folder.name)
    step = int(named[1]) if named else 0
    size = sum(path.lstat().st_size for path in folder.iterdir())
    written = datetime.fromtimestamp(folder.stat().st_mtime)
    if folder.name.startswith("."):
        state = "unfinished" if folder.name.endswith(".part") else "being removed"
        return ListingRow(folder.name, step, size, written, "", state)
    layout = ""
    try:
        manifest = read_manifest(folder, key)
        layout, state = describe_layout(manifest), "complete"
        step = step if named else manifest.position.step
        if verify:
            verify_folder(folder, key)
            state = "good"
    except CheckpointError as error:
        state = f"damaged: {error.what}"
    return ListingRow(
        folder.name, step, size, written, layout, f"set aside, {state}" if ".aside-" in folder.name else state
    )


def describe_layout(manifest: Manifest) -> str:
    """The ranks that wrote a checkpoint and how they shared the work, in a few words."""
    plan: Any = manifest.job.get("plan")
    degrees = plan.get("parallel") if isinstance(plan, dict) else None
    degrees = degrees if isinstance(degrees, dict) else {}
    names = ("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp")
    used = [f"{name} {degrees[name]}" for name in names if degrees.get(name, 1) != 1]
    zero = [f"zero {degrees['zero']}"] if degrees.get("dp_shard", 1) != 1 and "zero" in degrees else []
    ranks = "1 rank" if manifest.world_size == 1 else f"{manifest.world_size} ranks"
    return ", ".join([ranks, *used, *zero])


def checkpoints_at(paths: Iterable[Path]) -> list[Path]:
    """The checkpoints that paths name: a run folder stands for all of its own, oldest first."""
    return [folder for path in paths for folder in (list_checkpoints(path)[::-1] or [path])]
