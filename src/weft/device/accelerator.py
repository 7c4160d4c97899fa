"""Accelerators through torch.accelerator, and the published rates of known models.

Their number is counted without initializing one, so that a launcher can leave all of their memory to the ranks.
"""

import importlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from weft.device.device import Device, Feature

COLLECTIVES = {"cuda": "nccl", "npu": "hccl"}
"""Process group backend of each accelerator that Weft knows itself."""
WITHOUT_FLOAT64 = ("npu",)
"""Accelerators whose process group backend does not send float64."""


def sends_float64(device_type: str) -> bool:
    """True if collectives of tensors on this type of device accept float64."""
    return device_type not in WITHOUT_FLOAT64


class Properties(NamedTuple):
    """Properties of one accelerator."""

    name: str
    total_memory: int
    """Bytes."""
    major: int
    """Compute capability; 0 on npu."""
    minor: int
    native_bf16: bool
    """True on npu if the device computes bf16; on cuda the compute capability says so."""


class Accelerator(Device):
    """Accelerators of one type, through torch.accelerator and the device module of the type.

    Args:
        type: "cuda" or "npu".
        torch_module: torch, or a stand-in for it in tests.
        read: reads the properties of the device; None: this process reads them, which initializes the current device.
    """

    def __init__(self, type: str, torch_module: Any, read: Callable[[], Properties] | None = None):
        self.type = type
        self._read = read
        self.backend = f"cpu:gloo,{type}:{COLLECTIVES[type]}"
        self.count = torch_module.accelerator.device_count()
        self._torch = torch_module
        self._accelerator = torch_module.accelerator

    @property
    def name(self) -> str:
        return self.properties.name

    @property
    def total_memory_bytes(self) -> int:
        return self.properties.total_memory

    @property
    def memory_bandwidth(self) -> float | None:
        rates = published_rates(self.name)
        return rates.bytes_per_second if rates else None

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        rates = published_rates(self.name)
        return rates.flops(dtype) if rates else None

    @property
    def watts(self) -> float | None:
        rates = published_rates(self.name)
        return rates.watts if rates else None

    @property
    def instruction_set(self) -> str:
        return ""

    def supports(self, feature: Feature) -> bool:
        if self.type == "npu":
            return feature == "fp16" or (feature == "bf16" and self.properties.native_bf16)
        needed = ROCM_NEEDS if self._torch.version.hip else CUDA_NEEDS
        return self.properties[2:4] >= needed.get(feature, (0, 0))

    @property
    def has_grouped_matmul(self) -> bool:
        return self.type != "npu"

    @property
    def has_flex_attention(self) -> bool:
        return self.type != "npu"

    @property
    def attention_kernels(self) -> tuple[str, ...]:
        of_vendor = () if self._torch.version.hip else ("cudnn", "FA3", "FA4")
        return () if self.type == "npu" else ("flash", "efficient", "math", *of_vendor)

    @property
    def has_float8_dtype(self) -> bool:
        return self.type != "npu"

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

    @property
    def cache_bytes(self) -> int | None:
        module = self._torch.get_device_module(self.type)
        found = module.get_device_properties(self._accelerator.current_device_index())
        return getattr(found, "L2_cache_size", None)

    def profiler(self) -> Any:
        # torch_npu's profiler has the interface of torch's, and writes the same kind of file.
        module = importlib.import_module("torch_npu.profiler") if self.type == "npu" else self._torch.profiler
        activities = module.ProfilerActivity
        return module.profile(activities=[activities.CPU, getattr(activities, self.type.upper())], record_shapes=True)

    def peak_memory_bytes(self) -> int:
        return self._accelerator.max_memory_allocated()

    def reset_peak_memory(self) -> None:
        self._accelerator.reset_peak_memory_stats()

    @property
    def properties(self) -> Properties:
        """Properties of the current device."""
        if self._read is not None:
            return self._read()
        module = self._torch.get_device_module(self.type)
        found = module.get_device_properties(self._accelerator.current_device_index())
        capability = getattr(found, "major", 0), getattr(found, "minor", 0)
        return Properties(
            found.name, found.total_memory, *capability, self.type != "npu" or self._torch.npu.is_bf16_supported()
        )


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
    watts: float | None = None
    """Maximum power of the board."""

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
    # NVIDIA GB200 NVL72 and HGX B200 data sheets, per GPU; watts of all: maximum board power of the same sheets
    r"GB200": Rates(2500, 80, 5000, 8000, 1200),
    r"B200": Rates(2250, 75, 4500, 8000, 1000),
    # NVIDIA H200, H100 and H800 data sheets; NVL and PCIe cards run at lower clocks than SXM modules
    r"H200 NVL": Rates(835.5, 60, 1670.5, 4800, 600),
    r"H200": Rates(989.4, 67, 1978.9, 4800, 700),
    r"H100 NVL": Rates(835.5, 60, 1670.5, 3900, 400),
    r"H[18]00 PCIe": Rates(756.5, 51, 1513, 2000, 350),
    r"H[18]00": Rates(989.4, 67, 1978.9, 3350, 700),
    # NVIDIA A100 data sheet; A800 differs in NVLink only
    r"A[18]00.*PCI.*80GB|A[18]00 80GB PCI": Rates(312, 19.5, None, 1935, 300),
    r"A[18]00.*80GB": Rates(312, 19.5, None, 2039, 400),
    r"A[18]00": Rates(312, 19.5, None, 1555, 400),
    # NVIDIA L40S data sheet; Ada GPU architecture white paper, appendix A
    r"L40S": Rates(362.05, 91.6, 733, 864, 350),
    r"RTX 4090": Rates(165.2, 82.6, 330.3, 1008, 450),
    # AMD Instinct MI300X data sheet
    r"MI300X": Rates(1307.4, 163.4, 2614.9, 5300, 750),
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
