"""Pipeline runtime of a rank: runs training steps and evaluations through its stages."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.anatomy.roles import Anatomy
from weft.comm.lanes import Lanes
from weft.data import AnyBatch
from weft.errors import ModelError, Refusal, raise_if_refused
from weft.parallel.data.ddp import GradientReducer
from weft.parallel.data.fsdp import accumulate_gradients, begin_pipelined_step, reduce_gradients
from weft.parallel.experts.router_stats import RouterStats
from weft.parallel.pipeline.partition import StageIO, stage_modules
from weft.parallel.pipeline.plan_schedule import load_schedule, stage_ranks
from weft.parallel.pipeline.probe import Shapes, sizes_of
from weft.parallel.pipeline.schedule import Schedule, forward_order
from weft.parallel.pipeline.stage import Runtime, Stage
from weft.parallel.pipeline.weight_gradients import WeightGradientQueue
from weft.parallel.sequence.forward_pass import ForwardPass
from weft.parallel.weights import to_local
from weft.plan import ResolvedPlan
from weft.topology.mesh import AXES, CONTEXT_AXES, ranks_along


class Forward(Protocol):
    """Forward of the active stage on a micro-batch, as `weft.training.forward_backward.forward`."""

    def __call__(self, batch: AnyBatch, *, index: int) -> ForwardPass: ...


Finish = Callable[[ForwardPass], Tensor]
"""(forward of the last stage, with the sums of all routers) -> objective to differentiate."""


class PipelineRuntime:
    """Stages of this rank: a partitioned model that is also sharded over all other axes."""

    def __init__(
        self,
        model: Any,
        anatomy: Anatomy,
        stage_io: StageIO,
        shapes: Shapes,
        plan: ResolvedPlan,
        mesh: DeviceMesh,
        queue: WeightGradientQueue | None,
        router_stats: RouterStats,
        reducer: GradientReducer | None,
        lanes: Lanes | None,
    ):
        """
        Args:
            model: partitioned into stages, and sharded over all other axes.
            anatomy: anatomy of the full model.
            stage_io: result of `partition_model`.
            shapes: shapes of the values that stages exchange; result of `trace_block_chain`.
            plan: plan.
            mesh: mesh of all ranks.
            queue: queue of deferred weight gradients, if the schedule splits backwards.
            router_stats: statistics of the model's routers.
            reducer: reducer of the model's gradients, if data parallelism made one.
            lanes: lanes of joint forwards and backwards, if they run together.
        """
        self.router_stats, self.reducer, self.lanes = router_stats, reducer, lanes
        self.model, self.stage_io, self.plan, self.queue, self.shapes = model, stage_io, plan, queue, shapes
        self.group, self.rank, self.ranks = mesh.get_group("pp"), mesh.get_local_rank("pp"), stage_ranks(plan)
        self.is_stage_leader = all(mesh.get_local_rank(axis) == 0 for axis in AXES if axis != "pp")
        """True on the first of the ranks that hold the same stages."""
        self.sequence_ranks = ranks_along(mesh, *CONTEXT_AXES) * (ranks_along(mesh, "tp") if plan.parallel.sp else 1)
        stage_io.sequence_parts = ranks_along(mesh, "tp") if plan.parallel.sp else 1
        self.shares_tied = anatomy.tied and self.ranks[0] != self.ranks[-1]
        self.anatomy, self.ends = anatomy, (anatomy.embedding, anatomy.head)
        self.runtimes: dict[int, Runtime] = {}
        self.batches: Sequence[AnyBatch] = ()
        self.forward: Forward | None = None
        self.finish: Finish | None = None
        self.unreduced: set[int] = set()
        self.before_reduction: Callable[[], None] | None = None

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """The head's weight if it is a copy of an embedding on another rank, so that it is counted once; else None."""
        if self.shares_tied and self.stage_io.has_last():
            return self.model.get_submodule(self.ends[1]).weight
        return None

    def schedule_of(self, num_micro_batches: int) -> Schedule:
        """The plan's schedule for a step with this number of micro-batches."""
        return load_schedule(self.plan, num_micro_batches)

    def train(
        self,
        batches: Sequence[Any],
        forward: Forward,
        finish: Finish,
        before_reduction: Callable[[], None] | None = None,
    ) -> None:
        """Run forward and backward of all micro-batches in schedule order, and reduce the gradients once.

        Args:
            batches: micro-batches of this data rank, the same on all pp ranks.
            forward: runs the model.
            finish: computes the objective; called on the last stage.
            before_reduction: called once per rank, when all its gradients are accumulated.

        Raises:
            ModelError: no parameter trains, or a parameter trains whose stage was frozen when the model was parallelized.
        """
        raise_if_refused(self._reason_against_frozen())
        self._begin(batches, forward, finish)
        self.before_reduction = before_reduction
        if len(batches) not in self.runtimes:
            self.runtimes[len(batches)] = Runtime(self.schedule_of(len(batches)), self._stages(), self.lanes)
        self.unreduced = set(self.stage_io.own)
        begin_pipelined_step(self.model, self.plan, self.reducer)
        self.runtimes[len(batches)].step_all()
        if self.shares_tied:
            self._sum_tied_gradients()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Any], forward: Forward, finish: Finish) -> None:
        """Run forward of all micro-batches, in the order of `forward_order`. Arguments as in `train`."""
        self._begin(batches, forward, finish)
        stages = {stage.stage_index: stage for stage in self._stages()}
        receiving: dict[tuple[int, int], list[dist.Work]] = {}
        for index, _, micro_batch in forward_order(self.ranks, len(batches)):
            following = stages.get(index + 1)
            if index in stages:
                for work in receiving.pop((index, micro_batch), []):
                    work.wait()
                outputs = stages[index].forward_one_chunk(micro_batch)
                if following is not None:
                    following.set_local_fwd_input(outputs, micro_batch)
                else:
                    stages[index].get_fwd_send_ops(micro_batch)
            elif following is not None:
                receiving[index + 1, micro_batch] = dist.batch_isend_irecv(following.get_fwd_recv_ops(micro_batch))
        for stage in stages.values():
            stage.finish_sending()

    def _reason_against_frozen(self) -> Refusal | None:
        """Reason against a step in which no weight trains, or in which a weight trains that was frozen at `parallelize`."""
        first = self.stage_io.first_trained
        if first == len(self.ranks):
            return Refusal(
                "no parameter of the model trains",
                where=None,
                rule="a step trains the parameters whose requires_grad was True in weft.parallelize",
                fix="set requires_grad of the parameters to train before weft.parallelize",
                error=ModelError,
            )
        for stage in (stage for stage in self.stage_io.own if stage < first):
            for module in stage_modules(self.anatomy, self.stage_io.chain, self.stage_io.stages, stage):
                for name, parameter in self.model.get_submodule(module).named_parameters():
                    if parameter.requires_grad:
                        return Refusal(
                            f"{module}.{name} trains, but was frozen in weft.parallelize",
                            where=f"stage {stage} of the pipeline",
                            rule="stages before the first stage with a trained parameter get no gradients",
                            fix="set its requires_grad before weft.parallelize",
                            error=ModelError,
                        )
        return None

    def _begin(self, batches: Sequence[Any], forward: Forward, finish: Finish) -> None:
        self.batches, self.forward, self.finish = batches, forward, finish

    def _stages(self) -> list[Stage]:
        device, fp16_backward = next(self.model.parameters()).device, self.plan.precision.backward == "fp16"
        stages = [
            Stage(
                index,
                len(self.ranks),
                self.group,
                device,
                self._run,
                self._allocate_message,
                self.queue,
                partial(accumulate_gradients, self.model, self.plan),
                self._on_stage_gradients,
                fp16_backward,
                self.stage_io.first_trained,
            )
            for index in self.stage_io.own
        ]
        for stage in stages:
            stage.stage_index_to_group_rank = dict(enumerate(self.ranks))
        return stages

    def _run(self, index: int, micro_batch: int, inputs: list[Tensor]) -> list[Tensor]:
        """Forward of one stage."""
        assert self.forward is not None
        assert self.finish is not None
        batch, received = self.batches[micro_batch], len(self.stage_io.message_into(index))
        with self.stage_io.running(index, inputs[:received]):
            forward_pass = self.forward(batch, index=micro_batch)
        sent, sums = self.stage_io.take_sent(), forward_pass.router_sums
        if sums is not None and inputs:
            sums = forward_pass.router_sums = sums + inputs[received]
        if index == len(self.ranks) - 1:
            return [self.finish(forward_pass)]
        for tensor, (shape, dtype) in zip(sent, self._message_into(index + 1, batch), strict=True):
            if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
                raise ModelError(
                    f"stage {index} outputs values {tuple(tensor.shape)} of {tensor.dtype}",
                    where="plan.parallel.pp",
                    rule=f"the next stage expects {shape} of {dtype}",
                    fix="set plan.parallel.pp = 1",
                )
        message = [tensor.contiguous() for tensor in sent]
        return message if sums is None else [*message, sums]

    def _allocate_message(self, stage: int, micro_batch: int) -> list[Tensor]:
        """Buffers for a message into a stage: values of this rank's tokens, and router sums if they are recorded."""
        batch, watch = self.batches[micro_batch], self.router_stats
        device = batch.targets.device
        values = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._message_into(stage, batch)]
        return [*values, watch.zero_sums(batch.rows, device)] if watch.is_on() else values

    def _message_into(self, stage: int, batch: AnyBatch) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of the values in a message into a stage."""
        sizes, values = sizes_of(batch, self.sequence_ranks), self.stage_io.chain.values
        return [
            (tuple(dim.of(sizes) for dim in self.shapes[index]), values[index].dtype)
            for index in self.stage_io.message_into(stage)
        ]

    def _on_stage_gradients(self) -> None:
        """Called when a stage has all its gradients; after the last stage of this rank, reduce them over the data ranks."""
        self.unreduced.pop()
        if not self.unreduced:
            if self.before_reduction is not None:
                self.before_reduction()
            reduce_gradients(self.model, self.plan, self.reducer)

    def _sum_tied_gradients(self) -> None:
        """Add up the gradients of a tied embedding and the head's copy of it, between the two ranks that hold them."""
        ends = {self.ranks[0]: self.ends[0], self.ranks[-1]: self.ends[1]}
        if self.rank not in ends:
            return
        weight: Any = self.model.get_submodule(ends.pop(self.rank)).weight
        if not weight.requires_grad:
            return
        own = to_local(weight.grad)
        (peer,) = ends
        received = torch.empty_like(own)
        send = dist.P2POp(dist.isend, own, group=self.group, group_peer=peer)
        receive = dist.P2POp(dist.irecv, received, group=self.group, group_peer=peer)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        own += received


def running_stage(pipeline: PipelineRuntime | None) -> int:
    """Index of the stage that a model is running; 0 without a pipeline."""
    return (pipeline.stage_io.active or 0) if pipeline else 0
