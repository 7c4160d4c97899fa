"""One optimizer step: forward and backward over micro-batches, reduce, guard, clip, update."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from weft.anatomy.transformers import row_arguments
from weft.comm.collectives import all_reduce
from weft.comm.compression.feedback import Feedback
from weft.comm.objects import all_gather_json
from weft.data import IGNORED, MicroBatch
from weft.memory.chunked_step import chunked_step
from weft.parallel.fsdp import begin_micro_batch
from weft.parallel.loss import cross_entropy_sum, vocab_size
from weft.parallel.pipeline.runtime import running_stage
from weft.parallel.sequence_sharding import shard_sequence
from weft.plan import Plan
from weft.precision.fp16_backward import carry_gradient
from weft.precision.guard import find_culprit
from weft.precision.scaling import LossScale
from weft.topology.mesh import AXES, CONTEXT_AXES, ranks_along
from weft.train.one_bit_adam import momentum_decay
from weft.train.optimizer import scale_gradients, square_of_gradients


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same values on every rank."""

    loss: float
    """Mean cross entropy over all target tokens of the global batch, in nats."""
    grad_norm: float
    """Norm of the whole gradient before clipping; of onebit-adam, after the freeze, of the whole momentum."""
    tokens: int
    """Target tokens of the global batch."""
    loss_scale: LossScale
    """The scale of the next step."""
    problem: str | None
    """Why the step was skipped; None when the weights were updated."""
    overflowed: tuple[int, ...] = ()
    """Ranks of pp whose gradients were not finite; without a pipeline (0,)."""


def forward(model: PreTrainedModel, batch: MicroBatch) -> Any:
    """The model's output for a micro-batch; of a pipeline, what its running stage makes of it.

    Args:
        model: any causal language model of Transformers, parallelized or not.
        batch: input_ids, position_ids and targets, [rows, seq_len] each; the same on all ranks that share rows.
    """
    makes_masks = not getattr(model, "takes_whole_rows", False)
    return model(input_ids=batch.input_ids, **row_arguments(model, batch.position_ids, masks=makes_masks))


def token_loss(model: PreTrainedModel, output: Any, batch: MicroBatch, mesh: DeviceMesh | None) -> Tensor:
    """Sum of cross entropies over the target tokens of a micro-batch, in float32 (float64 for a float64 model).

    Args:
        model: parallelized over the mesh.
        output: of `forward`.
        batch: the same.
        mesh: of all ranks; None for a model that is not split.
    """
    targets = shard_sequence(batch.targets, mesh) if mesh else batch.targets
    group = mesh.get_group("tp") if mesh else None
    logits = output.logits
    if getattr(model, "carries_gradients", False):
        logits = carry_gradient(logits.float())
    return cross_entropy_sum(logits, targets, IGNORED, group, vocab_size(model))


def forward_backward(
    model: Any, batches: Sequence[MicroBatch], plan: Plan, mesh: DeviceMesh, factor: float, row_factor: float = 0.0
) -> Tensor:
    """Forward and backward of each micro-batch; gradients of `factor` times the loss add up in the parameters.

    The auxiliary loss of routers, where the model asks for one, takes part with its mean over the rows of the global batch.

    Args:
        model: parallelized.
        batches: micro-batches of this rank.
        plan: resolved.
        mesh: of all ranks.
        factor: on the sum of cross entropies.
        row_factor: on the sum over rows of the auxiliary loss.

    Returns:
        Sum of cross entropies over this rank's target tokens, float64 scalar, without the factor; of a pipeline, zero but on
        the last stage.
    """
    watch = model.router_watch
    loss_sum = torch.zeros((), dtype=torch.float64, device=batches[0].targets.device)

    def objective(output: Any, batch: MicroBatch, sums: Tensor | None) -> Tensor:
        nonlocal loss_sum
        loss = token_loss(model, output, batch, mesh)
        loss_sum += loss.detach()
        if sums is None:
            return loss * factor
        balance = watch.loss(sums, watch.tokens_of(batch.input_ids.shape[1]))
        return loss * factor + balance * (watch.coefficient * row_factor)

    if plan.parallel.pp > 1:
        model.pipeline.train(batches, partial(forward, model), objective)
        return loss_sum
    for index, batch in enumerate(batches):
        begin_micro_batch(model, plan, last=index == len(batches) - 1)
        output = forward(model, batch)
        sums = watch.take_sums(len(batch.input_ids), batch.input_ids.device) if watch.is_on() else None
        objective(output, batch, sums).backward()
    return loss_sum


