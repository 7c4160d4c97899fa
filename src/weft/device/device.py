"""Device abstraction: cpu, cuda and npu behind one interface over torch.accelerator.

Device types and vendors are known to this module and `links.py` alone. `detect` and `count` do not initialize an
accelerator, so that a launcher can call them and leave all of its memory to the ranks.
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
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

Feature = Literal["bf16", "fp16", "fp64", "grouped_matmul", "float8"]

# Process group backend of each accelerator that Weft knows itself.
COLLECTIVES = {"cuda": "nccl", "npu": "hccl"}
DEVICE_GROUP = "weft.devices"
"""Group of the entry points with which other packages add devices."""

RATE_DTYPES = (torch.float32, torch.bfloat16)  # fp16 and fp64 are faster than both on no processor
BF16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86 with AMX, ARM; names of Linux
PROBE_SIZE, PROBE_SECONDS = 512, 0.05
EMULATION_SIZE = 128  # size of the matmul that times an emulated dtype: 10 ms at 0.4 GFLOP/s
NATIVE_GAIN = 1.25  # native bf16 is 2 to 16 times faster than fp32, emulated bf16 0.01 to 0.8 times

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # mallopt parameters of malloc.h
TOP_PAD_BYTES = 2**26
COMPILED_KERNELS = "8192"


class Device(ABC):
    """Compute device of the ranks of this host. Create it with `detect`."""

    type: str
    """cpu, cuda or npu."""
    backend: str
    """Backend string for `init_process_group`; on accelerators it includes gloo for collectives of CPU tensors."""
    count: int
    """Number of devices of this host; 1 on cpu, which any number of ranks share."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Model name reported by the system or the vendor's library."""

    @property
    @abstractmethod
    def total_memory_bytes(self) -> int:
        """Memory of one device in bytes; on cpu the memory of the host."""

    @property
    @abstractmethod
    def memory_bandwidth(self) -> float | None:
        """Published memory bandwidth of one device in bytes/s; None if unknown."""

    @abstractmethod
    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Peak dense matmul rate of one device in FLOP/s; None if unknown.

        On accelerators this is the published peak for the dtype. On cpu it is measured for a tenth of a second with the
        threads of this process. The result is the best rate of all dtypes, since an emulated dtype computes in another.
        """

    @property
    @abstractmethod
    def instruction_set(self) -> str:
        """Instruction set of matmuls as text; empty where the name already implies it."""

    @property
    def supports_fork(self) -> bool:
        """True if ranks may be forked from a process with imports done; False if an import may initialize a device."""
        return False

    @abstractmethod
    def supports(self, feature: Feature) -> bool:
        """True if the device computes the feature natively."""

    @property
    def emulates(self) -> bool:
        """True if dtypes without native support are emulated, slowly, instead of refused."""
        return False

    @abstractmethod
    def torch_device(self, local_rank: int) -> torch.device:
        """Torch device of a local rank."""

    @abstractmethod
    def use(self, local_rank: int) -> None:
        """Make the device of a local rank the current device of this process."""

    @abstractmethod
    def stream(self) -> Any:
        """Create a stream on the current device: a context manager with the methods of `torch.Stream`."""

    @abstractmethod
    def current_stream(self) -> Any:
        """Current stream of the current device."""

    @abstractmethod
    def event(self) -> Any:
        """Create a timing event with the methods of `torch.Event`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the current device has finished all issued work."""

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes of live tensors on the current device; on cpu the resident set size of the process."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Largest `allocated_bytes` since `reset_peak_memory`; on cpu since the start of the process."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Reset the memory peak. No effect on cpu, where the system offers no such call for a process."""


def detect(torch_module: Any = torch) -> Device:
    """Detect the accelerator of this host; without one, return the cpu.

    A type of accelerator that Weft does not know is created by the entry point of its name in the group "weft.devices", a
    class or function without arguments; without such an entry point it is ignored.

    Args:
        torch_module: torch, or a stand-in for it in tests.
    """
    if importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")  # makes npu known to torch
    accelerator = torch_module.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return Cpu()
    if accelerator.type in COLLECTIVES:
        return Accelerator(accelerator.type, torch_module)
    installed = entry_points(group=DEVICE_GROUP)
    return installed[accelerator.type].load()() if accelerator.type in installed.names else Cpu()


