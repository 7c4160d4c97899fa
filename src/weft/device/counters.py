"""Counters of the processor's last-level cache for this process, through perf_event_open of Linux."""

import ctypes
import os
import platform
import struct
import sys
from contextlib import suppress

SYSCALL = {"x86_64": 298, "aarch64": 241}  # number of perf_event_open
HARDWARE, SOFTWARE = 0, 1  # types of counters
CACHE_REFERENCES, CACHE_MISSES = (HARDWARE, 2), (HARDWARE, 3)
PAGE_FAULTS = (SOFTWARE, 2)
INHERIT, EXCLUDE_KERNEL, EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
ATTRIBUTE_BYTES = 112  # of version 5 of struct perf_event_attr
LINE_BYTES = 64  # of a cache line on x86-64 and most ARM processors


class Counters:
    """Event counters of all threads of this process, from the moment of the call.

    Args:
        events: (type, number) of each event, as in linux/perf_event.h.

    Raises:
        OSError: the system, its settings or the processor do not allow it.
    """

    def __init__(self, events: tuple[tuple[int, int], ...] = (CACHE_REFERENCES, CACHE_MISSES)):
        self.files: list[list[int]] = [[] for _ in events]
        try:
            for thread in map(int, os.listdir("/proc/self/task")) if sys.platform == "linux" else ():
                for files, event in zip(self.files, events, strict=True):
                    files.append(_open(*event, thread))
        except OSError:
            self.close()
            raise
        if not self.files[0]:
            raise OSError(f"no perf_event_open on {sys.platform}")

    def read(self) -> list[int]:
        """Counts of each event so far."""
        return [sum(struct.unpack("Q", os.read(file, 8))[0] for file in files) for files in self.files]

    def close(self) -> None:
        """Stop counting."""
        for file in (file for files in self.files for file in files):
            with suppress(OSError):
                os.close(file)
        self.files = [[] for _ in self.files]


def _open(kind: int, number: int, thread: int) -> int:
    """File descriptor of one counter, which later threads of the thread inherit."""
    flags = INHERIT | EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR
    attribute = struct.pack("IIQQQQQ", kind, ATTRIBUTE_BYTES, number, 0, 0, 0, flags).ljust(ATTRIBUTE_BYTES, b"\0")
    syscall = SYSCALL.get(platform.machine())
    if syscall is None:
        raise OSError(f"no perf_event_open on {platform.machine()}")
    file = ctypes.CDLL(None, use_errno=True).syscall(syscall, attribute, thread, -1, -1, 0)
    if file < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"perf_event_open: {os.strerror(error)}")
    return int(file)
