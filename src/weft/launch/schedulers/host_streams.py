"""Run of a command on all hosts, seen from the launching machine: output with prefixes, signals, signs of life, exit codes.

A connection is ssh to one host, or mpirun to all of them. Both pass their input to `host_supervisor`, and its output back.
"""

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from weft.launch.log import log
from weft.launch.schedulers.host_supervisor import MARK

SIGN_SECONDS = 5.0
"""Time between two signs of life; see `host_supervisor.SILENCE_SECONDS`."""
REPORT_SECONDS = 20.0
"""Time after the first failure in which the other hosts may end by themselves: they name a lost host within 16 s."""
AFTER_KILL_SECONDS = 10.0
POLL_SECONDS = 0.1
REFUSED, SSH_FAILED = 2, 255  # exit codes of input that is refused, and of ssh without a connection
RECORD = re.compile(re.escape(MARK) + rb"(\d+)([ =])(.*)", re.DOTALL)


@dataclass(frozen=True)
class Connection:
    """Command on the launching machine that starts supervisors, and connects to them."""

    argv: Sequence[str]
    hosts: Sequence[int]
    """Numbers of its hosts."""
    name: str
    """Prefix of lines of the command itself."""


class _Stream:
    """Process of a connection."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.rest = b""
        """Last line, as long as it is incomplete."""
        self.process = subprocess.Popen(
            connection.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which passes it on
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout

    def write(self, line: str) -> None:
        """Write a line to its supervisors."""
        with suppress(BrokenPipeError):  # the process has ended
            self.input.write(line.encode() + b"\n")

    def read(self) -> list[bytes] | None:
        """Lines that have arrived, at the end the incomplete one too; then None."""
        data = os.read(self.output.fileno(), 65536)
        if not data and not self.rest:
            return None
        *lines, self.rest = (self.rest + (data or b"\n")).split(b"\n")
        return lines


class HostStreams:
    """Run of a command on all hosts.

    Args:
        connections: connections that cover all hosts.
        names: name of each host, the prefix of its output.
        end_seconds: time that hosts have to save after SIGTERM, once another host has failed; then they are killed.
        restarts: True if the hosts that are left decide themselves whether they continue after the loss of a host.
    """

    def __init__(self, connections: Sequence[Connection], names: Sequence[str], end_seconds: float, restarts: bool):
        self.connections, self.names, self.end_seconds, self.restarts = connections, names, end_seconds, restarts
        self.codes: dict[int, int] = {}
        """Exit codes of the hosts that have ended, in the order of their ends."""
        self.signals: list[int] = []
        """Signals that this process has received."""
        self.deadlines: list[tuple[float, int]] = []
        """Times at which the hosts that are left get a signal, after a failure."""
        self.streams: list[_Stream] = []

    def run(self, token: str) -> int:
        """Start the command on all hosts, wait until it has ended everywhere, and return the exit code.

        It is that of the host that failed first, or 0. With restarts, it is 0 if host 0 has ended with 0.
        """
        with self._record_signals():
            try:
                for connection in self.connections:
                    self.streams.append(_Stream(connection))
                    self.streams[-1].write(token)
                self._loop()
            finally:  # the supervisors see the end of their input, and end the commands
                for stream in self.streams:
                    stream.process.kill()
                    stream.process.wait()
        failed = next(((host, code) for host, code in self.codes.items() if code), None)
        if failed is None or (self.restarts and self.codes.get(0) == 0):
            return 0
        host, code = failed
        if not self.signals:
            name = f" ({signal.Signals(code - 128).name})" if code - 128 in set(signal.Signals) else ""
            log(f"host {host} ({self.names[host]}) failed first: exit code {code}{name}")
        return code

    def _loop(self) -> None:
        sent, forwarded = time.monotonic(), 0
        with selectors.DefaultSelector() as selector:
            for stream in self.streams:
                selector.register(stream.output, selectors.EVENT_READ, stream)
            while selector.get_map():
                for key, _ in selector.select(POLL_SECONDS):
                    lines = key.data.read()
                    for line in lines or ():
                        self._take(key.data.connection.name, line)
                    if lines is None:
                        selector.unregister(key.fileobj)
                        self._end(key.data)
                if len(self.signals) > 2:
                    return log("stopping without waiting for the hosts")
                for number in self.signals[forwarded:]:
                    self._send(number)
                    forwarded += 1
                while self.deadlines and time.monotonic() > self.deadlines[0][0]:
                    _, number = self.deadlines.pop(0)
                    if not number:
                        return log("hosts that do not answer are left alone")
                    self._send(number)
                if time.monotonic() > sent + SIGN_SECONDS:
                    self._send(0)
                    sent = time.monotonic()

    def _take(self, name: str, line: bytes) -> None:
        """Print a line with its host, or note an exit code. mpirun may join lines of several hosts."""
        for part in re.split(rb"(?=" + re.escape(MARK) + rb")", line):
            record = RECORD.fullmatch(part)
            if record is None:
                if part.strip():
                    _print(name, part)
            elif record[2] == b"=":
                self._note(int(record[1]), int(record[3]))
            else:
                _print(self.names[int(record[1])], record[3])

    def _end(self, stream: _Stream) -> None:
        """Note an exit code for the hosts of a connection that has ended without that of their command."""
        code = stream.process.wait()
        lost = [host for host in stream.connection.hosts if host not in self.codes]
        if lost:
            names, program = ", ".join(self.names[host] for host in lost), stream.connection.argv[0]
            log(f"no connection to {names}: {program} ended with exit code {code}")
        for host in lost:
            self._note(host, 128 - code if code < 0 else code or 1)

    def _note(self, host: int, code: int) -> None:
        """Note an exit code. After the first failure, the other hosts get SIGTERM, and later SIGKILL."""
        self.codes[host] = code
        ends_all = not self.restarts or host == 0 or code == REFUSED
        if code and ends_all and not self.deadlines and not self.signals and len(self.codes) < len(self.names):
            wait = 0 if code in (REFUSED, SSH_FAILED) else REPORT_SECONDS
            end = time.monotonic() + wait
            kill = end + self.end_seconds
            self.deadlines = [(end, signal.SIGTERM), (kill, signal.SIGKILL), (kill + AFTER_KILL_SECONDS, 0)]

    def _send(self, number: int) -> None:
        """Send a signal to the commands of all hosts."""
        if number:
            left = [name for host, name in enumerate(self.names) if host not in self.codes]
            log(f"{signal.Signals(number).name} to {', '.join(left)}")
        for stream in self.streams:
            stream.write(str(number))

    @contextmanager
    def _record_signals(self) -> Iterator[None]:
        """Record SIGINT, SIGTERM and SIGHUP instead of ending this process."""

        def record(number: int, frame: FrameType | None) -> None:
            self.signals.append(number)

        before = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _print(name: str, line: bytes) -> None:
    print(f"{name}: {line.decode(errors='replace')}", flush=True)
