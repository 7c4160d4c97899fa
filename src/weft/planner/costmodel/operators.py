"""Operator timing: run each operator call of a dry run on the local device, to time a step of any plan with one device.

A dry run records the arguments of each operator call: shapes, strides and dtypes. Each distinct call is then executed in
isolation on random data and timed; the step is the sum of its calls. Habitat (Yu et al., 2021) and Daydream (Zhu et al., 2020)
do the same with operators from a profile of a real run; here the operators come from dry runs, which need no real ranks.
"""

import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from weft.compat import is_in_backward
from weft.device.detect import detect
from weft.memory.operator_trace import QUIET, makes_view

MOST_VALUES = 2**16  # largest integer tensor whose values are recorded: index values determine the time of an operator
SECONDS, MOST_CALLS = 3e-3, 50  # duration of a batch of calls, and maximum number of calls in it
BATCHES = 5  # number of batches; their median is used
COLD_BYTES, MOST_COPIES = 2**26, 32  # limits of the argument copies that consecutive calls cycle through
BETWEEN_BYTES = 2**23  # bytes that a CPU writes between two calls, to evict code and data from private caches


Arguments = tuple[list[Any], dict[str, Any]]


class TensorSpec(NamedTuple):
    """Metadata of a tensor; for small integer tensors also its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    values: bytes | None = None
    """Contents of an integer tensor that is real in the dry run; None: unknown."""


class Operation(NamedTuple):
    """An operator call; equal calls take equal time."""

    name: str
    """Qualified name, such as "aten.mm.default"."""
    arguments: Any
    """Frozen positional and keyword arguments."""
    phase: str = ""
    """Phase of the step: "forward", "backward" or "update"."""


class OperatorLog(TorchDispatchMode):
    """Record every operator call that computes something, in order, in `operations`."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.times: list[int] = []
        """Number of equal calls that each traced call represents."""
        self.known: dict[Operation, Operation] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensor dispatches first; its operations on local tensors then reach this mode
        if func.namespace not in QUIET and not makes_view(func) and func is not torch.ops.aten.record_stream.default:
            phase = "backward" if is_in_backward() else "forward"
            operation = Operation(str(func), freeze((args, kwargs or {})), phase)
            self.operations.append(self.known.setdefault(operation, operation))
            self.times.append(1)
        return func(*args, **(kwargs or {}))


def mark_updates(operations: list[Operation]) -> list[Operation]:
    """Mark the operations after the last backward operation as phase "update"."""
    backward = [index for index, operation in enumerate(operations) if operation.phase == "backward"]
    end = backward[-1] + 1 if backward else len(operations)
    return operations[:end] + [operation._replace(phase="update") for operation in operations[end:]]


def freeze(value: Any) -> Any:
    """Convert arguments to a hashable, picklable form."""
    if isinstance(value, Tensor):
        known = not isinstance(value, FakeTensor) and not value.is_floating_point() and value.numel() <= MOST_VALUES
        data = value.contiguous().numpy().tobytes() if known and value.device.type == "cpu" else None
        return TensorSpec(tuple(value.shape), value.stride(), value.dtype, data)
    if isinstance(value, list | tuple):
        return tuple(map(freeze, value))
    if isinstance(value, dict):
        return KeywordArguments(tuple((name, freeze(item)) for name, item in sorted(value.items())))
    return None if isinstance(value, torch.Generator | torch.Stream) else value


class KeywordArguments(NamedTuple):
    """Frozen keyword arguments."""

    items: tuple[tuple[str, Any], ...]


def thaw(value: Any, device: torch.device) -> Any:
    """Convert frozen arguments back, with tensors of random values where the values were not recorded."""
    if isinstance(value, TensorSpec):
        return _random_tensor(value, device)
    if isinstance(value, KeywordArguments):
        return {name: thaw(item, device) for name, item in value.items}
    if isinstance(value, torch.device):
        return device
    return [thaw(item, device) for item in value] if isinstance(value, tuple) else value


