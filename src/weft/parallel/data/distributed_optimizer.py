"""Optimizer of a parallelized model: a torch optimizer with loss scale, chunked updates and placement of states.

    before the first forward    `begin_step`: compressed reductions get the loss scale, and 1-bit Adam the decay of its momenta
    after the last backward     `squared_grad_norm_share`: the caller adds up the shares of all ranks
    update                      `step`: update parameters with unscaled and clipped gradients, confirm the error feedback
    between steps               states are quantized, or on the host or on disk, as the plan says

`weft train`, `weft.prepare` and the dry run all update through this class.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.collectives import all_reduce
from weft.compat import call_before_post_hooks
from weft.device.device import Device
from weft.errors import ModelError, PlanError, Refusal, raise_if_refused
from weft.job import BF16_STEP
from weft.memory.chunked_step import chunked_step, mesh_of
from weft.memory.live_bytes import LiveBytes
from weft.memory.optimizer_state import StatePlacement
from weft.memory.pool import Pool
from weft.optimizers.muon import Muon, ranks_of
from weft.optimizers.one_bit_adam import momentum_decay
from weft.optimizers.one_pass import divides, divisor, inverse, is_fused_adam, takes_factor, update_in_one_pass
from weft.parallel.data.fsdp import free_gathered_weights
from weft.parallel.data.gradients import divide_gradients, scale_gradients, squared_grad_norm_share
from weft.parallel.data.parameter_hooks import reason_against_hooks_on_shards
from weft.parallel.runtime import runtime
from weft.parallel.weights import to_local
from weft.precision.scaling import LossScale
from weft.topology.mesh import AXES, ranks_along

ALL_BYTES = 2**62
LARGEST_NORM = 1e28
"""Larger norms of gradients with their loss scale are not finite: they are sums of squares in float32."""


class DistributedOptimizer:
    """Wrapper of an optimizer of torch for a parallelized model."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        model: nn.Module,
        device: Device,
        pool: Pool | None = None,
        *,
        keep_zeros: bool = False,
    ):
        """Place the states of an optimizer before its first step.

        Args:
            inner: optimizer over parameters of the model; it must update each parameter independently of the others.
            model: parallelized model.
            device: device of the parameters.
            pool: memory pool for offloaded states in place of the plan's, for dry runs. Ignored if the plan offloads no states.
            keep_zeros: elements of matrices that are zero before an update get no gradient, and are zero after it.

        Raises:
            PlanError: see `StatePlacement`; or the plan asks for a kernel that the optimizer cannot use.
        """
        self.inner, self.model, self.runtime, self.keep_zeros = inner, model, runtime(model), keep_zeros
        plan, mesh = self.runtime.plan, self.runtime.mesh
        if plan.precision.optimizer_state_dtype == "bf16":
            raise_if_refused(_reason_against_bf16_states(inner))
        self.placement = StatePlacement(inner, plan, device, mesh.get_local_rank("pp"), pool)
        self.loss_scale = LossScale.from_plan(plan.precision.loss_scale)
        """Loss scale of the next step."""
        self.in_chunks = (plan.precision.weights, plan.precision.optimizer_state_dtype) != ("whole", "update") or (
            (plan.memory.optimizer_device, plan.memory.parameters_device) != ("device", "device")
        )
        """True if an update needs temporary memory for its parameters, and runs over chunks of them."""
        self.has_kernel = is_fused_adam(inner) and any(
            (row.op, row.implementation) == ("adamw", "triton") for row in self.runtime.kernels
        )
        """True if one kernel updates the parameters that it supports."""
        self.kernel_reads_all = (
            plan.precision.optimizer_state_dtype != "int4"
            and plan.memory.optimizer_device == plan.memory.parameters_device == "device"
        )
        """True if the kernel needs no temporary memory for any parameter."""
        if plan.compute.kernels.adamw == "triton" and not self.has_kernel:
            raise _missing_kernel(inner)
        self.mixes_meshes = any(
            len({mesh_of(p) for p in group["params"]}) > 1 and _is_fused(group, device.type)
            for group in inner.param_groups
        )
        """True if a fused update of a parameter group would mix parameters of several meshes, which torch cannot do."""

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters of all groups."""
        return [parameter for group in self.inner.param_groups for parameter in group["params"]]

    @property
    def state(self) -> Any:
        """States of the inner optimizer by parameter, where the plan places them."""
        return self.inner.state

    def begin_step(self) -> None:
        """Prepare for the forward and backward of a step.

        Raises:
            JobError: the plan has 1-bit compression, and the optimizer is not 1-bit Adam.
        """
        feedback = self.runtime.feedback
        if feedback is not None:
            feedback.begin(self.loss_scale.value, momentum_decay(self.inner, feedback))

    def squared_grad_norm_share(self) -> Tensor:
        """Share of this rank in the squared norm of the scaled gradients, float64; a weight on two stages counts once.

        Collective, once in each step: the data ranks compare the order of the blocks that they have run. NaN where it differs,
        which `update` then refuses, so that the host need not wait here.
        """
        device, unit_calls = to_local(next(self.model.parameters())).device, self.runtime.unit_calls
        differs = None if unit_calls is None else unit_calls.compare(device)
        if self.runtime.unused_weights is not None:
            self.runtime.unused_weights.drop(device)
        if self.keep_zeros:
            _set_zeros([(to_local(p.grad), zeros) for p, zeros in self._zeros() if p.grad is not None])
        pipeline, mesh = self.runtime.pipeline, self.runtime.mesh
        copy = pipeline.tied_copy if pipeline else None
        own = (parameter for parameter in self.parameters if parameter is not copy)
        share = squared_grad_norm_share(own, mesh.size() // ranks_along(mesh, "pp"))
        return share if differs is None else share.where(~differs.to(share.device), math.nan)

    def can_skip_on_device(self, clip_norm: float) -> bool:
        """True if an update can be launched before the host knows whether the gradients are finite: the device leaves all as it
        is where they are not, and nothing else happens in the update.

        Args:
            clip_norm: maximum gradient norm; 0 for no clipping.
        """
        of_host = self.placement.offloaded, self.runtime.feedback, self.runtime.relocation
        in_parts = self.mixes_meshes or (self.in_chunks and not (self.has_kernel and self.kernel_reads_all))
        return (
            all(user is None for user in of_host)
            and not in_parts
            and is_fused_adam(self.inner)
            and takes_factor(self.inner)
            and divides(self.inner, clip_norm / LARGEST_NORM if clip_norm else 1.0)
        )

    def step(self, factor: float | Tensor = 1.0, overflows: Tensor | None = None) -> None:
        """Update the parameters, and free the gradients of each chunk where the update runs in chunks; then relocate experts
        where the plan says so.

        Gradients are multiplied inside of the update where the optimizer can. The kernel leaves them as they are.

        Args:
            factor: factor of the unscaled gradients: clipping times the weight of micro-batches, at most 1; a tensor, where
                `can_skip_on_device`, is a float64 scalar.
            overflows: float32 scalar on the device: 0, or 1 to leave parameters and states as they are; None: 0.

        Raises:
            ModelError: a parameter has a gradient of this rank alone, or a hook that never runs.
        """
        raise_if_refused(self._reason_against_gradients())
        zeros = self._zeros() if self.keep_zeros else []
        update = partial(self._update, factor / self.loss_scale.value, overflows)
        if self.in_chunks and not (self.has_kernel and self.kernel_reads_all):
            at_least = max(map(ranks_of, self.parameters), default=1) if isinstance(self.inner, Muon) else 1
            on_disk = self.runtime.on_disk
            read_ahead = on_disk.read_for_update if on_disk else None
            chunked_step(self.inner, self.placement.offloaded, at_least=at_least, step=update, read_ahead=read_ahead)
        elif self.mixes_meshes:
            chunked_step(self.inner, chunk_bytes=ALL_BYTES, step=update)
        else:
            update()
        _set_zeros([(to_local(parameter.detach()), where) for parameter, where in zeros])
        if self.runtime.feedback is not None:
            self.runtime.feedback.commit(float(factor))
        if self.runtime.shared_buffers is not None:
            self.runtime.shared_buffers.share()
        relocation = self.runtime.relocation
        if relocation is not None and relocation.count_update():
            free_gathered_weights(self.model)
            self.finish_offload()
            relocation.relocate(self.inner)

    def _zeros(self) -> list[tuple[Tensor, Tensor]]:
        """Matrices, and where this rank's part of them is zero."""
        return [(p, to_local(p.detach()) == 0) for p in self.parameters if p.ndim > 1]

    def _update(self, factor: float | Tensor, overflows: Tensor | None) -> None:
        """Update the parameters that have gradients, multiplied by a factor before the update or inside of it."""
        if isinstance(factor, Tensor):
            with divisor(self.inner, factor, overflows):
                if self.has_kernel:
                    self._update_by_kernel(factor, overflows)
                else:
                    self.inner.step()
            return
        is_inside = takes_factor(self.inner)
        if self.has_kernel:
            if not is_inside:
                scale_gradients(self.parameters, factor)
            self._update_by_kernel(factor if is_inside else 1.0)
        elif is_fused_adam(self.inner) and divides(self.inner, factor):
            if is_inside:
                with divisor(self.inner, factor):
                    self.inner.step()
            else:
                divide_gradients(self.parameters, inverse(factor).item())
                self.inner.step()
        else:
            scale_gradients(self.parameters, factor)
            self.inner.step()

    def _update_by_kernel(self, factor: float | Tensor, overflows: Tensor | None = None) -> None:
        """Update by the kernel the parameters that it supports, and the others by torch."""
        updated: dict[Tensor, Tensor] = {}

        def run_kernel() -> None:
            updated.update(update_in_one_pass(self.inner, factor, self.placement.quantize, overflows))
            if not isinstance(factor, Tensor):  # which torch's update takes
                scale_gradients(self.parameters, factor)  # of parameters that the kernel does not support

        def restore_gradients() -> None:
            for parameter, gradient in updated.items():
                parameter.grad = gradient

        handle = call_before_post_hooks(self.inner, restore_gradients)
        try:
            self.inner.step(run_kernel)  # type: ignore[arg-type]
        finally:
            handle.remove()

    def _reason_against_gradients(self) -> Refusal | None:
        """Reason against gradients that no reduction covers, of weights that were frozen when the model was parallelized,
        or against hooks that never run."""
        parallel, reducer = self.runtime.plan.parallel, self.runtime.gradient_reducer
        whole = self.runtime.whole_frozen_weights
        alone: list[str] = []
        if parallel.zero > 0 and (refusal := reason_against_hooks_on_shards(self.model)):
            return refusal
        if parallel.zero == 0 and parallel.gradient_ranks > 1 and reducer is not None:
            parameters = self.model.named_parameters()
            alone = [name for name, p in parameters if p.grad is not None and id(p) not in reducer.covered]
        elif whole and parallel.gradient_ranks > 1:
            alone = [name for name, p in self.model.named_parameters() if p.grad is not None and name in whole]
        if alone:
            return Refusal(
                f"{alone[0]} trains, but was frozen in weft.parallelize or in the first step",
                where="DistributedOptimizer.step",
                rule="the gradients of weights that are frozen at first are not averaged over the data ranks",
                fix="set its requires_grad before weft.parallelize, or use plan.parallel.zero = 3",
                error=ModelError,
            )
        return None

    def grad_norm(self, share: float = 1.0) -> float:
        """Global norm of the unscaled gradients times the share of a micro-batch in its step. Collective, once in each step.

        Raises:
            ModelError: data ranks have run other blocks.
        """
        square = self.squared_grad_norm_share().to(to_local(next(self.model.parameters())).device)
        norm = all_reduce(square, self.runtime.mesh, AXES).item() ** 0.5 / (self.loss_scale.value / share)
        self._refuse_different_calls(math.isfinite(norm))
        return norm

    def _refuse_different_calls(self, finite: bool) -> None:
        if not finite and self.runtime.unit_calls is not None:
            self.runtime.unit_calls.refuse_different()

    def update(self, finite: bool, factor: float = 1.0, *, skips: bool = False) -> None:
        """End a step: update the parameters by its gradients, unless they are not finite; then change the loss scale.

        Args:
            finite: True if loss and gradients are finite on all ranks; the same on every rank.
            factor: as for `step`.
            skips: True to leave the parameters as they are for another reason.

        Raises:
            ModelError: data ranks have run other blocks; or as for `step`.
        """
        if finite and not skips:
            self.step(factor)
        self.end_step(finite)

    def end_step(self, finite: bool) -> None:
        """End a step whose update was launched, as in `update`.

        Raises:
            ModelError: data ranks have run other blocks.
        """
        self._refuse_different_calls(finite)
        self.loss_scale = self.loss_scale.after(finite)

    def zero_grad(self) -> None:
        """Free the gradients."""
        self.inner.zero_grad(set_to_none=True)

    def finish_offload(self) -> None:
        """Wait until all offloaded states are where the host can read them."""
        if self.placement.offloaded is not None:
            self.placement.offloaded.finish()

    def pools(self) -> dict[str, Pool]:
        """Memory pools that the training has used: of "activations", "optimizer" states, and "parameters" and gradients."""
        users = {
            "activations": self.runtime.offload,
            "optimizer": self.placement.offloaded,
            "parameters": self.runtime.on_disk,
        }
        return {name: user.pool for name, user in users.items() if user and user.pool.requested}

    def track(self, live: LiveBytes) -> None:
        """Let a memory tracker count the persistent tensors of this training. Collective, after the first step."""
        reducer, feedback = self.runtime.gradient_reducer, self.runtime.feedback
        free_gathered_weights(self.model)  # an evaluation may have left some
        live.track_training(
            self.model,
            self.inner,
            excluded=[block for pool in self.pools().values() if pool.is_off_device for block in pool.blocks],
            buckets=[bucket.flat for bucket in reducer.buckets] if reducer else (),
            feedback=feedback.all_tensors() if feedback else (),
        )


