"""Reduce-scatters of FSDP2 that go on behind the backward where there are no streams: on CPU, between hosts.

FSDP2 waits for each. Where its result is a new gradient that nothing reads before the end of backward, that can wait.
"""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from weft.comm.collectives import reduce_scatter_single

MOST = 2  # under way at once: each holds the whole gradients of its unit


class Scatters:
    """What is under way, oldest first."""

    def __init__(self) -> None:
        self.in_flight: deque[tuple[dist.Work, Tensor, Tensor]] = deque()

    def add(self, work: dist.Work, output: Tensor, input: Tensor) -> None:
        """Wait for it at the end of this backward, or when there are more than can be held."""
        if not self.in_flight:
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self.in_flight.append((work, output, input))
        while len(self.in_flight) > MOST:
            self._land()

    def finish(self) -> None:
        """Wait for all."""
        while self.in_flight:
            self._land()

    def _land(self) -> None:
        work, *_ = self.in_flight.popleft()
        work.wait()


def groups_of(state: Any) -> list[Any]:
    """FSDP2's groups of parameters of a unit, given its state; torch 2.13 has several, those before one."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


class OverlappedReduceScatter:
    """What a unit of FSDP2 calls, by `set_custom_reduce_scatter`, in place of a reduce-scatter of torch.distributed.

    Args:
        unit: whose gradients are reduced, in the format in which they are kept.
        scatters: of all units.
    """

    def __init__(self, unit: Any, scatters: Scatters):
        self.parameters = [parameter for group in groups_of(unit._get_fsdp_state()) for parameter in group.fsdp_params]
        self.scatters = scatters

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for input and output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """The mean over ranks, by the end of this backward; at once where it is divided or added to another one."""
        adds_up = any(parameter.sharded_param.grad is not None for parameter in self.parameters)
        in_backward = torch._C._current_graph_task_id() != -1
        if op != dist.ReduceOp.AVG or adds_up or not in_backward:
            reduce_scatter_single(output_tensor, input_tensor, op, group=group)
            return
        work = reduce_scatter_single(output_tensor, input_tensor, op, group=group, async_op=True)
        self.scatters.add(work, output_tensor, input_tensor)


def scatter_behind_backward(model: Any) -> None:
    """Let the units of a sharded model, without replicas, reduce-scatter behind the backward, in place."""
    model.scatters = scatters = Scatters()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(OverlappedReduceScatter(module, scatters))  # type: ignore[arg-type]
