"""Plan -> DeviceMesh with named axes. Built once, passed explicitly."""

import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend of axes with one rank)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.cluster.shared_memory import register_backend
from weft.plan import Plan

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA_AXES = ("dp_replicate", "dp_shard")


def mesh_shape(plan: Plan) -> tuple[int, ...]:
    """Ranks along each of `AXES` for a resolved plan, outermost first.

    With zero = 0 nothing is sharded: the ranks of dp_shard hold copies too, so that they join dp_replicate.
    """
    p = plan.parallel
    replicate, shard = (p.data_ranks, 1) if p.zero == 0 else (p.dp_replicate, p.dp_shard)
    return (p.pp, replicate, shard, p.cp, p.tp)


def build_mesh(plan: Plan, device_type: str, world_size: int) -> DeviceMesh:
    """The mesh of all ranks, with every name of `AXES`; tp is innermost, so that its ranks are neighbours.

    An axis of one rank costs nothing: its group has no connections and never communicates. On CPU, ranks of one host
    communicate through shared memory.

    Args:
        plan: may still hold -1; it is resolved against `world_size`.
        device_type: "cpu", "cuda" or "npu".
        world_size: ranks of the default process group, which must exist.

    Raises:
        PlanError: the plan does not fit the number of ranks.
    """
    shape = mesh_shape(plan.resolve(world_size))
    backends: dict[int | str, str] = {name: "fake" for name, size in zip(AXES, shape, strict=True) if size == 1}
    if device_type == "cpu":
        backends |= {name: register_backend() for name, size in zip(AXES, shape, strict=True) if size > 1}
    return init_device_mesh(device_type, shape, mesh_dim_names=AXES, backend_override=backends)  # type: ignore[arg-type]


def data_rank(mesh: DeviceMesh) -> int:
    """Which share of every global batch this rank takes, counted over `DATA_AXES`."""
    return mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank("dp_shard")
