"""Checkpoints in the memory of hosts: a rank's file is kept by its own host and by a neighbour (Wang et al., GEMINI, 2023).

They have the same format as those on the disk, but lie in a memory file system, which outlives the ranks: after a restart on
the same hosts all files are there, and after the loss of one host its neighbour still has what that one held. Each host keeps
one checkpoint, and a second while it is being written: 4 times the bytes of its ranks' files, 2 times where there is one host.
"""

import hashlib
import os
import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor

from weft.checkpoint.folders import clean, folder_of, list_checkpoints, step_of
from weft.checkpoint.manifest import NAME, Manifest, file_name, read_manifest, verify_file
from weft.checkpoint.snapshot import Target
from weft.comm.objects import all_gather_json, broadcast_json
from weft.errors import CheckpointError
from weft.launch.scratch import PREFIX, SHARED_MEMORY, belongs_to, hold_for_run
from weft.lock import Lock

PIECE = 2**26  # bytes of one message between hosts


@dataclass(frozen=True)
class Copy:
    """A checkpoint that hosts hold together."""

    step: int
    digest: str
    """Of its manifest: two runs may have taken the same step."""
    manifest: Manifest
    holders: dict[str, list[int]]
    """By name of a file: the hosts that hold it as it was written."""


class HostMemory:
    """The checkpoints of a run in the memory of its hosts. All ranks make one, and call its methods together.

    Args:
        id_file: of the run folder, whose path names the folder in memory.
        run_id: what that file says.
        key: that manifests of the run are written with.

    Raises:
        CheckpointError: the system has no file system in memory, or the folder there belongs to somebody else.
    """

    def __init__(self, id_file: Path, run_id: str, key: bytes | None = None):
        self.folder, self.key = _folder_of_run(id_file), key
        self.lock: Lock | None = None
        self.rank = dist.get_rank()
        places = all_gather_json(place_of_host())
        self.hosts = [[r for r, other in enumerate(places) if other == found] for found in _unique(places)]
        """Ranks of each host."""
        self.host = next(number for number, ranks in enumerate(self.hosts) if self.rank in ranks)
        self.leads = self.rank == self.hosts[self.host][0]
        problem = self._open(id_file, run_id) if self.leads else None
        for text in all_gather_json(problem):
            if text:
                raise CheckpointError(text, where="checkpoint.memory_every", fix="set checkpoint.memory_every = 0")
        # Beside the groups of training: its messages come from another thread.
        self.group = dist.new_group(backend="gloo") if len(self.hosts) > 1 else None

    def _open(self, id_file: Path, run_id: str) -> str | None:
        if not SHARED_MEMORY.is_dir():
            return f"this host has no {SHARED_MEMORY}, a file system in memory"
        try:
            self.lock = hold_for_run(self.folder, id_file, run_id)
        except OSError as error:
            return str(error)
        return None

    def target(self) -> Target:
        """Where snapshots go, for `Snapshots.take`."""
        pass_on = self._pass_on if self.group is not None else None
        return Target(self.folder, self.leads, keep=1, keep_hours=0, pass_on=pass_on, says=False)

    def forget(self, step: int = -1) -> None:
        """Remove checkpoints of later steps, which are taken anew."""
        for folder in list_checkpoints(self.folder) if self.leads else ():
            if step_of(folder) > step:
                shutil.rmtree(folder)

    def close(self) -> None:
        """Give the memory back."""
        dist.barrier()
        if self.leads:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _pass_on(self, buffer: Tensor, part: Path) -> None:
        """Send this rank's file to the next host, and take those of the host before into the folder; on the writing thread."""
        count = len(self.hosts)
        mine, after = self.hosts[self.host], self.hosts[(self.host + 1) % count]
        before = self.hosts[(self.host - 1) % count]
        place = mine.index(self.rank)
        works = _send(buffer, after[place % len(after)], self.group)
        for source in before[place :: len(mine)]:
            _receive(part / file_name(source), source, self.group)
        for work in works:
            work.wait()

    # After a restart

    def newest(self, until: int) -> Copy | None:
        """The newest checkpoint, of a step up to `until`, of which each file is held, unharmed, by at least one host."""
        if self.leads:
            clean(self.folder)
        dist.barrier()
        listed = [(digest, manifest) for digest, manifest in self._listed() if manifest.position.step <= until]
        mine = [(manifest.position.step, digest, self._unharmed(manifest)) for digest, manifest in listed]
        found: dict[tuple[int, str], dict[str, list[int]]] = {}
        for rank, held in enumerate(all_gather_json(mine)):
            host = next(number for number, ranks in enumerate(self.hosts) if rank in ranks)
            for step, digest, names in held:
                holders = found.setdefault((step, digest), {})
                for name in names:
                    holders.setdefault(name, []).append(host)
        for (step, digest), holders in sorted(found.items(), reverse=True):
            manifest = self._manifest_of(step, digest)
            if manifest.files.keys() <= holders.keys():
                return Copy(step, digest, manifest, holders)
        return None

    def _listed(self) -> list[tuple[str, Manifest]]:
        """Digests of the manifests that are on this host, and what they say."""
        found = []
        for folder in list_checkpoints(self.folder):
            try:
                manifest = read_manifest(folder, self.key)
            except CheckpointError:
                continue
            found.append((_digest(folder), manifest))
        return found

    def _unharmed(self, manifest: Manifest) -> list[str]:
        """Of the files of a checkpoint on this host, this rank's share that is as it was written."""
        folder, ranks = folder_of(self.folder, manifest.position.step), self.hosts[self.host]
        here = sorted((name, file) for name, file in manifest.files.items() if (folder / name).exists())
        mine = here[ranks.index(self.rank) :: len(ranks)]
        return [name for name, file in mine if verify_file(folder, name, file) is None]

    def _manifest_of(self, step: int, digest: str) -> Manifest:
        """The manifest of a checkpoint; hosts that have none of it get one."""
        folder = folder_of(self.folder, step)
        has = (folder / NAME).exists() and _digest(folder) == digest
        source = next(rank for rank, there in enumerate(all_gather_json(has)) if there)
        text = broadcast_json((folder / NAME).read_text() if self.rank == source else None, source)
        if self.leads and not has:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            (folder / NAME).write_text(text)
        dist.barrier()
        return read_manifest(folder, self.key)

    def place(self, copy: Copy) -> Path:
        """The folder of this host for a checkpoint; `provide` brings the files that are read."""
        return folder_of(self.folder, copy.step)

    def provide(self, copy: Copy, wanted: Iterable[str]) -> None:
        """Bring the files that ranks of this host want, and the host does not hold, from one that does.

        Raises:
            CheckpointError: on every rank, when a file did not arrive as it was written.
        """
        folder, manifest, problem = self.place(copy), copy.manifest, None
        wishes = all_gather_json(sorted(wanted))
        for name in sorted(manifest.files):
            holders = copy.holders[name]
            for host, ranks in enumerate(self.hosts):
                if host in holders or not any(name in wishes[rank] for rank in ranks):
                    continue
                source = self.hosts[holders[0]][0]
                if self.rank == source:
                    whole = torch.from_file(str(folder / name), size=manifest.files[name].bytes, dtype=torch.uint8)
                    for work in _send(whole, ranks[0], self.group):
                        work.wait()
                elif self.rank == ranks[0]:
                    _receive(folder / name, source, self.group)
                    problem = problem or verify_file(folder, name, manifest.files[name])
        for text in all_gather_json(problem):
            if text:
                raise CheckpointError(text, where=str(folder), rule="a file arrives as it was sent", fix="try again")


