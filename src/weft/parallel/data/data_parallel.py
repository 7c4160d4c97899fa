"""Steps of `parallelize` for data parallelism: replicas under ZeRO stage 0, shards of FSDP2 under stages 1 to 3."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from weft.comm.compression.codecs import build_feedback
from weft.device.cpu import return_freed_memory
from weft.errors import raise_if_refused
from weft.memory.on_disk import ShardsOnDisk
from weft.memory.packed import has_values
from weft.memory.pool import Pool, mapped_files, reason_against_disk
from weft.memory.storages import local_part, plain_parts
from weft.parallel.data.ddp import apply_ddp
from weft.parallel.data.fp8_gather import gather_in_fp8
from weft.parallel.data.fsdp import apply_fsdp, keeps_whole, prefetch_backward, prefetch_forward
from weft.parallel.data.fsdp_timing import time_fsdp
from weft.parallel.data.outside_calls import gather_outside_of_blocks, refuse_parts_alone
from weft.parallel.data.parameter_hooks import keep_hooks, reason_against_hooks
from weft.parallel.data.replicas import SharedBuffers
from weft.parallel.data.unit_calls import SHARING_AXES, UnitCalls, UnusedWeights
from weft.plan import ResolvedPlan
from weft.topology.mesh import ranks_along

if TYPE_CHECKING:
    from weft.parallel.build import Build


def reduce_gradients(build: "Build") -> None:
    """Compression of gradients, hooks of parameters and changed buffers; and replicas, whose gradients are all-reduced."""
    build.begin("reduce_gradients", "run_techniques", "recompute_blocks", "split_master_weights")
    model, plan, mesh, runtime = build.model, build.plan, build.mesh, build.runtime
    runtime.feedback = build_feedback(plan.comm)
    if mesh.size() > 1 or plan.parallel.zero > 0:
        raise_if_refused(reason_against_hooks(model, build.hooked, defers=build.queue is not None))
    if ranks_along(mesh, *SHARING_AXES) > 1 and dist.get_backend() != "fake":
        runtime.shared_buffers = SharedBuffers(model, mesh)
    if plan.parallel.zero == 0:
        meshes = mesh, build.expert_mesh
        runtime.gradient_reducer = apply_ddp(model, build.anatomy, plan, *meshes, runtime.feedback)


def shard_weights(build: "Build") -> None:
    """Shards of FSDP2: the last change of parameters."""
    build.begin("shard_weights", "reduce_gradients")
    model, plan, mesh, runtime, full = build.model, build.plan, build.mesh, build.runtime, build.full_anatomy
    p = plan.parallel
    if p.zero == 0:
        return
    names = (name for name, parameter in model.named_parameters() if keeps_whole(parameter, plan))
    runtime.whole_frozen_weights = frozenset(names)
    sharded = apply_fsdp(model, build.anatomy, plan, mesh, build.expert_mesh, runtime.feedback)
    hooks = keep_hooks(model, build.hooked)
    if p.tp == 1 or not full.has_roles:
        gather_outside_of_blocks(model, build.anatomy, plan, hooks)
    if ranks_along(mesh, *SHARING_AXES) > 1:
        runtime.unit_calls = UnitCalls(model, mesh)
        if (not full.has_roles or full.tower_blocks) and p.pp == 1:
            runtime.unused_weights = UnusedWeights(model, mesh)
    runtime.gradient_reducer, runtime.reduce_scatters = sharded
    # With tp, the scale of a weight is that of the part of a rank.
    in_fp8 = build.fp8_layers if p.zero == 3 and p.tp == 1 and plan.precision.matmul == "fp8" else ()
    gathers = gather_in_fp8(model, in_fp8)
    if plan.memory.parameters_device == "disk":
        runtime.on_disk = _rest_on_disk(model, plan)
    if mesh.device_type != "cpu":
        time_fsdp(model, gathers, reduce_scatters=runtime.feedback is None)


def _rest_on_disk(model: nn.Module, plan: ResolvedPlan) -> ShardsOnDisk:
    """Shards on disk. A model that has weights is moved now, and a model on the meta device by `allocate`.

    Raises:
        PlanError: the disk is full; the same on every rank.
    """
    folder = Path(plan.memory.offload_dir)
    parts = [part for parameter in model.parameters() for part in plain_parts(local_part(parameter))]
    if dist.get_backend() != "fake":
        size = 2 * sum(part.nbytes for part in parts)
        raise_if_refused(reason_against_disk(folder, size, "weights and gradients"))
        return_freed_memory()  # before weights are allocated, whose memory would be used again for gathered weights
    on_disk = ShardsOnDisk(Pool(mapped_files(folder)), plan.comm.prefetch)
    on_disk.watch(model)
    if all(map(has_values, parts)):
        on_disk.move(model)
        return_freed_memory()
    return on_disk


def prefetch_weights(build: "Build") -> None:
    """Order in which FSDP2 gathers the weights of blocks; and no call of a part whose rows other ranks do not have."""
    build.begin("prefetch_weights", "shard_weights")
    model, plan, full, stage_io = build.model, build.plan, build.full_anatomy, build.stage_io
    p = plan.parallel
    if p.tp * p.cp > 1 and p.pp == 1:
        refuse_parts_alone(model, full, plan)
    stacks = [full.blocks, full.encoder_blocks]
    if stage_io is not None:
        stacks = [full.chained_blocks[stage_io.stages[own].start : stage_io.stages[own].stop] for own in stage_io.own]
    names = [[block.name for block in blocks] for blocks in stacks]
    if p.zero == 3:
        prefetch_forward(model, names, plan, build.mesh)
    if p.zero == 3 and (p.pp > 1 or build.lanes is not None):  # backwards run in another order than FSDP2 records
        prefetch_backward(model, names)
