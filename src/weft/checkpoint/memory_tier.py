"""Checkpoints whose files are distributed over the hosts: in the memory of hosts, or on their own disks.

Each host has a manifest, and the files of its own ranks. In memory, it has the files of the previous host, too (GEMINI, Wang
2023). In-memory checkpoints have the same format as checkpoints on the disk, but are files in tmpfs, which outlives the ranks.
After a restart on the same hosts all files exist; after the loss of one host the next host has copies of its files. Each host
holds one checkpoint, and a second while it is being written: 4 times the size of its ranks' files, or 2 times on a single host.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor

from weft.backends.hierarchical import host_id
from weft.checkpoint.folders import clean, folder_of, list_checkpoints, set_aside, step_of
from weft.checkpoint.manifest import NAME, FileEntry, Manifest, file_name, read_manifest, verify_file
from weft.checkpoint.snapshot import Target
from weft.comm.objects import all_gather_json, any_rank, broadcast_json
from weft.errors import CheckpointError, UnreadableError
from weft.launch.scratch import PREFIX, SHARED_MEMORY, belongs_to, hold_for_run
from weft.lock import Lock

PIECE = 2**26  # bytes of one message between hosts


@dataclass(frozen=True)
class HostCheckpoint:
    """Checkpoint whose files are distributed over the hosts."""

    step: int
    digest: str
    """Digest of the manifest; distinguishes two checkpoints of the same step."""
    manifest: Manifest
    holders: dict[str, list[int]]
    """Indices of the hosts with an undamaged copy, by file name."""


class HostFolders:
    """Checkpoints in a folder of the same path on each host. All ranks create one instance, and call its methods together.

    Args:
        folder: folder of the checkpoints on each host.
        key: key that signs the manifests of the run.
    """

    def __init__(self, folder: Path, key: bytes | None = None):
        self.folder, self.key = folder, key
        self.rank = dist.get_rank()
        places = all_gather_json(host_id())
        self.hosts = ranks_by_host(places)
        """Ranks of each host."""
        self.host_of = {rank: host for host, ranks in enumerate(self.hosts) for rank in ranks}
        self.host = self.host_of[self.rank]
        self.leads = self.rank == self.hosts[self.host][0]
        # Separate from the process groups of training, because another thread sends its messages.
        self.group = dist.new_group(backend="gloo") if len(self.hosts) > 1 else None

    def newest(self, until: int, log: Callable[[str], None] = lambda text: None) -> HostCheckpoint | None:
        """Newest checkpoint of a step up to `until` of which at least one host has each file undamaged; None if none.

        Args:
            until: last step.
            log: called on every rank with a line for each newer checkpoint that lacks a file.
        """
        if self.leads:
            clean(self.folder)
        dist.barrier()
        own = {(manifest.position.step, digest): manifest for digest, manifest in self._list()}
        listed = {(step, digest) for table in all_gather_json(list(own)) for step, digest in table if step <= until}
        for step, digest in sorted(listed, reverse=True):
            manifest = own.get((step, digest))
            source = all_gather_json(manifest is not None).index(True)
            names, writers = broadcast_json([sorted(manifest.files), manifest.hosts] if manifest else None, source)
            holders: dict[str, list[int]] = {}
            for rank, held in enumerate(all_gather_json(self._verified_files(manifest) if manifest else [])):
                for name in held:
                    holders.setdefault(name, []).append(self.host_of[rank])
            lost = next((name for name in names if name not in holders), None)
            if lost is None:
                return HostCheckpoint(step, digest, self._share_manifest(step, digest, source), holders)
            written = f", which {writers[lost]} has written" if lost in writers else ""
            log(f"step-{step:08d} is skipped: no host has an undamaged {lost}{written}")
        return None

    def _list(self) -> list[tuple[str, Manifest]]:
        """Manifests on this host, with their digests."""
        found = []
        for folder in list_checkpoints(self.folder):
            try:
                manifest = read_manifest(folder, self.key)
            except CheckpointError:
                continue
            found.append((_digest(folder), manifest))
        return found

    def _verified_files(self, manifest: Manifest) -> list[str]:
        """Verify this rank's share of the checkpoint files on this host; names of the undamaged files."""
        folder, ranks = folder_of(self.folder, manifest.position.step), self.hosts[self.host]
        local = sorted(path.name for path in folder.iterdir() if path.name in manifest.files)
        share = local[ranks.index(self.rank) :: len(ranks)]
        return [name for name in share if _is_good(folder, name, manifest.files[name])]

    def _share_manifest(self, step: int, digest: str, source: int) -> Manifest:
        """Read the manifest of a checkpoint, after `source` has sent it to the hosts that do not have it."""
        folder = folder_of(self.folder, step)
        has = (folder / NAME).exists() and _digest(folder) == digest
        text = broadcast_json((folder / NAME).read_text() if self.rank == source else None, source)
        if self.leads and not has:
            self._make_way(folder)
            folder.mkdir(parents=True)
            (folder / NAME).write_text(text)
        dist.barrier()
        return read_manifest(folder, self.key)

    def _make_way(self, folder: Path) -> None:
        """Move away a checkpoint of the same step, of another run."""
        if folder.exists():
            set_aside(folder)

    def folder_for(self, checkpoint: HostCheckpoint) -> Path:
        """Folder of a checkpoint on this host; `fetch` copies missing files into it."""
        return folder_of(self.folder, checkpoint.step)

    def fetch(self, checkpoint: HostCheckpoint, wanted: Iterable[str]) -> None:
        """Copy files that ranks of this host will read, and that are missing on this host, from a host that has them.

        Args:
            checkpoint: result of `newest`.
            wanted: names of the files that this rank will read.

        Raises:
            CheckpointError: raised on every rank if a received file fails verification.
        """
        folder, manifest, problem = self.folder_for(checkpoint), checkpoint.manifest, None
        hosts_of: dict[str, set[int]] = {}
        for rank, names in enumerate(all_gather_json(sorted(wanted))):
            for name in names:
                hosts_of.setdefault(name, set()).add(self.host_of[rank])
        for name in sorted(hosts_of):
            holders = checkpoint.holders[name]
            for host in sorted(hosts_of[name].difference(holders)):
                ranks, source = self.hosts[host], self.hosts[holders[0]][0]
                if self.rank == source:
                    content = torch.from_file(str(folder / name), size=manifest.files[name].bytes, dtype=torch.uint8)
                    for work in _send(content, ranks[0], self.group):
                        work.wait()
                elif self.rank == ranks[0]:
                    _receive(folder / name, source, self.group)
                    problem = problem or verify_file(folder, name, manifest.files[name])
        for text in all_gather_json(problem) if any_rank(problem is not None) else []:
            if text:
                rule = "a file that is copied between hosts has the digest of the manifest"
                raise CheckpointError(text, where=str(folder), rule=rule, fix="start the run again")


