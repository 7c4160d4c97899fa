"""Time, memory and traffic of the update of each optimizer, for matrices that ZeRO cuts over ranks.

    python benchmarks/optimizers.py                 # two ranks, one thread each; a minute on two free cores
    python benchmarks/optimizers.py --ranks 4 --blocks 2

The matrices are those of the blocks of a Llama, as DTensors that are cut by rows; gradients are random. Every repeat runs all
optimizers, one after the other. "PyTorch" is `torch.optim.Muon` on the same DTensors: each rank gathers and orthogonalizes
every matrix. "Clip pass" multiplies the gradients before the update, "clip inside" lets torch's fused update multiply them.
The share of the peak is that of the orthogonalization's floating-point operations, at the rate of a matmul of the same dtype
and number of threads on this machine. CPU time is that of the process of rank 0, which other programs on the machine change
less.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from peers.figures import choose, spread
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn

from weft.comm.recorder import Recorder
from weft.device.cpu import Cpu, matmul_rate
from weft.memory.storages import plain_parts
from weft.optimizers.adafactor import Adafactor
from weft.optimizers.muon import ITERATIONS, Muon
from weft.optimizers.one_pass import divisor
from weft.parallel.data.gradients import scale_gradients

HIDDEN, MLP, KEYS = 512, 1408, 128
SHAPES = (
    (HIDDEN, HIDDEN),
    (KEYS, HIDDEN),
    (KEYS, HIDDEN),
    (HIDDEN, HIDDEN),
    (MLP, HIDDEN),
    (MLP, HIDDEN),
    (HIDDEN, MLP),
)


def make_optimizers(dtype: torch.dtype) -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    return {
        "AdamW": partial(torch.optim.AdamW, lr=1e-3, fused=True),
        "AdamW + clip pass": partial(torch.optim.AdamW, lr=1e-3, fused=True),
        "AdamW + clip inside": partial(torch.optim.AdamW, lr=1e-3, fused=True),
        "Muon": lambda groups: Muon([{"params": groups, "orthogonalize": True}], lr=1e-3, dtype=dtype),
        "Muon of PyTorch, bf16": partial(torch.optim.Muon, lr=1e-3),
        "Adafactor": lambda groups: Adafactor([{"params": groups}], lr=1e-3),
    }


def update(name: str, optimizer: torch.optim.Optimizer) -> None:
    """One update; gradients keep their size over the repeats."""
    if name == "AdamW + clip pass":
        scale_gradients([p for group in optimizer.param_groups for p in group["params"]], 0.999)
    with divisor(optimizer, 0.999 if name == "AdamW + clip inside" else 1.0):
        optimizer.step()


def muon_flops(blocks: int) -> float:
    """Floating-point operations to orthogonalize all matrices once."""
    sides = [(min(shape), max(shape)) for shape in SHAPES]
    return blocks * sum(ITERATIONS * (4 * small**2 * large + 2 * small**3) for small, large in sides)


def measure(rank: int, ranks: int, blocks: int, repeats: int, names: list[str], dtype: torch.dtype, port: int) -> None:
    """Measure on one rank; rank 0 prints the table."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    mesh, generator = init_device_mesh("cpu", (ranks,)), torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for _ in range(blocks) for shape in SHAPES]

    def shards() -> list[torch.nn.Parameter]:
        parameters = [torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])) for weight in weights]
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        return parameters

    optimizers = {name: make(shards()) for name, make in make_optimizers(dtype).items() if name in names}
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    sent = {}
    for repeat in range(repeats + 1):
        for name, optimizer in optimizers.items():
            dist.barrier()
            began, cpu_began = time.perf_counter(), time.process_time()
            if repeat:
                update(name, optimizer)
            else:
                with Recorder() as recorder:
                    update(name, optimizer)  # makes the states
                sent[name] = recorder.total_bytes
            cpu_seconds[name] += [time.process_time() - cpu_began] if repeat else []
            taken = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            seconds[name] += [taken.item()] if repeat else []
    rate = matmul_rate(dtype, HIDDEN, 1)
    if rank == 0:
        print_table(optimizers, seconds, cpu_seconds, sent, muon_flops(blocks) / ranks / rate, dtype, ranks)
    dist.barrier()
    dist.destroy_process_group()


def print_table(
    optimizers: dict[str, torch.optim.Optimizer],
    seconds: dict[str, list[float]],
    cpu_seconds: dict[str, list[float]],
    sent: dict[str, int],
    least: float,
    dtype: torch.dtype,
    ranks: int,
) -> None:
    """Print one row for each optimizer; `least` is the time of Muon's matmuls at the peak."""
    title = f"{Cpu().name}: {Cpu().instruction_set}; {ranks} ranks, orthogonalization in {dtype}"
    table = Table(title=title, title_justify="left")
    for column in (
        "optimizer",
        "time / AdamW",
        "CPU time / AdamW",
        "ms",
        "share of the matmul peak",
        "states, MiB a rank",
        "sent, MiB a rank",
    ):
        table.add_column(column, justify="left" if column == "optimizer" else "right")
    first = next(iter(seconds))
    for name, optimizer in optimizers.items():
        own = seconds[name]
        ratios = (
            spread([a / b for a, b in zip(taken[name], taken[first], strict=True)], ".2f")
            for taken in (seconds, cpu_seconds)
        )
        values = [value for state in optimizer.state.values() for value in state.values()]
        states = sum(part.nbytes for value in values for part in plain_parts(value))
        share = f"{least / median(own):.0%}" if name == "Muon" else ""
        through_dtensor = name == "Muon of PyTorch, bf16"  # whose messages the recorder does not see
        message = "" if through_dtensor else f"{sent[name] / 2**20:.1f}"
        table.add_row(name, *ratios, f"{median(own) * 1e3:.0f}", share, f"{states / 2**20:.1f}", message)
    Console(width=128).print(table)


def main(
    ranks: Annotated[int, typer.Option(help="Ranks, each with one thread.")] = 2,
    blocks: Annotated[int, typer.Option(help="Blocks of the model.")] = 4,
    repeats: Annotated[int, typer.Option(help="Measured updates.")] = 7,
    optimizers: Annotated[str, typer.Option(help="Optimizers, with commas; the first is the base.")] = "",
    port: Annotated[int, typer.Option(help="Port of the ranks.")] = 29533,
) -> None:
    """Measure the update of each optimizer."""
    dtype = torch.bfloat16 if Cpu().supports("bf16") else torch.float32
    known = list(make_optimizers(dtype))
    chosen = choose("--optimizers", optimizers, known) if optimizers else known
    spawn(measure, (ranks, blocks, repeats, chosen, dtype, port), ranks)


if __name__ == "__main__":
    typer.run(main)