def holds_copies(id_file: Path, run_id: str) -> bool:
    """Tell whether this host has checkpoints of a run in its memory.

    Args:
        id_file: of the run folder.
        run_id: what it says.
    """
    folder = _folder_of_run(id_file)
    return belongs_to(folder, id_file, run_id) and bool(list_checkpoints(folder))


def _folder_of_run(id_file: Path) -> Path:
    name = hashlib.sha256(str(id_file.parent.resolve()).encode()).hexdigest()[:16]
    return SHARED_MEMORY / f"{PREFIX}{os.getuid()}-{name}"


def place_of_host() -> list[str]:
    """What the ranks of a host have in common. A network of its own makes an emulated host."""
    network = Path("/proc/self/ns/net")
    return [socket.gethostname(), os.readlink(network) if network.exists() else ""]


def _digest(folder: Path) -> str:
    return blake3((folder / NAME).read_bytes()).hexdigest()


def _unique(values: list[list[str]]) -> list[list[str]]:
    return [value for number, value in enumerate(values) if value not in values[:number]]


def _send(buffer: Tensor, to: int, group: dist.ProcessGroup | None) -> list[dist.Work]:
    size = torch.tensor([buffer.numel()])
    return [dist.isend(piece, to, group) for piece in (size, *buffer.split(PIECE))]  # type: ignore[misc]


def _receive(path: Path, source: int, group: dist.ProcessGroup | None) -> None:
    """Straight into the memory of a new file."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source, group)
    memory = torch.from_file(str(path), shared=True, size=int(size), dtype=torch.uint8)
    for piece in memory.split(PIECE):
        dist.recv(piece, source, group)
