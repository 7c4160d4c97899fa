"""Copies of checkpoints on object stores.

    URL/run_id                                      identity of the run whose copies these are
    URL/step-00000100/shard-00000.safetensors
    URL/step-00000100/manifest.json                 sent last and removed first: a folder without it is no copy

Files and their layout are those of checkpoints on the disk.
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from weft.checkpoint.folders import expired, folder_of, sync_tree
from weft.checkpoint.manifest import (
    FOLDER_NAME,
    NAME,
    SHARD_NAME,
    THREADS,
    Manifest,
    read_manifest,
    sync_folder,
    verification_error,
)
from weft.errors import CheckpointError
from weft.object_store import FileEntry, StoreFolder, as_url, is_url

RUN_ID = "run_id"


def require_local(*paths: Path) -> None:
    """Refuse the URL of a store where a command reads or writes folders.

    Raises:
        CheckpointError: names the command that copies a checkpoint from a store.
    """
    for url in map(as_url, filter(is_url, paths)):
        raise CheckpointError(
            f"{url} is on an object store",
            rule="this command reads and writes folders on this machine",
            fix=f"name a folder; `weft checkpoint fetch {url} FOLDER` copies and verifies a checkpoint",
        )


def copy_name(step: int, name: str = "") -> str:
    """Name of the copy of a step below the URL of a run, or of a file in it."""
    return f"step-{step:08d}" + f"/{name}" * bool(name)


class RemoteFolder(StoreFolder):
    """Copies of the checkpoints of a run below a URL; arguments and errors as for `StoreFolder`."""

    unreachable = (
        "a store may have newer checkpoints: training does not begin, or continue from an earlier one, without it",
        "check the network and the credentials in the environment, and run the same command again; or leave "
        "checkpoint.remote empty",
    )

    # Copies

    def copies(self) -> dict[int, float]:
        """Times at which the complete copies were written, in seconds since the epoch, by step, newest step first."""
        written = {}
        for step in self._folders():
            with suppress(FileNotFoundError):
                written[step] = self.fs.modified(self.path(copy_name(step, NAME))).timestamp()
        return written

    def _folders(self) -> list[int]:
        """Steps that have a folder, newest first."""
        names = (FOLDER_NAME.fullmatch(name) for name in self.names())
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def url_of(self, step: int) -> str:
        """URL of the copy of a step."""
        return f"{self.url}/{copy_name(step)}"

    def remove(self, step: int) -> None:
        """Remove a copy: its manifest first, so that it is never seen in part."""
        names = self.names(copy_name(step))
        if NAME in names:
            self.fs.rm_file(self.path(copy_name(step, NAME)))
        if shards := [self.path(copy_name(step, name)) for name in names if SHARD_NAME.fullmatch(name)]:
            self.fs.rm(shards)
        with suppress(Exception):  # most stores have no folders
            self.fs.rmdir(self.path(copy_name(step)))

    def tidy(self, keep: int, keep_hours: float) -> None:
        """Remove copies as `retire` does, and what killed runs have left: older folders without a manifest."""
        written = self.copies()
        left = [step for step in self._folders() if step not in written and step < max(written, default=0)]
        for step in [*expired(written, keep, keep_hours), *left]:
            self.remove(step)

    def set_aside_after(self, last: int) -> list[str]:
        """Move the copies of later steps, which are trained again, to names such as step-00000100.aside-1.

        Returns:
            New names.
        """
        names, moved = set(self.names()), []
        for step in (step for step in self.copies() if step > last):
            index = 1
            while (aside := f"{copy_name(step)}.aside-{index}") in names:
                index += 1
            files = sorted(self.names(copy_name(step)), key=lambda name: name == NAME)
            for name in files:
                self.fs.cp_file(self.path(copy_name(step, name)), self.path(f"{aside}/{name}"))
            self.remove(step)
            moved.append(aside)
        return moved

    # Files

    def withdraw(self, step: int) -> None:
        """Remove the manifest of a copy whose files will change."""
        self.remove_file(copy_name(step, NAME))

    def download(self, step: int, name: str, folder: Path, file: FileEntry | None = None) -> None:
        """Copy a file of a checkpoint into a folder, and verify it.

        Args:
            step: step of the checkpoint.
            name: name of the file.
            folder: folder on this machine.
            file: its size and digest; None for the manifest, which has its own.

        Raises:
            CheckpointError: it is missing or damaged.
            UnreadableError: the store cannot be read.
        """
        if problem := self.receive(copy_name(step, name), folder / name, file):
            raise verification_error(self.url_of(step), problem.replace(copy_name(step, name), name))

    def read_manifest(self, step: int, key: bytes | None) -> Manifest:
        """Manifest of a copy.

        Raises:
            CheckpointError: it is missing or damaged.
            UnreadableError: the store cannot be read, or the key is not given.
        """
        with tempfile.TemporaryDirectory(prefix="weft-manifest-") as scratch:
            folder = folder_of(Path(scratch), step)
            folder.mkdir()
            self.download(step, NAME, folder)
            return read_manifest(folder, key)

    # Runs

    def read_run_id(self) -> str:
        """Identity of the run whose copies these are; "" without one."""
        return (self.read(RUN_ID) or b"").decode(errors="replace")

    def claim(self, run_id: str) -> None:
        """Write the identity of a run, which from now on is the only one to send copies."""
        self.reach(lambda: self.fs.pipe_file(self.path(RUN_ID), run_id.encode()))


def locate(url: str) -> tuple[RemoteFolder, int]:
    """Folder of a run on a store, and a step: that of a URL of a copy, or the newest copy.

    Raises:
        JobError: see `RemoteFolder`.
        CheckpointError: there is no complete copy.
        UnreadableError: the store cannot be read.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    if named := FOLDER_NAME.fullmatch(name):
        return RemoteFolder(parent), int(named[1])
    remote = RemoteFolder(url)
    newest = next(iter(remote.reach(remote.copies)), None)
    if newest is None:
        raise CheckpointError(
            "there is no complete checkpoint",
            where=url,
            rule="a copy is complete when its manifest.json is there, which is sent last",
            fix="name the URL of a run, or of a checkpoint in it, such as s3://bucket/runs/first/step-00000100",
        )
    return remote, newest


def fetch(url: str, folder: Path, key: bytes | None) -> Manifest:
    """Copy a checkpoint of a store into a new folder, which appears when every byte of it has been verified.

    Args:
        url: URL of the checkpoint, or of the run for its newest one.
        folder: folder that does not exist.
        key: key that signed the manifest.

    Raises:
        CheckpointError: it is missing or damaged.
        UnreadableError: the store cannot be read.
    """
    remote, step = locate(url)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".weft-fetch-", dir=folder.parent) as scratch:
        part = folder_of(Path(scratch), step)
        part.mkdir()
        remote.download(step, NAME, part)
        manifest = read_manifest(part, key)
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lambda item: remote.download(step, item[0], part, item[1]), manifest.files.items()))
        sync_tree(part)
        part.rename(folder)
    sync_folder(folder.parent)
    return manifest
