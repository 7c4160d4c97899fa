"""Advisory file locks (flock), which the kernel releases when their last holder exits. Imports no torch."""

import errno
import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # error codes of network file systems without flock
MAX_HOLDER_BYTES = 4096


@dataclass(frozen=True)
class Holder:
    """Process that holds a lock, as recorded in the lock file."""

    host: str
    pid: int
    since: str
    """Time of acquisition: local time of the host, ISO 8601 with UTC offset."""

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, since {self.since}"


class Lock:
    """Acquired lock, held until `release`, or until this process and all forks that inherited `descriptor` have exited."""

    def __init__(self, path: Path, descriptor: int):
        self.path, self.descriptor = path, descriptor

    def sign(self) -> None:
        """Record this process as the holder in the lock file."""
        holder = Holder(socket.gethostname(), os.getpid(), datetime.now().astimezone().isoformat(timespec="seconds"))
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, json.dumps(asdict(holder)).encode(), 0)

    def release(self) -> None:
        """Release the lock in this process; forks that inherited the descriptor still hold it."""
        os.close(self.descriptor)


def take_lock(path: Path, *, shared: bool = False) -> Lock | None:
    """Acquire a lock without waiting. The lock file is created if it is missing, and never removed.

    Args:
        path: lock file; symbolic links are not followed.
        shared: True for a shared lock, False for an exclusive lock.

    Returns:
        The lock; None if another process holds a conflicting lock. `read_holder` names that process if it called `sign`.

    Raises:
        OSError: the file cannot be created or opened.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        try:
            if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                break
        except FileNotFoundError:
            pass
        os.close(descriptor)  # the folder was moved or removed meanwhile: lock the file now at this path instead
    return Lock(path, descriptor)


def read_holder(path: Path) -> Holder | None:
    """Last recorded holder of a lock, which may have released it since; None if the lock file records none."""
    try:
        with path.open("rb") as file:
            fields = json.loads(file.read(MAX_HOLDER_BYTES))
        return Holder(str(fields["host"]), int(fields["pid"]), str(fields["since"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
