"""Optimizer step: forward and backward of micro-batches, gradient reduction, finiteness check, clipping and update."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from weft.anatomy.transformers import row_arguments
from weft.comm.collectives import all_reduce
from weft.comm.objects import all_gather_json
from weft.data import IGNORED, AnyBatch, RecordBatch
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.data.fsdp import begin_micro_batch
from weft.parallel.data.gradients import clip_factor, squared_grad_norm_share
from weft.parallel.loss.cross_entropy import cross_entropy_sum, vocab_size
from weft.parallel.loss.distillation import Taught, Teacher, divergence_sum, hidden_error_sum
from weft.parallel.loss.head_loss import attach_loss
from weft.parallel.loss.logits import gather_logits
from weft.parallel.pipeline.runtime import running_stage
from weft.parallel.runtime import Runtime, find_runtime, runtime
from weft.parallel.sequence.forward_pass import ForwardPass
from weft.parallel.sequence.rows import pad_rows, row_multiple, shard_sequence
from weft.precision.fp16_backward import begin_fp16_backward
from weft.precision.guard import locate_nonfinite
from weft.precision.scaling import LossScale
from weft.topology.mesh import AXES, CONTEXT_AXES


@dataclass(frozen=True)
class StepResult:
    """Result of a step; the same on every rank."""

    loss: float
    """Mean cross entropy over all target tokens of the global batch, in nats."""
    grad_norm: float
    """Global gradient norm before clipping; with onebit-adam after the freeze, global norm of the momentum."""
    tokens: int
    """Target tokens of the global batch."""
    loss_scale: LossScale
    """Loss scale of the next step."""
    problem: str | None
    """Reason why the update was skipped; None if the weights were updated."""
    router_z_loss: float | None = None
    """Mean of logsumexp(router logits)^2 over the tokens and layers of the global batch; None if it is not part of the loss."""
    overflowed: tuple[int, ...] = ()
    """pp ranks with non-finite gradients; (0,) without a pipeline."""


def forward(model: Any, batch: AnyBatch, *, index: int = 0, loss_only: bool = False) -> ForwardPass:
    """Run forward on a micro-batch; in a pipeline, only the current stage.

    Args:
        model: any causal language model of Transformers, or the model of another task; parallelized or not.
        batch: input_ids, position_ids and targets, [rows, seq_len] each, or the inputs of another task; the same on all ranks
            that share rows.
        index: index of the micro-batch in its step.
        loss_only: True if the output is for `token_loss` alone: the head may compute the loss instead of logits
            (`weft.parallel.loss.head_loss`).

    Returns:
        Output of the model, or of the stage, with what hooks inside of the model have kept.
    """
    parallelized, forward_pass = find_runtime(model), ForwardPass(batch, index)
    if isinstance(batch, RecordBatch):
        forward_pass.output = model(**batch.inputs)
    elif parallelized is None:
        forward_pass.output = model(input_ids=batch.input_ids, **row_arguments(model, batch.position_ids))
    else:
        if loss_only and _computes_loss_in_head(parallelized):
            forward_pass.targets = shard_sequence(batch.targets, parallelized.mesh)
        makes_masks = not parallelized.takes_full_rows and parallelized.varlen is None
        arguments = row_arguments(model, batch.position_ids, masks=makes_masks)
        with parallelized.forward_slot.running(forward_pass):
            forward_pass.output = model(input_ids=batch.input_ids, **arguments)
    if parallelized is not None and parallelized.router_stats.is_on():
        forward_pass.router_sums = parallelized.router_stats.take_sums(batch.rows, batch.targets.device)
    return forward_pass


def _computes_loss_in_head(parallelized: Runtime) -> bool:
    """True if the head computes the loss: nobody else needs the logits."""
    has_own = parallelized.loss is not None or parallelized.teacher is not None
    return parallelized.linear_loss is not None and not has_own and parallelized.linear_loss.sees_all()


def token_loss(model: Any, forward_pass: ForwardPass, taught: Taught | None = None) -> Tensor:
    """Sum of the losses over the targets of a micro-batch, in float32 (float64 for a float64 model).

    The loss of a target is its cross entropy; of a row whose outputs predict numbers, as in diffusion and regression, the mean
    of their squared errors, or of their binary cross entropies.

    Args:
        model: any causal language model of Transformers, or the model of another task; parallelized or not.
        forward_pass: result of `forward`.
        taught: outputs of the teacher, see `ask_teacher`; None: the loss without a teacher.
    """
    parallelized, batch, output = find_runtime(model), forward_pass.batch, forward_pass.output
    copies = parallelized.loss_copies if parallelized is not None else 1
    if copies > 1:  # the losses of all cp ranks are added up
        parallelized = None
    if isinstance(batch, RecordBatch):
        return _record_loss(model, parallelized, output, batch) / copies
    logits = output.logits
    if parallelized is None:
        return cross_entropy_sum(logits, batch.targets, IGNORED, None, vocab_size(model)) / copies
    if forward_pass.head_loss is not None:
        return attach_loss(forward_pass.head_loss, logits)
    if parallelized.plan.precision.backward == "fp16":
        logits = begin_fp16_backward(logits.float())
    if parallelized.loss is not None:  # the same on all cp ranks, whose losses are added up
        full = gather_logits(model, logits, batch.targets.shape[1])
        full = full.to(torch.promote_types(full.dtype, torch.float32))
        return parallelized.loss(full, batch.targets) / parallelized.plan.parallel.cp
    targets, group = shard_sequence(batch.targets, parallelized.mesh), parallelized.mesh.get_group("tp")
    teacher = parallelized.teacher
    if taught is None or teacher is None:
        return cross_entropy_sum(logits, targets, IGNORED, group, vocab_size(model))
    loss = teacher.weight * divergence_sum(
        logits, taught.logits, targets != IGNORED, teacher.temperature, group, teacher.tables
    )
    if teacher.weight < 1:
        loss = loss + (1 - teacher.weight) * cross_entropy_sum(logits, targets, IGNORED, group, vocab_size(model))
    hidden = forward_pass.hidden
    if hidden is not None and taught.hidden is not None:
        if parallelized.plan.precision.backward == "fp16":
            hidden = begin_fp16_backward(hidden)
        errors = hidden_error_sum(hidden, taught.hidden, targets != IGNORED, group)
        loss = loss + teacher.hidden_weight * errors
    return loss


@torch.no_grad()
def ask_teacher(teacher: Teacher, batches: Sequence[AnyBatch]) -> dict[int, Taught]:
    """Outputs of the teacher for micro-batches, by their index; in a pipeline only on the last stage.

    Args:
        teacher: teacher of a model.
        batches: micro-batches of this rank.
    """
    found: dict[int, Taught] = {}

    def keep(forward_pass: ForwardPass) -> Tensor:
        logits = forward_pass.output.logits
        found[forward_pass.index] = Taught(logits, forward_pass.hidden)
        return logits.new_zeros(())

    pipeline = runtime(teacher.model).pipeline
    with record_function("weft: teacher"):
        if pipeline is not None:
            pipeline.evaluate(batches, partial(forward, teacher.model), keep)
        else:
            for index, batch in enumerate(batches):
                keep(forward(teacher.model, batch, index=index))
    return found


def _record_loss(model: Any, parallelized: Runtime | None, output: Any, batch: RecordBatch) -> Tensor:
    if batch.predicted is not None:
        # DiT also has channels for a learned variance.
        found = output.sample[:, : batch.predicted.shape[1]] if hasattr(output, "sample") else output.logits
        wide = found.to(torch.promote_types(found.dtype, torch.float32))
        wanted = batch.predicted.to(wide.dtype)
        loss = F.binary_cross_entropy_with_logits if batch.binary else F.mse_loss
        means = loss(wide, wanted, reduction="none").flatten(1).mean(1)
        return (means * (batch.targets != IGNORED)).sum()
    targets = batch.targets
    if parallelized is not None and parallelized.takes_full_rows and targets.ndim > 1:
        targets = shard_sequence(
            pad_rows(targets, row_multiple(parallelized.anatomy, parallelized.plan), IGNORED), parallelized.mesh
        )
        return cross_entropy_sum(output.logits, targets, IGNORED, parallelized.mesh.get_group("tp"), vocab_size(model))
    return cross_entropy_sum(output.logits, targets, IGNORED, None, output.logits.shape[-1])


def forward_backward(
    model: Any, batches: Sequence[AnyBatch], factor: float | Tensor, row_factor: float = 0.0
) -> Tensor:
    """Run forward and backward of all micro-batches, and accumulate gradients of the scaled loss.

    If the model has auxiliary losses of its routers, their means over the rows of the global batch are added to the loss.

    Args:
        model: parallelized model.
        batches: micro-batches of this rank.
        factor: factor of the sum of cross entropies; a scalar on the device needs no wait for its value.
        row_factor: factor of the auxiliary losses, summed over rows.

    Returns:
        Unscaled sum of cross entropies over the target tokens of this rank, float64 scalar; in a pipeline zero on all stages
        but the last.
    """
    parallelized = runtime(model)
    router_stats, teacher = parallelized.router_stats, parallelized.teacher
    loss_sum = torch.zeros((), dtype=torch.float64, device=batches[0].targets.device)
    taught: dict[int, Taught] = {}
    # A teacher in stages runs all micro-batches at once; its collectives would be out of order between joint lanes.
    if teacher is not None and (parallelized.pipeline is not None or parallelized.lanes is not None):
        taught |= ask_teacher(teacher, batches)

    def objective(forward_pass: ForwardPass) -> Tensor:
        nonlocal loss_sum
        batch, sums = forward_pass.batch, forward_pass.router_sums
        loss = token_loss(model, forward_pass, taught.pop(forward_pass.index, None))
        loss_sum += loss.detach()
        scaled = loss * (factor.to(loss.dtype) if isinstance(factor, Tensor) else factor)
        if sums is None or isinstance(batch, RecordBatch):
            return scaled
        return scaled + router_stats.loss(sums, router_stats.tokens_per_row(batch.input_ids.shape[1])) * row_factor

    if parallelized.pipeline is not None:
        parallelized.pipeline.train(batches, partial(forward, model, loss_only=True), objective)
        return loss_sum

    def run(index: int) -> Tensor:
        if teacher is not None and index not in taught:
            taught[index] = ask_teacher(teacher, [batches[index]])[0]
        with record_function("weft: forward"):
            return objective(forward(model, batches[index], index=index, loss_only=True))

    def run_backward(loss: Tensor) -> None:
        with record_function("weft: backward"):
            loss.backward()

    plan, reducer = parallelized.plan, parallelized.gradient_reducer
    if parallelized.lanes is not None:  # F1, F2 with B1, ... B of the last one
        begin_micro_batch(model, plan, reducer, last=False)
        loss = run(0)
        for index in range(1, len(batches)):
            loss = parallelized.lanes.run(partial(run, index), partial(run_backward, loss))
        begin_micro_batch(model, plan, reducer, last=True)
        run_backward(loss)
        return loss_sum
    for index in range(len(batches)):
        begin_micro_batch(model, plan, reducer, last=index == len(batches) - 1)
        run_backward(run(index))
    return loss_sum


class Gradients(NamedTuple):
    """Result of `compute_gradients`; the same on every rank, except `rerun`."""

    loss: float
    """Mean cross entropy over all target tokens of the global batch, in nats."""
    grad_norm: float
    """Global norm of the unscaled gradients."""
    tokens: int
    """Target tokens of the global batch."""
    rerun: Callable[[], float]
    """Runs forward and backward of this rank again; returns the loss of this rank."""
    router_z_loss: float | None
    """Mean z-loss of the routers; None if it is not part of the loss."""


def compute_gradients(model: Any, optimizer: DistributedOptimizer, batches: Sequence[AnyBatch]) -> Gradients:
    """Run forward and backward of a step on this rank's share of a global batch; gradients keep the loss scale.

    Args:
        model: parallelized model without gradients.
        optimizer: optimizer of its parameters, with the loss scale of this step.
        batches: micro-batches of this rank, on its device; the same number on every rank, of `rows_per_rank` rows in sum if the
            plan has it, else of the same number of rows.
    """
    parallelized, scale = runtime(model), optimizer.loss_scale.value
    parallel, mesh = parallelized.plan.parallel, parallelized.mesh
    counts = torch.stack([(batch.targets != IGNORED).sum() for batch in batches])
    tokens = all_reduce(_own_tokens(counts.sum(), mesh), mesh, AXES)
    rows = sum(parallel.rows_per_rank) or parallel.data_ranks * sum(batch.rows for batch in batches)
    # Gradients are averaged over ranks with different tokens; the factor turns the mean into a sum.
    factors = parallel.gradient_ranks * scale / tokens.double().clamp(min=1), parallel.gradient_ranks * scale / rows
    optimizer.begin_step()
    parallelized.router_stats.z_sum = None  # of a rerun in the step before
    loss_sum = forward_backward(model, batches, *factors)
    square_share = optimizer.squared_grad_norm_share()
    parts, z_sum = [_own_loss(loss_sum, mesh), square_share.to(loss_sum.device)], parallelized.router_stats.z_sum
    if parallelized.router_stats.z_coefficient:
        # Ranks of cp have the same z-loss; stages but the last have none.
        parts.append(torch.zeros_like(loss_sum) if z_sum is None else _own_loss(z_sum.double(), mesh) / parallel.cp)
    sums = all_reduce(torch.stack(parts), mesh, AXES)  # all in one message
    # The only wait of the host in a step.
    count, total, square, *z_sums = torch.cat([tokens.double()[None], sums]).tolist()
    norm, loss = square**0.5 / scale, total / max(count, 1)
    z_loss = z_sums[0] / rows if z_sums else None
    return Gradients(loss, norm, int(count), lambda: forward_backward(model, batches, *factors).item(), z_loss)


def train_step(
    model: Any,
    optimizer: DistributedOptimizer,
    batches: Sequence[AnyBatch],
    clip_norm: float,
    skip_reason: Callable[[float, float], str | None] = lambda loss, grad_norm: None,
) -> StepResult:
    """Run one optimizer step on this rank's share of a global batch.

    The loss is divided by the number of target tokens of the global batch, so that loss and gradients do not depend on the
    split of the batch over ranks and micro-batches. If loss or gradient is not finite on any rank, all ranks skip the update.

    Args:
        model: parallelized model.
        optimizer: optimizer of its parameters, with the loss scale of this step; the caller sets the learning rate. It has the
            loss scale of the next step afterwards.
        batches: micro-batches of this rank, on its device; the same number on every rank.
        clip_norm: maximum gradient norm; 0 for no clipping.
        skip_reason: function of loss and gradient norm, called if both are finite; returns the reason to skip the update, or
            None.
    """
    parallelized, loss_scale = runtime(model), optimizer.loss_scale
    plan, mesh = parallelized.plan, parallelized.mesh
    mean_loss, grad_norm, tokens, rerun, z_loss = compute_gradients(model, optimizer, batches)
    finite = math.isfinite(grad_norm) and math.isfinite(mean_loss)
    problem = skip_reason(mean_loss, grad_norm) if finite else None
    overflowed = () if finite else _overflowed(optimizer.parameters, mesh)
    with record_function("weft: update"):
        factor = clip_factor(grad_norm, clip_norm) if clip_norm else 1.0
        optimizer.update(finite, factor, skips=problem is not None)
    optimizer.zero_grad()
    next_scale = optimizer.loss_scale
    if not finite and next_scale.value < loss_scale.value:
        where = f" on ranks {', '.join(map(str, overflowed))} of pp" if plan.parallel.pp > 1 else ""
        problem = (
            f"gradients overflowed{where} at loss scale {loss_scale.value:g}; the next scale is {next_scale.value:g}"
        )
    elif not finite:
        problem = locate_nonfinite(model, rerun, partial(running_stage, parallelized.pipeline))
        optimizer.zero_grad()
    return StepResult(mean_loss, grad_norm, tokens, next_scale, problem, z_loss, overflowed)


def _own_tokens(tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """Token count on the first of the ranks that share rows, zero on other ranks."""
    sharing = ("pp", *CONTEXT_AXES, "tp")
    return tokens * all(mesh.get_local_rank(axis) == 0 for axis in sharing)


def _own_loss(loss_sum: Tensor, mesh: DeviceMesh) -> Tensor:
    """Loss on the first rank of each tp group, zero on its other ranks, which have the same loss."""
    return loss_sum if mesh.get_local_rank("tp") == 0 else torch.zeros_like(loss_sum)


def _overflowed(parameters: list[Tensor], mesh: DeviceMesh) -> tuple[int, ...]:
    """pp ranks with non-finite gradients; in a pipeline the overflow began at the last of them."""
    finite = math.isfinite(squared_grad_norm_share(parameters, 1).item())
    stages = all_gather_json(None if finite else mesh.get_local_rank("pp"))
    return tuple(sorted({stage for stage in stages if stage is not None}))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context in evaluation mode. Modules that a user trains or freezes keep their own modes afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def evaluate(model: Any, batches: Sequence[AnyBatch]) -> float:
    """Mean cross entropy in nats over all target tokens of the batches of all data ranks, the same on every rank.

    Args:
        model: parallelized model; its modules are in the same modes afterwards.
        batches: micro-batches of this rank, on its device; the same number on every rank.
    """
    parallelized = runtime(model)
    mesh = parallelized.mesh
    loss_sum = torch.zeros((), dtype=torch.float64, device=batches[0].targets.device)

    def add_loss(forward_pass: ForwardPass) -> Tensor:
        nonlocal loss_sum
        loss = token_loss(model, forward_pass)
        loss_sum += loss.double()
        return loss

    with evaluation_mode(model):
        if parallelized.pipeline is not None:
            parallelized.pipeline.evaluate(batches, partial(forward, model, loss_only=True), add_loss)
        else:
            for batch in batches:
                add_loss(forward(model, batch, loss_only=True))
    tokens = torch.stack([(batch.targets != IGNORED).sum() for batch in batches]).sum()
    sums = torch.stack([_own_loss(loss_sum, mesh), _own_tokens(tokens, mesh).double()])
    total, count = all_reduce(sums, mesh, AXES).tolist()
    return total / max(count, 1)
