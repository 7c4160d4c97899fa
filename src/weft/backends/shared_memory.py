"""Collectives of CPU ranks on one host through shared memory: each message is copied once in and once out.

Gloo sends the same bytes through loopback TCP, which costs several copies, system calls, and a thread that takes a core
from the computation. Here every rank owns a slab of anonymous memory that its peers have mapped. A collective runs in
rounds. Each rank writes its piece into a slot of its slab, increments its counter, waits for the counters of its peers,
and reads the data it needs from their slabs. A slot is overwritten once all ranks have read it.

Every collective blocks until this rank's part is done, as on one stream of an accelerator. Point-to-point messages use
`channel`. Operations that are not implemented here use gloo. Sums are computed in rank order, and in float32 for 16-bit
floats, so that results are deterministic and equal on all ranks, bit for bit.
"""
# mypy: disable-error-code="call-arg,override,assignment,attr-defined,arg-type"
# The stubs of ProcessGroup list every overload; torch.distributed itself calls one form of each method.

import ctypes
import json
import os
import platform
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial, wraps
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from weft.backends.instrumented import FallbackGroup, TimedWork
from weft.backends.shm_p2p import CHANNEL_BYTES, LINE_INTS, P2PChannel, typed, wait_until
from weft.compat import finished_work
from weft.errors import CommunicationError

SLOT_BYTES = 2**20  # small enough to stay in cache between the writer and its readers
NUM_SLOTS = 2  # one is written while slower ranks still read the other
HEADER_BYTES = 4096
SMALL = 4096  # elements below which every rank reduces the full tensor, without a second round
SIGNATURE_INTS = 4  # operation, dtype, number of elements, and a detail
SLAB_BYTES = HEADER_BYTES + NUM_SLOTS * SLOT_BYTES + CHANNEL_BYTES
SLAB_NAME = "weft"
DONT_DUMP = 16  # MADV_DONTDUMP of Linux

REDUCTIONS: list[tuple[Any, Callable[[Tensor, Tensor], object]]] = [
    (dist.ReduceOp.SUM, Tensor.add_),
    (dist.ReduceOp.AVG, Tensor.add_),
    (dist.ReduceOp.MAX, lambda total, other: torch.maximum(total, other, out=total)),
    (dist.ReduceOp.MIN, lambda total, other: torch.minimum(total, other, out=total)),
]
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16)
DTYPES += (torch.int8, torch.uint8, torch.bool)


def share_memory(
    store: dist.Store, rank: int, size: int, timeout: timedelta, make_gloo: Callable[[], Any]
) -> "SharedMemoryGroup | None":
    """Create a shared-memory group of ranks of one host; None if they cannot share memory. All ranks return alike.

    The counters rely on the store order of x86-64, and the mapping on the /proc of Linux, which a hardened host may hide.

    Args:
        store: store of these ranks alone.
        rank, size: this rank within the group, and the number of ranks.
        timeout: timeout of a collective.
        make_gloo: factory of a gloo group of the same ranks, for operations without a shared-memory form.
    """
    descriptor = -1
    if can_share():
        descriptor = os.memfd_create(SLAB_NAME)
        os.ftruncate(descriptor, SLAB_BYTES)
    store.set(f"slab/{rank}", json.dumps([os.getpid(), descriptor]))
    addresses = [_parse_slab_address(text) for text in store.multi_get([f"slab/{peer}" for peer in range(size)])]
    slabs: list[_Slab] = []
    if all(fd >= 0 and _is_slab_of_job(process, fd) for process, fd in addresses):
        with suppress(OSError, RuntimeError):
            slabs = [_Slab(f"/proc/{process}/fd/{fd}") for process, fd in addresses]
    store.set(f"open/{rank}", str(len(slabs)))
    shared = all(int(count) == size for count in store.multi_get([f"open/{peer}" for peer in range(size)]))
    if descriptor >= 0:
        os.close(descriptor)  # the mappings keep the memory
    return SharedMemoryGroup(slabs, make_gloo, rank, timeout) if shared else None


def _parse_slab_address(text: bytes) -> tuple[int, int]:
    """Parse the process id and file descriptor that a rank published; (-1, -1) for any other text."""
    try:
        process, fd = json.loads(text)
        return int(process), int(fd)
    except (ValueError, TypeError):
        return -1, -1


