"""Chunks of messages beside chunks of products: the two orders in which they run, and what each number of chunks costs.

    Receive      wire     | 0 | 1 | 2 | 3 |                  the rows of other ranks are used as they come; first of all,
                 products | own rows    | 0 | 1 | 2 | 3 |    the rows that need no message

    Send         wire     | ahead | 0 | 1 | 2 | 3 |          each chunk is sent when it is made; what none of them waits
                 products | 0 | 1 | 2 | 3 | last    |        for comes last

A number of chunks is chosen by a model of these two pictures: a message takes alpha + bytes / bandwidth, the wire carries one
at a time, and products take what they take with so many rows, as few rows are less efficient. All of it is measured once for
each shape, on the tensors of its first use, and all ranks of the group choose by the largest of what they predict.
"""

import time
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


class Costs(NamedTuple):
    """Measured seconds of one form on one shape."""

    issue: Line
    """To start a message: what this rank does for it while it computes nothing."""
    message: Line
    """From then on, until it is there."""
    chunk: dict[int, float]
    """Products of one chunk, by number of chunks."""
    own: float = 0.0
    """Receive: products that need no message."""
    ahead: float = 0.0
    """Send: the message in front of all others."""
    last: float = 0.0
    """Send: products behind all chunks."""


class Receive(NamedTuple):
    """Use the rows of other ranks as they come."""

    start: Callable[[slice], Pending]
    """Ask for a chunk of every rank's rows."""
    own: Callable[[], None]
    """Do what needs no message; whatever adds up starts anew."""
    use: Callable[[slice, Tensor], None]
    """Do what needs a chunk, given what `start` has brought."""

    def run(self, chunks: list[slice]) -> None:
        """All of it."""
        pending = [self.start(rows) for rows in chunks]
        self.own()
        for rows, message in zip(chunks, pending, strict=True):
            self.use(rows, message.wait())

    def measure(self, chunks: dict[int, slice], device: torch.device) -> Costs:
        """Time each part alone.

        Args:
            chunks: the largest chunk, by number of chunks.
            device: of the tensors.
        """
        messages = {count: time_message(partial(self.start, rows), device) for count, rows in ends(chunks)}
        own, chunk = time_work(self.own, device), {}
        for count, rows in chunks.items():
            brought = self.start(rows).wait()
            chunk[count] = time_work(partial(self.use, rows, brought), device)
        return Costs(*fit(messages), chunk, own=own)

    @staticmethod
    def predict(costs: Costs, count: int) -> float:
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


class Send(NamedTuple):
    """Send each chunk when it is made."""

    make: Callable[[slice], Tensor]
    start: Callable[[slice, Tensor], Pending]
    """Send what `make` has made."""
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

    def measure(self, chunks: dict[int, slice], device: torch.device) -> Costs:
        """Time each part alone; arguments as of `Receive`."""
        brought = self.ahead().wait() if self.ahead else None
        chunk = {count: time_work(partial(self.make, rows), device) for count, rows in chunks.items()}
        messages = {}
        for count, rows in ends(chunks):
            made = self.make(rows)
            messages[count] = time_message(partial(self.start, rows, made), device)
        ahead = sum(time_message(self.ahead, device)) if self.ahead else 0.0
        return Costs(*fit(messages), chunk, ahead=ahead, last=time_work(partial(self.last, brought), device))

    @staticmethod
    def predict(costs: Costs, count: int) -> float:
        """Seconds with a number of chunks."""
        issue, message = costs.issue.seconds(count), costs.message.seconds(count)
        clock, free = 0.0, costs.ahead
        for _ in range(count):
            clock += costs.chunk[count] + issue
            free = max(clock, free) + message
        clock = max(clock, costs.ahead) + costs.last
        return max(clock, free)


def cut_rows(rows: int, count: int) -> list[slice]:
    """Chunks of some rows, which differ by one row at most; the first ones are longer."""
    bounds = [number * (rows // count) + min(number, rows % count) for number in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def choose_count(form: Receive | Send, rows: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """The number of chunks that is predicted to be fastest; the same on all ranks of the group, which call this together.

    Args:
        form: of the product.
        rows: that are cut.
        group: that the messages go over.
        device: of the tensors.
    """
    counts = [count for count in CANDIDATES if count <= rows]
    with unrecorded():
        costs = form.measure({count: cut_rows(rows, count)[0] for count in counts}, device)
        predicted = torch.tensor([form.predict(costs, count) for count in counts], dtype=torch.float64, device=device)
        dist.all_reduce(predicted, dist.ReduceOp.MAX, group)
    return fewest_chunks(dict(zip(counts, predicted.tolist(), strict=True)))


def fewest_chunks(seconds: dict[int, float]) -> int:
    """The smallest number of chunks that takes as good as the shortest time."""
    shortest = min(seconds.values())
    return min(count for count, taken in seconds.items() if taken <= shortest * (1 + WORTH))


def ends(chunks: dict[int, slice]) -> list[tuple[int, slice]]:
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


def time_work(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of some work, at best."""
    return min(_seconds(work, device) for _ in range(REPEATS))


def time_message(start: Callable[[], Pending], device: torch.device) -> tuple[float, float]:
    """Seconds to start a message, and then until it is there, at best."""
    found = []
    for _ in range(REPEATS):
        _synchronize(device)
        began = time.perf_counter()
        message = start()
        issued = time.perf_counter()
        message.wait()
        _synchronize(device)
        found.append((issued - began, time.perf_counter() - issued))
    return min(issue for issue, _ in found), min(wait for _, wait in found)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    began = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