class Cpu(Device):
    """Processor of the host. Calls are synchronous, so that streams and events have nothing to order."""

    type = "cpu"
    backend = "gloo"
    count = 1
    memory_bandwidth = None

    @cached_property
    def name(self) -> str:
        info = Path("/proc/cpuinfo")
        match = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
        return match.group(1) if match else platform.processor() or platform.machine()

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
        """True if the processor has bf16 instructions; where it does not say, if bf16 matmuls are faster than fp32 matmuls.

        It is not enough that torch's oneDNN accepts bf16: without bf16 instructions, oneDNN converts to fp32 in every
        matmul. The processor is asked first, because the same machine must give the same answer under any load. One thread
        measures, because a process with a running thread pool cannot be forked.
        """
        if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            return False
        if (stated := has_bf16_instructions()) is not None:
            return stated
        return matmul_rate(torch.bfloat16, PROBE_SIZE, 1) > NATIVE_GAIN * matmul_rate(torch.float32, PROBE_SIZE, 1)

    @property
    def emulates(self) -> bool:
        return True

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def use(self, local_rank: int) -> None:
        """Configure malloc and oneDNN caches for training.

        The C library keeps freed memory: otherwise the large tensors of every step are new pages, with a page fault each.
        oneDNN keeps more of the kernels that it compiles per shape, since the experts' row counts change at each call.
        """
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", COMPILED_KERNELS)  # read at oneDNN's first call
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
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


def has_bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """True if the system lists bf16 instructions of the processor; None if it lists nothing, or if oneDNN is limited.

    Args:
        cpuinfo: file of Linux with the features of each core: "flags" on x86, "Features" on ARM.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not cpuinfo.exists():
        return None
    lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
    features = next((set(words.split()) for name, _, words in lines if name.strip() in ("flags", "Features")), None)
    return None if features is None else bool(features & BF16_FEATURES)


def matmul_rate(dtype: torch.dtype, size: int, threads: int) -> float:
    """Measure the FLOP/s of the fastest of at least two square matmuls in this process, after a warm-up."""
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
    """Stream of the cpu, where all issued work is already finished."""

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
    """Event of the cpu: complete when recorded; stores the time of the record."""

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
    """Accelerators of one type, through torch.accelerator and the device module of the type."""

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


# Minimum compute capability for bf16 and float8 on tensor cores, and for the fused grouped matmul of torch.
CUDA_NEEDS = {"bf16": (8, 0), "float8": (8, 9), "grouped_matmul": (9, 0)}
ROCM_NEEDS = {"bf16": (9, 0), "float8": (9, 4), "grouped_matmul": (9, 4)}  # MI100, MI300


class Rates(NamedTuple):
    """Published peak rates of one device: dense (no sparsity), in TFLOP/s and GB/s as in the data sheets."""

    half: float
    """bf16 and fp16 with fp32 accumulation."""
    single: float | None
    """True fp32, not TF32, which torch does not use for matmuls by default."""
    float8: float | None
    gigabytes: float

    def flops(self, dtype: torch.dtype) -> float | None:
        """Peak FLOP/s of a matmul in the dtype; None if not published."""
        by_size = {2: self.half, 4: self.single, 1: self.float8}
        teraflops = by_size.get(dtype.itemsize) if dtype.is_floating_point else None
        return teraflops * 1e12 if teraflops else None

    @property
    def bytes_per_second(self) -> float:
        return self.gigabytes * 1e9


# By a pattern in the device name; the first match counts. Sparse rates of a data sheet are halved.
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
    # die, with half of the 752 TFLOP/s and 3.2 TB/s, is one device named Ascend910_93xx
    r"Ascend910_93": Rates(376, None, None, 1600),
    r"Ascend910B2": Rates(376, None, None, 1600),
    r"Ascend910B3": Rates(313, None, None, 1600),
    r"Ascend910B4": Rates(280, 75, None, 800),
}


def published_rates(name: str) -> Rates | None:
    """Look up the published peak rates of a device by its name; None if it is not in the table."""
    return next((rates for pattern, rates in RATES.items() if re.search(pattern, name)), None)
