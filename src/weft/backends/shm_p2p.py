"""Messages from one rank to another through shared memory: copied once in and once out, and never waited for by the sender.

Every rank owns memory that its peers have mapped. What it sends stays there until the receiver has copied it. A ring for
each pair of ranks says where messages are, of which format, how long and under which tag; a ring the other way says which
of them have been taken, so that their place is used again. Every byte has one writer.

The memory is sparse: a page exists once it has been written. The size of a channel is a limit, not a cost.
"""

import os
import time
from array import array
from bisect import bisect
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import CommunicationError

MAILBOX_BYTES = 2**35  # of one rank: its rings, and its messages that have not been taken
RECORDS = 4096  # messages of one rank to another that have not been taken
LINE_INTS = 8  # 64 bytes: what is written at different times stands on cache lines of its own
RING_INTS = LINE_INTS * (1 + RECORDS)
SPINS, YIELD_SECONDS, SLEEP_SECONDS, LONGEST_SLEEP_SECONDS = 100, 1e-4, 50e-6, 1e-3
FORMATS = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


class _Message(NamedTuple):
    """A message as its sender announces it."""

    start: int
    """Its place in the sender's channel, in bytes."""
    numbers: int
    dtype: int
    """Index into FORMATS."""
    tag: int

    def __str__(self) -> str:
        return f"{self.numbers} numbers of {FORMATS[self.dtype]}"


