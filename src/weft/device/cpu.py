"""Processor of the host: what it computes natively, and its measured speed."""

import ctypes
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

import torch

from weft.compat import has_amx, onednn_accepts
from weft.device.device import Device, Feature

RATE_DTYPES = (torch.float32, torch.bfloat16)  # fp16 and fp64 are faster than both on no processor
BF16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86 with AMX, ARM; names of Linux
PROBE_SIZE, PROBE_SECONDS = 512, 0.05
EMULATION_SIZE = 128  # size of the matmul that times an emulated dtype: 10 ms at 0.4 GFLOP/s
PROBES = 3  # comparisons that native bf16 must win: other work on the machine can slow one measurement of fp32
NATIVE_GAIN = 1.25  # native bf16 is 2 to 16 times faster than fp32, emulated bf16 0.01 to 0.8 times

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4  # mallopt parameters of malloc.h
TOP_PAD_BYTES = 2**26
MMAP_MAX, SMALLEST_RETURNED = 65536, 2**20  # blocks, by default of glibc; bytes


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
        parts += ["AMX"] if has_amx() else []
        return f"{' + '.join(parts)}, {'native' if self.supports('bf16') else 'no native'} bf16"

    @property
    def supports_fork(self) -> bool:
        return sys.platform == "linux"

    @property
    def has_flex_attention(self) -> bool:
        return False

    @property
    def attention_kernels(self) -> tuple[str, ...]:
        return "flash", "math"

    def supports(self, feature: Feature) -> bool:
        if feature == "bf16":
            return self._native_bf16
        if feature == "fp16":
            return onednn_accepts(torch.float16)
        return feature != "float8"

    @cached_property
    def _native_bf16(self) -> bool:
        """True if the processor has bf16 instructions; where it does not say, if bf16 matmuls are faster than fp32 matmuls.

        It is not enough that torch's oneDNN accepts bf16: without bf16 instructions, oneDNN converts to fp32 in every
        matmul. The processor is asked first, because the same machine must give the same answer under any load. One thread
        measures, because a process with a running thread pool cannot be forked.
        """
        if not onednn_accepts(torch.bfloat16):
            return False
        if (stated := has_bf16_instructions()) is not None:
            return stated
        return all(
            matmul_rate(torch.bfloat16, PROBE_SIZE, 1) > NATIVE_GAIN * matmul_rate(torch.float32, PROBE_SIZE, 1)
            for _ in range(PROBES)
        )

    @property
    def emulates(self) -> bool:
        return True

    def torch_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def use(self, local_rank: int) -> None:
        """Let the C library keep freed memory: otherwise the large tensors of every step are new pages, each a page fault."""
        _set_malloc({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: TOP_PAD_BYTES})

    @property
    def cache_bytes(self) -> int | None:
        sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
        return max((int(size.removesuffix("K")) * 1024 for size in sizes if size.endswith("K")), default=None)

    def stream(self) -> "NoStream":
        return NoStream()

    def current_stream(self) -> "NoStream":
        return NoStream()

    def event(self) -> "NoEvent":
        return NoEvent()

    def synchronize(self) -> None:
        pass

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


def return_freed_memory() -> None:
    """Let the C library return free memory to the system, unlike `Cpu.use`, now and for the rest of the process.

    Weights that are gathered and freed one unit after the other would otherwise hold several times their size, in fragments.
    """
    values = {
        M_MMAP_MAX: MMAP_MAX,
        M_MMAP_THRESHOLD: SMALLEST_RETURNED,
        M_TRIM_THRESHOLD: SMALLEST_RETURNED,
        M_TOP_PAD: 0,
    }
    _set_malloc(values)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set_malloc(values: Mapping[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None:
        for parameter, value in values.items():
            mallopt(parameter, value)


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
