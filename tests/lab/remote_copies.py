"""Small checkpoints, and copies of them, for tests of object stores."""

import os
from pathlib import Path

from weft.checkpoint.folders import folder_of, step_of
from weft.checkpoint.manifest import NAME, Manifest, Position, file_name, read_manifest, write_manifest
from weft.checkpoint.remote import RemoteFolder, copy_name
from weft.object_store import entry_of
from weft.precision.scaling import LossScale


def local_checkpoint(run: Path, step: int, *, files: int = 2, size: int = 5000, key: bytes | None = None) -> Path:
    """Write a checkpoint of random bytes, which verifies, but has no tensors; one that exists is replaced."""
    folder = folder_of(run, step)
    folder.mkdir(parents=True, exist_ok=True)
    names = [file_name(index) for index in range(files)]
    for name in names:
        (folder / name).write_bytes(os.urandom(size))
    position = Position(step=step, next_batch=step, loss_scale=LossScale())
    entries = {name: entry_of(folder / name) for name in names}
    manifest = Manifest(position=position, world_size=files, job={}, versions={}, files=entries, tensors={})
    write_manifest(manifest, folder, key)
    return folder


def send_all(remote: RemoteFolder, folder: Path) -> None:
    """Copy a checkpoint to a store, in one process."""
    step = step_of(folder)
    for name, file in read_manifest(folder).files.items():
        remote.send(folder / name, copy_name(step, name), file)
    remote.withdraw(step)
    remote.send(folder / NAME, copy_name(step, NAME), entry_of(folder / NAME))
