"""Connection of a rank to the watchdog of its host, where another launcher has started the ranks. Imports no torch.

    member = join_node(started)               # before torch is imported
    member.configure(log_dir, timeouts)       # once the run folder is known
    member.leave(exit_code, is_failure=...)   # the last call before the process ends

The rank with local rank 0 starts the watchdog (`node_watchdog.py`). The path of its folder is derived from the id that the
launcher gave to the job, so that the other ranks of the host find it without a message.
"""

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from weft.errors import JobError
from weft.files import make_folder
from weft.launch.environment import RAY, WEFT, StartedRank
from weft.launch.log import log
from weft.launch.node_watchdog import SOCKET
from weft.launch.scratch import PREFIX, SHARED_MEMORY
from weft.launch.watchdog import Timeouts

JOIN_SECONDS = 300.0  # for local rank 0 to start, from a slow file system
VERDICT_SECONDS = 10.0  # for the watchdog to find and print the cause of a failure
RETRY_SECONDS = 0.05


class NodeMember:
    """Open connection of a rank to the watchdog.

    Attributes:
        heartbeat: heartbeat file of this rank, created by the watchdog. The error report of the rank is beside it.
        log_dir: folder for the traceback of this rank.
    """

    def __init__(self, connection: socket.socket, heartbeat: Path):
        self.connection, self.heartbeat, self.log_dir = connection, heartbeat, heartbeat.parent

    def configure(self, log_dir: Path, timeouts: Timeouts) -> None:
        """Tell the watchdog the folder of tracebacks, created if missing, and its timeouts; all ranks tell it the same."""
        try:
            make_folder(log_dir)
        except OSError as error:
            log(f"{log_dir} cannot be created: {error.strerror}; tracebacks of the ranks will be lost")
        self.log_dir = log_dir.resolve()
        self._send({"log_dir": str(self.log_dir), "timeouts": asdict(timeouts)})

    def leave(self, code: int, *, is_failure: bool) -> bool:
        """Announce the exit code; after a failure, wait until the watchdog has printed its cause.

        Returns:
            False if the watchdog has not printed the cause of a failure: it was killed.
        """
        self._send({"exit": code})
        self.connection.settimeout(VERDICT_SECONDS)
        try:
            return not is_failure or bool(self.connection.recv(1))
        except OSError:
            return False

    def _send(self, message: dict[str, object]) -> None:
        with suppress(OSError):  # the watchdog was killed: the rank continues without it
            self.connection.sendall(json.dumps(message).encode() + b"\n")


def join_node(started: StartedRank) -> NodeMember:
    """Connect to the watchdog of this host; local rank 0 starts it.

    Raises:
        JobError: the launcher does not say how many ranks this host has, the watchdog cannot start, or this is a rank of Weft's
            launcher.
    """
    if started.launcher == WEFT:
        raise JobError(
            f"weft train in rank {started.rank} of another job of Weft",
            where="weft train",
            rule="a rank belongs to one job",
            fix="train in this process with weft.prepare, or start the command outside of the ranks",
        )
    if started.local_world_size is None:
        raise JobError(
            "LOCAL_WORLD_SIZE is not set",
            where="environment",
            rule="a rank knows the number of ranks of its host, whose watchdog waits for all of them",
            fix="set LOCAL_WORLD_SIZE to the number of ranks of each host, or start the ranks with torchrun",
        )
    folder = node_folder(started.job)
    watchdog = None
    if started.local_rank == 0:
        numbers = str(started.local_world_size), str(started.world_size)
        watchdog = subprocess.Popen(
            [sys.executable, "-m", "weft.launch.node_watchdog", str(folder), *numbers],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the process group of this rank does not end it
        )
    end = time.monotonic() + JOIN_SECONDS
    while (member := _connect(folder / SOCKET, started)) is None:
        if time.monotonic() > end or (watchdog and watchdog.poll() is not None):
            raise JobError(
                f"rank {started.rank} found no watchdog of its host"
                + ("" if watchdog else f" within {JOIN_SECONDS:g} s: local rank 0 has not started it"),
                where=str(folder),
                rule="local rank 0 of each host starts a watchdog in a private folder that all ranks of the host can open",
                fix="see the output of local rank 0; the ranks of a host share one /dev/shm and one user",
            )
        time.sleep(RETRY_SECONDS)
    return member


def announce_end(heartbeat: Path) -> None:
    """Tell the watchdog of this host that the launcher ends the ranks now, which is no failure of them.

    Args:
        heartbeat: heartbeat file of a rank.
    """
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:  # the watchdog has ended
        connection.settimeout(VERDICT_SECONDS)
        connection.connect(str(heartbeat.with_name(SOCKET)))
        connection.sendall(json.dumps({"launcher_ends_ranks": True}).encode() + b"\n")
        connection.recv(1)  # closed by the watchdog once it has read the message


def node_folder(job: str) -> Path:
    """Folder for the ranks of a job on this host, in shared memory where there is some.

    Args:
        job: identity of the attempt of the job on this host.
    """
    with suppress(OSError):  # emulated hosts share files, but not networks
        job += os.readlink("/proc/self/ns/net")
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return parent / f"{PREFIX}node-{os.getuid()}-{hashlib.sha256(job.encode()).hexdigest()[:16]}"


def _connect(path: Path, started: StartedRank) -> NodeMember | None:
    """Connect and register; None if the watchdog has not started, or ends with the ranks of the attempt before."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
        own = {"rank": started.rank, "is_kept": started.launcher == RAY}
        connection.sendall(json.dumps(own).encode() + b"\n")
        if answer := connection.makefile("rb").readline():
            return NodeMember(connection, Path(json.loads(answer)["heartbeat"]))
    except OSError:
        pass
    connection.close()
    return None
