"""Emulated wire: overlap of communication with computation, provable on a CPU.

Process group of ranks on one host whose reductions and gathers take the time of a slower link. Each message takes alpha seconds
plus its bytes (sent by one rank) over the bandwidth, one message after the other. Data leave their rank at once, through shared
memory, and no rank waits for a peer to begin. A rank that waits for a result sleeps until the wire would have delivered it, so
that no core is used. The clock may be the real clock; one that excludes the time of other processes; or one that advances only
for matmuls and waiting, so that the seconds of a program are exact.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from weft.backends.shared_memory import SharedMemoryGroup, _observed, finished_work, reduce_parts, share_memory
from weft.comm.recorder import RING

BACKEND = "weft_wire"
TAG = 2**30  # tag of the wire's messages


class RealClock:
    """Wall-clock time and real sleep."""

    def restart(self) -> None: ...

    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, moment: float) -> None:
        while (remaining := moment - time.perf_counter()) > 0:
            time.sleep(remaining)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Context without effect: time advances as usual."""
        yield


class CoreClock:
    """Clock that advances by CPU time of this rank and by waiting, for a rank that shares its core with other processes.

    Both ranks must `restart` it at the same moment.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.added = -time.thread_time()

    def now(self) -> float:
        return time.thread_time() + self.added

    def sleep_until(self, moment: float) -> None:
        self.added += max(moment - self.now(), 0.0)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Context in which the clock stops, for work that a real wire would do."""
        before = time.thread_time()
        yield
        self.added -= time.thread_time() - before


class VirtualClock(TorchDispatchMode):
    """Clock of one rank that advances only for matmuls, while it is the active context, and for waiting."""

    def __init__(self, seconds_per_flop: float) -> None:
        super().__init__()
        self.seconds_per_flop, self.time, self.computed = seconds_per_flop, 0.0, 0.0

    def now(self) -> float:
        return self.time

    def sleep_until(self, moment: float) -> None:
        self.time = max(self.time, moment)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Context without effect: this clock never counts other work."""
        yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in MATMULS:
            left, right = args[-2:]
            seconds = 2 * left.shape[0] * left.shape[1] * right.shape[1] * self.seconds_per_flop
            self.time += seconds
            self.computed += seconds
        return func(*args, **(kwargs or {}))


MATMULS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)


class Transfer(NamedTuple):
    """Record of one collective on the wire."""

    operation: str
    bytes: int
    """Bytes sent by one rank."""
    issued: float
    began: float
    ended: float


class Parts(NamedTuple):
    """Tensors of a collective."""

    outgoing: list[Tensor]
    """Tensor to send to each rank."""
    incoming: list[Tensor]
    """Tensor received from each rank; already filled for this rank."""
    finish: Callable[[list[Tensor]], object]
    """Called with the received tensors."""
    is_placed: bool = False
    """True if data must be received into the memory of `incoming`."""


class PendingTransfer(dist.Work):  # type: ignore[misc,name-defined]
    """Pending collective, complete when the wire has delivered the messages of all ranks."""

    def __init__(self, wire: "Wire", parts: Parts, end: float):
        """
        Args:
            wire: wire of the collective.
            parts: tensors of the collective.
            end: time at which this rank's own message is delivered.
        """
        super().__init__()
        self.wire, self.parts, self.ends = wire, parts, [torch.tensor([end], dtype=torch.float64)]
        self.receives = [receive for peer in wire.peers for receive in wire.receive(peer, parts, self.ends)]
        self.done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.done:
            with self.wire.clock.stopped():
                for receive in self.receives:
                    receive.wait()
            began = self.wire.clock.now()
            self.wire.clock.sleep_until(max(end.item() for end in self.ends))
            self.wire.waited += self.wire.clock.now() - began
            with self.wire.clock.stopped():
                self.parts.finish(self.parts.incoming)
            self.done = True
        return True


class Wire(SharedMemoryGroup):
    """Process group whose reductions and gathers take the time of a wire; other collectives use shared memory.

    `reset` sets its speed; `transfers` is the log, `waited` the seconds that this rank has slept.
    """

    is_blocking = False

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.peers = [peer for peer in range(self.ranks) if peer != self.group_rank]
        self.reset(RealClock(), 0.0, 0.0)

    def reset(self, clock: Any, alpha: float, seconds_per_byte: float) -> None:
        """Set clock, latency and speed of an idle wire, and clear the log."""
        self.clock, self.alpha, self.seconds_per_byte = clock, alpha, seconds_per_byte
        self.free = self.waited = 0.0
        self.transfers: list[Transfer] = []

    @_observed
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM

        def prepare() -> Parts:
            incoming = [torch.empty_like(tensor) for _ in range(self.ranks)]
            incoming[self.group_rank].copy_(tensor)
            return Parts([tensor] * self.ranks, incoming, lambda received: reduce_parts(received, op, tensor))

        return self._send("all_reduce", tensor, prepare)

    @_observed
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        def prepare() -> Parts:
            incoming = [part.view_as(input) for part in output.view(self.ranks, -1)]
            incoming[self.group_rank].copy_(input)
            return Parts([input] * self.ranks, incoming, lambda received: None, is_placed=True)

        return self._send("all_gather", output, prepare)

    @_observed
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM

        def prepare() -> Parts:
            outgoing = [part.view_as(output) for part in input.reshape(self.ranks, -1)]
            incoming = [torch.empty_like(output) for _ in range(self.ranks)]
            incoming[self.group_rank] = outgoing[self.group_rank]
            return Parts(outgoing, incoming, lambda received: reduce_parts(received, op, output))

        return self._send("reduce_scatter", input, prepare)

    @_observed
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        def prepare() -> Parts:
            equal = [len(input) // self.ranks] * self.ranks
            outgoing, incoming = list(input.split(input_splits or equal)), list(output.split(output_splits or equal))
            incoming[self.group_rank].copy_(outgoing[self.group_rank])
            return Parts(outgoing, incoming, lambda received: None, is_placed=True)

        return self._send("all_to_all", input, prepare)

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def _send(self, operation: str, full: Tensor, prepare: Callable[[], Parts]) -> PendingTransfer:
        self._observe(operation, full.numel(), full.dtype)
        size = RING[operation](full.numel() * full.element_size(), self.ranks)
        issued = self.clock.now()
        began = max(issued, self.free)
        self.free = began + self.alpha + size * self.seconds_per_byte
        self.transfers.append(Transfer(operation, size, issued, began, self.free))
        with self.clock.stopped():
            parts = prepare()
            for peer in self.peers:
                self.send_to(peer, parts.outgoing[peer])
            return PendingTransfer(self, parts, self.free)

    def send_to(self, peer: int, tensor: Tensor) -> None:
        """Send a part, and the time of its delivery."""
        self.channel.send(torch.tensor([self.free], dtype=torch.float64), peer, TAG)
        self.channel.send(tensor, peer, TAG)

    def receive(self, peer: int, parts: Parts, ends: list[Tensor]) -> list[dist.Work]:
        """Post the receives of a peer's part and of its delivery time; return the works to wait for."""
        ends.append(torch.zeros(1, dtype=torch.float64))
        return [self.channel.receive(tensor, peer, TAG) for tensor in (ends[-1], parts.incoming[peer])]


