"""Energy counters of devices and processors.

RAPL counts the energy of processor packages and memory (files of Linux's powercap), NVML that of a CUDA device since the driver
was loaded. npu-smi reports a power, which is multiplied by the time between two reports.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from weft.device.device import Device

POWERCAP = Path("/sys/class/powercap")
RAPL_DOMAINS = re.compile(r"package-\d+|dram")  # cores and uncore are parts of a package
NPU_SMI_SECONDS = 10.0  # between two reports: one takes about a second of a core


class Meter(Protocol):
    """Counter of energy."""

    source: str
    """Name of the counter."""

    def joules(self) -> float:
        """Joules since the meter was opened."""


class RaplMeter:
    """Energy of the processors and the memory of this host.

    Args:
        folder: powercap folder of the system.

    Raises:
        OSError: there are no counters, or only root may read them.
    """

    source = "RAPL"

    def __init__(self, folder: Path = POWERCAP):
        names = {path.parent: path.read_text().strip() for path in folder.glob("*:*/name")}
        self._domains = [path for path, name in names.items() if RAPL_DOMAINS.fullmatch(name)]
        if not self._domains:
            raise FileNotFoundError(f"no RAPL domain in {folder}")
        self._ranges = [int((path / "max_energy_range_uj").read_text()) for path in self._domains]
        self._last = self._read()
        self._total = 0

    def _read(self) -> list[int]:
        return [int((path / "energy_uj").read_text()) for path in self._domains]

    def joules(self) -> float:
        now = self._read()
        for before, after, largest in zip(self._last, now, self._ranges, strict=True):
            self._total += after - before if after >= before else after - before + largest  # the counter wraps around
        self._last = now
        return self._total / 1e6


class NvmlMeter:
    """Energy of one CUDA device, from Volta on; the counter has a resolution of about 100 ms.

    Args:
        uuid: id of the device, which does not depend on CUDA_VISIBLE_DEVICES.
        nvml: module pynvml (nvidia-ml-py), or a stand-in for it in tests.

    Raises:
        Exception: NVML has no such counter; its errors are classes of their own.
    """

    source = "NVML"

    def __init__(self, uuid: str, nvml: Any):
        nvml.nvmlInit()
        self._nvml, self._handle = nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._start = self._millijoules()

    def _millijoules(self) -> int:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)

    def joules(self) -> float:
        return (self._millijoules() - self._start) / 1e3


class NpuSmiMeter:
    """Energy of one Ascend NPU: the power that npu-smi reports, times the time since the report before.

    The report is read in the background, so that no step waits for it.

    Args:
        start: starts a report.
        clock: seconds.

    Raises:
        OSError: npu-smi is not installed.
        ValueError: it reports no power.
    """

    source = "npu-smi"

    def __init__(self, start: Callable[[], "subprocess.Popen[str]"], clock: Callable[[], float] = time.monotonic):
        self._start, self._clock = start, clock
        self._watts = parse_npu_power(start().communicate()[0])
        self._report: subprocess.Popen[str] | None = None
        self._reported = self._counted = clock()
        self._total = 0.0

    def joules(self) -> float:
        now = self._clock()
        self._total += self._watts * (now - self._counted)
        self._counted = now
        if self._report is not None and self._report.poll() is not None:
            with suppress(ValueError):  # a failed report: the power before it counts on
                self._watts = parse_npu_power(self._report.communicate()[0])
            self._report, self._reported = None, now
        elif self._report is None and now - self._reported >= NPU_SMI_SECONDS:
            self._report = self._start()
        return self._total


def parse_npu_power(text: str) -> float:
    """Power in watts in a report of `npu-smi info -t power`.

    Raises:
        ValueError: the report has no power.
    """
    found = re.search(r"Power(?: Dissipation)?\s*\(W\)\s*:\s*([\d.]+)", text)
    if found is None:
        raise ValueError("npu-smi reports no power")
    return float(found.group(1))


def open_meters(device: Device, local_rank: int, powercap: Path = POWERCAP) -> list[Meter]:
    """Open the energy counters of a rank: those of its accelerator; on the first rank of a host, also those of the host.

    None if its accelerator has no counter: the energy of the host alone is not that of the run.

    Args:
        device: device of the ranks.
        local_rank: rank on this host.
        powercap: powercap folder of the system.
    """
    meters: list[Meter] = []
    if device.type == "cuda":
        with suppress(Exception):  # no pynvml, no NVML, or a device older than Volta
            properties: Any = torch.cuda.get_device_properties(local_rank)
            meters.append(NvmlMeter(f"GPU-{properties.uuid}", import_module("pynvml")))
    elif device.type == "npu":
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").split(",")
        number = visible[local_rank] if local_rank < len(visible) and visible[0] else str(local_rank)
        command = ["npu-smi", "info", "-t", "power", "-i", number, "-c", "0"]
        with suppress(OSError, ValueError):
            meters.append(NpuSmiMeter(lambda: subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
    if local_rank == 0 and (meters or device.type == "cpu"):
        with suppress(OSError, ValueError):
            meters.append(RaplMeter(powercap))
    return meters
