"""Process groups that tell who listens what they carry, and for how long ranks wait for them."""

# mypy: disable-error-code="arg-type,call-arg,override,attr-defined,no-untyped-call"
# The stubs of ProcessGroup list what may be called from Python; torch.distributed itself calls one form of each.

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo


class CollectiveTiming(NamedTuple):
    """One collective of this rank, in seconds of one clock."""

    group: dist.ProcessGroup
    issued: float
    returned: float
    """The call came back: all is done, or under way."""
    done: float
    """All is done, as far as can be seen."""
    waited: float
    """Somebody began to wait for it."""
    ended: float
    """Nobody waits any more."""

    @property
    def exposed(self) -> float:
        """Seconds in which this rank did nothing else."""
        return self.returned - self.issued + self.ended - self.waited

    @property
    def hidden(self) -> float:
        """Seconds in which it was under way while this rank did something else."""
        return max(min(self.done, self.waited) - self.returned, 0.0)


class InstrumentedGroup(dist.ProcessGroup):
    """What all groups on CPU have in common: what torch asks of a group that is written in Python, and who is told of it."""

    def __init__(self, place: int, ranks: int):
        super().__init__(place, ranks)
        self.place, self.ranks, self._name = place, ranks, ""

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.place

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
    """Are called when a collective has ended on this rank."""

    def tell(self, issued: float, returned: float, done: float, waited: float, ended: float) -> None:
        """Tell the timers."""
        for timer in self.timers:
            timer(CollectiveTiming(self, issued, returned, done, waited, ended))


def _timed(name: str) -> Any:
    """A method that passes a call on, and gives a work that knows when it was issued."""

    def call(self: "GlooGroup", *args: Any) -> dist.Work:
        issued = time.perf_counter()
        work = getattr(self.gloo, name)(*args)
        return _TimedWork(self, work, issued) if self.timers else work

    return call


class GlooGroup(InstrumentedGroup):
    """A gloo group that goes through torch's operators, so that modes see its collectives too.

    Its description ends in `link`, if that is given.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, link: str = ""):
        super().__init__(rank, size)
        self.store, self.link = store, link
        self.gloo = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.gloo._set_default_backend(kind)
        backend = ProcessGroupGloo(store, rank, size, timeout=timeout)
        self.gloo._register_backend(torch.device("cpu"), kind, backend)
        # Seen as one of two levels: each rank is alone, and all of them are apart.
        self.inner, self.outer = None, self

    allreduce, broadcast, reduce, gather, scatter = map(
        _timed, ("allreduce", "broadcast", "reduce", "gather", "scatter")
    )
    allgather, reduce_scatter, alltoall, barrier = map(_timed, ("allgather", "reduce_scatter", "alltoall", "barrier"))
    send, recv, recv_anysource = map(_timed, ("send", "recv", "recv_anysource"))
    # Under the names of torch 2.13, and under those before.
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


class _TimedWork(dist.Work):
    def __init__(self, group: InstrumentedGroup, work: dist.Work, issued: float):
        super().__init__()
        self.group, self.work, self.issued, self.returned = group, work, issued, time.perf_counter()
        self.done: float | None = None
        self.is_told = False
        with suppress(RuntimeError):  # some works of gloo have no future: they are done when somebody has waited
            work.get_future().add_done_callback(self._note)

    def _note(self, _: Any) -> None:
        self.done = time.perf_counter()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        waited = time.perf_counter()
        result = self.work.wait()
        if not self.is_told:
            self.is_told, ended = True, time.perf_counter()
            done = ended if self.done is None else self.done
            self.group.tell(self.issued, self.returned, done, waited, ended)
        return result

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def result(self) -> Any:
        return self.work.result()

    def get_future(self) -> Any:
        return self.work.get_future()
