"""Listing of the checkpoints in a run folder and their state, for `weft checkpoint ls`."""

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from weft.checkpoint.folders import list_checkpoints
from weft.checkpoint.manifest import NAME, Manifest, read_manifest, verify_folder
from weft.errors import CheckpointError, UnreadableError, printable
from weft.plan import DEGREES

STEP = re.compile(r"\.?step-(\d{8,})(\.part|\.gone|\.aside-\d+)?")
"""Names of checkpoint folders: finished, being written, being removed, or set aside."""


class ListingRow(NamedTuple):
    """One checkpoint folder of a run."""

    name: str
    step: int
    bytes: int
    """Size on the disk."""
    written: datetime
    layout: str
    """Degrees of the plan that wrote the checkpoint; empty if it has no readable manifest."""
    state: str
    """"good" (verified), "complete" (manifest is readable, files were not verified), "set aside, ...", "unfinished",
    "being removed", or "damaged: " or "unknown: " and the reason."""


def list_run(run: Path, *, verify: bool, key: bytes | None = None) -> list[ListingRow]:
    """List all checkpoint folders of a run by step, also unfinished ones and those that were set aside.

    A checkpoint that is damaged or cannot be read is a row, not an error. A folder with any other name is listed if it has a
    manifest.

    Args:
        run: run folder.
        verify: verify every byte.
        key: key that signed the manifests.

    Raises:
        CheckpointError: the folder does not exist.
    """
    if not run.is_dir():
        rule, fix = "checkpoints are folders inside their run folder", "name the output folder of a run"
        raise CheckpointError(f"there is no folder {run}", rule=rule, fix=fix)
    rows = []
    for folder in run.iterdir():
        if folder.is_dir() and (STEP.fullmatch(folder.name) or (folder / NAME).is_file()):
            with suppress(FileNotFoundError):  # a running job may remove old checkpoints meanwhile
                rows.append(_row(folder, verify, key))
    return sorted(rows, key=lambda row: (row.step, row.name))


def _row(folder: Path, verify: bool, key: bytes | None) -> ListingRow:
    named, name = STEP.fullmatch(folder.name), printable(folder.name)
    step = int(named[1]) if named else 0
    size = sum(path.lstat().st_size for path in folder.iterdir())
    written = datetime.fromtimestamp(folder.stat().st_mtime)
    if folder.name.startswith("."):
        state = "unfinished" if folder.name.endswith(".part") else "being removed"
        return ListingRow(name, step, size, written, "", state)
    layout = ""
    try:
        manifest = read_manifest(folder, key)
        layout, state = printable(describe_layout(manifest)), "complete"
        step = step if named else manifest.position.step
        if verify:
            verify_folder(folder, key)
            state = "good"
    except UnreadableError as error:
        state = f"unknown: {error.what}"
    except CheckpointError as error:
        state = f"damaged: {error.what}"
    return ListingRow(name, step, size, written, layout, f"set aside, {state}" if ".aside-" in name else state)


def describe_layout(manifest: Manifest) -> str:
    """Short text with the number of ranks that wrote a checkpoint and the parallel degrees that are not 1."""
    plan: Any = manifest.job.get("plan")
    degrees = plan.get("parallel") if isinstance(plan, dict) else None
    degrees = degrees if isinstance(degrees, dict) else {}
    used = [f"{name} {degrees[name]}" for name in DEGREES if degrees.get(name, 1) != 1]
    zero = [f"zero {degrees['zero']}"] if degrees.get("dp_shard", 1) != 1 and "zero" in degrees else []
    ranks = "1 rank" if manifest.world_size == 1 else f"{manifest.world_size} ranks"
    return ", ".join([ranks, *used, *zero])


def checkpoints_at(paths: Iterable[Path]) -> list[Path]:
    """Checkpoint folders for paths: a run folder is replaced by all its checkpoints, oldest first."""
    return [folder for path in paths for folder in (list_checkpoints(path)[::-1] or [path])]
