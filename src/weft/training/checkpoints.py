"""Checkpoints of a run on disk and in host memory: save, find, load and roll back."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from weft.adapters.base import check_same_base
from weft.checkpoint.folders import clean, folder_of, list_checkpoints, step_of
from weft.checkpoint.key import read_key
from weft.checkpoint.manifest import Manifest, Position
from weft.checkpoint.memory_tier import HostMemory, holds_copies
from weft.checkpoint.own_disks import Fetch, OwnDisks
from weft.checkpoint.remote import RemoteFolder
from weft.checkpoint.restore import (
    Reader,
    archive_newer,
    first_valid_checkpoint,
    restore_training,
    verify_together,
)
from weft.checkpoint.snapshot import Snapshots, Target
from weft.checkpoint.together import ask_rank_0
from weft.checkpoint.uploads import Uploads, download_named, download_newest
from weft.comm.objects import all_gather_json, all_ranks, any_rank, broadcast_json, run_together
from weft.errors import CheckpointError, JobError, UnreadableError, printable
from weft.files import replace_file
from weft.job import Job
from weft.object_store import is_url
from weft.training.resume_checks import check_same_batches
from weft.training.run_folder import RUN_ID, check_checkpoint_folder, read_run_id

ANY_STEP = 2**62
WAIT_SECONDS = 0.2  # between two looks of all ranks at the copies of rank 0
SECONDS_AFTER_SIGNAL = 120.0  # for the copy of the last checkpoint: a scheduler may kill the run soon


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A verified checkpoint."""

    folder: Path
    manifest: Manifest
    fetch: Fetch
    """Copy the named files to this host before they are read."""


