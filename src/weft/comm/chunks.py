"""Chunks of messages beside chunks of products: the three orders in which they run, and what each number of chunks costs.

    GatherMatmul      wire     | 0 | 1 | 2 | 3 |                  the rows of other ranks are used as they come; first of all,
                 products | own rows    | 0 | 1 | 2 | 3 |    the rows that need no message

    MatmulReduce         wire     | ahead | 0 | 1 | 2 | 3 |          each chunk is sent when it is made; what none of them waits
                 products | 0 | 1 | 2 | 3 | last    |        for comes last

    MatmulScatter        wire         | 0 | 1 | 2 | 3 |              what other ranks want is made and sent first; behind the last
                 products | 0 | 1 | 2 | 3 | late | early |   messages, own rows: first those that wait for what comes late

A number of chunks is chosen by a model of these pictures: a message takes alpha + bytes / bandwidth, the wire carries one
at a time, and products take what they take with so many rows, as few rows are less efficient. All of it is measured once for
each shape, on the tensors of its first use, and all ranks of the group choose by the largest of what they predict.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.collectives import Pending, unrecorded

CANDIDATES = (1, 2, 4, 8, 16, 32)
REPEATS = 5
WORTH = 0.01  # of the time: what more chunks must gain over fewer


class Line(NamedTuple):
    """Seconds of a message that is a part of all bytes."""

    alpha: float
    whole: float
    """What all bytes take beyond alpha."""

    def seconds(self, count: int) -> float:
        return self.alpha + self.whole / count


class MessageCosts(NamedTuple):
    """Measured seconds of one form on one shape."""

    issue: Line
    """To start a message: what this rank does for it while it computes nothing."""
    message: Line
    """From then on, until it is there."""
    chunk: dict[int, float]
    """Products of one chunk, by number of chunks."""
    own: float = 0.0
    """GatherMatmul, MatmulScatter: products that need no message."""
    added: float = 0.0
    """MatmulScatter: to add all that has come to what is there."""
    ahead: float = 0.0
    """MatmulReduce: the message in front of all others."""
    last: float = 0.0
    """MatmulReduce: products behind all chunks."""


class GatherMatmul(NamedTuple):
    """Use the rows of other ranks as they come."""

    start: Callable[[slice], Pending]
    """Ask for a chunk of every rank's rows."""
    own: Callable[[], None]
    """Do what needs no message; whatever adds up starts anew."""
    use: Callable[[slice, Tensor], None]
    """Do what needs a chunk, given what `start` has brought, [ranks, outer, rows, features]."""

    def run(self, chunks: list[slice]) -> None:
        """All of it."""
        pending = [self.start(rows) for rows in chunks]
        self.own()
        for rows, message in zip(chunks, pending, strict=True):
            self.use(rows, message.wait())

    def measure(self, chunks: dict[int, list[slice]], watch: "RepeatTimer") -> MessageCosts:
        """Time each part alone.

        Args:
            chunks: by their number, 1 among them.
            watch: takes the time.
        """

        messages = {count: watch.message(partial(self.start, rows[0])) for count, rows in ends(chunks)}
        [everything] = chunks[1]
        brought = self.start(everything).wait()

        def use_all(rows: list[slice]) -> None:
            for chunk in rows:
                self.use(chunk, brought[:, :, chunk])

        own = watch.work({0: self.own})
        uses = watch.work({count: partial(use_all, rows) for count, rows in chunks.items()})
        return MessageCosts(*fit(messages), {count: seconds / count for count, seconds in uses.items()}, own=own[0])

    @staticmethod
    def predict(costs: MessageCosts, count: int) -> float:
        """Seconds with a number of chunks."""
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
    """MatmulReduce each chunk when it is made."""

    make: Callable[[slice], Tensor]
    start: Callable[[slice, Tensor], Pending]
    """MatmulReduce what `make` has made."""
    keep: Callable[[slice, Tensor], None] = lambda rows, received: None
    """Take what has become of it."""
    ahead: Callable[[], Pending] | None = None
    """Ask for what `last` needs."""
    last: Callable[[Tensor | None], None] = lambda brought: None
    """Do what none of the messages waits for, given what `ahead` has brought."""

    def run(self, chunks: list[slice]) -> None:
        """All of it."""
        asked = self.ahead() if self.ahead else None
        pending = [self.start(rows, self.make(rows)) for rows in chunks]
        self.last(asked.wait() if asked else None)
        for rows, message in zip(chunks, pending, strict=True):
            self.keep(rows, message.wait())

    def measure(self, chunks: dict[int, list[slice]], watch: "RepeatTimer") -> MessageCosts:
        """Time each part alone; arguments as of `GatherMatmul`."""

        def make_all(rows: list[slice]) -> None:
            for chunk in rows:
                self.make(chunk)

        brought = self.ahead().wait() if self.ahead else None
        messages = {}
        for count, rows in ends(chunks):
            messages[count] = watch.message(partial(self.start, rows[0], self.make(rows[0])))
        makes = watch.work({count: partial(make_all, rows) for count, rows in chunks.items()})
        last = watch.work({0: partial(self.last, brought)})
        ahead = sum(watch.message(self.ahead)) if self.ahead else 0.0
        chunk = {count: seconds / count for count, seconds in makes.items()}
        return MessageCosts(*fit(messages), chunk, ahead=ahead, last=last[0])

    @staticmethod
    def predict(costs: MessageCosts, count: int) -> float:
        """Seconds with a number of chunks."""
        issue, message = costs.issue.seconds(count), costs.message.seconds(count)
        clock, free = 0.0, costs.ahead
        for _ in range(count):
            clock += costs.chunk[count] + issue
            free = max(clock, free) + message
        clock = max(clock, costs.ahead) + costs.last
        return max(clock, free)


