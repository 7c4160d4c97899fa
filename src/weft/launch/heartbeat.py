"""What a rank is doing, in a small file that its launcher reads at any time, also after the rank was killed.

    pulse = Heartbeat.open()                  # in the rank; without a launcher nobody reads it
    pulse.phase("step", 17)               # a plain call wherever something else begins
    record = read_status(path)             # in the launcher

The file is mapped into memory: a note costs the rank about two microseconds and no system call, and outlives it. Nothing is
locked. Each kind of note has one writer and two places, which it fills in turn. A note carries its number and a checksum, so
that a reader takes the newest one that is whole, whatever moment the writer was interrupted or killed at.
"""

import linecache
import mmap
import os
import statistics
import sys
import sysconfig
import threading
import time
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from types import FrameType

import torch
import torch.distributed as dist

from weft.backends.shared_memory import SharedMemoryGroup

HEARTBEAT_VARIABLE = "WEFT_PULSE"  # path of the file, in the environment of a rank
SAMPLE_SECONDS = 0.2
LOOKS = 3  # of a sample, at most
KNOWN_STEPS = 2  # steps after which a rank's step time is known
PLACE_BYTES = 2048
HEAD = Struct("qII")  # number of the note, bytes of its text, checksum
PHASE, COLLECTIVE, SAMPLE = 0, 2, 4  # the first of the two places of each kind of note
FINISHED = 6 * PLACE_BYTES  # where the number of collectives that have ended stands, a whole number of 8 bytes
PULSE_BYTES = 7 * PLACE_BYTES

TORCH, STANDARD_LIBRARY = os.path.dirname(torch.__file__) + os.sep, sysconfig.get_path("stdlib") + os.sep
WEFT = os.path.dirname(os.path.dirname(__file__))
CARRIERS = (
    TORCH,
    *(os.path.join(WEFT, room) + os.sep for room in ("cluster", "comm")),
)  # rooms that carry out collectives
# Inside a function of these files a rank sends, or waits for others.
COMMUNICATION = (
    str(dist.distributed_c10d.__file__),
    os.path.join(TORCH, "distributed/_functional_collectives.py"),
    *(os.path.join(WEFT, "cluster", name) for name in ("channel.py", "shared_memory.py", "store.py")),
)


@dataclass(frozen=True)
class RankStatus:
    """What a rank last said of itself. Times are seconds of CLOCK_MONOTONIC, which all processes of a host share."""

    pid: int = 0
    """0 until the rank has opened its pulse."""
    phase: str = "starting"
    step: int | None = None
    began: float = 0.0
    """When the phase began."""
    step_seconds: float = 0.0
    """Median of its last steps; 0 before the first two have ended."""
    collectives: int = 0
    """How many were called through shared memory."""
    collective: str = ""
    """The last of them: operation, bytes, format and group."""
    inside: bool = False
    """Whether the rank had not come back from it."""
    where: str = ""
    """Where the main thread was at the last sample: "FILE:LINE FUNCTION", outside torch and the standard library."""
    call: str = ""
    """The communication that the main thread was in at the last sample, say "all_reduce"; "" in everything else."""
    heartbeat: float = 0.0
    """When the last sample was taken; 0 before the first."""

    @property
    def waits_in(self) -> str:
        """The collective that the rank was in, or ""."""
        return self.collective if self.inside else self.call


class Heartbeat:
    """The notes of this rank. One thread at a time may call its methods: the one that trains.

    Args:
        memory: PULSE_BYTES that a launcher reads.
    """

    def __init__(self, memory: mmap.mmap):
        self._notes = {kind: _Note(memory, kind) for kind in (PHASE, COLLECTIVE, SAMPLE)}
        self._collective = self._notes[COLLECTIVE]
        self._finished = memoryview(memory)[FINISHED : FINISHED + 8].cast("q")
        self._began, self._in_step = time.monotonic(), False
        self._steps: deque[float] = deque(maxlen=50)  # seconds
        self.phase("starting")

    @classmethod
    def open(cls) -> "Heartbeat":
        """The pulse that the environment names, with the position of the main thread and all collectives through shared
        memory noted from here on; without a launcher, one that nobody reads."""
        path = os.environ.get(HEARTBEAT_VARIABLE)
        if path is None:
            return cls(mmap.mmap(-1, PULSE_BYTES))
        with open(path, "r+b") as file:
            pulse = cls(mmap.mmap(file.fileno(), PULSE_BYTES))
        SharedMemoryGroup.observers.append(pulse._enter)
        SharedMemoryGroup.leavers.append(pulse._leave)
        threading.Thread(target=pulse._sample, name="pulse", daemon=True).start()
        return pulse

    def phase(self, name: str, step: int | None = None) -> None:
        """Say what begins now.

        Args:
            name: starting, step, evaluating, saving, exporting, say. The watchdog knows how long a "step" takes.
            step: the optimizer step it belongs to.
        """
        now = time.monotonic()
        if self._in_step:
            self._steps.append(now - self._began)
        self._began, self._in_step = now, name == "step"
        median = statistics.median(self._steps) if len(self._steps) >= KNOWN_STEPS else 0.0
        self._notes[PHASE].write(f"{os.getpid()}\n{now}\n{median}\n{'' if step is None else step}\n{name}")

    def _enter(self, group: dist.ProcessGroup, operation: str, size: int, dtype: torch.dtype) -> None:
        self._collective.write(f"{operation} of {size} bytes of {dtype} in group {group.group_desc}")

    def _leave(self) -> None:
        self._finished[0] = self._collective.number

    def _sample(self) -> None:
        """Note where the main thread is, again and again."""
        main = threading.main_thread().ident
        while True:
            if place := _look_at(main or 0):
                where, call = place
                self._notes[SAMPLE].write(f"{time.monotonic()}\n{call}\n{where}")
            time.sleep(SAMPLE_SECONDS)


