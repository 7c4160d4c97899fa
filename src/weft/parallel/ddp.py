"""Replicated data parallelism (ZeRO stage 0): every rank holds all state, and gradients are averaged while backward runs.

Gradients live in flat buckets, one for each block, that are made once; a bucket is reduced as soon as its last gradient is
there, behind the backward of the blocks before it (Li et al., PyTorch Distributed, 2020). Sharded data parallelism over one
rank would do the same with two more copies of weights and gradients, every step, and without the overlap.

A compressed reduction has two messages, one after the other: the second of a bucket leaves when two more buckets are full.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from weft.anatomy.roles import Anatomy
from weft.comm.compression.feedback import Feedback
from weft.comm.compression.reduce import AllReduce, PlainAllReduce, levels_of
from weft.memory.packed import has_values
from weft.parallel.weights import to_local
from weft.plan import Plan
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import CONTEXT_AXES, join_axes

IN_FLIGHT = 2  # buckets whose first messages are on the way, before the second message of an earlier one leaves


def replicate_data_parallel(
    model: Any, anatomy: Anatomy, plan: Plan, mesh: DeviceMesh, expert_mesh: DeviceMesh | None = None
) -> None:
    """Average gradients over the data ranks, in place, by the end of each backward.

    Args:
        model: on any device, the meta device included; all ranks hold equal weights. Has its `feedback`.
        anatomy: its roles.
        plan: resolved, with zero = 0.
        mesh: with the axes of `weft.topology.mesh`; all data ranks are on dp_replicate.
        expert_mesh: the same ranks as experts see them; None where experts are split like all else.
    """
    group = join_axes(mesh, ("dp_replicate", *CONTEXT_AXES)).get_group()
    units = [Unit(block.name, group) for block in reversed(anatomy.blocks)]
    if expert_mesh is not None:
        experts = expert_mesh.get_group("edp_replicate")
        units = [Unit(name, experts) for block in reversed(anatomy.blocks) for name in block.experts] + units
    reducer = GradientReducer([*units, Unit("", group)], model.feedback, plan.comm.compress_scope)
    model.gradient_reducer = reducer
    # Weights may still be on the meta device: their hooks wait for the first forward.
    model.register_forward_pre_hook(reducer.prepare)
    if plan.precision.param_dtype != plan.precision.update:
        _cast_in_forward(model, anatomy, DTYPES[plan.precision.param_dtype])


class Unit(NamedTuple):
    """Parameters whose gradients travel together."""

    module: str
    """Name of the module that has them, those of earlier units apart."""
    group: dist.ProcessGroup
    """Ranks whose gradients are averaged."""
    makes_momentum: bool = True
    """Whether this reduction is the one that makes momenta of gradients, where momenta are what is compressed."""


def is_split(parameter: Tensor) -> bool:
    """Whether ranks of tp or ep hold a part of it each, not a copy."""
    if not isinstance(parameter, DTensor):
        return False
    axes = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
    return any(name in ("tp", "ep") and not placement.is_replicate() for name, placement in axes)


class Bucket:
    """Gradients of some parameters, side by side in one tensor, and behind them one number for each parameter: the share of
    ranks that have a gradient of it. A parameter that no rank uses has no gradient, and an optimizer leaves it alone.
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
        pieces = self.gradients.split(sizes)
        views = [piece.view_as(local) for piece, local in zip(pieces, locals_, strict=True)]
        self.views = [_like(view, p) for view, p in zip(views, parameters, strict=True)]
        self.missing = len(parameters)
        self.absent: list[int] = []
        self.works: list[AllReduce | PlainAllReduce] = []

    def reduce(self) -> None:
        """Start the average over ranks; a parameter without gradient on this rank adds zeros."""
        self.absent = [index for index, parameter in enumerate(self.parameters) if parameter.grad is None]
        self.used.fill_(1)
        for index in self.absent:
            self.views[index].zero_()
            self.used[index] = 0
        self.missing = len(self.parameters)
        unit, feedback = self.unit, self.feedback
        if feedback is None:
            self.works = [PlainAllReduce(self.name, self.flat, unit.group)]
            return
        if feedback.is_on and self.levels.outer_size > 1:
            momentum = unit.makes_momentum
            main: Any = AllReduce(self.name, self.gradients, self.levels, feedback, momentum=momentum)
        else:
            main = PlainAllReduce(self.name, self.gradients, unit.group, feedback if unit.makes_momentum else None)
        self.works = [main, PlainAllReduce(f"{self.name}.used", self.used, unit.group)]

    def advance(self) -> None:
        """Start the second message of a compressed reduction."""
        for work in self.works:
            work.advance()

    def wait(self) -> None:
        """End the reduction. The host waits for the device only where this rank lacks a gradient."""
        for work in self.works:
            work.wait()
        self.works = []
        if not has_values(self.flat):  # a dry run, in which no rank uses what this one does not
            return
        used = self.used[self.absent].tolist() if self.absent else []
        for index, share in zip(self.absent, used, strict=True):
            # What compressed messages of earlier steps have left out may come in a step that does not use the parameter.
            arrived = self.feedback is not None and bool(to_local(self.views[index]).any())
            if share > 0 or arrived:
                self.parameters[index].grad = self.views[index]


