"""DeviceMesh with named axes from a plan. Built once and passed explicitly."""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.backends.hierarchical import register_backend
from weft.compat import extend_fake_backend
from weft.errors import Refusal
from weft.plan import Comm, Plan, ResolvedPlan, resolve_plan
from weft.topology.collective_time import choose
from weft.topology.groups import (
    PREFIX,
    create_groups,
    create_lone_group,
    default_group,
    group_options,
    groups_of,
    share_group,
)
from weft.topology.topology import Topology

DATA_AXES = ("dp_replicate", "dp_shard")
CONTEXT_AXES = ("cp_ring", "cp_ulysses")
AXES = ("pp", *DATA_AXES, *CONTEXT_AXES, "tp")
EXPERT_AXES = ("pp", "edp_replicate", "edp_shard", "ep", "etp")
TYPICAL_BYTES = 2**24  # message size for the choice of the hierarchy: the gradients of a block


def mesh_shape(plan: ResolvedPlan) -> tuple[int, ...]:
    """Number of ranks along each of `AXES` for a resolved plan, outermost first.

    With zero = 0 nothing is sharded: the ranks of dp_shard hold copies and are counted in dp_replicate.
    """
    p = plan.parallel
    replicate, shard = (p.data_ranks, 1) if p.zero == 0 else (p.dp_replicate, p.dp_shard)
    return (p.pp, replicate, shard, p.cp // p.cp_ulysses, p.cp_ulysses, p.tp)


def build_mesh(plan: Plan, device_type: str, world_size: int) -> DeviceMesh:
    """Build the mesh of all ranks with all axes of `AXES`; tp is innermost, so that its ranks are adjacent.

    An axis of one rank costs nothing: its group has no connections and never communicates. On CPU, ranks of one host
    communicate through shared memory, and ranks of several hosts by hierarchical collectives (`backends/hierarchical.py`).
    On an accelerator, an axis of all ranks uses the default group.

    Args:
        plan: plan, whose degrees of -1 are replaced for `world_size`.
        device_type: "cpu", "cuda" or "npu".
        world_size: number of ranks of the default process group, which must exist.

    Raises:
        PlanError: the plan does not fit the number of ranks.
    """
    return _named_mesh(device_type, mesh_shape(resolve_plan(plan, world_size, native_bf16=False)), AXES, plan.comm, {})


def reason_against_mesh(plan: ResolvedPlan, mesh: DeviceMesh) -> Refusal | None:
    """Reason against a mesh that is not the mesh of a plan.

    Args:
        mesh: device mesh of all ranks.
    """
    found = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    for axis, size in zip(AXES, mesh_shape(plan), strict=True):
        if found.get(axis) != size:
            return Refusal(
                f"the mesh has {f'{found[axis]} ranks along {axis}' if axis in found else f'no axis {axis}'}",
                where="mesh",
                rule=f"the plan has {size} ranks along {axis}",
                fix="make the mesh with weft.build_mesh(plan, ...) from this plan, or leave it out in weft.prepare",
            )
    return None


def ranks_along(mesh: DeviceMesh, *axes: str) -> int:
    """Product of the sizes of mesh axes. `mesh[axes].size()` would create a mesh at each call, which takes a millisecond."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return prod(sizes[axis] for axis in axes)


def join_axes(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Flatten several axes into a mesh of one axis, named for example dp_shard_cp_ring. All ranks make the first call."""
    if ranks_along(mesh, *axes) == ranks_along(mesh, axes[0]):  # nothing to join
        return mesh[axes[0]]
    backends = {dist.get_backend(mesh.get_group(axis)) for axis in axes if ranks_along(mesh, axis) > 1}
    is_default = mesh.device_type != "cpu" and ranks_along(mesh, *axes) == dist.get_world_size()
    own = None if is_default else backends.pop()  # named, because torch would split a default group bound to a device
    return mesh[axes]._flatten("_".join(axes), backend_override=own)


def group_of_all(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Group of all ranks of a mesh, for the small messages of a step. All ranks make the first call."""
    assert mesh.mesh_dim_names is not None
    wide = [axis for axis, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True) if size > 1]
    if len(wide) == 1:
        return mesh.get_group(wide[0])
    if mesh.device_type != "cpu":
        return dist.group.WORLD  # type: ignore[return-value]
    return join_axes(mesh, mesh.mesh_dim_names).get_group()


def join_meshes(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """Concatenate two meshes of one axis each, of the same ranks, into a mesh of two axes."""
    return DeviceMesh._concatenate([outer, inner])


def build_expert_mesh(plan: ResolvedPlan, mesh: DeviceMesh) -> DeviceMesh:
    """Build the mesh of the experts, with the axes of `EXPERT_AXES`: the ep ranks share the experts of a layer.

    The ranks of dp_shard, cp and tp (and of dp_replicate if zero = 0) are folded into edp_shard x ep x etp, with etp innermost.
    Attention and experts can thus be parallelized differently; an expert is split over the ranks of etp only (Liu et al., MoE
    Parallel Folding, 2025).

    An axis uses the group of an axis of `mesh` with the same ranks, if their collectives may queue behind each other
    (`topology/groups.py`). On CPU, where a group costs little, each axis has its own, by which traffic is told apart.

    Args:
        mesh: mesh from `build_mesh`.
    """
    return _named_mesh(mesh.device_type, expert_mesh_shape(plan), EXPERT_AXES, plan.comm, groups_of(mesh))


def build_counts_group(expert_mesh: DeviceMesh) -> dist.ProcessGroup:
    """Further group of the ep ranks, for small messages that must not queue behind large ones. Collective."""
    sizes = dict(zip(expert_mesh.mesh_dim_names or (), expert_mesh.shape, strict=True))
    options = group_options("ep", expert_mesh.device_type)
    return _further_group(expert_mesh, axis_groups(sizes, "ep").tolist(), "expert_counts", options)


def build_layer_group(expert_mesh: DeviceMesh) -> dist.ProcessGroup:
    """Group of all ranks that hold the same layers. Collective."""
    return _further_group(expert_mesh, expert_mesh.mesh.flatten(1).tolist(), "layers")


def _further_group(mesh: DeviceMesh, ranks: list[list[int]], name: str, options: Any = None) -> dist.ProcessGroup:
    if dist.get_backend() == "fake":
        return create_groups(ranks, "fake", name)
    return create_groups(ranks, "gloo" if mesh.device_type == "cpu" else None, name, options)


def expert_mesh_shape(plan: ResolvedPlan) -> tuple[int, ...]:
    """Number of ranks along each of `EXPERT_AXES` for a resolved plan, outermost first."""
    p = plan.parallel
    inside = p.cp * p.tp * (p.data_ranks if p.zero == 0 else p.dp_shard) // (p.ep * p.etp)
    replicate, shard = (inside, 1) if p.zero == 0 else (p.dp_replicate, inside)
    return p.pp, replicate, shard, p.ep, p.etp


def _named_mesh(
    device_type: str,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    comm: Comm,
    others: Mapping[str, dist.ProcessGroup],
) -> DeviceMesh:
    """Mesh of all ranks; `others` are the groups of another mesh, by axis, which its axes may share."""
    sizes = dict(zip(names, shape, strict=True))
    extend_fake_backend(device_type)
    shares, lone, groups = device_type != "cpu" and dist.get_backend() != "fake", create_lone_group(), []
    for axis, size in sizes.items():
        partition = axis_groups(sizes, axis)
        (ranks,) = partition[(partition == dist.get_rank()).any(1)].tolist()
        group = lone if size == 1 else share_group(axis, ranks, others, renames=shares)
        if group is None and shares and size == dist.get_world_size():
            group = default_group(axis, others)
        if group is None:
            backend = _backend(device_type, sizes, axis, comm)
            options = None if backend == "fake" else group_options(axis, device_type)
            group = create_groups(partition.tolist(), backend, PREFIX + axis, options)
        groups.append(group)
    ranks = np.arange(prod(shape)).reshape(shape)
    return DeviceMesh.from_group(groups, device_type, torch.from_numpy(ranks), mesh_dim_names=names)


def _backend(device_type: str, sizes: dict[str, int], axis: str, comm: Comm) -> str | None:
    """Backend of an axis with several ranks; None for the default of torch. In a dry run all groups are fake."""
    if dist.get_backend() == "fake":
        return "fake"
    return (
        register_backend(choose_hierarchy(comm, axis_groups(sizes, axis)[0].tolist())) if device_type == "cpu" else None
    )


def choose_hierarchy(comm: Comm, ranks: list[int]) -> str:
    """Choose between flat and hierarchical collectives for a group.

    With `comm.hierarchy = "auto"` and a declared topology that has links, the predicted time of messages of 16 MB decides.

    Args:
        comm: `plan.comm`.
        ranks: ranks of the group, host after host.

    Returns:
        "auto", "two_level" or "flat", as in `plan.comm.hierarchy`.
    """
    topology = Topology.load(comm.topology) if comm.topology and comm.hierarchy == "auto" else None
    if topology is None or not topology.links:
        return comm.hierarchy
    if choose(topology, "all_reduce", TYPICAL_BYTES, ranks) == "flat":
        return "flat"
    return "two_level" if choose(topology, "all_to_all", TYPICAL_BYTES, ranks) == "two_level" else "auto"


def axis_groups(shape: Mapping[str, int], axis: str) -> np.ndarray:
    """Ranks of each group of an axis, [groups, degree]."""
    dim = list(shape).index(axis)
    ranks = np.arange(prod(shape.values())).reshape(tuple(shape.values()))
    return np.moveaxis(ranks, dim, -1).reshape(-1, shape[axis])


def data_rank(mesh: DeviceMesh) -> int:
    """Data-parallel rank, counted over `DATA_AXES`: index of this rank's share of every global batch."""
    return mesh.get_local_rank("dp_replicate") * ranks_along(mesh, "dp_shard") + mesh.get_local_rank("dp_shard")


def context_rank(mesh: DeviceMesh) -> int:
    """Context-parallel rank, counted over `CONTEXT_AXES`: index of this rank's part of every sequence."""
    return mesh.get_local_rank("cp_ring") * ranks_along(mesh, "cp_ulysses") + mesh.get_local_rank("cp_ulysses")
