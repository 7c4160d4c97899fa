"""The one place that knows which devices exist: cpu, cuda and npu behind one small interface, over torch.accelerator.

Nothing is asked of an accelerator before it is needed: `detect` and `count` leave it untouched, so that a launcher can
call them and still hand the whole device to its ranks.
"""

import ctypes
import importlib
import importlib.util
import os
import platform
import re
import resource
import sys
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

Feature = Literal["bf16", "fp16", "fp64", "grouped_matmul", "float8"]

# Process group back end of each accelerator. Other accelerators of torch have none that we know, and count as cpu.
COLLECTIVES = {"cuda": "nccl", "npu": "hccl"}

RATE_DTYPES = (torch.float32, torch.bfloat16)  # fp16 and fp64 are faster than both on no processor
PROBE_SIZE, PROBE_SECONDS = 512, 0.05
EMULATION_SIZE = 128  # of a matmul without native instructions: 10 ms at 0.4 GFLOP/s
NATIVE_GAIN = 1.25  # native bf16 is 2 to 16 times faster than fp32, emulated bf16 0.01 to 0.8 times

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of malloc.h
TOP_PAD_BYTES = 2**26
COMPILED_KERNELS = "8192"


class Device(ABC):
    """What ranks of this host compute on. Make one with `detect`."""

    type: str
    """cpu, cuda or npu."""
    backend: str
    """For `init_process_group`; on accelerators with gloo beside, so that CPU tensors can travel too."""
    count: int
    """Devices of this host; the cpu counts as one, which any number of ranks share."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Model name, as the system or the vendor's library gives it."""

    @property
    @abstractmethod
    def total_memory_bytes(self) -> int:
        """Memory of one device; on cpu that of the host."""

    @property
    @abstractmethod
    def memory_bandwidth(self) -> float | None:
        """Published bytes/s between one device and its memory; None if we have no figure."""

    @abstractmethod
    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Peak dense matmul rate in FLOP/s of one device; None if it is not known.

        On accelerators it is the published peak in this dtype. On cpu it is measured, for a tenth of a second, with the
        threads of this process: the best rate that any dtype reaches, since emulated dtypes compute in another one.
        """

    @property
    @abstractmethod
    def instruction_set(self) -> str:
        """Instructions that matmuls use, in words; empty if that says nothing beyond the name."""

    @property
    def supports_fork(self) -> bool:
        """Whether ranks may be forks of a process that has imported what they need; not if an import may touch a device."""
        return False

    @abstractmethod
    def supports(self, feature: Feature) -> bool:
        """Whether the device computes this natively."""

    @property
    def emulates(self) -> bool:
        """Whether dtypes that `supports` denies still compute, slowly."""
        return False

    @abstractmethod
    def torch_device(self, local_rank: int) -> torch.device:
        """Device of the rank with this number on the host."""

    @abstractmethod
    def use(self, local_rank: int) -> None:
        """Make that device the current one of this process."""

    @abstractmethod
    def stream(self) -> Any:
        """A new stream on the current device: a context manager with the methods of `torch.Stream`."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The stream that work is issued on now."""

    @abstractmethod
    def event(self) -> Any:
        """A new event that takes the time, with the methods of `torch.Event`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the current device has done all work."""

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes of live tensors on the current device; on cpu the resident set of the process."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Largest `allocated_bytes` since `reset_peak_memory`; on cpu since the start of the process."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start the peak anew. The system has no such call for a process, so on cpu it stays."""


def detect(torch_module: Any = torch) -> Device:
    """The accelerator that torch finds on this host, else the cpu.

    Args:
        torch_module: what is asked instead of torch; tests pass a stand-in.
    """
    if importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")  # makes npu known to torch
    accelerator = torch_module.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type not in COLLECTIVES:
        return Cpu()
    return Accelerator(accelerator.type, torch_module)


class Cpu(Device):
    """The host's processor. Work is done when a call returns, so streams and events order nothing."""

    type = "cpu"
    backend = "gloo"
    count = 1
    memory_bandwidth = None

    @cached_property
    def name(self) -> str:
        info = Path("/proc/cpuinfo")
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
        return found.group(1) if found else platform.processor() or platform.machine()

    @property
    def total_memory_bytes(self) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        if not dtype.is_floating_point or dtype.itemsize < 2:
            return None
        known = [dtype for dtype in RATE_DTYPES if dtype != torch.bfloat16 or self.supports("bf16")]
        return max(matmul_rate(dtype, PROBE_SIZE, torch.get_num_threads()) for dtype in known)

    @property
    def instruction_set(self) -> str:
        parts = [torch.backends.cpu.get_cpu_capability()]
        parts += ["AMX"] if torch.cpu._is_amx_tile_supported() else []
        return f"{' + '.join(parts)}, {'native' if self.supports('bf16') else 'no native'} bf16"

    @property
    def supports_fork(self) -> bool:
        return sys.platform == "linux"

    def supports(self, feature: Feature) -> bool:
        if feature == "bf16":
            return self._native_bf16
        if feature == "fp16":
            return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported()
        return feature != "float8"

    @cached_property
    def _native_bf16(self) -> bool:
        """Whether bf16 matmuls are faster than fp32 matmuls on one thread.

        That torch's oneDNN takes bf16 is not enough: without bf16 instructions it converts to fp32 in every matmul. One
        thread, because a process that has computed on several cannot be forked.
        """
        if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            return False
        return matmul_rate(torch.bfloat16, PROBE_SIZE, 1) > NATIVE_GAIN * matmul_rate(torch.float32, PROBE_SIZE, 1)

    @property
    def emulates(self) -> bool:
        return True

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def use(self, local_rank: int) -> None:
        """Let the C library keep what is freed: large tensors of every step else come as new pages that fault one by one.

        And let oneDNN keep the kernels that it compiles for each shape: experts get another number of rows at each call.
        """
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", COMPILED_KERNELS)  # read at its first call
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc
        if mallopt is not None:
            mallopt(M_MMAP_MAX, 0)
            mallopt(M_TRIM_THRESHOLD, -1)
            mallopt(M_TOP_PAD, TOP_PAD_BYTES)

    def stream(self) -> "NoStream":
        return NoStream()

    def current_stream(self) -> "NoStream":
        return NoStream()

    def event(self) -> "NoEvent":
        return NoEvent()

    def synchronize(self) -> None:
        pass

    def allocated_bytes(self) -> int:
        statm = Path("/proc/self/statm")
        if not statm.exists():
            return self.peak_memory_bytes()
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def peak_memory_bytes(self) -> int:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset_peak_memory(self) -> None:
        pass