class HostMemory(HostFolders):
    """In-memory checkpoints of a run.

    Args:
        id_file: run id file in the run folder; the path of that folder determines the folder in tmpfs.
        run_id: content of the run id file.
        key: key that signs the manifests of the run.

    Raises:
        CheckpointError: a host has no tmpfs, or the folder in tmpfs belongs to another user or run.
    """

    def __init__(self, id_file: Path, run_id: str, key: bytes | None = None):
        super().__init__(_folder_of_run(id_file), key)
        self.lock: Lock | None = None
        problem = self._open(id_file, run_id) if self.leads else None
        for text in all_gather_json(problem) if any_rank(problem is not None) else []:
            if text:
                raise CheckpointError(text, where="checkpoint.memory_every", fix="set checkpoint.memory_every = 0")

    def _open(self, id_file: Path, run_id: str) -> str | None:
        if not SHARED_MEMORY.is_dir():
            return f"this host has no tmpfs at {SHARED_MEMORY}"
        try:
            self.lock = hold_for_run(self.folder, id_file, run_id)
        except OSError as error:
            return str(error)
        return None

    def target(self) -> Target:
        """Target for `Snapshots.take`."""
        replicate = self._replicate if self.group is not None else None
        return Target(self.folder, self.leads, keep=1, keep_hours=0, replicate=replicate, announce=False)

    def discard_after(self, step: int = -1) -> None:
        """Remove checkpoints of later steps, which will be trained again."""
        for folder in list_checkpoints(self.folder) if self.leads else ():
            if step_of(folder) > step:
                shutil.rmtree(folder)

    def _make_way(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all in-memory checkpoints of the run."""
        dist.barrier()
        if self.leads:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _replicate(self, buffer: Tensor, part: Path) -> None:
        """Send this rank's file to the next host, and receive files of the previous host. Runs on the writing thread."""
        count = len(self.hosts)
        own_ranks, next_ranks = self.hosts[self.host], self.hosts[(self.host + 1) % count]
        previous_ranks = self.hosts[(self.host - 1) % count]
        local_rank = own_ranks.index(self.rank)
        works = _send(buffer, next_ranks[local_rank % len(next_ranks)], self.group)
        for source in previous_ranks[local_rank :: len(own_ranks)]:
            _receive(part / file_name(source), source, self.group)
        for work in works:
            work.wait()


def _is_good(folder: Path, name: str, file: FileEntry) -> bool:
    """True if a file is undamaged; one that cannot be read is taken from another host."""
    try:
        return verify_file(folder, name, file) is None
    except UnreadableError:
        return False


def holds_copies(id_file: Path, run_id: str) -> bool:
    """True if this host has in-memory checkpoints of a run.

    Args:
        id_file: run id file in the run folder.
        run_id: content of the run id file.
    """
    folder = _folder_of_run(id_file)
    return belongs_to(folder, id_file, run_id) and bool(list_checkpoints(folder))


def _folder_of_run(id_file: Path) -> Path:
    name = hashlib.sha256(str(id_file.parent.resolve()).encode()).hexdigest()[:16]
    return SHARED_MEMORY / f"{PREFIX}{os.getuid()}-{name}"


def _digest(folder: Path) -> str:
    return blake3((folder / NAME).read_bytes()).hexdigest()


def ranks_by_host(places: list[list[str]]) -> list[list[int]]:
    """Ranks of each host, in the order of their first ranks.

    Args:
        places: id of the host of each rank.
    """
    found: dict[tuple[str, ...], list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(tuple(place), []).append(rank)
    return list(found.values())


def _send(buffer: Tensor, to: int, group: dist.ProcessGroup | None) -> list[dist.Work]:
    size = torch.tensor([buffer.numel()])
    return [dist.isend(piece, to, group) for piece in (size, *buffer.split(PIECE))]  # type: ignore[misc]


def _receive(path: Path, source: int, group: dist.ProcessGroup | None) -> None:
    """Receive a file directly into the mapped memory of a new file."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source, group)
    memory = torch.from_file(str(path), shared=True, size=int(size), dtype=torch.uint8)
    for piece in memory.split(PIECE):
        dist.recv(piece, source, group)
