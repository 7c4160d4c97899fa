"""Products fused with their communication where CUDA devices read each other's memory: PyTorch's symmetric memory (async TP).

Each rank copies the parts of its peers by itself, on streams of its own, while it multiplies those that it has; a chunk is
what one rank has. The operators are torch's, in one small table, so that their reference on any back end can stand in.
"""

import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.collectives import note_message
from weft.comm.objects import all_gather_json


class Fused(NamedTuple):
    """The two fused products of a group."""

    group: dist.ProcessGroup
    all_gather_matmul: Callable[..., Any]
    """(part, right operands, dim, name of the group, return_A=) -> gathered parts or None, products"""
    matmul_reduce_scatter: Callable[..., Tensor]
    """(left operand, right operand, "sum", dim, name of the group) -> this rank's part of the sum of products"""

    def gather_multiply(self, x: Tensor, rights: list[Tensor], *, keep: bool) -> tuple[Tensor | None, list[Tensor]]:
        """Gather parts, and multiply them.

        Args:
            x: this rank's part, [outer, part, features].
            rights: each [features, outputs].
            keep: whether to return what was gathered.

        Returns:
            [outer, ranks x part, features] or None, and of each right operand [outer, ranks x part, outputs].
        """
        note_message(self.group, "all_gather", x.numel() * self.group.size(), x.dtype)
        flat = len(x) == 1  # nothing to move then
        part, dim = (x[0], 0) if flat else (x, 1)
        whole, products = self.all_gather_matmul(part.contiguous(), rights, dim, self.group.group_name, return_A=keep)
        if not flat:
            return whole, products
        return whole[None] if keep else None, [one[None] for one in products]

    def multiply_scatter(self, x: Tensor, right: Tensor) -> Tensor:
        """Multiply, and keep this rank's part of the sum over ranks: [outer, ranks x part, features], [features, outputs] ->
        [outer, part, outputs]."""
        note_message(self.group, "reduce_scatter", x[..., :1].numel() * right.shape[1], x.dtype)
        flat = len(x) == 1
        left, dim = (x[0], 0) if flat else (x, 1)
        product = self.matmul_reduce_scatter(left.contiguous(), right, "sum", dim, self.group.group_name)
        return product[None] if flat else product


def find_fused(group: dist.ProcessGroup, device_type: str) -> Fused | None:
    """The fused products of a group whose devices read each other's memory; all its ranks call this, and get the same answer.

    Args:
        group: on one host; its ranks have made their device the current one.
        device_type: what they compute on.
    """
    operators = torch.ops.symm_mem
    if device_type != "cuda" or dist.get_backend(group) == "fake" or not hasattr(operators, "fused_all_gather_matmul"):
        return None
    device = torch.cuda.current_device()
    places = all_gather_json([platform.node(), device], group)
    devices = [number for _, number in places]
    reach = (
        len({host for host, _ in places}) == 1
        and len(set(devices)) == len(devices)
        and all(torch.cuda.can_device_access_peer(device, other) for other in devices if other != device)
    )
    if not all(all_gather_json(reach, group)) or not all(all_gather_json(_can_meet(group), group)):
        return None
    return Fused(group, operators.fused_all_gather_matmul, operators.fused_matmul_reduce_scatter)


def _can_meet(group: dist.ProcessGroup) -> bool:
    """Whether memory can be mapped into all ranks: drivers and containers may forbid it."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    try:
        symmetric_memory.rendezvous(
            symmetric_memory.empty(1, device=torch.device("cuda", torch.cuda.current_device())), group
        )
    except RuntimeError:
        return False
    return True
