"""The door to torch.distributed: differentiable collectives along one tensor dim, small reductions, and a recorder.

Each differentiable collective is the transpose of another: the gradient of a gather is a reduce-scatter, and so on. `x` is
any float tensor on the group's device; gradients may come non-contiguous.

    copy            forward: nothing       backward: all-reduce      into a region that splits the work of every row
    reduce          forward: all-reduce    backward: nothing         out of it
    gather          forward: all-gather    backward: reduce-scatter  into it, from a split sequence
    reduce_scatter  forward: reduce-scatter  backward: all-gather    out of it, to a split sequence
    split           forward: own part      backward: all-gather      equal work on all ranks -> a part each
    unsplit         forward: all-gather    backward: own part        a part each -> equal work on all ranks
    all_to_all      forward: exchange      backward: exchange back

`start_all_to_all` is all_to_all in two parts, between which something else may be computed. Autograd takes the
functions of a forward in reverse: what was computed between them is computed between them in backward too, behind the exchange
back.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from weft.backends.hierarchical import all_gather_single, reduce_scatter_single
from weft.backends.shared_memory import SharedMemoryGroup
from weft.topology.mesh import group_of_all

# Frames that stand between a collective and the code that wanted it: installed packages, and the rooms below.
CARRIERS = (
    os.path.dirname(os.path.dirname(torch.__file__)),
    os.path.dirname(__file__),
    os.path.join("weft", "cluster"),
    "steering.py",
    os.path.join("weft", "memory"),
    "contextlib.py",
)


def all_reduce(tensor: torch.Tensor, mesh: DeviceMesh, axes: tuple[str, ...], op: str = "sum") -> torch.Tensor:
    """Reduce a tensor in place over the ranks of some mesh axes; every rank of them ends with the same values.

    Where these are all axes with more than one rank, it is one message; else one for each axis.

    Args:
        tensor: any shape, the same on all ranks.
        mesh: mesh with named axes; axes of one rank are skipped.
        axes: names of the axes to reduce over.
        op: "sum" or "max".
    """
    wide = [axis for axis, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True) if size > 1]
    over = [axis for axis in axes if axis in wide]
    groups = [group_of_all(mesh)] if len(over) == len(wide) > 1 else [mesh.get_group(axis) for axis in over]
    for group in groups:
        dist.all_reduce(tensor, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op], group)
    return tensor


def all_gather_rows(row: torch.Tensor, world_size: int) -> torch.Tensor:
    """The rows of all ranks, [world_size, *row.shape], in the order of ranks."""
    gathered = [torch.empty_like(row) for _ in range(world_size)]
    dist.all_gather(gathered, row)
    return torch.stack(gathered)


def gather_dim(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """The parts of all ranks side by side along a dim, in the order of ranks. Not differentiable."""
    ranks = group.size()
    parts = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    all_gather_single(parts, x.contiguous(), group)
    dim = dim % x.ndim
    return (
        parts.unflatten(0, (ranks, -1))
        .movedim(0, dim)
        .reshape(*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])
    )


def reduce_scatter_dim(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """This rank's part along a dim of the sum over ranks. Not differentiable."""
    ranks, dim = group.size(), dim % x.ndim
    parts = x.unflatten(dim, (ranks, -1)).movedim(dim, 0).contiguous()
    mine = torch.empty_like(parts[0])
    reduce_scatter_single(mine, parts.flatten(0, 1), group=group)
    return mine


