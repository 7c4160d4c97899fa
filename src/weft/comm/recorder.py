"""Recorder of collectives: operation, mesh axis, bytes and call site of each collective of a rank."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from weft.backends.shared_memory import SharedMemoryGroup

# Stack frames that are not the call site of a collective: modules of Weft that forward collectives, and installed packages,
# of which Weft may be one.
WEFT = os.path.dirname(os.path.dirname(__file__))
FORWARDING = tuple(
    os.path.join(WEFT, *path)
    for path in (
        ["comm"],
        ["backends"],
        ["device"],
        ["launch"],
        ["memory"],
        ["topology"],
        ["planner", "dryrun", "modes.py"],
    )
)
PACKAGES = os.path.dirname(os.path.dirname(torch.__file__))

# Bytes that one of n ranks sends under a ring algorithm (Patarasuk and Yuan, 2009), given the bytes of the full tensor; for
# all_to_all and send, given the bytes that leave the rank.
RING: dict[str, Callable[[int, int], int]] = {
    "all_gather": lambda full, n: full * (n - 1) // n,
    "reduce_scatter": lambda full, n: full * (n - 1) // n,
    "all_reduce": lambda full, n: 2 * full * (n - 1) // n,
    "broadcast": lambda full, n: full,
    "all_to_all": lambda leaving, n: leaving,
    "send": lambda leaving, n: leaving,
}
NAMES = {  # operation by the operator that torch.distributed calls
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
    """Record of one collective or message of this rank."""

    operation: str
    axis: str
    """Mesh axis; "world" for the default process group and all other groups."""
    bytes: int
    """Bytes sent by one rank under a ring algorithm."""
    dtype: torch.dtype
    site: str
    """Call site file.py:line: the nearest caller outside of installed packages and of modules that forward collectives."""
    link: str = ""
    """"host": step of a hierarchical collective inside a host; "between": step between hosts; "": flat collective."""


class Recorder(TorchDispatchMode):
    """Context manager that records the collectives of this rank in `messages`, in the order of issue.

    Recorded are the operators in `NAMES`. Collectives of groups with one rank send nothing and are not recorded, nor are
    coalesced collectives, and the functional collectives with which DTensor changes placements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    @property
    def total_bytes(self) -> int:
        return sum(message.bytes for message in self.messages)

    def bytes_by(self, field: str) -> dict[str, int]:
        """Sum the bytes by "operation", "axis", "site" or "link"."""
        sums: Counter[str] = Counter()
        for message in self.messages:
            sums[str(getattr(message, field))] += message.bytes
        return dict(sums)

    def __enter__(self) -> "Recorder":
        SharedMemoryGroup.observers.append(self._record)  # its collectives do not call torch's operators
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        SharedMemoryGroup.observers.remove(self._record)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Stay out of compiled regions, which call no collectives: torch would not compile inside of another mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper subclass runs first; its inner collectives are recorded
        if func.namespace == "c10d":
            self._record_operator(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _record_operator(self, name: str, args: tuple[Any, ...]) -> None:
        group = find_group(args)
        if name not in NAMES or group is None or group.size() == 1:
            return
        sizes = [t.numel() * t.element_size() for t in find_tensors(args)]
        # One tensor and lists of tensors: the full size is the sum of a list.
        if name in ("allgather_", "reduce_scatter_"):
            full = sum(sizes) - min(sizes)
        elif name == "alltoall_base_":
            _, input, _, _, splits = args[:5]
            rows = splits[group.rank()] if splits else len(input) // group.size()
            full = (len(input) - rows) * input[:1].numel() * input.element_size()
        else:
            full = max(sizes)
        self._record(group, NAMES[name], full, find_tensors(args)[0].dtype)

    def _record(self, group: dist.ProcessGroup, operation: str, full: int, dtype: torch.dtype) -> None:
        axis, link = axis_of(group)
        self.messages.append(Message(operation, axis, RING[operation](full, group.size()), dtype, call_site(), link))


def axis_of(group: dist.ProcessGroup) -> tuple[str, str]:
    """Mesh axis of a group, or "world"; and "host" or "between" for a subgroup of a hierarchical group, or ""."""
    name, _, link = group.group_desc.partition("@")  # description set by TwoLevelGroup
    of_mesh = name.startswith("mesh_")  # description set by DeviceMesh
    return name.removeprefix("mesh_") if of_mesh else "world", link


def record_message(group: dist.ProcessGroup, operation: str, elements: int, dtype: torch.dtype) -> None:
    """Report a message that bypasses the operators of torch.distributed.

    Args:
        group: group of the message.
        operation: key of `RING`.
        elements: number of elements of the full tensor.
        dtype: dtype of the elements.
    """
    for observer in SharedMemoryGroup.observers:
        observer(group, operation, elements * dtype.itemsize, dtype)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Hide the messages of a measurement, which are not part of a step, from recorders and dispatch modes."""
    observers = SharedMemoryGroup.observers.copy()
    SharedMemoryGroup.observers.clear()
    try:
        with _disable_current_modes():
            yield
    finally:
        SharedMemoryGroup.observers.extend(observers)


def find_tensors(args: Any) -> list[torch.Tensor]:
    """List all tensors among the arguments of an operator, in order."""
    if isinstance(args, torch.Tensor):
        return [args]
    return [tensor for arg in args for tensor in find_tensors(arg)] if isinstance(args, list | tuple) else []


def call_site() -> str:
    """Nearest caller that is neither in a module of `FORWARDING` nor in an installed package, as file.py:line."""
    frame = sys._getframe(1)
    while frame.f_back and is_skipped(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def is_skipped(file: str, weft: str = WEFT, packages: str = PACKAGES) -> bool:
    """True if a file is no call site: it forwards collectives, or belongs to another package."""
    if file.startswith(weft):
        return file.replace(weft, WEFT, 1).startswith(FORWARDING)
    return file.startswith(packages) or file.endswith("contextlib.py")


def find_group(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Find the process group among the arguments of an operator."""
    return next((group for group in map(_unwrap_group, args) if group is not None), None)


def _unwrap_group(argument: Any) -> dist.ProcessGroup | None:
    """Unbox a process group from an operator argument; None for any other argument."""
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
        return dist.ProcessGroup.unbox(argument)
    return None