def _random_tensor(spec: TensorSpec, device: torch.device) -> Tensor:
    if spec.values is not None:
        data = torch.frombuffer(bytearray(spec.values), dtype=spec.dtype) if spec.values else torch.empty(0)
        return data.to(spec.dtype).view(spec.shape).to(device)
    size = 1 + sum((length - 1) * step for length, step in zip(spec.shape, spec.stride, strict=True))
    size = 0 if 0 in spec.shape else size
    if spec.dtype.is_floating_point:
        data = torch.rand(size, dtype=torch.float32, device=device).add_(0.5).to(spec.dtype)
    else:
        data = torch.zeros(size, dtype=spec.dtype, device=device)
    return data.as_strided(spec.shape, spec.stride)


@torch.no_grad()
def seconds_of(operation: Operation, device: torch.device) -> float | None:
    """Seconds of one call; None if the call fails in isolation.

    Consecutive calls cycle through copies of their arguments, and results are kept for some calls, so that caches are as cold
    as they are between the other calls of a step.
    """
    namespace, name, overload = operation.name.split(".")
    func = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    try:
        first = _with_random_routing(operation, thaw(operation.arguments, device))
        size = max(1, bytes_in(first))
        copies = [first, *(_copy(operation, first) for _ in range(min(MOST_COPIES, COLD_BYTES // size)))]
        once = min(_time_batch(func, copies[:1], 1, device) for _ in range(2))
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None
    count = max(1, min(MOST_CALLS, int(SECONDS / once)))
    return median(_time_batch(func, copies[1:] or copies, count, device) for _ in range(BATCHES)) / count


def _copy(operation: Operation, arguments: Arguments) -> Arguments:
    def clone(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage().clone()
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            memory, tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    return _with_random_routing(operation, tree_map_only(Tensor, clone, arguments))


def _with_random_routing(operation: Operation, arguments: Arguments) -> Arguments:
    """Replace the group offsets of a grouped matmul by random routing, so that group sizes differ as in training."""
    positional, named = arguments
    if operation.name.startswith(("aten._grouped_mm", "weft.grouped_mm")) and len(positional) > 2:
        offsets, rows = positional[2], positional[0].shape[-1 if positional[1].ndim == 2 else 0]
        groups = torch.randint(len(offsets), (rows,), device=offsets.device).bincount(minlength=len(offsets))
        positional[2] = groups.cumsum(0).to(offsets.dtype)
    return positional, named


def bytes_in(value: Any) -> int:
    """Total bytes of all tensors in nested arguments."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(bytes_in, items))


def _time_batch(func: Any, copies: Sequence[Arguments], count: int, device: torch.device) -> float:
    """Total seconds of `count` calls, which cycle through copies of their arguments."""
    turns = islice(cycle(copies), count)
    kept: deque[Any] = deque(maxlen=len(copies))
    if device.type == "cpu":
        return _time_on_cpu(func, turns, kept)
    begin = time.perf_counter()
    for positional, named in turns:
        kept.append(func(*positional, **named))
    torch.accelerator.synchronize()
    return time.perf_counter() - begin


def _time_on_cpu(func: Any, turns: Iterable[Arguments], kept: deque[Any]) -> float:
    """Total seconds of calls on a CPU, with a cache eviction before each call."""
    seconds, evicted = 0.0, torch.zeros(BETWEEN_BYTES, dtype=torch.uint8)
    for positional, named in turns:
        evicted.add_(1)
        begin = time.perf_counter()
        kept.append(func(*positional, **named))
        seconds += time.perf_counter() - begin
    return seconds


def time_operations(
    operations: Iterable[Operation], processes: int = 1, device_type: str = "cpu"
) -> dict[Operation, float | None]:
    """Seconds per distinct call; None for a call that fails in isolation.

    Args:
        operations: operations of dry runs; their phases are ignored.
        processes: processes that measure concurrently, like the ranks on the cores of a host; their mean is returned.
        device_type: type of the device to time on.
    """
    different = sorted({operation._replace(phase="") for operation in operations}, key=str)
    forks = sys.platform == "linux" and device_type == "cpu"
    context = multiprocessing.get_context("fork" if forks else "spawn")
    with context.Pool(processes) as pool:
        rows = pool.starmap(_time_in_process, [(different, device_type)] * processes, chunksize=1)
    return {
        operation: None if None in times else sum(times) / len(times)
        for operation, *times in zip(different, *rows, strict=True)
    }


def _time_in_process(operations: list[Operation], device_type: str) -> list[float | None]:
    torch.set_num_threads(1)
    detect().use(0)  # the same allocator settings as in a rank
    return [seconds_of(operation, torch.device(device_type)) for operation in operations]
