"""Forward, loss and backward of the micro-batches of a step."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from weft.anatomy.transformers import row_arguments
from weft.data import IGNORED, AnyBatch, RecordBatch
from weft.parallel.data.fsdp import begin_micro_batch
from weft.parallel.loss.cross_entropy import cross_entropy_sum, vocab_size
from weft.parallel.loss.distillation import Taught, Teacher, divergence_sum, hidden_error_sum
from weft.parallel.loss.head_loss import attach_loss
from weft.parallel.loss.logits import gather_logits
from weft.parallel.runtime import Runtime, find_runtime, runtime
from weft.parallel.sequence.forward_pass import ForwardPass
from weft.parallel.sequence.rows import pad_rows, row_multiple, shard_sequence
from weft.precision.fp16_backward import begin_fp16_backward


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
