"""Ranks that start at once: forks of a process that has imported what they need.

Importing torch, Transformers and the rest takes a rank some seconds of a core, at the start and again at every restart. A
forkserver imports once, in a process that computes nothing and has no threads, and forks a rank when the launcher asks for one. It
does so twice over, and the process between goes: the system gives the rank to the launcher, which becomes its parent as of any
process that it started.

    launcher          asks: arguments, environment, files     says go, waits for the rank as for its child
    forkserver           forks                                   forgets it
    (between)         forks, leaves
    rank              imports nothing, waits for the go, runs main

The forkserver itself is a fork of the launcher, where that has one thread when it asks: then the imports of the launcher serve
for ranks too. Elsewhere, and after it was killed, it is a new process.

A rank that the launcher does not know of, because the forkserver was killed before it could answer, gets no go, and ends.

Linux alone can do that; elsewhere ranks start as ordinary processes. So they do where they have accelerators, whose libraries
do not bear to be forked if an import has touched them.
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
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from weft.errors import RankFailure
from weft.launch.parent_death import LAUNCHER_VARIABLE, end_with_launcher

PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.02
PROCESS_NAME = "weft-forkserver"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class ForkServer:
    """The process, seen from the launcher. A context manager; ranks outlive it. Killed, it is started again."""

    def __init__(self, module: str, environment: Mapping[str, str], *, fork: bool = False):
        """
        Args:
            module: of the ranks; it has a function `main`, which `rank_main` runs.
            environment: of the process, whole. What libraries read when they are loaded counts here, but in a fork.
            fork: fork this process, if it has one thread. It must not have used threads before: OpenMP's do not bear it.
        """
        self.module, self.environment, self.fork = module, dict(environment), fork
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.wire: socket.socket | None = None

    def __enter__(self) -> "ForkServer":
        self._open(self.fork and len(os.listdir("/proc/self/task")) == 1)
        return self

    def _open(self, fork: bool) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self.process = self._fork(here, there) if fork else self._spawn(there)
        self.wire = here

    def _fork(self, here: socket.socket, there: socket.socket) -> "ForkedProcess":
        launcher = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        if child := os.fork():
            return ForkedProcess(child)
        try:
            here.close()
            os.setsid()
            for number in (
                signal.SIGINT,
                signal.SIGTERM,
                signal.SIGHUP,
                signal.SIGQUIT,
            ):  # the launcher's, in its own group
                signal.signal(number, signal.SIG_DFL)
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
            os.environ[LAUNCHER_VARIABLE] = str(launcher)
            gc.freeze()  # what the launcher has made is never looked at again, and its pages stay shared
            serve(self.module, there)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _spawn(self, there: socket.socket) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", "weft.launch.forkserver", self.module, str(there.fileno())],
            env={**self.environment, LAUNCHER_VARIABLE: str(os.getpid())},
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.wire is not None
        assert self.process is not None
        self.wire.close()  # it ends when nobody is left to ask
        if kind is not None:  # it may have been asked for a rank that nobody would wait for
            self.process.kill()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:  # in the middle of its imports
            self.process.kill()
            self.process.wait()

    def start(self, arguments: list[str], environment: Mapping[str, str], stdout: str, stderr: str) -> "ForkedProcess":
        """Start a rank; waits until the imports are done.

        Args:
            arguments: of the module.
            environment: on top of the forkserver's own.
            stdout: path of a file; empty for that of the launcher.
            stderr: the same.

        Raises:
            RankFailure: the forkserver has ended instead; it was killed, or the module cannot be imported, say.
        """
        assert self.process is not None
        if self.process.poll() is not None:  # since the last rank
            assert self.wire is not None
            self.wire.close()
            self._open(fork=False)  # the launcher has threads by now
        request = {"arguments": arguments, "environment": dict(environment), "stdout": stdout, "stderr": stderr}
        reading, writing = os.pipe()  # for the go
        own = _be_subreaper(True)
        try:
            assert self.wire is not None
            socket.send_fds(self.wire, [json.dumps(request).encode()], [reading])
            answer = self.wire.recv(64)
            if answer:
                os.write(writing, b"1")
        except ConnectionError:
            answer = b""
        finally:
            _be_subreaper(own)
            os.close(reading)
            os.close(writing)
        if not answer:
            raise self._failure()
        return ForkedProcess(int(answer))

    def _failure(self) -> RankFailure:
        assert self.process is not None
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        return RankFailure(
            f"the process that starts ranks of {self.module} {how}",
            where=f"process {self.process.pid}",
            fix=None if code < 0 else "its error is above",
        )


class ForkedProcess:
    """A child process, as `subprocess.Popen` shows one."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL, if it has not been waited for."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = math.inf) -> int:
        """Its exit code, when it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not, after so many seconds.
        """
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(POLL_SECONDS)
        return code


class Handler:
    """What torch's agent knows a rank by."""

    def __init__(self, proc: ForkedProcess, local_rank_id: int):
        self.proc, self.local_rank_id = proc, local_rank_id

    def close(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the rank, and to what it has started."""
        try:
            os.killpg(self.proc.pid, death_sig)
        except ProcessLookupError:  # it has not come to lead its group yet
            os.kill(self.proc.pid, death_sig)


class ForkServerContext(SubprocessContext):
    """torch's context of processes, which a forkserver starts."""

    def __init__(self, forkserver: ForkServer, **settings: Any):
        self.forkserver = forkserver
        super().__init__(entrypoint="", **settings)

    def _start(self) -> None:
        for number in range(self.nprocs):  # one by one: a signal between two ranks must find those that run
            rank = self.forkserver.start(
                list(self.args[number]), self.envs[number], self.stdouts[number], self.stderrs[number]
            )
            self.subprocess_handlers[number] = Handler(rank, number)  # type: ignore[assignment]


def _be_subreaper(wanted: bool) -> bool:
    """Whether orphans among this process's descendants become its children; what it was before."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    libc.prctl(PR_SET_CHILD_SUBREAPER + 1, ctypes.byref(before), 0, 0, 0)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    return bool(before.value)


# In the forkserver


def serve(module: str, wire: socket.socket) -> None:
    """Import a module, then fork a rank for each request, until the launcher has gone. In a rank it does not return."""
    from weft.launch.launcher import rank_main

    end_with_launcher()
    _name_this_process(PROCESS_NAME)
    main = importlib.import_module(module).main
    while True:
        request, received, _, _ = socket.recv_fds(wire, 2**20, 1)
        if not request:
            return
        (go,) = received
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            rank = os.fork()
            if not rank:
                os.close(reading)
                os.close(writing)
                wire.close()
                if not os.read(go, 1):  # it comes when this process is a child of the launcher
                    os._exit(1)
                os.close(go)
                end_with_launcher()
                _become(module, **json.loads(request))
                rank_main(main)
                os._exit(0)
            os.write(writing, str(rank).encode())
            os._exit(0)
        os.close(writing)
        os.close(go)
        os.waitpid(between, 0)  # the rank has its new parent
        wire.sendall(os.read(reading, 64))
        os.close(reading)


def _become(module: str, arguments: list[str], environment: dict[str, str], stdout: str, stderr: str) -> None:
    """Turn a fork of the forkserver into a rank."""
    os.setsid()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    for path, number in ((stdout, 1), (stderr, 2)):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, number)
            os.close(file)
    _name_this_process(f"weft-rank-{environment['RANK']}")
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))  # OpenMP has read its variable when it was loaded, in the launcher perhaps


def _name_this_process(name: str) -> None:
    Path("/proc/self/comm").write_text(name)


if __name__ == "__main__":
    serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
