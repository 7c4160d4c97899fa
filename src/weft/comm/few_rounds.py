"""Collectives of small values in log2(ranks) rounds of messages.

The ring of gloo passes a small all-gather or all-reduce from rank to rank: 10,240 ranks take 10,239 or 20,478 messages one
after another, about 0.5 s or 1 s, and 14 rounds less than 1 ms. Groups in shared memory have one round of their own. A
hierarchical group has the rounds between its hosts.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from weft.backends.hierarchical import TwoLevelGroup
from weft.backends.instrumented import GlooGroup
from weft.backends.shared_memory import SharedMemoryGroup
from weft.comm.collectives import gather_dim
from weft.comm.stopwatch import blocking


def gather_rows(row: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather a row of each rank in rank order, [ranks, length]; Bruck's algorithm (Bruck et al., 1997).

    Args:
        row: [length], in host memory; length and dtype are the same on all ranks.
        group: group of ranks.
    """
    if isinstance(group, TwoLevelGroup):
        of_hosts = gather_rows(row, group.outer)
        found = gather_dim(of_hosts.view(1, -1), group.inner, 0)  # [ranks of a host, hosts * length]
        return found.view(group.per_host, group.hosts, -1).transpose(0, 1).flatten(0, 1)
    if _is_one_round(group):
        return gather_dim(row.view(1, -1), group, 0)
    rank, ranks, known = group.rank(), group.size(), 1
    rows = row.new_empty(ranks, len(row))  # of this rank, and of those after it
    rows[0] = row
    with blocking(group):
        while known < ranks:
            count = min(known, ranks - known)
            received = rows[known : known + count]
            _exchange(rows[:count], (rank - known) % ranks, received, (rank + known) % ranks, group)
            known += count
    return rows.roll(rank, 0)


def largest(numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """Largest numbers over all ranks, place by place. Collective; no rank returns before all ranks have called it.

    The rounds of a dissemination barrier (Hensgen et al., 1988) with values: a maximum may count a rank twice.

    Args:
        numbers: as many on every rank, each of at most 64 bits.
        group: group of ranks; None for all ranks.
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None, "there is no process group"
    values = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if isinstance(group, TwoLevelGroup):
        with blocking(group.inner):
            dist.all_reduce(values, dist.ReduceOp.MAX, group.inner)
        return largest(values.tolist(), group.outer)
    with blocking(group):
        if _is_one_round(group):
            dist.all_reduce(values, dist.ReduceOp.MAX, group)
            return values.tolist()
        rank, ranks, distance = group.rank(), group.size(), 1
        while distance < ranks:
            received = torch.empty_like(values)
            _exchange(values, (rank + distance) % ranks, received, (rank - distance) % ranks, group)
            values, distance = torch.maximum(values, received), 2 * distance
    return values.tolist()


def _is_one_round(group: dist.ProcessGroup) -> bool:
    """True for groups in shared memory, and for those that send nothing."""
    if isinstance(group, GlooGroup):  # torch does not know the backend of the groups in a hierarchical one
        return group.size() == 1
    return isinstance(group, SharedMemoryGroup) or group.size() == 1 or dist.get_backend(group) == "fake"


def _exchange(sent: Tensor, to: int, received: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Send a tensor to one rank of the group while another one is received."""
    works = (
        dist.irecv(received, group=group, group_src=source),
        dist.isend(sent, group=group, group_dst=to),
    )
    for work in works:
        assert work is not None
        work.wait()
