"""Times the operators of a dry run on the device at hand: a step of any plan, by the clock, with one device and no ranks.

A dry run notes what each operator is called with: shapes, strides, formats. Each different call is then made for itself, on
numbers of no meaning, and timed; a step is the sum of its calls. So do Habitat (Yu et al., 2021) and Daydream (Zhu et al.,
2020) with operators of a profile; here they come from ranks that nobody has.
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

from weft.device.device import detect

MOST_VALUES = 2**16  # of a tensor of whole numbers that steers: they decide how long an operator takes
SECONDS, MOST_CALLS, BATCHES = 3e-3, 50, 5  # of a batch of calls; the median of the batches counts
COLD_BYTES, MOST_COPIES = 2**26, 32  # of the tensors that take turns
BETWEEN_BYTES = 2**23  # that a CPU touches between two calls: what a core's own caches hold of code and numbers is gone
QUIET = ("prim", "c10d", "profiler")  # namespaces of what computes nothing; messages are counted apart


Arguments = tuple[list[Any], dict[str, Any]]


class Like(NamedTuple):
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    values: bytes | None = None
    """Of whole numbers that a dry run knows."""


class Operation(NamedTuple):
    """A call of an operator; equal ones take equal time."""

    name: str
    """Such as "aten.mm.default"."""
    arguments: Any
    """Positional and named ones, frozen."""
    phase: str = ""
    """In which part of a step it is: "forward", "backward" or "update"."""


class OperatorLog(TorchDispatchMode):
    """Notes every operator that computes something, in order, in `operations`."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.known: dict[Operation, Operation] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper (DTensor) goes first; its operations on local tensors come back here
        if func.namespace not in QUIET and not makes_view(func):
            phase = "backward" if torch._C._current_graph_task_id() >= 0 else "forward"
            operation = Operation(str(func), freeze((args, kwargs or {})), phase)
            self.operations.append(self.known.setdefault(operation, operation))
        return func(*args, **(kwargs or {}))


def in_phases(operations: list[Operation]) -> list[Operation]:
    """The operations of a step; what comes after the last backward is its update."""
    backward = [place for place, operation in enumerate(operations) if operation.phase == "backward"]
    end = backward[-1] + 1 if backward else len(operations)
    return operations[:end] + [operation._replace(phase="update") for operation in operations[end:]]


def makes_view(func: Any) -> bool:
    """Whether an operator returns what it was given, seen in another way."""
    results = func._schema.returns
    return any(result.alias_info is not None and not result.alias_info.is_write for result in results)


def freeze(value: Any) -> Any:
    """Arguments as something that can be compared and sent."""
    if isinstance(value, Tensor):
        known = not isinstance(value, FakeTensor) and not value.is_floating_point() and value.numel() <= MOST_VALUES
        numbers = value.contiguous().numpy().tobytes() if known and value.device.type == "cpu" else None
        return Like(tuple(value.shape), value.stride(), value.dtype, numbers)
    if isinstance(value, list | tuple):
        return tuple(map(freeze, value))
    if isinstance(value, dict):
        return Named(tuple((name, freeze(item)) for name, item in sorted(value.items())))
    return None if isinstance(value, torch.Generator) else value


class Named(NamedTuple):
    """Arguments by name."""

    items: tuple[tuple[str, Any], ...]


def thaw(value: Any, place: torch.device) -> Any:
    """Arguments with tensors of numbers that mean nothing."""
    if isinstance(value, Like):
        return _make(value, place)
    if isinstance(value, Named):
        return {name: thaw(item, place) for name, item in value.items}
    if isinstance(value, torch.device):
        return place
    return [thaw(item, place) for item in value] if isinstance(value, tuple) else value


def _make(like: Like, place: torch.device) -> Tensor:
    if like.values is not None:
        numbers = torch.frombuffer(bytearray(like.values), dtype=like.dtype) if like.values else torch.empty(0)
        return numbers.to(like.dtype).view(like.shape).to(place)
    size = 1 + sum((length - 1) * step for length, step in zip(like.shape, like.stride, strict=True))
    size = 0 if 0 in like.shape else size
    if like.dtype.is_floating_point:
        numbers = torch.rand(size, dtype=torch.float32, device=place).add_(0.5).to(like.dtype)
    else:
        numbers = torch.zeros(size, dtype=like.dtype, device=place)
    return numbers.as_strided(like.shape, like.stride)


