"""Distributed data parallelism (ZeRO stage 0): full model state on every rank, gradients all-reduced during backward.

Gradients are views of flat buckets, one for each block, which are allocated once. A bucket is all-reduced as soon as its last
gradient is computed, overlapped with the backward of earlier blocks (Li et al., PyTorch Distributed, 2020). FSDP with one
shard would give the same result, with two more copies of weights and gradients every step and without this overlap.

A compressed all-reduce sends two messages in sequence. The second message of a bucket starts when the first messages of two
more buckets are in flight.
"""

from typing import Any, NamedTuple
from weakref import proxy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from weft.anatomy.roles import Anatomy
from weft.comm.compression.feedback import Feedback
from weft.comm.compression.reduce import AllReduce, PlainAllReduce, levels_of
from weft.compat import call_after_backward
from weft.memory.packed import has_values
from weft.parallel.weights import to_local
from weft.plan import ResolvedPlan
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import CONTEXT_AXES, join_axes

IN_FLIGHT = 2  # buckets with their first message in flight before the second message of an earlier bucket starts


def apply_ddp(
    model: Any,
    anatomy: Anatomy,
    plan: ResolvedPlan,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None = None,
    feedback: Feedback | None = None,
) -> "GradientReducer":
    """Average gradients over the data ranks by the end of each backward, in place.

    Args:
        model: model on any device, including meta, with the same weights on all ranks.
        anatomy: its roles.
        plan: plan with zero = 0.
        mesh: device mesh with the axes of `weft.topology.mesh`; all data ranks are on dp_replicate.
        expert_mesh: device mesh of the experts over the same ranks; None if experts use `mesh`.
        feedback: state of compressed reductions; None to reduce without compression.

    Returns:
        The reducer, whose `last_micro_batch` is set before each backward.
    """
    group = join_axes(mesh, ("dp_replicate", *CONTEXT_AXES)).get_group()
    units = [Unit(name, group) for name in reversed(anatomy.unit_names)]
    if expert_mesh is not None:
        experts = expert_mesh.get_group("edp_replicate")
        units = [Unit(name, experts) for block in reversed(anatomy.blocks) for name in block.experts] + units
    wrapped = plan.precision.backward == "fp16"
    reducer = GradientReducer([*units, Unit("", group)], feedback, plan.comm.compress_scope, wrapped=wrapped)
    # Weights may still be on the meta device, so buckets and gradient hooks are created in the first forward.
    model.register_forward_pre_hook(reducer.prepare)
    if plan.precision.param_dtype != plan.precision.update:
        _cast_in_forward(model, anatomy, DTYPES[plan.precision.param_dtype])
    return reducer


class Unit(NamedTuple):
    """Group of parameters whose gradients are reduced together."""

    module: str
    """Name of the module whose parameters the unit contains, except parameters of earlier units."""
    group: dist.ProcessGroup
    """Ranks whose gradients are averaged."""
    makes_momentum: bool = True
    """True if this reduction computes the momentum of the gradients, for compressions that reduce momentum (1-bit Adam)."""


def is_split(parameter: Tensor) -> bool:
    """True if a parameter is sharded over the ranks of tp, of ep, or of ep and etp, not replicated."""
    if not isinstance(parameter, DTensor):
        return False
    axes = dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True))
    innermost = next((axes[name] for name in ("etp", "ep", "tp") if name in axes), None)
    return innermost is not None and not innermost.is_replicate()


