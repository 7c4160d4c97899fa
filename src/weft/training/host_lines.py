"""JSON Lines file of a host, to which all of its ranks append: one file for each host, and few writes to a shared folder."""

import errno
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from weft.files import open_file
from weft.training.metrics import JsonLinesFile


class HostLinesFile(JsonLinesFile):
    """JSON Lines file to which several processes of one host append; each buffers its lines for some seconds.

    An append is one write with O_APPEND, which the kernel of the host does not mix with others. It begins with a newline, so
    that the line that a killed process or a full disk has torn damages no line of another process. After a short write all
    lines are written again: readers must accept repeated lines, and skip empty and torn ones.

    Args:
        path: file; created at the first append.
        log: function that prints a message when the file cannot be written, and when it can be written again.
        seconds: minimum time between two appends of this process.
        appended: time from which the seconds until the first append count.
    """

    def __init__(self, path: Path, log: Callable[[str], None], seconds: float, appended: float):
        super().__init__(path, None, log)
        self.seconds, self.appended = seconds, appended

    def append_at(self, now: float) -> None:
        """Append the buffered lines if it is time to."""
        if now - self.appended >= self.seconds:
            self.flush()
            self.appended = now

    def _write_buffer(self) -> None:
        if self.file is None:
            self.file = FileIO(open_file(self.path, os.O_WRONLY | os.O_APPEND), "a")
        data = ("\n" + "".join(self.buffer)).encode()
        if self.buffer and self.file.write(data) != len(data):  # the disk became full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.buffer.clear()
