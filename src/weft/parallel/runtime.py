"""Runtime of a parallelized model: its plan, mesh and anatomy, and one field for each technique that is on.

    model = weft.parallelize(model, plan, mesh)
    weft.runtime(model).pipeline            # None without pipeline parallelism

`parallelize` makes the runtime; training, checkpoints and measurements read it. It is registered on the model as a forward
pre-hook: no attribute is set on the model, each model has its own runtime, and both are freed together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.anatomy.roles import Anatomy
from weft.comm.compression.feedback import Feedback
from weft.comm.lanes import Lanes
from weft.compat import find_hook
from weft.compute.compile import CompiledRegions
from weft.compute.kernels import KernelRow
from weft.errors import ModelError
from weft.memory.offload import Offload
from weft.memory.on_disk import ShardsOnDisk
from weft.parallel.data.async_reduce_scatter import PendingReduceScatters
from weft.parallel.data.ddp import GradientReducer
from weft.parallel.data.replicas import SharedBuffers
from weft.parallel.data.unit_calls import UnitCalls, UnusedWeights
from weft.parallel.experts.path import ExpertPath
from weft.parallel.experts.relocation import Relocation
from weft.parallel.experts.router_stats import RouterStats
from weft.parallel.loss.distillation import Teacher
from weft.parallel.loss.head_loss import LinearLoss
from weft.parallel.pipeline.runtime import PipelineRuntime
from weft.parallel.sequence.attention_plan import AttentionPlans
from weft.parallel.sequence.dropout import STEPS_PER_SEED, DropoutContext
from weft.parallel.sequence.forward_pass import ForwardSlot
from weft.parallel.sequence.varlen import Varlen
from weft.parallel.weights import PackedLayout, TensorSplit
from weft.plan import ResolvedPlan


@dataclass
class Runtime:
    """Result of `parallelize` for one model."""

    plan: ResolvedPlan
    """Resolved plan."""
    mesh: DeviceMesh
    """Mesh of all ranks."""
    anatomy: Anatomy
    """Anatomy of the full model; in a pipeline a rank has the blocks of its stages only."""
    router_stats: RouterStats
    takes_full_rows: bool = False
    """True if callers pass full rows, which hooks of the model shard for tp or cp, and for which they build masks."""
    forward_slot: ForwardSlot = field(default_factory=ForwardSlot)
    """Forward of `weft.training.forward_backward` that the model runs now, for hooks inside of the model."""
    loss_copies: int = 1
    """Ranks of cp that compute the same loss, of whole rows, because they divide the heads of attention alone."""
    tensor_split: TensorSplit = field(default_factory=TensorSplit)
    """Changes by tensor parallelism; empty without it."""
    dropout: DropoutContext | None = None
    """Seed and rows of layout-invariant dropout; None for a model without dropout."""
    offload: Offload | None = None
    """Offload of activations; None without recompute and offload."""
    on_disk: ShardsOnDisk | None = None
    """Weights and gradients on disk; None where they are in memory."""
    feedback: Feedback | None = None
    """State of compressed gradient reductions; None without compression."""
    gradient_reducer: GradientReducer | None = None
    """Buckets of gradients that are all-reduced: with zero = 0, and between the replicas of compressed shards."""
    whole_frozen_weights: frozenset[str] = frozenset()
    """Names of frozen weights that ZeRO stages 1 and 2 leave whole, and whose gradients are not reduced."""
    unit_calls: UnitCalls | None = None
    """Order of the units of FSDP2 in a step; None if data ranks share no weights."""
    unused_weights: UnusedWeights | None = None
    """Weights outside of blocks that ranks may leave unused; None where all of them are used, or FSDP2 does not support it."""
    shared_buffers: SharedBuffers | None = None
    """Buffers that forwards change; None if one rank alone has its rows."""
    reduce_scatters: PendingReduceScatters | None = None
    """Reduce-scatters of FSDP2 in flight; None where FSDP2 overlaps them itself."""
    experts: dict[str, ExpertPath] = field(default_factory=dict)
    """Paths of the experts of this rank, by the name of their module."""
    relocation: Relocation | None = None
    """Homes of experts that move; None where they stay."""
    lanes: Lanes | None = None
    """Lanes of joint forwards and backwards; None where they run one after the other."""
    pipeline: PipelineRuntime | None = None
    """Stages of this rank; None without pipeline parallelism."""
    kernels: tuple[KernelRow, ...] = ()
    """Implementations of the fused operators, and why not where there is none."""
    compiled: CompiledRegions | None = None
    """Count of the compiled regions that have run; None without torch.compile."""
    attention_plans: AttentionPlans | None = None
    """Plans of attention by documents, with or without context parallelism; None: by masks."""
    varlen: Varlen | None = None
    """Attention of packed rows by documents; None: by masks, or by the attention of context parallelism."""
    linear_loss: LinearLoss | None = None
    """Loss computed inside of the head, without logits; None if the head is on another rank or returns logits."""
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    """Custom loss for `weft.training.forward_backward`: (full logits, targets) -> sum over the targets; None: cross entropy."""
    teacher: Teacher | None = None
    """Teacher whose distribution `weft.training.forward_backward` trains towards; None without distillation."""
    saves_trained_only: bool = False
    """True if checkpoints leave out the frozen weights, which are those of the base model of adapters."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Leave the arguments unchanged; as a hook, the runtime is attached to its model."""


