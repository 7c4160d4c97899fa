"""Times of flat collectives on emulated hosts, beside predictions from the measured topology.

python -m benchmarks.collective_times [--hosts 2] [--ranks 2] [--rate 100000000]      # as root, in the root of the repository
"""

import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from tests.lab.hosts import hosts as emulated_hosts

from weft.comm.collectives import all_gather_rows, exchange, gather_dim, reduce_scatter_dim
from weft.comm.link_benchmark import measure
from weft.device.detect import detect
from weft.launch.rank_entry import connect
from weft.topology.collective_time import Operation, collective_times
from weft.topology.measurement import to_topology

SIZES = (2**16, 2**20, 2**22)  # bytes of the full tensor
REPEATS = 7


def operations(count: int, ranks: int) -> dict[Operation, Callable[[], object]]:
    """Collectives by name, on a full tensor of `count` float32 elements."""
    world = dist.group.WORLD
    assert world is not None
    full, share = torch.zeros(count), torch.zeros(count // ranks)
    return {
        "all_reduce": lambda: dist.all_reduce(full),
        "all_gather": lambda: gather_dim(share, world, 0),
        "reduce_scatter": lambda: reduce_scatter_dim(full, world, 0),
        "all_to_all": lambda: exchange(full, world),
    }


def run_rank() -> None:
    """Measure the links, then the collectives; rank 0 prints."""
    device = detect()
    rank, ranks, _ = connect(device)
    topology = to_topology(measure(device, torch.device("cpu"))[0])
    table = Table("operation", "bytes", "measured, ms: median (min-max)", "model, ms", "measured / model")
    for size in SIZES:
        for name, run in operations(size // 4, ranks).items():
            seconds = [all_gather_rows(seconds_of(run), ranks).max().item() for _ in range(REPEATS)]
            model = collective_times(topology, name, size, range(ranks)).flat
            center, low, high = (value * 1e3 for value in (median(seconds), min(seconds), max(seconds)))
            cells = f"{center:.1f} ({low:.1f}-{high:.1f})", f"{model * 1e3:.1f}", f"{center / model / 1e3:.2f}"
            table.add_row(name, f"{size:,}", *cells)
    if rank == 0:
        console = Console(width=100)
        console.print("links:", "; ".join(map(str, topology.links)), highlight=False)
        console.print(table)


def seconds_of(run: Callable[[], object]) -> torch.Tensor:
    """Seconds of one run, [1]."""
    dist.barrier()
    begin = time.perf_counter()
    run()
    return torch.tensor([time.perf_counter() - begin])


def main(
    hosts: Annotated[int, typer.Option(help="Number of emulated hosts.")] = 2,
    ranks: Annotated[int, typer.Option(help="Ranks per host.")] = 2,
    rate: Annotated[int, typer.Option(help="Bits per second of each host's link.")] = 100_000_000,
) -> None:
    """Start the ranks."""
    with emulated_hosts(hosts, rate) as emulated:
        started = []
        for host_index, host in enumerate(emulated):
            for local in range(ranks):
                rank = {"RANK": host_index * ranks + local, "WORLD_SIZE": hosts * ranks, "LOCAL_RANK": local}
                rendezvous = {
                    "MASTER_ADDR": emulated[0].address,
                    "MASTER_PORT": "29500",
                    "GLOO_SOCKET_IFNAME": host.interface,
                }
                environment = os.environ | rendezvous | {name: str(value) for name, value in rank.items()}
                started.append(host.start([sys.executable, "-m", "benchmarks.collective_times"], env=environment))
        for process in started:
            process.wait()


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank()
        os._exit(0)  # threads of gloo outlive the interpreter
    typer.run(main)
