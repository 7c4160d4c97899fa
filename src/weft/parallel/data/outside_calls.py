"""Layers that are called while their unit of FSDP2 does not run, and gather their own weights.

A unit gathers its weights when it runs: a block, or the model itself with all weights outside of blocks. Some models call a
layer of a block alone (the embedding of time steps in block 0 of DiT), and a loop may call parts of a model: its embedding, its
body and its head, or its encoder before it generates. Such a layer gathers its weights by an all-gather whose backward
reduce-scatters the gradient to the shards, where that of the unit is added.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from weft.anatomy.roles import Anatomy
from weft.compat import is_in_backward
from weft.errors import ModelError, PlanError
from weft.parallel.data.parameter_hooks import GatheredHooks
from weft.plan import ResolvedPlan
from weft.precision.dtypes import DTYPES


def gather_outside_of_blocks(
    model: nn.Module, anatomy: Anatomy, plan: ResolvedPlan, hooks: Mapping[Tensor, GatheredHooks]
) -> None:
    """Let layers gather their weights when they are called alone: those outside of blocks, and in a model whose roles are not
    known those of blocks.

    Args:
        model: model after FSDP2.
        anatomy: its blocks.
        plan: plan.
        hooks: hooks of parameters, by shard.
    """
    blocks = [model.get_submodule(name) for name in anatomy.unit_names]
    inside = {layer for block in blocks for layer in block.modules()}
    for layer in model.modules():
        is_unit = isinstance(layer, FSDPModule) or (layer in inside and anatomy.has_roles)
        if layer._parameters and not is_unit:
            shards: dict[str, Any] = dict(layer._parameters)
            own = {name: hooks[shard] for name, shard in shards.items() if shard in hooks}
            gather = GatherAlone(layer, plan, own)
            layer.register_forward_pre_hook(gather.begin)
            layer.register_forward_hook(gather.end, always_call=True)


def refuse_parts_alone(model: nn.Module, anatomy: Anatomy, plan: ResolvedPlan) -> None:
    """Refuse calls of the embedding and the head without the forward of the model, which shards rows for tp and cp.

    Args:
        model: model after all parallelism.
        anatomy: its roles.
        plan: plan.
    """
    calls = WholeCalls(plan)
    model.register_forward_pre_hook(calls.enter, prepend=True)
    model.register_forward_hook(calls.leave, always_call=True)
    for name in filter(None, (anatomy.embedding, anatomy.head)):
        model.get_submodule(name).register_forward_pre_hook(partial(calls.check, name))


class WholeCalls:
    """Hooks that tell calls of the model from calls of its parts."""

    def __init__(self, plan: ResolvedPlan):
        self.plan, self.depth = plan, 0

    def enter(self, *_: object) -> None:
        self.depth += 1

    def leave(self, *_: object) -> None:
        self.depth -= 1

    def check(self, name: str, *_: object) -> None:
        """Refuse a call outside of the model, and not of recompute.

        Raises:
            PlanError: names the part.
        """
        if self.depth == 0 and not is_in_backward():
            p = self.plan.parallel
            raise PlanError(
                f"a call of {name} alone under tp = {p.tp} and cp = {p.cp}",
                where="plan.parallel",
                rule="the forward of the model divides rows and heads among the ranks of tp and cp",
                fix="call the model itself, and run.gather_logits for its logits; or set plan.parallel.tp = 1 and cp = 1",
            )


def explain_shards(error: RuntimeError) -> None:
    """Say what an error of torch means, if it is about shards of a model that were mixed with full tensors.

    Raises:
        ModelError: it is.
    """
    if "mixed torch.Tensor and DTensor" not in str(error):
        return
    raise ModelError(
        f"an operation on a full tensor and on a shard of this rank: {' '.join(str(error).split())[:200]}",
        where="under plan.parallel.zero > 0 or tp > 1",
        rule="parameters are shards, unless their block or the model runs; copies that were made of them before, such as those "
        "of EMAModel, are full",
        fix="call the model, or a whole block, or a layer outside of blocks; or set plan.parallel.zero = 0 and tp = 1, where "
        "parameters stay full",
    ) from error


class GatherAlone:
    """Hooks of a layer that swap sharded weights for gathered ones during a call."""

    def __init__(self, layer: nn.Module, plan: ResolvedPlan, hooks: Mapping[str, GatheredHooks]):
        self.table, self.dtype, self.hooks = layer._parameters, DTYPES[plan.precision.param_dtype], hooks
        self.shards: dict[str, Any] = {}

    def begin(self, *_: object) -> None:
        """Gather the weights that are shards: the block does not run."""
        self.shards = {name: value for name, value in self.table.items() if is_data_shard(value)}
        for name, shard in self.shards.items():
            self.table[name] = _gather(shard, self.hooks.get(name)).to(self.dtype)  # type: ignore[assignment]

    def end(self, *_: object) -> None:
        """Put the shards back."""
        self.table.update(self.shards)
        self.shards = {}


def is_data_shard(parameter: Any) -> bool:
    """True if data ranks hold parts of a parameter; those of tp and ep hold parts of a gathered weight, too."""
    return isinstance(parameter, DTensor) and not {"tp", "ep", "etp"}.issuperset(
        parameter.device_mesh.mesh_dim_names or ()
    )


def _gather(shard: DTensor, hooks: GatheredHooks | None) -> Tensor:
    """Full weight; the gradient of the shard is the mean over the ranks."""
    full = shard.full_tensor(grad_placements=[Partial()] * shard.device_mesh.ndim)
    if full.requires_grad:
        if hooks is not None:
            full.register_hook(hooks.run)
        full.register_hook(lambda gradient: gradient / shard.device_mesh.size())
    return full
