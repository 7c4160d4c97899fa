"""A model that is cut into stages, and how a step or an evaluation goes through it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.anatomy.roles import Anatomy
from weft.data import MicroBatch
from weft.errors import ModelError
from weft.parallel.fsdp import add_up_gradients, begin_pipelined_step, reduce_gradients
from weft.parallel.pipeline.partition import StageIO, stage_modules
from weft.parallel.pipeline.plan_schedule import read_order, stage_ranks
from weft.parallel.pipeline.schedule import Schedule
from weft.parallel.pipeline.stage import Runtime, Stage
from weft.parallel.pipeline.weight_gradients import WeightGradients
from weft.parallel.weights import to_local
from weft.plan import Plan
from weft.topology.mesh import AXES, CONTEXT_AXES, ranks_along

Forward = Callable[[MicroBatch], Any]
"""The model's forward, with its arguments."""
Finish = Callable[[Any, MicroBatch, Tensor | None], Tensor]
"""(output of the model, micro-batch, sums of all routers) -> what gradients are of."""


class PipelineRuntime:
    """This rank's stages of a cut model, which is split in all other ways too."""

    def __init__(
        self, model: Any, anatomy: Anatomy, relay: StageIO, plan: Plan, mesh: DeviceMesh, queue: WeightGradients | None
    ):
        """
        Args:
            model: cut, and split over all other axes.
            anatomy: of the whole model.
            relay: of the cut.
            plan: resolved.
            mesh: of all ranks.
            queue: of the gradients of matrices, where the schedule splits backwards.
        """
        self.model, self.relay, self.plan, self.queue = model, relay, plan, queue
        self.group, self.rank, self.ranks = mesh.get_group("pp"), mesh.get_local_rank("pp"), stage_ranks(plan)
        self.leads = all(mesh.get_local_rank(axis) == 0 for axis in AXES if axis != "pp")
        """Whether this is the first rank of its stages."""
        self.split = ranks_along(mesh, *CONTEXT_AXES) * (ranks_along(mesh, "tp") if plan.parallel.sp else 1)
        relay.sequence_parts = ranks_along(mesh, "tp") if plan.parallel.sp else 1
        self.shares_tied = anatomy.tied and self.ranks[0] != self.ranks[-1]
        self.anatomy, self.ends = anatomy, (anatomy.embedding, anatomy.head)
        self.runtimes: dict[int, Runtime] = {}
        self.batches: Sequence[MicroBatch] = ()
        self.forward: Forward | None = None
        self.finish: Finish | None = None
        self.unreduced: set[int] = set()
        self.before_reduction: Callable[[], None] | None = None

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """The head's weight, where it is a copy of an embedding on another rank: it counts once."""
        if self.shares_tied and self.relay.has_last():
            return self.model.get_submodule(self.ends[1]).weight
        return None

    def schedule_of(self, num_micro_batches: int) -> Schedule:
        """The plan's schedule for a step of so many micro-batches."""
        return read_order(self.plan, num_micro_batches)

    def train(
        self,
        batches: Sequence[MicroBatch],
        forward: Forward,
        finish: Finish,
        before_reduction: Callable[[], None] | None = None,
    ) -> None:
        """Forward and backward of all micro-batches, in the order of the plan's schedule; gradients are reduced once.

        Args:
            batches: micro-batches of this data rank, the same on all ranks of pp.
            forward: runs the model.
            finish: called on the last stage.
            before_reduction: called once on each rank, when it has all its gradients.

        Raises:
            ModelError: nothing trains, or a parameter of a stage that was frozen when the model was split does.
        """
        self._check_trained()
        self._begin(batches, forward, finish)
        self.before_reduction = before_reduction
        if len(batches) not in self.runtimes:
            self.runtimes[len(batches)] = Runtime(self.schedule_of(len(batches)), self._stages())
        self.unreduced = set(self.relay.own)
        begin_pipelined_step(self.model, self.plan)
        self.runtimes[len(batches)].step_all()
        if self.shares_tied:
            self._share_tied_gradient()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch], forward: Forward, finish: Finish) -> None:
        """Forward of all micro-batches, stage after stage; see `train`."""
        self._begin(batches, forward, finish)
        stages = {stage.stage_index: stage for stage in self._stages()}
        for number, stage in stages.items():
            for micro_batch in range(len(batches)):
                if number and number - 1 not in stages:
                    for work in dist.batch_isend_irecv(stage.get_fwd_recv_ops(micro_batch)):
                        work.wait()
                outputs = stage.forward_one_chunk(micro_batch)
                if number + 1 in stages:
                    stages[number + 1].set_local_fwd_input(outputs, micro_batch)
                else:
                    stage.get_fwd_send_ops(micro_batch)
        for stage in stages.values():
            stage.finish_sending()

    def _check_trained(self) -> None:
        """Refuse a step without a weight that trains, and one whose weights were frozen when the model was split.

        Raises:
            ModelError: with the weight.
        """
        first = self.relay.first_trained
        if first == len(self.ranks):
            raise ModelError(
                "no weight of the model trains",
                rule="a step trains the parameters whose requires_grad was True when weft.parallelize split the model",
                fix="set requires_grad of the parameters to train before weft.parallelize",
            )
        for stage in (stage for stage in self.relay.own if stage < first):
            for module in stage_modules(self.anatomy, self.relay.chain, self.relay.stages, stage):
                for name, parameter in self.model.get_submodule(module).named_parameters():
                    if parameter.requires_grad:
                        raise ModelError(
                            f"{module}.{name} trains, but was frozen when the model was split",
                            where=f"stage {stage} of the pipeline",
                            rule="stages before the first one with a trained parameter get no gradients",
                            fix="set its requires_grad before weft.parallelize",
                        )

    def _begin(self, batches: Sequence[MicroBatch], forward: Forward, finish: Finish) -> None:
        self.batches, self.forward, self.finish = batches, forward, finish

    def _stages(self) -> list[Stage]:
        device, carries = next(self.model.parameters()).device, self.model.carries_gradients
        stages = [
            Stage(
                number,
                len(self.ranks),
                self.group,
                device,
                self._run,
                self._message,
                self.queue,
                partial(add_up_gradients, self.model, self.plan),
                self._reduced,
                carries,
                self.relay.first_trained,
            )
            for number in self.relay.own
        ]
        for stage in stages:
            stage.stage_index_to_group_rank = dict(enumerate(self.ranks))
        return stages

    def _run(self, number: int, micro_batch: int, inputs: list[Tensor]) -> list[Tensor]:
        """The forward of one stage."""
        assert self.forward is not None
        assert self.finish is not None
        batch, watch = self.batches[micro_batch], self.model.router_watch
        with self.relay.running(number, inputs[0] if inputs else None):
            output = self.forward(batch)
        sums = None
        if watch.is_on():
            sums = watch.take_sums(len(batch.input_ids), batch.input_ids.device)
            sums = sums + inputs[1] if inputs else sums
        if number == len(self.ranks) - 1:
            return [self.finish(output, batch, sums)]
        sent, shape, dtype = self.relay.take_sent(), self._hidden_shape(batch), self.relay.chain.dtype
        if (tuple(sent.shape), sent.dtype) != (shape, dtype):
            raise ModelError(
                f"stage {number} gives hidden states {tuple(sent.shape)} of {sent.dtype}",
                where="plan.parallel.pp",
                rule=f"the next stage waits for {shape} of {dtype}",
                fix="set plan.parallel.pp = 1",
            )
        return [sent.contiguous()] if sums is None else [sent.contiguous(), sums]

    def _message(self, micro_batch: int) -> list[Tensor]:
        """Room for what one stage sends to the next: hidden states of this rank's tokens, and sums of routers."""
        batch, watch = self.batches[micro_batch], self.model.router_watch
        place = batch.input_ids.device
        hidden = torch.empty(self._hidden_shape(batch), dtype=self.relay.chain.dtype, device=place)
        return [hidden, watch.no_sums(len(batch.input_ids), place)] if watch.is_on() else [hidden]

    def _hidden_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """Rows, tokens of this rank, and numbers of a hidden state."""
        rows, tokens = batch.input_ids.shape
        return rows, tokens // self.split, self.relay.chain.width

    def _reduced(self) -> None:
        """A stage has all its gradients; with the last stage of this rank they are reduced over the data ranks."""
        self.unreduced.pop()
        if not self.unreduced:
            if self.before_reduction is not None:
                self.before_reduction()
            reduce_gradients(self.model, self.plan)

    def _share_tied_gradient(self) -> None:
        """The rank with the embedding and the one with the head's copy of it add up their gradients."""
        has = {self.ranks[0]: self.ends[0], self.ranks[-1]: self.ends[1]}
        if self.rank not in has:
            return
        weight: Any = self.model.get_submodule(has.pop(self.rank)).weight
        if not weight.requires_grad:
            return
        own = to_local(weight.grad)
        (peer,) = has
        other = torch.empty_like(own)
        send = dist.P2POp(dist.isend, own, group=self.group, group_peer=peer)
        take = dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer)
        for work in dist.batch_isend_irecv([send, take]):
            work.wait()
        own += other


def running_stage(model: Any) -> int:
    """The stage that a model runs as at this moment; 0 without a pipeline."""
    pipeline = getattr(model, "pipeline", None)
    return 0 if pipeline is None else pipeline.relay.active