class Checkpoints:
    """Checkpoint manager of a run. Collective: all ranks create one and call its methods together.

    Args:
        run: run folder.
        data: `identity` of the prepared tokens.
        accepted: identities of other tokens that checkpoints may have been saved with.
    """

    def __init__(self, job: Job, run: Path, data: str, accepted: Sequence[str] = ()):
        self.job, self.settings, self.data = job, job.checkpoint, {data, *accepted}
        self.run, self.run_id, self.key = run, ask_rank_0(partial(read_run_id, run)), read_key(job.checkpoint.key_file)
        self.folder = checkpoint_folder(job, run)
        self.leads = dist.get_rank() == 0
        self.own_disks = OwnDisks(self.folder, self.key) if self.settings.per_host else None
        self.leads_folder = self.own_disks.leads if self.own_disks else self.leads
        if self.leads_folder:  # at every attempt: ranks may have been killed while they saved or removed a checkpoint
            clean(self.folder)
            for folder in {run, self.folder} if not self.leads else ():
                replace_file(folder / RUN_ID, self.run_id)
        keep = self.settings.keep, self.settings.keep_hours
        self.disk = Target(self.folder, self.leads_folder, *keep, announce=self.leads, per_host=self.settings.per_host)
        # Even without memory_every: the run may have saved to memory because the disk was full.
        use_memory = any_rank(holds_copies(run / RUN_ID, self.run_id)) or self.settings.memory_every
        self.memory = HostMemory(run / RUN_ID, self.run_id, self.key) if use_memory else None
        self.uploads: Uploads | None = None
        if self.settings.remote:
            remote = run_together(partial(RemoteFolder, self.settings.remote))
            self.uploads = Uploads(remote, self.folder, self.run_id, *keep)
            self.disk = replace(self.disk, copy=self.uploads.offer)

    def attach(self, snapshots: Snapshots) -> None:
        """Attach the snapshot writer, and start to copy its checkpoints to the store of the run."""
        self.snapshots = snapshots
        if self.uploads:
            self.uploads.start(snapshots.messages.put)

    def find(self, resume: Sequence[str]) -> VerifiedCheckpoint | None:
        """Find the checkpoint to start from; None if there is none.

        Args:
            resume: sources in order of preference: a checkpoint folder, a URL, or "auto" for the newest checkpoint of this run
                that verifies.

        Raises:
            CheckpointError: a named checkpoint does not verify, or none of the run does.
            UnreadableError: it is not known whether a checkpoint is good.
            JobError: the checkpoint was saved with other batches.
        """
        for source in resume:
            if is_url(source):
                return self._resume_from(*download_named(source, self.folder, self.key, self.log))
            if source != "auto":
                if self.own_disks and self.own_disks.is_checkpoint(Path(source)):
                    return self._resume_from(*self.own_disks.at(Path(source)).find_named(Path(source), self.log))
                return self._resume_from(Path(source), verify_together(Path(source), self.key))
            if found := self._newest(ANY_STEP):
                return found
            if listed := self._listed() or self._copies():
                if self.own_disks:
                    raise self.own_disks.incomplete(Path(listed[0]))
                raise CheckpointError(
                    f"none of {len(listed)} checkpoints can be used, the newest is {Path(listed[0]).name}",
                    where=str(self.folder),
                    rule="a run with checkpoints is never started anew by --resume auto",
                    fix="restore a checkpoint; or start a new run without --resume, which moves this one aside",
                )
        self._archive_newer(None, -1)
        return None

    def load(self, found: VerifiedCheckpoint) -> Position:
        """Load the state of a checkpoint: tensors, position, and, under the same world size, random number generators."""
        s = self.snapshots
        with Reader(found.folder, found.manifest) as reader:
            if message := restore_training(s.model, s.optimizer, s.device, reader, found.fetch):
                self.log(message)
        if self.uploads and self.leads and found.folder.parent == self.folder:  # a killed run may not have copied it
            self.uploads.offer(found.folder, found.manifest.files)
        return found.manifest.position

    def roll_back(self, step: int) -> Position | None:
        """Load the newest valid checkpoint of step `step` or earlier; None, with the state unchanged, if there is none."""
        self.snapshots.finish()
        dist.barrier()
        found = self._newest(step)
        return self.load(found) if found else None

    def due(self, step: int, last: bool, interrupted: bool = False) -> Target | None:
        """Target of the checkpoint after a step; None if no checkpoint is due. An interrupted run always saves to disk.

        Args:
            step: step that has just ended.
            last: True if training ends with this step.
            interrupted: True if a signal ends training before its last step.

        Raises:
            JobError: the run folder belongs to another run by now.
        """
        if interrupted or (self.settings.every and (last or step % self.settings.every == 0)):
            check_run_id(self.run, self.run_id)
            return self.disk
        if self.memory and self.settings.memory_every and step % self.settings.memory_every == 0:
            return self.memory.target()
        return None

    def is_saved(self, step: int, interrupted: bool) -> bool:
        """True, on all ranks, if the checkpoint of the last step is on disk or none is due."""
        due = step > 0 and (interrupted or self.settings.every > 0)
        exists = folder_of(self.folder, step).exists()
        return not due or (all_ranks(exists) if self.own_disks else broadcast_json(exists))

    def save_last(self, position: Position, *, try_disk: bool = True) -> str:
        """Save the final state to disk, or to host memory if that fails. Collective.

        Args:
            position: training position of the state.
            try_disk: False if the disk is known to be full.

        Returns:
            "" if the state is on disk, else a message about its location.
        """
        self.finish()
        if try_disk and not self.is_saved(position.step, interrupted=True):
            self.snapshots.take(position, self.disk)
            self.finish()
        if self.is_saved(position.step, interrupted=True):
            return ""
        self.memory = self.memory or HostMemory(self.run / RUN_ID, self.run_id, self.key)
        self.snapshots.take(position, self.memory.target())
        self.finish()
        copy = self.memory.newest(position.step)
        if copy is None or copy.step < position.step:
            return f"the state after step {position.step} could be saved neither to disk nor to memory"
        return f"the state after step {position.step} is kept in host memory until a host reboots"

    def finish(self) -> None:
        """Wait until all checkpoints are written."""
        self.snapshots.finish()
        dist.barrier()

    def close(self, beat: Callable[[], None] = lambda: None, *, interrupted: bool = False) -> None:
        """Wait for the last copy to the store, and delete in-memory checkpoints, at the end of a successful run.

        Args:
            beat: called while the ranks wait, for the watchdog.
            interrupted: True to wait for `SECONDS_AFTER_SIGNAL` at most.
        """
        if self.uploads:
            deadline = time.monotonic() + (SECONDS_AFTER_SIGNAL if interrupted else math.inf)
            while broadcast_json(self.uploads.is_busy() and time.monotonic() < deadline):
                beat()
                time.sleep(WAIT_SECONDS)
            for text in self.snapshots.take_messages():
                self.log(text)
            if self.uploads.is_busy():
                url = self.uploads.remote.url
                self.log(
                    f"the last copy at {url} is not complete: --resume auto in this run folder sends what it lacks"
                )
            self.uploads.stop()
        if self.memory:
            self.memory.close()

    def log(self, text: str) -> None:
        """Print a line on the leading rank."""
        if self.leads:
            print(printable(text), flush=True)

    def _newest(self, until: int) -> VerifiedCheckpoint | None:
        """Newest valid checkpoint up to a step, on disk or in memory."""
        copy = self.memory.newest(until) if self.memory else None
        older = copy.step if copy else -1
        if self.own_disks and (found := self.own_disks.find(until, self.log)) and found[1].position.step > older:
            return self._resume_from(*found)
        listed = [] if self.own_disks else self._listed()
        newer = [path for path in map(Path, listed) if older < step_of(path) <= until]
        on_disk = first_valid_checkpoint(newer, self.log, self.key)
        if self.uploads and until == ANY_STEP:
            older = on_disk[1].position.step if on_disk else older
            remote = self.uploads.remote
            on_disk = download_newest(remote, older, until, self.folder, self.key, self.log) or on_disk
        if on_disk:
            return self._resume_from(*on_disk)
        if copy is None or self.memory is None:
            return None
        memory = self.memory
        folder, manifest = memory.folder_for(copy), copy.manifest
        self._check(folder, manifest)
        self._archive_newer(None, copy.step, from_memory=True)
        self.log(f"resuming after step {copy.step}, from the memory of {len(memory.hosts)} hosts")
        return VerifiedCheckpoint(folder, manifest, lambda files: memory.fetch(copy, files))

    def _listed(self) -> list[str]:
        """Checkpoints on the disk, newest first, as rank 0 sees them, or on any host that has its own. Collective."""
        if self.own_disks:
            found = all_gather_json([str(path) for path in list_checkpoints(self.folder)])
            return sorted(set[str]().union(*found), reverse=True)

        def ask() -> list[str]:
            check_checkpoint_folder(self.folder, self.run_id)
            return [str(path) for path in list_checkpoints(self.folder)]

        return list(ask_rank_0(ask))

    def _copies(self) -> list[str]:
        """URLs of the copies on the store of the run, newest first. Collective."""
        if self.uploads is None:
            return []
        remote = self.uploads.remote
        return list(ask_rank_0(lambda: [remote.url_of(step) for step in remote.reach(remote.copies)]))

    def _resume_from(self, folder: Path, manifest: Manifest, fetch: Fetch = lambda files: None) -> VerifiedCheckpoint:
        self._check(folder, manifest)
        if self.run_id and manifest.run and manifest.run != self.run_id:
            self.log(f"{folder.name} was saved by run {manifest.run}, and this is run {self.run_id}")
        self._archive_newer(folder, manifest.position.step)
        self.log(f"resuming after step {manifest.position.step}, from {folder}")
        return VerifiedCheckpoint(folder, manifest, fetch)

    def _archive_newer(self, chosen: Path | None, step: int, from_memory: bool = False) -> None:
        """Archive checkpoints of later steps, which training will repeat."""
        if self.leads_folder:
            archive_newer(self.folder, chosen, step + from_memory, self.log)
        if self.uploads and self.leads:
            self.uploads.go_back(step)
        if self.memory:
            self.memory.discard_after(step if from_memory else -1)

    def _check(self, folder: Path, manifest: Manifest) -> None:
        check_same_base(self.job, manifest, folder)
        check_same_batches(self.job, self.data, manifest, folder)


def checkpoint_folder(job: Job, run: Path | None = None) -> Path:
    """Folder of the checkpoints of a job.

    Args:
        run: run folder; default: `job.out`.
    """
    return Path(job.checkpoint.folder or run or job.out)


def check_run_id(run: Path, run_id: str) -> None:
    """Refuse to write into the folder of another run.

    Args:
        run: run folder.
        run_id: identity of this run.

    Raises:
        JobError: the folder belongs to another run by now.
    """
    try:
        found = read_run_id(run)
    except UnreadableError:  # for a moment: nothing says that it is another run
        return
    if found and found != run_id:
        raise JobError(
            f"{run} belongs to run {found} by now, this is run {run_id}",
            where=str(run / RUN_ID),
            rule="a folder belongs to one run at a time",
            fix="give each run its own output folder; `--resume auto` there continues from its last checkpoint",
        )
