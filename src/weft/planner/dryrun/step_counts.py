"""What one rank does and holds in one training step, counted in the same way in a real run and in a dry one."""

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from weft.anatomy.roles import Anatomy
from weft.comm.collectives import Message, Recorder
from weft.data import MicroBatch
from weft.memory.live_bytes import LiveBytes, Moment
from weft.planner.costmodel.operators import Operation, OperatorLog, in_phases

Name = TypeVar("Name")


class Traffic(NamedTuple):
    """Messages of one kind in one step."""

    axis: str
    operation: str
    dtype: torch.dtype
    messages: int
    bytes: int
    """Sent by one rank, under a ring algorithm."""


@dataclass(frozen=True)
class Count:
    """What one rank does and holds in one step."""

    state_bytes: dict[str, int]
    """Between two steps, by kind (`weft.memory.live_bytes.Kind`)."""
    moments: dict[Moment, dict[str, int]]
    """At the fullest moment of each part of the model, in forward and in backward, by kind."""
    peak_roles: dict[str, int]
    """Of the activations among them: by the part of the model in whose forward they were made."""
    peak_maker: tuple[str, list[tuple[int, ...]], str]
    """The operation that made the fullest moment, the shapes of its results, and the part of the model."""
    messages: list[Message]
    """In the order in which they are issued."""
    flops: int
    """Of matrix products and attention, in forward and backward, recomputation included; causal attention counts whole."""
    operations: Counter[Operation]
    """Every call of an operator that computes something, and how often."""

    @property
    def peak_bytes(self) -> dict[str, int]:
        """At the fullest moment of the step, by kind."""
        return max(self.moments.values(), key=lambda kinds: sum(kinds.values()), default={})

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment."""
        return sum(self.peak_bytes.values())

    def traffic(self) -> list[Traffic]:
        """Messages by axis, operation and format, the largest sums first."""
        counts: Counter[tuple[str, str, torch.dtype]] = Counter()
        sums: Counter[tuple[str, str, torch.dtype]] = Counter()
        for message in self.messages:
            key = message.axis, message.operation, message.dtype
            counts[key] += 1
            sums[key] += message.bytes
        return [Traffic(*key, counts[key], size) for key, size in sums.most_common()]


def count_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[MicroBatch],
    step: Callable[[Sequence[MicroBatch]], object],
    anatomy: Anatomy,
    most: int | None = None,
) -> Count:
    """Count what one step does and holds on this rank. Every rank must call it.

    Args:
        model: parallelized, after at least one step.
        optimizer: over its parameters.
        batches: micro-batches of the step.
        step: trains on micro-batches.
        anatomy: of the whole model.
        most: micro-batches to run at most, three or more: the first ones and the last. What the last but one of them does is
            counted for those between, as all but the first and the last do the same.
    """
    some = list(batches) if most is None or len(batches) <= most else [*batches[: most - 1], batches[-1]]
    skipped = len(batches) - len(some)
    begins: list[tuple[int, int, int]] = []  # messages, floating-point operations and calls when each forward begins
    gc.collect()  # what dies later dies by itself, at the same moment in every run
    gc.disable()
    try:
        with LiveBytes() as live, FlopCounter() as flops, OperatorLog() as log, Recorder() as recorder:
            live.track_training(model, optimizer)
            live.watch_roles(model, anatomy)
            state = live.current.copy()
            live.track("activations", (tensor for batch in batches for tensor in vars(batch).values()))
            recorder.messages.clear()
            flops.total = 0
            log.operations.clear()
            hook = model.register_forward_pre_hook(
                lambda *_: begins.append((len(recorder.messages), flops.total, len(log.operations))), prepend=True
            )
            step(some)
            hook.remove()
    finally:
        gc.enable()
    messages, total, calls = recorder.messages, flops.total, log.operations
    operations = Counter(in_phases(calls))
    if skipped:
        (begin, before, first), (end, after, last) = begins[len(some) - 2 : len(some)]
        messages = messages[:end] + messages[begin:end] * skipped + messages[end:]
        total += (after - before) * skipped
        for operation in calls[first:last]:
            operations[operation] += skipped
    moments = {moment: _by_kind(kinds) for moment, kinds in live.moments.items()}
    roles = _by_kind(live.roles_at_peak)
    return Count(_by_kind(state), moments, roles, live.made_peak, messages, total, operations)


def count_calls(step: Callable[[], object]) -> Count:
    """The messages and floating-point operations of a step, and nothing else."""
    with FlopCounter() as flops, Recorder() as recorder:
        step()
    return Count({}, {}, {}, ("", [], ""), recorder.messages, flops.total, Counter())


def _by_kind(kinds: Counter[Any]) -> dict[str, int]:
    return {kind: size for kind, size in kinds.items() if size}


def extrapolate(first: Count, second: Count, times: int) -> Count:
    """The count of a step that is larger than a second one by so many times what this has more than a first one.

    Every figure goes on in a straight line; so do the bytes of the fullest moment of each part, of which another may become the
    fullest. Calls of operators, and the makers of activations, are left out.

    Args:
        first: of a step of less; of its bytes, what it does not have is as in the second.
        second: of a step of more.
        times: 0 is the second.
    """
    between = Counter(second.messages)
    between.subtract(first.messages)
    more = [message for message, count in between.items() for _ in range(count * times)]
    moments = {name: _lines(first.moments.get(name, {}), kinds, times) for name, kinds in second.moments.items()}
    return Count(
        _lines(first.state_bytes, second.state_bytes, times),
        moments,
        {},
        second.peak_maker,
        second.messages + more,
        extend(first.flops, second.flops, times),
        Counter(),
    )


def _lines(first: Mapping[Name, int], second: Mapping[Name, int], times: int) -> dict[Name, int]:
    return {name: extend(first.get(name, 0) if first else size, size, times) for name, size in second.items()}


def extend(first: int, second: int, times: int) -> int:
    """A figure on the line through two, so many times their distance behind the second."""
    return second + (second - first) * times


class FlopCounter(TorchDispatchMode):
    """Adds up the floating-point operations of matrix products and attention, by the formulas of torch and those below."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper (DTensor) goes first; its operations on local tensors come back here
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket) or FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def _grouped_flops(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    """Rows [R, K] x matrices [E, K, N], or for the matrices' gradients [M, R] x [R, N]: each row meets one matrix."""
    return 2 * x.shape[-2] * x.shape[-1] * weight.shape[-1]


def _attention_flops(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(q.shape, k.shape, v.shape)


def _attention_backward_flops(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)


# Of operations that torch 2.13 knows no formula for.
aten = torch.ops.aten
FORMULAS: dict[Any, Callable[..., int]] = {
    aten._grouped_mm: _grouped_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
