"""Asynchronous checkpointing (Mohan et al., CheckFreq, 2021; Wang et al., GEMINI, 2023).

    training thread     step | copy | step | step | step | step | copy | ...
    writing thread                  | digest and write | commit |

Training is blocked only while this rank's share of the state is copied into a host buffer in the layout of the file. With an
accelerator, the copy overlaps with the next forward and backward pass, and only the next optimizer update waits for it. A
background thread then writes the file. When all ranks have reported the digests of their flushed files, rank 0 writes the
manifest and renames the folder to its final name. There is one buffer, so that memory use is constant: while it is being
written, the next snapshot waits or is skipped (checkpoint.when_busy).
"""

import os
import platform
import queue
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.checkpoint.folders import begin_folder, commit_folder, part_of, retire
from weft.checkpoint.key import read_key
from weft.checkpoint.layouts import Box, RankTable, slice_key
from weft.checkpoint.manifest import (
    FileEntry,
    Manifest,
    Position,
    TensorEntry,
    file_name,
    library_versions,
    sync_folder,
    write_manifest,
)
from weft.checkpoint.parameter_groups import group_names, settings_of
from weft.checkpoint.reports import Reports
from weft.checkpoint.shard_file import SAFETENSORS_DTYPES, ShardBuffer, SlotSpec, check_free_space, write_bytes
from weft.checkpoint.shares import divide
from weft.checkpoint.slices import (
    PER_RANK_KINDS,
    TensorSlice,
    feedback_slices,
    model_slices,
    optimizer_slices,
    rng_states,
)
from weft.comm.collectives import all_reduce
from weft.comm.objects import broadcast_json
from weft.device.device import Device
from weft.device.pinned import pinned_memory
from weft.job import Job
from weft.memory.storages import local_part
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.data.fsdp import free_gathered_weights
from weft.parallel.runtime import runtime
from weft.topology.mesh import AXES

LOWEST_PRIORITY = 19
CHANGED_BEFORE_UPDATE = ("buffers/", "feedback/")  # tensors that forward or backward may change, before the next update


@dataclass(frozen=True)
class Target:
    """Destination of checkpoints and its retention policy."""

    folder: Path
    """Parent folder of the checkpoint folders."""
    leads: bool
    """True if this rank creates, commits and removes checkpoint folders in `folder`."""
    keep: int
    """See `retire`."""
    keep_hours: float
    """See `retire`."""
    replicate: Callable[[Tensor, Path], None] | None = None
    """Called with (buffer, folder) to send this rank's file to another host and to receive files into the folder."""
    announce: bool = True
    """True to report finished checkpoints in `take_messages`."""
    per_host: bool = False
    """True if each host has a folder of its own at this path."""
    replace: bool = False
    """True to replace a checkpoint of the same step when the new one is complete."""
    copy: Callable[[Path, Mapping[str, FileEntry]], Path | None] = lambda folder, files: None
    """Called with each complete checkpoint on the rank that leads; returns a checkpoint that must not be removed now."""


WRITER = "weft-checkpoint"
"""Name of the threads that write checkpoints."""


def wait_for_writers() -> None:
    """Wait until all checkpoints of this process are written. Not collective; errors are left to `finish`."""
    for thread in threading.enumerate():
        if thread.name == WRITER:
            thread.join()


