"""Times of each rank, by what it did: `logs/times-host-N.jsonl` in the run folder, from which `weft doctor RUN` finds causes.

Each rank adds a line of about 200 bytes for its steps of the last `LINE_SECONDS`, or for one longer step, to the file of its
host. In large jobs the lines are for longer times, and ranks append several lines at once, so that all ranks together append
at most `APPENDS_PER_SECOND` times. No message is sent for it. On the CPU, whose messages go over the network between hosts,
the ranks also measure the links between hosts at the start of training and again when steps become slower
(`weft.comm.link_probe`), at most `PROBE_SHARE` of the time.
"""

import hashlib
import os
import platform
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from pydantic import ConfigDict
from torch.distributed.device_mesh import DeviceMesh

from weft.backends.hierarchical import host_id
from weft.comm.link_probe import LinkProbe, Rates
from weft.comm.objects import all_gather_json
from weft.training.host_lines import HostLinesFile
from weft.training.metrics import to_line
from weft.training.progress import WARM_UP_STEPS

LINE_SECONDS = 0.2  # in small jobs
LINES_PER_SECOND, APPENDS_PER_SECOND = 500, 100  # of all ranks together, at most
PROBE_STEPS = (WARM_UP_STEPS + 1, WARM_UP_STEPS + 9)  # steps of a process after which links are measured in any case
PROBE_SHARE = 0.05  # largest share of the time in which links are measured
SLOWER = 1.2  # links are measured again when the last steps take this factor of the fastest earlier ones
COMPARED_STEPS = 8


