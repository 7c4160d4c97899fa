"""Counters of memory, communication, FLOPs and operators of one rank in one training step, for real and dry runs alike."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from weft.anatomy.roles import Anatomy
from weft.comm.recorder import Message, Recorder, find_tensors
from weft.compat import varlen_operators
from weft.compute.cross_entropy import add_matmul
from weft.compute.fp8 import fp8_matmul
from weft.compute.fp8_experts import fp8_grouped_matmul
from weft.compute.grouped_mm import few_sizes_grouped_mm
from weft.data import AnyBatch
from weft.memory.live_bytes import LiveBytes, Moment
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.planner.costmodel.operators import Operation, OperatorLog, mark_updates

Name = TypeVar("Name")
Item = TypeVar("Item")
FEW = 3  # sections that are run of many: the first, one for all in the middle, and the last


class Traffic(NamedTuple):
    """Total communication of one axis, operation and dtype in one step."""

    axis: str
    operation: str
    dtype: torch.dtype
    messages: int
    bytes: int
    """Bytes sent per rank with a ring algorithm."""


@dataclass(frozen=True)
class StepCounts:
    """Counts of one rank in one step."""

    state_bytes: dict[str, int]
    """Bytes between two steps, by kind of tensor (see `weft.memory.live_bytes`)."""
    moments: dict[Moment, dict[str, int]]
    """Peak bytes by kind, within each part of the model in forward and in backward."""
    peak_roles: dict[str, int]
    """Activation bytes at the peak of the step, by the part of the model whose forward created them."""
    peak_operation: tuple[str, list[tuple[int, ...]], str]
    """Operation that reached the peak, the shapes of its results, and its part of the model."""
    messages: list[Message]
    """Collectives and point-to-point messages in the order of issue."""
    flops: int
    """FLOPs of matmuls and attention in forward and backward, including recomputation; causal attention counts as full."""
    operations: Counter[Operation]
    """Number of calls per distinct operator call that computes something."""

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Bytes at the peak of the step, by kind."""
        return max(self.moments.values(), key=lambda kinds: sum(kinds.values()), default={})

    @property
    def peak(self) -> int:
        """Peak bytes of the step."""
        return sum(self.peak_bytes.values())

    def sent_bytes(self) -> dict[str, int]:
        """Bytes sent in the step, by mesh axis."""
        sent: Counter[str] = Counter()
        for message in self.messages:
            sent[message.axis] += message.bytes
        return dict(sent)

    def traffic(self) -> list[Traffic]:
        """Communication by axis, operation and dtype, the largest total first."""
        counts: Counter[tuple[str, str, torch.dtype]] = Counter()
        sums: Counter[tuple[str, str, torch.dtype]] = Counter()
        for message in self.messages:
            key = message.axis, message.operation, message.dtype
            counts[key] += 1
            sums[key] += message.bytes
        return [Traffic(*key, counts[key], size) for key, size in sums.most_common()]


class Position(NamedTuple):
    """State of `Counters` at some time."""

    messages: int
    flops: int
    calls: int


class Counters:
    """Context manager that counts messages, FLOPs and operator calls; equal sections may be run once and counted often."""

    def __init__(self) -> None:
        self.flops, self.log, self.recorder = FlopCounter(), OperatorLog(), Recorder()
        self._modes = ExitStack()

    def __enter__(self) -> "Counters":
        for mode in (self.flops, self.log, self.recorder):
            self._modes.enter_context(mode)
        self.clear()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._modes.close()

    def clear(self) -> None:
        """Count from zero."""
        self.recorder.messages, self.log.operations, self.log.times, self.flops.total = [], [], [], 0

    def position(self) -> Position:
        """Counts until now."""
        return Position(len(self.recorder.messages), self.flops.total, len(self.log.operations))

    def repeat(self, begin: Position, times: int) -> None:
        """Count all that was counted since a position `times` more times."""
        self.recorder.messages += self.recorder.messages[begin.messages :] * times
        self.flops.total += (self.flops.total - begin.flops) * times
        self.log.times[begin.calls :] = [count * (1 + times) for count in self.log.times[begin.calls :]]

    def few(self, items: Sequence[Item]) -> Iterator[Item]:
        """Iterate over the first, the second and the last item; work on the second is counted for all between.

        Args:
            items: items with equal work, but for the first and the last.
        """
        skipped = max(0, len(items) - FEW)
        for index, item in enumerate([*items[: FEW - 1], items[-1]] if skipped else items):
            begin = self.position()
            yield item
            if skipped and index == FEW - 2:
                self.repeat(begin, skipped)


