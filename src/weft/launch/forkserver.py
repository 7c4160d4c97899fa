"""Forkserver: ranks start in milliseconds as forks of a process that has already imported their module.

Importing torch, Transformers and other libraries takes each rank some seconds of CPU time, at the start and at every restart. A
forkserver imports them once, in a process that computes nothing and has no threads. It forks a rank whenever the launcher
requests one. It forks twice and the intermediate process exits, so that the launcher becomes the parent of the rank:

    process        action
    launcher       requests a rank (arguments, environment, files); sends the start signal; waits for the rank as for its child
    forkserver     forks the intermediate process
    intermediate   forks the rank and exits
    rank           waits for the start signal and runs main, without further imports

If the launcher has only one thread, the forkserver is a fork of the launcher, so that ranks reuse the imports of the
launcher. If the launcher has more threads, or after the forkserver was killed, the forkserver is a new process.

If the forkserver is killed before it can report a rank to the launcher, the rank gets no start signal and ends.

The forkserver needs Linux; on other systems ranks start as ordinary processes. Ranks with accelerators also start as ordinary
processes, because the libraries of accelerators do not support fork once an import has initialized them.
"""

import ctypes
import gc
import importlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from weft.errors import RankFailure
from weft.launch.log import open_log
from weft.launch.parent_death import LAUNCHER_VARIABLE, end_with_launcher

PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.02
PROCESS_NAME = "weft-forkserver"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class ForkServer:
    """Handle of the forkserver process in the launcher; a context manager.

    Ranks outlive the forkserver. A forkserver that was killed is restarted for the next rank.
    """

    def __init__(self, module: str, environment: Mapping[str, str], *, fork: bool = False):
        """Create the handle; entering the context starts the process.

        Args:
            module: module of the ranks, with a function `main`, which `rank_main` runs.
            environment: full environment of the forkserver, including variables that libraries read when they are loaded.
                These variables have no effect in a fork of this process, which has loaded the libraries already.
            fork: fork this process if it is a plain command: one thread, and its own stdout and stderr. It must not have
                used OpenMP threads, which a fork loses.
        """
        self.module, self.environment, self.fork = module, dict(environment), fork
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.connection: socket.socket | None = None

    def __enter__(self) -> "ForkServer":
        self._open(self.fork and _can_be_forked())
        return self

    def _open(self, fork: bool) -> None:
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            self.process = self._fork(parent_end, child_end) if fork else self._spawn(child_end)
        self.connection = parent_end

    def _fork(self, parent_end: socket.socket, child_end: socket.socket) -> "ForkedProcess":
        launcher = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        # Signals wait for the end of the fork: an exception of a handler would be lost in a function that Python runs there.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if child := os.fork():
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            return ForkedProcess(child)
        try:
            parent_end.close()
            os.setsid()
            for number in SIGNALS:  # remove the handlers of the launcher
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            with open(os.devnull) as devnull:
                os.dup2(devnull.fileno(), 0)
            os.environ[LAUNCHER_VARIABLE] = str(launcher)
            gc.freeze()  # the garbage collector never touches the launcher's objects, so that their pages stay shared
            serve(self.module, child_end)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _spawn(self, child_end: socket.socket) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", "weft.launch.forkserver", self.module, str(child_end.fileno())],
            env={**self.environment, LAUNCHER_VARIABLE: str(os.getpid())},
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.connection is not None
        assert self.process is not None
        self.connection.close()
        # It holds nothing. After an exception a request may be pending, for a rank that nobody would wait for.
        self.process.kill()
        self.process.wait()

    def start(self, arguments: list[str], environment: Mapping[str, str], stdout: str, stderr: str) -> "ForkedProcess":
        """Start a rank. Waits until the imports are done.

        Args:
            arguments: command-line arguments of the module.
            environment: environment variables to add to those of the forkserver.
            stdout: path of the output file; empty: the stdout of the launcher.
            stderr: path of the error file; empty: the stderr of the launcher.

        Raises:
            RankFailure: the forkserver has ended, for example because the module cannot be imported.
        """
        assert self.process is not None
        if self.process.poll() is not None:  # since the last rank
            assert self.connection is not None
            self.connection.close()
            self._open(fork=False)  # the launcher may have threads now
        request = {"arguments": arguments, "environment": dict(environment), "stdout": stdout, "stderr": stderr}
        start_read, start_write = os.pipe()  # for the start signal
        was_subreaper = _set_subreaper(True)
        try:
            assert self.connection is not None
            socket.send_fds(self.connection, [json.dumps(request).encode()], [start_read])
            response = self.connection.recv(64)
            if response:
                os.write(start_write, b"1")
        except ConnectionError:
            response = b""
        finally:
            _set_subreaper(was_subreaper)
            os.close(start_read)
            os.close(start_write)
        if not response:
            raise self._failure()
        return ForkedProcess(int(response))

    def _failure(self) -> RankFailure:
        assert self.process is not None
        code = self.process.wait()
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return RankFailure(
            f"the forkserver of {self.module} {reason}",
            where=f"process {self.process.pid}",
            fix=None if code < 0 else "its error is above",
        )


