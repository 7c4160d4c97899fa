"""Advisory locks on files (flock): the system releases them when their last holder is gone. Imports no torch."""

import errno
import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # of some network file systems
MOST_BYTES = 4096  # read of what a holder wrote


@dataclass(frozen=True)
class Holder:
    """The process that signed a lock."""

    host: str
    pid: int
    since: str
    """Local time of its host, ISO 8601 with its offset."""

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, since {self.since}"


class Lock:
    """A lock that is held: until `release`, or until this process and all forks that inherited `descriptor` are gone."""

    def __init__(self, path: Path, descriptor: int):
        self.path, self.descriptor = path, descriptor

    def sign(self) -> None:
        """Write into the file who holds it."""
        holder = Holder(socket.gethostname(), os.getpid(), datetime.now().astimezone().isoformat(timespec="seconds"))
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, json.dumps(asdict(holder)).encode(), 0)

    def release(self) -> None:
        """Let go in this process. Forks that inherited the descriptor still hold it."""
        os.close(self.descriptor)


def take_lock(path: Path, *, shared: bool = False) -> Lock | None:
    """Take a lock at once, or not at all. Its file is made if it is missing, and stays.

    Args:
        path: of a file that serves as a lock alone; links are not followed.
        shared: several processes may hold it shared; one alone holds it otherwise.

    Returns:
        None if another process holds it in a way that excludes this one; `read_holder` says who, if it has signed.

    Raises:
        OSError: the file cannot be made or opened.
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
        os.close(descriptor)  # its folder was moved or removed meanwhile: the lock of the file that is there now counts
    return Lock(path, descriptor)


def read_holder(path: Path) -> Holder | None:
    """Who last signed a lock; None if its file does not say. It does not tell whether the lock is still held."""
    try:
        with path.open("rb") as file:
            facts = json.loads(file.read(MOST_BYTES))
        return Holder(str(facts["host"]), int(facts["pid"]), str(facts["since"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