def count_step(
    model: nn.Module,
    optimizer: DistributedOptimizer,
    batches: Sequence[AnyBatch],
    step: Callable[[Sequence[AnyBatch]], object],
    anatomy: Anatomy,
    counters: Counters | None = None,
    *,
    in_brief: bool = False,
) -> StepCounts:
    """Count one step on this rank. Must be called by every rank.

    Args:
        model: parallelized model, after at least one step.
        optimizer: optimizer over the model's parameters.
        batches: micro-batches of the step.
        step: callable that trains on micro-batches.
        anatomy: anatomy of the full model.
        counters: counters of the caller, who leaves out equal sections of the step; None: new ones.
        in_brief: True to run the first two micro-batches and the last one only. The counts of the second are repeated for those
            that are left out, as all but the first and the last do the same work.
    """
    counters = counters or Counters()
    skipped = max(0, len(batches) - FEW) if in_brief else 0
    some = [*batches[: FEW - 1], batches[-1]] if skipped else batches
    begins: list[Position] = []  # of each micro-batch

    def begin_micro_batch(*_: object) -> None:
        begins.append(counters.position())
        if skipped and len(begins) == FEW:
            counters.repeat(begins[-2], skipped)

    gc.collect()  # without the cyclic collector, tensors are freed at the same point in every run
    gc.disable()
    try:
        with LiveBytes() as live, counters:
            optimizer.track(live)
            live.track_roles(model, anatomy)
            state = live.current.copy()
            inputs = [
                find_tensors([*vars(batch).values(), *getattr(batch, "inputs", {}).values()]) for batch in batches
            ]
            live.track("activations", (tensor for tensors in inputs for tensor in tensors))
            counters.clear()
            hook = model.register_forward_pre_hook(begin_micro_batch, prepend=True)
            step(some)
            hook.remove()
    finally:
        gc.enable()
    operations: Counter[Operation] = Counter()
    for operation, times in zip(mark_updates(counters.log.operations), counters.log.times, strict=True):
        operations[operation] += times
    return StepCounts(
        _by_kind(state),
        {moment: _by_kind(kinds) for moment, kinds in live.moments.items()},
        _by_kind(live.roles_at_peak),
        live.peak_operation,
        counters.recorder.messages,
        counters.flops.total,
        operations,
    )


def count_calls(step: Callable[[], object], counters: Counters) -> StepCounts:
    """Count only the communication and the FLOPs of a step."""
    with counters:
        step()
    return StepCounts({}, {}, {}, ("", [], ""), counters.recorder.messages, counters.flops.total, Counter())


def _by_kind(kinds: Counter[Any]) -> dict[str, int]:
    return {kind: size for kind, size in kinds.items() if size}


