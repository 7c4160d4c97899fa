"""An emulated wire: overlap of communication with computation, provable on a CPU.

A group of ranks on one host whose sums and gathers take the time of a slower link: each is under way for alpha seconds and
the bytes that one rank sends over the bandwidth, one after the other. Data leave their rank at once, through shared memory,
and nobody waits for a peer to begin; whoever waits for the result sleeps until the wire would have brought it, so that no core
is burned. The clock may be the real one; one that leaves out what other processes do; or one that only counted products and
waiting move on: then the seconds of a program are exact.
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

from weft.backends.shared_memory import SharedMemoryGroup, _done, _observed, reduce_parts, share_memory
from weft.comm.collectives import RING

BACKEND = "weft_wire"
TAG = 2**30  # of its messages


class RealClock:
    """The time of day, and sleep."""

    def restart(self) -> None: ...

    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, moment: float) -> None:
        while (left := moment - time.perf_counter()) > 0:
            time.sleep(left)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """What is done inside takes time as anything else."""
        yield


class CoreClock:
    """Moved on by what this rank computes, measured as time on a core, and by waiting, which takes none: for a rank that shares
    its core with others. Both ranks `restart` it at the same moment."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.added = -time.thread_time()

    def now(self) -> float:
        return time.thread_time() + self.added

    def sleep_until(self, moment: float) -> None:
        self.added += max(moment - self.now(), 0.0)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Let it stand still: what is done inside, a real wire would do by itself."""
        before = time.thread_time()
        yield
        self.added -= time.thread_time() - before


class VirtualClock(TorchDispatchMode):
    """A clock of one rank that stands still but for products, while it is the context, and for waiting."""

    def __init__(self, seconds_per_flop: float) -> None:
        super().__init__()
        self.seconds_per_flop, self.time, self.computed = seconds_per_flop, 0.0, 0.0

    def now(self) -> float:
        return self.time

    def sleep_until(self, moment: float) -> None:
        self.time = max(self.time, moment)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """As always."""
        yield

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


class Parts(NamedTuple):
    """What a collective moves."""

    outgoing: list[Tensor]
    """To each rank."""
    incoming: list[Tensor]
    """From each rank; this rank's own is there."""
    finish: Callable[[list[Tensor]], object]
    """Given what has come in."""
    is_placed: bool = False
    """Whether what comes in must lie where `incoming` is."""


class Arrival(dist.Work):  # type: ignore[misc,name-defined]
    """Done when the wire has brought what all ranks have sent."""

    def __init__(self, wire: "Wire", parts: Parts, end: float):
        """
        Args:
            wire: that carries it.
            parts: what is moved.
            end: when this rank's own message is through.
        """
        super().__init__()
        self.wire, self.parts, self.ends = wire, parts, [torch.tensor([end], dtype=torch.float64)]
        self.receives = [receive for peer in wire.peers for receive in wire.receive(peer, parts, self.ends)]
        self.done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.done:
            with self.wire.clock.standing():
                for receive in self.receives:
                    receive.wait()
            began = self.wire.clock.now()
            self.wire.clock.sleep_until(max(end.item() for end in self.ends))
            self.wire.waited += self.wire.clock.now() - began
            with self.wire.clock.standing():
                self.parts.finish(self.parts.incoming)
            self.done = True
        return True


