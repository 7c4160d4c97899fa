"""Cost of a checkpoint of 8 billion parameters for training on one accelerator.

    python benchmarks/gpu/checkpoint.py [--folder DIR] [--blocks 32]     # about five minutes on an H100

A model of the shape of Llama-3-8B is trained on one device, with weights and moments in bf16 so that they fit in 80 GB. In
turn, some steps run without a save, and some with a snapshot before the first of them. A snapshot copies the state into pinned
host memory on its own stream, overlapped with the next forward and backward; the update waits for it. Printed are

- blocked: the seconds of the call, plus the extra time of its first step over a step of the turn before;
- the slow-down of the following steps, while the file is digested and written;
- the bytes.

Needs host memory for the state (48 GB, pinned) and the same space on disk.
"""

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from foundation import random_batch

from weft.anatomy.build import build_on_meta
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.folders import folder_of
from weft.checkpoint.manifest import Position, verify_folder
from weft.checkpoint.model_config import read_config
from weft.checkpoint.snapshot import Snapshots, Target
from weft.device.detect import detect
from weft.device.device import Device
from weft.job import Checkpoint, Job, Model, Optimizer
from weft.launch.rank_entry import connect
from weft.parallel.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import allocate
from weft.plan import Parallel, Plan, Precision
from weft.precision.dtypes import DTYPES
from weft.precision.scaling import LossScale
from weft.topology.mesh import build_mesh
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
SEQ_LEN, STEPS, REPEATS = 2048, 12, 3


def seconds_of_steps(device: Device, step: Any, count: int) -> list[float]:
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        device.synchronize()
        found.append(time.perf_counter() - begin)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder for the checkpoints; default: a temporary folder")
    parser.add_argument("--blocks", type=int, default=32, help="blocks of the model; fewer for a smaller device")
    chosen = parser.parse_args()
    device = detect()
    _, world_size, local_rank = connect(device)
    torch_device = device.torch_device(local_rank)
    precision = Precision(param_dtype="bf16", update="bf16", reduce_dtype="bf16")
    plan = Plan(parallel=Parallel(zero=0), precision=precision).resolve(world_size)
    mesh = build_mesh(plan, torch_device.type, world_size)
    source = Model(config={**LLAMA_8B, "num_hidden_layers": chosen.blocks})
    model: Any = build_on_meta(read_config(source), DTYPES[precision.update])
    anatomy = read_anatomy(model)
    parallelize(model, plan, mesh)
    allocate(model, torch_device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
        for name, buffer in model.named_buffers():
            buffer.fill_(1.0 if "inv_freq" in name else 0.0)
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, Optimizer(lr=1e-6)), model, device)
    batch = [random_batch(LLAMA_8B["vocab_size"], 1, SEQ_LEN, torch_device, 0)]  # type: ignore[arg-type]

    def step() -> None:
        train_step(model, optimizer, batch, 1.0)

    job = Job(model=source, plan=plan, checkpoint=Checkpoint(every=1))
    snapshots = Snapshots(job, model, optimizer, device, torch_device)
    seconds_of_steps(device, step, 3)
    blocked, slower = [], []
    with TemporaryDirectory(dir=chosen.folder) as folder:
        target = Target(Path(folder), True, keep=1, keep_hours=0)
        for index in range(REPEATS + 1):
            alone = statistics.median(seconds_of_steps(device, step, STEPS))
            begin = time.perf_counter()
            snapshots.take(Position(step=index, next_batch=index, loss_scale=LossScale()), target)
            call = time.perf_counter() - begin
            first, *later = seconds_of_steps(device, step, STEPS)
            snapshots.finish()
            print(
                f"snapshot {index}: call {call:.3f} s, first step {first:.3f} s, later steps {statistics.median(later):.3f} s"
                f" ({alone:.3f} without a save), on disk after {snapshots.finished - begin:.1f} s",
                flush=True,
            )
            if index:  # the first snapshot allocates the buffer
                blocked.append(call + first - alone)
                slower.append(statistics.median(later) / alone - 1)
        size = verify_folder(folder_of(Path(folder), REPEATS)).bytes
    print(
        f"{anatomy.parameters / 1e9:.2f} billion parameters in bf16: {size / 2**30:.1f} GiB; blocked "
        f"{statistics.median(blocked):.3f} s ({min(blocked):.3f}-{max(blocked):.3f}), steps while it is written "
        f"{statistics.median(slower):+.1%} ({min(slower):+.1%} to {max(slower):+.1%}); goals: 1 s, 2 %"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
