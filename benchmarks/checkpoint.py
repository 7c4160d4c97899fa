"""Cost of a checkpoint for training: Weft beside torch's distributed checkpoint (DCP), synchronous and in the background.

    python benchmarks/checkpoint.py [--repeats 5] [--steps 16] [--folder DIR]

Two ranks train one model under ZeRO-3; each system saves the same shards in turn. In a turn the state is saved once, and then
some steps run while it is written. The columns are

- blocked: time until the save returned and training continued;
- slow-down: of the steps after it, compared with the median turn in which nothing is saved;
- CPU of other threads: CPU time of a rank's threads other than training; where all cores are busy, training loses it;
- written after: time from the save until the state was on disk.
"""

import argparse
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peers.figures import spread
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict

from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.folders import folder_of
from weft.checkpoint.loading import materialize
from weft.checkpoint.manifest import Position
from weft.checkpoint.model_config import read_config
from weft.checkpoint.restore import Reader, restore, verify_together
from weft.checkpoint.snapshot import Snapshots, Target
from weft.data import MicroBatch
from weft.device.detect import detect
from weft.job import Checkpoint, Job, Model, Optimizer
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.plan import Parallel, Plan, Precision, resolve_plan
from weft.precision.scaling import LossScale
from weft.topology.mesh import build_mesh
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

RANKS = 2
MODEL = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
}


class Training:
    """Training of a model on this rank."""

    def __init__(self, world_size: int):
        precision = Precision(param_dtype="fp32", update="fp32", reduce_dtype="fp32")
        self.plan = resolve_plan(
            Plan(parallel=Parallel(zero=3), precision=precision), world_size, native_bf16=detect().supports("bf16")
        )
        self.mesh = build_mesh(self.plan, "cpu", world_size)
        self.source = Model(config=MODEL)
        self.model: Any = build_on_meta(read_config(self.source), torch.float32)
        self.anatomy = read_anatomy(self.model)
        parallelize(self.model, self.plan, self.mesh)
        materialize(self.model, self.source, torch.device("cpu"))
        self.model.train()
        self.optimizer = DistributedOptimizer(build_optimizer(self.model, Optimizer()), self.model, detect())
        tokens = torch.randint(0, 8192, (1, 129))
        self.batch = [MicroBatch(tokens[:, :-1].contiguous(), torch.arange(128)[None], tokens[:, 1:].contiguous())]

    def step(self) -> None:
        train_step(self.model, self.optimizer, self.batch, 1.0)


class Saver(Protocol):
    """Checkpoint system under test."""

    def save(self, step: int) -> None:
        """Save the state; return when training may continue."""

    def finish(self) -> float:
        """Wait until the last save is on disk; return that moment, by time.perf_counter()."""

    def load(self) -> None:
        """Load the last save into the model and its optimizer."""


class Nothing:
    def __init__(self, training: Training, folder: Path): ...

    def save(self, step: int) -> None: ...

    def finish(self) -> float:
        return time.perf_counter()

    def load(self) -> None: ...


class Weft:
    def __init__(self, training: Training, folder: Path):
        t = self.training = training
        self.target = Target(folder / "weft", dist.get_rank() == 0, keep=1, keep_hours=0)
        job = Job(model=t.source, plan=t.plan, checkpoint=Checkpoint(every=1))
        cpu = torch.device("cpu")
        self.snapshots = Snapshots(job, t.model, t.optimizer, detect(), cpu)
        self.last_step = 0

    def save(self, step: int) -> None:
        self.last_step = step
        self.snapshots.take(Position(step=step, next_batch=step, loss_scale=LossScale()), self.target)

    def finish(self) -> float:
        self.snapshots.finish()
        return self.snapshots.finished

    def load(self) -> None:
        folder = folder_of(self.target.folder, self.last_step)
        with Reader(folder, verify_together(folder)) as reader:
            restore(self.training.model, self.training.optimizer, reader, lambda files: None)


class Dcp:
    """Synchronous DCP, with its plan cached between saves, and a new folder for each save."""

    def __init__(self, training: Training, folder: Path):
        self.training, self.folder = training, folder / type(self).__name__
        self.planner = DefaultSavePlanner(enable_plan_caching=True)
        self.last_step, self.end = 0, 0.0

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.training.model, self.training.optimizer.inner)
        return {"model": model, "optimizer": optimizer}

    def path(self) -> Path:
        return self.folder / str(self.last_step)

    def save(self, step: int) -> None:
        self.last_step = step
        dcp.save(self.state(), storage_writer=FileSystemWriter(self.path()), planner=self.planner)
        self.end = time.perf_counter()

    def finish(self) -> float:
        return self.end

    def load(self) -> None:
        dcp.load(self.state(), storage_reader=FileSystemReader(self.path()))


class DcpAsync(Dcp):
    def save(self, step: int) -> None:
        self.last_step = step
        # Cached staging buffers (cache_staged_state_dict) need an accelerator.
        writer = FileSystemWriter(self.path())
        self.future: Any = dcp.async_save(
            self.state(), storage_writer=writer, planner=self.planner, process_group=self.group()
        )
        self.future.add_done_callback(self.record_end)

    def group(self) -> dist.ProcessGroup:
        """Separate process group, because its messages are sent from another thread than those of training."""
        if not hasattr(self, "own_group"):
            self.own_group = dist.new_group(backend="gloo")
        return self.own_group

    def record_end(self, _: object) -> None:
        self.end = time.perf_counter()

    def finish(self) -> float:
        self.future.result()
        return self.end


SYSTEMS = {"nothing": Nothing, "Weft": Weft, "nothing again": Nothing, "DCP": Dcp, "DCP async": DcpAsync}
SAVING = ("Weft", "DCP", "DCP async")


