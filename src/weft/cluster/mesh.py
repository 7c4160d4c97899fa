"""Plan -> DeviceMesh with named axes. Built once, passed explicitly."""

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend of axes with one rank)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.cluster.hierarchy import register_backend
from weft.plan import Plan

DATA_AXES = ("dp_replicate", "dp_shard")
CONTEXT_AXES = ("cp_ring", "cp_ulysses")
AXES = ("pp", *DATA_AXES, *CONTEXT_AXES, "tp")
EXPERT_AXES = ("pp", "edp_replicate", "edp_shard", "ep")


def mesh_shape(plan: Plan) -> tuple[int, ...]:
    """Ranks along each of `AXES` for a resolved plan, outermost first.

    With zero = 0 nothing is sharded: the ranks of dp_shard hold copies too, so that they join dp_replicate.
    """
    p = plan.parallel
    replicate, shard = (p.data_ranks, 1) if p.zero == 0 else (p.dp_replicate, p.dp_shard)
    return (p.pp, replicate, shard, p.cp // p.cp_ulysses, p.cp_ulysses, p.tp)


def build_mesh(plan: Plan, device_type: str, world_size: int) -> DeviceMesh:
    """The mesh of all ranks, with every name of `AXES`; tp is innermost, so that its ranks are neighbours.

    An axis of one rank costs nothing: its group has no connections and never communicates. On CPU, ranks of one host
    communicate through shared memory, and those of several hosts in two levels (`hierarchy.py`).

    Args:
        plan: may still hold -1; it is resolved against `world_size`.
        device_type: "cpu", "cuda" or "npu".
        world_size: ranks of the default process group, which must exist.

    Raises:
        PlanError: the plan does not fit the number of ranks.
    """
    return _named_mesh(device_type, mesh_shape(plan.resolve(world_size)), AXES, plan.comm.hierarchy)


def join_axes(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Several axes seen as one: a mesh of one axis, named dp_shard_cp_ring, say. Made by the first call, on all ranks."""
    if mesh[axes].size() == mesh[axes[0]].size():  # nothing to join
        return mesh[axes[0]]
    backends = {dist.get_backend(mesh.get_group(axis)) for axis in axes if mesh[axis].size() > 1}
    own = backends.pop() if mesh.device_type == "cpu" else None
    return mesh[axes]._flatten("_".join(axes), backend_override=own)


def group_of_all(mesh: DeviceMesh) -> dist.ProcessGroup:
    """All ranks of a mesh, for the small messages of a step. Made by the first call, on all ranks."""
    assert mesh.mesh_dim_names is not None
    wide = [axis for axis, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True) if size > 1]
    if len(wide) == 1:
        return mesh.get_group(wide[0])
    if mesh.device_type != "cpu":
        return dist.group.WORLD  # type: ignore[return-value]
    return join_axes(mesh, mesh.mesh_dim_names).get_group()


def join_meshes(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """A mesh of two axes out of two meshes of one axis each, of the same ranks."""
    return DeviceMesh._concatenate([outer, inner])


def build_expert_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """The same ranks as experts see them, with the names of `EXPERT_AXES`: ep ranks share the experts of a layer.

    The ranks of dp_shard, cp and tp (with zero = 0, those of dp_replicate too) are folded into edp_shard x ep, with ep
    innermost: attention may be split in one way and experts, whole, in another (Liu et al., MoE Parallel Folding, 2025).

    Args:
        plan: resolved.
        device_type: "cpu", "cuda" or "npu".
    """
    p = plan.parallel
    inside = p.cp * p.tp * (p.data_ranks if p.zero == 0 else p.dp_shard) // p.ep
    replicate, shard = (inside, 1) if p.zero == 0 else (p.dp_replicate, inside)
    return _named_mesh(device_type, (p.pp, replicate, shard, p.ep), EXPERT_AXES, plan.comm.hierarchy)


def _named_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...], hierarchy: str) -> DeviceMesh:
    several = _backend(device_type, hierarchy) if max(shape) > 1 else None
    backends = {name: "fake" if size == 1 else several for name, size in zip(names, shape, strict=True)}
    backends = {name: backend for name, backend in backends.items() if backend is not None}
    return init_device_mesh(device_type, shape, mesh_dim_names=names, backend_override=backends)  # type: ignore[arg-type]


def _backend(device_type: str, hierarchy: str) -> str | None:
    """Of an axis of several ranks; None leaves it to torch. In a dry run the default group is fake, and so are all others."""
    if dist.get_backend() == "fake":
        return "fake"
    return register_backend(hierarchy) if device_type == "cpu" else None


def data_rank(mesh: DeviceMesh) -> int:
    """Which share of every global batch this rank takes, counted over `DATA_AXES`."""
    return mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank("dp_shard")


def context_rank(mesh: DeviceMesh) -> int:
    """Which part of every sequence this rank holds, counted over `CONTEXT_AXES`."""
    return mesh.get_local_rank("cp_ring") * mesh["cp_ulysses"].size() + mesh.get_local_rank("cp_ulysses")
