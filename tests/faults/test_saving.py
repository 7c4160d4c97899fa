"""Faults while a checkpoint is written: that checkpoint is lost, and nothing else."""

import multiprocessing
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.lab.checkpoints import tensors_of
from tests.lab.families import family
from tests.lab.parity import SETTINGS, packed_batches, plan_for, share
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.checkpoint.folders import clean, list_checkpoints, part_of, step_of
from weft.checkpoint.loading import materialize
from weft.checkpoint.manifest import Position, verify_folder
from weft.checkpoint.model_config import read_config
from weft.checkpoint.snapshot import Snapshots, Target
from weft.device.detect import detect
from weft.job import Checkpoint, Job, Model
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.precision.scaling import LossScale
from weft.topology.mesh import build_mesh, data_rank
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

CPU = torch.device("cpu")
PAGE = 4096
WRITING_SECONDS = 0.06  # approximate duration of a save
MODEL = {**family("llama"), "hidden_size": 128, "intermediate_size": 512, "vocab_size": 2000}  # 10 MiB of state


class Trainer:
    """Training on each rank, of which checkpoints are saved."""

    def __init__(self, world_size: int):
        source = Model(config=MODEL)
        self.plan = resolved(plan_for("fp32", zero=3), world_size)
        self.mesh = build_mesh(self.plan, "cpu", world_size)
        self.model = build_on_meta(read_config(source), torch.float32)
        parallelize(self.model, self.plan, self.mesh)
        materialize(self.model, source, CPU)
        self.optimizer = DistributedOptimizer(build_optimizer(self.model, SETTINGS), self.model, detect())
        self.batch = share(packed_batches(2000, rows=12)[0], data_rank(self.mesh), world_size, 2)
        job = Job(model=source, plan=self.plan, checkpoint=Checkpoint(every=1))
        self.snapshots = Snapshots(job, self.model, self.optimizer, detect(), CPU)

    def step(self) -> float:
        return train_step(self.model, self.optimizer, self.batch, 0.5).loss

    def take(self, run: Path, step: int) -> None:
        target = Target(run, dist.get_rank() == 0, keep=2, keep_hours=0)
        self.snapshots.take(Position(step=step, next_batch=step, loss_scale=LossScale()), target)


def save_forever(run: Path) -> None:
    """Save a checkpoint after each step, as fast as possible, in a separate process."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    clean(run)
    trainer, step = Trainer(1), max(map(step_of, list_checkpoints(run)), default=0)
    while True:
        trainer.step()
        step += 1
        trainer.take(run, step)


@pytest.mark.parametrize(
    "trials", [pytest.param(6, marks=pytest.mark.must("fault: The run is killed while it saves")), 50]
)
def test_a_kill_during_a_save_loses_no_checkpoint(trials: int, tmp_path: Path) -> None:
    rng, torn = random.Random(trials), 0
    for _ in range(trials):
        before = [step_of(path) for path in list_checkpoints(tmp_path)]
        process = multiprocessing.get_context("fork").Process(target=save_forever, args=(tmp_path,))
        process.start()
        deadline = time.monotonic() + 60
        while max(map(step_of, list_checkpoints(tmp_path)), default=0) <= max(before, default=0) + 1:
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        while not any(tmp_path.glob(".step-*.part")):  # until the next save begins
            assert time.monotonic() < deadline
        time.sleep(rng.random() * WRITING_SECONDS)
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        torn += len(list(tmp_path.glob(".step-*")))
        complete = list_checkpoints(tmp_path)
        assert 1 <= len(complete) <= 3  # keep = 2; the oldest may not have been removed yet
        for folder in complete:
            assert verify_folder(folder).position.step == step_of(folder)
    assert torn > trials // 4  # enough kills hit a save
    clean(tmp_path)
    assert list(tmp_path.glob(".step-*")) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """File system of 64 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, leave: int) -> Path:
    """Fill a disk except for some bytes."""
    free = os.statvfs(folder)
    path = folder / "filler"
    with path.open("wb") as file:
        file.write(bytes(free.f_bavail * free.f_frsize - leave))
    return path


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


class DiskFault:
    """Fault of the disk around the second of three checkpoints, caused and removed by rank 0."""

    def __init__(self, kind: str, run: Path):
        self.kind, self.run, self.filler = kind, run, run / "filler"

    def before(self) -> None:
        shards = [path.stat().st_size for path in self.run.glob("step-00000002/shard-*")]
        pages = sum(-(-size // PAGE) for size in shards) * PAGE
        if self.kind == "full":
            fill(self.run, 0)
        elif self.kind == "space for one file of two":
            fill(self.run, pages * 3 // 4)
        elif self.kind == "no space for the manifest":
            fill(self.run, pages)
        elif self.kind == "read-only":
            remount(self.run, "ro")

    def after(self) -> None:
        if self.kind == "read-only":
            remount(self.run, "rw")
        self.filler.unlink(missing_ok=True)


def train_through(rank: int, world_size: int, kind: str, run: Path) -> tuple[list[str], list[float]]:
    """Train six steps with three checkpoints and a fault around the second; return rank 0's messages and the losses."""
    trainer, fault, losses = Trainer(world_size), DiskFault(kind, run), []
    for step in range(1, 7):
        losses.append(trainer.step())
        if step % 2:
            continue
        if step == 4 and rank == 0:
            fault.before()
        dist.barrier()
        trainer.take(run, step)
        trainer.snapshots.finish()
        dist.barrier()
        if step == 4 and rank == 0:
            assert not part_of(run, 4).exists()  # an unfinished checkpoint must not fill the disk
            fault.after()
        dist.barrier()
    return trainer.snapshots.take_messages(), losses


REASONS = {
    "none": "",
    "full": "0 MiB are free",
    "space for one file of two": r"rank \d: (5 MiB are needed|\[Errno 28\] No space left on device)",
    "no space for the manifest": r"step 4: \[Errno 28\] No space left on device",
    "read-only": "Read-only file system",
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("full", marks=pytest.mark.must("fault: The disk is full, has no inodes left, or is read-only")),
        *(kind for kind in REASONS if kind != "full"),
    ],
)
def test_training_continues_without_space_for_a_checkpoint(kind: str, small_disk: Path) -> None:
    (messages, losses), (_, losses_of_rank_1) = run_ranks(2, train_through, kind, small_disk)
    assert losses == losses_of_rank_1 == run_ranks(2, train_through, "none", small_disk.parent / "aside")[0][1]
    steps = [step_of(path) for path in list_checkpoints(small_disk)]
    if kind == "none":
        assert steps == [6, 4]
    else:
        assert steps == [6, 2]  # the previous checkpoint was kept
        (text,) = [text for text in messages if text.startswith("no checkpoint")]
        assert re.search(REASONS[kind], text)
    for folder in list_checkpoints(small_disk):
        assert len(tensors_of(folder)) > 50


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    messages = run_ranks(1, take_twice, tmp_path)[0]
    assert messages[0].startswith("step-00000003: ")
    assert messages[1].startswith("no checkpoint of step 3")
    assert "exists" in messages[1]
    assert verify_folder(tmp_path / "step-00000003").position.next_batch == 3


def take_twice(rank: int, world_size: int, run: Path) -> list[Any]:
    trainer = Trainer(world_size)
    for _ in range(2):
        trainer.step()
        trainer.take(run, 3)
        trainer.snapshots.finish()
    return trainer.snapshots.take_messages()