def train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[MicroBatch],
    plan: Plan,
    mesh: DeviceMesh,
    loss_scale: LossScale,
    clip_norm: float,
    judge: Callable[[float, float], str | None] = lambda loss, grad_norm: None,
) -> StepResult:
    """Run one optimizer step on this rank's share of a global batch.

    The loss is divided by the number of target tokens of the global batch, so that every split of it over ranks and
    micro-batches has the same loss and the same gradients. A step whose loss or gradient is not finite anywhere is skipped
    on all ranks together, weights untouched.

    Args:
        model: parallelized.
        optimizer: over its parameters; its learning rate is set by the caller.
        batches: micro-batches of this rank, on its device; as many on every rank.
        plan: resolved.
        mesh: of all ranks.
        loss_scale: the scale of this step.
        clip_norm: largest norm of the gradient; 0 for no limit.
        judge: (loss, gradient norm) of a step whose numbers are finite -> why its update is left out, if it is.
    """
    counts = torch.stack([(batch.targets != IGNORED).sum() for batch in batches])
    tokens = int(all_reduce(_own_tokens(counts.sum(), mesh), mesh, AXES))
    # Gradients are means over the ranks that see different tokens; their sum is wanted.
    scale = plan.parallel.gradient_ranks * loss_scale.value
    rows = plan.parallel.data_ranks * sum(len(batch.input_ids) for batch in batches)
    factors = scale / max(tokens, 1), scale / rows
    feedback: Feedback | None = getattr(model, "feedback", None)
    if feedback is not None:
        feedback.begin(loss_scale.value, momentum_decay(optimizer, feedback))
    loss_sum = forward_backward(model, batches, plan, mesh, *factors)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sums = torch.stack([_own_loss(loss_sum, mesh), _square(model, parameters, mesh).to(loss_sum.device)])
    total, square = all_reduce(sums, mesh, AXES).tolist()  # in one message
    mean_loss, grad_norm = total / max(tokens, 1), square**0.5 / loss_scale.value
    finite = math.isfinite(grad_norm) and math.isfinite(mean_loss)
    problem = judge(mean_loss, grad_norm) if finite else None
    if finite and problem is None:
        clip = min(1.0, clip_norm / (grad_norm + 1e-6)) if clip_norm else 1.0
        scale_gradients(parameters, clip / loss_scale.value)
        if (plan.precision.weights, plan.precision.optimizer_state_dtype, plan.memory.optimizer_device) == (
            "whole",
            "update",
            "device",
        ):
            optimizer.step()
        else:
            chunked_step(optimizer)
        if feedback is not None:
            feedback.commit(clip)
    overflowed = () if finite else _overflowed(parameters, mesh)
    optimizer.zero_grad(set_to_none=True)
    following = loss_scale.after(finite)
    if not finite and following.value < loss_scale.value:
        where = f" on ranks {', '.join(map(str, overflowed))} of pp" if plan.parallel.pp > 1 else ""
        problem = (
            f"gradients overflowed{where} at loss scale {loss_scale.value:g}; the next scale is {following.value:g}"
        )
    elif not finite:
        problem = find_culprit(
            model, lambda: forward_backward(model, batches, plan, mesh, *factors).item(), partial(running_stage, model)
        )
        optimizer.zero_grad(set_to_none=True)
    return StepResult(mean_loss, grad_norm, tokens, following, problem, overflowed)


def _own_tokens(tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """Of ranks that share rows, one counts their tokens."""
    sharing = ("pp", *CONTEXT_AXES, "tp")
    return tokens * all(mesh.get_local_rank(axis) == 0 for axis in sharing)


def _own_loss(loss_sum: Tensor, mesh: DeviceMesh) -> Tensor:
    """Of ranks of tp, which have the same loss, one adds it; of a pipeline, only the last stage has any."""
    return loss_sum if mesh.get_local_rank("tp") == 0 else torch.zeros_like(loss_sum)


def _overflowed(parameters: list[nn.Parameter], mesh: DeviceMesh) -> tuple[int, ...]:
    """Ranks of pp with a gradient that is not finite; of a pipeline, the last of them was the first."""
    finite = math.isfinite(square_of_gradients(parameters, 1).item())
    stages = all_gather_json(None if finite else mesh.get_local_rank("pp"))
    return tuple(sorted({stage for stage in stages if stage is not None}))


def _square(model: Any, parameters: list[nn.Parameter], mesh: DeviceMesh) -> Tensor:
    """This rank's share of the squared norm of the gradient; a tied weight on two stages of a pipeline counts once."""
    stages = ranks_along(mesh, "pp")
    copy = model.pipeline.tied_copy if stages > 1 else None
    return square_of_gradients((p for p in parameters if p is not copy), mesh.size() // stages)


@torch.no_grad()
def evaluate(model: Any, batches: Sequence[MicroBatch], mesh: DeviceMesh) -> float:
    """Mean cross entropy in nats over all target tokens of the batches of all data ranks, the same on every rank.

    Args:
        model: parallelized; left in training mode.
        batches: of this rank, on its device; as many on every rank.
        mesh: of all ranks.
    """
    model.eval()
    loss_sum = torch.zeros((), dtype=torch.float64, device=batches[0].targets.device)

    def add_up(output: Any, batch: MicroBatch, _: Tensor | None) -> Tensor:
        nonlocal loss_sum
        loss = token_loss(model, output, batch, mesh)
        loss_sum += loss.double()
        return loss

    if ranks_along(mesh, "pp") > 1:
        model.pipeline.evaluate(batches, partial(forward, model), add_up)
    else:
        for batch in batches:
            add_up(forward(model, batch), batch, None)
    model.train()
    tokens = torch.stack([(batch.targets != IGNORED).sum() for batch in batches]).sum()
    sums = torch.stack([_own_loss(loss_sum, mesh), _own_tokens(tokens, mesh).double()])
    total, count = all_reduce(sums, mesh, AXES).tolist()
    return total / count
