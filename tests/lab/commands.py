"""Commands of Weft in forks of the test process: what a new process does, without its seconds of imports.

    done = weft("train", str(job), "--nproc-per-node", "2")     # a subprocess.CompletedProcess
    process = start_weft("train", str(job))                     # send_signal, poll, wait, communicate as subprocess.Popen

A fork has the imports of the test process, its own session, environment and files, and no handlers of the test process. Tests
about the imports themselves, about exit handlers and about the installed command start real processes.
"""

import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

POLL_SECONDS = 0.01


class ForkedCommand:
    """Child process that was forked from the test process; stdout and stderr are files."""

    def __init__(self, argv: list[str], stdout: IO[bytes], stderr: IO[bytes], child: Callable[[], int]):
        self.args, self._stdout, self._stderr = argv, stdout, stderr
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _become_command(argv, stdout.fileno(), stderr.fileno(), child)

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while the process is running."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 100) -> int:
        """Wait for the end; kill the process group and raise subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise subprocess.TimeoutExpired(self.args, timeout, self.read(self._stdout), self.read(self._stderr))
            time.sleep(POLL_SECONDS)
        return code

    def communicate(self, timeout: float = 100) -> tuple[str, str]:
        """Wait for the end; return stdout and stderr, which is "" where it goes to stdout."""
        self.wait(timeout)
        return self.read(self._stdout), "" if self._stderr is self._stdout else self.read(self._stderr)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and its process group."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def read(self, file: IO[bytes]) -> str:
        """Output until now."""
        size = os.fstat(file.fileno()).st_size
        return os.pread(file.fileno(), size, 0).decode(errors="replace")

    @property
    def output(self) -> str:
        """Stdout until now."""
        return self.read(self._stdout)


def start_weft(
    *argv: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, merge: bool = False
) -> ForkedCommand:
    """Start `weft ARGV` in a fork.

    Args:
        argv: arguments of the command.
        cwd: working directory; default: that of the test process.
        env: complete environment; default: that of the test process.
        merge: stderr goes to stdout.
    """
    from weft.cli import main

    return start_function(["weft", *map(str, argv)], main, cwd=cwd, env=env, merge=merge)


def weft(
    *argv: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 100
) -> "subprocess.CompletedProcess[str]":
    """Run `weft ARGV` in a fork to its end; as `subprocess.run(..., capture_output=True, text=True)`."""
    process = start_weft(*argv, cwd=cwd, env=env)
    stdout, stderr = process.communicate(timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def start_function(
    argv: list[str],
    function: Callable[[], Any],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    merge: bool = False,
) -> ForkedCommand:
    """Start a function without arguments in a fork, with `argv` as sys.argv; as `start_weft`."""
    stdout = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process
    stderr = stdout if merge else tempfile.TemporaryFile()  # noqa: SIM115

    def child() -> int:
        if cwd is not None:
            os.chdir(cwd)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        return int(function() or 0)

    return ForkedCommand(argv, stdout, stderr, child)


def _become_command(argv: list[str], stdout: int, stderr: int, child: Callable[[], int]) -> None:
    """In the fork: replace streams and signal handlers of the test process, run, and exit without its exit handlers."""
    code = 70
    try:
        os.setsid()
        gc.freeze()  # objects of the test process are not collected, so that their pages stay shared
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0)  # of pytest-timeout
        with open(os.devnull) as devnull:
            os.dup2(devnull.fileno(), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
        logging.getLogger().handlers.clear()  # those of pytest
        sys.argv = argv
        code = child()
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                code = code or 1
        os._exit(code & 0xFF)