def _can_be_forked() -> bool:
    """True if this process has one thread, and no notebook or test framework has replaced its stdout and stderr."""
    own_streams = sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
    return own_streams and len(os.listdir("/proc/self/task")) == 1


class ForkedProcess:
    """Forked child process, with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code of the process, negative for a signal; None while it is running."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = math.inf) -> int:
        """Wait for the end of the process; returns its exit code.

        Raises:
            subprocess.TimeoutExpired: the process is still running after `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(POLL_SECONDS)
        return code


class RankHandler:
    """Handle of a rank process, with the interface of torch's SubprocessHandler."""

    def __init__(self, proc: ForkedProcess, local_rank_id: int):
        self.proc, self.local_rank_id = proc, local_rank_id

    def close(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the rank and its child processes."""
        try:
            os.killpg(self.proc.pid, death_sig)
        except ProcessLookupError:  # the rank has not created its process group yet
            os.kill(self.proc.pid, death_sig)


class ForkServerContext(SubprocessContext):
    """torch's SubprocessContext with processes that a forkserver starts."""

    def __init__(self, forkserver: ForkServer, **settings: Any):
        self.forkserver = forkserver
        super().__init__(entrypoint="", **settings)

    def _start(self) -> None:
        # One by one: a signal between two starts must reach the ranks that have already started.
        for local_rank in range(self.nprocs):
            process = self.forkserver.start(
                list(self.args[local_rank]), self.envs[local_rank], self.stdouts[local_rank], self.stderrs[local_rank]
            )
            self.subprocess_handlers[local_rank] = RankHandler(process, local_rank)  # type: ignore[assignment]


def _set_subreaper(enabled: bool) -> bool:
    """Set whether orphaned descendants of this process become its children; returns the previous setting."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    libc.prctl(PR_SET_CHILD_SUBREAPER + 1, ctypes.byref(before), 0, 0, 0)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    return bool(before.value)


# In the forkserver process


def serve(module: str, connection: socket.socket) -> None:
    """Import a module, then fork a rank for each request, until the connection is closed. Does not return in a rank."""
    from weft.launch.rank_entry import rank_main

    end_with_launcher()
    _name_this_process(PROCESS_NAME)
    main = importlib.import_module(module).main
    while True:
        try:
            request, received, _, _ = socket.recv_fds(connection, 2**20, 1)
        except ConnectionError:  # closed by the launcher, which has not read the last response
            return
        if not request:
            return
        (start_signal,) = received
        read_end, write_end = os.pipe()
        intermediate = os.fork()
        if not intermediate:
            rank = os.fork()
            if not rank:
                os.close(read_end)
                os.close(write_end)
                connection.close()
                if not os.read(start_signal, 1):  # it arrives when this process is a child of the launcher
                    os._exit(1)
                os.close(start_signal)
                end_with_launcher()
                _set_up_rank(module, **json.loads(request))
                rank_main(main)
                os._exit(0)
            os.write(write_end, str(rank).encode())
            os._exit(0)
        os.close(write_end)
        os.close(start_signal)
        os.waitpid(intermediate, 0)  # after this the launcher is the parent of the rank
        with suppress(ConnectionError):  # closed by the launcher: the rank gets no start signal
            connection.sendall(os.read(read_end, 64))
        os.close(read_end)


def _set_up_rank(module: str, arguments: list[str], environment: dict[str, str], stdout: str, stderr: str) -> None:
    """Turn a fork of the forkserver into a rank."""
    os.setsid()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        if path:
            file = open_log(Path(path))
            os.dup2(file, descriptor)
            os.close(file)
    _name_this_process(f"weft-rank-{environment['RANK']}")
    if threads := environment.get("OMP_NUM_THREADS"):
        # OpenMP has read OMP_NUM_THREADS when it was loaded, before this rank was forked.
        torch.set_num_threads(int(threads))


def _name_this_process(name: str) -> None:
    Path("/proc/self/comm").write_text(name)


if __name__ == "__main__":
    serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
