"""Collectives of CPU ranks on one host through shared memory: a message is copied once in and once out.

Gloo sends the same bytes through loopback TCP, which costs several copies, system calls and a thread that takes a core
from the computation. Here every rank owns a slab of anonymous memory that its peers have mapped. A collective goes in
rounds: each rank writes its piece into a slot of its own slab and raises its counter, waits for the counters of the
others, and reads from their slabs what it needs; a slot is written again once all have read it.

Every collective blocks until this rank's part is done, as on one stream of an accelerator. Messages from one rank to another
go through `channel`, every operation that is not written here through gloo. Sums are made in the order of ranks, and in float32
for shorter formats: all ranks have the same bits, run after run.
"""
# mypy: disable-error-code="call-arg,override,assignment,attr-defined,arg-type"
# The stubs of ProcessGroup list what may be called from Python; torch.distributed itself calls one form of each.

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
from functools import cached_property, partial, wraps
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from weft.backends.instrumented import InstrumentedGroup
from weft.backends.shm_p2p import LINE_INTS, MAILBOX_BYTES, P2PChannel, typed, wait_until
from weft.errors import CommunicationError

SLOT_BYTES = 2**20  # small enough to stay in cache between the writer and its readers
NUM_SLOTS = 2  # one is written while slower ranks still read the other
HEADER_BYTES = 4096
SMALL = 4096  # numbers that a rank had better add up itself than wait for the shares of others
SIGNATURE_INTS = 4  # what is done, of which format, how many numbers, and a detail
SLAB_BYTES = HEADER_BYTES + NUM_SLOTS * SLOT_BYTES + MAILBOX_BYTES
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
    """A group of some ranks of one host; None where they cannot share memory. All of them come to the same decision.

    Only Linux on x86-64 keeps the order of stores that the counters rely on, and a hardened host hides the descriptors of
    other processes.

    Args:
        store: of these ranks alone.
        rank, size: this rank among them, and their number.
        timeout: of a collective.
        make_gloo: makes a gloo group of them, for what is not written here.
    """
    descriptor = -1
    if can_share():
        descriptor = os.memfd_create(SLAB_NAME)
        os.ftruncate(descriptor, SLAB_BYTES)
    store.set(f"slab/{rank}", json.dumps([os.getpid(), descriptor]))
    said = [_read_slab_place(store.get(f"slab/{peer}")) for peer in range(size)]
    slabs: list[_Slab] = []
    if all(number >= 0 and _is_of_this_job(process, number) for process, number in said):
        with suppress(OSError, RuntimeError):
            slabs = [_Slab(f"/proc/{process}/fd/{number}") for process, number in said]
    store.set(f"open/{rank}", str(len(slabs)))
    shared = all(int(store.get(f"open/{peer}")) == size for peer in range(size))
    if descriptor >= 0:
        os.close(descriptor)  # mappings hold the memory from here on
    return SharedMemoryGroup(slabs, make_gloo, rank, timeout) if shared else None


def _read_slab_place(text: bytes) -> tuple[int, int]:
    """Process and file descriptor, as a rank has said them; (-1, -1) where it says something else."""
    try:
        process, number = json.loads(text)
        return int(process), int(number)
    except (ValueError, TypeError):
        return -1, -1


def _is_of_this_job(process: int, descriptor: int) -> bool:
    """Whether a process was started by this user and by the process that started this one, and the descriptor is a slab.

    What a key of a store says is not enough to map what it names into memory.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        parent = int(status.split("\nPPid:", 1)[1].split(maxsplit=1)[0])
        path = Path(f"/proc/{process}/fd/{descriptor}")
        slab = path.stat()
        # A process whose parent has died has another one: only those of the job are left then, or none.
        return (
            parent == os.getppid()
            and slab.st_uid == os.geteuid()
            and slab.st_size == SLAB_BYTES
            and os.readlink(path).startswith(f"/memfd:{SLAB_NAME} ")
        )
    except (OSError, ValueError, IndexError):
        return False


def can_share() -> bool:
    """Whether this platform is one that can."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


