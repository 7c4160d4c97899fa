"""Pipeline stage and runtime for torch.distributed.pipelining that follow a Weft schedule.

torch's own `PipelineStage` keeps a fixed-shape buffer for every micro-batch of a step. This one allocates a buffer when a
message is due, with the shape of its micro-batch, and keeps only the graph edge of an output. A stage therefore holds exactly
what its schedule implies, and steps may differ in length.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining.schedules import OVERLAP_F_B, _Action, _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _PipelineStageBase

from weft.comm.lanes import Lanes
from weft.parallel.pipeline.schedule import Schedule, slot_text
from weft.parallel.pipeline.weight_gradients import Deferred, WeightGradientQueue
from weft.precision.fp16_backward import from_message, to_message

Run = Callable[[int, int, list[Tensor]], list[Tensor]]
"""(stage, micro-batch, message of the previous stage) -> message for the next stage; on the last stage, the objective."""


class Stage(_PipelineStageBase):
    """Runs one stage and its communication; the public methods are the ones that torch's runtime calls."""

    def __init__(
        self,
        index: int,
        num_stages: int,
        group: dist.ProcessGroup,
        device: torch.device,
        run: Run,
        allocate_message: Callable[[int, int], list[Tensor]],
        queue: WeightGradientQueue | None,
        add_up: Callable[[], None],
        reduce: Callable[[], None],
        fp16_backward: bool = False,
        first_trained: int = 0,
    ):
        """
        Args:
            index: index of the stage.
            num_stages: stages of the pipeline.
            group: process group of the pp ranks.
            device: device of this rank.
            run: forward of the stage.
            allocate_message: (stage, micro-batch) -> buffers for a message into the stage from the stage before it.
            queue: queue of deferred weight gradients, if backwards are split.
            add_up: called when deferred weight gradients have been computed.
            reduce: called when the stage has all its gradients.
            fp16_backward: True if gradients of bfloat16 tensors are held in float16.
            first_trained: index of the first stage with weights that train; earlier stages have no backward.
        """
        super().__init__(nn.Module(), index, num_stages, device, group)
        self.run, self.allocate_message, self.queue, self.fp16_backward = run, allocate_message, queue, fp16_backward
        self.add_up, self.reduce = add_up, reduce
        self.has_backward, self.sends_gradient = index >= first_trained, index > first_trained
        """True if this stage has a backward; true if the previous stage has one too, and waits for its gradients."""
        self.args_recv_info, self.act_send_info = {0: ()}, {}  # torch looks for skip connections here
        self.inputs: dict[int, list[Tensor]] = {}
        """Received and not yet used, by micro-batch."""
        self.outputs: dict[int, list[Tensor]] = {}
        """Computed and not yet sent, by micro-batch."""
        self.saved: dict[int, tuple[list[Tensor], list[Any]]] = {}
        """Inputs, and the graph edge of each output, between forward and backward; the edge is None if the output does not
        depend on a trained parameter."""
        self.output_gradients: dict[int, list[Tensor]] = {}
        self.input_gradients: dict[int, list[Tensor]] = {}
        self.sending: list[dist.Work] = []
        self.deferred: dict[int, list[Deferred]] = {}
        """Weight gradients between the two parts of a backward, by micro-batch."""

    # Communication

    def get_fwd_recv_ops(self, micro_batch: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        self.inputs[micro_batch] = self.allocate_message(self.stage_index, micro_batch)
        return self._transfers(dist.irecv, self.inputs[micro_batch], self.stage_index - 1)

    def get_fwd_send_ops(self, micro_batch: int) -> list[dist.P2POp]:
        if not self.is_last:
            self.send(self.outputs.pop(micro_batch), self.stage_index + 1)
        return []

    def get_bwd_recv_ops(self, micro_batch: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward:
            return []
        self.output_gradients[micro_batch] = self.allocate_message(self.stage_index + 1, micro_batch)
        return self._transfers(dist.irecv, self.output_gradients[micro_batch], self.stage_index + 1)

    def get_bwd_send_ops(self, micro_batch: int) -> list[dist.P2POp]:
        if self.sends_gradient:
            self.send(self.input_gradients.pop(micro_batch), self.stage_index - 1)
        return []

    def send(self, tensors: list[Tensor], stage: int) -> None:
        """Start sending. The base class would keep every message until the end of the step."""
        self.sending = [work for work in self.sending if not work.is_completed()]
        self.sending += dist.batch_isend_irecv(self._transfers(dist.isend, tensors, stage))

    def finish_sending(self) -> None:
        """Wait until all messages are sent."""
        for work in self.sending:
            work.wait()
        self.sending = []

    def _transfers(self, operation: Any, tensors: list[Tensor], stage: int) -> list[dist.P2POp]:
        peer = self.stage_index_to_group_rank[stage]
        return [dist.P2POp(operation, tensor, group=self.group, group_peer=peer) for tensor in tensors]

    def set_local_fwd_input(self, outputs: Any, micro_batch: int) -> None:
        self.inputs[micro_batch] = [tensor.detach() for tensor in outputs]

    def get_local_bwd_output(self, micro_batch: int) -> Any:
        return self.input_gradients.pop(micro_batch) if self.sends_gradient else []

    def set_local_bwd_input(self, gradients: Any, micro_batch: int) -> None:
        if self.has_backward:
            self.output_gradients[micro_batch] = gradients

    # Computation

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = True
    ) -> list[Tensor]:
        inputs = self.inputs.pop(fwd_chunk_id, [])
        trains = torch.is_grad_enabled() and self.has_backward
        inputs = [tensor.requires_grad_(trains and self.sends_gradient) for tensor in inputs]
        outputs = self.run(self.stage_index, fwd_chunk_id, inputs)
        if trains:
            edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in outputs]
            self.saved[fwd_chunk_id] = inputs, edges
        outputs = [tensor.detach() for tensor in outputs]
        if not self.is_last and self.stage_index_to_group_rank[self.stage_index + 1] != self.group_rank:
            self.outputs[fwd_chunk_id] = outputs
        return outputs

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        inputs, edges = self.saved.pop(bwd_chunk_id)
        gradients: list[Any] = self.output_gradients.pop(bwd_chunk_id, [None] * len(edges))
        if self.fp16_backward and not self.is_last:
            gradients = [from_message(gradient) for gradient in gradients]
        used = [(edge, gradient) for edge, gradient in zip(edges, gradients, strict=True) if edge is not None]
        torch.autograd.backward([edge for edge, _ in used], [gradient for _, gradient in used])
        if self.sends_gradient:
            self.input_gradients[bwd_chunk_id] = [
                torch.zeros_like(tensor) if tensor.grad is None else to_message(tensor.grad) for tensor in inputs
            ]
        if self.queue is not None:
            self.deferred[bwd_chunk_id] = self.queue.take_pending()
            if full_backward:
                self.backward_weight_one_chunk(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        WeightGradientQueue.finish(self.deferred.pop(bwd_chunk_id))
        self.add_up()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self.reduce()

    # Already known here; the base class would exchange it with the other ranks

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        return ()


class Runtime(_PipelineScheduleRuntime):
    """torch's pipeline runtime, with the action order of a Weft schedule."""

    def __init__(self, schedule: Schedule, stages: list[Stage], lanes: Lanes | None = None):
        """
        Args:
            schedule: order of the actions.
            stages: stages of this rank.
            lanes: lanes of the forward and the backward of a joint slot; None to run one after the other.
        """
        self.own_stages, self.lanes = stages, lanes
        super().__init__(stages=stages, n_microbatches=schedule.num_micro_batches, scale_grads=False)
        self.pipeline_order = {
            rank: [_Action.from_str(slot_text(slot)) for slot in slots] for rank, slots in enumerate(schedule.slots)
        }
        with _quiet():
            self._prepare_schedule_with_comms(self.pipeline_order)
        self.register_custom_function(OVERLAP_F_B, self._run_jointly)

    def step_all(self) -> None:
        """Run every action of one step on this rank."""
        micro_batches: list[Any] = [()] * self._n_microbatches
        with _quiet():
            self._step_microbatches(micro_batches, return_outputs=False)
        for stage in self.own_stages:
            stage.finish_sending()

    def _run_jointly(self, action: Any, ctx: Any) -> None:
        """Run an independent forward and backward: together in two lanes, or one after the other."""
        forward, backward = action.sub_actions
        stages = {stage.stage_index: stage for stage in self.own_stages}

        def run_forward() -> None:
            index, micro_batch = forward.stage_index, forward.microbatch_index
            for work in self.fwd_recv_ops.pop((index, micro_batch), []):
                work.wait()
            outputs = stages[index].forward_one_chunk(micro_batch)
            if index + 1 in stages:
                stages[index + 1].set_local_fwd_input(outputs, micro_batch)

        def run_backward() -> None:
            index, micro_batch = backward.stage_index, backward.microbatch_index
            for work in self.bwd_recv_ops.pop((index, micro_batch), []):
                work.wait()
            stages[index].backward_one_chunk(micro_batch)
            if index - 1 in stages:
                stages[index - 1].set_local_bwd_input(stages[index].get_local_bwd_output(micro_batch), micro_batch)

        if self.lanes is not None:
            self.lanes.run(run_forward, run_backward)
        else:
            run_forward()
            run_backward()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's runtime, which logs the whole schedule before it raises an error."""
    log = logging.getLogger("torch.distributed.pipelining.schedules")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)
