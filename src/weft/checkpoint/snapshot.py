"""Taking checkpoints while training goes on (Mohan et al., CheckFreq, 2021; Wang et al., GEMINI, 2023).

    training thread     step | copy | step | step | step | step | copy | ...
    writing thread                  | digest and write | commit |

A step waits only until this rank's share of the state is copied into a buffer on the host, which is laid out as the file
will be; with an accelerator that copy goes on beside the next forward and backward, until the next update. A thread then
writes the file; when all ranks have told rank 0 that theirs is on the disk, with its digest, rank 0 writes the manifest and
gives the folder its name. There is one buffer: while it is being written the next snapshot waits, or is left out, as the
job says; memory stays what it is.
"""

import json
import os
import queue
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from weft.anatomy.roles import Anatomy
from weft.checkpoint.folders import begin_folder, commit_folder, part_of, retire
from weft.checkpoint.key import read_key
from weft.checkpoint.manifest import (
    Entry,
    File,
    Manifest,
    Part,
    Position,
    file_name,
    library_versions,
    sync_folder,
    write_manifest,
)
from weft.checkpoint.shard_file import FORMATS, Shard, Slot, check_room, write_bytes
from weft.checkpoint.slices import (
    TensorSlice,
    divide,
    feedback_pieces,
    generators,
    model_pieces,
    optimizer_pieces,
    reshard,
)
from weft.comm.collectives import all_reduce
from weft.comm.objects import broadcast_json
from weft.device.device import Device
from weft.job import Job
from weft.topology.mesh import AXES

POLL_SECONDS = 0.02
LOWEST_PRIORITY = 19
OF_BACKWARD = ("buffers/", "feedback/")  # what a forward or a backward may change, not only an update
COMMIT_SECONDS = 1800  # that rank 0 waits for the slowest writer


@dataclass(frozen=True)
class Target:
    """Where checkpoints go."""

    folder: Path
    """In which they get folders of their own."""
    leads: bool
    """Whether this rank makes those folders, and gives them their names."""
    keep: int
    keep_hours: float
    pass_on: Callable[[Tensor, Path], None] | None = None
    """Lets a neighbour rank have this rank's file too, and writes the neighbour's into the folder."""
    says: bool = True
    """Whether its checkpoints are worth a line."""


