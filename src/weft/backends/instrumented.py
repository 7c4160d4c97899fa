"""Process groups that report each collective and its wait time."""

# mypy: disable-error-code="arg-type,assignment,call-arg,override,attr-defined,no-untyped-call"
# The stubs of ProcessGroup list every overload; torch.distributed itself calls one form of each method.

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.utils._pytree import tree_leaves


class CollectiveTiming(NamedTuple):
    """Times of one collective on this rank, in seconds of one clock."""

    group: dist.ProcessGroup
    issued: float
    """Start of the call."""
    returned: float
    """Return of the call; the collective is complete or in flight."""
    done: float
    """Completion of the collective, as far as it is observable."""
    waited: float
    """Start of the wait."""
    ended: float
    """End of the wait."""
    operation: str = ""
    """all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send or receive; or the method of gloo."""
    bytes: int = 0
    """Bytes of the full tensor: gathered, or before the scatter; for all_to_all, the bytes that leave this rank."""

    @property
    def exposed(self) -> float:
        """Seconds in which this rank was blocked by the collective."""
        return self.returned - self.issued + self.ended - self.waited

    @property
    def hidden(self) -> float:
        """Seconds in which the collective was in flight while this rank did other work; 0 of a receive."""
        return 0.0 if self.operation == "receive" else max(min(self.done, self.waited) - self.returned, 0.0)


class InstrumentedGroup(dist.ProcessGroup):
    """Base class of the CPU process groups: the interface that torch requires of a Python group, and timing callbacks.

    Args:
        group_rank: this rank within the group.
        ranks: number of ranks of the group.
    """

    def __init__(self, group_rank: int, ranks: int):
        super().__init__(group_rank, ranks)
        self.group_rank, self.ranks, self._name = group_rank, ranks, ""

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.group_rank

    def getBackendName(self) -> str:
        return "weft"

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:
        return self._name

    timers: ClassVar[list[Callable[[CollectiveTiming], None]]] = []
    """Callbacks at the end of each collective of this rank."""

    def report(
        self, issued: float, returned: float, done: float, waited: float, ended: float, operation: str, size: int
    ) -> None:
        """Call the timers with the times, the operation and the bytes of a collective."""
        for timer in self.timers:
            timer(CollectiveTiming(self, issued, returned, done, waited, ended, operation, size))


