"""Pipelines: torch's schedules on stages cut by hand, and Weft's schedules on stages that sleep for a known time.

Steps are as in `peers.systems`; every rank gets all rows.
"""

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers.systems import Step, build_weft_model, weft_step
from peers.workload import SETTINGS, Workload
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from weft.comm.lanes import Lanes
from weft.data import IGNORED
from weft.parallel.pipeline.weight_gradients import WeightGradientQueue
from weft.parallel.runtime import runtime
from weft.training.optimizer import build_optimizer

# torch's own schedules


class LlamaStage(nn.Module):
    """Stage of a Llama: some blocks, with the embedding before the first block and the head after the last one."""

    def __init__(self, model: Any, blocks: range):
        super().__init__()
        self.is_first, is_last = blocks.start == 0, blocks.stop == len(model.model.layers)
        self.body, self.head = model.model, model.lm_head if is_last else nn.Identity()
        self.body.layers = self.body.layers[blocks.start : blocks.stop]
        if not self.is_first:
            self.body.embed_tokens = None
        if not is_last:
            self.body.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [rows, seq_len] or hidden states [rows, seq_len, width] -> hidden states or logits."""
        inputs = {"input_ids" if self.is_first else "inputs_embeds": x}
        return self.head(self.body(**inputs, use_cache=False).last_hidden_state)


def build_torch_pipeline(
    workload: Workload, schedule: str, blocks: list[range], ranks: tuple[int, ...], micro_batches: int
) -> Step:
    """Training step by a schedule of `torch.distributed.pipelining`, run and clipped as in torchtitan.

    Args:
        workload: workload with a Llama.
        schedule: name for `get_schedule_class`.
        blocks: blocks of each stage.
        ranks: rank of each stage.
        micro_batches: micro-batches per step.
    """
    stages = [
        PipelineStage(LlamaStage(workload.untouched_model(), part), index, len(blocks), torch.device("cpu"))
        for index, (part, rank) in enumerate(zip(blocks, ranks, strict=True))
        if rank == dist.get_rank()
    ]
    model = nn.ModuleList(stage.submod for stage in stages).train()
    kind: Any = get_schedule_class(schedule)
    runner = kind(
        stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, micro_batches, loss_fn=_mean_cross_entropy
    )
    optimizer = build_optimizer(model, SETTINGS)

    def step(rows: Tensor) -> float:
        inputs = (rows,) if stages[0].is_first else ()
        targets, losses = None, None
        if any(stage.is_last for stage in stages):
            targets, losses = F.pad(rows[:, 1:], (0, 1), value=IGNORED), []
        runner.step(*inputs, target=targets, losses=losses, return_outputs=False)
        loss = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        dist.all_reduce(loss)
        square = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(model.parameters(), SETTINGS.clip_norm, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


# Slow stages


class Seconds(NamedTuple):
    """Seconds of each action of a stage."""

    forward: float
    backward_input: float
    backward_weight: float
    messages: float = 0.0
    """Seconds of emulated messages of experts in a forward, and again in a backward, half of them for dispatch and half for
    combine; no rank is busy during this time."""


def build_slow_weft(
    workload: Workload, plan: dict[str, Any], micro_batches: int, seconds: Seconds, joint: bool = False
) -> Step:
    """Training step of Weft in which every block sleeps in its forward and in both parts of its backward.

    Args:
        workload: workload with a Llama of one block per stage.
        plan: tables of a plan.
        micro_batches: micro-batches per step.
        seconds: seconds of sleep in each action.
        joint: True to run joint slots in two lanes, as with experts on several ranks.
    """
    model, resolved, mesh = build_weft_model(workload, plan)
    lanes = Lanes() if joint else None
    runtime(model).pipeline.lanes = lanes

    def slow_down(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = args
        return _Slow.apply(hidden, seconds, runtime(model).pipeline.queue, lanes), *rest

    for block in model.modules():
        if isinstance(block, LlamaDecoderLayer):
            block.register_forward_pre_hook(slow_down)
    return weft_step(model, resolved, mesh, micro_batches)


class SlowMatmul(NamedTuple):
    """Entry of Weft's weight-gradient queue, like `DeferredMatmul`, that takes a known time."""

    weight: Tensor
    seconds: float

    def compute(self) -> Tensor:
        time.sleep(self.seconds)
        return torch.zeros_like(self.weight)


def _sleep_with_messages(seconds: float, messages: float, lanes: Lanes | None) -> None:
    """Sleep for the computation, with a message after its first and second third: dispatch and combine.

    A message takes its time from its start, whatever the rank does; where the rank would wait, it hands over.
    """
    for _ in range(2 if messages else 0):
        time.sleep(seconds / 3)
        arrives = time.perf_counter() + messages / 2
        if lanes is not None:
            lanes.hand_over()
        time.sleep(max(0.0, arrives - time.perf_counter()))
    time.sleep(seconds / 3 if messages else seconds)


class _Slow(torch.autograd.Function):
    """Identity that sleeps in forward and in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, seconds: Seconds, queue: WeightGradientQueue | None, lanes: Lanes | None
    ) -> Tensor:
        ctx.seconds, ctx.queue, ctx.lanes = seconds, queue, lanes
        _sleep_with_messages(seconds.forward, seconds.messages, lanes)
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _sleep_with_messages(ctx.seconds.backward_input, ctx.seconds.messages, ctx.lanes)
        if ctx.queue is None:
            time.sleep(ctx.seconds.backward_weight)
        else:
            ctx.queue.pending.append(SlowMatmul(torch.zeros((), requires_grad=True), ctx.seconds.backward_weight))
        return gradient, None, None, None
