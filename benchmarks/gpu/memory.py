"""Memory saved by each memory option on one accelerator, and its cost in time.

    python benchmarks/gpu/memory.py [--blocks 8] [--seq-len 4096] [--steps 6]     # about six minutes on an H100

A model of the widths of Llama-3-8B, with as many of its blocks as fit the device (8 of 32 by default: 2.8 billion parameters,
45 GB of float32 state), is trained in bfloat16 with float32 master weights, each row in a separate process. Printed are the
peak memory by the device's own count and the median time of a step, as fractions of the first row's. Rows that end in "x 8"
accumulate the gradients of eight micro-batches per step. If torchao is installed, its optimizer with CPU offload is a row too.

Goals: activations offloaded: 15 % of the memory at 2 % of the time; states on the host: 1.2 x the step with 8 micro-batches;
split weights: 1 % of the time.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from foundation import random_batch
from rich.console import Console
from rich.table import Table

from checkpoint import LLAMA_8B
from weft.anatomy.build import build_on_meta
from weft.checkpoint.model_config import read_config
from weft.device.detect import detect
from weft.job import Model, Optimizer
from weft.launch.rank_entry import connect
from weft.parallel.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import allocate
from weft.plan import Memory, Parallel, Plan, Precision
from weft.topology.mesh import build_mesh
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

CHEAP = ("activation", "norm")
ROWS: dict[str, tuple[dict[str, Any], int]] = {
    "whole weights, no offload": ({}, 1),
    "split weights": ({"weights": "split"}, 1),
    "split weights, ties to even": ({"weights": "split_even"}, 1),
    "states of 8 bits": ({"optimizer_state_dtype": "int8"}, 1),
    "backward in fp16": ({"backward": "fp16", "loss_scale": 1024.0}, 1),
    "recompute activation, norm": ({"recompute": CHEAP}, 1),
    "recompute block": ({"recompute": ("block",)}, 1),
    "offload attention": ({"offload": ("attention",)}, 1),
    "offload block": ({"offload": ("block",)}, 1),
    "offload attention, recompute mlp": ({"offload": ("attention",), "recompute": ("mlp",)}, 1),
    "states on the host": ({"optimizer_device": "host"}, 1),
    "no offload x 8": ({}, 8),
    "states on the host x 8": ({"optimizer_device": "host"}, 8),
    "torchao, states on the CPU x 8": ({"torchao": True}, 8),
    "all: split, activation, norm, offload block, states on the host x 8": (
        {"weights": "split", "recompute": CHEAP, "offload": ("block",), "optimizer_device": "host"},
        8,
    ),
}


def run(settings: dict[str, Any], micro_batches: int, blocks: int, seq_len: int, steps: int) -> dict[str, Any]:
    """Run one row; return peak bytes, seconds of each step except the first two, and losses."""
    device = detect()
    _, world_size, local_rank = connect(device)
    torch_device = device.torch_device(local_rank)
    torchao = settings.pop("torchao", False)
    precision = Precision(**{key: settings.pop(key) for key in list(settings) if key in Precision.model_fields})
    plan = Plan(parallel=Parallel(zero=0), precision=precision, memory=Memory(**settings)).resolve(world_size)
    mesh = build_mesh(plan, torch_device.type, world_size)
    source = Model(config={**LLAMA_8B, "num_hidden_layers": blocks})
    model: Any = parallelize(build_on_meta(read_config(source), torch.float32), plan, mesh)
    allocate(model, torch_device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, device=torch_device) * 0.02)
        for name, buffer in model.named_buffers():
            buffer.fill_(1.0 if "inv_freq" in name else 0.0)
    model.train()
    if torchao:
        from torchao.optim import CPUOffloadOptimizer

        optimizer: Any = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, lr=1e-6)
    else:
        optimizer = DistributedOptimizer(build_optimizer(model, Optimizer(lr=1e-6)), model, device)
    batch = [random_batch(LLAMA_8B["vocab_size"], 1, seq_len, torch_device, n) for n in range(micro_batches)]  # type: ignore[arg-type]
    seconds, losses = [], []
    for index in range(steps + 2):
        if index == 2:  # the first step allocates the optimizer's state, the second the pools
            device.reset_peak_memory()
        begin = time.perf_counter()
        losses.append(train_step(model, optimizer, batch, 0.0).loss)
        device.synchronize()
        seconds.append(time.perf_counter() - begin)
    return {"peak": device.peak_memory_bytes(), "seconds": seconds[2:], "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--row", help="run one row in this process, and print it as JSON")
    chosen = parser.parse_args()
    if chosen.row:
        settings, micro_batches = ROWS[chosen.row]
        print(json.dumps(run(dict(settings), micro_batches, chosen.blocks, chosen.seq_len, chosen.steps)))
        return
    sizes = [f"--blocks={chosen.blocks}", f"--seq-len={chosen.seq_len}", f"--steps={chosen.steps}"]
    table = Table("", "peak GiB", "of the first", "step, s", "of its first", "largest difference of a loss")
    firsts: dict[int, dict[str, Any]] = {}
    for name, (_, micro_batches) in ROWS.items():
        done = subprocess.run([sys.executable, __file__, "--row", name, *sizes], capture_output=True, text=True)
        if done.returncode:
            table.add_row(name, "failed:", (done.stderr.strip().splitlines() or ["no message"])[-1][:80])
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        first = firsts.setdefault(micro_batches, found)
        median, base = statistics.median(found["seconds"]), statistics.median(first["seconds"])
        worst = max(abs(value - base) for value, base in zip(found["losses"], first["losses"], strict=True))
        gib, share = f"{found['peak'] / 2**30:.2f}", f"{found['peak'] / first['peak']:.1%}"
        table.add_row(name, gib, share, f"{median:.3f}", f"{median / base:.3f}", f"{worst:.1e}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