def find_runtime(model: nn.Module) -> Runtime | None:
    """Runtime of a model; None for a model that is not parallelized."""
    return find_hook(model, Runtime)


def runtime(model: nn.Module) -> Runtime:
    """Runtime of a parallelized model.

    Raises:
        ModelError: the model is not parallelized.
    """
    found = find_runtime(model)
    if found is None:
        raise ModelError(
            f"{type(model).__name__} is not parallelized",
            where="weft.runtime",
            rule="the runtime of a model is made by weft.parallelize",
            fix="call weft.parallelize(model, plan, mesh) first, and pass the model that it returns",
        )
    return found


def allocate(model: Any, device: torch.device) -> None:
    """Allocate uninitialized memory for this rank's shards of a parallelized meta model."""
    uses: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                uses.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (first, first_name), *others in uses.values():  # each use of a tied weight has been allocated separately
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]
    on_disk = runtime(model).on_disk
    if on_disk is not None:
        on_disk.move(model)


def set_dropout_seed(model: nn.Module, seed: int, step: int) -> None:
    """Set the dropout seed of the following forwards: that of a step, for all its micro-batches."""
    dropout = runtime(model).dropout
    if dropout is not None:
        dropout.seed = seed * STEPS_PER_SEED + step


def reorder_packed(model: nn.Module, weights: dict[str, Tensor], *, by_rank: bool) -> dict[str, Tensor]:
    """Reorder the rows of packed matrices.

    Args:
        model: parallelized model.
        weights: full tensors by parameter name.
        by_rank: True: from the original order, by projection, to the sharded order, by tp rank. False: back.
    """
    functions = packed_parameters(model)
    return {name: functions[name](value, by_rank) if name in functions else value for name, value in weights.items()}


def packed_parameters(model: nn.Module) -> dict[str, Callable[[Tensor, bool], Tensor]]:
    """Row reordering functions (tensor, by_rank) -> tensor, by name of each parameter whose stored rows have another order:
    those that pack several projections, and those of experts that have moved."""
    packed, relocation = runtime(model).tensor_split.packed, runtime(model).relocation
    functions: dict[str, Callable[[Tensor, bool], Tensor]] = {
        f"{name}.{last}": partial(_reorder, packed[module], last)
        for name, module in model.named_modules()
        if module in packed
        for last in packed[module].dim
    }
    for name, homes in relocation.homes.items() if relocation else ():
        if homes.table is not None:
            functions |= {f"{name}.{last}": homes.reorder for last, _ in model.get_submodule(name).named_parameters()}
    return functions


def _reorder(layout: PackedLayout, name: str, tensor: Tensor, by_rank: bool) -> Tensor:
    return (layout.to_rank_order if by_rank else layout.to_projection_order)(tensor, name)
