"""Benchmark of collectives between ranks of this host, called as in training.

    wire = measure_links(ranks=2)

Each rank runs `python -m weft.planner.costmodel.links`. The measured times are fitted to the link model of
`weft.planner.costmodel.network`: seconds = latency + (bytes + sqrt(bytes x ramp)) / bandwidth.
"""

import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from weft.backends.hierarchical import all_gather_single, reduce_scatter_single
from weft.comm.collectives import all_reduce_group
from weft.device.detect import detect
from weft.launch.launcher import launch
from weft.launch.rank_entry import connect, rank_main
from weft.plan import Parallel, Plan
from weft.planner.costmodel.hardware import LinkModel
from weft.topology.mesh import build_mesh

RESULT = "seconds.json"
SIZES = tuple(2**power for power in range(10, 26, 3))  # bytes of the gathered tensor
WORK = 384  # rows and columns of the matmul between two collectives
SECONDS, LEAST_ROUNDS, MOST_ROUNDS, REPEATS = 0.3, 5, 60, 5  # per measurement; the median of the repeats is used


def measure_links(ranks: int) -> LinkModel:
    """Measure the link between ranks of this host with collectives.

    Args:
        ranks: number of ranks to start on this host.

    Raises:
        WeftError: a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="weft-links-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "weft.planner.costmodel.links", str(folder)]
        launch(command, ranks=ranks, log_dir=folder / "logs", use_forkserver=detect().supports_fork)
        return fit([tuple(row) for row in json.loads((folder / RESULT).read_text(encoding="utf-8"))], ranks)


def fit(rows: list[tuple[float, float]], ranks: int) -> LinkModel:
    """Fit latency, bandwidth and ramp by least squares of the relative errors.

    Args:
        rows: (bytes sent per rank, seconds) per measurement.
        ranks: number of ranks in the ring.
    """
    sizes, seconds = np.array(rows, dtype=float).T
    terms = np.stack([np.ones_like(sizes), sizes, np.sqrt(sizes)], 1) / seconds[:, None]
    latency, slope, root = np.linalg.lstsq(terms, np.ones_like(sizes))[0]
    if root < 0 or slope <= 0 or latency <= 0:
        root, (latency, slope) = 0.0, np.linalg.lstsq(terms[:, :2], np.ones_like(sizes))[0]
    latency, slope = max(latency, 0.0), max(slope, 1e-12)  # 1 TB/s, faster than any link
    return LinkModel(float(latency) / max(1, ranks - 1), float(1 / slope), float((root / slope) ** 2))


def time_collectives() -> list[tuple[float, float]]:
    """Time all-gathers and reduce-scatters of several sizes; must be called by every rank.

    Ranks compute before each collective, as in training, because a waiting process may have to be woken or may have lost its
    core. The time of the collectives is the time with them minus the time without them.

    Returns:
        (bytes sent per rank, seconds) per size.
    """
    device = detect()
    _, world_size, local_rank = connect(device)
    torch.set_num_threads(1)
    torch_device = device.torch_device(local_rank)
    plan = Plan(parallel=Parallel(tp=world_size))
    group = build_mesh(plan, torch_device.type, world_size).get_group("tp")
    matrix = torch.ones(WORK, WORK, device=torch_device)

    def rounds(count: int, part: Tensor, full: Tensor, send: bool) -> float:
        """Time a number of rounds; returns the seconds of the slowest rank."""
        dist.barrier(group)
        begin = time.perf_counter()
        for _ in range(count):
            matrix @ matrix
            if send:
                all_gather_single(full, part, group)
            matrix @ matrix
            if send:
                reduce_scatter_single(part, full, dist.ReduceOp.SUM, group)
        device.synchronize()
        slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=torch_device)
        return float(all_reduce_group(slowest, None, "max"))

    rows = []
    for size in SIZES:
        num_elements = math.ceil(size / 4 / world_size)
        part = torch.zeros(num_elements, device=torch_device)
        full = torch.zeros(num_elements * world_size, device=torch_device)
        once = rounds(LEAST_ROUNDS, part, full, True) / LEAST_ROUNDS
        count = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(SECONDS / once)))
        more = [rounds(count, part, full, True) - rounds(count, part, full, False) for _ in range(REPEATS)]
        seconds = max(1e-6, statistics.median(more) / (2 * count))
        rows.append((full.nbytes * (world_size - 1) / world_size, seconds))
    return rows


def main() -> None:
    """Entry point of a rank: measure, and let rank 0 write the result file."""
    rows = time_collectives()
    if int(os.environ.get("RANK", "0")) == 0:
        (Path(sys.argv[1]) / RESULT).write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(main)