class Snapshots:
    """Takes the checkpoints of a run. All ranks make one, and call its methods together.

    Args:
        job: with its plan resolved; it is written in every manifest.
        model: parallelized, with its weights.
        anatomy: of the whole model.
        optimizer: over its parameters.
        device: what this rank computes on.
        place: its own device.
        mesh: of all ranks.
        data: which tokens the job trains on.
        run: identity of the run.
    """

    def __init__(
        self,
        job: Job,
        model: Any,
        anatomy: Anatomy,
        optimizer: torch.optim.Optimizer,
        device: Device,
        place: torch.device,
        mesh: DeviceMesh,
        data: str = "",
        run: str = "",
    ):
        self.data, self.run, self.key = data, run, read_key(job.checkpoint.key_file)
        self.job, self.model, self.anatomy, self.optimizer = job, model, anatomy, optimizer
        self.device, self.place, self.mesh = device, place, mesh
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
        token = broadcast_json(secrets.token_hex(8))  # so that nothing is taken for what an earlier one said
        self.prefix = f"snapshot/{token}"
        self.number = 0
        self.writing: threading.Thread | None = None
        self.pieces: list[TensorSlice] = []
        self.held = 0
        """Tensors of the optimizer and of reductions when `pieces` were found: they are made with the first gradient."""
        self.shard: Shard | None = None
        self.targets: list[Tensor] = []
        """Where the pieces lie in it."""
        self.parts = ""
        """What it holds, as rank 0 is told."""
        self.merged: tuple[list[str], dict[str, Entry]] = [], {}
        """The parts of all ranks and the tensors they make, of the last checkpoint that this rank led."""
        self.copied: Any = None
        """The event after which the state may change."""
        optimizer.register_step_pre_hook(self._wait_for_copy)
        self.finished = 0.0
        """When the last checkpoint that this rank leads was whole, by time.perf_counter()."""
        self.news: queue.SimpleQueue[str] = queue.SimpleQueue()
        """What rank 0 has to tell: checkpoints that are there, and why others are not."""

    def take(self, position: Position, target: Target) -> float:
        """Copy the state, and let it be written. Seconds that training waited for it."""
        begin = time.perf_counter()
        if self.job.checkpoint.when_busy == "wait":
            self.finish()
        if self._agree(lambda: self._prepare(target, position.step)):
            self.number += 1
            arguments = (position, target, self._copy())
            self.writing = threading.Thread(target=self._write, args=arguments, name="weft-checkpoint", daemon=True)
            self.writing.start()
        return time.perf_counter() - begin

    def finish(self) -> None:
        """Wait until what was copied is written, and what this rank leads has its name."""
        if self.writing is not None:
            self.writing.join()
            self.writing = None

    def take_news(self) -> list[str]:
        """What happened since the last call, to be printed; of rank 0."""
        return [self.news.get() for _ in range(self.news.qsize())]

    # On the training thread

    def _prepare(self, target: Target, step: int) -> None:
        """Make the folder, before any rank writes into it."""
        if self.writing is not None and self.writing.is_alive():
            raise OSError("the one before is still being written")
        if target.leads:
            begin_folder(target.folder, step)

    def _agree(self, attempt: Callable[[], None]) -> bool:
        """Whether an attempt succeeded on all ranks. If what one of them holds has changed, all lay out their files anew."""
        problem = ""
        try:
            attempt()
        except OSError as error:
            problem = str(error)
        held = sum(map(len, self.optimizer.state.values())) + len(feedback_pieces(self.model, self.rank))
        signs = torch.tensor(
            [bool(problem), self.shard is None or held != self.held], device=self.place, dtype=torch.int32
        )
        failed, changed = all_reduce(signs, self.mesh, AXES).tolist()
        if failed:
            self.news.put(f"no checkpoint: {problem or 'another rank could not begin'}; training goes on")
        elif changed:
            self.held = held
            self._lay_out()
        return not failed

    def _lay_out(self) -> None:
        """Decide what this rank writes, and where it lies in its file."""
        reshard(self.model, self.optimizer)
        held = model_pieces(self.model, self.anatomy) + optimizer_pieces(self.model, self.anatomy, self.optimizer)
        held += feedback_pieces(self.model, self.rank)
        self.pieces = divide(held, self.place)
        slots = [Slot(_key(piece), tuple(piece.tensor.shape), piece.tensor.dtype) for piece in self.pieces]
        own = generators(self.device, self.rank)
        slots += [Slot(name, tuple(state.shape), state.dtype) for name, state in own.items()]
        self.shard = Shard(slots, pinned=self.device.type != "cpu")
        self.targets = [self.shard.tensors[_key(piece)] for piece in self.pieces]
        self.parts = self._describe(self.shard)

    def _copy(self) -> Shard:
        """Copy the state; on an accelerator on a stream of its own, for which only the next update waits."""
        assert self.shard is not None
        reshard(self.model, self.optimizer)
        side = self.device.stream()
        for piece, target in zip(self.pieces, self.targets, strict=True):
            if piece.name.startswith(OF_BACKWARD):
                target.copy_(piece.tensor, non_blocking=True)
        for name, state in generators(self.device, self.rank).items():
            self.shard.tensors[name].copy_(state)
        side.wait_stream(self.device.current_stream())
        with side:
            for piece, target in zip(self.pieces, self.targets, strict=True):
                if not piece.name.startswith(OF_BACKWARD):
                    target.copy_(piece.tensor, non_blocking=True)
            self.copied = side.record_event()
        return self.shard

    def _wait_for_copy(self, *_: object) -> None:
        """Before an update."""
        if self.copied is not None:
            self.device.current_stream().wait_event(self.copied)

    def _describe(self, shard: Shard) -> str:
        """What this rank's file holds, as JSON: (name, format, whole shape, key, offset, shape) of each tensor."""
        boxes = {_key(piece): (piece.name, piece.whole, piece.offset) for piece in self.pieces}
        table = []
        for key, tensor in shard.tensors.items():
            shape = tuple(tensor.shape)
            name, whole, offset = boxes.get(key, (key, shape, (0,) * tensor.ndim))
            table.append((name, FORMATS[tensor.dtype], whole, key, offset, shape))
        return json.dumps(table)

    # On the writing thread

    def _write(self, position: Position, target: Target, shard: Shard) -> None:
        self.copied.synchronize()
        yield_to_training()
        begin, part = time.perf_counter(), part_of(target.folder, position.step)
        try:
            check_room(part, shard.buffer.numel())
            file = write_bytes(shard.buffer, part / file_name(self.rank))
            if target.pass_on:
                target.pass_on(shard.buffer, part)
            sync_folder(part)
            report = {"file": file.model_dump(), "parts": self.parts}
        except Exception as error:  # a full disk, a neighbour that is gone: whatever it is, rank 0 must not wait for it
            report = {"problem": f"rank {self.rank}: {error}"}
        try:
            self.store.set(f"{self.prefix}/{self.rank}", json.dumps(report))
            self.store.set(f"{self.prefix}/{self.rank}/number", str(self.number))
        except Exception as error:  # the launcher is gone, and ends the ranks with it
            self.news.put(f"no checkpoint of step {position.step}: rank {self.rank} cannot report: {error}")
            return
        if target.leads:
            try:
                folder, size = self._commit(position, target)
            except Exception as error:  # also where a report makes no sense
                shutil.rmtree(part, ignore_errors=True)
                self.news.put(f"no checkpoint of step {position.step}: {error}; training goes on, the one before stays")
            else:
                self.finished = time.perf_counter()
                seconds = self.finished - begin
                if target.says:
                    self.news.put(f"{folder.name}: {size / 2**20:.1f} MiB in {seconds:.1f} s, beside training")

    def _commit(self, position: Position, target: Target) -> tuple[Path, int]:
        """When the files of all ranks are there, make them a checkpoint: its folder and bytes."""
        reports = [self._await_report(rank) for rank in range(self.world_size)]
        manifest = Manifest(
            position=position,
            world_size=self.world_size,
            job=self.job.model_dump(mode="json"),
            data=self.data,
            run=self.run,
            versions=library_versions(),
            files={file_name(rank): File(**report["file"]) for rank, report in enumerate(reports)},
            tensors=self._merged([report["parts"] for report in reports]),
        )
        write_manifest(manifest, part_of(target.folder, position.step), self.key)
        folder = commit_folder(target.folder, position.step)
        retire(target.folder, target.keep, target.keep_hours)
        return folder, manifest.bytes

    def _merged(self, parts: list[str]) -> dict[str, Entry]:
        """The tensors of all files. Ranks seldom change what they hold: it is made when they have."""
        if parts != self.merged[0]:
            self.merged = parts, _merge([json.loads(text) for text in parts])
        return self.merged[1]

    def _await_report(self, rank: int) -> dict[str, Any]:
        key, deadline = f"{self.prefix}/{rank}/number", time.monotonic() + COMMIT_SECONDS
        while not (self.store.check([key]) and int(self.store.get(key)) == self.number):  # a wait would block training
            if time.monotonic() > deadline:
                raise OSError(f"rank {rank} has not written its part within {COMMIT_SECONDS} s")
            time.sleep(POLL_SECONDS)
        report = json.loads(self.store.get(f"{self.prefix}/{rank}"))
        if "problem" in report:
            raise OSError(report["problem"])
        return report


def yield_to_training() -> None:
    """Let this thread have what others leave of the cores. Where training waits for it, that is all it needs."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)


def _key(piece: TensorSlice) -> str:
    """Name of a box in its file: with its offset, as a file may hold several of one tensor."""
    if tuple(piece.tensor.shape) == piece.whole:
        return piece.name
    return f"{piece.name}@{','.join(map(str, piece.offset))}"


def _merge(tables: list[list[Any]]) -> dict[str, Entry]:
    """The tensors of all files, by name."""
    found: dict[str, tuple[str, tuple[int, ...], list[Part]]] = {}
    for rank, table in enumerate(tables):
        for name, format, whole, key, offset, shape in table:
            parts = found.setdefault(name, (format, tuple(whole), []))[2]
            parts.append(Part(file=file_name(rank), key=key, offset=tuple(offset), shape=tuple(shape)))
    return {
        name: Entry(format=format, shape=shape, parts=tuple(parts)) for name, (format, shape, parts) in found.items()
    }
