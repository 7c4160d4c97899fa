"""Watchdog of the ranks of this host that another launcher has started: a process without torch.

    python -m weft.launch.node_watchdog FOLDER RANKS WORLD_SIZE          # `node_member.join_node` starts it

Each rank connects to the socket in the folder when it starts, and stays connected. Ranks are not children of this process: it
sees their end through process descriptors (pidfd_open), and reads exit codes from the descriptor (PIDFD_GET_INFO, Linux
6.15), from /proc until the launcher has read them, or from the last message of the rank. `watchdog.py` finds the cause of a
failure. The process ends when the ranks have ended, whatever ended them.
"""

import fcntl
import json
import os
import select
import selectors
import shutil
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.errors import RankFailure
from weft.launch.causes import UNKNOWN_SIGNAL
from weft.launch.log import log, print_error
from weft.launch.output import keep_output
from weft.launch.rank_status import create_heartbeat
from weft.launch.scratch import LOCK, open_marked
from weft.launch.watchdog import REFUSED, Timeouts, Watchdog, process_state
from weft.lock import Lock, take_lock

SOCKET = "socket"  # file in the folder
POLL_SECONDS = 0.1
LOCK_SECONDS = 10.0  # for the watchdog of the attempt before, which ends with its ranks
CODE_TRIES, CODE_SECONDS = 10, 0.01  # until the exit code of a process can be read
ARRIVAL_SECONDS = 60.0  # between the start of the first and of the last rank of this host
REFUSED_SECONDS = 3.0  # after refused input: time for the other ranks to end by themselves
END_SECONDS = 5.0  # between SIGTERM and SIGKILL; without one of the ranks no step can be finished
PIDFD_GET_INFO, PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3  # from linux/pidfd.h; the struct has 64 bytes
EXIT_STATUS_FIELD = 49  # of /proc/PID/stat, counted from the state
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDED_BY_SIGNAL = tuple(128 + number for number in SIGNALS)  # exit codes of a rank that has saved its state


class RankProcess:
    """Process of a rank that another process has started; the part of `subprocess.Popen` that the watchdog uses.

    Args:
        pid: process.
        is_kept: True if the launcher keeps the process after the rank has ended, as Ray does: the rank ends when it announces
            its exit code, and handles no signals.
    """

    def __init__(self, pid: int, is_kept: bool):
        self.pid, self.is_kept = pid, is_kept
        self.returncode: int | None = None
        self.announced: int | None = None
        """Exit code that the rank has announced."""
        self.descriptor = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None

    def poll(self) -> int | None:
        """Exit code of the process, or minus its signal; None while it runs; 0 after a signal that ended the run in order."""
        if self.returncode is None and self._has_ended():
            code = self._read_code()
            self.returncode = 0 if code in ENDED_BY_SIGNAL else code
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process has not ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number) if self.poll() is None else None

    def _has_ended(self) -> bool:
        if self.is_kept and self.announced is not None:
            return True
        if self.descriptor is None:
            return process_state(self.pid) in ("", "Z")
        ends = select.poll()
        ends.register(self.descriptor, select.POLLIN)
        return bool(ends.poll(0))

    def _read_code(self) -> int:
        if self.is_kept and self.announced is not None:
            return self.announced
        for _ in range(CODE_TRIES):  # neither way finds the code for a moment while the launcher collects the process
            info = bytearray(struct.pack("=Q56x", PIDFD_INFO_EXIT))
            with suppress(OSError):  # ESRCH and ENOTTY of older kernels
                fcntl.ioctl(self.descriptor or -1, PIDFD_GET_INFO, info)
                if struct.unpack_from("=Q", info)[0] & PIDFD_INFO_EXIT:
                    return os.waitstatus_to_exitcode(struct.unpack_from("=i", info, 60)[0])
            with suppress(OSError, IndexError), open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                if fields[0] == b"Z":
                    return os.waitstatus_to_exitcode(int(fields[EXIT_STATUS_FIELD]))
            time.sleep(CODE_SECONDS)
        return UNKNOWN_SIGNAL if self.announced is None else self.announced