def extrapolate(first: StepCounts, second: StepCounts, times: int) -> StepCounts:
    """Extrapolate counts linearly: second + (second - first) x times.

    The peak bytes of each part of the model are extrapolated separately, so another part may have the peak in the result.
    `peak_roles` is omitted. A call over a list of all weights differs between the two steps: its count in the smaller one
    becomes negative, so that sums over calls are extrapolated like all others. A message about all layers is larger in the
    larger step.

    Args:
        first: counts of the smaller step; bytes of a part that it lacks are taken as constant.
        second: counts of the larger step.
        times: number of differences to add; 0 returns the counts of the larger step.
    """
    messages, between = list(second.messages), Counter(second.messages)
    between.subtract(first.messages)
    for smaller in [message for message, count in between.items() for _ in range(-count)]:
        of_all = (
            large for large, count in between.items() if count > 0 and large._replace(bytes=smaller.bytes) == smaller
        )
        if larger := next(of_all, None):
            between[larger] -= 1
            grown = extrapolate_value(smaller.bytes, larger.bytes, times)
            messages[messages.index(larger)] = larger._replace(bytes=grown)
    messages += [message for message, count in between.items() for _ in range(count * times)]
    names = first.operations.keys() | second.operations.keys()
    calls = {name: extrapolate_value(first.operations[name], second.operations[name], times) for name in names}
    moments = {
        name: _extrapolate_bytes(first.moments.get(name, {}), kinds, times) for name, kinds in second.moments.items()
    }
    return StepCounts(
        _extrapolate_bytes(first.state_bytes, second.state_bytes, times),
        moments,
        {},
        second.peak_operation,
        messages,
        extrapolate_value(first.flops, second.flops, times),
        Counter(calls),
    )


def _extrapolate_bytes(first: Mapping[Name, int], second: Mapping[Name, int], times: int) -> dict[Name, int]:
    return {
        name: extrapolate_value(first.get(name, 0) if first else size, size, times) for name, size in second.items()
    }


def extrapolate_value(first: int, second: int, times: int) -> int:
    """Extrapolate a value linearly: second + (second - first) x times."""
    return second + (second - first) * times


class FlopCounter(TorchDispatchMode):
    """Sum of the FLOPs of matmuls and attention, by the formulas of torch and `FORMULAS`."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensor dispatches first; its operations on local tensors then reach this mode
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket) or FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def _grouped_flops(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    """FLOPs of rows [R, K] x matrices [E, K, N], or of weight gradients [M, R] x [R, N]: one matrix per row."""
    return 2 * x.shape[-2] * x.shape[-1] * weight.shape[-1]


def _fp8_flops(a: Tensor, scale_a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    """FLOPs of rows [R, K] x [N, K] or [E, N, K], or of weight gradients [N, R] x [M, R]; sums are over the last dim."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[-2]


def _attention_flops(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(q.shape, k.shape, v.shape)


def _attention_backward_flops(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)


def _varlen_flops(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> int:
    """FLOPs of attention by documents, [tokens, heads, width] each: every document counts as the longest one."""
    longest = args[3]
    return sdpa_flop_count(*_varlen_shapes(q, k, v, longest))


def _varlen_backward_flops(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any, **kwargs: Any
) -> int:
    query, *keys = _varlen_shapes(q, k, v, args[3])
    return sdpa_backward_flop_count((*query[:-1], v.shape[-1]), query, *keys)


def _varlen_shapes(q: Tensor, k: Tensor, v: Tensor, longest: int) -> tuple[tuple[int, ...], ...]:
    tokens, heads, width = q.shape
    return (1, heads, tokens, width), (1, heads, longest, width), (1, heads, longest, v.shape[-1])


def _add_matmul_flops(total: Tensor, left: Tensor, right: Tensor, **kwargs: Any) -> int:
    return 2 * left.shape[0] * left.shape[1] * right.shape[1]


# FLOP formulas of operations for which torch 2.13 has none.
aten = torch.ops.aten
VARLEN, VARLEN_BACKWARD = varlen_operators()
FORMULAS: dict[Any, Callable[..., int]] = {
    aten._grouped_mm: _grouped_flops,
    few_sizes_grouped_mm._opoverload.overloadpacket: _grouped_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    VARLEN: _varlen_flops,
    VARLEN_BACKWARD: _varlen_backward_flops,
    fp8_matmul._opoverload.overloadpacket: _fp8_flops,
    fp8_grouped_matmul._opoverload.overloadpacket: _fp8_flops,
    add_matmul._opoverload.overloadpacket: _add_matmul_flops,
}
