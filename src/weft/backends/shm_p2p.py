"""Buffered, non-blocking point-to-point messages through shared memory, copied once in and once out.

Every rank owns memory that its peers have mapped. A sent message stays there until the receiver has copied it. Each ordered
pair of ranks has two ring buffers. The sender's ring describes the messages: offset, number of elements, dtype and tag. The
receiver's ring acknowledges the messages that it has copied, so that the sender can reuse their memory. Every byte has one
writer.

The memory is sparse: a page is allocated at its first write. The size of a channel is a limit, not a cost.
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

CHANNEL_BYTES = 2**35  # size of a rank's channel: its rings, and its messages that have not been received
RECORDS = 4096  # maximum number of messages from one rank to another that have not been received
LINE_INTS = 8  # 64 bytes: values that are written at different times are on separate cache lines
RING_INTS = LINE_INTS * (1 + RECORDS)
SPINS, YIELD_SECONDS, SLEEP_SECONDS, MAX_SLEEP_SECONDS = 100, 1e-4, 50e-6, 1e-3
ALL_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


class _Message(NamedTuple):
    """Description of a message, as the sender writes it into its ring."""

    start: int
    """Offset in the sender's channel, in bytes."""
    elements: int
    dtype: int
    """Index into ALL_DTYPES."""
    tag: int

    def __str__(self) -> str:
        return f"{self.elements} elements of {ALL_DTYPES[self.dtype]}"


class SendWork(dist.Work):
    """Work of a send, which is already complete. It keeps no reference to the tensor."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class ReceiveWork(dist.Work):
    """Work of a receive. Several receives may be waited for in any order."""

    def __init__(self, channel: "P2PChannel", tensor: Tensor, source: int, tag: int):
        super().__init__()
        self.channel, self.tensor, self.source, self.tag = channel, tensor, source, tag
        self.done = False
        self.error: CommunicationError | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is in the tensor.

        Args:
            timeout: by default the timeout of the group.

        Raises:
            CommunicationError: the message has another dtype or size than the tensor, or did not arrive within the timeout.
        """
        seconds = timeout.total_seconds() if timeout else self.channel.seconds
        if not wait_until(self.is_completed, seconds):
            raise CommunicationError(
                f"no message from rank {self.source} arrived within {seconds:g} s",
                where=f"rank {self.channel.rank} of group {self.channel.group_name}, tag {self.tag}",
                rule="every receive has a matching send",
                fix="look for a rank that ended, hangs, or took another branch",
            )
        if self.error:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """True if the receive has finished or failed; receives the message if it has arrived."""
        if not self.done:
            self.channel.fetch(self.source)
        return self.done

    def is_success(self) -> bool:
        """True if the message is in the tensor."""
        return self.is_completed() and self.error is None