def part_of_dim(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """This rank's part along a dim. Not differentiable."""
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


AlongDim = Callable[[torch.Tensor, dist.ProcessGroup, int], torch.Tensor]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=ctx.group)
        pieces = flat.split([gradient.numel() for gradient in gradients])
        return None, *(piece.view_as(g).to(g.dtype) for piece, g in zip(pieces, gradients, strict=True))


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _AlongDim(torch.autograd.Function):
    """A change of layout along a dim, whose gradient is changed back by its transpose."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int, there: AlongDim, back: AlongDim
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.back = group, dim, back
        return there(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.back(gradient, ctx.group, ctx.dim), None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: dist.ProcessGroup,
        output_splits: list[int] | None,
        input_splits: list[int] | None,
    ) -> torch.Tensor:
        ctx.group, ctx.output_splits, ctx.input_splits = group, output_splits, input_splits
        return exchange(x, group, output_splits, input_splits)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return exchange(gradient, ctx.group, ctx.input_splits, ctx.output_splits), None, None, None


class AsyncAllToAll:
    """An exchange of rows that is under way; in backward, the one back."""

    def __init__(self, group: dist.ProcessGroup, output_splits: list[int] | None, input_splits: list[int] | None):
        self.group, self.output_splits, self.input_splits = group, output_splits, input_splits
        self.cargo: torch.Tensor | None = None
        self.work: dist.Work | None = None

    def start(self, x: torch.Tensor, output_splits: list[int] | None, input_splits: list[int] | None) -> torch.Tensor:
        """Send rows; what comes is there after `wait`."""
        self.cargo = x.contiguous()  # until it has been sent
        out = x.new_empty((sum(output_splits) if output_splits is not None else len(x), *x.shape[1:]))
        self.work = dist.all_to_all_single(out, self.cargo, output_splits, input_splits, self.group, async_op=True)
        return out

    def wait(self) -> None:
        """Until what was started has come."""
        if self.work is not None:
            self.work.wait()
        self.cargo = self.work = None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, flight: AsyncAllToAll, comes: list[torch.Tensor]) -> torch.Tensor:
        ctx.flight = flight
        comes.append(flight.start(x, flight.output_splits, flight.input_splits))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.flight.wait()
        return gradient, None, None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, flight: AsyncAllToAll, comes: list[torch.Tensor]) -> torch.Tensor:
        ctx.flight = flight
        flight.wait()
        return comes.pop()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        flight: AsyncAllToAll = ctx.flight
        return flight.start(gradient, flight.input_splits, flight.output_splits), None, None


def exchange(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    output_splits: list[int] | None = None,
    input_splits: list[int] | None = None,
) -> torch.Tensor:
    """Rows to and from every rank. Not differentiable; see `all_to_all`."""
    out = x.new_empty((sum(output_splits) if output_splits is not None else len(x), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), output_splits, input_splits, group)
    return out


def copy(group: dist.ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same tensors; their gradients are summed over the ranks, all in one message, when the last of them is there."""
    return _Copy.apply(group, *tensors)


def reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks; every rank goes on with the same values and has the same gradient."""
    return _Reduce.apply(x, group)


def gather(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """The parts of all ranks along a dim; what the ranks then do differs, so their gradients add up."""
    return _AlongDim.apply(x, group, dim, gather_dim, reduce_scatter_dim)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """This rank's part, along a dim that the number of ranks divides, of the sum over ranks."""
    return _AlongDim.apply(x, group, dim, reduce_scatter_dim, gather_dim)


