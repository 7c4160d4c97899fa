"""Optimizer step: gradients of the micro-batches, finiteness check, clipping and update; and evaluation."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from weft.comm.collectives import all_reduce
from weft.comm.objects import all_gather_json
from weft.data import IGNORED, AnyBatch
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.data.gradients import clip_factor, squared_grad_norm_share
from weft.parallel.pipeline.runtime import running_stage
from weft.parallel.runtime import runtime
from weft.parallel.sequence.forward_pass import ForwardPass
from weft.precision.guard import locate_nonfinite
from weft.precision.scaling import LossScale
from weft.topology.mesh import AXES, CONTEXT_AXES
from weft.training.forward_backward import forward, forward_backward, token_loss


class RankValues(NamedTuple):
    """Values of a rank that all ranks need after a step; they travel and are read with its loss."""

    largest: Tensor
    """[n] float64 on the device; all ranks get the maxima."""
    summed: Tensor
    """[n] float64 on the device; all ranks get the sums."""


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
    maxima: tuple[float, ...] = ()
    """Maxima of `RankValues.largest` over all ranks."""
    sums: tuple[float, ...] = ()
    """Sums of `RankValues.summed` over all ranks."""


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
    maxima: tuple[float, ...]
    sums: tuple[float, ...]
    """As in `StepResult`."""


@dataclass(frozen=True)
class DeviceGradients:
    """Sums and maxima over all ranks of a step whose backward is launched, on the device; the host has not waited for them."""

    maxima: Tensor
    sums: Tensor
    """As in `StepResult`."""
    loss: Tensor
    """[1 or 2] sum of the cross entropies; then that of the z-loss of the routers, if it is part of the loss."""
    square: Tensor
    """[1] squared norm of the gradients with the loss scale."""
    tokens: Tensor
    """[1] target tokens of the global batch."""
    rows: int
    """Rows of the global batch."""
    scale: float
    """Loss scale."""
    rerun: Callable[[], float]
    """As in `Gradients`."""

    def grad_norm(self) -> Tensor:
        """Global norm of the unscaled gradients, float64 scalar."""
        return self.square[0].sqrt() / self.scale

    def overflows(self) -> Tensor:
        """1.0 if loss or gradients are not finite, else 0.0; float32 scalar."""
        return (~(self.loss[0] + self.square[0]).isfinite()).float()

    def read(self) -> Gradients:
        """Wait for the device, once, and read all values."""
        parts = (self.maxima, self.sums, self.loss, self.square, self.tokens.double())
        read = iter(torch.cat(parts).tolist())
        maxima, sums, losses, (square,), (count,) = [tuple(islice(read, len(part))) for part in parts]
        return Gradients(
            loss=losses[0] / max(count, 1),
            grad_norm=math.sqrt(square) / self.scale,
            tokens=int(count),
            rerun=self.rerun,
            router_z_loss=losses[1] / self.rows if len(losses) > 1 else None,
            maxima=maxima,
            sums=sums,
        )


def launch_gradients(
    model: Any,
    optimizer: DistributedOptimizer,
    batches: Sequence[AnyBatch],
    values: Callable[[], RankValues] | None = None,
) -> DeviceGradients:
    """Run forward and backward of a step on this rank's share of a global batch; gradients keep the loss scale.

    Args:
        model: parallelized model without gradients.
        optimizer: optimizer of its parameters, with the loss scale of this step.
        batches: micro-batches of this rank, on its device; the same number on every rank, of `rows_per_rank` rows in sum if the
            plan has it, else of the same number of rows.
        values: called after the last backward, while the device computes; on every rank or on none.
    """
    parallelized, scale = runtime(model), optimizer.loss_scale.value
    parallel, mesh = parallelized.plan.parallel, parallelized.mesh
    counts = torch.stack([(batch.targets != IGNORED).sum() for batch in batches])
    tokens = all_reduce(_own_tokens(counts.sum(), mesh), mesh, AXES)
    rows = sum(parallel.rows_per_rank) or parallel.data_ranks * sum(batch.rows for batch in batches)
    # Gradients are averaged over ranks with different tokens; the factor turns the mean into a sum.
    factors = parallel.gradient_ranks * scale / tokens.double().clamp(min=1), parallel.gradient_ranks * scale / rows
    optimizer.begin_step()
    parallelized.router_stats.clear()  # of a rerun in the step before
    loss_sum = forward_backward(model, batches, *factors)
    square_share = optimizer.squared_grad_norm_share()
    losses, z_sum = [_own_loss(loss_sum, mesh)], parallelized.router_stats.z_sum
    if parallelized.router_stats.z_coefficient:
        # Ranks of cp have the same z-loss; stages but the last have none.
        losses.append(torch.zeros_like(loss_sum) if z_sum is None else _own_loss(z_sum.double(), mesh) / parallel.cp)
    own = values() if values is not None else RankValues(loss_sum.new_empty(0), loss_sum.new_empty(0))
    parts = square_share.to(loss_sum.device)[None], torch.stack(losses), own.summed
    square, loss, sums = all_reduce(torch.cat(parts), mesh, AXES).split([len(part) for part in parts])
    return DeviceGradients(
        maxima=all_reduce(own.largest, mesh, AXES, "max") if values is not None else own.largest,
        sums=sums,
        loss=loss,
        square=square,
        tokens=tokens[None],
        rows=rows,
        scale=scale,
        rerun=lambda: forward_backward(model, batches, *factors).item(),
    )


def compute_gradients(model: Any, optimizer: DistributedOptimizer, batches: Sequence[AnyBatch]) -> Gradients:
    """`launch_gradients`, then wait for the device. Arguments as there."""
    return launch_gradients(model, optimizer, batches).read()


def train_step(
    model: Any,
    optimizer: DistributedOptimizer,
    batches: Sequence[AnyBatch],
    clip_norm: float,
    skip_reason: Callable[[float, float], str | None] | None = None,
    values: Callable[[], RankValues] | None = None,
) -> StepResult:
    """Run one optimizer step on this rank's share of a global batch.

    The loss is divided by the number of target tokens of the global batch, so that loss and gradients do not depend on the
    split of the batch over ranks and micro-batches. If loss or gradient is not finite on any rank, all ranks skip the update.
    Without `skip_reason`, the update is launched before the host waits for loss and norm, where the optimizer can; the device
    then clips, or skips.

    Args:
        model: parallelized model.
        optimizer: optimizer of its parameters, with the loss scale of this step; the caller sets the learning rate. It has the
            loss scale of the next step afterwards.
        batches: micro-batches of this rank, on its device; the same number on every rank.
        clip_norm: maximum gradient norm; 0 for no clipping.
        skip_reason: function of loss and gradient norm, called if both are finite; returns the reason to skip the update, or
            None.
        values: as for `launch_gradients`.
    """
    parallelized, loss_scale = runtime(model), optimizer.loss_scale
    plan, mesh = parallelized.plan, parallelized.mesh
    launched = launch_gradients(model, optimizer, batches, values)
    is_updated = skip_reason is None and optimizer.can_skip_on_device(clip_norm)
    if is_updated:
        with record_function("weft: update"):
            norm = launched.grad_norm()
            factor = clip_factor(norm, clip_norm) if clip_norm else torch.ones_like(norm)
            optimizer.step(factor, launched.overflows())
    found = launched.read()
    mean_loss, grad_norm = found.loss, found.grad_norm
    finite = math.isfinite(grad_norm) and math.isfinite(mean_loss)
    problem = skip_reason(mean_loss, grad_norm) if finite and skip_reason is not None else None
    overflowed = () if finite else _overflowed(optimizer.parameters, mesh)
    if is_updated:
        optimizer.end_step(finite)
    else:
        with record_function("weft: update"):
            optimizer.update(finite, clip_factor(grad_norm, clip_norm) if clip_norm else 1.0, skips=problem is not None)
    optimizer.zero_grad()
    next_scale = optimizer.loss_scale
    if not finite and next_scale.value < loss_scale.value:
        where = f" on ranks {', '.join(map(str, overflowed))} of pp" if plan.parallel.pp > 1 else ""
        problem = (
            f"gradients overflowed{where} at loss scale {loss_scale.value:g}; the next scale is {next_scale.value:g}"
        )
    elif not finite:
        problem = locate_nonfinite(model, found.rerun, partial(running_stage, parallelized.pipeline))
        optimizer.zero_grad()
    return StepResult(
        loss=mean_loss,
        grad_norm=grad_norm,
        tokens=found.tokens,
        loss_scale=next_scale,
        problem=problem,
        router_z_loss=found.router_z_loss,
        overflowed=overflowed,
        maxima=found.maxima,
        sums=found.sums,
    )


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
