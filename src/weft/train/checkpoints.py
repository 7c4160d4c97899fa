"""The checkpoints of a run as training sees them: on the disk and in the memory of hosts, taken, found again, gone back to."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from weft.checkpoint.folders import folder_of, list_checkpoints, step_of
from weft.checkpoint.key import read_key
from weft.checkpoint.manifest import Manifest, Position
from weft.checkpoint.memory_tier import HostMemory, holds_copies
from weft.checkpoint.restore import (
    Reader,
    archive_newer,
    choose,
    own_tensors,
    restore,
    restore_feedback,
    verify_together,
)
from weft.checkpoint.slices import set_generators
from weft.checkpoint.snapshot import Snapshots, Target
from weft.comm.objects import all_gather_json, broadcast_json
from weft.errors import JobError
from weft.job import Job
from weft.train.optimizer import learning_rate
from weft.train.run_folder import RUN_ID, read_run_id

SAME_BATCHES = (
    "train.global_batch_size",
    "train.seed",
    "data.source",
    "data.seq_len",
    "data.packing",
    "data.shuffle",
    "data.held_out",
)
"""Keys that decide which rows a global batch has."""
SAME_UPDATE = ("optimizer", "model.config")
"""Keys and tables that decide what an update does; train.steps besides, where the learning rate has depended on it."""
ANY_STEP = 2**62
MOST_RATES = 10_000  # learning rates that two schedules are compared by


@dataclass(frozen=True)
class FoundCheckpoint:
    """A verified checkpoint."""

    folder: Path
    manifest: Manifest
    provide: Callable[[set[str]], None]
    """Brings files to this host, before they are read."""


class Checkpoints:
    """All ranks make one, and call its methods together.

    Args:
        job: with its plan resolved.
        run: the run folder.
        data: `identity` of the prepared tokens.
        accepted: of other tokens, that checkpoints may have been made with.
    """

    def __init__(self, job: Job, run: Path, data: str, accepted: Sequence[str] = ()):
        self.job, self.settings, self.data = job, job.checkpoint, {data, *accepted}
        self.run, self.run_id, self.key = run, read_run_id(run), read_key(job.checkpoint.key_file)
        self.folder = checkpoint_folder(job, run)
        self.leads = dist.get_rank() == 0
        self.disk = Target(self.folder, self.leads, self.settings.keep, self.settings.keep_hours)
        kept = any(all_gather_json(holds_copies(run / RUN_ID, self.run_id)))  # when the disk was full
        wanted = self.settings.memory_every or kept
        self.memory = HostMemory(run / RUN_ID, self.run_id, self.key) if wanted else None

    def attach(self, snapshots: Snapshots, settle: Callable[[nn.Parameter], object]) -> None:
        """Say what takes them, and with that what is in them; and what moves a parameter's states to where they live."""
        self.snapshots, self.settle = snapshots, settle

    def find(self, resume: Sequence[str]) -> FoundCheckpoint | None:
        """The checkpoint to begin from.

        Args:
            resume: what is tried in turn: "auto" for the newest of this run that verifies, if there is one; the folder of one.

        Raises:
            CheckpointError: a named checkpoint does not verify.
            JobError: it was made with other batches.
        """
        for wish in resume:
            if wish != "auto":
                return self._go_on(Path(wish), verify_together(Path(wish), self.key))
            if found := self._newest(ANY_STEP):
                return found
        self._make_way(None, -1)
        return None

    def load(self, found: FoundCheckpoint) -> Position:
        """Take up the state of a checkpoint: tensors, generators if there were as many ranks, and position."""
        with Reader(found.folder, found.manifest) as reader:
            generators, carried = (own_tensors(found.manifest, kind, dist.get_rank()) for kind in ("rng", "feedback"))
            same_ranks = dist.get_world_size() == found.manifest.world_size
            names = generators + carried if same_ranks else []
            own = {part.file for name in names for part in reader.entry(name).parts}
            s = self.snapshots
            restore(s.model, s.anatomy, s.optimizer, reader, lambda files: found.provide(files | own), self.settle)
            if lost := restore_feedback(s.model, s.optimizer, reader, self.job.plan):
                self.say(lost)
            if same_ranks:
                set_generators(s.device, {name: reader.read(name) for name in generators})
        return found.manifest.position

    def go_back(self, step: int) -> Position | None:
        """Take up the state of the newest good checkpoint of a step up to `step`; None, and nothing done, if there is none."""
        self.snapshots.finish()
        dist.barrier()
        found = self._newest(step)
        return self.load(found) if found else None

    def due(self, step: int, last: bool, interrupted: bool = False) -> Target | None:
        """Target of the checkpoint after a step; None if none is due. An interrupted run always leaves one on the disk.

        Args:
            last: training ends with this step.

        Raises:
            JobError: the run folder is that of another run by now.
            interrupted: training ends by a signal, before all steps are done.
        """
        if interrupted or (self.settings.every and (last or step % self.settings.every == 0)):
            check_run_id(self.run, self.run_id)
            return self.disk
        if self.memory and self.settings.memory_every and step % self.settings.memory_every == 0:
            return self.memory.target()
        return None

    def is_saved(self, step: int, interrupted: bool) -> bool:
        """Whether the checkpoint of the last step lies on the disk, or none was wanted. The same on all ranks."""
        wanted = step > 0 and (interrupted or self.settings.every > 0)
        return not wanted or broadcast_json(folder_of(self.folder, step).exists())

    def keep(self, position: Position, *, try_disk: bool = True) -> str:
        """Save the last state, on the disk or else in the memory of hosts; on all ranks together.

        Args:
            try_disk: False where the disk is known to be full.

        Returns:
            "" if it is on the disk, else what became of it, in words.
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
            return f"the state after step {position.step} could be kept neither on the disk nor in memory"
        return f"the state after step {position.step} is kept in memory, as long as no host is started anew"

    def finish(self) -> None:
        """Wait until everything is written."""
        self.snapshots.finish()
        dist.barrier()

    def close(self) -> None:
        """The run has ended well: what is in memory is not needed any more."""
        if self.memory:
            self.memory.close()

    def say(self, text: str) -> None:
        """Let it be printed, once."""
        if self.leads:
            print(text, flush=True)

    def _newest(self, until: int) -> FoundCheckpoint | None:
        copy = self.memory.newest(until) if self.memory else None
        older = copy.step if copy else -1
        newer = [path for path in list_checkpoints(self.folder) if older < step_of(path) <= until]
        on_disk = choose(newer, self.say, self.key)
        if on_disk:
            return self._go_on(*on_disk)
        if copy is None or self.memory is None:
            return None
        memory = self.memory
        folder, manifest = memory.place(copy), copy.manifest
        self._check(folder, manifest)
        self._make_way(None, copy.step, of_memory=True)
        self.say(f"going on after step {copy.step}, from the memory of {len(memory.hosts)} hosts")
        return FoundCheckpoint(folder, manifest, lambda files: memory.provide(copy, files))

    def _go_on(self, folder: Path, manifest: Manifest) -> FoundCheckpoint:
        self._check(folder, manifest)
        self._make_way(folder, manifest.position.step)
        self.say(f"going on after step {manifest.position.step}, from {folder}")
        return FoundCheckpoint(folder, manifest, lambda files: None)

    def _make_way(self, chosen: Path | None, step: int, of_memory: bool = False) -> None:
        """Steps after this one come again, and with them their checkpoints."""
        if self.leads:
            archive_newer(self.folder, chosen, step + of_memory, self.say)
        if self.memory:
            self.memory.forget(step if of_memory else -1)

    def _check(self, folder: Path, manifest: Manifest) -> None:
        check_same_batches(self.job, self.data, manifest, folder)


def checkpoint_folder(job: Job, run: Path | None = None) -> Path:
    """Where the checkpoints of a job lie.

    Args:
        run: its run folder; by default that of the job.
    """
    return Path(job.checkpoint.folder or run or job.out)


def check_same_update(job: Job, before: dict[str, Any], step: int, where: str) -> None:
    """Refuse to go on with other updates than those that were made so far. Layouts and formats may change.

    More train.steps are no change as long as the learning rates of all steps so far stay what they were: those of a constant
    schedule, and of wsd before it falls.

    Args:
        job: the one that is to go on.
        before: the job of the updates so far, as a table.
        step: how many there were.
        where: what is gone on from.

    Raises:
        JobError: with every key that differs, its value then and now.
    """
    if step == 0:
        return
    now = job.model_dump(mode="json")
    changed = []
    for key in SAME_UPDATE:
        table, _, name = key.partition(".")
        then_table = before.get(table, {})
        names = [name] if name else [name for name in now[table] if name in then_table]
        changed += [
            f"{table}.{name} = {now[table][name]!r}, it was {then_table.get(name)!r}"
            for name in names
            if now[table][name] != then_table.get(name)
        ]
    steps = before.get("train", {}).get("steps")
    if isinstance(steps, int) and not changed and steps != job.train.steps:
        looked_at = range(1, step + 1, step // MOST_RATES + 1)
        if any(
            learning_rate(number, steps, job.optimizer) != learning_rate(number, job.train.steps, job.optimizer)
            for number in (*looked_at, step)
        ):
            schedule = job.optimizer.schedule
            changed = [f"train.steps = {job.train.steps}, it was {steps}: the {schedule} schedule depends on it"]
    if changed:
        raise JobError(
            "\n".join(changed),
            where=where,
            rule="a resumed run goes on with the updates that it began with, unless told otherwise",
            fix="set it back, or add --accept-changes",
        )


def check_run_id(run: Path, run_id: str) -> None:
    """Refuse to write into the folder of another run.

    Raises:
        JobError: another one has taken the folder.
    """
    found = read_run_id(run)
    if found and found != run_id:
        raise JobError(
            f"{run} belongs to run {found} by now, this is run {run_id}",
            where=str(run / RUN_ID),
            rule="a folder belongs to one run at a time",
            fix="give each run an output folder of its own; `--resume auto` there goes on from its last checkpoint",
        )


def check_same_batches(job: Job, data: Collection[str], manifest: Manifest, folder: Path) -> None:
    """Refuse to go on with other batches than those that a checkpoint was made with, if it has seen any.

    Args:
        job: the one that is to go on.
        data: `identity` of its prepared tokens, and of others that are accepted.
        manifest: of the checkpoint.
        folder: of the checkpoint.

    Raises:
        JobError: with the first key that differs.
    """
    if manifest.position.next_batch == 0:
        return
    now, other = job.model_dump(mode="json"), ""
    for key in SAME_BATCHES:
        table, _, name = key.partition(".")
        before = manifest.job.get(table, {}).get(name)
        if before != now[table][name]:
            other = other or f"{key} = {now[table][name]!r}; the checkpoint was made with {before!r}"
    if not other and manifest.data not in data:
        raise JobError(
            f"the tokens of {_name_source(job)} are others than those that the checkpoint was made with",
            where=str(folder),
            rule="a resumed run takes the same global batches in the same order, unless told otherwise",
            fix="restore the contents of the source and its tokenizer, or add --accept-changes",
        )
    if other:
        raise JobError(
            other,
            where=str(folder),
            rule="a resumed run takes the same global batches in the same order",
            fix="set it back, or begin a run of its own from the export of this one (model.path = ...)",
        )


def _name_source(job: Job) -> str:
    path = f"data.path = {job.data.path!r}" if job.data.path else f"data.source = {job.data.source!r}"
    return path if job.data.source == "tokens" else f"{path}, under data.tokenizer = {job.data.tokenizer!r},"
