"""Matmuls fused with collectives on CUDA devices with peer access: PyTorch's symmetric memory (async TP).

Each rank copies the shards of its peers on side streams while it multiplies the shards that it already has; a chunk is the
shard of one rank. The operators are fields of a tuple, so that tests can replace them by torch's reference implementation.
"""

import platform
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.objects import all_gather_json, all_ranks
from weft.comm.recorder import record_message


class FusedMatmuls(NamedTuple):
    """Fused all-gather + matmul and matmul + reduce-scatter of a group."""

    group: dist.ProcessGroup
    all_gather_matmul_op: Callable[..., Any]
    """(shard, right operands, dim, group name, return_A=) -> gathered input or None, outputs"""
    matmul_reduce_scatter_op: Callable[..., Tensor]
    """(left operand, right operand, "sum", dim, group name) -> shard of the sum over ranks"""

    def all_gather_matmul(self, x: Tensor, rights: list[Tensor], *, keep: bool) -> tuple[Tensor | None, list[Tensor]]:
        """All-gather the input along dim 1 and multiply it with each right operand.

        Args:
            x: shard of this rank, [outer, part, features].
            rights: right operands, each [features, outputs].
            keep: True to return the gathered input.

        Returns:
            The gathered input [outer, ranks x part, features] or None, and one output [outer, ranks x part, outputs] per
            right operand.
        """
        record_message(self.group, "all_gather", x.numel() * self.group.size(), x.dtype)
        flat = len(x) == 1  # gathering along dim 0 needs no transposition
        part, dim = (x[0], 0) if flat else (x, 1)
        full, outs = self.all_gather_matmul_op(part.contiguous(), rights, dim, self.group.group_name, return_A=keep)
        if not flat:
            return full, outs
        return full[None] if keep else None, [out[None] for out in outs]

    def matmul_reduce_scatter(self, x: Tensor, right: Tensor) -> Tensor:
        """Multiply and reduce-scatter along dim 1.

        Args:
            x: [outer, ranks x part, features].
            right: [features, outputs].

        Returns:
            [outer, part, outputs].
        """
        record_message(self.group, "reduce_scatter", x[..., :1].numel() * right.shape[1], x.dtype)
        flat = len(x) == 1
        left, dim = (x[0], 0) if flat else (x, 1)
        out = self.matmul_reduce_scatter_op(left.contiguous(), right, "sum", dim, self.group.group_name)
        return out[None] if flat else out


def find_fused_matmuls(group: dist.ProcessGroup, device_type: str) -> FusedMatmuls | None:
    """Find the fused matmuls of a group with peer access between all devices. All ranks call this and get the same answer.

    Args:
        group: ranks of one host, each with its device as the current device.
        device_type: device type of the ranks.

    Returns:
        None if the devices or the build of torch do not support symmetric memory.
    """
    operators = torch.ops.symm_mem
    if device_type != "cuda" or dist.get_backend(group) == "fake" or not hasattr(operators, "fused_all_gather_matmul"):
        return None
    device = torch.cuda.current_device()
    locations = all_gather_json([platform.node(), device], group)
    devices = [index for _, index in locations]
    has_peer_access = (
        len({host for host, _ in locations}) == 1
        and len(set(devices)) == len(devices)
        and all(torch.cuda.can_device_access_peer(device, other) for other in devices if other != device)
    )
    if not all_ranks(has_peer_access, group) or not _can_map_memory(group):
        return None
    return FusedMatmuls(group, operators.fused_all_gather_matmul, operators.fused_matmul_reduce_scatter)


def _can_map_memory(group: dist.ProcessGroup) -> bool:
    """True if symmetric memory can be mapped into all ranks; drivers, containers and limits on open files may forbid it.

    The ranks agree after each part: one that has no memory would leave the others waiting for it in the rendezvous.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    memory: Any = None
    mapped: Any = None
    with suppress(RuntimeError):
        memory = symmetric_memory.empty(1, device=torch.device("cuda", torch.cuda.current_device()))
    if not all_ranks(memory is not None, group):
        return False
    with suppress(RuntimeError):
        mapped = symmetric_memory.rendezvous(memory, group)
    return all_ranks(mapped is not None, group)