class Bucket:
    """Flat buffer with the gradients of some parameters.

    After the gradients the buffer has one element for each parameter: the fraction of ranks that have a gradient of it. A
    parameter that no rank uses keeps `grad = None`, so that the optimizer skips it.
    """

    def __init__(
        self, parameters: list[nn.Parameter], unit: Unit, feedback: Feedback | None = None, compress_scope: str = "all"
    ):
        self.unit, self.feedback = unit, feedback
        self.levels = levels_of(unit.group, compress_scope)
        self.name = f"{'split' if is_split(parameters[0]) else 'whole'}.{unit.module or 'rest'}"
        self.parameters = parameters
        locals_ = [to_local(p.detach()) for p in parameters]
        sizes = [local.numel() for local in locals_]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=locals_[0].dtype, device=locals_[0].device)
        self.gradients, self.used = self.flat.split([sum(sizes), len(sizes)])
        flat_views = self.gradients.split(sizes)
        views = [flat_view.view_as(local) for flat_view, local in zip(flat_views, locals_, strict=True)]
        self.views = [_as_gradient(view, p) for view, p in zip(views, parameters, strict=True)]
        self.num_pending = len(parameters)
        self.missing_gradients: list[int] = []
        self.works: list[AllReduce | PlainAllReduce] = []

    def reduce(self) -> None:
        """Start to average over ranks; a parameter without a gradient on this rank contributes zeros."""
        self.missing_gradients = [index for index, parameter in enumerate(self.parameters) if parameter.grad is None]
        self.used.fill_(1)
        for index in self.missing_gradients:
            self.views[index].zero_()
            self.used[index] = 0
        self.num_pending = len(self.parameters)
        unit, feedback = self.unit, self.feedback
        if feedback is None:
            self.works = [PlainAllReduce(self.name, self.flat, unit.group)]
            return
        if feedback.is_on and self.levels.outer_size > 1:
            momentum = unit.makes_momentum
            gradient_work: Any = AllReduce(self.name, self.gradients, self.levels, feedback, momentum=momentum)
        else:
            gradient_work = PlainAllReduce(
                self.name, self.gradients, unit.group, feedback if unit.makes_momentum else None
            )
        self.works = [gradient_work, PlainAllReduce(f"{self.name}.used", self.used, unit.group)]

    def advance(self) -> None:
        """Start the second message of a compressed reduction."""
        for work in self.works:
            work.advance()

    def wait(self) -> None:
        """Wait for the reduction. The host synchronises with the device only if this rank has no gradient of some parameter."""
        for work in self.works:
            work.wait()
        self.works = []
        if not has_values(self.flat):  # in a dry run a parameter without a gradient on this rank has none on any rank
            return
        used = self.used[self.missing_gradients].tolist() if self.missing_gradients else []
        for index, fraction in zip(self.missing_gradients, used, strict=True):
            # Error feedback from earlier steps may be added in a step that does not use the parameter.
            has_feedback = self.feedback is not None and bool(to_local(self.views[index]).any())
            if fraction > 0 or has_feedback:
                self.parameters[index].grad = self.views[index]


def _as_gradient(view: Tensor, parameter: Tensor) -> Tensor:
    """Local gradient as a tensor of the same kind as its parameter: a DTensor if the parameter is one."""
    if isinstance(parameter, DTensor):
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(view, parameter.device_mesh, parameter.placements, shape=shape, stride=stride)
    return view


