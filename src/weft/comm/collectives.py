"""The door to torch.distributed for small reductions, and a recorder that counts what travels."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode


def all_reduce(tensor: torch.Tensor, mesh: DeviceMesh, axes: tuple[str, ...], op: str = "sum") -> torch.Tensor:
    """Reduce a tensor in place over the ranks of some mesh axes; every rank of them ends with the same values.

    Args:
        tensor: any shape, the same on all ranks.
        mesh: mesh with named axes; axes of one rank are skipped.
        axes: names of the axes to reduce over.
        op: "sum" or "max".
    """
    for axis in axes:
        if mesh[axis].size() > 1:
            dist.all_reduce(tensor, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op], mesh.get_group(axis))
    return tensor


def all_gather_rows(row: torch.Tensor, world_size: int) -> torch.Tensor:
    """The rows of all ranks, [world_size, *row.shape], in the order of ranks."""
    gathered = [torch.empty_like(row) for _ in range(world_size)]
    dist.all_gather(gathered, row)
    return torch.stack(gathered)


# Bytes that one rank sends when n ranks run a ring (Patarasuk and Yuan, 2009), given the bytes of the full tensor.
RING = {
    "all_gather": lambda full, n: full * (n - 1) // n,
    "reduce_scatter": lambda full, n: full * (n - 1) // n,
    "all_reduce": lambda full, n: 2 * full * (n - 1) // n,
    "broadcast": lambda full, n: full,
}
NAMES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
}


class Recorder(TorchDispatchMode):
    """Counts the collectives issued inside its context, by operation.

    `bytes` are those one rank sends on the wire under a ring algorithm, `calls` the number of collectives; both keyed by
    operation. Groups of one rank send nothing and are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        operation = NAMES.get(name)
        ranks = next((a.size() for a in map(_unwrap_group, args) if a is not None), 1)
        if operation is None or ranks == 1:
            return
        tensors = [t for a in args for t in (a if isinstance(a, list | tuple) else [a]) if isinstance(t, torch.Tensor)]
        full = max(t.numel() * t.element_size() for t in tensors)  # the gathered, or not yet scattered, side
        self.bytes[operation] += RING[operation](full, ranks)
        self.calls[operation] += 1


def _unwrap_group(argument: Any) -> dist.ProcessGroup | None:
    """A process group from the boxed form in which operators receive it, or None for other arguments."""
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
        return dist.ProcessGroup.unbox(argument)
    return None
