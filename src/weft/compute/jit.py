"""Triton, where it is installed: the only import of it. Weft runs without Triton, with kernels of torch."""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton, tl = None, SimpleNamespace(constexpr=None)

jit: Any = triton.jit if triton else (lambda function, **options: function)
"""Decorator of a Triton kernel; without Triton the kernel is a plain function that nobody calls."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the kernels read; all of them compute in float32."""


def has_triton() -> bool:
    return triton is not None


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the device of a tensor current, because Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def num_multiprocessors(tensor: Tensor) -> int:
    """Number of multiprocessors of the device of a tensor; a small number on CPU, where the interpreter runs."""
    if not tensor.is_cuda:
        return 3
    return int(torch.cuda.get_device_properties(tensor.device).multi_processor_count)


def capability_of(tensor: Tensor) -> int:
    """Compute capability of the device of a tensor, such as 90 for an H100; 0 on CPU, where the interpreter runs."""
    if not tensor.is_cuda:
        return 0
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def as_rows(x: Tensor) -> Tensor:
    """View of a tensor as a matrix whose rows are contiguous; a copy if no view has them."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()