class NodeWatchdog:
    """Server of the socket, and supervisor of the ranks that connect to it.

    Args:
        folder: private folder of the ranks, locked by this process.
        ranks: number of ranks of this host.
        world_size: number of ranks of the job.
    """

    def __init__(self, folder: Path, ranks: int, world_size: int):
        self.folder, self.ranks = folder, ranks
        self.watchdog = Watchdog(folder, folder, Timeouts(), log, sees_all_ranks=ranks == world_size)
        self.processes: dict[int, RankProcess] = {}
        self.connections: dict[int, socket.socket] = {}
        self.partial: dict[int, bytes] = {}
        self.last_change = time.monotonic()
        """Time at which a rank last arrived or ended."""
        self.failed_at: float | None = None
        self.is_refusal = False
        self.launcher_ends_ranks = False
        self.server = socket.socket(socket.AF_UNIX)
        (folder / SOCKET).unlink(missing_ok=True)  # of a watchdog that was killed
        self.server.bind(str(folder / SOCKET))
        self.server.listen(ranks)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.server, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Watch the ranks until all have ended; print the cause of a failure, and end the other ranks."""
        is_over = False
        while not is_over:
            is_over = self._is_over()  # read before the last check, so that a rank that ended meanwhile is reported
            for key, _ in self.selector.select(POLL_SECONDS):
                self._accept() if key.data is None else self._receive(key.data, key.fileobj)
            running = {rank for rank, process in self.processes.items() if process.returncode is None}
            watches = self.processes and not self.launcher_ends_ranks
            if self.failed_at is not None:
                self._end_ranks(time.monotonic() - self.failed_at)
            elif watches and (failure := self.watchdog.poll(self.processes)):  # type: ignore[arg-type]
                self._report(failure)
            for rank in running:
                if self.processes[rank].poll() is not None:
                    self._forget(rank)

    def _is_over(self) -> bool:
        ended = all(process.returncode is not None for process in self.processes.values())
        seconds = time.monotonic() - self.last_change
        return ended and (len(self.processes) == self.ranks or seconds > ARRIVAL_SECONDS)

    def _accept(self) -> None:
        """Accept a rank, which is registered by its first message, or the message that the launcher ends the ranks."""
        connection, _ = self.server.accept()
        connection.settimeout(END_SECONDS)
        with suppress(OSError, ValueError, KeyError):
            message = json.loads(connection.makefile("rb").readline())
            self.launcher_ends_ranks |= "launcher_ends_ranks" in message
            rank = int(message["rank"])
            if rank not in self.processes and len(self.processes) < self.ranks:
                create_heartbeat(self.folder / str(rank))
                self.processes[rank] = RankProcess(_peer(connection), message["is_kept"])
                self.connections[rank], self.partial[rank] = connection, b""
                self._watch(rank)
                _send(connection, {"heartbeat": str(self.folder / str(rank))})
                return
        connection.close()  # a rank of the next attempt, which tries again

    def _watch(self, rank: int) -> None:
        self.last_change = time.monotonic()
        self.selector.register(self.connections[rank], selectors.EVENT_READ, rank)
        if (descriptor := self.processes[rank].descriptor) is not None:  # wakes this process when the rank ends
            self.selector.register(descriptor, selectors.EVENT_READ, rank)

    def _forget(self, rank: int) -> None:
        """Stop to listen to a rank that has ended."""
        self.last_change = time.monotonic()
        for source in (self.connections[rank], self.processes[rank].descriptor):
            if source is not None and source in self.selector.get_map():
                self.selector.unregister(source)
        self.connections[rank].close()

    def _receive(self, rank: int, source: Any) -> None:
        """Read the messages of a rank."""
        if source is not self.connections[rank]:  # its process descriptor: read the exit code before the launcher does
            self.processes[rank].poll()
            return
        try:
            data = source.recv(2**16)
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(source)
            return
        *lines, self.partial[rank] = (self.partial[rank] + data).split(b"\n")
        for message in map(json.loads, lines):
            if "exit" in message:
                self.processes[rank].announced = message["exit"]
            else:
                self.watchdog.log_dir = Path(message["log_dir"])
                self.watchdog.timeouts = Timeouts(**message["timeouts"])

    def _report(self, failure: RankFailure) -> None:
        """Print a failure, and tell the ranks that it is printed."""
        self.failed_at, self.is_refusal = time.monotonic(), failure.exit_code == REFUSED
        print_error(failure)
        for connection in self.connections.values():
            with suppress(OSError):
                _send(connection, {"failure": failure.what})

    def _end_ranks(self, seconds: float) -> None:
        """End the ranks that still run, some seconds after a failure."""
        if self.is_refusal:
            seconds -= REFUSED_SECONDS
        if seconds > 0:
            for process in self.processes.values():
                process.send_signal(signal.SIGKILL if process.is_kept or seconds > END_SECONDS else signal.SIGTERM)


def _peer(connection: socket.socket) -> int:
    """Process at the other end of a connection."""
    if hasattr(socket, "SO_PEERCRED"):
        return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
    return int(struct.unpack("i", connection.getsockopt(0, 2, 4))[0])  # SOL_LOCAL and LOCAL_PEERPID of macOS


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def hold_folder(folder: Path) -> Lock:
    """Create the folder, empty it and lock it.

    Raises:
        OSError: the folder cannot be created, has files of others, or another watchdog uses it.
    """
    end = time.monotonic() + LOCK_SECONDS
    while True:
        with suppress(FileNotFoundError):  # the watchdog before has just removed the folder
            open_marked(folder)
            if lock := take_lock(folder / LOCK):
                for path in folder.iterdir():
                    if path.name != LOCK:
                        path.unlink()
                return lock
        if time.monotonic() > end:
            raise BlockingIOError(f"{folder} is in use by ranks of another job with the same id")
        time.sleep(POLL_SECONDS)


def main() -> None:
    """Watch the ranks of this host."""
    keep_output()
    folder, ranks, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for number in (*SIGNALS, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # schedulers signal all processes of a job; this one ends with the ranks
    try:
        hold_folder(folder)
    except OSError as error:
        sys.exit(f"weft: the watchdog of this host cannot start: {error}")
    try:
        NodeWatchdog(folder, ranks, world_size).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
