"""Ranks of `weft doctor`: a short matmul and copy on every device at the same time, then the links between all ranks.

The launcher starts `python -m weft.observe.doctor.rank FOLDER SECONDS`.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.link_benchmark import measure
from weft.comm.objects import all_gather_json
from weft.device.detect import detect
from weft.device.device import Device
from weft.launch.rank_entry import connect, rank_main

RESULT = "ranks.json"
WINDOWS, WINDOW_SECONDS = 5, 0.2
CPU_SIZE, DEVICE_SIZE = 384, 8192  # of a square matmul
CPU_COPY, DEVICE_COPY = 2**24, 2**30  # bytes


def measure_rates(device: Device, torch_device: torch.device) -> dict[str, float]:
    """Rates of this rank while all ranks measure: matmul in FLOP/s, copy and upload in bytes/s.

    A rate is the median of five windows of 0.2 s, so that a rank that is stopped now and then has a low rate.
    """
    on_cpu = device.type == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16 if device.supports("bf16") else torch.float16
    size, count = (CPU_SIZE, CPU_COPY) if on_cpu else (DEVICE_SIZE, DEVICE_COPY)
    a = torch.ones(size, size, dtype=dtype, device=torch_device)
    product = torch.empty_like(a)
    source, target = (torch.ones(count, dtype=torch.uint8, device=torch_device) for _ in range(2))
    rates = {
        "matmul": 2 * size**3 * _calls_per_second(device, lambda: torch.mm(a, a, out=product)),
        "copy": count * _calls_per_second(device, lambda: target.copy_(source)),
    }
    if not on_cpu:
        pinned = torch.ones(count // 4, dtype=torch.uint8).pin_memory()
        part = target[: count // 4]
        rates["upload"] = count // 4 * _calls_per_second(device, lambda: part.copy_(pinned, non_blocking=True))
    return rates


def _calls_per_second(device: Device, work: Callable[[], Any]) -> float:
    """Median over the windows of the calls per second, after a warm-up and a barrier."""
    work()
    device.synchronize()
    dist.barrier()
    rates = []
    for _ in range(WINDOWS):
        begin, calls = time.perf_counter(), 0
        while (passed := time.perf_counter() - begin) < WINDOW_SECONDS or not calls:
            work()
            device.synchronize()
            calls += 1
        rates.append(calls / passed)
    return median(rates)


def main() -> None:
    """Measure, and write the results of all ranks for the launcher of this host."""
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    device = detect()
    rank, world_size, local_rank = connect(device)
    torch_device = device.torch_device(local_rank)
    ranks = all_gather_json({"local_rank": local_rank, "rates": measure_rates(device, torch_device)})
    links = None
    if world_size > 1 and seconds > 0:
        links = measure(device, torch_device, seconds=seconds)[0].model_dump()
    if rank == 0:
        (folder / RESULT).write_text(json.dumps({"ranks": ranks, "links": links}), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(main)