class MatmulScatter(NamedTuple):
    """MatmulReduce other ranks what is theirs, and add what they send to own rows.

    Own rows need no message out, so that they come last, and hide the last ones. What comes early is there by then: the
    product of those rows is added to it as it is made, which costs nothing. What comes late is added by itself.
    """

    make: Callable[[slice], Tensor]
    """Of a chunk of every other rank's rows."""
    start: Callable[[Tensor], Pending]
    """MatmulReduce what `make` has made."""
    place: Callable[[slice, Tensor], None]
    """Put what has come for a chunk of own rows where they will be."""
    own: Callable[[slice, bool], None]
    """Make own rows; added to what is there, or as the first."""
    add: Callable[[slice, Tensor], None]
    """Add what has come to own rows."""

    def run(self, chunks: list[slice]) -> None:
        """All of it."""
        pending = [self.start(self.make(rows)) for rows in chunks]
        early, end = len(chunks) // 2, chunks[-1].stop
        middle = chunks[early].start
        self.own(slice(middle, end), False)
        for rows, message in zip(chunks[:early], pending[:early], strict=True):
            self.place(rows, message.wait())
        if middle:
            self.own(slice(0, middle), True)
        for rows, message in zip(chunks[early:], pending[early:], strict=True):
            self.add(rows, message.wait())

    def measure(self, chunks: dict[int, list[slice]], watch: "RepeatTimer") -> MessageCosts:
        """Time each part alone; arguments as of `GatherMatmul`."""

        def make_all(rows: list[slice]) -> None:
            for chunk in rows:
                self.make(chunk)

        [everything] = chunks[1]
        messages = {count: watch.message(partial(self.start, self.make(rows[0]))) for count, rows in ends(chunks)}
        brought = self.start(self.make(everything)).wait()
        makes = watch.work({count: partial(make_all, rows) for count, rows in chunks.items()})
        own = watch.work({0: partial(self.own, everything, False), 1: partial(self.add, everything, brought)})
        chunk = {count: seconds / count for count, seconds in makes.items()}
        return MessageCosts(*fit(messages), chunk, own=own[0], added=own[1])

    @staticmethod
    def predict(costs: MessageCosts, count: int) -> float:
        """Seconds with a number of chunks."""
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


def cut_rows(rows: int, count: int) -> list[slice]:
    """Chunks of some rows, which differ by one row at most; the first ones are longer."""
    bounds = [number * (rows // count) + min(number, rows % count) for number in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def choose_count(
    form: GatherMatmul | MatmulReduce | MatmulScatter, rows: int, group: dist.ProcessGroup, watch: "RepeatTimer"
) -> int:
    """The number of chunks that is predicted to be fastest; the same on all ranks of the group, which call this together.

    Args:
        form: of the product.
        rows: that are cut.
        group: that the messages go over.
        watch: takes the time.
    """
    counts = [count for count in CANDIDATES if count <= rows]
    with unrecorded():
        costs = form.measure({count: cut_rows(rows, count) for count in counts}, watch)
        seconds = [form.predict(costs, count) for count in counts]
        predicted = torch.tensor(seconds, dtype=torch.float64, device=watch.device)
        dist.all_reduce(predicted, dist.ReduceOp.MAX, group)
    return fewest_chunks(dict(zip(counts, predicted.tolist(), strict=True)))


def fewest_chunks(seconds: dict[int, float]) -> int:
    """The smallest number of chunks that takes as good as the shortest time."""
    shortest = min(seconds.values())
    return min(count for count, taken in seconds.items() if taken <= shortest * (1 + WORTH))


def ends(chunks: dict[int, list[slice]]) -> list[tuple[int, list[slice]]]:
    """The smallest and the largest number of chunks."""
    return [(count, chunks[count]) for count in sorted({min(chunks), max(chunks)})]


def fit(messages: dict[int, tuple[float, float]]) -> tuple[Line, Line]:
    """Lines of issue and message, given those seconds for two numbers of chunks, or one."""
    few, many = min(messages), max(messages)
    lines = []
    for long, short in zip(messages[few], messages[many], strict=True):
        whole = max(long - short, 0.0) / (1 / few - 1 / many) if many > few else 0.0
        lines.append(Line(max(long - whole, 0.0), whole))
    return lines[0], lines[1]


class RepeatTimer(NamedTuple):
    """Takes the best time of some repeats."""

    device: torch.device
    """That computes."""
    clock: Callable[[], float]

    def work(self, works: dict[int, Callable[[], object]]) -> dict[int, float]:
        """Seconds of some works, taking turns."""
        found: dict[int, float] = {}
        for _ in range(REPEATS):
            for number, work in works.items():
                began = self._now()
                work()
                taken = self._now() - began
                found[number] = min(found.get(number, taken), taken)
        return found

    def message(self, start: Callable[[], Pending]) -> tuple[float, float]:
        """Seconds to start a message, and then until it is there."""
        found = []
        for _ in range(REPEATS):
            began = self._now()
            message = start()
            issued = self.clock()
            message.wait()
            found.append((issued - began, self._now() - issued))
        return min(issue for issue, _ in found), min(rest for _, rest in found)

    def _now(self) -> float:
        """When all that was started is done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return self.clock()
