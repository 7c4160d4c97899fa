"""Chunked overlap of matmuls with collectives: three schedules, and the choice of the number of chunks.

    GatherMatmul    network  | 0 | 1 | 2 | 3 |                 chunks of other ranks are multiplied as they arrive, after the
                    matmuls  | own rows    | 0 | 1 | 2 | 3 |   rows that need no message

    MatmulReduce    network  | prefetch | 0 | 1 | 2 | 3 |      each chunk is sent once it is computed; work that no message
                    matmuls  | 0 | 1 | 2 | 3 | last |          needs comes last

    MatmulScatter   network      | 0 | 1 | 2 | 3 |             rows of other ranks are computed and sent first; own rows
                    matmuls  | 0 | 1 | 2 | 3 | late | early |  overlap with the last messages: first the rows whose messages
                                                               arrive late

The number of chunks is chosen by a cost model of these schedules. A message takes alpha + bytes / bandwidth, and the network
carries one message at a time. The time of a matmul is measured per number of chunks, since few rows are less efficient. The
costs are measured once per shape, on the tensors of the first use. All ranks of the group decide by the maximum of their
predictions.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.collectives import Pending, all_reduce_group
from weft.comm.recorder import unrecorded

CANDIDATES = (1, 2, 4, 8, 16, 32)
REPEATS = 5
MIN_GAIN = 0.01  # fraction of the time by which more chunks must be faster than fewer


class AlphaBeta(NamedTuple):
    """Alpha-beta cost of a message with 1 / count of all bytes."""

    alpha: float
    """Latency in seconds."""
    transfer: float
    """Transfer seconds of all bytes."""

    def seconds(self, count: int) -> float:
        """Seconds of one of `count` messages."""
        return self.alpha + self.transfer / count


class MessageCosts(NamedTuple):
    """Measured seconds of one schedule on one shape."""

    issue: AlphaBeta
    """Start of a message, which blocks this rank."""
    message: AlphaBeta
    """Message from its start until its arrival."""
    chunk: dict[int, float]
    """Matmuls of one chunk, by number of chunks."""
    own: float = 0.0
    """GatherMatmul, MatmulScatter: matmuls that need no message."""
    added: float = 0.0
    """MatmulScatter: addition of all received rows to own rows."""
    prefetch: float = 0.0
    """MatmulReduce: message before all chunks."""
    last: float = 0.0
    """MatmulReduce: matmuls after all chunks."""


class GatherMatmul(NamedTuple):
    """Schedule that multiplies the rows of other ranks as they arrive."""

    start: Callable[[slice], Pending]
    """Start the all-gather of a chunk of rows."""
    own: Callable[[], None]
    """Compute everything that needs no message; resets accumulators."""
    use: Callable[[slice, Tensor], None]
    """Compute everything that needs a chunk, given the gathered rows, [ranks, outer, rows, features]."""

    def run(self, chunks: list[slice]) -> None:
        """Run the schedule."""
        pending = [self.start(rows) for rows in chunks]
        self.own()
        for rows, message in zip(chunks, pending, strict=True):
            self.use(rows, message.wait())

    def measure(self, chunks: dict[int, list[slice]], timer: "RepeatTimer") -> MessageCosts:
        """Time each part of the schedule separately.

        Args:
            chunks: chunks by number of chunks; 1 must be a key.
            timer: timer of the measurement.
        """

        messages = {count: timer.message(partial(self.start, rows[0])) for count, rows in fewest_and_most(chunks)}
        [all_rows] = chunks[1]
        gathered = self.start(all_rows).wait()

        def use_all(rows: list[slice]) -> None:
            for chunk in rows:
                self.use(chunk, gathered[:, :, chunk])

        own = timer.work({0: self.own})
        uses = timer.work({count: partial(use_all, rows) for count, rows in chunks.items()})
        return MessageCosts(*fit(messages), {count: seconds / count for count, seconds in uses.items()}, own=own[0])

    @staticmethod
    def predict(costs: MessageCosts, count: int) -> float:
        """Predict the seconds for a number of chunks."""
        issue, message = costs.issue.seconds(count), costs.message.seconds(count)
        clock = free = 0.0
        arrivals = []
        for _ in range(count):
            clock += issue
            free = max(clock, free) + message
            arrivals.append(free)
        clock += costs.own
        for arrival in arrivals:
            clock = max(clock, arrival) + costs.chunk[count]
        return clock


class MatmulReduce(NamedTuple):
    """Schedule that reduces each chunk once it is computed."""

    make: Callable[[slice], Tensor]
    """Compute a chunk."""
    start: Callable[[slice, Tensor], Pending]
    """Start the reduction of a chunk, given the result of `make`."""
    keep: Callable[[slice, Tensor], None] = lambda rows, received: None
    """Store the reduced chunk."""
    prefetch: Callable[[], Pending] | None = None
    """Start the all-gather of the input of `last`."""
    last: Callable[[Tensor | None], None] = lambda gathered: None
    """Compute everything that no reduction needs, given the result of `prefetch`."""

    def run(self, chunks: list[slice]) -> None:
        """Run the schedule."""
        prefetched = self.prefetch() if self.prefetch else None
        pending = [self.start(rows, self.make(rows)) for rows in chunks]
        self.last(prefetched.wait() if prefetched else None)
        for rows, message in zip(chunks, pending, strict=True):
            self.keep(rows, message.wait())

    def measure(self, chunks: dict[int, list[slice]], timer: "RepeatTimer") -> MessageCosts:
        """Time each part of the schedule separately; arguments as for `GatherMatmul`."""

        def make_all(rows: list[slice]) -> None:
            for chunk in rows:
                self.make(chunk)

        gathered = self.prefetch().wait() if self.prefetch else None
        messages = {}
        for count, rows in fewest_and_most(chunks):
            messages[count] = timer.message(partial(self.start, rows[0], self.make(rows[0])))
        makes = timer.work({count: partial(make_all, rows) for count, rows in chunks.items()})
        last = timer.work({0: partial(self.last, gathered)})
        prefetch = sum(timer.message(self.prefetch)) if self.prefetch else 0.0
        chunk = {count: seconds / count for count, seconds in makes.items()}
        return MessageCosts(*fit(messages), chunk, prefetch=prefetch, last=last[0])

    @staticmethod
    def predict(costs: MessageCosts, count: int) -> float:
        """Predict the seconds for a number of chunks."""
        issue, message = costs.issue.seconds(count), costs.message.seconds(count)
        clock, free = 0.0, costs.prefetch
        for _ in range(count):
            clock += costs.chunk[count] + issue
            free = max(clock, free) + message
        clock = max(clock, costs.prefetch) + costs.last
        return max(clock, free)


class MatmulScatter(NamedTuple):
    """Schedule that sends the rows of other ranks and adds their messages to own rows.

    Own rows are not sent, so that they come last and overlap with the last messages. Messages of the early chunks have arrived
    by then: the matmul accumulates into them at no extra cost. Messages of the late chunks are added separately.
    """

    make: Callable[[slice], Tensor]
    """Compute a chunk of rows of every other rank."""
    start: Callable[[Tensor], Pending]
    """Start the exchange of a chunk, given the result of `make`."""
    store: Callable[[slice, Tensor], None]
    """Store the sum of the received rows in the output."""
    own: Callable[[slice, bool], None]
    """Compute own rows; True: accumulate into the output, False: overwrite it."""
    add: Callable[[slice, Tensor], None]
    """Add received rows to the output."""

    def run(self, chunks: list[slice]) -> None:
        """Run the schedule."""
        pending = [self.start(self.make(rows)) for rows in chunks]
        early, end = len(chunks) // 2, chunks[-1].stop
        middle = chunks[early].start
        self.own(slice(middle, end), False)
        for rows, message in zip(chunks[:early], pending[:early], strict=True):
            self.store(rows, message.wait())
        if middle:
            self.own(slice(0, middle), True)
        for rows, message in zip(chunks[early:], pending[early:], strict=True):
            self.add(rows, message.wait())

    def measure(self, chunks: dict[int, list[slice]], timer: "RepeatTimer") -> MessageCosts:
        """Time each part of the schedule separately; arguments as for `GatherMatmul`."""

        def make_all(rows: list[slice]) -> None:
            for chunk in rows:
                self.make(chunk)

        [all_rows] = chunks[1]
        messages = {
            count: timer.message(partial(self.start, self.make(rows[0]))) for count, rows in fewest_and_most(chunks)
        }
        received = self.start(self.make(all_rows)).wait()
        makes = timer.work({count: partial(make_all, rows) for count, rows in chunks.items()})
        own = timer.work({0: partial(self.own, all_rows, False), 1: partial(self.add, all_rows, received)})
        chunk = {count: seconds / count for count, seconds in makes.items()}
        return MessageCosts(*fit(messages), chunk, own=own[0], added=own[1])

    @staticmethod
    def predict(costs: MessageCosts, count: int) -> float:
        """Predict the seconds for a number of chunks."""
        issue, message = costs.issue.seconds(count), costs.message.seconds(count)
        clock = free = 0.0
        arrivals = []
        for _ in range(count):
            clock += costs.chunk[count] + issue
            free = max(clock, free) + message
            arrivals.append(free)
        early = count // 2
        clock += costs.own * (count - early) / count
        if early:
            clock = max(clock, arrivals[early - 1]) + costs.own * early / count
        for arrival in arrivals[early:]:
            clock = max(clock, arrival) + costs.added / count
        return clock


def split_rows(rows: int, count: int) -> list[slice]:
    """Split rows into chunks whose sizes differ by at most one row, longer chunks first."""
    bounds = [index * (rows // count) + min(index, rows % count) for index in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def choose_count(
    schedule: GatherMatmul | MatmulReduce | MatmulScatter, rows: int, group: dist.ProcessGroup, timer: "RepeatTimer"
) -> int:
    """Choose the number of chunks with the shortest predicted time. All ranks of the group call it and get the same number.

    Args:
        schedule: schedule of the matmul.
        rows: number of rows to split.
        group: group of the messages.
        timer: timer of the measurement.
    """
    counts = [count for count in CANDIDATES if count <= rows]
    with unrecorded():
        costs = schedule.measure({count: split_rows(rows, count) for count in counts}, timer)
        seconds = [schedule.predict(costs, count) for count in counts]
        predicted = torch.tensor(seconds, dtype=torch.float64, device=timer.device)
        all_reduce_group(predicted, group, "max")
    return fewest_chunks(dict(zip(counts, predicted.tolist(), strict=True)))


def fewest_chunks(seconds: dict[int, float]) -> int:
    """Smallest number of chunks whose time is within `MIN_GAIN` of the shortest."""
    shortest = min(seconds.values())
    return min(count for count, taken in seconds.items() if taken <= shortest * (1 + MIN_GAIN))


def fewest_and_most(chunks: dict[int, list[slice]]) -> list[tuple[int, list[slice]]]:
    """Chunks for the smallest and the largest number of chunks."""
    return [(count, chunks[count]) for count in sorted({min(chunks), max(chunks)})]


def fit(messages: dict[int, tuple[float, float]]) -> tuple[AlphaBeta, AlphaBeta]:
    """Fit the costs of issue and message to their seconds for one or two numbers of chunks."""
    few, many = min(messages), max(messages)
    costs = []
    for long, short in zip(messages[few], messages[many], strict=True):
        transfer = max(long - short, 0.0) / (1 / few - 1 / many) if many > few else 0.0
        costs.append(AlphaBeta(max(long - transfer, 0.0), transfer))
    return costs[0], costs[1]


class RepeatTimer(NamedTuple):
    """Timer that returns the best time of several repeats."""

    device: torch.device
    """Device of the computation."""
    clock: Callable[[], float]
    """Clock in seconds."""

    def work(self, works: dict[int, Callable[[], object]]) -> dict[int, float]:
        """Time functions in alternation, in seconds."""
        best: dict[int, float] = {}
        for _ in range(REPEATS):
            for key, work in works.items():
                began = self._now()
                work()
                taken = self._now() - began
                best[key] = min(best.get(key, taken), taken)
        return best

    def message(self, start: Callable[[], Pending]) -> tuple[float, float]:
        """Time the start of a message, and the rest until its arrival, in seconds."""
        times = []
        for _ in range(REPEATS):
            began = self._now()
            message = start()
            issued = self.clock()
            message.wait()
            times.append((issued - began, self._now() - issued))
        return min(issue for issue, _ in times), min(rest for _, rest in times)

    def _now(self) -> float:
        """Time after the completion of all issued work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return self.clock()
