"""Links that carry the traffic of each mesh axis. The busiest axis belongs on the fastest links.

Traffic decides the order of the mesh axes (`mesh.py`), from innermost to outermost:

    tp    activations, four times per layer
    cp    keys and values, or heads, in every layer
    dp    parameters and gradients, once per micro-batch or step
    pp    one activation per micro-batch

Ranks are numbered host after host, so that inner axes stay inside a host as far as their degrees allow.
"""

from collections.abc import Mapping
from math import gcd, prod

import numpy as np

from weft.plan import ResolvedPlan
from weft.topology.mesh import AXES, axis_groups, mesh_shape
from weft.topology.topology import UNKNOWN, Topology

TENSOR, CONTEXT = ("tp",), ("cp_ring", "cp_ulysses")
NAMES = {"cp_ring": "cp (ring)", "cp_ulysses": "cp (Ulysses)"}


def explain_plan(topology: Topology, plan: ResolvedPlan) -> list[str]:
    """Describe the links of each axis with more than one rank, one line per axis, followed by warnings.

    Args:
        topology: topology of all ranks of the job.
        plan: plan resolved for the number of ranks of the topology.
    """
    shape = dict(zip(AXES, mesh_shape(plan), strict=True))
    lines = explain_axes(topology, shape)
    p = plan.parallel
    if p.ep > 1:  # innermost axes of a separate mesh, see `build_expert_mesh`
        shape = {"others": topology.world_size // (p.ep * p.etp), "ep": p.ep, "etp": p.etp}
        lines[:0] = explain_axes(topology, shape)
    return lines


def explain_axes(topology: Topology, shape: Mapping[str, int]) -> list[str]:
    """Describe the links of the groups of each axis with more than one rank, the innermost axis first.

        tp 4: inside a host (memory, 12 GB/s, 40 us)
        dp_replicate 2: between hosts (network, 0.117 GB/s, 120 us)

    If an axis uses several link classes, the line names the slowest, since all ranks of a group wait for it. Warnings
    follow if tp or cp crosses hosts.

    Args:
        topology: topology of all ranks.
        shape: ranks along each axis, outermost first; the product of the degrees is the number of ranks.
    """
    axes = {axis: axis_groups(shape, axis) for axis, degree in shape.items() if degree > 1 and axis != "others"}
    lines = [f"{NAMES.get(axis, axis)} {shape[axis]}: {_describe(topology, groups)}" for axis, groups in axes.items()]
    return lines[::-1] + _warnings(topology, shape, axes)


def _describe(topology: Topology, groups: np.ndarray) -> str:
    """Describe the location of the groups, and their slowest class of links."""
    hosts = topology.host_of_rank[groups]
    crosses = (hosts != hosts[:, :1]).any(1)
    where = "inside a host" if not crosses.any() else "between hosts"
    if crosses.any() and not crosses.all():
        where = f"{crosses.sum()} of {len(groups)} groups between hosts"
    classes = {
        int(index)
        for group in groups
        for index in np.unique(topology.classes[np.ix_(group, group)][~np.eye(len(group), dtype=bool)])
    }
    if UNKNOWN in classes:
        return where
    return f"{where} ({min((topology.links[index] for index in classes), key=lambda link: link.bytes_per_second)})"


def _warnings(topology: Topology, shape: Mapping[str, int], axes: Mapping[str, np.ndarray]) -> list[str]:
    """Warn if tp or cp crosses hosts, with the degrees that stay inside a host."""
    common = gcd(*(host.ranks for host in topology.hosts))
    tp, cp = shape.get("tp", 1), prod(shape.get(axis, 1) for axis in CONTEXT)

    def crosses(names: tuple[str, ...]) -> bool:
        hosts_of_groups = [topology.host_of_rank[axes[name]] for name in names if name in axes]
        return any((hosts != hosts[:, :1]).any() for hosts in hosts_of_groups)

    if crosses(TENSOR):
        fix = f"set plan.parallel.tp to a divisor of {common}" if common > 1 else "set plan.parallel.tp = 1"
        return [f"warning: tp {tp} crosses hosts, four times per layer; {fix}, and use dp or pp between hosts"]
    if crosses(CONTEXT):
        largest = max((d for d in range(1, cp + 1) if common % (tp * d) == 0), default=1)
        fix = f"set plan.parallel.cp to {largest}" if largest > 1 else "set plan.parallel.cp = 1"
        fix += " or lower tp" if tp > 1 else ""
        return [f"warning: cp {cp} crosses hosts in every layer; {fix}, and use dp or pp between hosts"]
    return []
