"""Exposed and hidden time of the collectives of FSDP2 on an accelerator.

FSDP2 runs its collectives on streams of its own, and lets the computing stream wait for their events in code that has no hook.
This module notes when the computing stream arrives at such a wait, by hooks right before those of FSDP2, and when the
collective ends, by an event after it on its stream: the computing stream waits from the one to the other.

    collective        the computing stream waits for it
    all-gather        before forward and before backward of its unit
    reduce-scatter    after the backward of the next unit; the last one at the end of backward

The collectives are subclasses of FSDP2's own, so that a unit may be given others: `set_symm_mem_for_comm` and
`set_allocate_memory_from_process_group_for_comm` of torch work, and its collectives are then not measured.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.utils._pytree import tree_leaves

from weft.comm.stopwatch import active_clock
from weft.compat import is_in_backward
from weft.parallel.data.aligned import gather_aligned, reduce_scatter_aligned


class _Flight(NamedTuple):
    """Events before and after a collective, on its stream."""

    group: dist.ProcessGroup
    began: Any
    done: Any


class ScatterTimer:
    """Waits for the reduce-scatters of all units of a model."""

    def __init__(self) -> None:
        self.flights: list[_Flight] = []

    def arrive(self, *_: Any) -> None:
        """Note that the computing stream is about to wait for the reduce-scatters in flight."""
        clock = active_clock()
        arrived = clock.event() if clock and self.flights else None
        self._add(arrived)

    def end(self) -> None:
        """Note that the computing stream had nothing else to do after the last reduce-scatter of a backward was issued."""
        self._add(None)

    def _add(self, arrived: Any) -> None:
        clock, flights, self.flights = active_clock(), self.flights, []
        for group, began, done in flights if clock else ():
            assert clock is not None
            clock.add(group, began if arrived is None else arrived, done, began, done)


class TimedReduceScatter(DefaultReduceScatter):
    """Reduce-scatter of a unit of FSDP2, for `set_custom_reduce_scatter`, whose events are noted while a clock measures.

    Args:
        timer: shared by all units of the model.
    """

    def __init__(self, timer: ScatterTimer):
        self.timer = timer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """As the default of FSDP2."""
        clock = active_clock()
        self.timer.end()
        began = clock.event() if clock else None
        work = reduce_scatter_aligned(output_tensor, input_tensor, op, group=group, async_op=async_op)
        if clock:
            self.timer.flights.append(_Flight(group, began, clock.event()))
        return work


class TimedAllGather(DefaultAllGather):
    """All-gather of a unit of FSDP2, for `set_custom_all_gather`, and its hooks.

    Args:
        timer: of the reduce-scatters of the model.
        gather: the collective, with the arguments of `__call__`.
    """

    def __init__(self, timer: ScatterTimer, gather: Callable[..., Any]):
        self.timer, self.gather = timer, gather
        self.flight: _Flight | None = None
        self.arrived: Any = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """As the default of FSDP2."""
        clock = active_clock()
        began = clock.event() if clock else None
        work = self.gather(output_tensor, input_tensor, group=group, async_op=async_op)
        self.flight = _Flight(group, began, clock.event()) if clock else None
        return work

    @torch.compiler.disable
    def arrive(self, *_: Any) -> None:
        """Note that the computing stream may be about to wait for the all-gather."""
        clock = active_clock()
        self.arrived = clock.event() if clock else None

    @torch.compiler.disable
    def resume(self, *_: Any) -> None:
        """Note the wait, if there was one."""
        clock = active_clock()
        if clock and self.flight is not None and self.arrived is not None:
            group, began, done = self.flight
            clock.add(group, self.arrived, done, began, done)
            self.flight = None
        self.arrived = None

    @torch.compiler.disable
    def before_forward(self, *_: Any) -> None:
        """Hook before that of FSDP2."""
        if not is_in_backward():  # blocks are recomputed in backward
            self.timer.end()
        self.arrive()

    @torch.compiler.disable
    def after_gather(self, unit: nn.Module, args: Any, kwargs: Any) -> None:
        """Hook after that of FSDP2: the gradients of these inputs are complete when the backward of the unit ends."""
        self.resume()
        if active_clock():
            for tensor in _with_gradient((args, kwargs))[:1]:
                tensor.register_hook(self.timer.arrive)

    @torch.compiler.disable
    def before_backward_hooks(self, unit: nn.Module, args: Any, outputs: Any) -> None:
        """Hook before that of FSDP2, which gathers the weights when the gradient of an output is known."""
        if active_clock():
            for tensor in _with_gradient(outputs):
                tensor.register_hook(self.arrive)

    @torch.compiler.disable
    def after_backward_hooks(self, unit: nn.Module, args: Any, outputs: Any) -> None:
        """Hook after that of FSDP2."""
        if active_clock():
            for tensor in _with_gradient(outputs):
                tensor.register_hook(self.resume)


def _with_gradient(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.requires_grad]


def time_fsdp(model: nn.Module, gathers: Mapping[nn.Module, Callable[..., Any]], *, reduce_scatters: bool) -> None:
    """Let the clock that measures this rank (`weft.comm.stopwatch`) see the collectives of a sharded model, in place.

    Args:
        model: model whose units have been made by `fully_shard`.
        gathers: all-gathers of units that have custom ones.
        reduce_scatters: False if other custom reduce-scatters are set.
    """
    timer = ScatterTimer()
    for unit in model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        gather, module = TimedAllGather(timer, gathers.get(unit, gather_aligned)), unit
        unit.set_custom_all_gather(gather)
        if reduce_scatters:
            unit.set_custom_reduce_scatter(TimedReduceScatter(timer))
        assert isinstance(module, nn.Module)
        module.register_forward_pre_hook(gather.before_forward, prepend=True)
        module.register_forward_pre_hook(gather.after_gather, with_kwargs=True)
        module.register_forward_hook(gather.before_backward_hooks, prepend=True)
        module.register_forward_hook(gather.after_backward_hooks)