class Mirror(Wire):
    """Wire of a single process: its peers do the same at the same time, and send the same data.

    On a busy host, CPU time of a real second rank would depend on what other processes leave in the caches while it sleeps.
    """

    def __init__(self, rank: int, ranks: int):
        dist.ProcessGroup.__init__(self, rank, ranks)
        self.group_rank, self.ranks, self._name = rank, ranks, "mirror"
        self.peers = [peer for peer in range(ranks) if peer != rank]
        self.reset(RealClock(), 0.0, 0.0)

    def _set_group_name(self, name: str) -> None:
        self._name = name
        dist.ProcessGroup._set_group_name(self, name)

    def send_to(self, peer: int, tensor: Tensor) -> None:
        pass

    def receive(self, peer: int, parts: Parts, ends: list[Tensor]) -> list[dist.Work]:
        if parts.is_placed:
            parts.incoming[peer].copy_(parts.outgoing[peer])
        else:  # no copy, to leave the caches alone
            parts.incoming[peer] = parts.outgoing[peer]
        return []

    def barrier(self, opts: Any = None) -> dist.Work:
        return finished_work([])


def _create_wire(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Wire:
    inner: Any = share_memory(store, rank, size, timeout, lambda: None)
    return Wire(inner.slabs, inner.make_gloo, rank, timeout)


def register_wire() -> str:
    """Register the backend with torch, once; return its name."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create_wire, devices=["cpu"])
    return BACKEND


def new_wire() -> Wire:
    """Wire between all ranks, without delay until `reset`."""
    return dist.new_group(backend=register_wire())


def new_mirror(ranks: int) -> Mirror:
    """Mirror as rank 0 of `ranks`; initializes the default process group."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    name = "weft_mirror"
    dist.Backend.register_backend(name, lambda store, rank, size, timeout: Mirror(rank, size), devices=["cpu"])
    return dist.new_group(backend=name)


@contextmanager
def virtual_seconds(
    wire: Wire, seconds_per_flop: float, alpha: float, seconds_per_byte: float
) -> Iterator[VirtualClock]:
    """Virtual clock that starts at zero, on a wire with the given latency and speed."""
    clock = VirtualClock(seconds_per_flop)
    wire.reset(clock, alpha, seconds_per_byte)
    with clock:
        yield clock
    wire.reset(RealClock(), 0.0, 0.0)