class _Note:
    """One kind of note: its last two texts."""

    def __init__(self, memory: mmap.mmap, kind: int):
        self.memory, self.kind, self.number = memory, kind, 0

    def write(self, text: str) -> None:
        data = text.encode(errors="replace")[: PLACE_BYTES - HEAD.size]
        self.number += 1
        start = (self.kind + self.number % 2) * PLACE_BYTES
        body = start + HEAD.size
        self.memory[body : body + len(data)] = data
        HEAD.pack_into(self.memory, start, self.number, len(data), zlib.crc32(data, self.number))


def create_heartbeat(path: Path) -> None:
    """Make the file of a rank that has not started; for the launcher."""
    path.write_bytes(bytes(PULSE_BYTES))  # not truncated: a rank would die of SIGBUS where there is no room any more


def read_status(path: Path) -> RankStatus:
    """What a rank last said of itself."""
    for _ in range(3):  # a writer may overtake a reader, not three times in a row
        data = path.read_bytes()
        _, phase = _newest(data, PHASE)
        collectives, collective = _newest(data, COLLECTIVE)
        _, sample = _newest(data, SAMPLE)
        if phase:
            break
    else:
        return RankStatus()
    pid, began, median, step, name = phase.split("\n", 4)
    heartbeat, call, where = sample.split("\n", 2) if sample else ("0", "", "")
    (finished,) = memoryview(data)[FINISHED : FINISHED + 8].cast("q")
    return RankStatus(
        pid=int(pid),
        phase=name,
        step=int(step) if step else None,
        began=float(began),
        step_seconds=float(median),
        collectives=collectives,
        collective=collective,
        inside=finished < collectives,
        where=where,
        call=call,
        heartbeat=float(heartbeat),
    )


def _newest(data: bytes, kind: int) -> tuple[int, str]:
    """The newest whole note of a kind, with its number; (0, "") if there is none."""
    best, text = 0, ""
    for start in (kind * PLACE_BYTES, (kind + 1) * PLACE_BYTES):
        number, size, checksum = HEAD.unpack_from(data, start)
        body = data[start + HEAD.size : start + HEAD.size + size]
        if number > best and zlib.crc32(body, number) == checksum:
            best, text = number, body.decode(errors="replace")
    return best, text


def _look_at(thread: int) -> tuple[str, str] | None:
    """Where a thread is, as `locate` says; None if it has ended."""
    place = None
    for _ in range(LOOKS):  # the thread goes on meanwhile, and a frame that it leaves no longer knows its callers
        frame = sys._current_frames().get(thread)
        if frame is None:
            return None
        place = locate(frame)
        del frame  # it holds the tensors of a step
        if not _is_library(place[0]):
            break
    return place


def locate(frame: FrameType) -> tuple[str, str]:
    """Where a thread is and, if it is in communication, in what.

    Returns:
        "FILE:LINE FUNCTION" of the nearest caller outside torch, the standard library and what of Weft carries out
        collectives; and the outermost function of torch.distributed or of shared memory that was called from there,
        "wait" where the line waits for an asynchronous one, or "".
    """
    innermost, user, call = frame, frame, ""
    if ".wait(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0):
        call = "wait"  # of a Work, which has no frame of its own
    while user.f_back is not None and _is_library(user.f_code.co_filename):
        if user.f_code.co_filename in COMMUNICATION:
            call = user.f_code.co_name
        user = user.f_back
    if _is_library(user.f_code.co_filename):
        user = innermost
    return f"{user.f_code.co_filename}:{user.f_lineno} {user.f_code.co_name}", call


def _is_library(path: str) -> bool:
    standard = path.startswith((STANDARD_LIBRARY, "<frozen")) and "-packages" not in path
    return standard or path.startswith(CARRIERS)