class Wire(SharedMemoryGroup):
    """Ranks of one host whose sums and gathers go over a wire; other collectives as through shared memory.

    `reset` says how fast it is; `transfers` is the log, `waited` how long this rank has slept.
    """

    is_blocking = False

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.peers = [peer for peer in range(self.ranks) if peer != self.place]
        self.reset(RealClock(), 0.0, 0.0)

    def reset(self, clock: Any, alpha: float, seconds_per_byte: float) -> None:
        """A wire of other figures, which is free, with an empty log."""
        self.clock, self.alpha, self.seconds_per_byte = clock, alpha, seconds_per_byte
        self.free = self.waited = 0.0
        self.transfers: list[Transfer] = []

    @_observed
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM

        def prepare() -> Parts:
            incoming = [torch.empty_like(tensor) for _ in range(self.ranks)]
            incoming[self.place].copy_(tensor)
            return Parts([tensor] * self.ranks, incoming, lambda found: reduce_parts(found, op, tensor))

        return self._send("all_reduce", tensor, prepare)

    @_observed
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        def prepare() -> Parts:
            incoming = [part.view_as(input) for part in output.view(self.ranks, -1)]
            incoming[self.place].copy_(input)
            return Parts([input] * self.ranks, incoming, lambda found: None, is_placed=True)

        return self._send("all_gather", output, prepare)

    @_observed
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM

        def prepare() -> Parts:
            outgoing = [part.view_as(output) for part in input.reshape(self.ranks, -1)]
            incoming = [torch.empty_like(output) for _ in range(self.ranks)]
            incoming[self.place] = outgoing[self.place]
            return Parts(outgoing, incoming, lambda found: reduce_parts(found, op, output))

        return self._send("reduce_scatter", input, prepare)

    @_observed
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        def prepare() -> Parts:
            outgoing, incoming = list(input.split(input_splits)), list(output.split(output_splits))
            incoming[self.place].copy_(outgoing[self.place])
            return Parts(outgoing, incoming, lambda found: None, is_placed=True)

        return self._send("all_to_all", input, prepare)

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def _send(self, operation: str, full: Tensor, prepare: Callable[[], Parts]) -> Arrival:
        self._observe(operation, full.numel(), full.dtype)
        size = RING[operation](full.numel() * full.element_size(), self.ranks)
        issued = self.clock.now()
        began = max(issued, self.free)
        self.free = began + self.alpha + size * self.seconds_per_byte
        self.transfers.append(Transfer(operation, size, issued, began, self.free))
        with self.clock.standing():
            parts = prepare()
            for peer in self.peers:
                self.send_to(peer, parts.outgoing[peer])
            return Arrival(self, parts, self.free)

    def send_to(self, peer: int, tensor: Tensor) -> None:
        """Send a part, and when it is through."""
        self.channel.send(torch.tensor([self.free], dtype=torch.float64), peer, TAG)
        self.channel.send(tensor, peer, TAG)

    def receive(self, peer: int, parts: Parts, ends: list[Tensor]) -> list[dist.Work]:
        """Want a part of a peer, and when it is through; what is to be waited for."""
        ends.append(torch.zeros(1, dtype=torch.float64))
        return [self.channel.receive(tensor, peer, TAG) for tensor in (ends[-1], parts.incoming[peer])]


class Mirror(Wire):
    """One rank of several, alone: its peers do what it does at the same time, and what they send is what it sends.

    On a busy host the time on a core of a real rank tells what the others have left in its caches, each time it has slept.
    """

    def __init__(self, rank: int, ranks: int):
        dist.ProcessGroup.__init__(self, rank, ranks)
        self.place, self.ranks, self._name = rank, ranks, "mirror"
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
        else:  # not a byte more through the caches than must be
            parts.incoming[peer] = parts.outgoing[peer]
        return []

    def barrier(self, opts: Any = None) -> dist.Work:
        return _done([])


def _create_wire(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Wire:
    inner: Any = share_memory(store, rank, size, timeout, lambda: None)
    return Wire(inner.slabs, inner.make_gloo, rank, timeout)


def register_wire() -> str:
    """Make the backend known to torch, once; its name."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create_wire, devices=["cpu"])
    return BACKEND


def new_wire() -> Wire:
    """A wire between all ranks, without delay until `reset`."""
    return dist.new_group(backend=register_wire())


def new_mirror(ranks: int) -> Mirror:
    """The first of some ranks, alone in this process; makes the default process group."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    name = "weft_mirror"
    dist.Backend.register_backend(name, lambda store, rank, size, timeout: Mirror(rank, size), devices=["cpu"])
    return dist.new_group(backend=name)


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