def split(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """This rank's part, along a dim that the number of ranks divides, of a tensor that is the same on all ranks."""
    return _AlongDim.apply(x, group, dim, part_of_dim, gather_dim)


def unsplit(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """The parts of all ranks along a dim; all ranks then do the same, so each keeps its own part of the gradient."""
    return _AlongDim.apply(x, group, dim, gather_dim, part_of_dim)


def all_to_all(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    output_splits: list[int] | None = None,
    input_splits: list[int] | None = None,
) -> torch.Tensor:
    """Exchange rows (dim 0): `input_splits[r]` go to rank r, `output_splits[r]` come from it, in the order of ranks; else equal parts."""
    return _AllToAll.apply(x, group, output_splits, input_splits)


Wait = Callable[[], torch.Tensor]


def start_all_to_all(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    output_splits: list[int] | None = None,
    input_splits: list[int] | None = None,
) -> Wait:
    """Start an `all_to_all`; a function that waits for it, once, and gives what has come. All ranks land in one order."""
    flight, comes = AsyncAllToAll(group, output_splits, input_splits), list[torch.Tensor]()
    ticket = _Start.apply(x, flight, comes)
    return lambda: _Land.apply(ticket, flight, comes)


# Under way while something else is computed. Not differentiable; see `weft.comm.overlap`.


class Pending(NamedTuple):
    """A collective that is under way."""

    work: dist.Work
    result: torch.Tensor
    source: torch.Tensor
    """Is read until it is done."""

    def wait(self) -> torch.Tensor:
        """The result, when it is there."""
        self.work.wait()
        return self.result


def start_gather(x: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin to gather the tensors of all ranks, [ranks, *x.shape]."""
    source = x.contiguous()
    result = x.new_empty((group.size(), *x.shape))
    return Pending(all_gather_single(result.flatten(0, 1), source, group, async_op=True), result, source)


def start_reduce_scatter(parts: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin to add up over ranks what each has for every one, contiguous [ranks, *out.shape]; `out` gets this rank's."""
    return Pending(reduce_scatter_single(out, parts.flatten(0, 1), group=group, async_op=True), out, parts)


def start_trade(parts: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin to give every other rank what is its, and to take what they have for this one: [ranks - 1, *] both, contiguous,
    in the order of ranks."""
    result, splits = torch.empty_like(parts), [int(rank != group.rank()) for rank in range(group.size())]
    return Pending(dist.all_to_all_single(result, parts, splits, splits, group, async_op=True), result, parts)


def start_all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin to add up a contiguous tensor over ranks, in place."""
    return Pending(dist.all_reduce(x, group=group, async_op=True), x, x)


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
    link: str = ""
    """"host" and "between" for the parts of a collective in two levels; else empty."""


class Recorder(TorchDispatchMode):
    """Notes every collective that this rank issues inside its context, in `messages`.

    Groups of one rank send nothing and are not noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    @property
    def total_bytes(self) -> int:
        return sum(message.bytes for message in self.messages)

    def bytes_by(self, field: str) -> dict[str, int]:
        """Bytes summed by "operation", "axis", "site" or "link"."""
        sums: Counter[str] = Counter()
        for message in self.messages:
            sums[str(getattr(message, field))] += message.bytes
        return dict(sums)

    def __enter__(self) -> "Recorder":
        SharedMemoryGroup.observers.append(self._note)  # torch's operators, which a mode sees, do not go through it
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        SharedMemoryGroup.observers.remove(self._note)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper goes first: what it sends comes here
        if func.namespace == "c10d":
            self._note_operator(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _note_operator(self, name: str, args: tuple[Any, ...]) -> None:
        group = find_group(args)
        if name not in NAMES or group is None or group.size() == 1:
            return
        sizes = [t.numel() * t.element_size() for t in find_tensors(args)]
        if name in ("allgather_", "reduce_scatter_"):  # lists beside one tensor: the sum of the lists
            full = sum(sizes) - min(sizes)
        elif name == "alltoall_base_":
            _, input, _, _, splits = args[:5]
            rows = splits[group.rank()] if splits else len(input) // group.size()
            full = (len(input) - rows) * input[:1].numel() * input.element_size()
        else:
            full = max(sizes)
        self._note(group, NAMES[name], full, find_tensors(args)[0].dtype)

    def _note(self, group: dist.ProcessGroup, operation: str, full: int, dtype: torch.dtype) -> None:
        axis, link = axis_of(group)
        self.messages.append(Message(operation, axis, RING[operation](full, group.size()), dtype, call_site(), link))


def axis_of(group: dist.ProcessGroup) -> tuple[str, str]:
    """The mesh axis of a group, or "world" for any other; and "host" or "between" for a level of a group in two, else ""."""
    name, _, link = group.group_desc.partition("@")  # as TwoLevelGroup describes its levels
    of_mesh = name.startswith("mesh_")  # as DeviceMesh describes its groups
    return name.removeprefix("mesh_") if of_mesh else "world", link


def note_message(group: dist.ProcessGroup, operation: str, numbers: int, dtype: torch.dtype) -> None:
    """Tell recorders of a message that no operator of torch.distributed carries; `numbers` are those of the full tensor."""
    for observer in SharedMemoryGroup.observers:
        observer(group, operation, numbers * dtype.itemsize, dtype)


@contextmanager
def unrecorded() -> Iterator[None]:
    """What is sent inside, to measure something, is no part of a step: no recorder and no other mode of torch sees it."""
    observers = SharedMemoryGroup.observers.copy()
    SharedMemoryGroup.observers.clear()
    try:
        with _disable_current_modes():
            yield
    finally:
        SharedMemoryGroup.observers.extend(observers)


def find_tensors(args: Any) -> list[torch.Tensor]:
    """All tensors among the arguments of an operator, in order."""
    if isinstance(args, torch.Tensor):
        return [args]
    return [tensor for arg in args for tensor in find_tensors(arg)] if isinstance(args, list | tuple) else []


def call_site() -> str:
    """The nearest caller outside of installed packages and of the rooms that carry out collectives."""
    frame = sys._getframe(1)
    while frame.f_back and any(part in frame.f_code.co_filename for part in CARRIERS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def find_group(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """The process group among the arguments of an operator."""
    return next((group for group in map(_unwrap_group, args) if group is not None), None)


def _unwrap_group(argument: Any) -> dist.ProcessGroup | None:
    """A process group from the boxed form in which operators receive it, or None for other arguments."""
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
        return dist.ProcessGroup.unbox(argument)
    return None
