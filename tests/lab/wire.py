"""An emulated wire: overlap of communication with computation, provable on a CPU.

A group of ranks on one host whose collectives take the time of a slower link: each is under way for alpha seconds and the
bytes that one rank sends over the bandwidth, one after the other. The data are moved at once, through shared memory;
whoever waits sleeps until the wire would have brought them, so that no core is burned. The clock may be a real one, or one
that only products and waiting move on: then the seconds of a program are exact, whatever else the machine does.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from weft.cluster.shared_memory import SharedMemoryGroup, _create_group
from weft.comm.collectives import RING

BACKEND = "weft_wire"


class RealClock:
    """The time of day, and sleep."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, moment: float) -> None:
        while (left := moment - time.perf_counter()) > 0:
            time.sleep(left)


class VirtualClock(TorchDispatchMode):
    """A clock of one rank that stands still but for products, while it is the context, and for waiting."""

    def __init__(self, seconds_per_flop: float) -> None:
        super().__init__()
        self.seconds_per_flop, self.time, self.computed = seconds_per_flop, 0.0, 0.0

    def now(self) -> float:
        return self.time

    def sleep_until(self, moment: float) -> None:
        self.time = max(self.time, moment)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in PRODUCTS:
            left, right = args[-2:]
            seconds = 2 * left.shape[0] * left.shape[1] * right.shape[1] * self.seconds_per_flop
            self.time += seconds
            self.computed += seconds
        return func(*args, **(kwargs or {}))


PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)


class Transfer(NamedTuple):
    """One collective on the wire."""

    operation: str
    bytes: int
    """That one rank sends."""
    issued: float
    began: float
    ended: float


class Arrival(dist.Work):  # type: ignore[misc,name-defined]
    """Done when the wire has brought the data."""

    def __init__(self, wire: "Wire", moment: float):
        super().__init__()
        self.wire, self.moment = wire, moment

    def wait(self, timeout: timedelta | None = None) -> bool:
        began = self.wire.clock.now()
        self.wire.clock.sleep_until(self.moment)
        self.wire.waited += self.wire.clock.now() - began
        return True

    def is_completed(self) -> bool:
        return self.wire.clock.now() >= self.moment


class Wire(SharedMemoryGroup):
    """Shared memory whose collectives are done no earlier than a wire would have done them.

    `clock`, `alpha` and `seconds_per_byte` may be set between two collectives; `transfers` is the log.
    """

    is_blocking = False

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.clock: Any = RealClock()
        self.alpha = self.seconds_per_byte = self.free = self.waited = 0.0
        self.transfers: list[Transfer] = []

    def reset(self, clock: Any, alpha: float, seconds_per_byte: float) -> None:
        """A wire of other figures, which is free, with an empty log."""
        self.clock, self.alpha, self.seconds_per_byte = clock, alpha, seconds_per_byte
        self.free = self.waited = 0.0
        self.transfers = []

    def _send(self, operation: str, full: torch.Tensor) -> Arrival:
        size = RING[operation](full.numel() * full.element_size(), self.size())
        issued = self.clock.now()
        began = max(issued, self.free)
        self.free = began + self.alpha + size * self.seconds_per_byte
        self.transfers.append(Transfer(operation, size, issued, began, self.free))
        return Arrival(self, self.free)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        super().allreduce(tensors, opts)
        return self._send("all_reduce", tensors[0])

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        super().all_gather_single(output, input, opts)
        return self._send("all_gather", output)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        super().reduce_scatter_single(output, input, opts)
        return self._send("reduce_scatter", input)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single


def _create_wire(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Wire:
    inner: Any = _create_group(store, rank, size, timeout)
    return Wire(inner.slabs, inner.make_gloo, rank, timeout)


def register_wire() -> str:
    """Make the backend known to torch, once; its name."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create_wire, devices=["cpu"])
    return BACKEND


def new_wire() -> Wire:
    """A wire between all ranks, without delay until `reset`."""
    return dist.new_group(backend=register_wire())


@contextmanager
def virtual_seconds(
    wire: Wire, seconds_per_flop: float, alpha: float, seconds_per_byte: float
) -> Iterator[VirtualClock]:
    """A clock that starts at zero, on a wire of the given figures."""
    clock = VirtualClock(seconds_per_flop)
    wire.reset(clock, alpha, seconds_per_byte)
    with clock:
        yield clock
    wire.reset(RealClock(), 0.0, 0.0)