class P2PChannel:
    """Point-to-point messages of one rank with its peers.

    Messages are matched with receives per source and tag, in the order of the calls. One thread at a time may use a channel.
    """

    def __init__(self, memories: list[Tensor], rank: int, seconds: float):
        """
        Args:
            memories: channel memory of each rank of the group, uint8 [CHANNEL_BYTES], initially zero.
            rank: this rank within the group.
            seconds: timeout of the group.
        """
        ranks = range(len(memories))
        self.memories, self.rank, self.seconds, self.group_name = memories, rank, seconds, ""
        rings = [_rings(memory, len(ranks)) for memory in memories]
        self.outgoing = [_Ring(rings[rank][peer]) for peer in ranks]
        self.incoming = [_Ring(rings[peer][rank]) for peer in ranks]
        self.acks_out = [_Ring(rings[rank][len(ranks) + peer]) for peer in ranks]
        self.acks_in = [_Ring(rings[peer][len(ranks) + rank]) for peer in ranks]
        self.allocator = _Allocator(len(rings[rank]) * RING_INTS * 8, CHANNEL_BYTES)
        self.posted: list[list[ReceiveWork]] = [[] for _ in ranks]
        """Receives without a message yet, by source."""
        self.unexpected: list[list[_Message]] = [[] for _ in ranks]
        """Messages without a receive yet, by source."""

    def send(self, tensor: Tensor, destination: int, tag: int) -> SendWork:
        """Copy a tensor into the channel and return. Blocks only while RECORDS messages or CHANNEL_BYTES are unreceived.

        Raises:
            CommunicationError: the message is longer than a channel, or the channel stays full until the timeout.
        """
        size = -(-tensor.numel() * tensor.element_size() // 64) * 64 or 64
        if size > self.allocator.stop - self.allocator.start:
            raise CommunicationError(
                f"a message of {size / 2**30:.1f} GB",
                where=f"send to rank {destination} of group {self.group_name}",
                rule=f"a message is shorter than a channel of {CHANNEL_BYTES / 2**30:.0f} GB",
                fix="send the tensor in parts",
            )
        start = wait_until(lambda: self._allocate(destination, size), self.seconds)
        if not start:
            raise CommunicationError(
                f"rank {destination} of group {self.group_name} did not receive its messages within {self.seconds:g} s",
                where=f"rank {self.rank} of the group, in a send with tag {tag}",
                rule=f"at most {RECORDS} messages, or {CHANNEL_BYTES / 2**30:.0f} GB, wait for their receivers",
                fix="look for a rank that ended, hangs, or took another branch",
            )
        typed(self.memories[self.rank][start:], tensor).copy_(tensor.detach())
        self.outgoing[destination].put(_Message(start, tensor.numel(), ALL_DTYPES.index(tensor.dtype), tag))
        return SendWork()

    def _allocate(self, destination: int, size: int) -> int | None:
        """Allocate memory for a message. The offset is never 0, since the rings come first."""
        for ring in self.acks_in:
            for start, *_ in ring.take():
                self.allocator.free(start)
        if self.outgoing[destination].position - self.acks_in[destination].position == RECORDS:
            return None
        return self.allocator.reserve(size)

    def receive(self, tensor: Tensor, source: int, tag: int) -> ReceiveWork:
        """Post a receive for the next message from a source with a tag."""
        receive = ReceiveWork(self, tensor, source, tag)
        for index, message in enumerate(self.unexpected[source]):
            if message.tag == tag:
                del self.unexpected[source][index]
                self._deliver(message, receive)
                return receive
        self.posted[source].append(receive)
        return receive

    def fetch(self, source: int) -> None:
        """Read the ring of a source: deliver messages with a posted receive, and keep the other messages."""
        for record in self.incoming[source].take():
            message = _Message(*record)
            posted = self.posted[source]
            index = next((index for index, receive in enumerate(posted) if receive.tag == message.tag), None)
            if index is None:
                self.unexpected[source].append(message)
            else:
                self._deliver(message, posted.pop(index))

    def _deliver(self, message: _Message, receive: ReceiveWork) -> None:
        tensor, source = receive.tensor, receive.source
        expected = message._replace(elements=tensor.numel(), dtype=ALL_DTYPES.index(tensor.dtype))
        if expected == message:
            tensor.detach().copy_(typed(self.memories[source][message.start :], tensor))
        else:
            receive.error = CommunicationError(
                f"rank {self.rank} receives {expected}; rank {source} sent {message}",
                where=f"group {self.group_name}, tag {message.tag}",
                rule="messages are received in the order, size and dtype in which they were sent",
                fix="look for a branch or a size that depends on the rank",
            )
        self.acks_out[source].put((message.start,))
        receive.done = True


class _Ring:
    """Single-producer, single-consumer ring buffer of records. Writer and reader each keep their own position."""

    def __init__(self, ints: memoryview):
        self.count, self.lines = ints[:1], ints[LINE_INTS:]
        self.position = 0

    def put(self, record: tuple[int, ...]) -> None:
        """Write a record. The caller ensures that the record it overwrites has been read."""
        line = self.position % RECORDS * LINE_INTS
        self.lines[line : line + len(record)] = array("q", record)
        self.position += 1
        self.count[0] = self.position  # after the record: x86 keeps the order of stores

    def take(self) -> Iterator[list[int]]:
        """Read all new records."""
        while self.position < self.count[0]:
            line = self.position % RECORDS * LINE_INTS
            self.position += 1
            yield self.lines[line : line + len(_Message._fields)].tolist()


def _rings(memory: Tensor, ranks: int) -> list[memoryview]:
    """Split the front of a channel into rings: one per destination for messages, then one per source for acknowledgements."""
    header: Any = memory[: 2 * ranks * RING_INTS * 8].numpy()
    ints = memoryview(header).cast("q")
    return [ints[start : start + RING_INTS] for start in range(0, len(ints), RING_INTS)]


class _Allocator:
    """First-fit allocator of byte ranges. First fit reuses the same pages."""

    def __init__(self, start: int, stop: int):
        self.start, self.stop = start, stop
        self.gaps = [(start, stop)]  # free ranges, sorted and never adjacent
        self.stops: dict[int, int] = {}  # end of each allocated range, by its start

    def reserve(self, size: int) -> int | None:
        """Allocate a range and return its start; None if no gap is long enough."""
        for index, (start, stop) in enumerate(self.gaps):
            if stop - start >= size:
                self.gaps[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                self.stops[start] = start + size
                return start
        return None

    def free(self, start: int) -> None:
        """Free an allocated range and merge it with adjacent gaps."""
        stop = self.stops.pop(start)
        index = bisect(self.gaps, (start, stop))
        if index < len(self.gaps) and self.gaps[index][0] == stop:
            stop = self.gaps.pop(index)[1]
        if index and self.gaps[index - 1][1] == start:
            index -= 1
            start = self.gaps.pop(index)[0]
        self.gaps.insert(index, (start, stop))


def typed(memory: Tensor, like: Tensor) -> Tensor:
    """View the first bytes of a buffer as a tensor with the shape and dtype of another."""
    return memory[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def wait_until(attempt: Callable[[], Any], seconds: float) -> Any:
    """Call until the result is true or the time is over, and return the last result. Spins first, then yields and sleeps."""
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
            # Polling takes CPU time from computation.
            time.sleep(min(max(SLEEP_SECONDS, passed / 10), MAX_SLEEP_SECONDS))
        else:
            break
    return result
