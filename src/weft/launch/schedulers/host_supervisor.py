"""Supervisor of the command of one host, started by ssh or mpirun.

    python -m weft.launch.schedulers.host_supervisor HOST COMMAND...

ssh without a terminal forwards no signals, and what it has started survives it. The supervisor therefore reads its standard
input: first the token of the job, then a line for each signal of the launching machine, with its number; 0 is a sign of life.
When the input ends, or no line arrives for a minute, the launching machine is lost: the command gets SIGTERM, so that it saves.

The output of the command is passed on line by line, each with the number of the host. It is read to its end even if nobody
takes it any more: a command that saves must not fail because of its output. Imports no torch.
"""

import ctypes
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from weft.launch.parent_death import PR_SET_PDEATHSIG
from weft.launch.rendezvous import TOKEN_VARIABLE

SILENCE_SECONDS = 60.0
"""Time without a sign of life after which the launching machine is lost."""
POLL_SECONDS = 0.2
MARK = b"\x1e"  # record separator: begins each line of a supervisor, as mpirun may join lines of several hosts
MAX_LINE = 4000  # longer lines are cut: a pipe that is ready takes 4096 bytes without blocking
STDIN, STDOUT = 0, 1


def main(arguments: Sequence[str]) -> int:
    """Run the command of a host, and return its exit code as a shell has it.

    Args:
        arguments: number of the host, from 0; command and its arguments.
    """
    keeper = os.fork()
    if keeper:
        # mpirun kills the process that it has started within a second; the keeper needs more time, and has its own session.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        return os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1])
    os.setsid()
    return _keep(arguments[0].encode(), arguments[1:])


def _keep(host: bytes, command: Sequence[str]) -> int:
    """Start the command, and pass on its output and the signals of the launching machine until it has ended."""
    lines = _Lines()
    token = lines.wait_for_one()
    if token is None:
        return 128 + signal.SIGTERM  # lost before the start
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {TOKEN_VARIABLE: token.decode("ascii", "replace"), "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        preexec_fn=_end_with_supervisor,
    )
    assert process.stdout is not None
    output, rest, heard, lost = process.stdout.fileno(), b"", time.monotonic(), False
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        selector.register(STDIN, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select(POLL_SECONDS)}
            if output in ready:
                data = os.read(output, MAX_LINE)
                if not data:
                    break
                *whole, rest = (rest + data).split(b"\n")
                if len(rest) > MAX_LINE:
                    whole, rest = [*whole, rest], b""
                _write(host, b" ", whole, 0 if lost else SILENCE_SECONDS)
            elif process.poll() is not None:  # its children may keep the output open
                break
            if STDIN in ready:
                numbers = lines.read()
                heard, ended = time.monotonic(), numbers is None
                for number in numbers or []:
                    _send(process, int(number))
                if ended:
                    selector.unregister(STDIN)
            else:
                ended = False
            if not lost and (ended or time.monotonic() > heard + SILENCE_SECONDS):
                lost = True
                _write(host, b" ", [b"weft: the launching machine is lost; the ranks finish their step and save"])
                process.send_signal(signal.SIGTERM)
    _write(host, b" ", [rest] if rest else [])
    code = process.wait()
    code = 128 - code if code < 0 else code
    _write(host, b"=", [str(code).encode()])
    return code


class _Lines:
    """Lines of the standard input."""

    def __init__(self) -> None:
        self.rest = b""

    def wait_for_one(self) -> bytes | None:
        """First line; None if the input ends before it."""
        while b"\n" not in self.rest:
            data = os.read(STDIN, 4096)
            if not data:
                return None
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\n")
        return line

    def read(self) -> list[bytes] | None:
        """Complete lines that have arrived; None at the end of the input."""
        data = os.read(STDIN, 4096)
        if not data:
            return None
        *whole, self.rest = (self.rest + data).split(b"\n")
        return whole


def _send(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to the command; SIGKILL to all that it has started. 0 is a sign of life."""
    if number == signal.SIGKILL:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
    elif number:
        process.send_signal(number)


def _write(host: bytes, kind: bytes, lines: Sequence[bytes], seconds: float = 1) -> None:
    """Write lines, each with one system call, so that they do not mix with those of other hosts.

    Lines that nobody takes within `seconds` are lost.
    """
    for line in (line.replace(MARK, b"") for line in lines):
        for start in range(0, max(1, len(line)), MAX_LINE):
            with suppress(OSError):  # the other end is closed
                if select.select([], [STDOUT], [], seconds)[1]:
                    os.write(STDOUT, MARK + host + kind + line[start : start + MAX_LINE] + b"\n")


def _end_with_supervisor() -> None:
    """Let the command end in order when its supervisor is killed."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
