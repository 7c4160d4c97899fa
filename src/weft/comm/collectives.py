"""The door to torch.distributed for small reductions, and a recorder that counts what travels."""

import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from weft.cluster.shared_memory import SharedMemoryGroup

# Frames that stand between a collective and the code that wanted it: installed packages, and the rooms below.
CARRIERS = (
    os.path.dirname(os.path.dirname(torch.__file__)),
    os.path.dirname(__file__),
    "shared_memory.py",
    "contextlib.py",
)


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


# Bytes that one rank sends when n ranks run a ring (Patarasuk and Yuan, 2009), given the bytes of the full tensor; of
# all_to_all and send, given the bytes that leave the rank.
RING: dict[str, Callable[[int, int], int]] = {
    "all_gather": lambda full, n: full * (n - 1) // n,
    "reduce_scatter": lambda full, n: full * (n - 1) // n,
    "all_reduce": lambda full, n: 2 * full * (n - 1) // n,
    "broadcast": lambda full, n: full,
    "all_to_all": lambda leaving, n: leaving,
    "send": lambda leaving, n: leaving,
}
NAMES = {  # of the operators that torch.distributed calls
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "send": "send",
}


class Message(NamedTuple):
    """One collective, as one rank saw it; messages are kept in the order in which they were issued."""

    operation: str
    axis: str
    """Mesh axis, or "world" for the default process group and any other."""
    bytes: int
    """Sent by one rank on the wire under a ring algorithm."""
    dtype: torch.dtype
    site: str
    """file.py:line of the nearest caller outside of installed packages."""


class Recorder(TorchDispatchMode):
    """Notes every collective over the axes of a mesh that this rank issues inside its context, in `messages`.

    Groups of one rank send nothing and are not noted.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.messages: list[Message] = []
        names = mesh.mesh_dim_names or ()
        self.axes: dict[str, str] = {mesh.get_group(name).group_name: name for name in names if mesh[name].size() > 1}
        self.groups = [mesh.get_group(name) for name in self.axes.values()]
        self.watches: list[tuple[list[Any], Any]] = []

    @property
    def total_bytes(self) -> int:
        return sum(message.bytes for message in self.messages)

    def bytes_by(self, field: str) -> dict[str, int]:
        """Bytes summed by "operation", "axis" or "site"."""
        sums: Counter[str] = Counter()
        for message in self.messages:
            sums[str(getattr(message, field))] += message.bytes
        return dict(sums)

    def __enter__(self) -> "Recorder":
        for group in self.groups:  # those that torch's operators do not go through tell it themselves
            if isinstance(group, SharedMemoryGroup):
                observer = partial(self._note, self.axes[group.group_name], group.size())
                group.observers.append(observer)
                self.watches.append((group.observers, observer))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for observers, observer in self.watches:
            observers.remove(observer)
        self.watches.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._note_operator(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _note_operator(self, name: str, args: tuple[Any, ...]) -> None:
        group = next((group for group in map(_unwrap_group, args) if group is not None), None)
        if name not in NAMES or group is None or group.size() == 1:
            return
        sizes = [t.numel() * t.element_size() for t in _tensors(args)]
        if name in ("allgather_", "reduce_scatter_"):  # lists beside one tensor: the sum of the lists
            full = sum(sizes) - min(sizes)
        elif name == "alltoall_base_":
            _, input, _, _, splits = args[:5]
            rows = splits[group.rank()] if splits else len(input) // group.size()
            full = (len(input) - rows) * input[:1].numel() * input.element_size()
        else:
            full = max(sizes)
        self._note(self.axes.get(group.group_name, "world"), group.size(), NAMES[name], full, _tensors(args)[0].dtype)

    def _note(self, axis: str, ranks: int, operation: str, full: int, dtype: torch.dtype) -> None:
        self.messages.append(Message(operation, axis, RING[operation](full, ranks), dtype, _call_site()))


def _tensors(args: Any) -> list[torch.Tensor]:
    if isinstance(args, torch.Tensor):
        return [args]
    return [tensor for arg in args for tensor in _tensors(arg)] if isinstance(args, list | tuple) else []


def _call_site() -> str:
    """The nearest caller outside of installed packages and of the rooms that carry out collectives."""
    frame = sys._getframe(1)
    while frame.f_back and any(part in frame.f_code.co_filename for part in CARRIERS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _unwrap_group(argument: Any) -> dist.ProcessGroup | None:
    """A process group from the boxed form in which operators receive it, or None for other arguments."""
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
        return dist.ProcessGroup.unbox(argument)
    return None
