"""Memory-mapped heartbeat file of a rank. Its launcher can read the file at any time, even after the rank was killed.

    heartbeat = Heartbeat.open()              # in the rank; nobody reads it without a launcher
    heartbeat.phase("step", 17)               # when another phase of the work begins
    status = read_status(path)                # in the launcher, see rank_status.py

The file is mapped into memory: an update costs the rank about two microseconds and no system call, and survives the rank.
There are no locks. Each kind of record has one writer and two slots, which the writer fills in turn. A slot holds a sequence
number and a checksum, so that a reader takes the newest complete record, whenever the writer was interrupted or killed.
"""

import faulthandler
import linecache
import mmap
import os
import re
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft.backends.shared_memory import SharedMemoryGroup
from weft.compat import add_pending, issued_by_group
from weft.group_progress import GroupProgress
from weft.launch.rank_status import (
    COLLECTIVE,
    FINISHED,
    GROUPS,
    HEADER,
    HEARTBEAT_BYTES,
    HEARTBEAT_VARIABLE,
    PHASE,
    SAMPLE,
    SLOT_BYTES,
    encode_groups,
)

SAMPLE_SECONDS = 0.2
MIN_TIMED_STEPS = 2  # steps after which the step time of a rank is known
STILL_SAMPLES = 5  # samples without a new collective after which the flight recorder of torch is read

TORCH, STANDARD_LIBRARY = os.path.dirname(torch.__file__) + os.sep, sysconfig.get_path("stdlib") + os.sep
WEFT = os.path.dirname(os.path.dirname(__file__))
# Output of faulthandler.
THREAD, STACK_LINE = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)"), re.compile(r'  File "(.*)", line (\d+) in (.*)')
# Packages that implement collectives: a location within them says nothing about the caller.
LIBRARIES = (
    TORCH,
    *(os.path.join(WEFT, package) + os.sep for package in ("backends", "comm", "device", "launch", "topology")),
)
# A rank that is inside a function of these files sends a message or waits for other ranks.
COMMUNICATION = (
    str(dist.distributed_c10d.__file__),
    os.path.join(TORCH, "distributed/_functional_collectives.py"),
    *(os.path.join(WEFT, *path) for path in (("backends", "shm_p2p.py"), ("backends", "shared_memory.py"))),
    os.path.join(WEFT, "launch", "store.py"),
)


class Heartbeat:
    """Writer of this rank's heartbeat. Its methods may be called by one thread at a time: the training thread.

    Args:
        memory: mapped file of HEARTBEAT_BYTES bytes, which a launcher reads.
    """

    def __init__(self, memory: mmap.mmap):
        self._records = {kind: _DoubleBuffer(memory, kind) for kind in (PHASE, COLLECTIVE, SAMPLE, GROUPS)}
        self._collective = self._records[COLLECTIVE]
        self._finished = memoryview(memory)[FINISHED : FINISHED + 8].cast("q")
        self._phase_start, self._in_step = time.monotonic(), False
        self._steps: deque[float] = deque(maxlen=50)  # seconds
        self.phase("starting")

    @classmethod
    def open(cls) -> "Heartbeat":
        """Open the heartbeat that the environment names; without a launcher, a heartbeat that nobody reads.

        From this call on, the heartbeat also records the location of this thread and all collectives through shared memory.
        """
        path = os.environ.get(HEARTBEAT_VARIABLE)
        if path is None:
            return cls(mmap.mmap(-1, HEARTBEAT_BYTES))
        with open(path, "r+b") as file:
            heartbeat = cls(mmap.mmap(file.fileno(), HEARTBEAT_BYTES))
        SharedMemoryGroup.observers.append(heartbeat._enter)
        SharedMemoryGroup.leavers.append(heartbeat._leave)
        training = threading.get_ident()  # not the main thread in a worker of Ray
        threading.Thread(target=heartbeat._sample, args=(training,), name="heartbeat", daemon=True).start()
        return heartbeat

    def phase(self, name: str, step: int | None = None) -> None:
        """Record the beginning of a phase.

        Args:
            name: for example starting, step, evaluating, saving or exporting. The watchdog knows the duration of a "step".
            step: optimizer step that the phase belongs to.
        """
        now = time.monotonic()
        if self._in_step:
            self._steps.append(now - self._phase_start)
        self._phase_start, self._in_step = now, name == "step"
        median = statistics.median(self._steps) if len(self._steps) >= MIN_TIMED_STEPS else 0.0
        self._records[PHASE].write(f"{os.getpid()}\n{now}\n{median}\n{'' if step is None else step}\n{name}")

    def _enter(self, group: dist.ProcessGroup, operation: str, size: int, dtype: torch.dtype) -> None:
        self._collective.write(f"{operation} of {size} bytes of {dtype} in group {group.group_desc}")

    def _leave(self) -> None:
        self._finished[0] = self._collective.sequence

    def _sample(self, thread: int) -> None:
        """Record the location of a thread and the progress of process groups periodically."""
        groups, stacks = GroupSampler(torch.accelerator.current_accelerator()), StackReader()
        while True:
            if stack := stacks.read(thread):
                location, communication = locate(stack)
                self._records[GROUPS].write(encode_groups(groups.sample()))
                self._records[SAMPLE].write(f"{time.monotonic()}\n{communication}\n{location}")
            time.sleep(SAMPLE_SECONDS)


