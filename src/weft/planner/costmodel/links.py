"""Measures what collectives take among ranks of this host, as training makes them; each rank is `python -m weft.planner.costmodel.links`.

    wire = measure_links(ranks=2)

The figures are those of `weft.planner.costmodel.network`: seconds = latency + (bytes + sqrt(bytes x ramp)) / bandwidth.
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
from weft.device.device import detect
from weft.launch.launcher import connect, launch, rank_main
from weft.plan import Parallel, Plan
from weft.planner.costmodel.hardware import Wire
from weft.topology.mesh import build_mesh

RESULT = "seconds.json"
SIZES = tuple(2**power for power in range(10, 26, 3))  # bytes of the gathered tensor
WORK = 384  # rows and columns of a product between two messages
SECONDS, LEAST_ROUNDS, MOST_ROUNDS, REPEATS = 0.3, 5, 60, 5  # of each measurement, whose median counts


def measure_links(ranks: int) -> Wire:
    """The link between so many ranks of this host, as collectives find it.

    Raises:
        WeftError: a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="weft-links-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "weft.planner.costmodel.links", str(folder)]
        launch(command, ranks=ranks, log_dir=folder / "logs", warm=detect().supports_fork)
        return fit([tuple(row) for row in json.loads((folder / RESULT).read_text(encoding="utf-8"))], ranks)


def fit(rows: list[tuple[float, float]], ranks: int) -> Wire:
    """Latency, bandwidth and ramp by least squares of relative errors.

    Args:
        rows: (bytes that a rank sends, seconds).
        ranks: in the ring.
    """
    sizes, seconds = np.array(rows, dtype=float).T
    terms = np.stack([np.ones_like(sizes), sizes, np.sqrt(sizes)], 1) / seconds[:, None]
    latency, slope, root = np.linalg.lstsq(terms, np.ones_like(sizes))[0]
    if root < 0 or slope <= 0 or latency <= 0:
        root, (latency, slope) = 0.0, np.linalg.lstsq(terms[:, :2], np.ones_like(sizes))[0]
    latency, slope = max(latency, 0.0), max(slope, 1e-12)  # a terabyte a second: faster than any link
    return Wire(float(latency) / max(1, ranks - 1), float(1 / slope), float((root / slope) ** 2))


def time_collectives() -> list[tuple[float, float]]:
    """(Bytes that a rank sends, seconds) of all-gathers and reduce-scatters of some sizes. Every rank calls it.

    Ranks compute before each message, as in training: who waits for it may have to be woken, or has lost its core. What they
    take with messages, less what they take without, is that of the messages.
    """
    device = detect()
    _, world_size, local_rank = connect(device)
    torch.set_num_threads(1)
    place = device.torch_device(local_rank)
    plan = Plan(parallel=Parallel(tp=world_size, dp_shard=1))
    group = build_mesh(plan, place.type, world_size).get_group("tp")
    matrix = torch.ones(WORK, WORK, device=place)

    def rounds(number: int, part: Tensor, whole: Tensor, send: bool) -> float:
        """Seconds of the slowest rank."""
        dist.barrier(group)
        begin = time.perf_counter()
        for _ in range(number):
            matrix @ matrix
            if send:
                all_gather_single(whole, part, group)
            matrix @ matrix
            if send:
                reduce_scatter_single(part, whole, dist.ReduceOp.SUM, group)
        device.synchronize()
        slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=place)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    rows = []
    for size in SIZES:
        numbers = math.ceil(size / 4 / world_size)
        part = torch.zeros(numbers, device=place)
        whole = torch.zeros(numbers * world_size, device=place)
        once = rounds(LEAST_ROUNDS, part, whole, True) / LEAST_ROUNDS
        number = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(SECONDS / once)))
        more = [rounds(number, part, whole, True) - rounds(number, part, whole, False) for _ in range(REPEATS)]
        taken = max(1e-6, statistics.median(more) / (2 * number))
        rows.append((whole.nbytes * (world_size - 1) / world_size, taken))
    return rows


def main() -> None:
    """Of a rank: measure, and leave the result in the folder."""
    rows = time_collectives()
    if int(os.environ.get("RANK", "0")) == 0:
        (Path(sys.argv[1]) / RESULT).write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(main)