class Sent(dist.Work):
    """Of a message that has been sent. It does not keep the tensor."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class ReceiveWork(dist.Work):
    """A message that is wanted. Several may be waited for in any order."""

    def __init__(self, channel: "P2PChannel", tensor: Tensor, source: int, tag: int):
        super().__init__()
        self.channel, self.tensor, self.source, self.tag = channel, tensor, source, tag
        self.done = False
        self.error: CommunicationError | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the message is in the tensor.

        Raises:
            CommunicationError: it was sent with another format or size, or did not come within the timeout, by default
                that of the group.
        """
        seconds = timeout.total_seconds() if timeout else self.channel.seconds
        if not wait_until(self.is_completed, seconds):
            raise CommunicationError(
                f"no message of rank {self.source} came within {seconds:g} s",
                where=f"rank {self.channel.rank} of group {self.channel.group_name}, tag {self.tag}",
                rule="every receive has a send",
                fix="look for a rank that ended, hangs, or took another branch",
            )
        if self.error:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Whether the wait is over; takes the message if it is there."""
        if not self.done:
            self.channel.fetch(self.source)
        return self.done

    def is_success(self) -> bool:
        """Whether the message is in the tensor."""
        return self.is_completed() and self.error is None


class P2PChannel:
    """What one rank sends to others and receives from them. Messages of one source and tag are matched with receives in the
    order of the calls; other tags and sources do not matter to them. One thread at a time may use it."""

    def __init__(self, memories: list[Tensor], rank: int, seconds: float):
        """
        Args:
            memories: uint8 [MAILBOX_BYTES], of each rank of the group; zeros.
            rank: of this process.
            seconds: timeout of the group.
        """
        ranks = range(len(memories))
        self.memories, self.rank, self.seconds, self.group_name = memories, rank, seconds, ""
        rings = [_rings(memory, len(ranks)) for memory in memories]
        self.outgoing = [_Ring(rings[rank][peer]) for peer in ranks]
        self.incoming = [_Ring(rings[peer][rank]) for peer in ranks]
        self.taken = [_Ring(rings[rank][len(ranks) + peer]) for peer in ranks]  # by this rank
        self.given = [_Ring(rings[peer][len(ranks) + rank]) for peer in ranks]  # taken by others
        self.area = _Area(len(rings[rank]) * RING_INTS * 8, MAILBOX_BYTES)
        self.wanted: list[list[ReceiveWork]] = [[] for _ in ranks]
        self.arrived: list[list[_Message]] = [[] for _ in ranks]

    def send(self, tensor: Tensor, destination: int, tag: int) -> Sent:
        """Copy a tensor for another rank at once. It blocks only if RECORDS messages or MAILBOX_BYTES have not been taken.

        Raises:
            CommunicationError: the message is longer than a channel, or finds no place within the timeout.
        """
        size = -(-tensor.numel() * tensor.element_size() // 64) * 64 or 64
        if size > self.area.stop - self.area.start:
            raise CommunicationError(
                f"a message of {size / 2**30:.1f} GB",
                where=f"send to rank {destination} of group {self.group_name}",
                rule=f"a message is shorter than a channel of {MAILBOX_BYTES / 2**30:.0f} GB",
                fix="send the tensor in parts",
            )
        start = wait_until(lambda: self._find_place(destination, size), self.seconds)
        if not start:
            raise CommunicationError(
                f"rank {destination} of group {self.group_name} did not take its messages within {self.seconds:g} s",
                where=f"rank {self.rank} of the group, which sends one more under tag {tag}",
                rule=f"at most {RECORDS} messages, or {MAILBOX_BYTES / 2**30:.0f} GB, wait for their receivers",
                fix="look for a rank that ended, hangs, or took another branch",
            )
        typed(self.memories[self.rank][start:], tensor).copy_(tensor.detach())
        self.outgoing[destination].put(_Message(start, tensor.numel(), FORMATS.index(tensor.dtype), tag))
        return Sent()

    def _find_place(self, destination: int, size: int) -> int | None:
        """Where a message may be written. It is never 0, where the rings are."""
        for ring in self.given:
            for start, *_ in ring.take():
                self.area.free(start)
        if self.outgoing[destination].number - self.given[destination].number == RECORDS:
            return None
        return self.area.reserve(size)

    def receive(self, tensor: Tensor, source: int, tag: int) -> ReceiveWork:
        """Want the next message of a rank and a tag in a tensor."""
        receive = ReceiveWork(self, tensor, source, tag)
        for place, message in enumerate(self.arrived[source]):
            if message.tag == tag:
                del self.arrived[source][place]
                self._deliver(message, receive)
                return receive
        self.wanted[source].append(receive)
        return receive

    def fetch(self, source: int) -> None:
        """Take what has come from a rank, as far as it is wanted."""
        for record in self.incoming[source].take():
            message = _Message(*record)
            wanted = self.wanted[source]
            place = next((place for place, receive in enumerate(wanted) if receive.tag == message.tag), None)
            if place is None:
                self.arrived[source].append(message)
            else:
                self._deliver(message, wanted.pop(place))

    def _deliver(self, message: _Message, receive: ReceiveWork) -> None:
        tensor, source = receive.tensor, receive.source
        wanted = message._replace(numbers=tensor.numel(), dtype=FORMATS.index(tensor.dtype))
        if wanted == message:
            tensor.detach().copy_(typed(self.memories[source][message.start :], tensor))
        else:
            receive.error = CommunicationError(
                f"rank {self.rank} receives {wanted}; rank {source} sent {message}",
                where=f"group {self.group_name}, tag {message.tag}",
                rule="a message is received in the order, with the size and in the format in which it was sent",
                fix="look for a branch or a size that depends on the rank",
            )
        self.taken[source].put((message.start,))
        receive.done = True


class _Ring:
    """Records that one rank writes and another reads, each keeping its own count."""

    def __init__(self, ints: memoryview):
        self.count, self.lines = ints[:1], ints[LINE_INTS:]
        self.number = 0

    def put(self, record: tuple[int, ...]) -> None:
        """The writer sees to it that the record which stood here has been read."""
        line = self.number % RECORDS * LINE_INTS
        self.lines[line : line + len(record)] = array("q", record)
        self.number += 1
        self.count[0] = self.number  # after the record: x86 keeps the order of stores

    def take(self) -> Iterator[list[int]]:
        while self.number < self.count[0]:
            line = self.number % RECORDS * LINE_INTS
            self.number += 1
            yield self.lines[line : line + len(_Message._fields)].tolist()


def _rings(memory: Tensor, ranks: int) -> list[memoryview]:
    """One for messages to each rank, and one for what was taken of each rank."""
    front: Any = memory[: 2 * ranks * RING_INTS * 8].numpy()
    ints = memoryview(front).cast("q")
    return [ints[start : start + RING_INTS] for start in range(0, len(ints), RING_INTS)]


class _Area:
    """Bytes of which parts are in use. The first free part that is long enough is used: the same pages again and again."""

    def __init__(self, start: int, stop: int):
        self.start, self.stop = start, stop
        self.gaps = [(start, stop)]  # in order, and never touching each other
        self.stops: dict[int, int] = {}  # of the parts in use, by their start

    def reserve(self, size: int) -> int | None:
        for place, (start, stop) in enumerate(self.gaps):
            if stop - start >= size:
                self.gaps[place : place + 1] = [(start + size, stop)] if stop - start > size else []
                self.stops[start] = start + size
                return start
        return None

    def free(self, start: int) -> None:
        stop = self.stops.pop(start)
        place = bisect(self.gaps, (start, stop))
        if place < len(self.gaps) and self.gaps[place][0] == stop:
            stop = self.gaps.pop(place)[1]
        if place and self.gaps[place - 1][1] == start:
            place -= 1
            start = self.gaps.pop(place)[0]
        self.gaps.insert(place, (start, stop))


def typed(memory: Tensor, like: Tensor) -> Tensor:
    """The front of some bytes, as a tensor of the shape and format of another."""
    return memory[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def wait_until(attempt: Callable[[], Any], seconds: float) -> Any:
    """Call until the result is true, or the time is over: first awake, then leaving the core to others; the last result."""
    for _ in range(SPINS):
        result = attempt()
        if result:
            return result
    started = time.monotonic()
    while not (result := attempt()):
        passed = time.monotonic() - started
        if passed < YIELD_SECONDS:
            os.sched_yield()
        elif passed < seconds:
            time.sleep(min(max(SLEEP_SECONDS, passed / 10), LONGEST_SLEEP_SECONDS))  # looking takes from who computes
        else:
            break
    return result
