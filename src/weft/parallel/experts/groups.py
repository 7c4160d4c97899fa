"""Process groups of the dispatch of tokens to experts: the group of ep, or one between hosts and one inside of a host."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.backends.hierarchical import BETWEEN, INSIDE, TwoLevelGroup, host_id
from weft.comm.objects import all_gather_json
from weft.errors import PlanError
from weft.plan import Comm
from weft.topology.groups import PREFIX, create_groups, group_options
from weft.topology.mesh import axis_groups, choose_hierarchy


def dispatch_groups(expert_mesh: DeviceMesh, comm: Comm) -> tuple[dist.ProcessGroup, ...]:
    """Groups of the dispatch of this rank. Collective.

    Where each ep group has the same number of ranks, more than one, on each of several hosts, host after host, dispatch is
    hierarchical: see `dispatch_to_hosts`. On CPU the groups are those of the hierarchical collectives. On an accelerator, whose
    backend knows no such collectives, they are further groups of its backend. A dry run has no hosts.

    Args:
        expert_mesh: mesh from `build_expert_mesh`.
        comm: `plan.comm`.

    Returns:
        (group of ep,), or (ranks with this local rank on all hosts, ranks of this host).

    Raises:
        PlanError: `comm.hierarchy` is "two_level", and on an accelerator the hosts do not have equal numbers of ranks.
    """
    sizes = dict(zip(expert_mesh.mesh_dim_names or (), expert_mesh.shape, strict=True))
    group, partition = expert_mesh.get_group("ep"), axis_groups(sizes, "ep").tolist()
    if expert_mesh.device_type == "cpu" or group.size() == 1 or dist.get_backend() == "fake":
        return levels_of_group(group)
    if choose_hierarchy(comm, partition[0]) == "flat":
        return (group,)
    hosts = all_gather_json(host_id())
    per_host = ranks_per_host(hosts, partition)
    if per_host is None and comm.hierarchy == "two_level":
        raise PlanError(
            "the ranks of ep are not distributed equally over their hosts",
            where='plan.comm.hierarchy = "two_level"',
            rule="each group of ep has the same number of ranks on each of its hosts, host after host",
            fix="start equally many ranks on each host, or leave plan.comm.hierarchy out: each copy is then sent by itself",
        )
    if per_host is None or per_host in (1, group.size()):
        return (group,)
    inside = [ranks[first : first + per_host] for ranks in partition for first in range(0, len(ranks), per_host)]
    between = [ranks[local::per_host] for ranks in partition for local in range(per_host)]
    device_type = expert_mesh.device_type
    return (
        create_groups(between, None, f"{PREFIX}ep{BETWEEN}", group_options("ep", device_type)),
        create_groups(inside, None, f"{PREFIX}ep{INSIDE}", group_options("ep", device_type)),
    )


def levels_of_group(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, ...]:
    """Groups of the dispatch over one process group: those of a hierarchical group, or the group itself."""
    return (group.outer, group.inner) if isinstance(group, TwoLevelGroup) else (group,)


def ranks_per_host(hosts: Sequence[Any], partition: Sequence[Sequence[int]]) -> int | None:
    """Number of ranks of each group on each host of its ranks; None if it is not the same everywhere.

    Args:
        hosts: host of each rank.
        partition: ranks of each group, which must be numbered host after host.
    """
    found = set()
    for ranks in partition:
        names = [str(hosts[rank]) for rank in ranks]
        per_host = len(ranks) // len(set(names))
        is_regular = all(names[i] == names[i - i % per_host] for i in range(len(names)))
        found.add(per_host if is_regular and len(set(names)) * per_host == len(ranks) else None)
    return found.pop() if len(found) == 1 else None