def _like(view: Tensor, parameter: Tensor) -> Tensor:
    """A local gradient, as the gradient of its parameter."""
    if isinstance(parameter, DTensor):
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(view, parameter.device_mesh, parameter.placements, shape=shape, stride=stride)
    return view


class GradientReducer:
    """Moves gradients into buckets as they are made, and reduces full buckets if this backward is the step's last."""

    def __init__(self, units: list[Unit], feedback: Feedback | None = None, compress_scope: str = "all"):
        """
        Args:
            units: in the order of backward.
            feedback: of reductions that are compressed; None where none is.
            compress_scope: which of them are, as in the plan.
        """
        self.units, self.feedback, self.compress_scope = units, feedback, compress_scope
        makes_momenta = feedback is not None and feedback.takes_momentum
        self.communicates = makes_momenta or any(unit.group.size() > 1 for unit in units)
        self.last_micro_batch = True
        self.buckets: list[Bucket] = []
        self.reducing: list[Bucket] = []
        self.finish_is_queued = False

    def prepare(self, model: nn.Module, _: object) -> None:
        """Make the buckets, once, one a unit, in the order of backward."""
        if self.buckets:
            return
        rest = {id(p): p for p in model.parameters() if p.requires_grad}
        for unit in self.units:
            inside = [p for p in model.get_submodule(unit.module).parameters() if rest.pop(id(p), None) is not None]
            for part in self._parts(inside):
                self.buckets.append(Bucket(part, unit, self.feedback, self.compress_scope))
        for index, bucket in enumerate(self.buckets):
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.register_post_accumulate_grad_hook(self._keeper(index, view))

    def _parts(self, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """What has a bucket of its own: what tp ranks have copies of stays so only if nothing else is in its messages."""
        if self.feedback is None:
            return [parameters] if parameters else []
        parts = [[p for p in parameters if is_split(p) == split] for split in (True, False)]
        return [part for part in parts if part]

    def _keeper(self, index: int, view: Tensor) -> Any:
        def keep(parameter: Tensor) -> None:
            if parameter.grad is not view:
                view.copy_(parameter.grad)  # type: ignore[arg-type]
                parameter.grad = view
            if self.last_micro_batch and self.communicates:
                self._count(index)

        return keep

    def _count(self, index: int) -> None:
        if not self.finish_is_queued:
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
            self.finish_is_queued = True
        self.buckets[index].missing -= 1
        # In one order on every rank, whichever is full first: a rank may not use what another does.
        while len(self.reducing) < len(self.buckets) and self.buckets[len(self.reducing)].missing == 0:
            self._reduce_next()

    def _reduce_next(self) -> None:
        bucket = self.buckets[len(self.reducing)]
        bucket.reduce()
        self.reducing.append(bucket)
        for earlier in self.reducing[-IN_FLIGHT - 1 : -IN_FLIGHT]:
            earlier.advance()

    def finish(self) -> None:
        """At the end of backward: reduce what never got full, and wait for all."""
        while len(self.reducing) < len(self.buckets):
            self._reduce_next()
        for bucket in self.reducing:
            bucket.advance()
        for bucket in self.reducing:
            bucket.wait()
        self.reducing.clear()
        self.finish_is_queued = False


def _cast_in_forward(model: nn.Module, anatomy: Anatomy, dtype: torch.dtype) -> None:
    """Cast the weights for forward, and their gradients back in backward. The inputs of each block are cast too, as FSDP2
    does: masks and buffers (XGLM's positions) have the dtype of the weights at rest.
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

    for block in anatomy.blocks:
        model.get_submodule(block.name).register_forward_pre_hook(cast_inputs, with_kwargs=True)
    model.register_forward_pre_hook(swap_in)
    model.register_forward_hook(swap_out, always_call=True)
