"""Commands of Weft in forks of the test process: what a new process does, without its seconds of imports.

    done = weft("train", str(job), "--nproc-per-node", "2")     # a subprocess.CompletedProcess
    process = start_weft("train", str(job))                     # send_signal, poll, wait, communicate as subprocess.Popen

A fork has the imports of the test process, and its own session, environment and files. It has no handlers, filters, seeds and
open files of the test process. Tests of the imports, of the threads that end a process and of the installed command start new
processes.
"""

import atexit
import faulthandler
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

POLL_SECONDS = 0.005
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
IGNORED_WARNINGS = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
"""Classes of warnings that Python does not print by default."""


class ForkedCommand:
    """Child process that was forked from the test process, with the interface of `subprocess.Popen`."""

    def __init__(self, argv: list[str], stdout: IO[bytes], stderr: IO[bytes], child: Callable[[], int]):
        self.args, self.stdout, self.stderr = argv, stdout, stderr
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

    def wait(self, timeout: float = 240) -> int:
        """Wait for the end; kill the process and raise subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise subprocess.TimeoutExpired(self.args, timeout, read(self.stdout), read(self.stderr))
            time.sleep(POLL_SECONDS)
        return code

    def communicate(self, timeout: float = 240) -> tuple[str, str]:
        """Wait for the end; return stdout and stderr, which is "" where it goes to stdout."""
        self.wait(timeout)
        return read(self.stdout), "" if self.stderr is self.stdout else read(self.stderr)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, if it has not ended, and wait for its end."""
        self.send_signal(signal.SIGKILL)
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def output(self) -> str:
        """Stdout until now."""
        return read(self.stdout)


def read(file: IO[bytes]) -> str:
    """Text that a process has written into a file until now."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


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
    import weft.training.rank  # noqa: F401  # once for all forks
    from weft.cli import main

    return start_function(["weft", *map(str, argv)], main, cwd=cwd, env=env, merge=merge)


def _fork_fork_servers() -> None:
    """Let every fork server be a fork of this process, whose OpenMP has one thread.

    Commands that compute before they launch ranks start it as a new process, as a fork would lose threads of OpenMP.
    """
    from weft.launch import launcher
    from weft.launch.forkserver import ForkServer

    assert torch.get_num_threads() == 1
    launcher.ForkServer = partial(ForkServer, fork=True)  # type: ignore[misc, assignment]


def weft(
    *argv: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 240
) -> "subprocess.CompletedProcess[str]":
    """Run `weft ARGV` in a fork to its end; as `subprocess.run(..., capture_output=True, text=True)`."""
    return completed(start_weft(*argv, cwd=cwd, env=env), timeout)


def completed(process: ForkedCommand, timeout: float = 240) -> "subprocess.CompletedProcess[str]":
    """Exit code and output of a process, after its end."""
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
        _fork_fork_servers()
        function()
        return 0

    return ForkedCommand(argv, stdout, stderr, child)


def start_python(
    code: str, *argv: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> ForkedCommand:
    """Start `python -c CODE ARGV` in a fork; as `start_weft`."""
    run = partial(exec, compile(code, "<string>", "exec"), {"__name__": "__main__"})
    return start_function(["-c", *map(str, argv)], run, cwd=cwd, env=env)


def python(
    code: str, *argv: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 240
) -> "subprocess.CompletedProcess[str]":
    """Run `python -c CODE ARGV` in a fork to its end; as `weft`."""
    return completed(start_python(code, *argv, cwd=cwd, env=env), timeout)


def _become_command(argv: list[str], stdout: int, stderr: int, child: Callable[[], int]) -> None:
    """In the fork: remove what belongs to the test process, run, and end with the exit handlers of the command alone."""
    code = 70
    try:
        os.setsid()
        gc.freeze()  # objects of the test process are not collected, so that their pages stay shared
        faulthandler.disable()
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0)  # of pytest-timeout
        atexit._clear()
        with open(os.devnull) as devnull:
            os.dup2(devnull.fileno(), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115  # as PYTHONUNBUFFERED
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)  # noqa: SIM115
        logging.getLogger().handlers.clear()
        _warn_as_python_does()
        _seed_as_python_does()
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
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                code = code or 1
        os._exit(code & 0xFF)


def _warn_as_python_does() -> None:
    """Print warnings to stderr, which pytest collects, with the filters of a new process."""

    def print_warning(message: Any, category: Any, path: str, line: int, file: Any = None, text: Any = None) -> None:
        (file or sys.stderr).write(warnings.formatwarning(message, category, path, line, text))

    warnings.showwarning = print_warning
    warnings.resetwarnings()
    for category in IGNORED_WARNINGS:
        warnings.simplefilter("ignore", category)


def _seed_as_python_does() -> None:
    """Seed generators as a new process does: from the operating system, and torch with its default."""
    random.seed()
    np.random.seed()
    torch.manual_seed(67280421310721)
