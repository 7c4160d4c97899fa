"""FSDP2 reduce-scatters overlapped with backward on devices without streams: on CPU, between hosts.

Without streams, FSDP2 waits for each reduce-scatter immediately. If the result is a new gradient, nothing reads it before the
end of backward, so that this module waits there instead.
"""

from collections import deque
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from weft.comm.collectives import reduce_scatter_single
from weft.compat import DefaultAllocMixin, call_after_backward, fsdp_param_groups, is_in_backward

MAX_IN_FLIGHT = 2  # each reduce-scatter in flight holds the unreduced gradients of its unit


class PendingReduceScatters:
    """Queue of reduce-scatters in flight, oldest first."""

    def __init__(self) -> None:
        self.in_flight: deque[tuple[dist.Work, Tensor, Tensor]] = deque()

    def add(self, work: dist.Work, output: Tensor, input: Tensor) -> None:
        """Queue a reduce-scatter, to be awaited at the end of this backward or when more than `MAX_IN_FLIGHT` are in flight."""
        if not self.in_flight:
            call_after_backward(self.finish)
        self.in_flight.append((work, output, input))
        while len(self.in_flight) > MAX_IN_FLIGHT:
            self._wait_oldest()

    def finish(self) -> None:
        """Wait for all reduce-scatters in flight."""
        while self.in_flight:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        work, *_ = self.in_flight.popleft()
        work.wait()


class OverlappedReduceScatter(DefaultAllocMixin):
    """Custom reduce-scatter of a unit of FSDP2, set by `set_custom_reduce_scatter`, that returns before it completes.

    Args:
        unit: unit of FSDP2; its gradients are reduced in the dtype in which they are stored.
        scatters: reduce-scatters in flight, shared by all units of the model.
    """

    def __init__(self, unit: Any, scatters: PendingReduceScatters):
        self.parameters = [parameter for group in fsdp_param_groups(unit) for parameter in group.fsdp_params]
        self.scatters = scatters

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Average over ranks by the end of this backward.

        The call is synchronous where FSDP2 reads the result earlier: to scale it, or to add it to an existing gradient.
        """
        accumulates = any(parameter.sharded_param.grad is not None for parameter in self.parameters)
        if op != dist.ReduceOp.AVG or accumulates or not is_in_backward():
            reduce_scatter_single(output_tensor, input_tensor, op, group=group)
            return
        work = reduce_scatter_single(output_tensor, input_tensor, op, group=group, async_op=True)
        self.scatters.add(work, output_tensor, input_tensor)


def overlap_reduce_scatter(model: Any) -> PendingReduceScatters:
    """Overlap the reduce-scatters of a sharded model without replicas with its backward, in place.

    Returns:
        The queue of all units of the model.
    """
    scatters = PendingReduceScatters()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(OverlappedReduceScatter(module, scatters))  # type: ignore[arg-type]
    return scatters
