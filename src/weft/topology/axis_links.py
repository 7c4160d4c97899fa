"""Over which links the axes of a plan run. The busiest axis belongs on the fastest links.

Traffic decides the order of the mesh (`mesh.py`): tp sends activations four times a layer and is innermost; then come cp, which
sends keys and values, or heads, in every layer, dp, which sends parameters and gradients once a micro-batch or step, and,
outermost, pp, which sends one activation a micro-batch. Ranks are numbered host after host, so that inner axes stay inside a
host as far as their degrees allow.
"""

from collections.abc import Mapping
from math import gcd, prod

import numpy as np

from weft.plan import Plan
from weft.topology.mesh import AXES, axis_groups, mesh_shape
from weft.topology.topology import UNKNOWN, Topology

TENSOR, CONTEXT = ("tp",), ("cp_ring", "cp_ulysses")
NAMES = {"cp_ring": "cp (ring)", "cp_ulysses": "cp (Ulysses)"}


def explain_plan(topology: Topology, plan: Plan) -> list[str]:
    """One line for each axis of more than one rank, and warnings.

    Args:
        topology: of all ranks of the job.
        plan: resolved for as many ranks.
    """
    shape = dict(zip(AXES, mesh_shape(plan), strict=True))
    lines = explain_axes(topology, shape)
    ep = plan.parallel.ep
    if ep > 1:  # innermost of a mesh of its own, see `build_expert_mesh`
        lines.insert(0, explain_axes(topology, {"others": topology.world_size // ep, "ep": ep})[0])
    return lines


def explain_axes(topology: Topology, shape: Mapping[str, int]) -> list[str]:
    """Over which links the groups of each axis of more than one rank run, the innermost axis first.

        tp 4: inside a host (memory, 12 GB/s, 40 us)
        dp_replicate 2: between hosts (network, 0.117 GB/s, 120 us)

    Of several classes the slowest is named, as all ranks of a group wait for it. Warnings follow, where tp or cp leave a host.

    Args:
        topology: of all ranks.
        shape: ranks along each axis, outermost first; their product is the number of ranks.
    """
    axes = {axis: axis_groups(shape, axis) for axis, degree in shape.items() if degree > 1 and axis != "others"}
    lines = [f"{NAMES.get(axis, axis)} {shape[axis]}: {_describe(topology, groups)}" for axis, groups in axes.items()]
    return lines[::-1] + _warnings(topology, shape, axes)


def _describe(topology: Topology, groups: np.ndarray) -> str:
    """Where the groups run, and the slowest class of links there."""
    numbers = topology.host_numbers[groups]
    leaves = (numbers != numbers[:, :1]).any(1)
    where = "inside a host" if not leaves.any() else "between hosts"
    if leaves.any() and not leaves.all():
        where = f"{leaves.sum()} of {len(groups)} groups between hosts"
    places = {
        int(place) for group in groups for place in np.unique(topology.classes[np.ix_(group, group)][_others(group)])
    }
    if UNKNOWN in places:
        return where
    return f"{where} ({min((topology.links[place] for place in places), key=lambda link: link.bytes_per_second)})"


def _others(group: np.ndarray) -> np.ndarray:
    """All pairs of a group but a rank and itself."""
    return ~np.eye(len(group), dtype=bool)


def _warnings(topology: Topology, shape: Mapping[str, int], axes: Mapping[str, np.ndarray]) -> list[str]:
    """Where tp or cp cross hosts, and the degrees with which they would not."""
    fits = gcd(*(host.ranks for host in topology.hosts))
    tp, cp = shape.get("tp", 1), prod(shape.get(axis, 1) for axis in CONTEXT)

    def leaves(names: tuple[str, ...]) -> bool:
        numbers = [topology.host_numbers[axes[name]] for name in names if name in axes]
        return any((number != number[:, :1]).any() for number in numbers)

    if leaves(TENSOR):
        room = f"set plan.parallel.tp to a divisor of {fits}" if fits > 1 else "set plan.parallel.tp = 1"
        return [f"warning: tp {tp} crosses hosts, four times a layer; {room}, and leave the hosts to dp or pp"]
    if leaves(CONTEXT):
        largest = max((d for d in range(1, cp + 1) if fits % (tp * d) == 0), default=1)
        room = f"set plan.parallel.cp to {largest}" if largest > 1 else "set plan.parallel.cp = 1"
        room += " or tp lower" if tp > 1 else ""
        return [f"warning: cp {cp} crosses hosts in every layer; {room}, and leave the hosts to dp or pp"]
    return []