class GradientReducer:
    """Collects gradients in buckets during backward, and all-reduces full buckets in the last backward of a step."""

    def __init__(
        self,
        units: list[Unit],
        feedback: Feedback | None = None,
        compress_scope: str = "all",
        *,
        scalars_only: bool = False,
        wrapped: bool = False,
    ):
        """
        Args:
            units: groups of parameters, in the order of backward.
            feedback: error feedback of compressed reductions; None without compression.
            compress_scope: reductions that are compressed, as in the plan.
            scalars_only: reduce parameters without dims alone, which FSDP2 cannot shard.
            wrapped: gradients are of a subclass of tensors (`fp16_backward.py`), which only buckets unwrap.
        """
        self.scalars_only = scalars_only
        self.units, self.feedback, self.compress_scope = units, feedback, compress_scope
        self.needs_buckets = wrapped or (feedback is not None and feedback.takes_momentum)
        self.last_micro_batch = True
        self.buckets: list[Bucket] = []
        self.covered = set[int]()
        """`id` of each parameter whose gradient is the mean over its ranks after backward."""
        self.reducing: list[Bucket] = []
        self.finish_is_queued = False

    def prepare(self, model: nn.Module, _: object) -> None:
        """Forward pre-hook that creates the buckets on its first call, one per unit, in the order of backward.

        Gradients of one rank stay in the tensors that autograd makes for them, where possible.
        """
        if self.covered:
            return
        trained = (p for p in model.parameters() if p.requires_grad)
        remaining = {id(p): p for p in trained if p.ndim == 0 or not self.scalars_only}
        for unit in self.units:
            members = [
                p for p in model.get_submodule(unit.module).parameters() if remaining.pop(id(p), None) is not None
            ]
            self.covered.update(map(id, members))
            if unit.group.size() == 1 and not self.needs_buckets:
                continue
            for part in self._split_buckets(members):
                self.buckets.append(Bucket(part, unit, self.feedback, self.compress_scope))
        for index, bucket in enumerate(self.buckets):
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.register_post_accumulate_grad_hook(_gradient_hook(proxy(self), index, view))

    def _split_buckets(self, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Parameters of each bucket of a unit.

        With compression, replicated and sharded parameters get separate buckets: the replicas of a parameter on tp ranks stay
        equal only if its messages contain no sharded gradients, which differ between tp ranks.
        """
        if self.feedback is None:
            return [parameters] if parameters else []
        parts = [[p for p in parameters if is_split(p) == split] for split in (True, False)]
        return [part for part in parts if part]

    def mark_ready(self, index: int) -> None:
        if not self.finish_is_queued:
            call_after_backward(self.finish)
            self.finish_is_queued = True
        self.buckets[index].num_pending -= 1
        # All ranks reduce buckets in the same order, even if a later bucket is full first: ranks may use different parameters.
        while len(self.reducing) < len(self.buckets) and self.buckets[len(self.reducing)].num_pending == 0:
            self._reduce_next()

    def _reduce_next(self) -> None:
        bucket = self.buckets[len(self.reducing)]
        bucket.reduce()
        self.reducing.append(bucket)
        for earlier in self.reducing[-IN_FLIGHT - 1 : -IN_FLIGHT]:
            earlier.advance()

    def finish(self) -> None:
        """Reduce the buckets that are not full, and wait for all reductions; called at the end of backward."""
        while len(self.reducing) < len(self.buckets):
            self._reduce_next()
        for bucket in self.reducing:
            bucket.advance()
        for bucket in self.reducing:
            bucket.wait()
        self.reducing.clear()
        self.finish_is_queued = False


def _gradient_hook(reducer: GradientReducer, index: int, view: Tensor) -> Any:
    """Hook that moves a gradient to its bucket. `reducer` is a weak reference: torch would never free a cycle with a hook."""

    def store(parameter: Tensor) -> None:
        if parameter.grad is not view:
            view.copy_(parameter.grad)  # type: ignore[arg-type]
            parameter.grad = view
        if reducer.last_micro_batch:
            reducer.mark_ready(index)

    return store


def _cast_in_forward(model: nn.Module, anatomy: Anatomy, dtype: torch.dtype) -> None:
    """Cast weights to the dtype of forward, and their gradients back in backward.

    The inputs of each block are cast too, as FSDP2 does: masks and buffers (the positions of XGLM) have the dtype of the
    stored weights.
    """
    originals: list[tuple[dict[str, Any], str, nn.Parameter]] = []

    def swap_in(*_: object) -> None:
        casts: dict[nn.Parameter, Tensor] = {}  # a tied weight is cast once
        for module in model.modules():
            tables = [(name, p) for name, p in module._parameters.items() if p is not None and p.is_floating_point()]
            originals.extend((module._parameters, name, parameter) for name, parameter in tables)
        for table, name, parameter in originals:
            if parameter not in casts:
                casts[parameter] = parameter.to(dtype)
            table[name] = casts[parameter]

    def swap_out(*_: object) -> None:
        for table, name, parameter in originals:
            table[name] = parameter
        originals.clear()

    def cast(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    def cast_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tree_map_only(Tensor, cast, args), tree_map_only(Tensor, cast, kwargs)

    for name in ("", *anatomy.unit_names):  # of the model too, as FSDP2 does: for example pixels
        model.get_submodule(name).register_forward_pre_hook(cast_inputs, with_kwargs=True)
    model.register_forward_pre_hook(swap_in)
    model.register_forward_hook(swap_out, always_call=True)
