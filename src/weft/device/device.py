"""Interface of the devices: cpu, cuda and npu, and those of installed packages.

Types and vendors of devices are known to this folder alone; `weft.device.detect.detect` creates the device of this host.
"""

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch

Feature = Literal["bf16", "fp16", "fp64", "grouped_matmul", "float8"]


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
    def watts(self) -> float | None:
        """Published power of one device; None if unknown."""
        return None

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
    def has_grouped_matmul(self) -> bool:
        """True if torch computes `grouped_mm` on this device, natively or group by group."""
        return True

    @property
    def has_flex_attention(self) -> bool:
        """True if torch computes FlexAttention with its backward on this device."""
        return True

    @property
    def attention_kernels(self) -> tuple[str, ...]:
        """Kernels of attention that torch has for this device: back ends of SDPA, and implementations of its flash operators,
        whose packages may be missing. () where there is nothing to choose."""
        return ()

    @property
    def has_float8_dtype(self) -> bool:
        """True if torch converts to and from float8_e4m3fn on this device; matmuls are the feature "float8"."""
        return True

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

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of the last-level cache of one device; on cpu of the processor, which ranks share. None if unknown."""
        return None

    def profiler(self) -> Any:
        """Create a profiler of operators, their input shapes, and kernels, with the interface of `torch.profiler.profile`."""
        return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Most bytes of live tensors on the device since `reset_peak_memory`; on cpu of the process since its start."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Reset the memory peak. No effect on cpu, where the system offers no such call for a process."""
