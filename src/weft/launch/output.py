"""Output that never ends a process: what stdout or stderr does not take is dropped, with a line. Imports no torch.

A reader that leaves (`weft train | head`), a terminal that hangs up, a full disk under a redirected output, a closed descriptor
(`>&-`, cron) and an encoding without the characters of a line are no reason to end a run of days.
"""

import io
import os
import select
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.files import open_file

STREAMS = {"stdout": 1, "stderr": 2}


class DroppingOutput(io.FileIO):
    """Raw stream that takes everything, and drops what its descriptor does not take."""

    def __init__(self, descriptor: int, label: str):
        super().__init__(descriptor, "w", closefd=False)
        self.name, self.label = f"<{label}>", label
        self.log_file: Path | None = None
        """File for the line about dropped output; None: the other stream."""
        self.problem = ""
        """Reason why the last write was dropped; "" if it was not."""

    def write(self, data: Any) -> int:
        """Write, or drop; waits for a reader that has not left."""
        size = memoryview(data).nbytes
        try:
            if self.problem:
                super().write(self._line().encode())
                self.problem = ""
            while (count := super().write(data)) is None:  # another process has made the terminal non-blocking
                select.select([], [self], [])
            return count
        except OSError as error:
            if not self.problem:
                self.problem = str(error.strerror)
                self._report()
            return size

    def _line(self) -> str:
        return f"weft: {self.label} cannot be written: {self.problem}; output is dropped\n"

    def _report(self) -> None:
        """Write the line about dropped output elsewhere; it also precedes the next output that can be written."""
        if self.log_file is not None:
            with (
                suppress(OSError),
                open(open_file(self.log_file, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8") as file,
            ):
                file.write(self._line())
            return
        other = _raw("stderr" if self.label == "stdout" else "stdout")
        if other is not None and not other.problem:
            other.write(self._line().encode())


def keep_output(log_file: Path | None = None) -> None:
    """Let stdout and stderr of this process take everything. Called first in a process of Weft.

    Streams that are not those of the process, as in a notebook or a test, are left as they are.

    Args:
        log_file: file for the line about dropped output; None: the other stream.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file to be opened would get the number, and the output of libraries
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for label, descriptor in STREAMS.items():
        stream = getattr(sys, label)
        if (raw := _raw(label)) is None and _is_of_process(stream, descriptor):
            raw = DroppingOutput(descriptor, label)
            text = io.TextIOWrapper(
                io.BufferedWriter(raw),
                encoding=stream.encoding if stream else "utf-8",
                errors="backslashreplace",
                line_buffering=stream is None or stream.line_buffering or stream.write_through,
            )
            with suppress(OSError, AttributeError):
                stream.flush()
            setattr(sys, label, text)
            setattr(sys, f"__{label}__", text)
        if raw is not None:
            raw.log_file, raw.problem = log_file, ""  # a fork has the problem of its launcher


def _is_of_process(stream: Any, descriptor: int) -> bool:
    """True for a stream that Python has made for a descriptor; None is that of a closed one."""
    try:
        return stream is None or (isinstance(stream, io.TextIOWrapper) and stream.fileno() == descriptor)
    except (OSError, ValueError):
        return False


def _raw(label: str) -> DroppingOutput | None:
    raw = getattr(getattr(getattr(sys, label), "buffer", None), "raw", None)
    return raw if isinstance(raw, DroppingOutput) else None