def _is_slab_of_job(process: int, descriptor: int) -> bool:
    """True if a process has this user and the same parent process, and its file descriptor is a slab.

    This check is required because any client of the store could publish another address.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        parent = int(status.split("\nPPid:", 1)[1].split(maxsplit=1)[0])
        path = Path(f"/proc/{process}/fd/{descriptor}")
        slab = path.stat()
        # If the launcher has died, its processes have another parent: the comparison then holds for ranks of this job alone.
        return (
            parent == os.getppid()
            and slab.st_uid == os.geteuid()
            and slab.st_size == SLAB_BYTES
            and os.readlink(path).startswith(f"/memfd:{SLAB_NAME} ")
        )
    except (OSError, ValueError, IndexError):
        return False


def can_share() -> bool:
    """True if the platform supports shared-memory groups."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


class _Slab:
    """Memory that one rank writes and all ranks of a group read. It is freed at the exit of the last process."""

    def __init__(self, path: str):
        memory = torch.from_file(path, shared=True, size=SLAB_BYTES, dtype=torch.uint8)
        # Without this, a core dump would allocate every page of the sparse channel.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(SLAB_BYTES), DONT_DUMP)
        ints = memoryview(memory[:HEADER_BYTES].numpy()).cast("q")
        lines = [ints[start : start + LINE_INTS] for start in range(0, len(ints), LINE_INTS)]
        self.written, self.read = lines[0], lines[1]  # rounds that the owner has written and read
        self.signatures = lines[2 : 2 + NUM_SLOTS]
        self.slots = memory[HEADER_BYTES:-CHANNEL_BYTES].view(NUM_SLOTS, SLOT_BYTES).unbind()
        self.channel = memory[-CHANNEL_BYTES:]


