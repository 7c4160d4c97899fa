"""Device of this host as the cost model knows it."""

import os
import sys
from dataclasses import replace

from weft.device.detect import detect
from weft.device.device import Device
from weft.errors import DeviceError
from weft.launch.oom_kills import ControlGroup
from weft.planner.costmodel.hardware import DeviceSpec, find_device, recognise


def memory_of_rank(device: Device, ranks: int) -> float:
    """Bytes that a rank may use; ranks on CPU share the memory of their host, or of their control group.

    Args:
        device: device of this host.
        ranks: ranks on this host.
    """
    if device.type != "cpu":
        return float(device.total_memory_bytes)
    group = ControlGroup.of_this_process()
    limit = group.limit() if group else None
    return min(device.total_memory_bytes, limit or device.total_memory_bytes) / ranks


def local_device(ranks: int, unknown: str = "") -> DeviceSpec:
    """Preset of the device of this host, with its memory and its number of ranks.

    Args:
        ranks: ranks on this host; on CPU they share its memory and its cores.
        unknown: preset whose rates are taken for an accelerator that the planner does not know; empty: none.

    Raises:
        DeviceError: the planner has no preset for the device, and `unknown` is empty.
    """
    detected = detect()
    on_cpu = detected.type == "cpu"
    memory = memory_of_rank(detected, ranks)
    try:
        preset = find_device("CPU") if on_cpu else recognise(detected.name)
    except DeviceError:
        if not unknown:
            raise
        preset = replace(find_device(unknown), name=detected.name)
    cores = (len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1) if on_cpu else 0
    return replace(
        preset,
        cores=cores,
        native_bf16=detected.supports("bf16"),
        grouped_fp8=detected.supports("grouped_matmul"),
        memory=memory,
        per_host=ranks,
    )