class Snapshots:
    """Asynchronous checkpoint writer of a run. All ranks create one instance, and call its methods together.

    Args:
        job: job; it is stored in every manifest.
        model: parallelized model with its weights.
        optimizer: optimizer of the model's parameters.
        data: `identity` of the prepared tokens.
        run: id of the run.
        code: digests of the user's functions, see `Manifest`.
    """

    def __init__(
        self,
        job: Job,
        model: Any,
        optimizer: DistributedOptimizer,
        device: Device,
        torch_device: torch.device,
        data: str = "",
        run: str = "",
        code: Mapping[str, str] = MappingProxyType({}),
    ):
        self.data, self.run, self.code, self.key = data, run, dict(code), read_key(job.checkpoint.key_file)
        self.job, self.model, self.optimizer = job, model, optimizer
        self.device, self.torch_device, self.mesh = device, torch_device, runtime(model).mesh
        self.group_names: list[list[str]] | None = None
        """Names of the parameters of each group of the optimizer; None before the first snapshot."""
        self.relocated = 0
        """`changes` of the homes of experts, of the current layout of files."""
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
        token = broadcast_json(secrets.token_hex(8))  # separates the reports from those of an earlier instance
        self.reports = Reports(store, f"snapshot/{token}", self.rank, self.world_size)
        self.index = 0
        """Number of snapshots taken so far."""
        self.writing: threading.Thread | None = None
        self.slices: list[TensorSlice] = []
        """Slices that this rank writes."""
        self.state_tensors: list[torch.Tensor] = []
        """Optimizer state and feedback tensors of `slices`; they are created lazily, and an optimizer may bind new ones."""
        self.shard: ShardBuffer | None = None
        self.slots: list[SlotSpec] = []
        """Content of the shard buffer."""
        self.targets: list[Tensor] = []
        """Views of the shard buffer, one for each of `slices`."""
        self.copied: Any = None
        """Event recorded after the copy; the next update waits for it."""
        optimizer.inner.register_step_pre_hook(self._wait_for_copy)
        self.finished = 0.0
        """Time of the last commit by this rank, from time.perf_counter()."""
        self.messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Messages about finished and failed checkpoints."""
        self.committed: queue.SimpleQueue[Path] = queue.SimpleQueue()
        """Checkpoints on the disk that this rank has completed."""

    def take(self, position: Position, target: Target) -> float:
        """Copy the state and start to write it in the background. Returns the seconds for which training was blocked."""
        begin = time.perf_counter()
        if self.group_names is None:
            self._finish_transfers()  # a gathered weight is another parameter than that of the optimizer
            self.group_names = group_names(self.model, self.optimizer.inner)
        settings = settings_of(self.optimizer.inner, self.group_names, self.mesh.get_group("pp"))
        relocation = runtime(self.model).relocation
        if relocation is not None and relocation.changes != self.relocated:  # the slices of weights are others
            self.relocated = relocation.changes
            self.reset()
        experts = relocation.state() if relocation is not None else None
        position = position.model_copy(update={"parameter_groups": settings, "experts": experts})
        if self.job.checkpoint.when_busy == "wait":
            self.finish()
        if self._agree(lambda: self._prepare(target, position.step)):
            self.index += 1
            arguments = (position, target, self._copy())
            self.writing = threading.Thread(target=self._write, args=arguments, name=WRITER, daemon=True)
            self.writing.start()
        return time.perf_counter() - begin

    def reset(self) -> None:
        """Find all tensors again for the next snapshot: a checkpoint has been loaded into new ones."""
        self.shard = None

    def finish(self) -> None:
        """Wait until the current snapshot is written and, if this rank leads, committed."""
        if self.writing is not None:
            self.writing.join()
            self.writing = None

    def take_messages(self) -> list[str]:
        """Messages since the last call."""
        return [self.messages.get() for _ in range(self.messages.qsize())]

    def take_committed(self) -> list[Path]:
        """Checkpoints that this rank has completed since the last call, without those in memory."""
        return [self.committed.get() for _ in range(self.committed.qsize())]

    # Training thread

    def _prepare(self, target: Target, step: int) -> None:
        """Create the folder before any rank writes into it."""
        if self.writing is not None and self.writing.is_alive():
            raise OSError("the previous checkpoint is still being written")
        if target.leads:
            begin_folder(target.folder, step)

    def _agree(self, attempt: Callable[[], None]) -> bool:
        """Run `attempt` on all ranks; True if it succeeded on all. Rebuilds the file layouts if a rank's tensors changed.

        An optimizer may bind new tensors as its states in each update.
        """
        problem = ""
        try:
            attempt()
        except OSError as error:
            problem = str(error)
        tensors = [local_part(value) for state in self.optimizer.state.values() for value in state.values()]
        tensors += [item.tensor for item in feedback_slices(self.model, self.rank)]
        known = self.state_tensors
        changed_here = (
            self.shard is None
            or len(tensors) != len(known)
            or any(now is not before for now, before in zip(tensors, known, strict=True))
        )
        flags = torch.tensor([bool(problem), changed_here], device=self.torch_device, dtype=torch.int32)
        failed, changed = all_reduce(flags, self.mesh, AXES).tolist()
        if failed:
            self.messages.put(f"no checkpoint: {problem or 'it failed on another rank'}; training continues")
        elif changed:
            self.state_tensors = tensors
            self._lay_out()
        return not failed

    def _lay_out(self) -> None:
        """Choose the slices that this rank writes, and allocate the shard buffer for them."""
        self._finish_transfers()
        held = model_slices(self.model) + optimizer_slices(self.model, self.optimizer.inner)
        held += feedback_slices(self.model, self.rank)
        self.slices = divide(held)
        slots = [SlotSpec(_key(item), tuple(item.tensor.shape), item.tensor.dtype) for item in self.slices]
        states = rng_states(self.device, self.rank)
        slots += [SlotSpec(name, tuple(state.shape), state.dtype) for name, state in states.items()]
        if self.shard is None or slots != self.slots:
            on_disk = runtime(self.model).on_disk  # a second copy of the state would not fit into memory
            make = on_disk.pool.make if on_disk else pinned_memory(self.device.type)
            self.shard, self.slots = ShardBuffer(slots, make), slots
        self.targets = [self.shard.tensors[_key(tensor_slice)] for tensor_slice in self.slices]
        self.reports.describe(_table(held, self.slices, states))

    def _finish_transfers(self) -> None:
        """Free gathered weights, and finish the transfers of offloaded optimizer state."""
        free_gathered_weights(self.model)
        self.optimizer.finish_offload()

    def _copy(self) -> ShardBuffer:
        """Copy the state into the shard buffer; on an accelerator on a side stream that only the next update waits for."""
        assert self.shard is not None
        self._finish_transfers()
        side = self.device.stream()
        for tensor_slice, target in zip(self.slices, self.targets, strict=True):
            if tensor_slice.name.startswith(CHANGED_BEFORE_UPDATE):
                target.copy_(tensor_slice.tensor, non_blocking=True)
        for name, state in rng_states(self.device, self.rank).items():
            self.shard.tensors[name].copy_(state)
        side.wait_stream(self.device.current_stream())
        with side:
            for tensor_slice, target in zip(self.slices, self.targets, strict=True):
                if not tensor_slice.name.startswith(CHANGED_BEFORE_UPDATE):
                    target.copy_(tensor_slice.tensor, non_blocking=True)
            self.copied = side.record_event()
        return self.shard

    def _wait_for_copy(self, *_: object) -> None:
        """Optimizer pre-hook: let the update wait for the copy."""
        if self.copied is not None:
            self.device.current_stream().wait_event(self.copied)

    # Writing thread

    def _write(self, position: Position, target: Target, shard: ShardBuffer) -> None:
        begin, part = time.perf_counter(), part_of(target.folder, position.step)
        try:
            self.copied.synchronize()
            yield_to_training()
            check_free_space(part, shard.buffer.numel())
            file = write_bytes(shard.buffer, part / file_name(self.rank))
            if target.replicate:
                target.replicate(shard.buffer, part)
            sync_folder(part)
            report = {"file": file.model_dump(), "host": platform.node()}
        except Exception as error:  # a full disk or a lost host, for example; rank 0 must not wait for this rank
            report = {"problem": f"rank {self.rank}: {error}"}
        try:
            self.reports.send(self.index, **report)
        except Exception as error:  # the launcher has ended, and the ranks end with it
            self.messages.put(f"no checkpoint of step {position.step}: rank {self.rank} cannot report: {error}")
            return
        if target.leads:
            try:
                folder, size = self._commit(position, target)
            except Exception as error:  # also an invalid report
                shutil.rmtree(part, ignore_errors=True)
                self.messages.put(
                    f"no checkpoint of step {position.step}: {error}; "
                    "training continues, and the previous checkpoint is kept"
                )
            else:
                self.finished = time.perf_counter()
                seconds = self.finished - begin
                if target.announce:
                    self.committed.put(folder)
                    self.messages.put(f"{folder.name}: {size / 2**20:.1f} MiB in {seconds:.1f} s, in the background")

    def _commit(self, position: Position, target: Target) -> tuple[Path, int]:
        """Wait for the files of all ranks, write the manifest, and commit. Returns the folder and its size in bytes."""
        reports, merged = self.reports.collect(self.index)
        own = {name: TensorEntry(dtype=dtype, shape=shape, file=n) for name, (dtype, shape, n) in merged.own.items()}
        tensors = {name: TensorEntry(**entry._asdict()) for name, entry in merged.tensors.items()}
        manifest = Manifest(
            position=position,
            world_size=self.world_size,
            job=self.job.model_dump(mode="json"),
            data=self.data,
            run=self.run,
            code=self.code,
            versions=library_versions(),
            hosts={file_name(n): report["host"] for n, report in enumerate(reports)} if target.per_host else {},
            files={file_name(rank): FileEntry(**report["file"]) for rank, report in enumerate(reports)},
            tensors=tensors | own,
            layouts=tuple(merged.layouts),
        )
        write_manifest(manifest, part_of(target.folder, position.step), self.key)
        folder = commit_folder(target.folder, position.step, replace=target.replace)
        retire(target.folder, target.keep, target.keep_hours, spared=target.copy(folder, manifest.files))
        return folder, manifest.bytes


def yield_to_training() -> None:
    """Give this thread the lowest CPU priority, so that it only uses cores that training leaves idle."""
    if sys.platform == "linux":  # other systems have no priority per thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)


def _key(item: TensorSlice) -> str:
    return slice_key(item.name, item.offset, item.tensor.shape, item.full_shape)


def _table(held: list[TensorSlice], written: list[TensorSlice], states: dict[str, Tensor]) -> RankTable:
    """Description of what a rank writes: slices, and the states of its random number generators."""
    facts = [(item.name, SAFETENSORS_DTYPES[item.tensor.dtype], item.full_shape) for item in held]
    own = [fact for fact in facts if fact[0].startswith(PER_RANK_KINDS)]
    own += [(name, SAFETENSORS_DTYPES[state.dtype], tuple(state.shape)) for name, state in states.items()]
    boxes: dict[str, list[Box]] = {}
    for item in written:
        boxes.setdefault(item.name, []).append((tuple(item.offset), tuple(item.tensor.shape)))
    return RankTable.of([fact for fact in facts if not fact[0].startswith(PER_RANK_KINDS)], boxes, own)