def _missing_kernel(optimizer: torch.optim.Optimizer) -> PlanError:
    """Error for the kernel of AdamW with another optimizer."""
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return PlanError(
        f"adamw = 'triton' for {type(optimizer).__name__}{' without fused=True' if is_adam else ''}",
        where="plan.compute.kernels.adamw",
        rule="the kernel computes torch.optim.Adam and AdamW with fused=True, on devices that run Triton",
        fix="leave plan.compute.kernels.adamw out, or use torch.optim.AdamW(..., fused=True)",
    )


def _is_fused(group: dict[str, Any], device_type: str) -> bool:
    """True if a parameter group is updated by fused or foreach operations, which torch may choose itself on accelerators."""
    chosen_by_torch = device_type != "cpu" and "foreach" in group and group["foreach"] is None
    return bool(group.get("fused") or group.get("foreach") or chosen_by_torch)


def _reason_against_bf16_states(optimizer: torch.optim.Optimizer) -> Refusal | None:
    """Reason against an optimizer whose second moment would never decrease in bfloat16, however it was made."""
    for group in optimizer.param_groups:
        slowest = (group.get("betas") or (0.0, 0.0))[-1]
        if 1 - slowest < BF16_STEP:
            return Refusal(
                f"betas[1] = {slowest} of {type(optimizer).__name__} with plan.precision.optimizer_state_dtype = bf16",
                where="plan.precision.optimizer_state_dtype",
                rule="the second moment changes by a fraction 1 - betas[1] per step, and bfloat16 may round away changes "
                f"below {BF16_STEP:.4f}: the second moment would never decrease",
                fix='set betas[1] to 0.99 at most, or plan.precision.optimizer_state_dtype to "int8"',
            )
    return None


def _set_zeros(values: list[tuple[Tensor, Tensor]]) -> None:
    for value, where in values:
        value.masked_fill_(where, 0.0)
