"""Checkpoints of a run on the hosts' own disks: each host has a manifest, and the files of its own ranks.

A run resumes where its hosts have all files of a checkpoint together: the same hosts, or hosts with copies of their files. Each
host receives the files that its ranks read, and does not have, from the others.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from weft.checkpoint.folders import step_of
from weft.checkpoint.manifest import FOLDER_NAME, Manifest
from weft.checkpoint.memory_tier import HostFolders
from weft.errors import CheckpointError

Fetch = Callable[[set[str]], None]
"""Copies the named files to this host before they are read. Collective."""


class OwnDisks(HostFolders):
    """Checkpoints in a folder of the same path on the disk of each host."""

    def find(self, until: int, log: Callable[[str], None]) -> tuple[Path, Manifest, Fetch] | None:
        """Newest checkpoint up to a step whose files the hosts have together; None if there is none. Collective.

        Args:
            until: last step.
            log: called on every rank with a line for each newer checkpoint that lacks a file.
        """
        found = self.newest(until, log)
        return (self.folder_for(found), found.manifest, partial(self.fetch, found)) if found else None

    def find_named(self, folder: Path, log: Callable[[str], None]) -> tuple[Path, Manifest, Fetch]:
        """Checkpoint with the name of a step. Collective.

        Raises:
            CheckpointError: the hosts do not have all of its files together.
        """
        found = self.find(step_of(folder), log)
        if found is None or found[1].position.step != step_of(folder):
            raise self.incomplete(folder)
        return found

    def at(self, folder: Path) -> Self:
        """Folders of the hosts that have a checkpoint. Collective."""
        return type(self)(folder.parent, self.key)

    @staticmethod
    def is_checkpoint(folder: Path) -> bool:
        """True if a folder has the name of a checkpoint, of which each host may have a part."""
        return FOLDER_NAME.fullmatch(folder.name) is not None

    @staticmethod
    def incomplete(folder: Path) -> CheckpointError:
        """Error for a checkpoint whose files the hosts do not have together."""
        return CheckpointError(
            f"the hosts of this run do not have all files of {folder.name} together",
            where=str(folder),
            rule="with checkpoint.per_host, each file is on the disk of the host that has written it",
            fix="start on the hosts that are named above, or copy their files shard-*.safetensors into this folder on a host "
            "of the run",
        )