class _Slab:
    """The memory that one rank writes and all ranks of a group read. It goes when its last process goes."""

    def __init__(self, path: str):
        memory = torch.from_file(path, shared=True, size=SLAB_BYTES, dtype=torch.uint8)
        # A core dump would fill in every page of the sparse channel.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(SLAB_BYTES), DONT_DUMP)
        ints = memoryview(memory[:HEADER_BYTES].numpy()).cast("q")
        lines = [ints[start : start + LINE_INTS] for start in range(0, len(ints), LINE_INTS)]
        self.written, self.read = lines[0], lines[1]  # rounds its rank has written and read
        self.signatures = lines[2 : 2 + NUM_SLOTS]
        self.slots = memory[HEADER_BYTES:-MAILBOX_BYTES].view(NUM_SLOTS, SLOT_BYTES).unbind()
        self.channel = memory[-MAILBOX_BYTES:]


def _observed(collective: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """Take gradients as they are held (`precision/fp16_backward.py`), and tell `leavers` when a collective is done."""

    @wraps(collective)
    def observed(self: "SharedMemoryGroup", *args: Any) -> dist.Work:
        issued = time.perf_counter()
        work = collective(self, *tree_map_only(Tensor, _held, args))
        for leaver in self.leavers:
            leaver()
        if self.timers:
            ended = time.perf_counter()
            self.tell(issued, ended, ended, ended, ended)
        return work

    return observed


class SharedMemoryGroup(InstrumentedGroup):
    """Ranks that share memory. The methods are those that torch.distributed calls; see its functions for their meaning.

    `observers` of all groups are called with (group, operation, bytes, dtype) before each collective: the bytes of the full
    tensor (the gathered or not yet scattered side), or of all_to_all those that leave this rank. `leavers`
    are called when this rank's part is done, or has been handed over to gloo.

    Every collective raises CommunicationError, on every rank, when the ranks do not call the same operation with the same
    format and size, or when one of them does not come within the timeout. The group is of no use then.
    """

    def __init__(self, slabs: list[_Slab], make_gloo: Callable[[], Any], rank: int, timeout: timedelta):
        super().__init__(rank, len(slabs))
        self.slabs, self.own = slabs, slabs[rank]
        self.make_gloo = make_gloo
        self.seconds, self.round = timeout.total_seconds(), 0
        self.channel = P2PChannel([slab.channel for slab in slabs], rank, self.seconds)

    is_blocking: ClassVar[bool] = True
    """Nothing can be computed while a collective is under way, also not behind `async_op`."""
    observers: ClassVar[list[Callable[[dist.ProcessGroup, str, int, torch.dtype], None]]] = []
    leavers: ClassVar[list[Callable[[], None]]] = []

    # Rounds

    @contextmanager
    def _exchange(self, signature: tuple[int, ...], fill: Callable[[Tensor], object]) -> Iterator[list[Tensor]]:
        """One round: `fill` writes this rank's slot; inside the context the slots of all ranks may be read."""
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
        """Until a counter of every rank has come to a value."""
        for peer, slab in enumerate(self.slabs):
            if not wait_until(partial(_has_come, getattr(slab, counter), value), self.seconds):
                raise CommunicationError(
                    f"rank {peer} of group {self._name} did not come within {self.seconds:.0f} s",
                    where=f"rank {self.place} of the group, in its collective {self.round}",
                    rule="all ranks of a group call the same collectives in the same order",
                    fix="look for a rank that ended, hangs, or took another branch",
                )

    def _mismatch(self, ours: tuple[int, ...], peer: int, theirs: tuple[int, ...]) -> CommunicationError:
        def words(signature: tuple[int, ...]) -> str:
            operation, dtype, count, detail = signature
            return f"{OPERATIONS[operation]} of {count} numbers of {DTYPES[dtype]}, detail {detail}"

        return CommunicationError(
            f"rank {self.place} calls {words(ours)}; rank {peer} calls {words(theirs)}",
            where=f"group {self._name}, round {self.round}",
            rule="all ranks of a group call the same collectives in the same order, with the same sizes and formats",
            fix="look for a branch or a size that depends on the rank",
        )

    def _observe(self, operation: str, numbers: int, dtype: torch.dtype) -> None:
        for observer in self.observers:
            observer(self, operation, numbers * dtype.itemsize, dtype)

    # Collectives

    @_observed
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        self._observe("all_reduce", tensor.numel(), tensor.dtype)
        if not self._takes(tensor, op):
            return self.gloo.allreduce(tensors, opts)
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        signature = _signature("all_reduce", tensor)
        for piece in flat.view(-1).split(SLOT_BYTES // tensor.element_size()):
            if self.ranks == 2 or piece.numel() < SMALL:
                with self._exchange(signature, _writer(piece)) as slots:
                    reduce_parts([typed(slot, piece) for slot in slots], op, piece)
                continue
            shares = list(piece.tensor_split(self.ranks))  # every rank reduces one, and all fetch the results
            starts = [0, *accumulate(share.numel() for share in shares)]
            mine = slice(starts[self.place], starts[self.place + 1])
            with self._exchange(signature, _writer(piece)) as slots:
                reduce_parts([typed(slot, piece)[mine] for slot in slots], op, shares[self.place])
            with self._exchange(signature, _writer(shares[self.place])) as slots:
                for share, slot in zip(shares, slots, strict=True):
                    share.copy_(typed(slot, share))
        if flat is not tensor:
            tensor.copy_(flat)
        return _done(tensors)

    @_observed
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        self._observe("all_gather", output.numel(), input.dtype)
        if not self._takes(input):
            return self.gloo._allgather_base(output, input, opts)
        self._gather(list(output.view(self.ranks, -1).unbind()), input)
        return _done([output])

    @_observed
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        (tensors,), (input,) = outputs, inputs
        self._observe("all_gather", sum(tensor.numel() for tensor in tensors), input.dtype)
        sizes_differ = any(tensor.numel() != input.numel() for tensor in tensors)
        if not self._takes(input) or sizes_differ or not all(tensor.is_contiguous() for tensor in tensors):
            return self.gloo.allgather(outputs, inputs, opts)
        self._gather([tensor.view(-1) for tensor in tensors], input)
        return _done(outputs)

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
        if not self._takes(input, op) or not output.is_contiguous():
            return self.gloo._reduce_scatter_base(output, input, opts)
        signature, step = _signature("reduce_scatter", input), SLOT_BYTES // input.element_size() // self.ranks
        rows, flat = input.reshape(self.ranks, -1), output.view(-1)
        for start, piece in zip(range(0, flat.numel(), step), flat.split(step), strict=False):
            columns = rows[:, start : start + piece.numel()]
            with self._exchange(signature, _writer(columns)) as slots:
                reduce_parts([typed(slot, columns)[self.place] for slot in slots], op, piece)
        return _done([output])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        (output,), (tensors,) = outputs, inputs
        if any(tensor.numel() != output.numel() for tensor in tensors):
            return self.gloo.reduce_scatter(outputs, inputs, opts)
        return self.reduce_scatter_single(output, torch.cat([tensor.reshape(-1) for tensor in tensors]), opts)

    @_observed
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        width = input[:1].numel() if len(input) else output[:1].numel()
        sends = torch.tensor(input_splits or [len(input) // self.ranks] * self.ranks) * width
        self._observe("all_to_all", input.numel() - int(sends[self.place]), input.dtype)
        if input.dtype not in DTYPES:
            return self.gloo.alltoall_base(output, input, output_splits, input_splits, opts)
        sizes = torch.empty(self.ranks, self.ranks, dtype=torch.int64)
        with self._exchange(_signature("all_to_all", sends), _writer(sends)) as slots:
            for row, slot in zip(sizes, slots, strict=True):
                row.copy_(typed(slot, row))
        takes = [rows * width for rows in output_splits or [len(output) // self.ranks] * self.ranks]
        if takes != sizes[:, self.place].tolist():
            raise CommunicationError(
                f"rank {self.place} expects {takes} numbers; its peers send {sizes[:, self.place].tolist()}",
                where=f"all_to_all of group {self._name}",
                rule="what a rank sends to another is what that one expects",
                fix="exchange the sizes first",
            )
        step = SLOT_BYTES // input.element_size() // self.ranks
        outgoing, incoming = input.reshape(-1).split(sends.tolist()), output.view(-1).split(takes)
        largest = int(sizes.max())
        signature = (OPERATIONS.index("all_to_all"), DTYPES.index(input.dtype), largest, 1)
        for start in range(0, largest, step):
            pieces = [tensor[start : start + step] for tensor in outgoing]

            def write(slot: Tensor, pieces: list[Tensor] = pieces) -> None:
                places = slot.view(input.dtype)[: self.ranks * step].view(self.ranks, step)
                for place, piece in zip(places, pieces, strict=True):
                    place[: piece.numel()].copy_(piece)

            with self._exchange(signature, write) as slots:
                for tensor, slot in zip(incoming, slots, strict=True):
                    piece = tensor[start : start + step]
                    place = slot.view(input.dtype)[self.place * step : self.place * step + piece.numel()]
                    piece.copy_(place)
        return _done([output])

    @_observed
    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        self._observe("broadcast", tensor.numel(), tensor.dtype)
        if not self._takes(tensor):
            return self.gloo.broadcast(tensors, opts)
        flat, root = tensor if tensor.is_contiguous() else tensor.contiguous(), opts.rootRank
        for piece in flat.view(-1).split(SLOT_BYTES // tensor.element_size()):
            fill = _writer(piece) if root == self.place else lambda slot: None
            with self._exchange(_signature("broadcast", tensor, root), fill) as slots:
                if root != self.place:
                    piece.copy_(typed(slots[root], piece))
        if flat is not tensor:
            tensor.copy_(flat)
        return _done(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        with self._exchange((OPERATIONS.index("barrier"), 0, 0, 0), lambda slot: None):
            pass
        return _done([])

    def _takes(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> bool:
        return tensor.dtype in DTYPES and any(op == known for known, _ in REDUCTIONS) and tensor.numel() > 0

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        for tensor in tensors:
            self.allreduce([tensor], opts)
        return _done(tensors)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input, opts)
        return _done(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, opts)
        return _done(outputs)

    # As torch 2.11 and 2.12 name them

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # From one rank to another

    @_observed
    def send(self, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        self._observe("send", tensor.numel(), tensor.dtype)
        return self.channel.send(tensor, destination, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        return self.channel.receive(_held(tensor), source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        raise CommunicationError(
            "a receive from any rank",
            where=f"rank {self.place} of group {self._name}, tag {tag}",
            rule="through shared memory, a receive names its source",
            fix="give src or group_src",
        )

    # Through gloo, whose threads and connections are made when it is first wanted, by all ranks of the group

    @cached_property
    def gloo(self) -> Any:
        return self.make_gloo()

    def reduce(self, *args: Any) -> dist.Work:
        return self.gloo.reduce(*args)

    def gather(self, *args: Any) -> dist.Work:
        return self.gloo.gather(*args)

    def scatter(self, *args: Any) -> dist.Work:
        return self.gloo.scatter(*args)

    def alltoall(self, *args: Any) -> dist.Work:
        return self.gloo.alltoall(*args)

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self.channel.group_name = name


def _held(tensor: Tensor) -> Tensor:
    return getattr(tensor, "carried", tensor)


def _signature(operation: str, tensor: Tensor, detail: int = 0) -> tuple[int, int, int, int]:
    return OPERATIONS.index(operation), DTYPES.index(tensor.dtype), tensor.numel(), detail


def _has_come(counter: memoryview, value: int) -> bool:
    return counter[0] >= value


def _writer(piece: Tensor) -> Callable[[Tensor], object]:
    return lambda slot: typed(slot, piece).copy_(piece)


def reduce_parts(parts: list[Tensor], op: Any, out: Tensor) -> None:
    """Reduce parts in their order into `out`, which may be one of them; short floats are added up in float32."""
    wide = torch.float32 if out.dtype in (torch.bfloat16, torch.float16) else out.dtype
    first, *others = parts
    combine = next(function for known, function in REDUCTIONS if op == known)
    total = first.to(wide, copy=True) if wide != out.dtype else out.copy_(first)
    for other in others:
        combine(total, other)
    if op == dist.ReduceOp.AVG:
        total.div_(len(parts))
    if total is not out:
        out.copy_(total)


def _done(result: Any) -> dist.Work:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)