def matmul_rate(dtype: torch.dtype, size: int, threads: int) -> float:
    """FLOP/s of the fastest of several square matmuls in this process, two at least, after a warm-up."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a = torch.ones(size, size, dtype=dtype)
        torch.mm(a, a)  # warm-up
        seconds: list[float] = []
        end = time.perf_counter() + PROBE_SECONDS
        while len(seconds) < 2 or time.perf_counter() < end:
            start = time.perf_counter()
            torch.mm(a, a)
            seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return 2 * size**3 / min(seconds)


class NoStream(AbstractContextManager["NoStream"]):
    """A stream of the cpu: everything issued before is done."""

    def __exit__(self, *exception: object) -> None:
        pass

    def wait_stream(self, stream: "NoStream") -> None: ...

    def wait_event(self, event: "NoEvent") -> None: ...

    def record_event(self, event: "NoEvent | None" = None) -> "NoEvent":
        event = event or NoEvent()
        event.record(self)
        return event

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class NoEvent:
    """An event of the cpu: over when it is recorded, and it keeps the time."""

    seconds: float

    def record(self, stream: NoStream | None = None) -> None:
        self.seconds = time.perf_counter()

    def wait(self, stream: NoStream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "NoEvent") -> float:
        """Milliseconds from this event to `end`."""
        return (end.seconds - self.seconds) * 1e3


class Accelerator(Device):
    """The accelerators of this host, all of one kind, through torch.accelerator and the module of the kind."""

    def __init__(self, type: str, torch_module: Any):
        self.type = type
        self.backend = f"cpu:gloo,{type}:{COLLECTIVES[type]}"
        self.count = torch_module.accelerator.device_count()
        self._torch = torch_module
        self._accelerator = torch_module.accelerator

    @property
    def name(self) -> str:
        return self._properties.name

    @property
    def total_memory_bytes(self) -> int:
        return self._properties.total_memory

    @property
    def memory_bandwidth(self) -> float | None:
        rates = published_rates(self.name)
        return rates.bytes_per_second if rates else None

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        rates = published_rates(self.name)
        return rates.flops(dtype) if rates else None

    @property
    def instruction_set(self) -> str:
        return ""

    def supports(self, feature: Feature) -> bool:
        if self.type == "npu":
            return feature == "fp16" or (feature == "bf16" and self._torch.npu.is_bf16_supported())
        needed = ROCM_NEEDS if self._torch.version.hip else CUDA_NEEDS
        return (self._properties.major, self._properties.minor) >= needed.get(feature, (0, 0))

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device(self.type, local_rank)

    def use(self, local_rank: int) -> None:
        self._accelerator.set_device_index(local_rank)

    def stream(self) -> Any:
        return self._torch.Stream(self.type)

    def current_stream(self) -> Any:
        return self._accelerator.current_stream()

    def event(self) -> Any:
        return self._torch.Event(self.type, enable_timing=True)

    def synchronize(self) -> None:
        self._accelerator.synchronize()

    def allocated_bytes(self) -> int:
        return self._accelerator.memory_allocated()

    def peak_memory_bytes(self) -> int:
        return self._accelerator.max_memory_allocated()

    def reset_peak_memory(self) -> None:
        self._accelerator.reset_peak_memory_stats()

    @property
    def _properties(self) -> Any:
        return self._torch.get_device_module(self.type).get_device_properties(self._accelerator.current_device_index())


# Compute capability from which tensor cores take bf16 and float8, and from which torch has a fused grouped matmul.
CUDA_NEEDS = {"bf16": (8, 0), "float8": (8, 9), "grouped_matmul": (9, 0)}
ROCM_NEEDS = {"bf16": (9, 0), "float8": (9, 4), "grouped_matmul": (9, 4)}  # MI100, MI300


class Rates(NamedTuple):
    """Published peak rates of one device: dense (no sparsity), in TFLOP/s and GB/s as the data sheets print them."""

    half: float
    """bf16 and fp16 with fp32 accumulation."""
    single: float | None
    """fp32 proper, not TF32, which torch leaves off for matrix products."""
    float8: float | None
    gigabytes: float

    def flops(self, dtype: torch.dtype) -> float | None:
        """FLOP/s of a matrix product in this dtype, None if it is not published."""
        by_size = {2: self.half, 4: self.single, 1: self.float8}
        teraflops = by_size.get(dtype.itemsize) if dtype.is_floating_point else None
        return teraflops * 1e12 if teraflops else None

    @property
    def bytes_per_second(self) -> float:
        return self.gigabytes * 1e9


# By a pattern in the name of the device, the first that is found. Where a data sheet prints sparse rates: half of them.
RATES = {
    # NVIDIA GB200 NVL72 and HGX B200 data sheets, per GPU
    r"GB200": Rates(2500, 80, 5000, 8000),
    r"B200": Rates(2250, 75, 4500, 8000),
    # NVIDIA H200, H100 and H800 data sheets; NVL and PCIe cards run at lower clocks than SXM modules
    r"H200 NVL": Rates(835.5, 60, 1670.5, 4800),
    r"H200": Rates(989.4, 67, 1978.9, 4800),
    r"H100 NVL": Rates(835.5, 60, 1670.5, 3900),
    r"H[18]00 PCIe": Rates(756.5, 51, 1513, 2000),
    r"H[18]00": Rates(989.4, 67, 1978.9, 3350),
    # NVIDIA A100 data sheet; A800 differs in NVLink only
    r"A[18]00.*PCI.*80GB|A[18]00 80GB PCI": Rates(312, 19.5, None, 1935),
    r"A[18]00.*80GB": Rates(312, 19.5, None, 2039),
    r"A[18]00": Rates(312, 19.5, None, 1555),
    # NVIDIA L40S data sheet; Ada GPU architecture white paper, appendix A
    r"L40S": Rates(362.05, 91.6, 733, 864),
    r"RTX 4090": Rates(165.2, 82.6, 330.3, 1008),
    # AMD Instinct MI300X data sheet
    r"MI300X": Rates(1307.4, 163.4, 2614.9, 5300),
    # Huawei Atlas A2 and A3 product pages and the CloudMatrix384 paper (arXiv 2506.12708): a 910C is two dies, and each
    # die, half of its 752 TFLOP/s and 3.2 TB/s, is one device named Ascend910_93xx
    r"Ascend910_93": Rates(376, None, None, 1600),
    r"Ascend910B2": Rates(376, None, None, 1600),
    r"Ascend910B3": Rates(313, None, None, 1600),
    r"Ascend910B4": Rates(280, 75, None, 800),
}


def published_rates(name: str) -> Rates | None:
    """The published peak rates of a device by its name, None if the table has none."""
    return next((rates for pattern, rates in RATES.items() if re.search(pattern, name)), None)