def largest(value: float) -> float:
    """Maximum over ranks."""
    shared = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.item()


def turn(training: Training, saver: Saver, index: int, steps: int) -> dict[str, float]:
    """Save once, and continue training."""
    training.step()
    dist.barrier()
    begin, other_threads = time.perf_counter(), time.process_time() - time.thread_time()
    saver.save(index)
    blocked = time.perf_counter() - begin
    dist.barrier()
    first = time.perf_counter()
    for _ in range(steps):
        training.step()
    stepped = time.perf_counter() - first
    written = saver.finish() - begin
    beside = time.process_time() - time.thread_time() - other_threads
    dist.barrier()
    found = {"blocked": blocked, "steps": stepped, "written": written, "beside": beside}
    return {name: largest(seconds) for name, seconds in found.items()}


def run_rank(rank: int, port: int, folder: Path, repeats: int, steps: int, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    training = Training(RANKS)
    for _ in range(2):
        training.step()
    savers: dict[str, Any] = {name: system(training, folder) for name, system in SYSTEMS.items()}
    for name, saver in savers.items():  # buffers and plans are made by the first save
        first = turn(training, saver, 1, 0)
        if rank == 0:
            results.put(("first", name, first))
    for index in range(2, 2 + repeats):
        order = list(savers.items())
        for name, saver in order[index % len(order) :] + order[: index % len(order)]:
            if rank == 0:
                os.sync()  # else the next turn would write the page cache of the last one
            measured = turn(training, saver, index, steps)
            if rank == 0:
                results.put(("turn", name, measured))
    for name in SAVING * 2:
        saver = savers[name]
        dist.barrier()
        begin = time.perf_counter()
        saver.load()
        seconds = largest(time.perf_counter() - begin)
        if rank == 0:
            results.put(("load", name, {"seconds": seconds}))
    dist.barrier()
    if rank == 0:
        results.put(("end", "", {}))
    dist.barrier()
    os._exit(0)


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of one save of each system."""
    kinds = {"Weft": "weft", "DCP": "Dcp", "DCP async": "DcpAsync"}
    last = {name: max((folder / kind).iterdir(), key=lambda path: path.stat().st_mtime) for name, kind in kinds.items()}
    return {name: sum(path.stat().st_size for path in saved.iterdir()) for name, saved in last.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="folder for the checkpoints; default: a temporary folder")
    chosen = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
    context = torch.multiprocessing.get_context("spawn")
    results, port = context.Queue(), 20_000 + os.getpid() % 20_000
    with TemporaryDirectory(dir=chosen.folder) as folder:
        arguments = (port, Path(folder), chosen.repeats, chosen.steps, results)
        ranks = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        firsts: dict[str, float] = {}
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in SYSTEMS}
        loads: dict[str, list[float]] = {name: [] for name in SYSTEMS}
        while (result := results.get(timeout=300))[0] != "end":
            kind, name, found = result
            if kind == "first":
                firsts[name] = found["blocked"]
            elif kind == "turn":
                turns[name].append(found)
            else:
                loads[name].append(found["seconds"])
        bytes_of = sizes(Path(folder))
        for process in ranks:
            process.join()
    print_table(chosen.steps, firsts, turns, loads, bytes_of)
    sys.exit(failures(turns))


def slow_downs(turns: dict[str, list[dict[str, float]]], name: str) -> list[float]:
    """Slow-down of each turn, relative to the median turn without a save, which is less noisy than a pair of turns."""
    alone = statistics.median(found["steps"] for found in turns["nothing"] + turns["nothing again"])
    return [found["steps"] / alone - 1 for found in turns[name]]


def print_table(
    steps: int,
    firsts: dict[str, float],
    turns: dict[str, list[dict[str, float]]],
    loads: dict[str, list[float]],
    bytes_of: dict[str, int],
) -> None:
    alone = statistics.median(found["steps"] for found in turns["nothing"] + turns["nothing again"])
    table = Table(title=f"{RANKS} ranks; {steps} steps take {alone:.1f} s without a save")
    for column in (
        "",
        "MiB",
        "blocked, s",
        "first save, s",
        f"slow-down of {steps} steps",
        "CPU of other threads, s",
        "on disk after, s",
        "load, s",
    ):
        table.add_column(column, justify="left" if not column else "right")
    for name in SYSTEMS:
        slower = spread([100 * share for share in slow_downs(turns, name)], ".1f") + " %"
        saved = (
            []
            if name not in SAVING
            else [
                f"{bytes_of[name] / 2**20:.0f}",
                spread([found["blocked"] for found in turns[name]], ".3f"),
                f"{firsts[name]:.3f}",
            ]
        )
        written = (
            []
            if name not in SAVING
            else [
                spread([found["beside"] for found in turns[name]], ".2f"),
                spread([found["written"] for found in turns[name]], ".2f"),
                f"{min(loads[name]):.2f}",
            ]
        )
        table.add_row(name, *(saved or [""] * 3), slower, *written)
    Console(width=150).print(table)


def failures(turns: dict[str, list[dict[str, float]]]) -> str | None:
    """Message about goals that are missed; None if there are none."""
    blocked = {name: statistics.median(found["blocked"] for found in turns[name]) for name in SYSTEMS}
    slower = statistics.median(slow_downs(turns, "Weft"))
    problems = []
    if blocked["Weft"] > blocked["DCP async"]:
        problems.append(f"Weft blocks {blocked['Weft']:.3f} s, DCP async {blocked['DCP async']:.3f} s")
    if slower > 0.02:
        problems.append(f"training is {slower:.1%} slower while a checkpoint is written")
    return "; ".join(problems) or None


if __name__ == "__main__":
    main()