class FallbackGroup(InstrumentedGroup):
    """Base class of groups with collectives of their own, which leave the other operations to a group of gloo.

    Args:
        group_rank: this rank within the group.
        ranks: number of ranks of the group.
        make_gloo: factory of a gloo group of the same ranks; called at its first use.
    """

    def __init__(self, group_rank: int, ranks: int, make_gloo: Callable[[], Any]):
        super().__init__(group_rank, ranks)
        self.make_gloo = make_gloo

    @cached_property
    def gloo(self) -> Any:
        """Gloo group; its threads and connections are created at its first use, by all ranks of the group."""
        return self.make_gloo()

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        (output,), (tensors,) = outputs, inputs
        if any(tensor.numel() != output.numel() for tensor in tensors):
            return self.gloo.reduce_scatter(outputs, inputs, opts)
        return self.reduce_scatter_single(output, torch.cat([tensor.reshape(-1) for tensor in tensors]), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return wait_for_all([self.allreduce([tensor], opts) for tensor in tensors], tensors)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return wait_for_all([self.all_gather_single(output, input, opts) for output, input in pairs], outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return wait_for_all([self.reduce_scatter_single(output, input, opts) for output, input in pairs], outputs)

    # Names of torch 2.11 and 2.12
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce(self, *args: Any) -> dist.Work:
        return self.gloo.reduce(*args)

    def gather(self, *args: Any) -> dist.Work:
        return self.gloo.gather(*args)

    def scatter(self, *args: Any) -> dist.Work:
        return self.gloo.scatter(*args)

    def alltoall(self, *args: Any) -> dist.Work:
        return self.gloo.alltoall(*args)


class Finish(dist.Work):
    """Work whose last step runs in `wait`."""

    def __init__(self, work: dist.Work | None, finish: Callable[[], None], result: Any):
        super().__init__()
        self.work, self.finish, self.outputs, self.is_done = work, finish, result, False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.is_done:
            self.is_done = True
            if self.work is not None:
                self.work.wait()
            self.finish()
        return True

    def is_completed(self) -> bool:
        return self.is_done

    def result(self) -> Any:
        return self.outputs

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self.outputs)
        return future


def wait_for_all(works: list[dist.Work], result: Any, afterwards: Callable[[], None] = lambda: None) -> dist.Work:
    """Work that waits for several works, and then calls `afterwards`."""

    def finish() -> None:
        for work in works:
            work.wait()
        afterwards()

    return Finish(None, finish, result)


def _timed(name: str) -> Any:
    """Create a method that forwards a call to gloo and returns a timed work if there are timers."""

    def call(self: "GlooGroup", *args: Any) -> dist.Work:
        issued = time.perf_counter()
        work = getattr(self.gloo, name)(*args)
        return TimedWork(self, work, issued, *_describe(name, args, self)) if self.timers else work

    return call


OPERATIONS = {  # by the method of a group
    "allreduce": "all_reduce",
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "recv": "receive",
}


def _describe(name: str, args: tuple[Any, ...], group: InstrumentedGroup) -> tuple[str, int]:
    """Operation and bytes of a call, as in `CollectiveTiming`."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    size = max(sizes, default=0)
    if name in ("allgather", "reduce_scatter"):  # one tensor, and a list of tensors whose sum is the full size
        size = sum(sizes) - min(sizes)
    elif name == "alltoall_base":
        _, input, _, splits = args[:4]
        rows = splits[group.group_rank] if splits else len(input) // group.ranks
        size = (len(input) - rows) * input[:1].numel() * input.element_size()
    return OPERATIONS.get(name, name), size


class GlooGroup(InstrumentedGroup):
    """Gloo group that calls torch's operators, so that dispatch modes see its collectives.

    Args:
        store: store of these ranks alone.
        rank: this rank within the group.
        size: number of ranks of the group.
        timeout: timeout of a collective.
        link: suffix of the group's description.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, link: str = ""):
        super().__init__(rank, size)
        self.store, self.link = store, link
        self.gloo = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.gloo._set_default_backend(kind)
        backend = ProcessGroupGloo(store, rank, size, timeout=timeout)
        self.gloo._register_backend(torch.device("cpu"), kind, backend)
        # Read as a hierarchical group: each rank is alone on its host, and all ranks are on different hosts.
        self.inner, self.outer = None, self

    allreduce, broadcast, reduce, gather, scatter = map(
        _timed, ("allreduce", "broadcast", "reduce", "gather", "scatter")
    )
    allgather, reduce_scatter, alltoall, barrier = map(_timed, ("allgather", "reduce_scatter", "alltoall", "barrier"))
    send, recv, recv_anysource = map(_timed, ("send", "recv", "recv_anysource"))
    # Names of torch 2.13, and the earlier names.
    all_gather_single = _allgather_base = _timed("_allgather_base")
    reduce_scatter_single = _reduce_scatter_base = _timed("_reduce_scatter_base")
    all_to_all_single = alltoall_base = _timed("alltoall_base")
    allreduce_coalesced = _timed("allreduce_coalesced")
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _timed("allgather_into_tensor_coalesced")
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _timed("reduce_scatter_tensor_coalesced")

    def getBackendName(self) -> str:
        return "gloo"

    def get_group_store(self) -> dist.Store:
        return self.store

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self.gloo._set_group_name(name)

    def _set_group_desc(self, description: str) -> None:
        self.gloo._set_group_desc(description + self.link)
        super()._set_group_desc(description + self.link)


class TimedWork(dist.Work):
    """Work that reports the times of its collective at the end of its first wait."""

    def __init__(self, group: InstrumentedGroup, work: dist.Work, issued: float, operation: str, size: int):
        super().__init__()
        self.group, self.work, self.issued, self.returned = group, work, issued, time.perf_counter()
        self.operation, self.size = operation, size
        self.done: float | None = None
        self.is_reported = False
        with suppress(RuntimeError):  # some works of gloo have no future: completion is then the end of the wait
            work.get_future().add_done_callback(self._set_done)

    def _set_done(self, _: Any) -> None:
        self.done = time.perf_counter()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        waited = time.perf_counter()
        result = self.work.wait()
        if not self.is_reported:
            self.is_reported, ended = True, time.perf_counter()
            done = ended if self.done is None else self.done
            self.group.report(self.issued, self.returned, done, waited, ended, self.operation, self.size)
        return result

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def is_success(self) -> bool:
        return self.work.is_success()

    def result(self) -> Any:
        return self.work.result()

    def get_future(self) -> Any:
        return self.work.get_future()