@dataclass(frozen=True)
class RankPlace:
    """First line of a process: the place of the rank."""

    rank: int
    world_size: int
    host: int
    """Index of its host, in the order of ranks."""
    name: str
    """Name of its host."""
    cores: str
    """Identity of the cores that it may use, equal on ranks that share them; "" if not known."""
    stage: int
    """Its index in pp."""
    first: int
    """First step of this process."""
    started: float = 0.0
    """Unix time in seconds at which the ranks started, by rank 0; 0 in files of earlier versions."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class RankTimes:
    """Seconds of a rank, summed over consecutive steps. The rest of `seconds` is computation."""

    first: int
    last: int
    seconds: float
    """From the end of the step before `first` to the end of `last`, without measurements of links."""
    data: float
    """Wait for the rows of a step."""
    wait: dict[str, float]
    """Wait for messages that nothing overlaps, by mesh axis and kind of link; includes the wait for slower ranks."""
    checkpoint: float
    """Time in which checkpoints blocked the rank."""
    outside: float
    """Other time between steps: evaluation, checks, metrics, callbacks."""
    queued: float
    """Time in which the training thread could run, and waited for a core; part of the other terms."""
    rank: int = -1
    """-1 in files of earlier versions, each of one rank."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class LinkRates:
    """Measured links between hosts; written by rank 0."""

    after: int
    """Step after which they were measured."""
    rates: Rates
    """Bytes/s, [hosts, hosts], from row to column."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


def line_seconds(ranks: int) -> float:
    """Minimum time of the steps of a line, in seconds."""
    return max(LINE_SECONDS, ranks / LINES_PER_SECOND)


def append_seconds(ranks: int) -> float:
    """Minimum time between two appends of a rank, in seconds."""
    return max(LINE_SECONDS, ranks / APPENDS_PER_SECOND)


class RankTimesWriter:
    """Writer of the times of this rank; a context manager.

    Args:
        out: run folder.
        mesh: mesh of the job.
        device_type: type of the device of this rank.
        first: first step of this process.
        log: function that prints a message when the file cannot be written.
    """

    def __init__(self, out: Path, mesh: DeviceMesh, device_type: str, first: int, log: Callable[[str], None]):
        facts = all_gather_json([host_id(), platform.node(), time.time()])
        index = {key: host for host, key in enumerate(dict.fromkeys(tuple(key) for key, _, _ in facts))}
        host_of_rank = [index[tuple(key)] for key, _, _ in facts]
        self.rank, ranks = mesh.get_rank(), len(facts)
        host, stage = host_of_rank[self.rank], mesh.get_local_rank("pp")
        place = RankPlace(self.rank, ranks, host, platform.node(), _cores(), stage, first, started=facts[0][2])
        self.probe = LinkProbe(host_of_rank) if len(index) > 1 and device_type == "cpu" else None
        (out / "logs").mkdir(parents=True, exist_ok=True)
        self.line_seconds, seconds = line_seconds(ranks), append_seconds(ranks)
        appended = time.perf_counter() - seconds * self.rank / ranks  # spreads the appends of the ranks evenly
        self.file = HostLinesFile(out / "logs" / f"times-host-{host:05}.jsonl", log, seconds, appended)
        self.file.add(to_line(place))
        self.queue = _QueueTime()
        self.steps: deque[float] = deque(maxlen=COMPARED_STEPS)
        self.fastest = float("inf")
        self.probed, self.probe_seconds = time.perf_counter(), 0.0
        self.count = 0
        self.ended = self.began = self.got_data = time.perf_counter()
        self._clear(first)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_line()
        self.file.flush()
        self.file.close()
        self.queue.close()

    def begin_step(self) -> float:
        """Note, and return, the time at which the rank begins to wait for the rows of a step."""
        self.began = time.perf_counter()
        return self.began

    def begin_compute(self) -> None:
        """Note that the rows of the step have arrived."""
        self.got_data = time.perf_counter()

    def wants_probe(self) -> bool:
        """True if the links are to be measured after this step; rank 0 decides."""
        if self.rank or self.probe is None:
            return False
        recent = statistics.median(self.steps) if len(self.steps) == COMPARED_STEPS else 0.0
        self.fastest = min(self.fastest, recent or self.fastest)
        allowed = time.perf_counter() - self.probed > self.probe_seconds / PROBE_SHARE
        return self.count + 1 in PROBE_STEPS or (allowed and recent > SLOWER * self.fastest)

    def end_step(self, step: int, wait: Mapping[str, float], checkpoint: float) -> float:
        """Add a step, and return the time at which it ended.

        Args:
            step: number of the step.
            wait: exposed seconds of its collectives, by axis and link.
            checkpoint: seconds in which a checkpoint blocked the rank before the step.
        """
        now = time.perf_counter()
        self.last, self.count = step, self.count + 1
        self.seconds += now - self.ended
        self.data += self.got_data - self.began
        self.checkpoint += checkpoint
        self.outside += max(self.began - self.ended - checkpoint, 0.0)
        self.queued += self.queue.take()
        for where, seconds in wait.items():
            self.wait[where] += seconds
        if self.count > WARM_UP_STEPS:
            self.steps.append(now - self.began)
        self.ended = now
        if self.seconds >= self.line_seconds or self.count <= WARM_UP_STEPS:
            self._end_line()
            self.file.append_at(now)
        return now

    def measure_links(self, step: int) -> None:
        """Measure the links between hosts after a step. Collective."""
        assert self.probe is not None
        began = time.perf_counter()
        rates = self.probe.measure()
        self.probed = time.perf_counter()
        self.probe_seconds = self.probed - began
        self.ended += self.probe_seconds  # no part of a step
        self.queue.take()
        self.steps.clear()
        if self.rank == 0:
            self.file.add(to_line(LinkRates(step, rates)))

    def _end_line(self) -> None:
        if self.last >= self.first:
            sums = (self.seconds, self.data, self.checkpoint, self.outside, self.queued)
            seconds, data, checkpoint, outside, queued = (round(value, 6) for value in sums)
            wait = {where: round(value, 6) for where, value in self.wait.items()}
            times = RankTimes(self.first, self.last, seconds, data, wait, checkpoint, outside, queued, rank=self.rank)
            self.file.add(to_line(times))
        self._clear(self.last + 1)

    def _clear(self, first: int) -> None:
        self.first, self.last = first, first - 1
        self.seconds = self.data = self.checkpoint = self.outside = self.queued = 0.0
        self.wait: defaultdict[str, float] = defaultdict(float)


class _QueueTime:
    """Seconds in which the calling thread waited for a core, from the scheduler of Linux; 0 where it does not count them."""

    def __init__(self) -> None:
        self.file: int | None = None
        self.last = 0
        try:
            self.file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            self.take()
        except (OSError, IndexError):
            self.close()

    def take(self) -> float:
        """Seconds since the last call."""
        if self.file is None:
            return 0.0
        before, self.last = self.last, int(os.pread(self.file, 128, 0).split()[1])
        return (self.last - before) / 1e9

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            os.close(self.file)
        self.file = None


def _cores() -> str:
    """Identity of the cores that this process may use."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists() or not hasattr(os, "sched_getaffinity"):
        return ""
    text = f"{boot.read_text(encoding='utf-8')} {sorted(os.sched_getaffinity(0))}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]
