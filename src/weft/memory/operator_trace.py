"""Operators of one step: FLOPs, bytes, memory by kind after each of them, and a model of the cache."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from weft.backends.shared_memory import SharedMemoryGroup
from weft.comm.recorder import find_tensors
from weft.memory.live_bytes import LiveBytes

QUIET = ("prim", "c10d", "profiler")  # namespaces without computation; communication is counted separately
MOST_SAMPLES = 1000  # of memory; above it, only the largest of neighbouring samples is kept

Shapes = tuple[tuple[int, ...], ...]


def makes_view(func: Any) -> bool:
    """True if an operator returns a view of its input."""
    results = func._schema.returns
    return any(result.alias_info is not None and not result.alias_info.is_write for result in results)


class OperatorCosts(NamedTuple):
    """Sums over the calls of one operator with equal input shapes."""

    calls: int
    flops: int
    bytes: int
    """Bytes of all inputs and outputs, each once per call: what a call moves at least if nothing is in a cache."""


class CacheModel:
    """Least-recently-used cache of whole tensors, by address.

    A read or written tensor that is not in the cache is fetched from memory. `compulsory` are the bytes of the first access to
    each address, which a cache of any size fetches.

    Args:
        capacity: bytes of the cache.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.accessed = self.fetched = self.held = 0
        self.cached: OrderedDict[int, int] = OrderedDict()
        self.seen: dict[int, int] = {}

    @property
    def compulsory(self) -> int:
        return sum(self.seen.values())

    def access(self, address: int, size: int) -> None:
        """Read or write `size` bytes at an address."""
        self.accessed += size
        self.seen[address] = max(size, self.seen.get(address, 0))
        known = self.cached.pop(address, 0)
        self.fetched += max(size - known, 0)
        self.held += max(size, known) - known
        self.cached[address] = max(size, known)
        while self.held > self.capacity:
            _, evicted = self.cached.popitem(last=False)
            self.held -= evicted


class OperatorTrace(TorchDispatchMode):
    """Dispatch mode that records the operators of one step, inside of a `LiveBytes`. Copies of collectives are left out.

    Args:
        live: active counter of live bytes.
        cache: model of the cache; None without one.
    """

    def __init__(self, live: LiveBytes, cache: CacheModel | None):
        super().__init__()
        self.live, self.cache = live, cache
        self.costs: dict[tuple[str, Shapes], OperatorCosts] = {}
        """By operator, such as "aten::mm", and shapes of its input tensors."""
        self.samples: list[tuple[int, dict[str, int]]] = []
        """(index of the operator, bytes by kind after it)."""
        self.operators = 0
        self.stride = 1
        self._in_collective = False

    def __enter__(self) -> Self:
        SharedMemoryGroup.observers.append(self._enter_collective)
        SharedMemoryGroup.leavers.append(self._leave_collective)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        SharedMemoryGroup.observers.remove(self._enter_collective)
        SharedMemoryGroup.leavers.remove(self._leave_collective)

    def _enter_collective(self, group: dist.ProcessGroup, operation: str, size: int, dtype: torch.dtype) -> None:
        self._in_collective = True

    def _leave_collective(self) -> None:
        self._in_collective = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper subclass dispatches first; operations on its inner tensors are recorded
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace not in QUIET and not makes_view(func) and not self._in_collective:
            inputs = find_tensors([*args, *kwargs.values()])
            self._count(func, args, kwargs, result, inputs)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, inputs: list[Tensor]) -> None:
        tensors = [*inputs, *find_tensors(result)]
        sizes = [min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors]
        key = func._schema.name, tuple(tuple(tensor.shape) for tensor in inputs if tensor.ndim)
        known = self.costs.get(key, OperatorCosts(0, 0, 0))
        flops = flops_of(func, args, kwargs, result)
        self.costs[key] = OperatorCosts(known.calls + 1, known.flops + flops, known.bytes + sum(sizes))
        if self.cache is not None:
            for tensor, size in zip(tensors, sizes, strict=True):
                self.cache.access(tensor.untyped_storage().data_ptr(), size)
        self._sample(self.live.current)

    def _sample(self, current: Counter[Any]) -> None:
        window, self.operators = self.operators // self.stride, self.operators + 1
        sample = self.operators, {kind: size for kind, size in current.items() if size}
        if self.samples and (self.samples[-1][0] - 1) // self.stride == window:
            if sum(current.values()) > sum(self.samples[-1][1].values()):
                self.samples[-1] = sample
            return
        self.samples.append(sample)
        if len(self.samples) > MOST_SAMPLES:
            pairs = zip(self.samples[::2], [*self.samples[1::2], self.samples[-1]], strict=False)
            self.samples = [max(pair, key=lambda sample: sum(sample[1].values())) for pair in pairs]
            self.stride *= 2


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """FLOPs of an operator call by torch's formulas; 0 for operators that are limited by memory."""
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    own = FORMULAS.get(func._schema.name)
    return own([tuple(tensor.shape) for tensor in find_tensors(args)]) if own else 0


def _grouped_matmul(shapes: list[Any]) -> int:
    """Matmul of rows in groups [t, k] x [e, k, n]; for gradients also [k, t] x [t, n] and [e, m, k] x [k, t]."""
    rows, matrix = shapes[:2]
    return 2 * rows[-2] * rows[-1] * matrix[-1]


FORMULAS: dict[
    str, Callable[[list[Any]], int]
] = {  # operators that torch's counter lacks, from the shapes of their inputs
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda shapes: sdpa_flop_count(*shapes[:3]),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda shapes: sdpa_backward_flop_count(*shapes[:4]),
    "aten::_grouped_mm": _grouped_matmul,
    "weft::grouped_mm": _grouped_matmul,
}


def rows_of(costs: dict[tuple[str, Shapes], OperatorCosts]) -> list[list[Any]]:
    """The costs as JSON: [operator, shapes, calls, FLOPs, bytes] each."""
    return [[name, shapes, *cost] for (name, shapes), cost in costs.items()]


def samples_of(samples: Iterable[tuple[int, dict[str, int]]]) -> list[list[Any]]:
    """The samples of memory as JSON: [index of the operator, bytes by kind] each."""
    return [list(sample) for sample in samples]
