"""Latency of collectives and point-to-point messages of CPU ranks: shared memory beside gloo, taking turns in one run.

python benchmarks/cpu_collectives.py [--ranks 2] [--repeats 30]
"""

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from weft.backends.hierarchical import register_backend

SIZES = (64, 2**16, 2**20, 2**24)  # bytes of the full tensor
STREAM = 8  # messages in one direction


def operations(count: int, rank: int, ranks: int) -> dict[str, Callable[[Any], object]]:
    """Collectives on a full tensor of `count` elements, and messages of ranks 0 and 1, as functions of the group."""
    full, other, share = torch.ones(count), torch.empty(count), torch.ones(count // ranks)
    return {
        "all_reduce": lambda group: dist.all_reduce(full.zero_(), group=group),
        "all_gather": lambda group: dist.all_gather_into_tensor(full, share, group),
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(share, full.zero_(), group=group),
        "all_to_all": lambda group: dist.all_to_all_single(other, full, group=group),
        f"{STREAM} messages, 1 reply": lambda group: converse(full, other, STREAM, rank, group),
        "ping-pong": lambda group: converse(full, other, 1, rank, group),
    }


def converse(full: Tensor, other: Tensor, messages: int, rank: int, group: Any) -> None:
    """Send messages from rank 0 to rank 1, which replies with the full tensor to one message, or one element to several."""
    reply = slice(None) if messages == 1 else slice(1)
    if rank == 0:
        sends = [dist.isend(full, group=group, group_dst=1) for _ in range(messages)]
        dist.recv(other[reply], group=group, group_src=1)
        for send in sends:
            send.wait()
    elif rank == 1:
        for receive in [dist.irecv(other, group=group, group_src=0) for _ in range(messages)]:
            receive.wait()
        dist.send(full[reply], group=group, group_dst=0)


def measure(rank: int, ranks: int, repeats: int) -> None:
    """Measure on one rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    groups = {"shared memory": dist.new_group(backend=register_backend()), "gloo": dist.group.WORLD}
    table = Table("operation", "bytes", *(f"{name}, us: median (min-max)" for name in groups), "gloo / shared memory")
    for size in SIZES:
        for name, run in operations(size // 4, rank, ranks).items():
            times: dict[str, list[float]] = {group: [] for group in groups}
            for _ in range(repeats + 3):
                for group, handle in groups.items():
                    start = time.perf_counter()
                    run(handle)
                    times[group].append((time.perf_counter() - start) * 1e6)
            kept = {group: values[3:] for group, values in times.items()}
            cells = [f"{median(values):.0f} ({min(values):.0f}-{max(values):.0f})" for values in kept.values()]
            table.add_row(name, str(size), *cells, f"{median(kept['gloo']) / median(kept['shared memory']):.1f}")
    if rank == 0:
        Console(width=130).print(table)
    dist.barrier()
    os._exit(0)


def main(
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    repeats: Annotated[int, typer.Option(min=1)] = 30,
) -> None:
    """Start the ranks on loopback and print the table."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    spawn(measure, (ranks, repeats), nprocs=ranks)


if __name__ == "__main__":
    typer.run(main)