def _observed(collective: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """Unwrap fp16 gradients (`precision/fp16_backward.py`), and call `leavers` and timers at the end of a collective."""

    @wraps(collective)
    def observed(self: "SharedMemoryGroup", *args: Any) -> dist.Work:
        issued = time.perf_counter()
        with torch.no_grad():  # a tensor that requires gradients is reduced in place, as other backends do
            work = collective(self, *tree_map_only(Tensor, _stored, args))
        for leaver in self.leavers:
            leaver()
        if self.timers:
            ended = time.perf_counter()
            self.report(issued, ended, ended, ended, ended, *self.observed)
        return work

    return observed


class SharedMemoryGroup(FallbackGroup):
    """Process group of ranks that share memory; see the functions of torch.distributed for the meaning of its methods.

    The class attribute `observers` lists callbacks that are called with (group, operation, bytes, dtype) before each
    collective. The bytes are those of the full tensor (gathered, or before the scatter); for all_to_all they are the bytes
    that leave this rank. The callbacks in `leavers` are called once this rank's part is done or handed over to gloo.

    Every collective raises CommunicationError on every rank if the ranks call different operations, dtypes or sizes, or if
    a rank does not join within the timeout. The group is unusable afterwards.
    """

    def __init__(self, slabs: list[_Slab], make_gloo: Callable[[], Any], rank: int, timeout: timedelta):
        super().__init__(rank, len(slabs), make_gloo)
        self.slabs, self.own = slabs, slabs[rank]
        self.seconds, self.round = timeout.total_seconds(), 0
        self.observed = ("", 0)
        """Operation and bytes of the last collective."""
        self.channel = P2PChannel([slab.channel for slab in slabs], rank, self.seconds)

    is_blocking: ClassVar[bool] = True
    """No computation overlaps with a collective, even with `async_op`."""
    observers: ClassVar[list[Callable[[dist.ProcessGroup, str, int, torch.dtype], None]]] = []
    leavers: ClassVar[list[Callable[[], None]]] = []

    # Rounds

    @contextmanager
    def _exchange(self, signature: tuple[int, ...], fill: Callable[[Tensor], object]) -> Iterator[list[Tensor]]:
        """Run one round: `fill` writes this rank's slot; the slots of all ranks are readable inside the context."""
        self.round += 1
        slot = self.round % NUM_SLOTS
        self._wait("read", self.round - NUM_SLOTS)
        self.own.signatures[slot][:SIGNATURE_INTS] = array("q", signature)
        fill(self.own.slots[slot])
        self.own.written[0] = self.round
        self._wait("written", self.round)
        for peer, slab in enumerate(self.slabs):
            if slab.signatures[slot] != self.own.signatures[slot]:
                raise self._mismatch(signature, peer, tuple(slab.signatures[slot][:SIGNATURE_INTS]))
        yield [slab.slots[slot] for slab in self.slabs]
        self.own.read[0] = self.round

    def _wait(self, counter: str, value: int) -> None:
        """Wait until a counter of every rank has reached a value."""
        for peer, slab in enumerate(self.slabs):
            if not wait_until(partial(_has_reached, getattr(slab, counter), value), self.seconds):
                raise CommunicationError(
                    f"rank {peer} of group {self._name} did not join a collective within {self.seconds:.0f} s",
                    where=f"rank {self.group_rank} of the group, in round {self.round}",
                    rule="all ranks of a group call the same collectives in the same order",
                    fix="look for a rank that ended, hangs, or took another branch",
                )

    def _mismatch(self, own: tuple[int, ...], peer: int, other: tuple[int, ...]) -> CommunicationError:
        def describe(signature: tuple[int, ...]) -> str:
            operation, dtype, count, detail = signature
            return f"{OPERATIONS[operation]} of {count} elements of {DTYPES[dtype]}, detail {detail}"

        return CommunicationError(
            f"rank {self.group_rank} calls {describe(own)}; rank {peer} calls {describe(other)}",
            where=f"group {self._name}, round {self.round}",
            rule="all ranks of a group call the same collectives in the same order, with the same sizes and dtypes",
            fix="look for a branch or a size that depends on the rank",
        )

    def _observe(self, operation: str, elements: int, dtype: torch.dtype) -> None:
        self.observed = operation, elements * dtype.itemsize
        for observer in self.observers:
            observer(self, operation, elements * dtype.itemsize, dtype)

    # Collectives

    @_observed
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        self._observe("all_reduce", tensor.numel(), tensor.dtype)
        if not self._supports(tensor, op):
            return self.gloo.allreduce(tensors, opts)
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        signature = _signature("all_reduce", tensor)
        for piece in flat.view(-1).split(SLOT_BYTES // tensor.element_size()):
            if self.ranks == 2 or piece.numel() < SMALL:
                with self._exchange(signature, _writer(piece)) as slots:
                    reduce_parts([typed(slot, piece) for slot in slots], op, piece)
                continue
            shares = list(piece.tensor_split(self.ranks))  # every rank reduces one share and reads the other results
            starts = [0, *accumulate(share.numel() for share in shares)]
            own = slice(starts[self.group_rank], starts[self.group_rank + 1])
            with self._exchange(signature, _writer(piece)) as slots:
                reduce_parts([typed(slot, piece)[own] for slot in slots], op, shares[self.group_rank])
            with self._exchange(signature, _writer(shares[self.group_rank])) as slots:
                for share, slot in zip(shares, slots, strict=True):
                    share.copy_(typed(slot, share))
        if flat is not tensor:
            tensor.copy_(flat)
        return finished_work(tensors)

    @_observed
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        self._observe("all_gather", output.numel(), input.dtype)
        if not self._supports(input):
            return self.gloo._allgather_base(output, input, opts)
        self._gather(list(output.view(self.ranks, -1).unbind()), input)
        return finished_work([output])

    @_observed
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        (tensors,), (input,) = outputs, inputs
        self._observe("all_gather", sum(tensor.numel() for tensor in tensors), input.dtype)
        sizes_differ = any(tensor.numel() != input.numel() for tensor in tensors)
        if not self._supports(input) or sizes_differ or not all(tensor.is_contiguous() for tensor in tensors):
            return self.gloo.allgather(outputs, inputs, opts)
        self._gather([tensor.view(-1) for tensor in tensors], input)
        return finished_work(outputs)

    def _gather(self, outputs: list[Tensor], input: Tensor) -> None:
        signature, step = _signature("all_gather", input), SLOT_BYTES // input.element_size()
        for start, piece in zip(range(0, input.numel(), step), input.reshape(-1).split(step), strict=False):
            with self._exchange(signature, _writer(piece)) as slots:
                for output, slot in zip(outputs, slots, strict=True):
                    output[start : start + piece.numel()].copy_(typed(slot, piece))

    @_observed
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        self._observe("reduce_scatter", input.numel(), input.dtype)
        if not self._supports(input, op) or not output.is_contiguous():
            return self.gloo._reduce_scatter_base(output, input, opts)
        signature, step = _signature("reduce_scatter", input), SLOT_BYTES // input.element_size() // self.ranks
        rows, flat = input.reshape(self.ranks, -1), output.view(-1)
        for start, piece in zip(range(0, flat.numel(), step), flat.split(step), strict=False):
            columns = rows[:, start : start + piece.numel()]
            with self._exchange(signature, _writer(columns)) as slots:
                reduce_parts([typed(slot, columns)[self.group_rank] for slot in slots], op, piece)
        return finished_work([output])

    @_observed
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        width = input[:1].numel() if len(input) else output[:1].numel()
        sizes_in = torch.tensor(input_splits or [len(input) // self.ranks] * self.ranks) * width
        self._observe("all_to_all", input.numel() - int(sizes_in[self.group_rank]), input.dtype)
        if input.dtype not in DTYPES:
            return self.gloo.alltoall_base(output, input, output_splits, input_splits, opts)
        sizes = torch.empty(self.ranks, self.ranks, dtype=torch.int64)
        with self._exchange(_signature("all_to_all", sizes_in), _writer(sizes_in)) as slots:
            for row, slot in zip(sizes, slots, strict=True):
                row.copy_(typed(slot, row))
        sizes_out = [rows * width for rows in output_splits or [len(output) // self.ranks] * self.ranks]
        if sizes_out != sizes[:, self.group_rank].tolist():
            raise CommunicationError(
                f"rank {self.group_rank} expects {sizes_out} elements; its peers send {sizes[:, self.group_rank].tolist()}",
                where=f"all_to_all of group {self._name}",
                rule="output_splits of the receiver equal input_splits of the senders",
                fix="exchange the splits first",
            )
        step = SLOT_BYTES // input.element_size() // self.ranks
        outgoing, incoming = input.reshape(-1).split(sizes_in.tolist()), output.view(-1).split(sizes_out)
        largest = int(sizes.max())
        signature = (OPERATIONS.index("all_to_all"), DTYPES.index(input.dtype), largest, 1)
        for start in range(0, largest, step):
            pieces = [tensor[start : start + step] for tensor in outgoing]

            def write(slot: Tensor, pieces: list[Tensor] = pieces) -> None:
                rows = slot.view(input.dtype)[: self.ranks * step].view(self.ranks, step)
                for row, piece in zip(rows, pieces, strict=True):
                    row[: piece.numel()].copy_(piece)

            with self._exchange(signature, write) as slots:
                for tensor, slot in zip(incoming, slots, strict=True):
                    piece = tensor[start : start + step]
                    start_in_slot = self.group_rank * step
                    piece.copy_(slot.view(input.dtype)[start_in_slot : start_in_slot + piece.numel()])
        return finished_work([output])

    @_observed
    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        self._observe("broadcast", tensor.numel(), tensor.dtype)
        if not self._supports(tensor):
            return self.gloo.broadcast(tensors, opts)
        flat, root = tensor if tensor.is_contiguous() else tensor.contiguous(), opts.rootRank
        for piece in flat.view(-1).split(SLOT_BYTES // tensor.element_size()):
            fill = _writer(piece) if root == self.group_rank else lambda slot: None
            with self._exchange(_signature("broadcast", tensor, root), fill) as slots:
                if root != self.group_rank:
                    piece.copy_(typed(slots[root], piece))
        if flat is not tensor:
            tensor.copy_(flat)
        return finished_work(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        with self._exchange((OPERATIONS.index("barrier"), 0, 0, 0), lambda slot: None):
            pass
        return finished_work([])

    def _supports(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> bool:
        return tensor.dtype in DTYPES and any(op == known for known, _ in REDUCTIONS) and tensor.numel() > 0

    # Names of torch 2.11 and 2.12

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    # Point-to-point messages

    @_observed
    def send(self, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        self._observe("send", tensor.numel(), tensor.dtype)
        return self.channel.send(tensor, destination, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        issued, work = time.perf_counter(), self.channel.receive(_stored(tensor), source, tag)
        size = tensor.numel() * tensor.element_size()
        return TimedWork(self, work, issued, "receive", size) if self.timers else work

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        raise CommunicationError(
            "a receive from any rank is not supported through shared memory",
            where=f"rank {self.group_rank} of group {self._name}, tag {tag}",
            rule="a receive names its source",
            fix="pass src or group_src",
        )

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self.channel.group_name = name


def _stored(tensor: Tensor) -> Tensor:
    return getattr(tensor, "stored", tensor)


def _signature(operation: str, tensor: Tensor, detail: int = 0) -> tuple[int, int, int, int]:
    return OPERATIONS.index(operation), DTYPES.index(tensor.dtype), tensor.numel(), detail


def _has_reached(counter: memoryview, value: int) -> bool:
    return counter[0] >= value


def _writer(piece: Tensor) -> Callable[[Tensor], object]:
    return lambda slot: typed(slot, piece).copy_(piece)


def reduce_parts(parts: list[Tensor], op: Any, out: Tensor) -> None:
    """Reduce parts in order into `out`, which may be one of the parts; 16-bit floats are accumulated in float32."""
    accumulate_dtype = torch.float32 if out.dtype in (torch.bfloat16, torch.float16) else out.dtype
    first, *others = parts
    combine = next(function for known, function in REDUCTIONS if op == known)
    total = first.to(accumulate_dtype, copy=True) if accumulate_dtype != out.dtype else out.copy_(first)
    for other in others:
        combine(total, other)
    if op == dist.ReduceOp.AVG:
        total.div_(len(parts))
    if total is not out:
        out.copy_(total)