@torch.no_grad()
def seconds_of(operation: Operation, place: torch.device) -> float | None:
    """What one call takes; None where it cannot be made for itself.

    Calls take turns with copies of their tensors, and results stay for a while, so that caches hold no more of them than they
    do between the other calls of a step.
    """
    namespace, name, overload = operation.name.split(".")
    func = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    try:
        first = _arguments(operation, place)
        size = max(1, bytes_in(first))
        copies = [first, *(_copy(operation, first) for _ in range(min(MOST_COPIES, COLD_BYTES // size)))]
        once = min(_batch(func, copies[:1], 1, place) for _ in range(2))
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None
    number = max(1, min(MOST_CALLS, int(SECONDS / once)))
    return median(_batch(func, copies[1:] or copies, number, place) for _ in range(BATCHES)) / number


def _arguments(operation: Operation, place: torch.device) -> Arguments:
    return _routed(operation, thaw(operation.arguments, place))


def _copy(operation: Operation, arguments: Arguments) -> Arguments:
    def clone(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage().clone()
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            memory, tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    return _routed(operation, tree_map_only(Tensor, clone, arguments))


def _routed(operation: Operation, arguments: Arguments) -> Arguments:
    """Arguments in which rows go to groups at random, as routers send them: no two products have as many."""
    positional, named = arguments
    if operation.name.startswith("aten._grouped_mm") and len(positional) > 2:
        borders, rows = positional[2], positional[0].shape[-1 if positional[1].ndim == 2 else 0]
        groups = torch.randint(len(borders), (rows,), device=borders.device).bincount(minlength=len(borders))
        positional[2] = groups.cumsum(0).to(borders.dtype)
    return positional, named


def bytes_in(value: Any) -> int:
    """Of all tensors in nested arguments."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(bytes_in, items))


def _batch(func: Any, copies: Sequence[Arguments], number: int, place: torch.device) -> float:
    """Seconds of so many calls, which take turns with copies of their tensors."""
    turns = islice(cycle(copies), number)
    kept: deque[Any] = deque(maxlen=len(copies))
    if place.type == "cpu":
        return _among_others(func, turns, kept)
    begin = time.perf_counter()
    for positional, named in turns:
        kept.append(func(*positional, **named))
    torch.accelerator.synchronize()
    return time.perf_counter() - begin


def _among_others(func: Any, turns: Iterable[Arguments], kept: deque[Any]) -> float:
    """Seconds of calls on a CPU, where other work has the caches between two of them."""
    seconds, others = 0.0, torch.zeros(BETWEEN_BYTES, dtype=torch.uint8)
    for positional, named in turns:
        others.add_(1)
        begin = time.perf_counter()
        kept.append(func(*positional, **named))
        seconds += time.perf_counter() - begin
    return seconds


def time_operations(
    operations: Iterable[Operation], processes: int = 1, device_type: str = "cpu"
) -> dict[Operation, float | None]:
    """Seconds of each different call; None for one that cannot be made for itself.

    Args:
        operations: of dry runs; their phases do not matter.
        processes: that measure at once, as ranks on the cores of a host compute at once; their mean counts.
        device_type: on which they are timed.
    """
    different = sorted({operation._replace(phase="") for operation in operations}, key=str)
    forks = sys.platform == "linux" and device_type == "cpu"
    context = multiprocessing.get_context("fork" if forks else "spawn")
    with context.Pool(processes) as pool:
        rows = pool.starmap(_time_alone, [(different, device_type)] * processes, chunksize=1)
    return {
        operation: None if None in times else sum(times) / len(times)
        for operation, *times in zip(different, *rows, strict=True)
    }


def _time_alone(operations: list[Operation], device_type: str) -> list[float | None]:
    torch.set_num_threads(1)
    detect().use(0)  # memory is taken and given back as in a rank
    return [seconds_of(operation, torch.device(device_type)) for operation in operations]
