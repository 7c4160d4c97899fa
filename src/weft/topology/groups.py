"""Process groups of mesh axes: one for each axis, and one for several axes where they have the same ranks.

On an accelerator, a process group has a communicator, which takes device memory and, on many ranks, seconds to set up. The
axes of experts often have the same ranks as other axes and then use their groups. Two groups of the same ranks remain where
the collectives of one would wait for those of the other: see `QUEUES`.

Communicators are set up at the first collective of a group, so that an axis that is only used jointly with another has none.
The default group is not bound to a device (`device_id` of `init_process_group`), which would set up its communicator at the
start and split it for every other group (ncclCommSplit), for these reasons, read in torch 2.13:

- each `new_group` becomes a collective of all ranks on the device, also for ranks that are not in the group;
- ranks outside of a new gloo group take part in a split that the ranks inside do not make, and hang: scripts make such groups;
- `split_group` also splits the gloo part of a group, with options of NCCL; a gloo group split on four CPU ranks timed out;
- HCCL does not split, and torch refuses every axis then.

Where a library has bound it, axes of one rank and joined axes avoid these paths.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.compat import describe_group

PREFIX = "mesh_"
"""Prefix of the description of a group, before the names of its axes."""
AND = "+"
"""Between the names of axes that share a group."""

QUEUES: tuple[tuple[str, ...], ...] = (
    ("dp_replicate", "dp_shard", "edp_replicate", "edp_shard"),  # overlapped with computation
    ("cp_ring", "cp_ulysses", "tp", "ep", "etp"),  # computation waits for them
    ("pp",),  # the other side of a message may be late
)
"""Axes that may share a group. The collectives of a group run one after the other: an all-to-all of tokens would wait for the
weights of the next block if ep and dp_shard shared a group."""


def create_groups(
    partition: Sequence[Sequence[int]], backend: str | None, description: str, options: Any = None
) -> dist.ProcessGroup:
    """Create the groups of a partition of all ranks, and return the one of this rank. Collective.

    Args:
        partition: ranks of each group, ascending; each rank is in one of them.
        backend: None for the backend of the default group.
        description: description of the groups.
        options: from `group_options`, for these groups alone: torch writes the name and ranks of the own group into it.
    """
    own = None
    for ranks in partition:
        group = dist.new_group(list(ranks), backend=backend, group_desc=description, pg_options=options)
        own = group if dist.get_rank() in ranks else own
    assert own is not None
    return own


def group_options(axis: str, device_type: str) -> Any:
    """Options of the groups of an axis; None for the defaults.

    On CUDA, the messages for which computation waits get a stream of high priority: a message that is launched beside a matmul
    would else wait until the matmul leaves it a multiprocessor, and hide nothing.
    """
    if device_type != "cuda" or axis in QUEUES[0] or not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


def create_lone_group() -> dist.ProcessGroup:
    """Create a group of this rank alone, which never communicates; other ranks take no part, also none of a split."""
    return dist.new_group([dist.get_rank()], backend="fake", use_local_synchronization=True)


def share_group(
    axis: str, ranks: Sequence[int], groups: Mapping[str, dist.ProcessGroup], *, renames: bool
) -> dist.ProcessGroup | None:
    """Find a group for an axis among those of other axes; None if none has its ranks and its queue.

    All ranks find the same: two axes of a mesh that have one set of ranks in common have all of them in common, because the
    sets of an axis are translations of one another.

    Args:
        axis: name of the axis.
        ranks: ranks of its group, ascending.
        groups: group of each axis that has one.
        renames: True to add the name of the axis to the description of the group; False to share among equal names only.
    """
    queue = next(queue for queue in QUEUES if axis in queue)
    for other, group in groups.items():
        if other in queue and (renames or other == axis) and dist.get_process_group_ranks(group) == list(ranks):
            names = group.group_desc.removeprefix(PREFIX).split(AND)
            if axis not in names and group is not dist.group.WORLD:
                describe_group(group, PREFIX + AND.join([*names, axis]))
            return group
    return None


def default_group(axis: str, others: Mapping[str, dist.ProcessGroup]) -> dist.ProcessGroup | None:
    """Default group for an axis of all ranks; None if other collectives would queue in front of those of the axis, or if the
    axis needs options of its own.

    The default group also has small messages at the end of a step, and the overlapped collectives of axes that FSDP joins.

    Args:
        axis: name of an axis with all ranks.
        others: group of each axis of another mesh; empty for the first mesh of a job.
    """
    is_free = dist.group.WORLD not in others.values()
    return dist.group.WORLD if is_free and axis in QUEUES[0] else None


def groups_of(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """Group of each axis of a mesh that has more than one rank."""
    names = mesh.mesh_dim_names or ()
    return {name: mesh.get_group(name) for name, size in zip(names, mesh.shape, strict=True) if size > 1}