class GroupSampler:
    """Progress of this rank in the collectives of its process groups.

    On an accelerator, calls return before collectives complete: where no collective is issued for a second, what is not
    complete is read as well, because the location of the thread does not say that it waits.

    Args:
        accelerator: type of device; None for the CPU.
        still_samples: samples without a new collective after which pending collectives are read.
    """

    def __init__(self, accelerator: torch.device | None, still_samples: int = STILL_SAMPLES):
        self.device = accelerator or torch.device("cpu")
        self.reads_pending, self.still_samples = accelerator is not None, still_samples
        self.last: list[GroupProgress] = []
        self.still = 0

    def sample(self) -> list[GroupProgress]:
        """Progress now."""
        groups = issued_by_group(self.device)
        self.still = self.still + 1 if groups == self.last else 0
        self.last = groups
        return add_pending(groups, self.device) if self.reads_pending and self.still >= self.still_samples else groups


class _DoubleBuffer:
    """Writer of one kind of record, whose last two texts stay in the file."""

    def __init__(self, memory: mmap.mmap, kind: int):
        self.memory, self.kind, self.sequence = memory, kind, 0

    def write(self, text: str) -> None:
        data = text.encode(errors="replace")[: SLOT_BYTES - HEADER.size]
        self.sequence += 1
        start = (self.kind + self.sequence % 2) * SLOT_BYTES
        body = start + HEADER.size
        self.memory[body : body + len(data)] = data
        HEADER.pack_into(self.memory, start, self.sequence, len(data), zlib.crc32(data, self.sequence))


class StackLine(NamedTuple):
    """Location of a function in a stack."""

    path: str
    line: int
    function: str


class StackReader:
    """Reader of the stack of a thread that keeps running.

    `faulthandler` writes all stacks at once, while no other thread runs Python. Code that follows `f_back` would stop between
    two frames, of which the first may return meanwhile: it has then no caller, and in the worst case the process crashes.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            self.file = os.memfd_create("weft-stack")
        else:
            self.file, name = tempfile.mkstemp()
            os.unlink(name)

    def read(self, thread: int) -> list[StackLine]:
        """Innermost 100 functions of a thread, the innermost first; [] if it has ended."""
        os.ftruncate(self.file, 0)
        os.lseek(self.file, 0, os.SEEK_SET)
        faulthandler.dump_traceback(self.file, all_threads=True)
        text = os.pread(self.file, os.fstat(self.file).st_size, 0).decode(errors="replace")
        for part in text.split("\n\n"):
            head, *lines = part.strip().split("\n")
            if (known := THREAD.match(head)) and int(known[1], 16) == thread:
                found = filter(None, map(STACK_LINE.fullmatch, lines))
                return [StackLine(line[1], int(line[2]), line[3]) for line in found]
        return []


def locate(stack: Sequence[StackLine]) -> tuple[str, str]:
    """Find the user code that a thread is in, and the communication call made from there, if any.

    Args:
        stack: functions of the thread, the innermost first; at least one.

    Returns:
        location: "FILE:LINE FUNCTION" of the nearest caller outside torch, the standard library and the parts of Weft that
            implement collectives.
        communication: outermost function of torch.distributed or of shared memory called from that location; "wait" if the
            line waits for an asynchronous collective; else "".
    """
    communication = ""
    if ".wait(" in linecache.getline(stack[0].path, stack[0].line):
        communication = "wait"  # of a Work object, which has no Python frame
    inside = list(takewhile(lambda line: _is_library(line.path), stack))
    for line in inside:
        if line.path in COMMUNICATION:
            communication = line.function
    user = stack[len(inside)] if len(inside) < len(stack) else stack[0]
    return f"{user.path}:{user.line} {user.function}", communication


def _is_library(path: str) -> bool:
    standard = path.startswith((STANDARD_LIBRARY, "<frozen")) and "-packages" not in path
    return standard or path.startswith(LIBRARIES)
